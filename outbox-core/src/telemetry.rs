//! What a process tells about itself: its log, and its metrics.

use std::io::IsTerminal;
use std::sync::OnceLock;

use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle};
use tracing_subscriber::EnvFilter;

use crate::config::{LogFormat, ProcessConfig};
use crate::consumer::Delivery;
use crate::jetstream::FailureKind;

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

/// Starts the log. Once per process; a second call changes nothing.
///
/// # Errors
/// One line that names the setting where the filter cannot be read.
pub fn start_log(config: &ProcessConfig) -> Result<(), String> {
    let filter = EnvFilter::try_new(&config.rust_log).map_err(|error| format!("RUST_LOG: {error}"))?;
    let log = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_ansi(std::io::stderr().is_terminal())
        .with_writer(std::io::stderr);
    let _ = match config.log_format {
        LogFormat::Pretty => log.try_init(),
        LogFormat::Json => log.json().flatten_event(true).try_init(),
    };
    Ok(())
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
