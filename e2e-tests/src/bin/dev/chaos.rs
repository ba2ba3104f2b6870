//! `cargo dev chaos`: a long run of the nemesis.

use std::time::Duration;

use anstream::println;
use anyhow::ensure;
use e2e_tests::run_nemesis;

use crate::screen::{GREEN, PLAIN, RED};

/// Runs the nemesis of this seed, or of one drawn now, for this long, and shows its report. Fails
/// where the promise was broken.
pub async fn chaos(seed: Option<u64>, length: Duration) -> anyhow::Result<()> {
    // As short as people like to copy it.
    let seed = seed.unwrap_or_else(|| fastrand::u64(..1_000_000));
    let report = run_nemesis(seed, length).await?;
    let (color, mark) = if report.findings.is_empty() { (GREEN, '✓') } else { (RED, '✗') };
    println!("\n{report}\n\n{color}{mark} nemesis of seed {seed}{PLAIN}");
    ensure!(report.findings.is_empty(), "the promise was broken");
    Ok(())
}
