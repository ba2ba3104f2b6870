//! Both services together: throughput, latency, a backlog, and what they cost when nothing happens.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::ensure;
use e2e_tests::{Nats, Service, http_client, wait_until};
use sqlx::PgPool;
use tokio::task::JoinSet;
use uuid::Uuid;

use super::{Bench, an_order};

const START_WITHIN: Duration = Duration::from_secs(60);
const SETTLED_WITHIN: Duration = Duration::from_secs(600);
const BACKLOG_WITHIN: Duration = Duration::from_secs(60 * 60);
const LOOP_RATE: f64 = 2_500.0;
/// So many clients place orders, and no more while so many wait to be paid.
const CLIENTS: usize = 32;
const WAITING: u64 = 5_000;
const LOAD_FOR: Duration = Duration::from_secs(20);
/// The line of order-service's metrics that counts paid orders.
const ORDERS_PAID: &str = "outbox_appended_total{event_type=\"OrderPaid\"} ";
const BACKLOG: u64 = 3_000_000;

struct Pair {
    orders: Service,
    payments: Service,
    orders_db: PgPool,
    payments_db: PgPool,
    // After the services that use it.
    nats: Nats,
}

impl Pair {
    async fn start(bench: &Bench) -> anyhow::Result<Self> {
        let nats = bench.nats().await?;
        let (orders_url, payments_url) =
            (bench.postgres.create_database("orders").await?, bench.postgres.create_database("payments").await?);
        let orders = start("order-service", &orders_url, &nats).await?;
        let payments = start("payment-service", &payments_url, &nats).await?;
        let (orders_db, payments_db) = (PgPool::connect(&orders_url).await?, PgPool::connect(&payments_url).await?);
        Ok(Self { orders, payments, orders_db, payments_db, nats })
    }

    /// Places orders at a steady rate, whatever the answers take. Returns how many were answered 201.
    async fn load(&self, rate: u64, length: Duration) -> u64 {
        let (http, url) = (http_client(), self.orders.url("/orders"));
        let mut requests = JoinSet::new();
        let began = Instant::now();
        let mut sent = 0;
        while began.elapsed() < length {
            while sent < (began.elapsed().as_secs_f64() * rate as f64) as u64 {
                let request = http.post(&url).json(&an_order()).send();
                requests.spawn(async move { request.await.is_ok_and(|answer| answer.status() == 201) });
                sent += 1;
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        requests.join_all().await.into_iter().map(u64::from).sum()
    }

    /// Clients that place orders until this is dropped, and pause while too many wait to be paid.
    fn place_while_few_wait(&self, orders: &Arc<Orders>) -> JoinSet<()> {
        let (http, url) = (http_client(), self.orders.url("/orders"));
        let mut clients = JoinSet::new();
        for _ in 0..CLIENTS {
            let (http, url, orders) = (http.clone(), url.clone(), Arc::clone(orders));
            clients.spawn(async move {
                loop {
                    if orders.waiting() > WAITING {
                        tokio::time::sleep(Duration::from_millis(1)).await;
                        continue;
                    }
                    let answer = http.post(&url).json(&an_order()).send().await;
                    let is_placed = answer.is_ok_and(|answer| answer.status() == 201);
                    orders.placed.fetch_add(u64::from(is_placed), Ordering::Relaxed);
                }
            });
        }
        clients
    }

    /// Keeps count of the orders that are paid, for so long: as the service counts them, which costs nothing.
    async fn watch(&self, orders: &Orders, length: Duration) -> anyhow::Result<()> {
        let (http, url) = (http_client(), self.orders.admin_url("/metrics"));
        let began = Instant::now();
        while began.elapsed() < length {
            let metrics = http.get(&url).send().await?.text().await?;
            let line = metrics.lines().find_map(|line| line.strip_prefix(ORDERS_PAID));
            orders.paid.store(line.map_or(Ok(0), str::parse)?, Ordering::Relaxed);
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        Ok(())
    }

    async fn all_are_paid(&self) -> anyhow::Result<()> {
        let sql = "SELECT EXISTS (SELECT FROM orders WHERE status = 'pending')";
        ensure!(!sqlx::query_scalar::<_, bool>(sql).fetch_one(&self.orders_db).await?, "some are pending");
        Ok(())
    }

    /// Deliveries of messages that had been delivered before.
    async fn delivered_again(&self) -> anyhow::Result<u64> {
        let jetstream = self.nats.jetstream().await?;
        let mut again = 0;
        for (stream, durable) in [("ORDERS", "payment-service"), ("PAYMENTS", "order-service")] {
            let delivered = jetstream.get_stream(stream).await?.consumer_info(durable).await?.delivered;
            again += delivered.consumer_sequence - delivered.stream_sequence;
        }
        Ok(again)
    }

    async fn settled(&self) -> anyhow::Result<()> {
        wait_until(SETTLED_WITHIN, "all orders are paid", async || self.all_are_paid().await).await
    }
}

async fn start(name: &str, database: &str, nats: &Nats) -> anyhow::Result<Service> {
    let settings = [("DATABASE_URL", database), ("NATS_URL", nats.url()), ("RUST_LOG", "warn")];
    let service = Service::start(name, &settings).await?;
    service.wait_until_ready(START_WITHIN).await?;
    Ok(service)
}

#[derive(Default)]
struct Orders {
    placed: AtomicU64,
    paid: AtomicU64,
}

impl Orders {
    fn waiting(&self) -> u64 {
        self.placed.load(Ordering::Relaxed).saturating_sub(self.paid.load(Ordering::Relaxed))
    }
}

/// Clients that place orders as fast as these are paid: so that what is measured is sustained.
pub async fn whole_loop(bench: &mut Bench) -> anyhow::Result<()> {
    let pair = Pair::start(bench).await?;
    let orders = Arc::new(Orders::default());
    let placing = pair.place_while_few_wait(&orders);
    pair.watch(&orders, LOAD_FOR / 4).await?;
    let (paid_before, waiting_before, began) = (orders.paid.load(Ordering::Relaxed), orders.waiting(), Instant::now());
    pair.watch(&orders, LOAD_FOR).await?;
    let rate = (orders.paid.load(Ordering::Relaxed) - paid_before) as f64 / began.elapsed().as_secs_f64();
    let growth = orders.waiting() as f64 - waiting_before as f64;
    drop(placing);
    bench.at_least("orders paid, sustained", "orders/s", rate, LOOP_RATE);
    bench.at_most("growth of the backlog", "orders", growth, WAITING as f64);
    pair.settled().await
}

pub async fn latency(bench: &mut Bench) -> anyhow::Result<()> {
    let pair = Pair::start(bench).await?;
    pair.load(bench.rate, Duration::from_secs(2)).await;
    pair.settled().await?;
    let since: time::OffsetDateTime = sqlx::query_scalar("SELECT clock_timestamp()").fetch_one(&pair.orders_db).await?;
    pair.load(bench.rate, LOAD_FOR).await;
    pair.settled().await?;

    // One server holds both databases, so that one clock wrote all of these.
    let appended: Vec<(Uuid, time::OffsetDateTime)> = sqlx::query_as(
        "SELECT event_id, created_at FROM outbox_events WHERE event_type = 'OrderCreated' AND created_at > $1",
    )
    .bind(since)
    .fetch_all(&pair.orders_db)
    .await?;
    let processed: Vec<(Uuid, time::OffsetDateTime)> =
        sqlx::query_as("SELECT event_id, processed_at FROM processed_events").fetch_all(&pair.payments_db).await?;
    let processed: std::collections::HashMap<_, _> = processed.into_iter().collect();
    let to_consumer =
        appended.iter().filter_map(|(id, at)| Some((*processed.get(id)? - *at).as_seconds_f64() * 1_000.0));
    let to_consumer = Percentiles::of(to_consumer.collect());
    let to_paid: Vec<f64> = sqlx::query_scalar(
        "SELECT extract(epoch FROM paid.created_at - orders.created_at)::float8 * 1000
         FROM orders JOIN outbox_events paid ON paid.aggregate_id = orders.id AND paid.event_type = 'OrderPaid'
         WHERE orders.created_at > $1",
    )
    .bind(since)
    .fetch_all(&pair.orders_db)
    .await?;
    let to_paid = Percentiles::of(to_paid);
    let rate = bench.rate;
    bench.at_most(&format!("commit → consumer p50 at {rate}/s"), "ms", to_consumer.p50, 3.0);
    bench.at_most(&format!("commit → consumer p99 at {rate}/s"), "ms", to_consumer.p99, 15.0);
    bench.at_most(&format!("POST → paid p50 at {rate}/s"), "ms", to_paid.p50, 12.0);
    bench.at_most(&format!("POST → paid p99 at {rate}/s"), "ms", to_paid.p99, 50.0);
    Ok(())
}

struct Percentiles {
    p50: f64,
    p99: f64,
}

impl Percentiles {
    fn of(mut values: Vec<f64>) -> Self {
        values.sort_by(f64::total_cmp);
        let at = |part: f64| values.get((values.len() as f64 * part) as usize).copied().unwrap_or(f64::NAN);
        Self { p50: at(0.5), p99: at(0.99) }
    }
}

/// Orders that a night without a broker left behind.
/// Orders and their events.
const NIGHT: &str = "
WITH night AS (
    SELECT order_id, event_id FROM unnest($1::uuid[], $2::uuid[]) AS night (order_id, event_id)
), placed AS (
    INSERT INTO orders (id, customer_id, status, amount, currency, version)
    SELECT order_id, gen_random_uuid(), 'pending', 12500, 'EUR', 1 FROM night
    RETURNING id, customer_id
), event AS (
    INSERT INTO outbox_events (event_id, aggregate_type, aggregate_id, aggregate_sequence,
                               event_type, event_version, payload, headers)
    SELECT event_id, 'order', id, 1, 'OrderCreated', 1,
           jsonb_build_object('order_id', id, 'customer_id', customer_id,
                              'total', jsonb_build_object('amount', 12500, 'currency', 'EUR')),
           jsonb_build_object('correlationid', id)
    FROM night JOIN placed ON id = order_id
    RETURNING event_id, aggregate_type, aggregate_id, aggregate_sequence, created_at
)
INSERT INTO outbox_deliveries (event_id, aggregate_type, aggregate_id, aggregate_sequence, created_at)
SELECT event_id, aggregate_type, aggregate_id, aggregate_sequence, created_at FROM event";

pub async fn backlog(bench: &mut Bench) -> anyhow::Result<()> {
    let pair = Pair::start(bench).await?;
    let orders = BACKLOG / bench.smaller;
    let mut night = pair.orders_db.begin().await?;
    for first in (0..orders).step_by(100_000) {
        let new_ids = || (first..orders.min(first + 100_000)).map(|_| Uuid::now_v7()).collect::<Vec<_>>();
        sqlx::query(NIGHT).bind(new_ids()).bind(new_ids()).execute(&mut *night).await?;
    }
    night.commit().await?;
    let released = Instant::now();
    let (mut orders_peak, mut payments_peak) = (0.0_f64, 0.0_f64);
    wait_until(BACKLOG_WITHIN, "the backlog is paid", async || {
        orders_peak = orders_peak.max(megabytes(&pair.orders).await);
        payments_peak = payments_peak.max(megabytes(&pair.payments).await);
        tokio::time::sleep(Duration::from_millis(500)).await;
        pair.all_are_paid().await
    })
    .await?;
    let rate = orders as f64 / released.elapsed().as_secs_f64();
    bench.at_least("orders of a backlog paid", "orders/s", rate, LOOP_RATE);
    bench.at_most("order-service's memory, peak", "MB", orders_peak, 100.0);
    bench.at_most("payment-service's memory, peak", "MB", payments_peak, 100.0);
    bench.at_most("messages delivered again", "", pair.delivered_again().await? as f64, orders as f64 / 100.0);
    Ok(())
}

pub async fn idle(bench: &mut Bench) -> anyhow::Result<()> {
    let pair = Pair::start(bench).await?;
    // Polling has slowed down by then.
    tokio::time::sleep(Duration::from_secs(5)).await;
    let before = (cpu_seconds(&pair.orders).await, cpu_seconds(&pair.payments).await, transactions(&pair).await?);
    let began = Instant::now();
    tokio::time::sleep(LOAD_FOR).await;
    let after = (cpu_seconds(&pair.orders).await, cpu_seconds(&pair.payments).await, transactions(&pair).await?);
    let seconds = began.elapsed().as_secs_f64();
    bench.at_most("order-service, of a core", "%", (after.0 - before.0) / seconds * 100.0, 1.0);
    bench.at_most("payment-service, of a core", "%", (after.1 - before.1) / seconds * 100.0, 1.0);
    bench.at_most("transactions of each service", "per s", (after.2 - before.2) as f64 / seconds / 2.0, 10.0);
    Ok(())
}

async fn transactions(pair: &Pair) -> anyhow::Result<i64> {
    let sql = "SELECT sum(xact_commit + xact_rollback)::bigint FROM pg_stat_database WHERE datname = ANY ($1)";
    let mut names: Vec<String> = Vec::new();
    for db in [&pair.orders_db, &pair.payments_db] {
        names.push(sqlx::query_scalar("SELECT current_database()::text").fetch_one(db).await?);
    }
    Ok(sqlx::query_scalar(sql).bind(names).fetch_one(&pair.orders_db).await?)
}

/// Resident memory of a service.
async fn megabytes(service: &Service) -> f64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", service.pid().await)).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    line.and_then(|line| line.split_whitespace().next()?.parse::<f64>().ok()).unwrap_or(f64::NAN) / 1024.0
}

/// Processor time that a service has used. The kernel counts it in hundredths of a second.
async fn cpu_seconds(service: &Service) -> f64 {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", service.pid().await)).unwrap_or_default();
    let after_name = stat.rsplit(')').next().unwrap_or_default().to_owned();
    let fields: Vec<f64> = after_name.split_whitespace().filter_map(|field| field.parse().ok()).collect();
    // The state, which is no number, is left out: user and system time are then the 11th and 12th.
    fields.get(10..12).map_or(f64::NAN, |times| times.iter().sum::<f64>() / 100.0)
}
