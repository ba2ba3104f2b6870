//! Places where a test can make the process die, to see what its death leaves behind.
//!
//! They exist in builds with the feature `crash-points` only: elsewhere `crash_point!` is nothing.
//! With `CRASH_AT=relay.after_ack` the process aborts when it comes there for the first time, with
//! `CRASH_AT=relay.after_ack:5` for the fifth. With `CRASH_AT=relay.after_ack:5:panic` it panics instead, and
//! with `CRASH_AT=relay.after_ack:5:freeze` it is stopped there, until it gets a SIGCONT.

/// Aborts the process here if `CRASH_AT` says so; nothing without the feature `crash-points`.
#[macro_export]
#[cfg(feature = "crash-points")]
macro_rules! crash_point {
    ($name:literal) => {
        $crate::crash::reached($name)
    };
}

/// Aborts the process here if `CRASH_AT` says so; nothing without the feature `crash-points`.
#[macro_export]
#[cfg(not(feature = "crash-points"))]
macro_rules! crash_point {
    ($name:literal) => {};
}

/// For `crash_point!`.
#[cfg(feature = "crash-points")]
pub fn reached(name: &str) {
    use std::sync::LazyLock;
    use std::sync::atomic::{AtomicU32, Ordering};

    static CRASH_AT: LazyLock<Option<(String, u32, String)>> = LazyLock::new(|| {
        let at = std::env::var("CRASH_AT").ok()?;
        let mut parts = at.split(':');
        let point = parts.next()?.to_owned();
        let time = parts.next().and_then(|time| time.parse().ok()).unwrap_or(1);
        Some((point, time, parts.next().unwrap_or("abort").to_owned()))
    });
    static TIMES: AtomicU32 = AtomicU32::new(0);
    if let Some((point, time, how)) = &*CRASH_AT
        && point == name
        && TIMES.fetch_add(1, Ordering::SeqCst) + 1 == *time
    {
        match how.as_str() {
            "panic" => panic!("told to panic at {name}"),
            "freeze" => {
                let stop = std::process::Command::new("kill").args(["-STOP", &std::process::id().to_string()]).status();
                assert!(stop.is_ok_and(|status| status.success()), "cannot be frozen at {name}");
                // The kernel gives the signal to one thread, and this one may run on until that has been
                // scheduled: far enough to do what the freeze is to come before.
                std::thread::sleep(std::time::Duration::from_secs(1));
            }
            _ => std::process::abort(),
        }
    }
}
