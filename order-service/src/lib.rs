//! order-service: takes orders, tells of them through its outbox, and learns through its inbox what
//! became of their payments.

pub mod config;
pub mod events;
pub mod http;
pub mod order;
pub mod payments;

use std::process::ExitCode;

use outbox_core::config::{RelayMode, Switch};
use outbox_core::{
    Broker, Consumer, Gauges, Pools, Process, Relay, Retention, Stream, StreamName, Subscription, admin, bind,
    check_health, forward_nudges, migrate_and_exit,
};
use sqlx::migrate::Migrator;

use crate::config::{Command, Config};
use crate::payments::Payments;

const SERVICE: &str = "order-service";

/// The service's own tables.
fn migrations() -> Migrator {
    sqlx::migrate!("../migrations/order-service")
}

/// The names of the stream that this service owns.
pub fn stream() -> StreamName {
    StreamName { name: "ORDERS".to_owned(), subject_prefix: "orders".to_owned(), source: "/order-service".to_owned() }
}

/// Runs the service until it is told to stop, or the command that was asked for.
///
/// # Errors
/// One line that names the setting that cannot work.
pub async fn run(config: Config) -> Result<ExitCode, String> {
    config.check()?;
    let _telemetry = outbox_core::telemetry::start(&config.process, SERVICE)?;
    let Pools { requests, work: db, relay: relay_db } = Pools::new(&config.database, SERVICE)?;
    match config.command {
        None => {}
        Some(Command::Health) => return Ok(check_health(config.admin_addr).await),
        Some(Command::Migrate) => return Ok(migrate_and_exit(&db, &migrations()).await),
    }
    let broker = Broker::connect(&config.broker, SERVICE).await.map_err(|error| error.to_string())?;
    let mut process = Process::new(&config.process);
    let admin_listener = bind("ADMIN_ADDR", config.admin_addr).await?;
    let http_listener = bind("HTTP_ADDR", config.http_addr).await?;
    let name = stream();
    let stream = Stream::new(broker.clone(), name.clone(), config.stream, config.relaying.relay_publish_timeout);
    let relay = Relay::new(relay_db, stream.clone(), config.relaying);
    let nudge = relay.nudge();
    process.serve_admin(admin_listener, admin(process.health(), db.clone(), broker.clone()));
    process.serve(
        "http",
        http_listener,
        http::router(requests.clone(), nudge.clone(), process.writes(), process.health()),
    );
    let migrations = (config.migrate == Switch::On).then(migrations);
    if let Some(code) = process.prepare_database(&db, migrations, &name).await {
        return Ok(code);
    }

    process.supervise("stream", stream.keep(process.health(), process.shutdown()));
    match config.relay {
        RelayMode::Embedded => process.supervise("relay", relay.run(process.shutdown())),
        RelayMode::Off => process.supervise("nudges", forward_nudges(db.clone(), nudge.clone(), process.shutdown())),
    }
    let retention = Retention::new(db.clone(), &config.consumer.retention);
    let retention = retention.also("idempotency_keys", "created_at", order::DELETE_KEYS, config.idempotency_retention);
    process.supervise("retention", retention.run(process.shutdown()));
    let payments = Subscription { stream: payments::stream(), durable: SERVICE.to_owned() };
    let consumer = Consumer::new(db.clone(), payments.clone(), Payments, config.consumer).nudging(nudge);
    let gauges = Gauges::new(db).with_requests(requests).with_consumer(broker.clone(), payments);
    process.supervise("gauges", gauges.run(process.shutdown()));
    process.supervise("consumer", consumer.run(broker, process.health(), process.shutdown()));
    Ok(process.run().await)
}
