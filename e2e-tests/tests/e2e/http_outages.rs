//! What clients see while the database or the broker is away, and when it is back.

use std::time::{Duration, Instant};

use e2e_tests::{Pair, Service, eventually, http_client};
use futures::future::join_all;
use serde_json::Value;
use uuid::Uuid;

use crate::http::{Answer, SOON, order_of, send, try_send};

/// The default of the setting of this name.
const SHUTDOWN_GRACE: Duration = Duration::from_secs(10);

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
