//! payment-service consumes a full stream, beside consuming and acknowledging it without a database.

use std::time::{Duration, Instant};

use async_nats::jetstream::consumer::pull;
use e2e_tests::{Nats, Service};
use futures::StreamExt;
use sqlx::PgPool;

use super::relay::{publish, stream};
use super::{Bench, in_turn};

const MESSAGES: u64 = 200_000;

pub async fn consumer(bench: &mut Bench) -> anyhow::Result<()> {
    let count = MESSAGES / bench.smaller;
    let (value, limit) =
        in_turn(async || with_database(bench, count).await, async || without_database(bench, count).await).await?;
    bench.against("inbox and payment", "events/s", value, limit, 0.2);
    bench.at_least("inbox and payment", "events/s", value, 15_000.0);
    Ok(())
}

async fn with_database(bench: &Bench, count: u64) -> anyhow::Result<f64> {
    let nats = full_stream(bench, count).await?;
    let database = bench.postgres.create_database("payments").await?;
    let settings = [("DATABASE_URL", &*database), ("NATS_URL", nats.url()), ("RELAY", "off"), ("RUST_LOG", "warn")];
    let service = Service::start("payment-service", &settings).await?;
    service.wait_until_ready(Duration::from_secs(60)).await?;
    let db = PgPool::connect(&database).await?;
    let (first, began) = (processed(&db).await?, Instant::now());
    while processed(&db).await? < count {
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    Ok((count - first) as f64 / began.elapsed().as_secs_f64())
}

async fn processed(db: &PgPool) -> anyhow::Result<u64> {
    let count: i64 = sqlx::query_scalar("SELECT count(*) FROM processed_events").fetch_one(db).await?;
    Ok(count as u64)
}

/// A broker whose stream holds so many events.
async fn full_stream(bench: &Bench, count: u64) -> anyhow::Result<Nats> {
    let nats = bench.nats().await?;
    publish(&stream(&nats).await?, count).await?;
    Ok(nats)
}

async fn without_database(bench: &Bench, count: u64) -> anyhow::Result<f64> {
    let nats = full_stream(bench, count).await?;
    let stream = nats.jetstream().await?.get_stream("ORDERS").await?;
    let config = pull::Config { durable_name: Some("limit".to_owned()), ..Default::default() };
    let consumer = stream.create_consumer(config).await?;
    let began = Instant::now();
    let mut messages = consumer.stream().max_messages_per_batch(256).messages().await?.take(count as usize);
    while let Some(message) = messages.next().await {
        message?.ack().await.map_err(anyhow::Error::from_boxed)?;
    }
    Ok(count as f64 / began.elapsed().as_secs_f64())
}
