//! Everything is broken at random, from a seed. `cargo dev chaos` does the same for longer.

use std::time::Duration;

use e2e_tests::run_nemesis;

const LENGTH: Duration = Duration::from_secs(10);

async fn the_promise_is_kept_under(seed: u64) {
    let report = run_nemesis(seed, LENGTH).await.unwrap();
    println!("{report}");
    assert!(report.findings.is_empty(), "{report}");
    assert!(report.orders > 0);
}

#[tokio::test]
async fn whatever_breaks_nothing_is_lost_and_nothing_is_doubled() {
    // This one holds twelve kinds of faults, and a stream that soon forgets what it has.
    the_promise_is_kept_under(506).await;
}

#[tokio::test]
async fn whatever_breaks_at_times_never_tried_before_nothing_is_lost_or_doubled() {
    the_promise_is_kept_under(fastrand::u64(..1_000_000)).await;
}
