//! Metrics: all of them, in one table, and where they are shown.

use std::sync::OnceLock;
use std::time::Duration;

use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle};
use tokio_util::sync::CancellationToken;

use crate::consumer::Delivery;
use crate::inbox::ParkReason;
use crate::jetstream::FailureKind;

/// A metric, as the documentation lists it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Metric {
    /// Its name; the unit is its last word, or the last but `total`.
    pub name: &'static str,
    /// What it is.
    pub kind: Kind,
    /// Its labels. Their values are bounded: never an id, never a path as it was asked for.
    pub labels: &'static [&'static str],
    /// What it says.
    pub help: &'static str,
}

/// The kinds of metrics.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Only rises.
    Counter,
    /// Rises and falls.
    Gauge,
    /// How often which value.
    Histogram,
}

macro_rules! metrics_table {
    ($($constant:ident: $kind:ident $name:literal [$($label:literal),*] $help:literal;)*) => {
        $(#[doc = $help] pub const $constant: &str = $name;)*
        /// Every metric there is.
        pub const ALL: &[Metric] =
            &[$(Metric { name: $name, kind: Kind::$kind, labels: &[$($label),*], help: $help }),*];
    };
}

metrics_table! {
    APPENDED: Counter "outbox_appended_total" ["event_type"] "Events appended, those of transactions that were rolled back too.";
    PUBLISHED: Counter "outbox_published_total" ["event_type"] "Events acknowledged by the stream and marked.";
    PUBLISH_FAILURES: Counter "outbox_publish_failures_total" ["event_type", "kind"] "Publishes without an ack; kind is timeout, transient, permanent or unrecognised.";
    FAILED: Counter "outbox_failed_total" ["event_type"] "Events that became failed, for an operator to mend.";
    BROKER_DUPLICATES: Counter "outbox_broker_duplicates_total" [] "Publishes that the stream recognised as sent before.";
    EXPIRED_LEASES: Counter "outbox_expired_leases_total" [] "Events claimed whose lease another relay had let run out.";
    LOST_LEASES: Counter "outbox_lost_leases_total" [] "Events whose lease was lost before they were settled.";
    ATTEMPTS: Histogram "outbox_attempts" [] "Attempts that a published event took.";
    CLAIMED: Histogram "outbox_claimed_events" [] "Events taken by one claim.";
    CLAIM_SECONDS: Histogram "outbox_claim_seconds" [] "Duration of a claim.";
    BATCH_SECONDS: Histogram "outbox_batch_seconds" [] "Duration of a batch that had events, from before its claim to its last mark.";
    PUBLISH_SECONDS: Histogram "outbox_publish_seconds" [] "From a publish to its ack or failure.";
    APPEND_TO_ACK_SECONDS: Histogram "outbox_append_to_ack_seconds" [] "From an event's append to its mark, by the database's clock.";
    OLDEST_UNPUBLISHED: Gauge "outbox_oldest_unpublished_age_seconds" [] "Age of the oldest event that is neither published nor failed nor blocked; 0 where there is none.";
    EVENTS: Gauge "outbox_events" ["state"] "Unpublished events by state: ready, scheduled, leased, blocked, failed. Counting ends at 100,000.";
    SNAPSHOT_AGE: Gauge "outbox_snapshot_age_seconds" [] "Age of the oldest transaction that holds back clean-up in this database; 0 where there is none.";
    DELIVERIES: Counter "inbox_deliveries_total" ["event_type", "outcome"] "Messages handled; outcome is applied, duplicate, parked or dead. Types that the service does not know are other.";
    PARKED_TOTAL: Counter "inbox_parked_total" ["event_type", "reason"] "Times an event was parked; reason is gap or retry.";
    INBOX_BATCH: Histogram "inbox_batch_events" [] "Messages delivered in one batch.";
    INBOX_BATCH_SECONDS: Histogram "inbox_batch_seconds" [] "From the begin of a batch to its last commit.";
    APPEND_TO_EFFECT_SECONDS: Histogram "inbox_append_to_effect_seconds" [] "From an event's append, by its producer's clock, to its effect, by this process's.";
    PARKED: Gauge "inbox_parked_events" ["reason"] "Events that wait: gap or retry.";
    DEAD_LETTERS: Gauge "inbox_dead_letters" [] "Dead letters, for an operator to retry or discard.";
    PENDING: Gauge "inbox_consumer_pending_messages" [] "Messages of the stream not delivered to the consumer yet.";
    ACK_PENDING: Gauge "inbox_consumer_ack_pending_messages" [] "Messages delivered and not acknowledged yet.";
    GATEWAY_CALLS: Counter "gateway_calls_total" ["call", "outcome"] "Requests to the payment gateway: charge or refund; outcome is done, declined, rejected or transient.";
    HTTP_SECONDS: Histogram "http_request_seconds" ["method", "route", "status"] "Duration of HTTP requests, by route template.";
    RETENTION_LAG: Gauge "retention_lag_seconds" ["table"] "For how long the table's oldest row has been due to be removed; 0 where none is.";
    POOL: Gauge "database_pool_connections" ["pool", "state"] "Connections of this process to its database, for requests or for work: used or idle.";
    TASK_UP: Gauge "process_task_up" ["task"] "1 while a supervised task runs, 0 when it has ended.";
}

/// How often what was recorded is folded into the histograms.
const FOLDED_EVERY: Duration = Duration::from_secs(1);

/// Folds what was recorded into the histograms until `shutdown`: a process that nobody scrapes would keep
/// every single value.
pub(crate) async fn fold_histograms(metrics: PrometheusHandle, shutdown: CancellationToken) {
    while shutdown.run_until_cancelled(tokio::time::sleep(FOLDED_EVERY)).await.is_some() {
        metrics.run_upkeep();
    }
}

/// The process's metrics, for its `/metrics`.
pub(crate) fn handle() -> PrometheusHandle {
    static HANDLE: OnceLock<PrometheusHandle> = OnceLock::new();
    let install = || {
        let seconds = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 60.0, 600.0];
        let numbers = [1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1_000.0];
        let buckets = |builder: PrometheusBuilder, suffix: &str, buckets: &[f64]| {
            builder.set_buckets_for_metric(Matcher::Suffix(suffix.to_owned()), buckets).unwrap_or_default()
        };
        let builder = buckets(PrometheusBuilder::new(), "_seconds", &seconds);
        let builder = buckets(builder, "_events", &numbers);
        let builder = buckets(builder, "_attempts", &numbers);
        let recorder = builder.build_recorder();
        let handle = recorder.handle();
        // A host application's own recorder stays; ours then stays empty.
        if metrics::set_global_recorder(recorder).is_ok() {
            ALL.iter().for_each(describe);
        }
        handle
    };
    HANDLE.get_or_init(install).clone()
}

fn describe(metric: &Metric) {
    match metric.kind {
        Kind::Counter => metrics::describe_counter!(metric.name, metric.help),
        Kind::Gauge => metrics::describe_gauge!(metric.name, metric.help),
        Kind::Histogram => metrics::describe_histogram!(metric.name, metric.help),
    }
}

/// Counts one more of an event's type.
pub(crate) fn count(name: &'static str, event_type: &str) {
    metrics::counter!(name, "event_type" => event_type.to_owned()).increment(1);
}

pub(crate) fn count_publish_failure(event_type: &str, kind: FailureKind) {
    let kind = match kind {
        FailureKind::Timeout => "timeout",
        FailureKind::Transient => "transient",
        FailureKind::Permanent => "permanent",
        FailureKind::Unrecognised => "unrecognised",
    };
    metrics::counter!(PUBLISH_FAILURES, "event_type" => event_type.to_owned(), "kind" => kind).increment(1);
}

pub(crate) fn count_delivery(event_type: &str, delivery: Delivery) {
    let outcome = match delivery {
        Delivery::Applied => "applied",
        Delivery::Duplicate => "duplicate",
        Delivery::Parked => "parked",
        Delivery::Dead => "dead",
    };
    metrics::counter!(DELIVERIES, "event_type" => event_type.to_owned(), "outcome" => outcome).increment(1);
}

pub(crate) fn count_parked(event_type: &str, reason: ParkReason) {
    metrics::counter!(PARKED_TOTAL, "event_type" => event_type.to_owned(), "reason" => reason.as_str()).increment(1);
}

/// How long ago a wall-clock time was, as far as this process's clock can tell.
pub(crate) fn age(rfc3339: &str) -> Option<Duration> {
    let then = time::OffsetDateTime::parse(rfc3339, &time::format_description::well_known::Rfc3339).ok()?;
    Duration::try_from(time::OffsetDateTime::now_utc() - then).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The table of `docs/metrics.md`.
    fn table() -> String {
        let row = |metric: &Metric| {
            let labels: Vec<String> = metric.labels.iter().map(|label| format!("`{label}`")).collect();
            format!("| `{}` | {:?} | {} | {} |\n", metric.name, metric.kind, labels.join(", "), metric.help)
        };
        let head = "| Metric | Kind | Labels | Meaning |\n|---|---|---|---|\n";
        head.to_owned() + &ALL.iter().map(row).collect::<String>()
    }

    #[test]
    fn the_documentation_lists_every_metric_as_it_is() {
        let page = include_str!("../../docs/metrics.md");
        assert!(page.contains(&table()), "docs/metrics.md must contain\n{}", table());
    }
}
