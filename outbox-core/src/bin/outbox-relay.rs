//! A relay in a process of its own, for a service that runs with `RELAY=off`. Any number of them may
//! share an outbox.

use std::net::SocketAddr;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Parser, Subcommand};
use outbox_core::config::{BrokerConfig, DatabaseConfig, ProcessConfig, RelayConfig, StreamConfig};
use outbox_core::{
    Broker, Gauges, Process, Relay, Stream, StreamName, admin, bind, check_health, in_time, receive_nudges,
};
use sqlx::PgPool;

/// Publishes the outbox of the service whose database it is given.
#[derive(Debug, Parser)]
#[command(name = "outbox-relay", version)]
struct Config {
    #[command(subcommand)]
    command: Option<Command>,
    /// Where health and metrics are served.
    #[arg(long, env, default_value = "127.0.0.1:9082")]
    admin_addr: SocketAddr,
    #[command(flatten)]
    process: ProcessConfig,
    #[command(flatten)]
    database: DatabaseConfig,
    #[command(flatten)]
    broker: BrokerConfig,
    #[command(flatten)]
    stream: StreamConfig,
    #[command(flatten)]
    relaying: RelayConfig,
}

#[derive(Debug, Clone, Copy, Subcommand)]
enum Command {
    /// Exit 0 if the relay at ADMIN_ADDR is ready, 1 if not.
    Health,
}

#[tokio::main]
async fn main() -> ExitCode {
    match run(outbox_core::config::read()).await {
        Ok(code) => code,
        Err(line) => {
            eprintln!("outbox-relay: {line}");
            ExitCode::from(2)
        }
    }
}

async fn run(config: Config) -> Result<ExitCode, String> {
    config.relaying.check()?;
    config.stream.check()?;
    config.broker.servers()?;
    let _telemetry = outbox_core::telemetry::start(&config.process, "outbox-relay")?;
    if let Some(Command::Health) = config.command {
        return Ok(check_health(config.admin_addr).await);
    }
    let db = outbox_core::relay_pool(&config.database, "outbox-relay")?;
    // The broker knows services, not relays: the user in NATS_URL is the service's, and so is the inbox.
    let mut process = Process::new(&config.process);
    let admin_listener = bind("ADMIN_ADDR", config.admin_addr).await?;
    let name = tokio::select! {
        name = wait_for_source(&db) => name,
        () = process.stopped() => return Ok(ExitCode::SUCCESS),
    };
    let service = name.source.trim_start_matches('/');
    let broker = Broker::connect(&config.broker, service).await.map_err(|error| error.to_string())?;
    let stream = Stream::new(broker.clone(), name, config.stream, config.relaying.relay_publish_timeout);
    process.serve_admin(admin_listener, admin(process.health(), db.clone(), broker));
    process.supervise("stream", stream.clone().keep(process.health(), process.shutdown()));
    let relay = Relay::new(db.clone(), stream, config.relaying);
    process.supervise("gauges", Gauges::new(db.clone()).run(process.shutdown()));
    process.supervise("nudges", receive_nudges(db, relay.nudge(), process.shutdown()));
    process.supervise("relay", relay.run(process.shutdown()));
    Ok(process.run().await)
}

/// The service writes it when it starts for the first time.
async fn wait_for_source(db: &PgPool) -> StreamName {
    let mut is_said = false;
    loop {
        match in_time(outbox_core::source(db)).await {
            Ok(Some(name)) => return name,
            result if !is_said => {
                tracing::warn!(?result, "waiting for the service whose outbox this is");
                is_said = true;
            }
            _ => {}
        }
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
}
