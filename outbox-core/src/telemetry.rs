//! What a process tells about itself: its log, and its metrics.

use std::io::IsTerminal;
use std::sync::OnceLock;
use std::time::Duration;

use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle};
use opentelemetry_sdk::trace::SdkTracerProvider;
use tracing::Level;
use tracing_subscriber::filter::{EnvFilter, FilterExt, Targets, filter_fn};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{Layer, fmt};

use crate::config::{LogFormat, ProcessConfig};
use crate::consumer::Delivery;
use crate::jetstream::FailureKind;
use crate::trace;

/// The target of all spans: only their exporter listens to it, so that where nothing is exported they
/// are never made.
pub const TRACE: &str = "trace";

/// Every metric there is. Labels are bounded: never an id, never a path as it was asked for.
pub mod names {
    /// Counter: events acknowledged by the stream and marked.
    pub const PUBLISHED: &str = "outbox_published_total";
    /// Counter: publishes without an ack; label `kind`: transient, permanent, unrecognised.
    pub const PUBLISH_FAILURES: &str = "outbox_publish_failures_total";
    /// Counter: events that became failed, for an operator to mend.
    pub const FAILED: &str = "outbox_failed_total";
    /// Counter: publishes that the stream recognised as sent before.
    pub const BROKER_DUPLICATES: &str = "outbox_broker_duplicates_total";
    /// Counter: events whose lease was lost before they were settled.
    pub const LOST_LEASES: &str = "outbox_lost_leases_total";
    /// Histogram: events taken by one claim.
    pub const CLAIMED: &str = "outbox_claimed_events";
    /// Histogram, seconds: from a publish to its ack or failure.
    pub const PUBLISH_SECONDS: &str = "outbox_publish_seconds";
    /// Counter: messages handled; label `outcome`: applied, duplicate, parked, dead.
    pub const DELIVERIES: &str = "inbox_deliveries_total";
    /// Histogram, seconds: from the begin of a batch to its last commit.
    pub const BATCH_SECONDS: &str = "inbox_batch_seconds";
}

/// The log and the exporter of spans, for as long as it lives; what is left to export goes out when it
/// is dropped.
#[derive(Debug)]
pub struct Telemetry(Option<SdkTracerProvider>);

impl Drop for Telemetry {
    fn drop(&mut self) {
        if let Some(provider) = &self.0
            && let Err(error) = provider.shutdown_with_timeout(Duration::from_secs(2))
        {
            tracing::debug!(%error, "the last spans were not exported");
        }
    }
}

/// Starts the log and, where an endpoint is set, the export of `service`'s spans. Once per process; a
/// second call changes nothing.
///
/// # Errors
/// One line that names the setting that cannot be used.
pub fn start(config: &ProcessConfig, service: &str) -> Result<Telemetry, String> {
    let filter = EnvFilter::try_new(&config.rust_log).map_err(|error| format!("RUST_LOG: {error}"))?;
    let log = fmt::layer().with_ansi(std::io::stderr().is_terminal()).with_writer(std::io::stderr);
    let log = match config.log_format {
        LogFormat::Pretty => log.boxed(),
        LogFormat::Json => log.json().flatten_event(true).boxed(),
    };
    // Spans are not for the log.
    let filter = filter.and(filter_fn(|metadata| metadata.target() != TRACE));
    let export = config.otel_exporter_otlp_endpoint.as_deref().filter(|endpoint| !endpoint.is_empty());
    let (provider, tracer) = export.map(|endpoint| trace::exporter(endpoint, service)).transpose()?.unzip();
    let spans = tracer.map(|tracer| {
        let only_spans = Targets::new().with_target(TRACE, Level::TRACE);
        tracing_opentelemetry::layer().with_tracer(tracer).with_filter(only_spans)
    });
    let _ = tracing_subscriber::registry().with(log.with_filter(filter)).with(spans).try_init();
    Ok(Telemetry(provider))
}

/// The process's metrics, for its `/metrics`.
pub(crate) fn metrics_handle() -> PrometheusHandle {
    static HANDLE: OnceLock<PrometheusHandle> = OnceLock::new();
    let install = || {
        let seconds = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0];
        let builder = PrometheusBuilder::new();
        let builder =
            builder.set_buckets_for_metric(Matcher::Suffix("_seconds".to_owned()), &seconds).unwrap_or_default();
        let recorder = builder.build_recorder();
        let handle = recorder.handle();
        // A host application's own recorder stays; ours then stays empty.
        let _ = metrics::set_global_recorder(recorder);
        handle
    };
    HANDLE.get_or_init(install).clone()
}

pub(crate) fn count_publish_failure(kind: FailureKind) {
    let kind = match kind {
        FailureKind::Transient => "transient",
        FailureKind::Permanent => "permanent",
        FailureKind::Unrecognised => "unrecognised",
    };
    metrics::counter!(names::PUBLISH_FAILURES, "kind" => kind).increment(1);
}

pub(crate) fn count_deliveries(deliveries: &[Delivery]) {
    for delivery in deliveries {
        let outcome = match delivery {
            Delivery::Applied => "applied",
            Delivery::Duplicate => "duplicate",
            Delivery::Parked => "parked",
            Delivery::Dead => "dead",
        };
        metrics::counter!(names::DELIVERIES, "outcome" => outcome).increment(1);
    }
}
