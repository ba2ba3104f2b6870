//! What a process tells about itself: its log, and its spans.

use std::io::IsTerminal;
use std::time::Duration;

use opentelemetry_sdk::trace::SdkTracerProvider;
use tracing::{Dispatch, Level};
use tracing_subscriber::filter::{EnvFilter, Targets};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{Layer, fmt};

use crate::config::{LogFormat, ProcessConfig};
use crate::trace;

/// The target of all spans: only their exporter listens to it, so that where nothing is exported they
/// are never made.
pub const TRACE: &str = "trace";

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
    let (subscriber, provider) = subscriber(config, service)?;
    let _ = subscriber.try_init();
    Ok(Telemetry(provider))
}

fn subscriber(config: &ProcessConfig, service: &str) -> Result<(Dispatch, Option<SdkTracerProvider>), String> {
    let complaint = |error| format!("RUST_LOG: {error}");
    // Spans are not for the log.
    let no_spans = format!("{TRACE}=off").parse().map_err(complaint)?;
    let filter = EnvFilter::try_new(&config.rust_log).map_err(complaint)?.add_directive(no_spans);
    let log = fmt::layer().with_ansi(std::io::stderr().is_terminal()).with_writer(std::io::stderr);
    let log = match config.log_format {
        LogFormat::Pretty => log.boxed(),
        LogFormat::Json => log.json().flatten_event(true).boxed(),
    };
    let export = config.otel_exporter_otlp_endpoint.as_deref().filter(|endpoint| !endpoint.is_empty());
    let (provider, tracer) = export.map(|endpoint| trace::exporter(endpoint, service)).transpose()?.unzip();
    let log = tracing_subscriber::registry().with(log.with_filter(filter));
    // Not as an optional layer: where that is missing, it is taken for one that wants every span.
    let subscriber = match tracer {
        None => log.into(),
        Some(tracer) => {
            let only_spans = Targets::new().with_target(TRACE, Level::TRACE);
            log.with(tracing_opentelemetry::layer().with_tracer(tracer).with_filter(only_spans)).into()
        }
    };
    Ok((subscriber, provider))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Is a span made where spans are exported there, and everything is logged?
    fn makes_spans(endpoint: Option<&str>) -> bool {
        let config = ProcessConfig {
            log_format: LogFormat::Json,
            rust_log: "trace".to_owned(),
            otel_exporter_otlp_endpoint: endpoint.map(str::to_owned),
            shutdown_grace: Duration::from_secs(1),
        };
        let (subscriber, _provider) = subscriber(&config, "a-test").expect("the settings are good");
        tracing::dispatcher::with_default(&subscriber, || {
            !tracing::trace_span!(target: TRACE, "publish", otel.kind = "producer").is_disabled()
        })
    }

    #[test]
    fn where_nothing_is_exported_no_span_is_ever_made() {
        assert!(!makes_spans(None));
        assert!(!makes_spans(Some("")));
        assert!(makes_spans(Some("http://127.0.0.1:1")));
    }
}
