//! Relays drain an outbox, beside a pipelined publish of the same messages.

use std::time::{Duration, Instant};

use async_nats::{HeaderMap, jetstream};
use e2e_tests::Nats;
use futures::StreamExt;
use futures::future::try_join_all;
use outbox_core::config::{BrokerConfig, DatabaseConfig, RelayConfig, StreamConfig};
use outbox_core::{Broker, Relay, Stream, StreamName, migrate, relay_pool};
use sqlx::migrate::Migrator;
use sqlx::{Connection, PgConnection, PgPool};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use super::{Bench, in_turn};

const EVENTS: u64 = 300_000;
const AGGREGATES: u64 = 65_000;
const RETAINED: u64 = 5_000_000;
const IN_FLIGHT: usize = 1_000;

#[derive(clap::Parser)]
struct Settings<C: clap::Args> {
    #[command(flatten)]
    config: C,
}

fn settings<C: clap::Args>(flags: &[&str]) -> C {
    <Settings<C> as clap::Parser>::parse_from(["bench"].iter().chain(flags)).config
}

pub async fn relay(bench: &mut Bench) -> anyhow::Result<()> {
    let outbox = Outbox::new(bench, 0).await?;
    let (drained, limit) = in_turn(async || outbox.drain(1).await, async || pipelined(bench).await).await?;
    bench.against("drain in order", "events/s", drained, limit, 0.35);
    if limit >= 100_000.0 {
        bench.at_least("drain in order", "events/s", drained, 30_000.0);
    }
    Ok(())
}

pub async fn retained(bench: &mut Bench) -> anyhow::Result<()> {
    let (full, empty) = (Outbox::new(bench, RETAINED / bench.smaller).await?, Outbox::new(bench, 0).await?);
    let (value, plain) = in_turn(async || full.drain(1).await, async || empty.drain(1).await).await?;
    bench.against("drain with events kept", "events/s", value, plain, 0.9);
    Ok(())
}

pub async fn old_snapshot(bench: &mut Bench) -> anyhow::Result<()> {
    let (pinned, free) = (Outbox::new(bench, 0).await?, Outbox::new(bench, 0).await?);
    let (value, plain) =
        in_turn(async || pinned.drain_under_old_snapshot().await, async || free.drain(1).await).await?;
    bench.against("drain under an old snapshot", "events/s", value, plain, 0.6);
    Ok(())
}

pub async fn several(bench: &mut Bench, relays: usize) -> anyhow::Result<()> {
    let outbox = Outbox::new(bench, 0).await?;
    let (value, one) = in_turn(async || outbox.drain(relays).await, async || outbox.drain(1).await).await?;
    bench.against(&format!("{relays} relays"), "events/s", value, one, 1.0);
    Ok(())
}

/// Drains an outbox batch by batch.
pub async fn claims(bench: &mut Bench) -> anyhow::Result<()> {
    let outbox = Outbox::new(bench, 0).await?;
    outbox.fill(outbox.events, false).await?;
    let relay = outbox.relay().await?;
    let mut batches = Vec::new();
    loop {
        let began = Instant::now();
        if relay.run_once().await?.seen == 0 {
            break;
        }
        batches.push(began.elapsed());
    }
    let tenth = (batches.len() / 10).max(1);
    let mean = |batches: &[Duration]| batches.iter().sum::<Duration>().as_secs_f64() * 1_000.0 / batches.len() as f64;
    let (first, last) = (mean(&batches[..tenth]), mean(&batches[batches.len() - tenth..]));
    bench.at_most("last tenth of batches to first", "×", last / first, 1.5);
    Ok(())
}

/// An outbox of its own, and a broker with nothing in it.
struct Outbox {
    url: String,
    db: PgPool,
    nats: Nats,
    events: u64,
}

impl Outbox {
    /// With so many events in it that are published and kept.
    async fn new(bench: &Bench, retained: u64) -> anyhow::Result<Self> {
        let nats = bench.nats().await?;
        let url = bench.postgres.create_database("relay").await?;
        let config = settings::<DatabaseConfig>(&["--database-url", &url, "--database-pool", "20"]);
        let db = relay_pool(&config, "bench").map_err(anyhow::Error::msg)?;
        migrate(&db, &Migrator::with_migrations(vec![])).await?;
        let outbox = Self { url, db, nats, events: EVENTS / bench.smaller };
        outbox.fill(retained, true).await?;
        Ok(outbox)
    }

    /// Fills it and lets relays drain it. Returns events a second.
    async fn drain(&self, relays: usize) -> anyhow::Result<f64> {
        self.fill(self.events, false).await?;
        self.drained_by(relays).await
    }

    /// The same while a transaction that is older than all of it stays open.
    async fn drain_under_old_snapshot(&self) -> anyhow::Result<f64> {
        self.fill(self.events, false).await?;
        let mut old = PgConnection::connect(&self.url).await?;
        let pin = "BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT count(*) FROM outbox_source";
        sqlx::raw_sql(pin).execute(&mut old).await?;
        let rate = self.drained_by(1).await?;
        old.close().await?;
        Ok(rate)
    }

    async fn drained_by(&self, relays: usize) -> anyhow::Result<f64> {
        let mut relays = try_join_all((0..relays).map(|_| self.relay())).await?;
        let shutdown = CancellationToken::new();
        let began = Instant::now();
        let running: Vec<_> = relays.drain(..).map(|relay| tokio::spawn(relay.run(shutdown.clone()))).collect();
        let anything_left = "SELECT EXISTS (SELECT FROM outbox_deliveries WHERE published_at IS NULL)";
        while sqlx::query_scalar(anything_left).fetch_one(&self.db).await? {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        let took = began.elapsed();
        shutdown.cancel();
        try_join_all(running).await?;
        Ok(self.events as f64 / took.as_secs_f64())
    }

    async fn relay(&self) -> anyhow::Result<Relay> {
        let name = StreamName { name: "BENCH".into(), subject_prefix: "bench".into(), source: "/bench".into() };
        let broker = Broker::connect(&settings::<BrokerConfig>(&["--nats-url", self.nats.url()]), "bench").await?;
        let stream = Stream::new(broker, name, settings::<StreamConfig>(&[]), Duration::from_secs(5));
        stream.ensure().await?;
        Ok(Relay::new(self.db.clone(), stream, settings::<RelayConfig>(&[])))
    }

    /// Writes events of many aggregates, shuffled together, as orders are: one each millisecond, under ids
    /// that rise with the time, as they do in a service.
    async fn fill(&self, events: u64, published: bool) -> anyhow::Result<()> {
        const CHUNK: u64 = 100_000;
        // Not one of the relay's connections, whose statements must end in time.
        let mut db = PgConnection::connect(&self.url).await?;
        let written: i64 = sqlx::query_scalar("SELECT count(*) FROM outbox_events").fetch_one(&mut db).await?;
        let first = written as u64;
        let until = first + events;
        for chunk in (first..until).step_by(CHUNK as usize) {
            sqlx::query(WRITE)
                .bind(chunk as i64)
                .bind((chunk + CHUNK).min(until) as i64)
                .bind(AGGREGATES as i64)
                .bind(published)
                .execute(&mut db)
                .await?;
        }
        for tidy in ["VACUUM ANALYZE outbox_deliveries", "VACUUM ANALYZE outbox_events", "CHECKPOINT"] {
            sqlx::raw_sql(tidy).execute(&mut db).await?;
        }
        Ok(())
    }
}

const WRITE: &str = "
WITH event AS (
    INSERT INTO outbox_events (event_id, aggregate_type, aggregate_id, aggregate_sequence, event_type,
                               event_version, payload, headers, created_at)
    SELECT (lpad(to_hex((extract(epoch FROM created_at) * 1000)::bigint), 12, '0') || left(md5(n::text), 20))::uuid,
           'order', md5((n % $3)::text)::uuid, n / $3 + 1, 'OrderCreated', 1,
           jsonb_build_object('order_id', gen_random_uuid(), 'customer_id', gen_random_uuid(),
                              'total', jsonb_build_object('amount', 12500, 'currency', 'EUR')),
           '{\"correlationid\": \"0197a5c0-0000-7000-8000-000000000001\"}', created_at
    FROM generate_series($1::bigint, $2::bigint - 1) AS n,
         LATERAL (SELECT timestamptz '2026-01-01' + n * interval '1 millisecond' AS created_at) AS time
    RETURNING *
)
INSERT INTO outbox_deliveries (event_id, aggregate_type, aggregate_id, aggregate_sequence, created_at, published_at)
SELECT event_id, aggregate_type, aggregate_id, aggregate_sequence, created_at, CASE WHEN $4 THEN now() END
FROM event";

/// The limit: messages of the same size.
async fn pipelined(bench: &Bench) -> anyhow::Result<f64> {
    let nats = bench.nats().await?;
    let count = EVENTS / bench.smaller;
    let jetstream = stream(&nats).await?;
    let began = Instant::now();
    publish(&jetstream, count).await?;
    Ok(count as f64 / began.elapsed().as_secs_f64())
}

/// Publishes so many messages, as many in flight as the client takes.
pub async fn publish(jetstream: &jetstream::Context, count: u64) -> anyhow::Result<()> {
    let publishing = |_| {
        let (headers, payload) = message();
        let jetstream = jetstream.clone();
        async move { jetstream.publish_with_headers("orders.OrderCreated", headers, payload.into()).await?.await }
    };
    let mut acks = futures::stream::iter(0..count).map(publishing).buffer_unordered(IN_FLIGHT);
    while let Some(ack) = acks.next().await {
        ack?;
    }
    Ok(())
}

/// A stream like order-service's.
pub async fn stream(nats: &Nats) -> anyhow::Result<jetstream::Context> {
    let jetstream = nats.jetstream().await?;
    let config = jetstream::stream::Config {
        name: "ORDERS".to_owned(),
        subjects: vec!["orders.*".to_owned()],
        discard: jetstream::stream::DiscardPolicy::New,
        max_age: Duration::from_secs(7 * 86_400),
        ..Default::default()
    };
    jetstream.create_stream(config).await?;
    Ok(jetstream)
}

/// An `OrderCreated` as order-service's relay sends it.
fn message() -> (HeaderMap, String) {
    let (event, order) = (Uuid::now_v7().to_string(), Uuid::now_v7().to_string());
    let mut headers = HeaderMap::new();
    for (name, value) in [
        ("ce-specversion", "1.0"),
        ("ce-id", &event),
        ("ce-source", "/order-service"),
        ("ce-type", "OrderCreated"),
        ("ce-time", "2026-01-02T03:04:05.000006Z"),
        ("ce-subject", &order),
        ("ce-sequence", "1"),
        ("ce-aggregatetype", "order"),
        ("ce-dataschemaversion", "1"),
        ("ce-correlationid", &event),
        ("ce-datacontenttype", "application/json"),
        ("content-type", "application/json"),
        ("Nats-Msg-Id", &event),
    ] {
        headers.insert(name, value);
    }
    let payload =
        format!(r#"{{"order_id":"{order}","customer_id":"{event}","total":{{"amount":12500,"currency":"EUR"}}}}"#);
    (headers, payload)
}
