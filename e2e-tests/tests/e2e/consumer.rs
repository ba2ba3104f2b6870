//! The consumer: one effect for each event, in the order of its aggregate, whatever is delivered.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use e2e_tests::{Nats, Postgres, eventually};
use futures::future::join_all;
use outbox_core::{
    AggregateVersion, Consumer, Delivery, Envelope, HandleError, Handler, Health, Incoming, MESSAGE_ID, Message,
    StreamName, Subscription, WireError,
};
use serde::Deserialize;
use serde_json::{Value, json};
use sqlx::{PgConnection, PgPool};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::fixture::{Outbox, SOON, broker, context, database, drain, quick_consumer};

use Delivery::{Applied, Dead, Duplicate, Parked};

/// Writes a row for each event it is given, and fails where the event says so.
#[derive(Default, Clone)]
struct Recorder {
    prepared: Arc<AtomicUsize>,
    /// While this is set, preparing fails for everybody.
    is_gateway_away: Arc<AtomicUsize>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Instruction {
    Apply,
    FailToApply,
    FailToPrepare,
    RejectWhenApplied,
    RejectWhenPrepared,
    Panic,
    PrepareSlowly,
}

#[derive(Debug, thiserror::Error)]
#[error("told to fail")]
struct ToldToFail;

impl Handler for Recorder {
    type Event = Instruction;
    type Prepared = ();

    fn decode(&self, envelope: &Envelope) -> Result<Option<Instruction>, WireError> {
        match (&*envelope.event_type, envelope.version) {
            ("ThingHappened", 1) => envelope.payload().map(Some),
            ("ThingHappened", _) => Err(envelope.unknown_version()),
            _ => Ok(None),
        }
    }

    async fn prepare(&self, _envelope: &Envelope, event: &Instruction) -> Result<(), HandleError> {
        self.prepared.fetch_add(1, Ordering::SeqCst);
        if self.is_gateway_away.load(Ordering::SeqCst) == 1 {
            return Err(ToldToFail.into());
        }
        match event {
            Instruction::FailToPrepare => Err(ToldToFail.into()),
            Instruction::RejectWhenPrepared => Err(HandleError::Reject("rejected while it was prepared".into())),
            Instruction::PrepareSlowly => {
                tokio::time::sleep(Duration::from_secs(4)).await;
                Ok(())
            }
            _ => Ok(()),
        }
    }

    async fn apply(&self, tx: &mut PgConnection, events: &[Incoming<'_, Instruction, ()>]) -> Result<(), HandleError> {
        for Incoming { envelope, event, .. } in events {
            let insert = sqlx::query("INSERT INTO effects (event_id, aggregate_id, sequence) VALUES ($1, $2, $3)");
            insert
                .bind(envelope.id)
                .bind(envelope.aggregate.id)
                .bind(envelope.aggregate.sequence)
                .execute(&mut *tx)
                .await?;
            match event {
                Instruction::FailToApply => return Err(ToldToFail.into()),
                Instruction::RejectWhenApplied => {
                    return Err(HandleError::Reject("rejected while it was applied".into()));
                }
                Instruction::Panic => panic!("told to panic"),
                _ => {}
            }
        }
        Ok(())
    }
}

struct Inbox {
    db: PgPool,
    subscription: Subscription,
    handler: Recorder,
}

impl Inbox {
    async fn new() -> Self {
        Self::on(Postgres::shared().await.unwrap()).await
    }

    async fn on(postgres: &Postgres) -> Self {
        let name = StreamName { name: "NONE".into(), subject_prefix: "none".into(), source: "/things".into() };
        Self::of(name, postgres).await
    }

    async fn of(stream: StreamName, postgres: &Postgres) -> Self {
        let db = database(postgres).await;
        let table =
            "CREATE TABLE effects (place bigserial PRIMARY KEY, event_id uuid, aggregate_id uuid, sequence bigint)";
        sqlx::query(table).execute(&db).await.unwrap();
        let subscription = Subscription { stream, durable: "test-service".into() };
        Self { db, subscription, handler: Recorder::default() }
    }

    fn consumer(&self, flags: &[&str]) -> Consumer<Recorder> {
        Consumer::new(self.db.clone(), self.subscription.clone(), self.handler.clone(), quick_consumer(flags))
    }

    /// The sequences of an aggregate that took effect, in the order in which they did.
    async fn effects(&self, aggregate: Uuid) -> Vec<i64> {
        let query = sqlx::query_scalar("SELECT sequence FROM effects WHERE aggregate_id = $1 ORDER BY place");
        query.bind(aggregate).fetch_all(&self.db).await.unwrap()
    }

    /// Reason and attempts of each dead letter, oldest first.
    async fn dead_letters(&self) -> Vec<(String, i32)> {
        let query = sqlx::query_as("SELECT reason, attempts FROM dead_letters ORDER BY dead_at, dead_letter_id");
        query.fetch_all(&self.db).await.unwrap()
    }

    /// Aggregate's parked sequences with their reason and attempts.
    async fn parked(&self, aggregate: Uuid) -> Vec<(i64, String, i32)> {
        let query = sqlx::query_as(
            "SELECT aggregate_sequence, reason, attempts FROM parked_events WHERE aggregate_id = $1 ORDER BY 1",
        );
        query.bind(aggregate).fetch_all(&self.db).await.unwrap()
    }
}

fn message_with(id: Uuid, aggregate: Uuid, sequence: i64, payload: Value) -> Message {
    let envelope = Envelope {
        id,
        source: "/things".into(),
        event_type: "ThingHappened".into(),
        version: 1,
        aggregate_type: "thing".into(),
        aggregate: AggregateVersion { id: aggregate, sequence },
        time: "2026-01-02T03:04:05Z".into(),
        context: context(),
        payload: payload.to_string().into(),
    };
    envelope.to_message("things").unwrap()
}

fn message(aggregate: Uuid, sequence: i64, instruction: &str) -> Message {
    message_with(Uuid::now_v7(), aggregate, sequence, json!(instruction))
}

fn with_header(mut message: Message, name: &str, value: Option<&str>) -> Message {
    message.headers.remove(name);
    if let Some(value) = value {
        message.headers.insert(name.into(), value.into());
    }
    message
}

#[tokio::test]
async fn a_second_delivery_has_no_second_effect() {
    let inbox = Inbox::new().await;
    let consumer = inbox.consumer(&[]);
    let id = Uuid::now_v7();
    let event = message(id, 1, "apply");
    assert_eq!(consumer.deliver(std::slice::from_ref(&event)).await.unwrap(), [Applied]);
    assert_eq!(consumer.deliver(&[event.clone(), event.clone()]).await.unwrap(), [Duplicate, Duplicate]);
    // By an operator's replay it comes under another message id.
    let replayed = with_header(event, MESSAGE_ID, Some("fresh"));
    assert_eq!(consumer.deliver(&[replayed]).await.unwrap(), [Duplicate]);
    assert_eq!(inbox.effects(id).await, [1]);
}

#[tokio::test]
async fn the_same_event_twice_in_one_batch_has_one_effect() {
    let inbox = Inbox::new().await;
    let id = Uuid::now_v7();
    let (first, second) = (message(id, 1, "apply"), message(id, 2, "apply"));
    let batch = [first.clone(), first.clone(), second.clone(), first, second];
    assert_eq!(inbox.consumer(&[]).deliver(&batch).await.unwrap(), [Applied, Duplicate, Applied, Duplicate, Duplicate]);
    assert_eq!(inbox.effects(id).await, [1, 2]);
}

#[tokio::test]
async fn an_event_whose_processed_id_was_cleaned_is_still_known_by_its_number() {
    let inbox = Inbox::new().await;
    let consumer = inbox.consumer(&[]);
    let id = Uuid::now_v7();
    let events = [message(id, 1, "apply"), message(id, 2, "apply")];
    consumer.deliver(&events).await.unwrap();
    sqlx::query("DELETE FROM processed_events").execute(&inbox.db).await.unwrap();
    assert_eq!(consumer.deliver(&events).await.unwrap(), [Duplicate, Duplicate]);
    assert_eq!(inbox.effects(id).await, [1, 2]);
}

#[tokio::test]
async fn events_that_come_out_of_order_take_effect_in_order() {
    let inbox = Inbox::new().await;
    let consumer = inbox.consumer(&[]);
    let id = Uuid::now_v7();
    let events: Vec<Message> = (1..=5).map(|sequence| message(id, sequence, "apply")).collect();
    assert_eq!(consumer.deliver(&events[3..]).await.unwrap(), [Parked, Parked]);
    assert_eq!(consumer.deliver(&events[1..2]).await.unwrap(), [Parked]);
    assert_eq!(consumer.deliver(&events[..1]).await.unwrap(), [Applied]);
    // The first closes the gap before the second at once; the third is still missing.
    assert_eq!(inbox.effects(id).await, [1, 2]);
    assert_eq!(consumer.deliver(&events[2..3]).await.unwrap(), [Applied]);
    assert_eq!(inbox.effects(id).await, [1, 2, 3, 4, 5]);
    assert_eq!(inbox.parked(id).await, []);
}

#[tokio::test]
async fn a_gap_that_never_closes_makes_a_dead_letter_that_names_the_missing_event() {
    let inbox = Inbox::new().await;
    let consumer = inbox.consumer(&["--consumer-gap-deadline", "100ms"]);
    let id = Uuid::now_v7();
    consumer.deliver(&[message(id, 1, "apply"), message(id, 3, "apply"), message(id, 4, "apply")]).await.unwrap();
    eventually(SOON, "the third is a dead letter", async || {
        consumer.deliver_parked().await.unwrap();
        let dead = inbox.dead_letters().await;
        if dead.is_empty() { Err(dead) } else { Ok(()) }
    })
    .await;
    // The fourth waits for the third, whose fate is in an operator's hands: its deadline stands still.
    let overdue = "UPDATE parked_events SET parked_at = now() - interval '1 day', next_attempt_at = now()";
    for _ in 0..3 {
        sqlx::query(overdue).execute(&inbox.db).await.unwrap();
        assert_eq!(consumer.deliver_parked().await.unwrap(), 1);
    }
    assert_eq!(inbox.dead_letters().await, [("event 2 of its aggregate is missing".to_owned(), 0)]);
    assert_eq!(inbox.parked(id).await, [(4, "gap".to_owned(), 0)]);
    assert_eq!(inbox.effects(id).await, [1]);
}

#[tokio::test]
async fn a_consumer_that_joined_late_accepts_the_lowest_parked_event_as_the_first() {
    let inbox = Inbox::new().await;
    let flags = ["--consumer-gap-deadline", "100ms", "--consumer-joins-late", "on"];
    let consumer = inbox.consumer(&flags);
    let id = Uuid::now_v7();
    consumer.deliver(&[message(id, 8, "apply"), message(id, 7, "apply")]).await.unwrap();
    eventually(SOON, "both took effect", async || {
        consumer.deliver_parked().await.unwrap();
        let effects = inbox.effects(id).await;
        if effects == [7, 8] { Ok(()) } else { Err(effects) }
    })
    .await;
    assert_eq!(inbox.dead_letters().await, []);
}

#[tokio::test]
async fn an_unknown_type_takes_its_place_in_the_order_and_has_no_effect() {
    let inbox = Inbox::new().await;
    let id = Uuid::now_v7();
    let unknown = with_header(message(id, 2, "apply"), "ce-type", Some("SomethingElse"));
    let batch = [message(id, 1, "apply"), unknown, message(id, 3, "apply")];
    assert_eq!(inbox.consumer(&[]).deliver(&batch).await.unwrap(), [Applied, Applied, Applied]);
    assert_eq!(inbox.effects(id).await, [1, 3]);
}

#[tokio::test]
async fn what_cannot_be_read_is_a_dead_letter_kept_whole_and_harms_no_neighbour() {
    let inbox = Inbox::new().await;
    let consumer = inbox.consumer(&[]);
    let id = Uuid::now_v7();
    let other = || message(Uuid::now_v7(), 1, "apply");
    let unknown_version = with_header(other(), "ce-dataschemaversion", Some("2"));
    let batch = [
        unknown_version.clone(),
        Message { payload: "{not json".into(), ..other() },
        with_header(other(), "ce-sequence", None),
        Message { headers: Default::default(), ..other() },
        message(id, 1, "apply"),
    ];
    assert_eq!(consumer.deliver(&batch).await.unwrap(), [Dead, Dead, Dead, Dead, Applied]);
    let reasons: Vec<String> = inbox.dead_letters().await.into_iter().map(|(reason, _)| reason).collect();
    for expected in [
        "version 2 of ThingHappened is unknown",
        "payload is not a valid ThingHappened",
        "header ce-sequence is missing",
        "header ce-specversion is missing",
    ] {
        assert!(reasons.iter().any(|reason| reason.starts_with(expected)), "{expected}: {reasons:?}");
    }
    let kept: Vec<u8> = sqlx::query_scalar("SELECT payload FROM dead_letters WHERE reason LIKE 'payload%'")
        .fetch_one(&inbox.db)
        .await
        .unwrap();
    assert_eq!(kept, b"{not json");

    // A redelivery changes nothing.
    assert_eq!(consumer.deliver(&batch[..3]).await.unwrap(), [Dead, Dead, Dead]);
    assert_eq!(inbox.dead_letters().await.len(), 4);
}

#[tokio::test]
async fn a_poison_event_harms_no_neighbour_and_becomes_a_dead_letter_after_its_last_attempt() {
    for instruction in ["fail_to_apply", "panic"] {
        let inbox = Inbox::new().await;
        let consumer = inbox.consumer(&["--consumer-max-attempts", "3"]);
        let (before, poison, after) = (Uuid::now_v7(), Uuid::now_v7(), Uuid::now_v7());
        let poisoned = message(poison, 1, instruction);
        let batch =
            [message(before, 1, "apply"), poisoned.clone(), message(after, 1, "apply"), message(poison, 2, "apply")];
        assert_eq!(consumer.deliver(&batch).await.unwrap(), [Applied, Parked, Applied, Parked]);
        assert_eq!(inbox.parked(poison).await[0], (1, "retry".to_owned(), 1));
        // A redelivery does not hurry it.
        assert_eq!(consumer.deliver(std::slice::from_ref(&poisoned)).await.unwrap(), [Parked]);
        assert_eq!(inbox.parked(poison).await[0], (1, "retry".to_owned(), 1));

        eventually(SOON, "it is a dead letter", async || {
            consumer.deliver_parked().await.unwrap();
            let dead = inbox.dead_letters().await;
            if dead.is_empty() { Err(dead) } else { Ok(()) }
        })
        .await;
        let [(reason, 3)] = &inbox.dead_letters().await[..] else { panic!("one dead letter after three attempts") };
        assert!(reason.starts_with("failed 3 times"), "{reason}");
        assert_eq!(inbox.effects(before).await, [1]);
        assert_eq!(inbox.effects(after).await, [1]);
        assert_eq!(inbox.effects(poison).await, [0; 0]);
        assert_eq!(inbox.parked(poison).await, [(2, "gap".to_owned(), 0)], "its follower waits");
        assert_eq!(consumer.deliver(&[poisoned]).await.unwrap(), [Dead]);
    }
}

#[tokio::test]
async fn more_poison_than_a_batch_holds_does_not_stop_the_good_ones() {
    let outbox = Outbox::new().await;
    let inbox = Inbox::of(outbox.name.clone(), Postgres::shared().await.unwrap()).await;
    let poison: Vec<Uuid> = (0..100).map(|_| Uuid::now_v7()).collect();
    let good: Vec<Uuid> = (0..20).map(|_| Uuid::now_v7()).collect();
    // The second of each good aggregate waits among the poison for its first.
    let early: Vec<Message> = good.iter().map(|id| message(*id, 2, "apply")).collect();
    assert_eq!(inbox.consumer(&[]).deliver(&early).await.unwrap(), [Parked; 20]);
    for (id, instruction) in poison.iter().map(|id| (id, "fail_to_apply")).chain(good.iter().map(|id| (id, "apply"))) {
        outbox.append_payload(*id, 1, json!(instruction)).await;
    }
    drain(&outbox.relay(&[])).await;

    // Poison that nobody ever gives up comes due again all the time.
    let stop = CancellationToken::new();
    let consumer = inbox.consumer(&["--consumer-batch", "8", "--consumer-max-attempts", "1000000"]);
    let broker = broker(Nats::shared().await.unwrap(), "test-service").await;
    let running = tokio::spawn(consumer.run(broker, Health::default(), stop.clone()));
    eventually(SOON, "all good ones took effect", async || {
        let effects = join_all(good.iter().map(|id| inbox.effects(*id))).await.concat();
        if effects == [1, 2].repeat(20) { Ok(()) } else { Err(effects) }
    })
    .await;
    stop.cancel();
    running.await.unwrap();
    let parked: i64 = sqlx::query_scalar("SELECT count(*) FROM parked_events").fetch_one(&inbox.db).await.unwrap();
    assert_eq!((parked, inbox.dead_letters().await), (100, vec![]));

    let consumer = inbox.consumer(&["--consumer-batch", "8", "--consumer-max-attempts", "2"]);
    // As they would be once the instance that had some of them in hand is gone for long.
    sqlx::query("UPDATE parked_events SET next_attempt_at = now()").execute(&inbox.db).await.unwrap();
    eventually(SOON, "all poison is dead", async || {
        consumer.deliver_parked().await.unwrap();
        match inbox.dead_letters().await.len() {
            100 => Ok(()),
            dead => Err(dead),
        }
    })
    .await;
}

#[tokio::test]
async fn no_message_whatever_it_holds_keeps_the_database_from_taking_its_neighbours() {
    let inbox = Inbox::new().await;
    let consumer = inbox.consumer(&["--consumer-gap-deadline", "1ms"]);
    let other = |sequence| message(Uuid::now_v7(), sequence, "apply");
    // Too long for an index, and nothing that could be compressed.
    let long: String = std::iter::repeat_with(fastrand::alphanumeric).take(20_000).collect();
    let nuls = format!("{:?}", "\0");
    let mut messages = vec![
        Message { payload: r#""\u0000""#.into(), ..other(1) },
        Message { payload: nuls.into(), ..other(1) },
        Message { payload: "[".repeat(100_000).into(), ..other(1) },
        Message { subject: long.clone(), ..other(1) },
        other(i64::MAX),
    ];
    for (name, value) in other(1).headers {
        for odd in ["", "%00", "%ff", "\u{fffd}", " ", "\"", "'; --", "0", "-1", "9223372036854775807", "1e400", &long]
        {
            messages.push(with_header(other(1), &name, Some(odd)));
            messages.push(with_header(other(2), &name, Some(odd)));
        }
        messages.push(with_header(other(1), &name, Some(&format!("{value}%00"))));
    }
    for message in messages {
        let neighbour = Uuid::now_v7();
        let batch = [message.clone(), self::message(neighbour, 1, "apply"), self::message(neighbour, 3, "apply")];
        for _ in 0..2 {
            consumer.deliver(&batch).await.unwrap_or_else(|error| panic!("{error:?}: {message:?}"));
        }
        assert_eq!(inbox.effects(neighbour).await, [1]);
    }
    while consumer.deliver_parked().await.unwrap() > 0 {}
}

/// Publishes, as no client that is in its right mind would, a message with headers that none can read.
async fn publish_illegible_headers(nats: &Nats, subject: &str) {
    let url: reqwest::Url = nats.url().parse().unwrap();
    let mut server = TcpStream::connect((url.host_str().unwrap(), url.port().unwrap())).await.unwrap();
    let headers = b"NATS/1.0\r\nce-id: \xff\r\n\r\n";
    let publish = format!("CONNECT {{\"headers\":true}}\r\nHPUB {subject} {0} {0}\r\n", headers.len());
    server.write_all(&[publish.as_bytes(), headers, b"\r\nPING\r\n"].concat()).await.unwrap();
    let mut answers = Vec::new();
    while !answers.ends_with(b"PONG\r\n") {
        assert!(server.read_buf(&mut answers).await.unwrap() > 0, "the server hangs up");
    }
}

/// The client ends its connection over such a message, and never hands it on.
#[tokio::test]
async fn a_message_that_the_client_cannot_read_does_not_hold_up_those_that_come_with_it() {
    let outbox = Outbox::new().await;
    let inbox = Inbox::of(outbox.name.clone(), Postgres::shared().await.unwrap()).await;
    let nats = Nats::shared().await.unwrap();
    publish_illegible_headers(nats, &format!("{}.ThingHappened", outbox.name.subject_prefix)).await;
    for _ in 0..100 {
        outbox.append_payload(Uuid::now_v7(), 1, json!("apply")).await;
    }
    drain(&outbox.relay(&[])).await;
    let stop = CancellationToken::new();
    let consumer = inbox.consumer(&["--consumer-ack-wait", "1s"]);
    let running = tokio::spawn(consumer.run(broker(nats, "test-service").await, Health::default(), stop.clone()));
    eventually(SOON, "all others took effect", async || {
        let count: i64 = sqlx::query_scalar("SELECT count(*) FROM effects").fetch_one(&inbox.db).await.unwrap();
        if count == 100 { Ok(()) } else { Err(count) }
    })
    .await;
    stop.cancel();
    running.await.unwrap();
}

#[tokio::test]
async fn a_rejected_event_is_a_dead_letter_at_once() {
    let inbox = Inbox::new().await;
    let consumer = inbox.consumer(&[]);
    let neighbour = Uuid::now_v7();
    let batch = [
        message(Uuid::now_v7(), 1, "reject_when_applied"),
        message(neighbour, 1, "apply"),
        message(Uuid::now_v7(), 1, "reject_when_prepared"),
    ];
    assert_eq!(consumer.deliver(&batch).await.unwrap(), [Dead, Applied, Dead]);
    assert_eq!(inbox.effects(neighbour).await, [1]);
    let mut reasons: Vec<String> = inbox.dead_letters().await.into_iter().map(|(reason, _)| reason).collect();
    reasons.sort();
    assert_eq!(reasons, ["rejected while it was applied", "rejected while it was prepared"]);
}

#[tokio::test]
async fn while_nobody_is_answered_nothing_counts_against_anybody() {
    let inbox = Inbox::new().await;
    let consumer = inbox.consumer(&["--consumer-max-attempts", "2"]);
    let aggregates: Vec<Uuid> = (0..5).map(|_| Uuid::now_v7()).collect();
    let batch: Vec<Message> = aggregates.iter().map(|id| message(*id, 1, "apply")).collect();
    inbox.handler.is_gateway_away.store(1, Ordering::SeqCst);
    assert_eq!(consumer.deliver(&batch).await.unwrap(), [Parked; 5]);
    eventually(SOON, "everything was tried far more often than the budget allows", async || {
        consumer.deliver_parked().await.unwrap();
        match inbox.handler.prepared.load(Ordering::SeqCst) {
            tries if tries > 50 => Ok(()),
            tries => Err(tries),
        }
    })
    .await;
    assert_eq!(inbox.parked(aggregates[0]).await, [(1, "retry".to_owned(), 0)]);
    inbox.handler.is_gateway_away.store(0, Ordering::SeqCst);
    eventually(SOON, "all took effect", async || {
        consumer.deliver_parked().await.unwrap();
        let effects = join_all(aggregates.iter().map(|id| inbox.effects(*id))).await.concat();
        if effects == [1; 5] { Ok(()) } else { Err(effects) }
    })
    .await;
    assert_eq!(inbox.dead_letters().await, []);
}

#[tokio::test]
async fn a_database_that_is_away_spends_nobodys_attempts() {
    let postgres = Postgres::start().await.unwrap();
    let inbox = Inbox::on(&postgres).await;
    let consumer = inbox.consumer(&["--consumer-max-attempts", "1"]);
    let id = Uuid::now_v7();
    postgres.stop_at_once().await.unwrap();
    for _ in 0..3 {
        consumer.deliver(&[message(id, 1, "apply")]).await.unwrap_err();
    }
    postgres.start_again().await.unwrap();
    eventually(SOON, "it took effect", async || match consumer.deliver(&[message(id, 1, "apply")]).await {
        Ok(_) => Ok(()),
        Err(error) => Err(error.to_string()),
    })
    .await;
    assert_eq!(inbox.effects(id).await, [1]);
    assert_eq!((inbox.dead_letters().await, inbox.parked(id).await), (vec![], vec![]));
}

/// Publishes the events of many aggregates, and runs instances until all took effect.
async fn consume_with_three_instances(shuffled_and_doubled: bool) {
    const LENGTH: i64 = 12;
    let outbox = Outbox::new().await;
    let inbox = Inbox::of(outbox.name.clone(), Postgres::shared().await.unwrap()).await;
    let aggregates: Vec<Uuid> = (0..50).map(|_| Uuid::now_v7()).collect();
    if shuffled_and_doubled {
        let mut messages: Vec<Message> = Vec::new();
        for id in &aggregates {
            messages.extend((1..=LENGTH).map(|sequence| message(*id, sequence, "apply")));
        }
        messages.extend(messages.clone());
        fastrand::shuffle(&mut messages);
        for message in messages {
            let mut headers = async_nats::HeaderMap::new();
            for (name, value) in message.headers.iter().filter(|(name, _)| *name != MESSAGE_ID) {
                headers.insert(name.as_str(), value.as_str());
            }
            let subject = format!("{}.ThingHappened", outbox.name.subject_prefix);
            outbox.jetstream.publish_with_headers(subject, headers, message.payload).await.unwrap().await.unwrap();
        }
    } else {
        for sequence in 1..=LENGTH {
            join_all(aggregates.iter().map(|id| outbox.append_payload(*id, sequence, json!("apply")))).await;
        }
        drain(&outbox.relay(&[])).await;
    }

    let stop = CancellationToken::new();
    let nats = Nats::shared().await.unwrap();
    let mut instances = Vec::new();
    for _ in 0..3 {
        let broker = broker(nats, "test-service").await;
        instances.push(tokio::spawn(inbox.consumer(&["--consumer-batch", "16"]).run(
            broker,
            Health::default(),
            stop.clone(),
        )));
    }
    eventually(SOON * 2, "all took effect", async || {
        let count: i64 = sqlx::query_scalar("SELECT count(*) FROM effects").fetch_one(&inbox.db).await.unwrap();
        if count >= LENGTH * aggregates.len() as i64 { Ok(()) } else { Err(count) }
    })
    .await;
    let mut durable: async_nats::jetstream::consumer::PullConsumer =
        outbox.jetstream.get_consumer_from_stream("test-service", &*outbox.name.name).await.unwrap();
    eventually(SOON, "all is acknowledged", async || {
        let info = durable.info().await.unwrap();
        if info.num_pending + info.num_ack_pending as u64 == 0 { Ok(()) } else { Err(info.num_ack_pending) }
    })
    .await;
    stop.cancel();
    join_all(instances).await;

    for id in aggregates {
        assert_eq!(inbox.effects(id).await, (1..=LENGTH).collect::<Vec<_>>());
        assert_eq!(inbox.parked(id).await, []);
    }
    assert_eq!(inbox.dead_letters().await, []);
}

#[tokio::test]
async fn three_instances_give_every_event_its_effect_once_and_in_order() {
    consume_with_three_instances(false).await;
}

#[tokio::test]
async fn three_instances_bring_order_into_a_shuffled_and_doubled_stream() {
    consume_with_three_instances(true).await;
}

#[tokio::test]
async fn a_durable_consumer_that_is_deleted_is_made_again_and_nothing_takes_effect_twice() {
    let outbox = Outbox::new().await;
    let inbox = Inbox::of(outbox.name.clone(), Postgres::shared().await.unwrap()).await;
    let id = Uuid::now_v7();
    let stop = CancellationToken::new();
    let broker = broker(Nats::shared().await.unwrap(), "test-service").await;
    let running = tokio::spawn(inbox.consumer(&[]).run(broker, Health::default(), stop.clone()));
    let mut expected = Vec::new();
    for sequence in 1..=3 {
        outbox.append_payload(id, sequence, json!("apply")).await;
        drain(&outbox.relay(&[])).await;
        expected.push(sequence);
        eventually(SOON, "it took effect", async || {
            let effects = inbox.effects(id).await;
            if effects == expected { Ok(()) } else { Err(effects) }
        })
        .await;
        outbox.jetstream.delete_consumer_from_stream("test-service", &*outbox.name.name).await.unwrap();
    }
    stop.cancel();
    running.await.unwrap();
}

#[tokio::test]
async fn long_work_extends_its_ack_deadline() {
    let outbox = Outbox::new().await;
    let inbox = Inbox::of(outbox.name.clone(), Postgres::shared().await.unwrap()).await;
    let id = Uuid::now_v7();
    outbox.append_payload(id, 1, json!("prepare_slowly")).await;
    drain(&outbox.relay(&[])).await;
    let stop = CancellationToken::new();
    let mut instances = Vec::new();
    for _ in 0..2 {
        let broker = broker(Nats::shared().await.unwrap(), "test-service").await;
        let consumer = inbox.consumer(&["--consumer-ack-wait", "1s"]);
        instances.push(tokio::spawn(consumer.run(broker, Health::default(), stop.clone())));
    }
    eventually(SOON, "it took effect", async || {
        let effects = inbox.effects(id).await;
        if effects == [1] { Ok(()) } else { Err(effects) }
    })
    .await;
    stop.cancel();
    join_all(instances).await;
    assert_eq!(inbox.handler.prepared.load(Ordering::SeqCst), 1, "it was not delivered to the other instance");
}

#[tokio::test]
async fn a_stopped_consumer_finishes_its_batch_and_hands_back_what_it_has_not_begun() {
    let outbox = Outbox::new().await;
    let inbox = Inbox::of(outbox.name.clone(), Postgres::shared().await.unwrap()).await;
    let aggregates: HashMap<Uuid, ()> = (0..300).map(|_| (Uuid::now_v7(), ())).collect();
    for id in aggregates.keys() {
        outbox.append_payload(*id, 1, json!("apply")).await;
    }
    drain(&outbox.relay(&[])).await;
    let nats = Nats::shared().await.unwrap();
    let stop = CancellationToken::new();
    let flags = ["--consumer-batch", "4", "--consumer-ack-wait", "1h"];
    let running =
        tokio::spawn(inbox.consumer(&flags).run(broker(nats, "test-service").await, Health::default(), stop.clone()));
    let count =
        async || -> i64 { sqlx::query_scalar("SELECT count(*) FROM effects").fetch_one(&inbox.db).await.unwrap() };
    eventually(SOON, "it has begun", async || if count().await > 0 { Ok(()) } else { Err(()) }).await;
    stop.cancel();
    running.await.unwrap();

    // With an ack wait of an hour, another instance gets only what was handed back.
    let stop = CancellationToken::new();
    let running =
        tokio::spawn(inbox.consumer(&flags).run(broker(nats, "test-service").await, Health::default(), stop.clone()));
    eventually(SOON, "the rest took effect", async || match count().await {
        300 => Ok(()),
        count => Err(count),
    })
    .await;
    stop.cancel();
    running.await.unwrap();
}
