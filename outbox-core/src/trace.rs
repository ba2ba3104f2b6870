//! Traces: one from a request through outbox, stream and inbox to everything that follows from it,
//! although minutes may lie between. What carries it is the `traceparent` that is frozen with each
//! event; names and kinds are those of OpenTelemetry's conventions for messaging.
//!
//! Spans have a target of their own, which only the exporter listens to: where nothing is exported
//! they are never made.

use std::collections::HashMap;

use opentelemetry::propagation::TextMapPropagator;
use opentelemetry::trace::{TraceContextExt, TracerProvider};
use opentelemetry_otlp::{SpanExporter, WithExportConfig};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::propagation::TraceContextPropagator;
use opentelemetry_sdk::trace::{SdkTracer, SdkTracerProvider};
use tracing::Span;
use tracing_opentelemetry::OpenTelemetrySpanExt;

use crate::event::Envelope;
use crate::telemetry::TRACE;

const TRACEPARENT: &str = "traceparent";

/// An exporter of spans to `endpoint`, the base of an OTLP receiver over HTTP.
pub(crate) fn exporter(endpoint: &str, service: &str) -> Result<(SdkTracerProvider, SdkTracer), String> {
    // The receiver's TLS, if it has any, needs a provider of cryptography; a second call changes nothing.
    let _ = async_nats::rustls::crypto::ring::default_provider().install_default();
    let endpoint = format!("{}/v1/traces", endpoint.trim_end_matches('/'));
    let exporter = SpanExporter::builder().with_http().with_endpoint(endpoint).build();
    let exporter = exporter.map_err(|error| format!("OTEL_EXPORTER_OTLP_ENDPOINT: {error}"))?;
    let resource = Resource::builder().with_service_name(service.to_owned()).build();
    let provider = SdkTracerProvider::builder().with_batch_exporter(exporter).with_resource(resource).build();
    let tracer = provider.tracer(env!("CARGO_PKG_NAME"));
    Ok((provider, tracer))
}

/// Makes `span` a part of the trace that it was caused by, and links it to its cause.
pub(crate) fn caused_by(span: Span, traceparent: Option<&str>) -> Span {
    if let Some(traceparent) = traceparent.filter(|_| !span.is_disabled()) {
        let carrier = HashMap::from([(TRACEPARENT.to_owned(), traceparent.to_owned())]);
        let cause = TraceContextPropagator::new().extract(&carrier);
        span.add_link(cause.span().span_context().clone());
        let _ = span.set_parent(cause);
    }
    span
}

/// The `traceparent` of what `span` causes; nothing where spans are not made.
pub(crate) fn traceparent(span: &Span) -> Option<String> {
    if span.is_disabled() {
        return None;
    }
    let mut carrier = HashMap::new();
    TraceContextPropagator::new().inject_context(&span.context(), &mut carrier);
    carrier.remove(TRACEPARENT)
}

/// The span in which a consumer processes an event. What follows from the event is caused by it.
pub(crate) fn process(consumer: &str, envelope: &mut Envelope) -> Span {
    let span = tracing::trace_span!(
        target: TRACE, "process", otel.name = format!("process {}", envelope.event_type), otel.kind = "consumer",
        messaging.system = "nats", messaging.operation.name = "process", messaging.operation.type = "process",
        messaging.consumer.group.name = consumer,
        messaging.message.id = %envelope.id, aggregate_id = %envelope.aggregate.id,
    );
    let span = caused_by(span, envelope.context.traceparent.as_deref());
    if let Some(traceparent) = traceparent(&span) {
        envelope.context.traceparent = Some(traceparent);
    }
    span
}
