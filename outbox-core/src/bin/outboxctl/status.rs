//! `status`.

use std::fmt::Write;

use outbox_core::Broker;
use outbox_core::operator::{
    ConsumerStatus, Operator, OperatorError, Status, StreamStatus, await_connection, consumers_named, stream_status,
};
use serde::Serialize;

use crate::output::{Answer, Table, bad, counted, events, good, heading, optional, seconds, state, time, warning};

/// An event that should be on its way, and has been waiting for so long, is a problem; so is a consumer that
/// has not moved for so long, and does not have everything.
const LONG_SECONDS: f64 = 60.0;

#[derive(Debug, Serialize)]
struct Everything {
    #[serde(flatten)]
    status: Status,
    broker: BrokerStatus,
    /// What needs an operator.
    problems: Vec<String>,
}

/// What the broker says, or why it says nothing.
#[derive(Debug, Default, Serialize)]
struct BrokerStatus {
    stream: Option<StreamStatus>,
    /// The service's own consumers, of others' streams.
    consumes: Vec<ConsumerStatus>,
    unknown: Vec<String>,
}

impl BrokerStatus {
    /// Those of the service's stream, and its own.
    fn consumers(&self) -> impl Iterator<Item = &ConsumerStatus> {
        self.stream.iter().flat_map(|stream| &stream.consumers).chain(&self.consumes)
    }
}

pub(crate) async fn status(operator: &Operator, broker: &Broker) -> Result<Answer, OperatorError> {
    let status = operator.status().await?;
    let broker = ask(broker, &status).await;
    let problems = problems(&status, &broker);
    let has_problem = !problems.is_empty();
    let everything = Everything { status, broker, problems };
    Ok(Answer::new(&everything, describe(&everything)).with_problem(has_problem))
}

async fn ask(broker: &Broker, status: &Status) -> BrokerStatus {
    let mut answer = BrokerStatus::default();
    if let Err(error) = await_connection(broker).await {
        answer.unknown.push(error.to_string());
        return answer;
    }
    let (stream, consumes) =
        futures::join!(stream_status(broker, &status.stream), consumers_named(broker, &status.service));
    match stream {
        Ok(stream) => answer.stream = Some(stream),
        Err(error) => answer.unknown.push(error.to_string()),
    }
    match consumes {
        Ok(consumers) => answer.consumes = consumers,
        Err(error) => answer.unknown.push(format!("what {} consumes: {error}", status.service)),
    }
    answer
}

fn problems(status: &Status, broker: &BrokerStatus) -> Vec<String> {
    let mut problems = broker.unknown.clone();
    let count = |state: &str| status.states.get(state).copied().unwrap_or_default();
    for state in ["failed", "blocked"] {
        if count(state) > 0 {
            problems.push(format!("{} {state}: outboxctl list --state {state}", events(count(state))));
        }
    }
    if let Some(age) = status.oldest_waiting_seconds.filter(|age| *age > LONG_SECONDS) {
        problems.push(format!("an event has been waiting to be published for {}", seconds(age)));
    }
    for lease in status.leases.iter().filter(|lease| lease.expired > 0) {
        let leases = counted(lease.expired, "lease");
        problems.push(format!("{} let {leases} run out and nobody took over", lease.worker));
    }
    problems.extend(broker.consumers().filter_map(stands_still));
    if status.dead_letters > 0 {
        let letters = counted(status.dead_letters, "dead letter");
        problems.push(format!("{letters}: outboxctl dead-letters list"));
    }
    problems
}

fn stands_still(consumer: &ConsumerStatus) -> Option<String> {
    let ConsumerStatus { name, stream, idle_seconds, .. } = consumer;
    let behind = (consumer.pending + consumer.ack_pending) as i64;
    let is_problem = behind > 0 && *idle_seconds > LONG_SECONDS;
    let behind = counted(behind, "message");
    is_problem
        .then(|| format!("{name} is {behind} of {stream} behind, and has not moved for {}", seconds(*idle_seconds)))
}

fn describe(everything: &Everything) -> String {
    let Everything { status, broker, problems } = everything;
    let mut text = heading(format!("{} → stream {}", status.service, status.stream));
    let rate = |count: i64| format!("{:.1}/s", count as f64 / 60.0);
    let _ = writeln!(
        text,
        "last minute: appended {}, published {}, processed {}",
        rate(status.appended_last_minute),
        rate(status.published_last_minute),
        rate(status.processed_last_minute),
    );
    match status.oldest_unpublished_seconds {
        None => text += "everything is published\n",
        Some(age) => {
            let _ = writeln!(text, "the oldest unpublished event is {} old", seconds(age));
            let mut table = Table::new(["state", "events"]);
            for (name, count) in &status.states {
                table.row([state(name), (*count).into()]);
            }
            let _ = write!(text, "\n{table}");
        }
    }
    if !status.leases.is_empty() {
        let table = Table::of(["worker", "leased", "expired", "seconds left"], &status.leases, |lease| {
            let left = format!("{:.1}", lease.seconds_left);
            [(&lease.worker).into(), lease.events.into(), lease.expired.into(), left.into()]
        });
        let _ = write!(text, "\n{table}");
    }
    if !status.blocked.is_empty() {
        let headers = ["blocked aggregate", "failed event", "type", "since", "behind it", "error"];
        let table = Table::of(headers, &status.blocked, |blocked| {
            [
                format!("{} {}", blocked.aggregate_type, blocked.aggregate_id).into(),
                blocked.failed_event_id.into(),
                (&blocked.event_type).into(),
                time(&blocked.failed_at),
                blocked.followers.into(),
                optional(&blocked.last_error),
            ]
        });
        let _ = write!(text, "\n{table}");
    }
    text += &describe_broker(broker);
    if !status.parked.is_empty() {
        let table = Table::of(["consumer", "parked for", "events", "due", "oldest"], &status.parked, |parked| {
            let oldest = seconds(parked.oldest_seconds);
            [(&parked.consumer).into(), (&parked.reason).into(), parked.events.into(), parked.due.into(), oldest.into()]
        });
        let _ = write!(text, "\n{table}");
    }
    if let Some(old) = &status.old_transaction {
        let (age, user) = (seconds(old.age_seconds), &old.database_user);
        text.push('\n');
        text += &warning(format!(
            "clean-up is held back by a transaction of {age}: process {} of {user} ({}, {}), {} transactions since",
            old.pid, old.application, old.state, old.transactions_since
        ));
    }
    text.push('\n');
    match problems.as_slice() {
        [] => text += &good("no problem"),
        problems => problems.iter().for_each(|problem| text += &bad(problem)),
    }
    text
}

fn describe_broker(broker: &BrokerStatus) -> String {
    let mut text = String::new();
    if let Some(stream) = &broker.stream {
        let _ = writeln!(
            text,
            "\nstream {}: {} messages, {} bytes, {} to {}",
            stream.name, stream.messages, stream.bytes, stream.first_sequence, stream.last_sequence
        );
    }
    let consumers: Vec<&ConsumerStatus> = broker.consumers().collect();
    if !consumers.is_empty() {
        let headers = ["stream", "consumer", "pending", "not acknowledged", "redelivered"];
        let table = Table::of(headers, &consumers, |consumer| {
            [
                (&consumer.stream).into(),
                (&consumer.name).into(),
                consumer.pending.into(),
                consumer.ack_pending.into(),
                consumer.redelivered.into(),
            ]
        });
        let _ = write!(text, "{table}");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_consumer_that_has_not_moved_for_a_minute_is_a_problem_only_where_it_is_behind() {
        let consumer = |pending, ack_pending, idle_seconds| ConsumerStatus {
            stream: "ORDERS".to_owned(),
            name: "payment-service".to_owned(),
            pending,
            ack_pending,
            redelivered: 0,
            delivered_up_to: 9,
            acknowledged_up_to: 9,
            idle_seconds,
        };
        assert_eq!(stands_still(&consumer(0, 0, 3600.0)), None, "it has everything");
        assert_eq!(stands_still(&consumer(1000, 256, 1.0)), None, "it moves");
        let line = "payment-service is 3 messages of ORDERS behind, and has not moved for 2m";
        assert_eq!(stands_still(&consumer(2, 1, 120.0)).as_deref(), Some(line));
    }
}
