//! `list` and `show`.

use std::fmt::Write;

use outbox_core::Broker;
use outbox_core::operator::{
    ConsumerStatus, Copy, EventRow, Filter, Operator, OperatorError, Shown, await_connection, first_copy, stream_status,
};
use serde::Serialize;
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;
use uuid::Uuid;

use crate::args::ListArgs;
use crate::output::{Answer, Table, bad, heading, optional, optional_time, printable, state, time as shown_time};

pub(crate) async fn list(operator: &Operator, args: &ListArgs) -> Result<Answer, OperatorError> {
    let (since, until) = args.range.resolve(operator).await?;
    let filter = Filter {
        state: args.state,
        event_type: args.event_type.clone(),
        aggregate: args.aggregate,
        since,
        until,
        error: args.error.clone(),
        limit: args.limit.into(),
    };
    let events = operator.list(&filter).await?;
    let mut text = if events.is_empty() { "no such event\n".to_owned() } else { table(&events) };
    if events.len() == args.limit as usize {
        let _ = writeln!(text, "the newest {}; there may be more (--limit)", args.limit);
    }
    Ok(Answer::new(&events, text))
}

fn table(events: &[EventRow]) -> String {
    let headers = ["event", "type", "aggregate", "#", "state", "appended", "attempts", "next attempt", "error"];
    let table = Table::of(headers, events, |event| {
        let waits = event.published_at.is_none() && event.failed_at.is_none();
        let next_attempt = waits.then(|| event.next_attempt_at.clone());
        [
            event.event_id.into(),
            (&event.event_type).into(),
            event.aggregate_id.into(),
            event.aggregate_sequence.into(),
            state(&event.state),
            shown_time(&event.created_at),
            event.attempts.into(),
            optional_time(&next_attempt),
            optional(&event.last_error),
        ]
    });
    table.to_string()
}

/// An event's way, from both databases and the broker.
#[derive(Debug, Serialize)]
struct Path {
    databases: Vec<Shown>,
    /// The first message of each published event, and which consumers have it.
    messages: Vec<Found>,
    /// Why the broker was not asked.
    unknown: Option<String>,
}

#[derive(Debug, Serialize)]
struct Found {
    event_id: Uuid,
    message: Option<Copy>,
    consumers: Vec<Delivered>,
}

#[derive(Debug, Serialize)]
struct Delivered {
    consumer: String,
    state: &'static str,
}

pub(crate) async fn show(
    operator: &Operator,
    peer: Option<&Operator>,
    broker: &Broker,
    subject: &str,
) -> Result<Answer, OperatorError> {
    let operators: Vec<&Operator> = [operator].into_iter().chain(peer).collect();
    let mut ids = Vec::new();
    for operator in &operators {
        ids.extend(operator.find(subject).await?);
    }
    let mut path = Path { databases: Vec::new(), messages: Vec::new(), unknown: None };
    for operator in &operators {
        let shown = operator.show(subject, &ids).await?;
        if let Err(error) = find_messages(operator, broker, &shown.outbox, &mut path.messages).await {
            path.unknown = Some(error.to_string());
        }
        path.databases.push(shown);
    }
    if path.databases.iter().all(Shown::is_empty) {
        return Ok(Answer::new(&path, bad(format!("nothing is known of {subject}"))).with_problem(true));
    }
    Ok(Answer::new(&path, describe(&path)))
}

async fn find_messages(
    operator: &Operator,
    broker: &Broker,
    events: &[EventRow],
    found: &mut Vec<Found>,
) -> Result<(), OperatorError> {
    if events.is_empty() {
        return Ok(());
    }
    await_connection(broker).await?;
    let name = operator.source().await?;
    let consumers = stream_status(broker, &name.name).await?.consumers;
    for event in events {
        let published_at = event.published_at.as_deref().and_then(|time| OffsetDateTime::parse(time, &Rfc3339).ok());
        let Some(published_at) = published_at else { continue };
        let message = first_copy(broker, &name, event.event_id, &event.event_type, published_at).await?;
        let consumers = message.iter().flat_map(|message| delivered(message.sequence, &consumers)).collect();
        found.push(Found { event_id: event.event_id, message, consumers });
    }
    Ok(())
}

fn delivered(sequence: u64, consumers: &[ConsumerStatus]) -> Vec<Delivered> {
    let state = |consumer: &ConsumerStatus| {
        if consumer.acknowledged_up_to >= sequence {
            "acknowledged"
        } else if consumer.delivered_up_to >= sequence {
            "delivered"
        } else {
            "pending"
        }
    };
    consumers.iter().map(|consumer| Delivered { consumer: consumer.name.clone(), state: state(consumer) }).collect()
}

fn describe(path: &Path) -> String {
    let mut text = String::new();
    for shown in path.databases.iter().filter(|shown| !shown.is_empty()) {
        if !shown.outbox.is_empty() {
            text += &heading(format!("outbox of {}", shown.service));
            text += &table(&shown.outbox);
            for event in &shown.outbox {
                text += &describe_event(event, path);
            }
            text.push('\n');
        }
        if !shown.inbox.is_empty() || !shown.sequences.is_empty() {
            text += &describe_inbox(shown);
        }
    }
    if let Some(reason) = &path.unknown {
        text += &bad(reason);
    }
    text
}

fn describe_event(event: &EventRow, path: &Path) -> String {
    let mut text = String::new();
    let _ = writeln!(text, "\n{} {}", event.event_id, printable(&event.event_type));
    if let Some(correlation_id) = &event.correlation_id {
        let _ = writeln!(text, "  correlation id  {}", printable(correlation_id));
    }
    if let Some(payload) = &event.payload {
        let _ = writeln!(text, "  payload         {}", printable(payload));
    }
    if let (Some(worker), Some(until)) = (&event.locked_by, &event.lock_until) {
        let _ = writeln!(text, "  leased          by {} until {until}", printable(worker));
    }
    if let Some(published_at) = &event.published_at {
        let _ = writeln!(text, "  published       {published_at}");
    }
    for found in path.messages.iter().filter(|found| found.event_id == event.event_id) {
        match &found.message {
            Some(copy) => {
                let _ =
                    writeln!(text, "  message         {} {}, stored {}", copy.stream, copy.sequence, copy.stored_at);
            }
            None => text += "  message         no longer in the stream\n",
        }
        for Delivered { consumer, state } in &found.consumers {
            let _ = writeln!(text, "  {consumer:<15} {state}");
        }
    }
    text
}

fn describe_inbox(shown: &Shown) -> String {
    let mut text = heading(format!("inbox of {}", shown.service));
    if !shown.inbox.is_empty() {
        let headers = ["event", "type", "aggregate", "#", "state", "since", "attempts", "reason"];
        let table = Table::of(headers, &shown.inbox, |record| {
            [
                optional(&record.event_id),
                optional(&record.event_type),
                optional(&record.aggregate_id),
                optional(&record.aggregate_sequence),
                state(&record.state),
                shown_time(&record.at),
                optional(&record.attempts),
                optional(&record.reason),
            ]
        });
        text += &table.to_string();
    }
    for sequence in &shown.sequences {
        let (aggregate, last) = (sequence.aggregate_id, sequence.last_sequence);
        let _ = writeln!(text, "{} {aggregate}: event {last} was the last that took effect", sequence.source);
    }
    text.push('\n');
    text
}
