//! Tracing: one trace from the request to everything that follows from it.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use axum::body::Bytes;
use axum::routing::post;
use axum::{Router, extract::State};
use e2e_tests::{Pair, eventually, http_client};
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::trace::v1::span::SpanKind;
use prost::Message;
use tokio::net::TcpListener;

use crate::fixture::SOON;

#[derive(Debug, Clone, PartialEq, Eq)]
struct Span {
    service: String,
    kind: SpanKind,
    trace: Vec<u8>,
    id: Vec<u8>,
    parent: Vec<u8>,
    links: Vec<Vec<u8>>,
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
                trace: span.trace_id,
                id: span.span_id,
                parent: span.parent_span_id,
            };
            spans.lock().unwrap().insert(span.name, received);
        }
    }
}

#[tokio::test]
async fn one_trace_leads_from_the_request_through_both_services_and_back() {
    let (url, spans) = receiver().await;
    let pair = Pair::builder().setting("OTEL_EXPORTER_OTLP_ENDPOINT", &url).start().await;
    let body = serde_json::json!({"customer_id": uuid::Uuid::new_v4(), "total": {"amount": 100, "currency": "EUR"}});
    let request = http_client().post(pair.orders[0].url("/orders")).json(&body);
    let request = request.header("traceparent", "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01");
    let order: serde_json::Value = request.send().await.unwrap().json().await.unwrap();
    pair.order_becomes(order["id"].as_str().unwrap().parse().unwrap(), "paid").await;

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
        }
    }
}
