//! Metrics: every one is there once what it measures has happened.

use std::collections::BTreeSet;

use e2e_tests::{Pair, Provider, Reply, eventually, http_client};
use outbox_core::measure;

use crate::fixture::SOON;

#[tokio::test]
async fn every_metric_is_there_once_what_it_measures_has_happened() {
    // Asked again after an answer that passes: something is parked, and retried.
    let provider = Provider::start(|call| match (call.attempt, call.amount()) {
        (1, 300) => Reply::Status(503),
        (_, 400) => Reply::Status(402),
        (_, 500) => Reply::Declined("no"),
        _ => Reply::Done,
    })
    .await;
    let pair = Pair::builder()
        .payment_setting("PAYMENT_GATEWAY_URL", provider.url())
        .payment_setting("CONSUMER_BACKOFF_BASE", "10ms")
        .start()
        .await;
    for amount in [200, 300] {
        let order = pair.place(amount, "EUR").await.id;
        pair.order_becomes(order, "paid").await;
        pair.cancel(order).await;
        pair.order_becomes(order, "refunded").await;
    }
    pair.place(400, "EUR").await;
    let declined = pair.place(500, "EUR").await.id;
    pair.order_becomes(declined, "declined").await;
    // An event that no relay can publish.
    let unsendable = "WITH event AS (
        INSERT INTO outbox_events (event_id, aggregate_type, aggregate_id, aggregate_sequence, event_type, event_version, payload, headers)
        VALUES (gen_random_uuid(), 'order', gen_random_uuid(), 1, 'Not a token', 1, '{}', '{\"correlationid\": \"x\"}') RETURNING *)
        INSERT INTO outbox_deliveries (event_id, aggregate_type, aggregate_id, aggregate_sequence, created_at)
        SELECT event_id, aggregate_type, aggregate_id, aggregate_sequence, created_at FROM event";
    sqlx::query(unsendable).execute(&pair.orders_db).await.unwrap();
    // What only a broken relay or broker shows is counted from nothing.
    let shown_as_zero = [measure::BROKER_DUPLICATES, measure::EXPIRED_LEASES, measure::LOST_LEASES];

    let http = http_client();
    eventually(SOON, "every metric is shown", async || {
        let mut text = String::new();
        for service in pair.orders.iter().chain(&pair.payments) {
            text += &http.get(service.admin_url("/metrics")).send().await.unwrap().text().await.unwrap();
        }
        let shown: BTreeSet<&str> =
            text.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next()).collect();
        let missing: Vec<&str> =
            measure::ALL.iter().map(|metric| metric.name).filter(|name| !shown.contains(name)).collect();
        let failed = text.lines().any(|line| line.starts_with("outbox_events{state=\"failed\"} 1"));
        let dead = text.lines().any(|line| line == "inbox_dead_letters 1");
        let zero = shown_as_zero.iter().all(|name| text.contains(&format!("\n{name} 0\n")));
        if missing.is_empty() && failed && dead && zero { Ok(()) } else { Err((missing, failed, dead, zero)) }
    })
    .await;
}

#[tokio::test]
async fn labels_are_route_templates_and_never_ids() {
    let pair = Pair::start().await;
    let order = pair.place(100, "EUR").await.id;
    pair.order_becomes(order, "paid").await;
    let http = http_client();
    let _ = http.get(pair.orders[0].url("/no/such/path")).send().await.unwrap();
    let text = http.get(pair.orders[0].admin_url("/metrics")).send().await.unwrap().text().await.unwrap();
    assert!(text.contains("route=\"/orders/{id}\""), "{text}");
    assert!(!text.contains(&order.to_string()) && !text.contains("/no/such/path"));
}
