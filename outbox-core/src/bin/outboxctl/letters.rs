//! `dead-letters`.

use std::fmt::Write;

use outbox_core::operator::{DeadLetter, Operator, OperatorError, Really, Selection, Settled};
use serde_json::json;
use uuid::Uuid;

use crate::args::{LettersArgs, LettersFilter};
use crate::output::{Answer, Table, bad, counted, not_done, optional, printable, time, warning};

pub(crate) async fn list(operator: &Operator, filter: &LettersFilter) -> Result<Answer, OperatorError> {
    let letters = operator.dead_letters(&filter.selection()).await?;
    let text = if letters.is_empty() { "no dead letters\n".to_owned() } else { table(&letters) };
    Ok(Answer::new(&letters, text))
}

fn table(letters: &[DeadLetter]) -> String {
    let headers = ["dead letter", "consumer", "event", "type", "aggregate", "#", "since", "attempts", "reason"];
    let table = Table::of(headers, letters, |letter| {
        [
            letter.dead_letter_id.into(),
            (&letter.consumer).into(),
            optional(&letter.event_id),
            optional(&letter.event_type),
            optional(&letter.aggregate_id),
            optional(&letter.aggregate_sequence),
            time(&letter.dead_at),
            letter.attempts.into(),
            (&letter.reason).into(),
        ]
    });
    table.to_string()
}

pub(crate) async fn show(operator: &Operator, id: Uuid) -> Result<Answer, OperatorError> {
    let opened = operator.open_dead_letters(&Selection::of(vec![id])).await?;
    if opened.is_empty() {
        return Ok(Answer::new(&opened, bad(format!("there is no dead letter {id}"))).with_problem(true));
    }
    let mut text = String::new();
    for (letter, contents) in &opened {
        text += &table(std::slice::from_ref(letter));
        if let (Some(stream), Some(sequence)) = (&letter.stream, letter.stream_sequence) {
            let _ = writeln!(text, "\nmessage {sequence} of stream {}", printable(stream));
        }
        let _ = writeln!(text, "\n{}", printable(&letter.subject));
        let headers: Vec<(&String, &String)> = contents.headers.iter().collect();
        if !headers.is_empty() {
            text += &Table::of(["header", "value"], &headers, |(name, value)| [name.into(), value.into()]).to_string();
        }
        let _ = writeln!(text, "\n{}", printable(&contents.payload));
        if let Some(reason) = &contents.illegible {
            text += &warning(format!("{reason}: it can only be discarded"));
        }
    }
    Ok(Answer::new(&opened, text))
}

pub(crate) async fn retry(operator: &Operator, args: &LettersArgs) -> Result<Answer, OperatorError> {
    let settled = operator.retry(&args.these.selection(), args.yes.really()).await?;
    Ok(answer("retry", "handed back", &settled, args.yes.really()))
}

pub(crate) async fn discard(operator: &Operator, args: &LettersArgs) -> Result<Answer, OperatorError> {
    let settled = operator.discard(&args.these.selection(), args.yes.really()).await?;
    Ok(answer("discard", "discarded", &settled, args.yes.really()))
}

fn answer(what: &str, done: &str, settled: &Settled, really: Really) -> Answer {
    let how_many = settled.settled.len() as i64;
    let count = counted(how_many, "dead letter");
    let mut text = match really {
        Really::Yes => format!("{done} {count}\n"),
        Really::DryRun => format!("would {what} {count}\n"),
    };
    if !settled.settled.is_empty() {
        text += &table(&settled.settled);
    }
    for (aggregate, first, last) in &settled.given_up {
        text += &warning(format!("{aggregate}: events {first} to {last} never came, and are given up with it"));
    }
    for (letter, reason) in &settled.refused {
        text += &bad(format!("{}: {reason}", letter.dead_letter_id));
    }
    for id in &settled.unknown {
        text += &bad(format!("there is no dead letter {id}"));
    }
    if really == Really::DryRun {
        text += &not_done(how_many);
    }
    let json = json!({"what": format!("dead-letters {what}"), "dry_run": really == Really::DryRun, "result": settled});
    Answer::new(&json, text).with_problem(!settled.refused.is_empty() || !settled.unknown.is_empty())
}
