//! The settings of payment-service.

use std::net::SocketAddr;
use std::time::Duration;

use clap::{Parser, Subcommand};
use outbox_core::config::{
    BrokerConfig, ConsumerConfig, DatabaseConfig, ProcessConfig, RelayConfig, RelayMode, StreamConfig, Switch, duration,
};

/// Charges for orders and tells of it. Every setting is a flag and an environment variable.
#[derive(Debug, Parser)]
#[command(name = "payment-service", version)]
pub struct Config {
    /// What to do instead of serving.
    #[command(subcommand)]
    pub command: Option<Command>,
    /// Where payments are served.
    #[arg(long, env, default_value = "127.0.0.1:8081")]
    pub http_addr: SocketAddr,
    /// Where health and metrics are served.
    #[arg(long, env, default_value = "127.0.0.1:9081")]
    pub admin_addr: SocketAddr,
    /// Whether to migrate the database at start; `off` where another role does it.
    #[arg(long, env, default_value = "on")]
    pub migrate: Switch,
    /// Where the relay runs.
    #[arg(long, env, default_value = "embedded")]
    pub relay: RelayMode,
    /// The payment gateway, such as `https://gateway.example` [default: the built-in sandbox].
    #[arg(long, env, hide_env_values = true)]
    pub payment_gateway_url: Option<String>,
    /// How long to wait for the gateway's answer.
    #[arg(long, env, default_value = "5s", value_parser = duration)]
    pub gateway_timeout: Duration,
    #[command(flatten)]
    pub(crate) process: ProcessConfig,
    #[command(flatten)]
    pub(crate) database: DatabaseConfig,
    #[command(flatten)]
    pub(crate) broker: BrokerConfig,
    #[command(flatten)]
    pub(crate) stream: StreamConfig,
    #[command(flatten)]
    pub(crate) relaying: RelayConfig,
    #[command(flatten)]
    pub(crate) consumer: ConsumerConfig,
}

/// What else the program does.
#[derive(Debug, Clone, Copy, Subcommand)]
pub enum Command {
    /// Migrate the database and exit.
    Migrate,
    /// Exit 0 if the service at ADMIN_ADDR is ready, 1 if not.
    Health,
}

impl Config {
    /// Finds settings that contradict each other.
    ///
    /// # Errors
    /// One line that names the setting, its value and its bound.
    pub fn check(&self) -> Result<(), String> {
        self.relaying.check()?;
        self.stream.check()?;
        self.consumer.check()?;
        self.consumer.retention.check(&self.stream)?;
        self.consumer.check_budget("GATEWAY_TIMEOUT", self.gateway_timeout)
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_settings_make_sense_to_their_parser() {
        Config::command().debug_assert();
    }
}
