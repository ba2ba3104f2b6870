//! What a terminal shows: colours, and a spinner while a step takes its time.
//!
//! Where standard output is not a terminal, or `NO_COLOR` is set, the same lines come without colour.

use std::io::IsTerminal;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use anstream::println;
use anstyle::{AnsiColor, Reset, Style};
use e2e_tests::on_progress;
use indicatif::{ProgressBar, ProgressStyle};

pub const BOLD: Style = Style::new().bold();
pub const DIM: Style = Style::new().dimmed();
pub const RED: Style = AnsiColor::Red.on_default().bold();
pub const GREEN: Style = AnsiColor::Green.on_default().bold();
pub const YELLOW: Style = AnsiColor::Yellow.on_default();
pub const BLUE: Style = AnsiColor::Blue.on_default();
pub const MAGENTA: Style = AnsiColor::Magenta.on_default();
pub const CYAN: Style = AnsiColor::Cyan.on_default().bold();
pub const PLAIN: Reset = Reset;

/// The spinner of the step that runs now.
static SPINNER: Mutex<Option<ProgressBar>> = Mutex::new(None);

/// Shows what the stack says about its long steps.
pub fn show_progress() {
    on_progress(|line| {
        let print = || println!("  {DIM}{line}{PLAIN}");
        match &*SPINNER.lock().expect("nothing panics under this lock") {
            Some(spinner) => spinner.suspend(print),
            None => print(),
        }
    });
}

/// Shows that `work` is being done, and how long it took.
pub async fn step<T>(title: &str, work: impl Future<Output = anyhow::Result<T>>) -> anyhow::Result<T> {
    step_of(1, 0, title, work).await
}

/// The same for one step after the other, with a bar of how many are done.
pub async fn step_of<T>(
    all: usize,
    done: usize,
    title: &str,
    work: impl Future<Output = anyhow::Result<T>>,
) -> anyhow::Result<T> {
    let began = Instant::now();
    let spinner = std::io::stdout().is_terminal().then(|| spinner(all, done, title));
    if spinner.is_none() {
        println!("… {title}");
    }
    set(spinner);
    let result = work.await;
    set(None);
    if result.is_ok() {
        println!("{GREEN}✓{PLAIN} {title} {DIM}{:.1} s{PLAIN}", began.elapsed().as_secs_f32());
    }
    result
}

fn spinner(all: usize, done: usize, title: &str) -> ProgressBar {
    let bar = if all > 1 { "{bar:26.cyan/dim} {pos}/{len} " } else { "" };
    let template = format!("{{spinner:.cyan}} {bar}{{msg}} {{elapsed:.dim}}");
    let style = ProgressStyle::with_template(&template).expect("the template is valid");
    let spinner = ProgressBar::new(all as u64).with_style(style).with_message(title.to_owned());
    spinner.set_position(done as u64);
    spinner.enable_steady_tick(Duration::from_millis(80));
    spinner
}

fn set(spinner: Option<ProgressBar>) {
    let before = std::mem::replace(&mut *SPINNER.lock().expect("nothing panics under this lock"), spinner);
    if let Some(before) = before {
        before.finish_and_clear();
    }
}
