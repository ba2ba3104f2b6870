//! What clients see while the database or the broker is away, and when it is back.

use std::time::{Duration, Instant};

use e2e_tests::{Pair, Service, eventually, http_client};
use futures::future::join_all;
use outbox_core::{AggregateVersion, append};
use serde_json::{Value, json};
use uuid::Uuid;

use crate::fixture::{ThingHappened, context};
use crate::http::{Answer, SOON, order_of, send, try_send};

/// The default of the setting of this name.
const SHUTDOWN_GRACE: Duration = Duration::from_secs(10);

/// Half of the default of `DATABASE_POOL`.
const CONNECTIONS_FOR_REQUESTS: i64 = 8;

/// Before any of them gives up waiting for a lock.
const MEANWHILE: Duration = Duration::from_secs(5);

/// Turned away, however the database is away, within this time.
const TURNED_AWAY_WITHIN: Duration = Duration::from_secs(10);

async fn get(url: String) -> Answer {
    send(http_client().get(url)).await
}

async fn post(service: &Service, customer: Uuid, key: &str) -> Answer {
    let request = http_client().post(service.url("/orders")).header("idempotency-key", key);
    send(request.json(&order_of(customer))).await
}

/// Waits until the service says that it is not ready, and that it is because of `part`.
pub async fn becomes_unready(service: &Service, part: &str) {
    eventually(SOON, &format!("readiness is red because of {part}"), async || {
        // It may have been started just now.
        let ready = try_send(http_client().get(service.admin_url("/health/ready"))).await;
        let ready = ready.map_err(|error| error.to_string())?;
        let says_why =
            ready.status == 503 && ready.json()["reasons"][part].as_str().is_some_and(|reason| !reason.is_empty());
        if says_why { Ok(()) } else { Err(ready.body) }
    })
    .await;
    assert_eq!(get(service.admin_url("/health/live")).await.status, 200, "it lives");
}

pub async fn becomes_ready(pair: &Pair) {
    for service in pair.orders.iter().chain(&pair.payments) {
        service.wait_until_ready(SOON).await.unwrap();
    }
}

/// Every kind of request to either service is turned away with a 503 that says when to come back.
async fn assert_turned_away(pair: &Pair, customer: Uuid, key: &str) {
    let (orders, payments) = (&pair.orders[0], &pair.payments[0]);
    let started = Instant::now();
    let reads = [
        orders.url("/orders"),
        orders.url(&format!("/orders/{customer}")),
        payments.url(&format!("/payments/{customer}")),
        payments.url(&format!("/payments?order_id={customer}")),
    ];
    let writes = join_all((0..20).map(|_| post(orders, customer, key)));
    let cancel = send(http_client().post(orders.url(&format!("/orders/{customer}/cancel"))));
    let (reads, writes, cancel) = tokio::join!(join_all(reads.map(get)), writes, cancel);
    for answer in reads.into_iter().chain(writes).chain([cancel]) {
        answer.problem(503);
        let seconds: u32 = answer.header("retry-after").unwrap().parse().expect("it says when, in seconds");
        assert!((1..=60).contains(&seconds));
    }
    assert!(started.elapsed() < TURNED_AWAY_WITHIN, "it took {:?}", started.elapsed());
}

/// Asks until the service takes the order, which may then be there once only.
async fn is_taken(pair: &Pair, customer: Uuid, key: &str) -> Value {
    let order = eventually(SOON, "orders are taken again", async || {
        let answer = post(&pair.orders[0], customer, key).await;
        if answer.status == 201 { Ok(answer.json()) } else { Err(answer) }
    })
    .await;
    let count = "SELECT count(*) FROM orders WHERE customer_id = $1";
    let count: i64 = sqlx::query_scalar(count).bind(customer).fetch_one(&pair.orders_db).await.unwrap();
    assert_eq!(count, 1);
    order
}

/// Told to stop, each service does so within its grace period, whoever does not answer.
async fn stop_in_good_order(pair: &Pair) {
    for service in pair.orders.iter().chain(&pair.payments) {
        let status = service.terminate(SHUTDOWN_GRACE).await.unwrap();
        assert_eq!(status.code(), Some(0), "{}", service.last_words());
    }
}

async fn becomes_paid(pair: &Pair, order: &Value) {
    pair.order_becomes(order["id"].as_str().unwrap().parse().unwrap(), "paid").await;
}

#[tokio::test]
async fn while_the_database_is_away_clients_are_asked_to_come_back_and_then_all_goes_on() {
    let pair = Pair::builder().own_servers().start().await;
    let (customer, key) = (Uuid::new_v4(), "while-it-is-stopped");

    pair.postgres().stop().await.unwrap();
    assert_turned_away(&pair, customer, key).await;
    becomes_unready(&pair.orders[0], "database").await;
    becomes_unready(&pair.payments[0], "database").await;
    pair.postgres().start_again().await.unwrap();
    let order = is_taken(&pair, customer, key).await;
    becomes_paid(&pair, &order).await;
    becomes_ready(&pair).await;

    // A database that is there and does not answer is as much away.
    let (customer, key) = (Uuid::new_v4(), "while-it-is-frozen");
    pair.postgres().freeze().await.unwrap();
    assert_turned_away(&pair, customer, key).await;
    becomes_unready(&pair.orders[0], "database").await;
    pair.postgres().thaw().await.unwrap();
    let order = is_taken(&pair, customer, key).await;
    becomes_paid(&pair, &order).await;
    becomes_ready(&pair).await;

    pair.postgres().freeze().await.unwrap();
    stop_in_good_order(&pair).await;
}

#[tokio::test]
async fn while_the_broker_is_away_orders_are_taken_and_when_it_is_back_they_are_paid() {
    let pair = Pair::builder().own_servers().start().await;
    pair.nats.stop_at_once().await.unwrap();
    becomes_unready(&pair.orders[0], "broker").await;
    becomes_unready(&pair.payments[0], "broker").await;

    let mut orders = Vec::new();
    for _ in 0..10 {
        orders.push(pair.place(12500, "EUR").await);
    }
    assert_eq!(pair.order(orders[0].id).await.status, "pending");
    let missing = get(pair.payments[0].url(&format!("/payments?order_id={}", orders[0].id))).await;
    missing.problem(404);

    pair.nats.start_again().await.unwrap();
    for order in orders {
        pair.order_becomes(order.id, "paid").await;
    }
    becomes_ready(&pair).await;

    pair.nats.freeze().await.unwrap();
    stop_in_good_order(&pair).await;
}

#[tokio::test]
async fn a_service_that_starts_without_its_database_turns_clients_away_until_it_comes() {
    let pair = Pair::builder().own_servers().start().await;
    let customer = Uuid::new_v4();
    for service in [&pair.orders[0], &pair.payments[0]] {
        service.kill().await.unwrap();
    }
    pair.postgres().stop().await.unwrap();
    for service in [&pair.orders[0], &pair.payments[0]] {
        service.start_again().await.unwrap();
        becomes_unready(service, "start").await;
    }
    assert_turned_away(&pair, customer, "a-key").await;
    pair.postgres().start_again().await.unwrap();
    becomes_ready(&pair).await;
    assert_eq!(post(&pair.orders[0], customer, "a-key").await.status, 201);
}

#[tokio::test]
async fn requests_that_pile_up_do_not_keep_the_relay_from_the_database() {
    let pair = Pair::start().await;
    let paid = pair.place(100, "EUR").await;
    pair.order_becomes(paid.id, "paid").await;

    let mut held = pair.orders_db.begin().await.unwrap();
    sqlx::query("LOCK TABLE idempotency_keys").execute(&mut *held).await.unwrap();
    let requests: Vec<_> = (0..100)
        .map(|n| {
            let request = http_client().post(pair.orders[0].url("/orders")).header("idempotency-key", n.to_string());
            tokio::spawn(send(request.json(&order_of(Uuid::new_v4()))))
        })
        .collect();
    let connections_in_wait = async || -> i64 {
        let waiting = "SELECT count(*) FROM pg_stat_activity
                       WHERE datname = current_database() AND wait_event_type = 'Lock'";
        sqlx::query_scalar(waiting).fetch_one(&pair.orders_db).await.unwrap()
    };
    eventually(SOON, "requests hold all the connections that they may", async || match connections_in_wait().await {
        CONNECTIONS_FOR_REQUESTS => Ok(()),
        fewer => Err(fewer),
    })
    .await;

    // The relay needs nothing that the requests wait for.
    let mut tx = pair.orders_db.begin().await.unwrap();
    let aggregate = AggregateVersion { id: Uuid::now_v7(), sequence: 1 };
    let event = append(&mut tx, aggregate, &ThingHappened(json!({})), &context()).await.unwrap();
    tx.commit().await.unwrap();
    eventually(MEANWHILE, "the event is published and has taken effect", async || {
        let processed = sqlx::query_scalar("SELECT count(*) FROM processed_events WHERE event_id = $1").bind(event);
        match processed.fetch_one(&pair.payments_db).await.unwrap() {
            1 => Ok(()),
            other => Err::<(), i64>(other),
        }
    })
    .await;
    assert_eq!(connections_in_wait().await, CONNECTIONS_FOR_REQUESTS, "they do still");
    held.rollback().await.unwrap();
    for request in requests {
        let status = request.await.unwrap().status;
        assert!([201, 503].contains(&status), "{status}");
    }
}
