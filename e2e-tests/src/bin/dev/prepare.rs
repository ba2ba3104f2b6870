//! `cargo dev sqlx`: the `.sqlx` folders, which builds without a database read.

use std::path::Path;

use anyhow::{Context, ensure};
use e2e_tests::{Postgres, cargo, workspace};
use sqlx::{AssertSqlSafe, Connection, PgConnection};

use crate::screen::step;

/// Writes the folder of each service, or checks that it is up to date.
pub async fn prepare_sqlx(check: bool) -> anyhow::Result<()> {
    let postgres = step("PostgreSQL", Postgres::get()).await?;
    for service in ["order-service", "payment-service"] {
        let database = postgres.create_database("sqlx").await?;
        // Not by the service's own migrate command: it may not build before its folder is written.
        for migrations in ["outbox", service] {
            apply(&workspace().join("migrations").join(migrations), &database).await?;
        }
        let mut prepare = cargo();
        prepare.args(["sqlx", "prepare"]).args(check.then_some("--check"));
        prepare.current_dir(workspace().join(service)).env("DATABASE_URL", database);
        let status = prepare.status().await.context("cargo sqlx (cargo install sqlx-cli)")?;
        ensure!(status.success(), "the .sqlx folder of {service} is not up to date");
    }
    Ok(())
}

async fn apply(folder: &Path, database: &str) -> anyhow::Result<()> {
    let entries = folder.read_dir().with_context(|| folder.display().to_string())?;
    let mut files = entries.map(|entry| Ok(entry?.path())).collect::<std::io::Result<Vec<_>>>()?;
    files.sort();
    let mut connection = PgConnection::connect(database).await?;
    for file in files {
        let sql = std::fs::read_to_string(&file)?;
        sqlx::raw_sql(AssertSqlSafe(sql)).execute(&mut connection).await.with_context(|| file.display().to_string())?;
    }
    Ok(())
}
