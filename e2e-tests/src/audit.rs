//! The operator's own check: `outboxctl audit`.

use anyhow::{Context, ensure};
use sqlx::{ConnectOptions, PgPool};
use tokio::process::Command;

use crate::programs::program;

/// Lets `outboxctl audit` compare the two services; fails with what it says where something is lost or
/// doubled.
pub async fn audit(orders_db: &PgPool, payments_db: &PgPool, nats_url: &str) -> anyhow::Result<()> {
    let url = |db: &PgPool| db.connect_options().to_url_lossy().to_string();
    let mut command = Command::new(program("outboxctl").await?);
    command.arg("audit").env("DATABASE_URL", url(orders_db)).env("PEER_DATABASE_URL", url(payments_db));
    let output = command.env("NATS_URL", nats_url).kill_on_drop(true).output().await.context("running outboxctl")?;
    let said = [output.stdout, output.stderr].concat();
    ensure!(output.status.success(), "outboxctl audit: {}", String::from_utf8_lossy(&said));
    Ok(())
}
