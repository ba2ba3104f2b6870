//! The settings that every service has: each a flag and an environment variable of the same name.

use std::net::SocketAddr;
use std::str::FromStr;
use std::time::Duration;

use async_nats::ServerAddr;
use clap::{Args, Parser, ValueEnum};

use crate::backoff::Backoff;

/// The database.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Database")]
pub struct DatabaseConfig {
    /// The service's own PostgreSQL database, such as postgres://user:password@host/name.
    #[arg(long, env, hide_env_values = true)]
    pub database_url: String,
    /// The most connections this process holds; in a service, half of them for requests and a quarter for the relay.
    #[arg(long, env, default_value_t = 16, value_parser = clap::value_parser!(u32).range(4..))]
    pub database_pool: u32,
}

/// The broker.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Broker")]
pub struct BrokerConfig {
    /// NATS with JetStream, such as nats://user:password@host:4222; several servers by commas.
    #[arg(long, env, hide_env_values = true, default_value = "nats://127.0.0.1:4222")]
    pub nats_url: String,
}

impl BrokerConfig {
    /// The servers that the URL names.
    ///
    /// # Errors
    /// One line that names the setting.
    pub fn servers(&self) -> Result<Vec<ServerAddr>, String> {
        let servers = self.nats_url.split(',').map(ServerAddr::from_str).collect::<Result<_, _>>();
        servers.map_err(|error| format!("NATS_URL: {error}"))
    }
}

/// On or off.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Switch {
    /// Do it.
    On,
    /// Do not.
    Off,
}

/// Where the relay runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum RelayMode {
    /// In this process.
    Embedded,
    /// In an `outbox-relay` of its own, which this process wakes.
    Off,
}

/// How the relay works.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Relay")]
pub struct RelayConfig {
    /// The most events one claim takes.
    #[arg(long, env, default_value_t = 500, value_parser = batch)]
    pub relay_batch: usize,
    /// How long a claimed event is this relay's alone.
    #[arg(long, env, default_value = "30s", value_parser = duration)]
    pub relay_lease: Duration,
    /// How long to wait for the stream's ack.
    #[arg(long, env, default_value = "5s", value_parser = duration)]
    pub relay_publish_timeout: Duration,
    /// The shortest wait between two looks at an outbox with nothing to do.
    #[arg(long, env, default_value = "20ms", value_parser = duration)]
    pub relay_poll_min: Duration,
    /// The longest.
    #[arg(long, env, default_value = "1s", value_parser = duration)]
    pub relay_poll_max: Duration,
    /// The span of the first wait after a failure; each later one is twice as long.
    #[arg(long, env, default_value = "1s", value_parser = duration)]
    pub relay_backoff_base: Duration,
    /// No wait after a failure is longer.
    #[arg(long, env, default_value = "5m", value_parser = duration)]
    pub relay_backoff_max: Duration,
    /// Attempts after which an event that the broker refuses for an unrecognised reason is failed.
    #[arg(long, env, default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..))]
    pub relay_max_attempts: u32,
}

/// How long what is done is kept.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Retention")]
pub struct RetentionConfig {
    /// How long a published event stays in the outbox, to be looked at and replayed.
    #[arg(long, env, default_value = "7d", value_parser = duration)]
    pub relay_retention: Duration,
    /// How long the inbox remembers the ids of processed events.
    #[arg(long, env, default_value = "15d", value_parser = duration)]
    pub inbox_retention: Duration,
}

impl RetentionConfig {
    /// Finds an inbox that forgets what the stream or a replay could still deliver.
    ///
    /// # Errors
    /// One line that names the setting, its value and its bound.
    pub fn check(&self, stream: &StreamConfig) -> Result<(), String> {
        at_least(
            "INBOX_RETENTION",
            self.inbox_retention,
            "STREAM_MAX_AGE plus RELAY_RETENTION",
            stream.stream_max_age + self.relay_retention,
        )
    }
}

impl RelayConfig {
    /// Finds settings that contradict each other.
    ///
    /// # Errors
    /// One line that names the setting, its value and its bound.
    pub fn check(&self) -> Result<(), String> {
        at_least("RELAY_LEASE", self.relay_lease, "RELAY_PUBLISH_TIMEOUT", self.relay_publish_timeout)?;
        if self.relay_lease == self.relay_publish_timeout {
            let length = humantime::format_duration(self.relay_lease);
            return Err(format!("RELAY_LEASE is {length}, which is not longer than RELAY_PUBLISH_TIMEOUT ({length})"));
        }
        at_least("RELAY_POLL_MAX", self.relay_poll_max, "RELAY_POLL_MIN", self.relay_poll_min)?;
        at_least("RELAY_BACKOFF_MAX", self.relay_backoff_max, "RELAY_BACKOFF_BASE", self.relay_backoff_base)
    }

    pub(crate) fn backoff(&self) -> Backoff {
        Backoff { base: self.relay_backoff_base, max: self.relay_backoff_max }
    }
}

/// How the service's own stream is made.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Stream")]
pub struct StreamConfig {
    /// How long the stream keeps an event.
    #[arg(long, env, default_value = "7d", value_parser = duration)]
    pub stream_max_age: Duration,
    /// The most bytes it keeps [default: unlimited].
    #[arg(long, env, value_parser = clap::value_parser!(i64).range(1..))]
    pub stream_max_bytes: Option<i64>,
    /// How long it recognises a message it has already stored.
    #[arg(long, env, default_value = "2m", value_parser = duration)]
    pub stream_duplicate_window: Duration,
    /// On how many servers of a cluster it is stored.
    #[arg(long, env, default_value_t = 1)]
    pub stream_replicas: usize,
}

impl StreamConfig {
    /// Finds settings that contradict each other.
    ///
    /// # Errors
    /// One line that names the setting, its value and its bound.
    pub fn check(&self) -> Result<(), String> {
        at_least("STREAM_MAX_AGE", self.stream_max_age, "STREAM_DUPLICATE_WINDOW", self.stream_duplicate_window)
    }
}

/// How the consumer works.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Consumer")]
pub struct ConsumerConfig {
    /// The most events handled together.
    #[arg(long, env, default_value_t = 500, value_parser = batch)]
    pub consumer_batch: usize,
    /// How long the broker waits for an acknowledgement before it delivers again.
    #[arg(long, env, default_value = "30s", value_parser = duration)]
    pub consumer_ack_wait: Duration,
    /// Failures of its handler after which an event becomes a dead letter.
    #[arg(long, env, default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..))]
    pub consumer_max_attempts: u32,
    /// The span of the first wait after a failure; each later one is twice as long.
    #[arg(long, env, default_value = "1s", value_parser = duration)]
    pub consumer_backoff_base: Duration,
    /// No wait after a failure is longer.
    #[arg(long, env, default_value = "1m", value_parser = duration)]
    pub consumer_backoff_max: Duration,
    /// How long an event waits for a missing earlier one before it becomes a dead letter.
    #[arg(long, env, default_value = "10m", value_parser = duration)]
    pub consumer_gap_deadline: Duration,
    /// Whether the stream's beginning was gone when this consumer joined it: an aggregate may then
    /// begin at a later event than its first, once that has waited for the gap deadline.
    #[arg(long, env, default_value = "off")]
    pub consumer_joins_late: Switch,
    /// How long its inbox remembers.
    #[command(flatten)]
    pub retention: RetentionConfig,
}

impl ConsumerConfig {
    /// Finds settings that contradict each other.
    ///
    /// # Errors
    /// One line that names the setting, its value and its bound.
    pub fn check(&self) -> Result<(), String> {
        at_least("CONSUMER_BACKOFF_MAX", self.consumer_backoff_max, "CONSUMER_BACKOFF_BASE", self.consumer_backoff_base)
    }

    /// Finds an ack wait that is shorter than what a handler's one external call may take.
    ///
    /// # Errors
    /// One line that names the setting, its value and its bound.
    pub fn check_budget(&self, setting: &str, budget: Duration) -> Result<(), String> {
        at_least("CONSUMER_ACK_WAIT", self.consumer_ack_wait, setting, budget)
    }

    pub(crate) fn backoff(&self) -> Backoff {
        Backoff { base: self.consumer_backoff_base, max: self.consumer_backoff_max }
    }
}

/// What every program has: its admin listener, its log, its way to stop.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Process")]
pub struct ProcessConfig {
    /// How the log is written to standard error.
    #[arg(long, env, default_value = "pretty")]
    pub log_format: LogFormat,
    /// What is logged, such as `info` or `outbox_core=debug,info`.
    #[arg(long, env, default_value = "info,async_nats=warn,sqlx=error")]
    pub rust_log: String,
    /// Where spans are exported to, by OTLP over HTTP, such as http://127.0.0.1:4318
    /// [default: nothing is exported].
    #[arg(long, env)]
    pub otel_exporter_otlp_endpoint: Option<String>,
    /// How long a stop may take.
    #[arg(long, env, default_value = "10s", value_parser = duration)]
    pub shutdown_grace: Duration,
}

/// The form of a log line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// For people.
    Pretty,
    /// For machines: one JSON object a line.
    Json,
}

/// Where a program's admin listener is, for its `health` command.
#[derive(Debug, Clone, Args)]
pub struct HealthCommand {
    /// The admin listener to ask.
    #[arg(long, env)]
    pub admin_addr: Option<SocketAddr>,
}

/// Reads `250ms`, `30s`, `7d`. Not zero: there is no setting for which nothing is a sensible time.
///
/// # Errors
/// What is wrong with it.
pub fn duration(text: &str) -> Result<Duration, String> {
    let duration = humantime::parse_duration(text).map_err(|error| error.to_string())?;
    let longest = Duration::from_secs(100 * 365 * 24 * 60 * 60);
    if duration.is_zero() || duration > longest {
        return Err("must be more than nothing and at most 100 years".to_owned());
    }
    Ok(duration)
}

fn batch(text: &str) -> Result<usize, String> {
    let batch: usize = text.parse().map_err(|_| "is not a number".to_owned())?;
    if (1..=10_000).contains(&batch) { Ok(batch) } else { Err("must be from 1 to 10000".to_owned()) }
}

/// Reads a program's settings from its flags and environment. Where that does not work it ends the
/// process: after `--help` and `--version` with 0, and otherwise with 2 and one line that names the
/// setting.
pub fn read<C: Parser>() -> C {
    C::try_parse().unwrap_or_else(|error| {
        if !error.use_stderr() {
            error.exit();
        }
        eprintln!("{}: {}", C::command().get_name(), one_line(&error.to_string()));
        std::process::exit(2)
    })
}

/// The first paragraph says what is wrong, and in the rest of its lines of what; then come tips.
fn one_line(complaint: &str) -> String {
    let lines: Vec<&str> = complaint.lines().take_while(|line| !line.is_empty()).map(str::trim).collect();
    lines.join(" ").trim_start_matches("error: ").to_owned()
}

pub(crate) fn at_least(name: &str, value: Duration, other: &str, bound: Duration) -> Result<(), String> {
    if value >= bound {
        return Ok(());
    }
    let text = |duration| match duration {
        Duration::MAX => "for ever".to_owned(),
        duration => humantime::format_duration(duration).to_string(),
    };
    Err(format!("{name} is {}, which is shorter than {other} ({})", text(value), text(bound)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_written_with_their_unit() {
        assert_eq!(duration("250ms"), Ok(Duration::from_millis(250)));
        assert_eq!(duration("30s"), Ok(Duration::from_secs(30)));
        assert_eq!(duration("7d"), Ok(Duration::from_secs(7 * 86_400)));
        for wrong in ["", "7", "0s", "-1s", "soon", "9999999999d"] {
            assert!(duration(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_contradiction_is_one_line_with_both_settings_and_their_values() {
        let line = at_least("RELAY_LEASE", Duration::from_secs(3), "RELAY_PUBLISH_TIMEOUT", Duration::from_secs(5));
        assert_eq!(line, Err("RELAY_LEASE is 3s, which is shorter than RELAY_PUBLISH_TIMEOUT (5s)".to_owned()));
    }
}
