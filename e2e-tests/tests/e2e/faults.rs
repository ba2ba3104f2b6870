//! What the tests of faults share: clients that place orders while something is wrong, and what must
//! be true when it is over.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use e2e_tests::{Pair, PairBuilder, eventually, http_client};
use futures::stream::{FuturesUnordered, StreamExt};
use reqwest::{Client, RequestBuilder};
use sqlx::PgPool;
use tokio::time::{Instant, interval};
use uuid::Uuid;

use crate::http::{Answer, SOON, order_of, try_send};

/// Between two orders.
const PACE: Duration = Duration::from_millis(50);

/// A client waits no longer for an answer: a lock's time-out, and before it a connection's.
const ANSWERED_WITHIN: Duration = Duration::from_secs(15);

/// A pair in which the first failure that counts is the last: an event is failed, or a dead letter.
pub fn unforgiving() -> PairBuilder {
    Pair::builder()
        .setting("RELAY_MAX_ATTEMPTS", "1")
        .setting("RELAY_BACKOFF_BASE", "10ms")
        .setting("RELAY_BACKOFF_MAX", "100ms")
        .setting("CONSUMER_MAX_ATTEMPTS", "1")
        .setting("CONSUMER_BACKOFF_BASE", "10ms")
        .setting("CONSUMER_BACKOFF_MAX", "100ms")
}

/// What clients were answered.
pub struct Placed {
    pub orders: BTreeSet<Uuid>,
    /// How often one was asked to come back.
    pub turned_away: usize,
    /// How often one asked again for what had been done.
    pub replayed: usize,
}

/// Places orders with all instances in turn for as long as `trouble` lasts, and cancels every fourth.
/// Each client asks again, under its key, until it is answered.
pub async fn while_orders_come<T>(pair: &Pair, trouble: impl Future<Output = T>) -> (Placed, T) {
    let urls: Vec<String> = pair.orders.iter().map(|service| service.url("/orders")).collect();
    let clients = Clients { http: http_client(), turned_away: AtomicUsize::new(0), replayed: AtomicUsize::new(0) };
    let mut placing = FuturesUnordered::new();
    let mut orders = BTreeSet::new();
    let mut pace = interval(PACE);
    let mut turns = urls.iter().cycle().zip(1..);
    let mut trouble = std::pin::pin!(trouble);
    let outcome = loop {
        tokio::select! {
            outcome = &mut trouble => break outcome,
            Some(id) = placing.next() => { orders.insert(id); }
            _ = pace.tick() => {
                let (url, number) = turns.next().expect("they go round");
                placing.push(clients.place(url, number % 4 == 0));
            }
        }
    };
    while let Some(id) = placing.next().await {
        orders.insert(id);
    }
    let (turned_away, replayed) =
        (clients.turned_away.load(Ordering::Relaxed), clients.replayed.load(Ordering::Relaxed));
    (Placed { orders, turned_away, replayed }, outcome)
}

struct Clients {
    http: Client,
    turned_away: AtomicUsize,
    replayed: AtomicUsize,
}

impl Clients {
    async fn place(&self, orders_url: &str, is_cancelled: bool) -> Uuid {
        let (key, order) = (Uuid::new_v4().to_string(), order_of(Uuid::new_v4()));
        let place = || self.http.post(orders_url).header("Idempotency-Key", &key).json(&order);
        let answer = self.until_answered(201, place).await;
        if answer.header("idempotency-replayed").is_some() {
            self.replayed.fetch_add(1, Ordering::Relaxed);
        }
        let id = answer.json()["id"].as_str().expect("an order has an id").to_owned();
        if is_cancelled {
            self.until_answered(200, || self.http.post(format!("{orders_url}/{id}/cancel"))).await;
        }
        id.parse().expect("it is a UUID")
    }

    /// Until then it may be turned away, or left without an answer by a service that is away.
    async fn until_answered(&self, status: u16, request: impl Fn() -> RequestBuilder) -> Answer {
        eventually(3 * SOON, "a client is answered", async || {
            let asked = Instant::now();
            let answer = try_send(request()).await.map_err(|error| error.to_string())?;
            assert!(asked.elapsed() < ANSWERED_WITHIN, "after {:?}: {answer:?}", asked.elapsed());
            if answer.status == status {
                return Ok(answer);
            }
            answer.problem(503);
            self.turned_away.fetch_add(1, Ordering::Relaxed);
            Err(answer.body)
        })
        .await
    }
}

/// No event's publishing was counted as failed, by either relay.
pub async fn no_event_is_blamed(pair: &Pair) {
    for db in [&pair.orders_db, &pair.payments_db] {
        assert_eq!(count(db, "attempts > 0 OR failed_at IS NOT NULL").await, 0);
    }
}

/// How many deliveries there are of which this is true.
pub async fn count(db: &PgPool, condition: &'static str) -> i64 {
    let sql = format!("SELECT count(*) FROM outbox_deliveries WHERE {condition}");
    sqlx::query_scalar(sqlx::AssertSqlSafe(sql)).fetch_one(db).await.expect("the database answers")
}
