//! The promise, kept by whole services: the points of README, in its order.

use std::collections::BTreeSet;
use std::time::Duration;

use e2e_tests::{Counts, Pair, Provider, Reply, Service, eventually};
use futures::future::join_all;
use serde_json::json;
use uuid::Uuid;

use crate::fixture::{SOON, messages};

/// The event types in a stream about one aggregate's order, in their order.
async fn told(pair: &Pair, stream: &str, order: Uuid) -> Vec<String> {
    let jetstream = pair.nats.jetstream().await.unwrap();
    let about =
        |payload: &[u8]| serde_json::from_slice::<serde_json::Value>(payload).unwrap()["order_id"] == json!(order);
    let messages = messages(&jetstream, stream).await;
    messages.iter().filter(|m| about(&m.payload)).map(|m| m.headers["ce-type"].clone()).collect()
}

#[tokio::test]
async fn an_order_is_paid_declined_or_refunded_and_both_services_tell_of_it_in_order() {
    let pair = Pair::start().await;
    let paid = pair.place(12_500, "EUR").await.id;
    let declined = pair.place(12_513, "EUR").await.id;
    let refunded = pair.place(99, "JPY").await.id;
    pair.order_becomes(paid, "paid").await;
    pair.order_becomes(declined, "declined").await;
    pair.order_becomes(refunded, "paid").await;
    assert_eq!(pair.cancel(refunded).await.status, "cancelled");
    pair.order_becomes(refunded, "refunded").await;

    let counts = pair.all_is_well(&[paid, declined, refunded].into()).await;
    assert_eq!(counts, Counts { orders: 3, events: 8 + 4, duplicates: 0 });
    assert_eq!(told(&pair, "ORDERS", paid).await, ["OrderCreated", "OrderPaid"]);
    assert_eq!(told(&pair, "PAYMENTS", paid).await, ["PaymentCaptured"]);
    assert_eq!(told(&pair, "ORDERS", declined).await, ["OrderCreated", "OrderDeclined"]);
    assert_eq!(told(&pair, "PAYMENTS", declined).await, ["PaymentDeclined"]);
    assert_eq!(told(&pair, "ORDERS", refunded).await, ["OrderCreated", "OrderPaid", "OrderCancelled", "OrderRefunded"]);
    assert_eq!(told(&pair, "PAYMENTS", refunded).await, ["PaymentCaptured", "PaymentRefunded"]);
    let payment = pair.payment_of(declined).await.unwrap();
    assert_eq!((payment.status.as_str(), payment.reason.as_deref()), ("declined", Some("insufficient_funds")));
}

#[tokio::test]
async fn what_checks_the_promise_after_each_fault_finds_each_way_to_break_it() {
    let gateway = Provider::start(|_| Reply::Done).await;
    let pair = Pair::builder().payment_setting("PAYMENT_GATEWAY_URL", gateway.url()).start().await;
    let mut orders = Vec::new();
    for _ in 0..6 {
        orders.push(pair.place(100, "EUR").await.id);
    }
    pair.all_is_well(&orders.iter().copied().collect()).await;
    let checker = pair.checker().await;
    assert_eq!(checker.check_gateway(&gateway).await.unwrap(), [""; 0]);
    for service in [&pair.orders[0], &pair.payments[0]] {
        service.kill().await.unwrap();
    }

    let (unknown, lost) = (orders.pop().unwrap(), Uuid::now_v7());
    let (db, peer) = (&pair.orders_db, &pair.payments_db);
    sqlx::query("ALTER TABLE payments DROP CONSTRAINT payments_one_per_order").execute(peer).await.unwrap();
    for (db, damage, about) in [
        (db, "UPDATE orders SET status = 'declined' WHERE id = $1", orders[0]),
        (db, "UPDATE orders SET version = version + 1 WHERE id = $1", orders[1]),
        (db, "UPDATE outbox_deliveries SET published_at = NULL WHERE aggregate_id = $1", orders[2]),
        (peer, "DELETE FROM processed_events WHERE event_id IN (SELECT id FROM payments WHERE order_id = $1)", orders[3]),
        (peer, "INSERT INTO processed_events (consumer, event_id) VALUES ('payment-service', $1)", lost),
        (
            peer,
            "INSERT INTO payments (id, order_id, status, amount, currency, charge_id, version)
             SELECT gen_random_uuid(), order_id, status, amount, currency, charge_id, version
             FROM payments WHERE order_id = $1",
            orders[4],
        ),
        (
            peer,
            "INSERT INTO payments (id, order_id, status, amount, currency, charge_id, version)
             VALUES (gen_random_uuid(), $1, 'captured', 100, 'EUR', 'one-more', 1)",
            lost,
        ),
        (
            peer,
            "INSERT INTO parked_events (consumer, event_id, source, aggregate_id, aggregate_sequence, event_type, subject,
                                        headers, payload, reason, attempts, next_attempt_at)
             VALUES ('payment-service', $1, '/order-service', $1, 2, 'OrderPaid', 'orders.OrderPaid', '{}', '', 'gap', 0,
                     now())",
            lost,
        ),
    ] {
        sqlx::query(damage).bind(about).execute(db).await.unwrap_or_else(|error| panic!("{damage}: {error}"));
    }
    let mut stream = checker.jetstream.get_stream("ORDERS").await.unwrap();
    let first = stream.info().await.unwrap().state.first_sequence;
    stream.delete_message(first).await.unwrap();

    let answered = orders.iter().copied().chain([lost]).collect();
    let findings = checker.check(&answered).await.unwrap().unwrap_err();
    for expected in [
        format!("order {lost} was answered and is lost"),
        format!("order {unknown} was not asked for"),
        format!("order {} is declined, its payment is Some(\"captured\")", orders[0]),
        format!("ORDERS: events of {}", orders[1]),
        "is not published".to_owned(),
        "took no effect".to_owned(),
        format!("event {lost} took effect without being"),
        format!("order {} has a second payment", orders[4]),
        format!("there is a payment for order {lost}, which does not exist"),
        "payment-service: 1 parked".to_owned(),
        "ORDERS: first publications of".to_owned(),
    ] {
        assert!(findings.iter().any(|finding| finding.contains(&expected)), "{expected}: {findings:#?}");
    }
    let audited = e2e_tests::audit(&pair.orders_url, &pair.payments_url, pair.nats.url()).await;
    assert!(audited.unwrap_err().to_string().contains("double effect"));

    // One more charge for an order, and money that nobody here knows of.
    let charge = json!({"payment_id": lost, "order_id": orders[0], "amount": 100, "currency": "EUR"});
    let charging = e2e_tests::http_client().post(format!("{}/charges", gateway.url()));
    charging.header("Idempotency-Key", "another").json(&charge).send().await.unwrap();
    let findings = checker.check_gateway(&gateway).await.unwrap();
    for expected in ["was asked in 2 ways", "is not known here", "is not known there"] {
        assert!(findings.iter().any(|finding| finding.contains(expected)), "{expected}: {findings:#?}");
    }
}

#[tokio::test]
async fn everything_that_follows_from_a_request_carries_its_correlation_id() {
    let pair = Pair::start().await;
    let order = pair.place(100, "EUR").await.id;
    pair.order_becomes(order, "paid").await;
    let jetstream = pair.nats.jetstream().await.unwrap();
    let mut ids = BTreeSet::new();
    for stream in ["ORDERS", "PAYMENTS"] {
        ids.extend(messages(&jetstream, stream).await.iter().map(|m| m.headers["ce-correlationid"].clone()));
    }
    assert_eq!(ids.len(), 1, "{ids:?}");
}

#[tokio::test]
async fn three_instances_of_each_service_keep_the_promise_together() {
    // Each also has a small batch, so that they really share the work, and all start at once on
    // empty databases.
    let pair =
        Pair::builder().setting("RELAY_BATCH", "20").setting("CONSUMER_BATCH", "8").instances(3, 3).start().await;
    let orders: Vec<Uuid> = join_all((0..150).map(async |n| {
        let order = pair.place(if n % 10 == 0 { 113 } else { 100 }, "EUR").await.id;
        // At any moment of its life: before, while and after it is paid.
        if n % 3 == 0 {
            tokio::time::sleep(Duration::from_millis(fastrand::u64(..100))).await;
            let _ = pair.api.cancel(order).await;
        }
        order
    }))
    .await;
    let counts = pair.all_is_well(&orders.into_iter().collect()).await;
    assert_eq!(counts.orders, 150);
}

#[tokio::test]
async fn services_that_are_killed_at_any_moment_lose_and_double_nothing() {
    let pair = Pair::builder().setting("RELAY_LEASE", "1s").setting("RELAY_PUBLISH_TIMEOUT", "500ms").start().await;
    let url = pair.orders[0].url("/orders");
    let http = e2e_tests::http_client();
    // Clients ask again, under the same key, until they are answered.
    let clients = join_all((0..60).map(async |n| {
        tokio::time::sleep(Duration::from_millis(n * 50)).await;
        let body = json!({"customer_id": Uuid::new_v4(), "total": {"amount": 100, "currency": "EUR"}});
        let key = Uuid::new_v4().to_string();
        eventually(SOON * 2, "the order is answered", async || {
            let answer = http.post(&url).header("Idempotency-Key", &key).json(&body).send().await?;
            let order: serde_json::Value = answer.error_for_status()?.json().await?;
            Ok::<Uuid, reqwest::Error>(order["id"].as_str().unwrap().parse().unwrap())
        })
        .await
    }));
    let killer = async {
        for _ in 0..4 {
            for service in [&pair.orders[0], &pair.payments[0]] {
                tokio::time::sleep(Duration::from_millis(fastrand::u64(100..500))).await;
                service.kill().await.unwrap();
                service.start_again().await.unwrap();
                service.wait_until_ready(SOON).await.unwrap();
            }
        }
    };
    let (orders, ()) = futures::join!(clients, killer);
    let counts = pair.all_is_well(&orders.into_iter().collect()).await;
    assert_eq!(counts.orders, 60);
}

#[tokio::test]
async fn relays_in_processes_of_their_own_are_woken_by_the_service() {
    let patient = [("RELAY_POLL_MIN", "1h"), ("RELAY_POLL_MAX", "1h")];
    let pair = Pair::builder().setting("RELAY", "off").start().await;
    let mut relays = Vec::new();
    for database in [&pair.orders_url, &pair.payments_url] {
        let settings = [("DATABASE_URL", database.as_str()), ("NATS_URL", pair.nats.url())];
        let relay = Service::start("outbox-relay", &[settings, patient].concat()).await.unwrap();
        relay.wait_until_ready(SOON).await.unwrap();
        relays.push(relay);
    }
    let mut orders = BTreeSet::new();
    for _ in 0..3 {
        let order = pair.place(100, "EUR").await.id;
        pair.order_becomes(order, "paid").await;
        orders.insert(order);
    }
    pair.all_is_well(&orders).await;
    for relay in &relays {
        assert!(relay.terminate(Duration::from_secs(5)).await.unwrap().success());
    }
}
