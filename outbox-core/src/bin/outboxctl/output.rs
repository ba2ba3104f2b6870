//! What is printed: tables for people, JSON for programs.

use std::fmt::{self, Display};
use std::io::{ErrorKind, Write};
use std::process::ExitCode;
use std::time::Duration;

use anstyle::{AnsiColor, Style};
use outbox_core::operator::Scope;
use serde::Serialize;
use serde_json::Value;

const BOLD: Style = Style::new().bold();
const DIM: Style = Style::new().dimmed();
const GOOD: Style = AnsiColor::Green.on_default();
const WARNING: Style = AnsiColor::Yellow.on_default();
const BAD: Style = AnsiColor::Red.on_default();

/// What a command found or did, in both forms.
#[derive(Debug, Default)]
pub(crate) struct Answer {
    json: Value,
    text: String,
    has_problem: bool,
}

impl Answer {
    /// `text` for people, `json` for programs.
    pub(crate) fn new(json: &impl Serialize, text: String) -> Self {
        // Nothing here has keys that are not strings, or a serialiser that fails.
        let json = serde_json::to_value(json).unwrap_or_default();
        Self { json, text, has_problem: false }
    }

    /// If so, the exit code says that there is a problem.
    pub(crate) fn with_problem(self, has_problem: bool) -> Self {
        Self { has_problem: self.has_problem || has_problem, ..self }
    }

    /// Prints it; without colours where nobody would see them.
    pub(crate) fn print(&self, as_json: bool) -> ExitCode {
        let mut out = anstream::stdout();
        let printed = if as_json { writeln!(out, "{:#}", self.json) } else { write!(out, "{}", self.text) };
        match printed.and_then(|()| out.flush()) {
            // Whoever read it has seen enough.
            Err(error) if error.kind() != ErrorKind::BrokenPipe => {
                eprintln!("outboxctl: the answer cannot be printed: {error}");
                ExitCode::FAILURE
            }
            _ => ExitCode::from(u8::from(self.has_problem)),
        }
    }
}

/// A line that says how it is.
pub(crate) fn good(line: impl Display) -> String {
    styled(GOOD, line)
}

/// A line that says what is wrong.
pub(crate) fn bad(line: impl Display) -> String {
    styled(BAD, line)
}

/// A line that should be read before anything is done.
pub(crate) fn warning(line: impl Display) -> String {
    styled(WARNING, line)
}

/// A heading.
pub(crate) fn heading(line: impl Display) -> String {
    styled(BOLD, line)
}

fn styled(style: Style, line: impl Display) -> String {
    format!("{style}{}{style:#}\n", printable(line))
}

/// What an event or an error says, so that it can neither break a table nor command the terminal.
pub(crate) fn printable(text: impl Display) -> String {
    text.to_string().chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
}

/// What stands at one place of a table.
#[derive(Debug, Clone)]
pub(crate) struct Cell {
    text: String,
    style: Style,
}

impl<T: Display> From<T> for Cell {
    fn from(value: T) -> Self {
        Self { text: printable(value), style: Style::new() }
    }
}

/// A cell for what may be missing.
pub(crate) fn optional(value: &Option<impl Display>) -> Cell {
    value.as_ref().map_or_else(|| Cell { text: "–".to_owned(), style: DIM }, Cell::from)
}

/// A time to the second, in UTC.
pub(crate) fn time(text: &str) -> Cell {
    let (to_the_second, _) = text.split_at_checked(19).unwrap_or((text, ""));
    if text.len() > 19 { Cell::from(format!("{to_the_second}Z")) } else { Cell::from(text) }
}

/// A time that may be missing.
pub(crate) fn optional_time(text: &Option<String>) -> Cell {
    text.as_deref().map_or_else(|| optional(&None::<String>), time)
}

/// A span to the second, or to the millisecond where it is shorter.
pub(crate) fn seconds(seconds: f64) -> String {
    let duration = Duration::from_secs_f64(seconds.max(0.0));
    let rounded = match duration.as_secs() {
        0 => Duration::from_millis(duration.as_millis() as u64),
        seconds => Duration::from_secs(seconds),
    };
    humantime::format_duration(rounded).to_string()
}

/// The state of an event.
pub(crate) fn state(state: &str) -> Cell {
    let style = match state {
        "failed" | "dead letter" => BAD,
        "blocked" | "scheduled" | "parked" => WARNING,
        "published" | "processed" => GOOD,
        _ => Style::new(),
    };
    Cell { style, ..Cell::from(state) }
}

/// Rows under headers, as wide as they need to be.
#[derive(Debug)]
pub(crate) struct Table<const N: usize> {
    headers: [&'static str; N],
    rows: Vec<[Cell; N]>,
}

impl<const N: usize> Table<N> {
    pub(crate) fn new(headers: [&'static str; N]) -> Self {
        Self { headers, rows: Vec::new() }
    }

    pub(crate) fn row(&mut self, cells: [Cell; N]) {
        self.rows.push(cells);
    }

    pub(crate) fn of<T>(headers: [&'static str; N], items: &[T], row: impl Fn(&T) -> [Cell; N]) -> Self {
        Self { headers, rows: items.iter().map(row).collect() }
    }
}

impl<const N: usize> Display for Table<N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let width = |column: usize| {
            let cells = self.rows.iter().map(|row| row[column].text.chars().count());
            cells.chain([self.headers[column].len()]).max().unwrap_or_default()
        };
        let header = self.headers.map(|header| Cell { text: header.to_uppercase(), style: BOLD });
        for row in std::iter::once(&header).chain(&self.rows) {
            for (column, Cell { text, style }) in row.iter().enumerate() {
                let is_last = column + 1 == N;
                let padding = if is_last { 0 } else { width(column) - text.chars().count() + 2 };
                write!(f, "{style}{text}{style:#}{:padding$}", "")?;
            }
            writeln!(f)?;
        }
        Ok(())
    }
}

/// Which events something is about.
pub(crate) fn scope(scope: &Scope) -> String {
    let mut table = Table::new(["type", "events", "aggregates", "oldest", "newest"]);
    for part in &scope.types {
        table.row([
            optional(&part.event_type),
            part.events.into(),
            part.aggregates.into(),
            optional_time(&part.oldest),
            optional_time(&part.newest),
        ]);
    }
    if scope.types.len() > 1 {
        let total = &scope.total;
        let (oldest, newest) = (optional_time(&total.oldest), optional_time(&total.newest));
        table.row(["all".into(), total.events.into(), total.aggregates.into(), oldest, newest]);
    }
    if scope.total.events == 0 { String::new() } else { table.to_string() }
}

/// The end of a dry run that found so much to do.
pub(crate) fn not_done(count: i64) -> String {
    match count {
        0 => "Nothing was changed, and there is nothing to do.\n".to_owned(),
        _ => warning("Nothing was changed. With --yes it is done."),
    }
}

/// "1 event", "2 events".
pub(crate) fn events(count: i64) -> String {
    counted(count, "event")
}

/// "1 dead letter", "2 dead letters".
pub(crate) fn counted(count: i64, what: &str) -> String {
    format!("{count} {what}{}", if count == 1 { "" } else { "s" })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_aligned_and_control_characters_are_not_printed() {
        let table = Table::of(["a", "state"], &[("x\u{1b}[2Jy\n", "failed"), ("longer than that", "ready")], |row| {
            [row.0.into(), state(row.1)]
        });
        let plain = anstream::adapter::strip_str(&table.to_string()).to_string();
        assert_eq!(plain, "A                 STATE\nx [2Jy            failed\nlonger than that  ready\n");
    }

    #[test]
    fn a_time_is_shown_to_the_second() {
        assert_eq!(time("2026-01-02T03:04:05.678901+00:00").text, "2026-01-02T03:04:05Z");
        assert_eq!(time("infinity").text, "infinity");
    }

    #[test]
    fn a_span_is_shown_to_the_second_or_to_the_millisecond_where_it_is_shorter() {
        assert_eq!([0.0421, 8.059, 3723.9].map(seconds), ["42ms", "8s", "1h 2m 3s"]);
    }
}
