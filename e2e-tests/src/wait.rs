//! Waiting for a state: look again and again until it is there or a deadline has passed.

use std::fmt::Debug;
use std::time::Duration;

use tokio::time::{Instant, sleep, timeout_at};

const PAUSE: Duration = Duration::from_millis(20);

/// Calls `look` until it returns `Ok`, and fails after `deadline` with `what` was awaited and what
/// `look` saw last.
pub async fn wait_until<T, Seen: Debug>(
    deadline: Duration,
    what: &str,
    mut look: impl AsyncFnMut() -> Result<T, Seen>,
) -> anyhow::Result<T> {
    let end = Instant::now() + deadline;
    let mut last_seen = None;
    while Instant::now() < end {
        match timeout_at(end, look()).await {
            Ok(Ok(found)) => return Ok(found),
            Ok(Err(seen)) => last_seen = Some(seen),
            Err(_) => break,
        }
        sleep(PAUSE).await;
    }
    match last_seen {
        Some(seen) => anyhow::bail!("{what}: not within {deadline:?}; last seen: {seen:?}"),
        None => anyhow::bail!("{what}: not within {deadline:?}; nothing was seen"),
    }
}

/// [`wait_until`] for tests: panics where that fails.
pub async fn eventually<T, Seen: Debug>(
    deadline: Duration,
    what: &str,
    look: impl AsyncFnMut() -> Result<T, Seen>,
) -> T {
    match wait_until(deadline, what, look).await {
        Ok(found) => found,
        Err(reason) => panic!("{reason}"),
    }
}
