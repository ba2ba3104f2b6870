//! POST /orders, beside the same two inserts straight over SQL.

use std::time::{Duration, Instant};

use e2e_tests::{Service, free_port, http_client, wait_until};
use outbox_core::{AggregateVersion, Context, Event, append};
use serde::Serialize;
use serde_json::{Value, json};
use sqlx::PgPool;
use sqlx::postgres::PgPoolOptions;
use tokio::task::JoinSet;
use uuid::Uuid;

use super::{Bench, an_order, in_turn};

const CONNECTIONS: usize = 32;
const ROUND: Duration = Duration::from_secs(5);
const START_WITHIN: Duration = Duration::from_secs(60);

/// As order-service tells it.
#[derive(Serialize)]
struct OrderCreated {
    order_id: Uuid,
    customer_id: Uuid,
    total: Value,
}

impl Event for OrderCreated {
    const AGGREGATE: &'static str = "order";
    const TYPE: &'static str = "OrderCreated";
}

pub async fn http(bench: &mut Bench) -> anyhow::Result<()> {
    // No broker: relay and consumer have nothing to do.
    let broker = format!("nats://127.0.0.1:{}", free_port());
    let (service, url) = order_service(bench, &broker, "off").await?;
    let db = PgPoolOptions::new().max_connections(CONNECTIONS as u32).connect(&url).await?;
    let (over_http, over_sql) = in_turn(async || Ok(posts(&service).await), async || Ok(inserts(&db).await)).await?;
    bench.against("orders over HTTP", "orders/s", over_http, over_sql, 0.7);
    Ok(())
}

pub async fn http_with_relay(bench: &mut Bench) -> anyhow::Result<()> {
    let nats = bench.nats().await?;
    let (with, _) = order_service(bench, nats.url(), "embedded").await?;
    let (without, _) = order_service(bench, nats.url(), "off").await?;
    let (value, limit) = in_turn(async || Ok(posts(&with).await), async || Ok(posts(&without).await)).await?;
    bench.against("orders while published", "orders/s", value, limit, 0.6);
    Ok(())
}

async fn order_service(bench: &Bench, broker: &str, relay: &str) -> anyhow::Result<(Service, String)> {
    let database = bench.postgres.create_database("bench").await?;
    // Half of them are for requests.
    let connections = (2 * CONNECTIONS).to_string();
    let settings = [
        ("DATABASE_URL", &*database),
        ("NATS_URL", broker),
        ("RELAY", relay),
        ("DATABASE_POOL", &connections),
        ("RUST_LOG", "warn"),
    ];
    let service = Service::start("order-service", &settings).await?;
    let (http, url) = (http_client(), service.url("/orders"));
    let answers = async || http.get(&url).send().await?.error_for_status();
    wait_until(START_WITHIN, "order-service answers", answers).await?;
    Ok((service, database))
}

/// Orders a second, over as many connections as there may be.
async fn posts(service: &Service) -> f64 {
    let (http, url) = (http_client(), service.url("/orders"));
    per_second(move || {
        let request = http.post(&url).json(&an_order()).send();
        async move { request.await.is_ok_and(|answer| answer.status() == 201) }
    })
    .await
}

/// The same two inserts, in a transaction each.
async fn inserts(db: &PgPool) -> f64 {
    let db = db.clone();
    per_second(move || {
        let db = db.clone();
        async move { insert(&db).await.is_ok() }
    })
    .await
}

async fn insert(db: &PgPool) -> anyhow::Result<()> {
    let context = Context { correlation_id: "bench".to_owned(), traceparent: None };
    let (order_id, customer_id) = (Uuid::now_v7(), Uuid::new_v4());
    let total = json!({"amount": 12500, "currency": "EUR"});
    let mut tx = db.begin().await?;
    sqlx::query(
        "INSERT INTO orders (id, customer_id, status, amount, currency, version)
         VALUES ($1, $2, 'pending', 12500, 'EUR', 1)",
    )
    .bind(order_id)
    .bind(customer_id)
    .execute(&mut *tx)
    .await?;
    let event = OrderCreated { order_id, customer_id, total };
    append(&mut tx, AggregateVersion { id: order_id, sequence: 1 }, &event, &context).await?;
    tx.commit().await?;
    Ok(())
}

/// Does `work` again and again on every connection, for a round. Returns how often a second it was done.
async fn per_second<W>(work: impl Fn() -> W + Clone + Send + 'static) -> f64
where
    W: Future<Output = bool> + Send,
{
    let began = Instant::now();
    let mut connections = JoinSet::new();
    for _ in 0..CONNECTIONS {
        let work = work.clone();
        connections.spawn(async move {
            let mut count = 0;
            while began.elapsed() < ROUND {
                count += u64::from(work().await);
            }
            count
        });
    }
    let counts = connections.join_all().await;
    counts.into_iter().sum::<u64>() as f64 / began.elapsed().as_secs_f64()
}
