//! Metrics: every one is there, with its labels, once what it measures has happened.

use std::collections::BTreeSet;

use e2e_tests::{Pair, Provider, Reply, Service, eventually, http_client};
use outbox_core::Gauges;
use outbox_core::measure::{self, Kind, Metric};
use sqlx::{Connection, PgConnection, raw_sql};
use uuid::Uuid;

use crate::fixture::{Outbox, SOON};
use crate::operator::{event_of, publish_order_event};
use crate::retention::{insert_events, insert_published};

/// A line of a page of metrics.
struct Series<'a> {
    metric: &'a Metric,
    labels: BTreeSet<&'a str>,
    text: &'a str,
    value: f64,
}

/// The series on a page; each must be of a metric in the table, and a histogram is told by its count.
fn series(page: &str) -> Vec<Series<'_>> {
    let lines = page.lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
    let read = |line| {
        let (text, value) = str::rsplit_once(line, ' ').expect("a value");
        let (name, labels) = text.split_once('{').unwrap_or((text, ""));
        let part_of = |metric: &Metric, part: &str| name.strip_suffix(part) == Some(metric.name);
        let metric = measure::ALL.iter().find(|metric| match metric.kind {
            Kind::Histogram => ["_bucket", "_sum", "_count"].iter().any(|part| part_of(metric, part)),
            Kind::Counter | Kind::Gauge => metric.name == name,
        });
        let metric = metric.unwrap_or_else(|| panic!("{name} is not in the table"));
        // What stands between the values: `a=`, `,b=`, `}`.
        let names = labels.split('"').step_by(2).map(|between| between.trim_matches([',', '=', '}', ' ']));
        let labels = names.filter(|name| !name.is_empty() && *name != "le").collect();
        let is_told = metric.kind != Kind::Histogram || name.ends_with("_count");
        is_told.then(|| Series { metric, labels, text, value: value.parse().expect("a number") })
    };
    lines.filter_map(read).collect()
}

/// A row that retention cannot remove, since somebody has locked it and forgot about it.
async fn forget_a_transaction(pair: &Pair) -> PgConnection {
    let mut forgotten = PgConnection::connect(&pair.orders_url).await.unwrap();
    let old = "INSERT INTO idempotency_keys (key, request, order_id, created_at)
               SELECT 'old', '{}', id, now() - interval '30 days' FROM orders LIMIT 1";
    raw_sql(old).execute(&mut forgotten).await.unwrap();
    raw_sql("BEGIN; SELECT FROM idempotency_keys FOR UPDATE").execute(&mut forgotten).await.unwrap();
    forgotten
}

/// Events of which one cannot be sent, one is behind it, one waits for its time, and one's lease is taken
/// away whenever a relay has got it.
async fn get_events_into_trouble(pair: &Pair) {
    let trouble = "
        CREATE FUNCTION take_the_lease() RETURNS trigger LANGUAGE plpgsql AS
            'BEGIN NEW.lease_id := gen_random_uuid(); RETURN NEW; END';
        CREATE TRIGGER take_the_lease BEFORE UPDATE ON outbox_deliveries FOR EACH ROW
            WHEN (NEW.lease_id IS NOT NULL AND NEW.aggregate_type = 'robbed') EXECUTE FUNCTION take_the_lease();
        WITH event AS (
            INSERT INTO outbox_events (event_id, aggregate_type, aggregate_id, aggregate_sequence, event_type,
                                       event_version, payload, headers)
            VALUES (gen_random_uuid(), 'order', '00000000-0000-0000-0000-000000000001', 1, 'Not a token', 1, '{}', '{}'),
                   (gen_random_uuid(), 'order', '00000000-0000-0000-0000-000000000001', 2, 'OrderPaid', 1, '{}', '{}'),
                   (gen_random_uuid(), 'later', gen_random_uuid(), 1, 'OrderPaid', 1, '{}', '{}'),
                   (gen_random_uuid(), 'robbed', gen_random_uuid(), 1, 'OrderPaid', 1, '{}', '{\"correlationid\": \"x\"}')
            RETURNING *
        )
        INSERT INTO outbox_deliveries (event_id, aggregate_type, aggregate_id, aggregate_sequence, created_at, next_attempt_at)
        SELECT event_id, aggregate_type, aggregate_id, aggregate_sequence, created_at,
               CASE WHEN aggregate_type = 'later' THEN now() + interval '1 hour' ELSE now() END
        FROM event";
    raw_sql(trouble).execute(&pair.orders_db).await.unwrap();
}

async fn page_of(service: &Service) -> String {
    http_client().get(service.admin_url("/metrics")).send().await.unwrap().text().await.unwrap()
}

#[tokio::test]
async fn every_metric_is_there_with_its_labels_once_what_it_measures_has_happened() {
    // Asked again after an answer that passes: something is parked, and retried.
    let provider = Provider::start(|call| match (call.attempt, call.amount()) {
        (1, 300) => Reply::Status(503),
        (_, 400) => Reply::Status(402),
        (_, 500) => Reply::Declined("no"),
        _ => Reply::Done,
    })
    .await;
    let pair = Pair::builder()
        .order_setting("RELAY_LEASE", "6s")
        .payment_setting("PAYMENT_GATEWAY_URL", provider.url())
        .payment_setting("GATEWAY_TIMEOUT", "10m")
        .payment_setting("CONSUMER_ACK_WAIT", "15m")
        .payment_setting("CONSUMER_BACKOFF_BASE", "10ms")
        .start()
        .await;
    let order = pair.place(200, "EUR").await.id;
    pair.order_becomes(order, "paid").await;
    let _forgotten = forget_a_transaction(&pair).await;
    // Retention looks when it starts, and every minute.
    pair.orders[0].kill().await.unwrap();
    pair.orders[0].start_again().await.unwrap();
    pair.orders[0].wait_until_ready(SOON).await.unwrap();

    for amount in [200, 300] {
        let order = pair.place(amount, "EUR").await.id;
        pair.order_becomes(order, "paid").await;
        pair.cancel(order).await;
        pair.order_becomes(order, "refunded").await;
    }
    pair.place(400, "EUR").await;
    let declined = pair.place(500, "EUR").await.id;
    pair.order_becomes(declined, "declined").await;
    publish_order_event(&pair, event_of(&pair, order, "OrderCreated").await, order, 1, "1").await;
    publish_order_event(&pair, Uuid::now_v7(), Uuid::now_v7(), 2, "1").await;
    get_events_into_trouble(&pair).await;
    let all_of_it = [
        r#"outbox_events{state="failed"}"#,
        r#"outbox_events{state="blocked"}"#,
        r#"outbox_events{state="scheduled"}"#,
        r#"outbox_events{state="leased"}"#,
        r#"outbox_publish_failures_total{event_type="Not a token",kind="permanent"}"#,
        r#"inbox_deliveries_total{event_type="OrderCreated",outcome="applied"}"#,
        r#"inbox_deliveries_total{event_type="OrderCancelled",outcome="duplicate"}"#,
        r#"inbox_deliveries_total{event_type="OrderCreated",outcome="parked"}"#,
        r#"inbox_deliveries_total{event_type="OrderCreated",outcome="dead"}"#,
        r#"inbox_parked_total{event_type="OrderCancelled",reason="gap"}"#,
        r#"inbox_parked_total{event_type="OrderCreated",reason="retry"}"#,
        r#"inbox_parked_events{reason="gap"}"#,
        r#"gateway_calls_total{call="charge",outcome="done"}"#,
        r#"gateway_calls_total{call="charge",outcome="declined"}"#,
        r#"gateway_calls_total{call="charge",outcome="rejected"}"#,
        r#"gateway_calls_total{call="charge",outcome="transient"}"#,
        r#"gateway_calls_total{call="refund",outcome="done"}"#,
        r#"http_request_seconds_count{method="POST",route="/orders",status="201"}"#,
        r#"retention_lag_seconds{table="idempotency_keys"}"#,
    ];

    // Now the consumer's handler hangs, and messages come until some are left with the broker.
    provider.hold();
    let mut metrics = BTreeSet::new();
    let mut seen = BTreeSet::new();
    eventually(SOON * 2, "every metric has shown something else than 0", async || {
        if !metrics.contains(measure::PENDING) {
            pair.place(100, "EUR").await;
        }
        for service in pair.orders.iter().chain(&pair.payments) {
            for Series { metric, labels, text, value } in series(&page_of(service).await) {
                assert_eq!(labels, metric.labels.iter().copied().collect(), "{text}");
                if value > 0.0 {
                    metrics.insert(metric.name);
                    seen.insert(text.to_owned());
                }
            }
        }
        let metrics_left = measure::ALL.iter().map(|metric| metric.name).filter(|name| !metrics.contains(name));
        let series_left = all_of_it.into_iter().filter(|series| !seen.contains(*series));
        let left: Vec<&str> = metrics_left.chain(series_left).collect();
        if left.is_empty() { Ok(()) } else { Err(format!("{left:?} of {seen:#?}")) }
    })
    .await;
}

#[tokio::test]
async fn the_gauges_of_a_large_backlog_are_counted_in_a_moment_however_many_are_failed() {
    let outbox = Outbox::new().await;
    let mut db = outbox.db.acquire().await.unwrap().detach();
    // As in an outage that has just begun: the planner knows nothing of the backlog.
    raw_sql("ALTER TABLE outbox_deliveries SET (autovacuum_enabled = off)").execute(&mut db).await.unwrap();
    insert_published(&mut db, 1_000, "1 hour").await;
    raw_sql("ANALYZE outbox_deliveries").execute(&mut db).await.unwrap();
    insert_events(&mut db, 100_000, "1 minute", "failed_at", "CASE WHEN random() < 0.2 THEN now() END").await;
    let counting = Gauges::new(outbox.db.clone());
    tokio::time::timeout(SOON / 3, counting.run_once()).await.expect("in a moment").unwrap();
}

#[tokio::test]
async fn labels_are_route_templates_and_never_ids() {
    let pair = Pair::start().await;
    let order = pair.place(100, "EUR").await.id;
    pair.order_becomes(order, "paid").await;
    let http = http_client();
    let _ = http.get(pair.orders[0].url("/no/such/path")).send().await.unwrap();
    let text = page_of(&pair.orders[0]).await;
    assert!(text.contains("route=\"/orders/{id}\""), "{text}");
    assert!(!text.contains(&order.to_string()) && !text.contains("/no/such/path"));
}
