//! The workspace's programs, built once per process.

use std::path::PathBuf;

use anyhow::{Context, ensure};
use tokio::process::Command;
use tokio::sync::{Mutex, OnceCell};

use crate::place::{build_folder, stack_folder, target_folder};
use crate::progress::say;

const PROGRAMS: [&str; 4] = ["order-service", "payment-service", "outbox-relay", "outboxctl"];

/// The workspace's root folder.
pub fn workspace() -> PathBuf {
    let package = env!("CARGO_MANIFEST_DIR");
    PathBuf::from(package).join("..").canonicalize().expect("the workspace is where it was built")
}

/// The path of one of the workspace's programs; the first call builds them all.
pub async fn program(name: &str) -> anyhow::Result<PathBuf> {
    static FOLDER: OnceCell<PathBuf> = OnceCell::const_new();
    Ok(FOLDER.get_or_try_init(|| build("programs", &[])).await?.join(name))
}

/// The path of a program that dies at the crash point that `CRASH_AT` names.
pub async fn program_with_crash_points(name: &str) -> anyhow::Result<PathBuf> {
    static FOLDER: OnceCell<PathBuf> = OnceCell::const_new();
    const FEATURES: &str = "outbox-core/crash-points,order-service/crash-points,payment-service/crash-points";
    let folder = FOLDER.get_or_try_init(|| build("programs with crash points", &["--features", FEATURES]));
    Ok(folder.await?.join(name))
}

/// Builds with the profile of the program that runs now, and copies the programs to a folder of their
/// own: the next build puts others into their place.
async fn build(what: &str, more: &[&str]) -> anyhow::Result<PathBuf> {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::const_new(());
    let _turn = ONE_AT_A_TIME.lock().await;
    say(&format!("building the {what}"));
    let folder = build_folder()?;
    let profile = match folder.file_name().and_then(|name| name.to_str()).context("a build folder has a name")? {
        "debug" => "dev",
        other => other,
    };
    let mut build = cargo();
    build.args(["build", "--workspace", "--bins", "--profile", profile, "--target-dir"]).arg(target_folder()?);
    let status = build.args(more).current_dir(workspace()).status().await.context("running cargo")?;
    ensure!(status.success(), "the {what} do not build");
    let copies = stack_folder()?.join(what.replace(' ', "-")).join(profile);
    std::fs::create_dir_all(&copies)?;
    for program in PROGRAMS {
        // Under another name first, so that one that runs is not written over.
        let new = copies.join(format!("{program}.{}", std::process::id()));
        std::fs::copy(folder.join(program), &new).with_context(|| format!("copying {program}"))?;
        std::fs::rename(new, copies.join(program))?;
    }
    Ok(copies)
}

/// A cargo that is not told that another one runs us: build scripts look at the variables that cargo
/// sets for what it runs, and would build half of the dependencies again.
pub fn cargo() -> Command {
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or("cargo".into()));
    cargo.kill_on_drop(true);
    for (variable, _) in std::env::vars_os() {
        let name = variable.to_string_lossy();
        if name.starts_with("CARGO_PKG_") || name.starts_with("CARGO_MANIFEST_") {
            cargo.env_remove(&variable);
        }
    }
    cargo
}
