//! Tracing: one trace from the request to everything that follows from it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};

use axum::body::Bytes;
use axum::routing::post;
use axum::{Router, extract::State};
use e2e_tests::{Order, Pair, Provider, Reply, Service, eventually, http_client};
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::trace::v1::span::SpanKind;
use prost::Message;
use serde_json::json;
use tokio::net::TcpListener;
use uuid::Uuid;

use crate::fixture::SOON;

#[derive(Debug, Clone, PartialEq, Eq)]
struct Span {
    service: String,
    kind: SpanKind,
    trace: Vec<u8>,
    id: Vec<u8>,
    parent: Vec<u8>,
    links: Vec<Vec<u8>>,
    attributes: BTreeSet<String>,
}

type Spans = Arc<Mutex<BTreeMap<String, Span>>>;

/// A receiver of OTLP over HTTP that keeps each span by its name.
async fn receiver() -> (String, Spans) {
    let spans = Spans::default();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let router = Router::new().route("/v1/traces", post(receive)).with_state(spans.clone());
    tokio::spawn(axum::serve(listener, router).into_future());
    (url, spans)
}

async fn receive(State(spans): State<Spans>, body: Bytes) {
    let request = ExportTraceServiceRequest::decode(body).expect("it is OTLP");
    for resource in request.resource_spans {
        let attributes = resource.resource.unwrap_or_default().attributes;
        let name = attributes.into_iter().find(|attribute| attribute.key == "service.name");
        let Some(Value::StringValue(service)) = name.and_then(|name| name.value?.value) else { panic!("no name") };
        for span in resource.scope_spans.into_iter().flat_map(|scope| scope.spans) {
            let received = Span {
                service: service.clone(),
                kind: span.kind(),
                links: span.links.into_iter().map(|link| link.span_id).collect(),
                attributes: span.attributes.into_iter().map(|attribute| attribute.key).collect(),
                trace: span.trace_id,
                id: span.span_id,
                parent: span.parent_span_id,
            };
            spans.lock().unwrap().insert(span.name, received);
        }
    }
}

/// Places an order as part of a trace.
async fn place_traced(pair: &Pair, amount: i64, correlation_id: &str) -> Order {
    let body = json!({"customer_id": Uuid::new_v4(), "total": {"amount": amount, "currency": "EUR"}});
    let request = http_client().post(pair.orders[0].url("/orders")).json(&body);
    let request = request.header("traceparent", "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01");
    request.header("x-request-id", correlation_id).send().await.unwrap().json().await.unwrap()
}

#[tokio::test]
async fn one_trace_leads_from_the_request_through_both_services_and_back() {
    let (url, spans) = receiver().await;
    let pair = Pair::builder().own_servers().setting("OTEL_EXPORTER_OTLP_ENDPOINT", &url).start().await;
    // Another process publishes the event than the one that took the request, and later.
    pair.nats.stop().await.unwrap();
    let order = place_traced(&pair, 100, "a-request").await;
    assert!(pair.orders[0].terminate(SOON).await.unwrap().success());
    pair.orders[0].start_again().await.unwrap();
    pair.nats.start_again().await.unwrap();
    pair.orders[0].wait_until_ready(SOON).await.unwrap();
    pair.order_becomes(order.id, "paid").await;

    // A span, what it is, and what it was caused by.
    let expected = [
        ("POST /orders", "order-service", SpanKind::Server, ""),
        ("publish OrderCreated", "order-service", SpanKind::Producer, "POST /orders"),
        ("process OrderCreated", "payment-service", SpanKind::Consumer, "POST /orders"),
        ("charge", "payment-service", SpanKind::Client, "process OrderCreated"),
        ("publish PaymentCaptured", "payment-service", SpanKind::Producer, "process OrderCreated"),
        ("process PaymentCaptured", "order-service", SpanKind::Consumer, "process OrderCreated"),
        ("publish OrderPaid", "order-service", SpanKind::Producer, "process PaymentCaptured"),
        ("process OrderPaid", "payment-service", SpanKind::Consumer, "process PaymentCaptured"),
    ];
    let spans = eventually(SOON, "all spans are exported", async || {
        let spans = spans.lock().unwrap().clone();
        let is_there = expected.iter().all(|(name, ..)| spans.contains_key(*name));
        if is_there { Ok(spans) } else { Err(spans.into_keys().collect::<Vec<_>>()) }
    })
    .await;
    let trace: Vec<u8> = 0x4bf9_2f35_77b3_4da6_a3ce_929d_0e0e_4736_u128.to_be_bytes().into();
    let request: Vec<u8> = 0x00f0_67aa_0ba9_02b7_u64.to_be_bytes().into();
    for (name, service, kind, cause) in expected {
        let span = &spans[name];
        let cause = if cause.is_empty() { &request } else { &spans[cause].id };
        assert_eq!((&*span.service, span.kind, &span.trace, &span.parent), (service, kind, &trace, cause), "{name}");
        if matches!(kind, SpanKind::Producer | SpanKind::Consumer) {
            assert_eq!(span.links, std::slice::from_ref(cause), "{name} is linked to its cause");
            for attribute in ["messaging.system", "messaging.operation.name", "messaging.message.id"] {
                assert!(span.attributes.contains(attribute), "{attribute} is not in {span:?}");
            }
        }
    }
}

/// The log's lines about an event; every line of it must be JSON.
fn lines_about(service: &Service, correlation_id: &str) -> Vec<serde_json::Value> {
    let log = service.log();
    let lines = log.lines().map(|line| serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}")));
    lines.filter(|line: &serde_json::Value| line["correlation_id"] == correlation_id).collect()
}

#[tokio::test]
async fn a_failure_is_one_line_in_json_that_says_whose_it_is_and_why() {
    let provider = Provider::start(|call| match (call.attempt, call.amount()) {
        (1, 300) => Reply::Status(503),
        (_, 400) => Reply::Status(402),
        _ => Reply::Done,
    })
    .await;
    let pair = Pair::builder()
        .setting("LOG_FORMAT", "json")
        .payment_setting("PAYMENT_GATEWAY_URL", provider.url())
        .payment_setting("CONSUMER_BACKOFF_BASE", "10ms")
        .start()
        .await;
    let retried = place_traced(&pair, 300, "retried").await;
    pair.order_becomes(retried.id, "paid").await;
    let rejected = place_traced(&pair, 400, "rejected").await;
    let aggregate = Uuid::new_v4();
    let unsendable = "WITH event AS (
        INSERT INTO outbox_events (event_id, aggregate_type, aggregate_id, aggregate_sequence, event_type, event_version, payload, headers)
        VALUES (gen_random_uuid(), 'order', $1, 1, 'Not a token', 1, '{}',
                '{\"correlationid\": \"unsendable\", \"traceparent\": \"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01\"}') RETURNING *)
        INSERT INTO outbox_deliveries (event_id, aggregate_type, aggregate_id, aggregate_sequence, created_at)
        SELECT event_id, aggregate_type, aggregate_id, aggregate_sequence, created_at FROM event";
    sqlx::query(unsendable).bind(aggregate).execute(&pair.orders_db).await.unwrap();

    let (orders, payments) = (&pair.orders[0], &pair.payments[0]);
    for (service, correlation_id, aggregate, level, attempts, error) in [
        (payments, "retried", retried.id, "WARN", 0, "503"),
        (payments, "rejected", rejected.id, "ERROR", 1, "402"),
        (orders, "unsendable", aggregate, "ERROR", 1, "Not a token"),
    ] {
        let lines = eventually(SOON, "the failure is logged", async || {
            let lines = lines_about(service, correlation_id);
            if lines.is_empty() { Err(service.last_words()) } else { Ok(lines) }
        })
        .await;
        let [line] = &lines[..] else { panic!("one failure is one line: {lines:#?}") };
        let text = |name: &str| line[name].as_str().unwrap_or_else(|| panic!("{name} is not in {line}")).to_owned();
        assert_eq!((text("level").as_str(), text("aggregate_id")), (level, aggregate.to_string()), "{line}");
        assert_eq!(text("trace_id"), "4bf92f3577b34da6a3ce929d0e0e4736");
        assert!(text("event_id").parse::<Uuid>().is_ok() && text("error").contains(error), "{line}");
        assert_eq!(line["attempts"], attempts, "{line}");
    }
}
