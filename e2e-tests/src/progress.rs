//! Long steps say what they are doing.

use std::io::Write;
use std::sync::OnceLock;

type Listener = Box<dyn Fn(&str) + Send + Sync>;

static LISTENER: OnceLock<Listener> = OnceLock::new();

/// Gives every line about a long step to `listener`, instead of to standard error.
pub fn on_progress(listener: impl Fn(&str) + Send + Sync + 'static) {
    // Whoever came first keeps listening.
    let _ = LISTENER.set(Box::new(listener));
}

pub(crate) fn say(line: &str) {
    match LISTENER.get() {
        Some(listener) => listener(line),
        // Not eprintln: the test harness would hold the line back until the test has failed.
        None => drop(writeln!(std::io::stderr(), "{line}")),
    }
}
