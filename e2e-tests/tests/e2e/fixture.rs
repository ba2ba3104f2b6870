//! An outbox, a stream and an inbox of a domain without meaning: things happen.

use std::collections::BTreeMap;
use std::time::Duration;

use clap::{Args, Parser};
use e2e_tests::{Nats, Postgres, eventually};
use outbox_core::config::{BrokerConfig, ConsumerConfig, RelayConfig, StreamConfig};
use outbox_core::{
    AggregateVersion, Broker, Context, Envelope, Event, Message, Published, Relay, Stream, StreamName, append, migrate,
};
use serde::Serialize;
use serde_json::{Value, json};
use sqlx::migrate::Migrator;
use sqlx::{PgPool, Row, postgres::PgPoolOptions};
use uuid::Uuid;

use crate::faults::count;

/// Something to wait for is there within this time, however slow the machine.
pub const SOON: Duration = Duration::from_secs(30);

#[derive(Debug, Serialize)]
pub struct ThingHappened(pub Value);

impl Event for ThingHappened {
    const AGGREGATE: &'static str = "thing";
    const TYPE: &'static str = "ThingHappened";
}

#[derive(Parser)]
struct Settings<C: Args> {
    #[command(flatten)]
    config: C,
}

/// A configuration with its defaults, except for these flags.
pub fn settings<C: Args>(flags: &[&str]) -> C {
    Settings::<C>::parse_from(["test"].iter().chain(flags)).config
}

pub fn context() -> Context {
    Context { correlation_id: "a-test".into(), traceparent: None }
}

pub async fn broker(nats: &Nats, name: &str) -> Broker {
    let config: BrokerConfig = settings(&["--nats-url", nats.url()]);
    Broker::connect(&config, name).await.expect("the URL is good")
}

/// A database with the shared tables, and nothing else.
pub async fn database(postgres: &Postgres) -> PgPool {
    let url = postgres.create_database("things").await.expect("a database can be made");
    let db = PgPoolOptions::new()
        .max_connections(20)
        .acquire_timeout(Duration::from_secs(3))
        .connect(&url)
        .await
        .expect("it can be connected to");
    migrate(&db, &Migrator::with_migrations(vec![])).await.expect("it can be migrated");
    db
}

/// An outbox of its own, and a stream of its own on a server that may be shared.
pub struct Outbox {
    pub db: PgPool,
    pub name: StreamName,
    pub jetstream: async_nats::jetstream::Context,
    broker: Broker,
}

/// What the outbox knows of an event's delivery.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct State {
    pub is_published: bool,
    pub is_failed: bool,
    pub is_leased: bool,
    pub is_due: bool,
    pub attempts: i32,
    pub last_error: Option<String>,
}

impl Outbox {
    pub async fn new() -> Self {
        Self::on(Nats::shared().await.expect("there is a broker")).await
    }

    pub async fn on(nats: &Nats) -> Self {
        let outbox = Self::without_stream(nats).await;
        outbox.stream().ensure().await.expect("the stream can be made");
        outbox
    }

    pub async fn without_stream(nats: &Nats) -> Self {
        let db = database(Postgres::shared().await.expect("there is a database")).await;
        let id = Uuid::new_v4().simple().to_string();
        let name = StreamName { name: format!("T{id}"), subject_prefix: format!("t{id}"), source: "/things".into() };
        let broker = broker(nats, "things").await;
        e2e_tests::eventually(SOON, "the broker is connected", async || broker.is_connected().then_some(()).ok_or(()))
            .await;
        let jetstream = nats.jetstream().await.expect("the broker answers");
        Self { db, name, jetstream, broker }
    }

    fn stream(&self) -> Stream {
        let timeout = Duration::from_secs(5);
        Stream::new(self.broker.clone(), self.name.clone(), settings::<StreamConfig>(&[]), timeout)
    }

    pub fn relay(&self, flags: &[&str]) -> Relay {
        Relay::new(self.db.clone(), self.stream(), settings::<RelayConfig>(flags))
    }

    /// Appends an event in a transaction of its own.
    pub async fn append(&self, aggregate: Uuid, sequence: i64) -> Uuid {
        self.append_payload(aggregate, sequence, json!({"sequence": sequence})).await
    }

    pub async fn append_payload(&self, id: Uuid, sequence: i64, payload: Value) -> Uuid {
        let mut tx = self.db.begin().await.unwrap();
        let event = ThingHappened(payload);
        let id = append(&mut tx, AggregateVersion { id, sequence }, &event, &context()).await.unwrap();
        tx.commit().await.unwrap();
        id
    }

    /// Writes events that no [`append`] would: with any type, as a faulty producer could.
    pub async fn insert(&self, aggregate: Uuid, sequences: std::ops::RangeInclusive<i64>, event_type: &str) {
        let insert = "
            WITH event AS (
                INSERT INTO outbox_events (event_id, aggregate_type, aggregate_id, aggregate_sequence,
                                           event_type, event_version, payload, headers)
                SELECT gen_random_uuid(), 'thing', $1, sequence, $4, 1, '{}', '{\"correlationid\": \"a-test\"}'
                FROM generate_series($2::bigint, $3::bigint) AS sequence
                RETURNING *
            )
            INSERT INTO outbox_deliveries (event_id, aggregate_type, aggregate_id, aggregate_sequence, created_at)
            SELECT event_id, aggregate_type, aggregate_id, aggregate_sequence, created_at FROM event";
        let (first, last) = sequences.into_inner();
        let inserting = sqlx::query(insert).bind(aggregate).bind(first).bind(last).bind(event_type);
        inserting.execute(&self.db).await.unwrap();
    }

    /// Makes a relay that never comes back hold this event.
    pub async fn lease_to_a_frozen_relay(&self, aggregate: Uuid, sequence: i64, lease: &str) {
        let leased = sqlx::query(
            "UPDATE outbox_deliveries SET locked_by = 'frozen', lease_id = gen_random_uuid(), lock_until = now() + $3::text::interval
             WHERE aggregate_id = $1 AND aggregate_sequence = $2",
        );
        leased.bind(aggregate).bind(sequence).bind(lease).execute(&self.db).await.unwrap();
    }

    /// Everything in the stream, in its order.
    pub async fn published(&self) -> Vec<Envelope> {
        let messages = messages(&self.jetstream, &self.name.name).await;
        messages.iter().map(|message| Envelope::read(message).expect("what a relay sends can be read")).collect()
    }

    /// The sequences of one aggregate, as they stand in the stream.
    pub async fn published_of(&self, aggregate: Uuid) -> Vec<i64> {
        let published = self.published().await;
        published.iter().filter(|e| e.aggregate.id == aggregate).map(|e| e.aggregate.sequence).collect()
    }

    pub async fn state(&self, aggregate: Uuid, sequence: i64) -> State {
        let row = sqlx::query(
            "SELECT published_at IS NOT NULL, failed_at IS NOT NULL, coalesce(lock_until > now(), false),
                    next_attempt_at <= now(), attempts, last_error
             FROM outbox_deliveries WHERE aggregate_id = $1 AND aggregate_sequence = $2",
        );
        let row = row.bind(aggregate).bind(sequence).fetch_one(&self.db).await.unwrap();
        State {
            is_published: row.get(0),
            is_failed: row.get(1),
            is_leased: row.get(2),
            is_due: row.get(3),
            attempts: row.get(4),
            last_error: row.get(5),
        }
    }

    /// All that the outbox knows of every delivery.
    pub async fn rows(&self) -> Vec<String> {
        let rows = sqlx::query_scalar("SELECT delivery::text FROM outbox_deliveries delivery ORDER BY event_id");
        rows.fetch_all(&self.db).await.unwrap()
    }

    pub async fn count(&self, condition: &'static str) -> i64 {
        count(&self.db, condition).await
    }

    pub async fn all_are_published(&self) {
        eventually(SOON, "all are published", async || match self.count("published_at IS NULL").await {
            0 => Ok(()),
            left => Err(left),
        })
        .await;
    }
}

/// Publishes batches until one has nothing to do, and adds up what became of them.
pub async fn drain(relay: &Relay) -> Published {
    let mut total = Published::default();
    loop {
        let batch = relay.run_once().await.expect("the database answers");
        total.seen += batch.seen;
        total.published += batch.published;
        total.failed += batch.failed;
        total.rescheduled += batch.rescheduled;
        total.lost += batch.lost;
        if batch.seen == 0 {
            return total;
        }
        assert!(!batch.outage, "the broker is there");
    }
}

/// The messages of a stream, in its order.
pub async fn messages(jetstream: &async_nats::jetstream::Context, name: &str) -> Vec<Message> {
    let mut stream = jetstream.get_stream(name).await.expect("the stream is there");
    let state = stream.info().await.expect("the broker answers").state.clone();
    let mut messages = Vec::new();
    for sequence in state.first_sequence.max(1)..=state.last_sequence {
        let raw = stream.get_raw_message(sequence).await.expect("nothing is deleted from it");
        let headers: BTreeMap<String, String> =
            raw.headers.iter().map(|(name, values)| (name.to_string(), values[0].to_string())).collect();
        messages.push(Message { subject: raw.subject.to_string(), headers, payload: raw.payload, position: None });
    }
    messages
}

/// `ConsumerConfig` with waits short enough for a test.
pub fn quick_consumer(flags: &[&str]) -> ConsumerConfig {
    let quick = ["--consumer-backoff-base", "10ms", "--consumer-backoff-max", "50ms"];
    settings(&[&quick, flags].concat())
}
