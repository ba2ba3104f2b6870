//! Retention: removes what was done long ago. What is pending, failed or blocked is never touched.

use std::time::Duration;

use sqlx::{AssertSqlSafe, PgPool};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::config::RetentionConfig;
use crate::database::{in_time, is_away};
use crate::jetstream::describe;
use crate::measure;
use crate::outbox::interval;

/// How often a table that has nothing old is looked at, and how far the clean-up is behind.
const PAUSE: Duration = Duration::from_secs(60);

/// Rows removed by one statement: few enough that it takes milliseconds, and that vacuum keeps up.
pub(crate) const BATCH: i64 = 1_000;

/// Removes old rows in small batches. Any number of instances may share a database: each takes rows
/// that no other has in hand, so that nobody waits and nothing can deadlock.
#[derive(Debug)]
pub struct Retention {
    db: PgPool,
    sweeps: Vec<Sweep>,
}

#[derive(Debug)]
struct Sweep {
    table: &'static str,
    since: &'static str,
    delete: &'static str,
    age: Duration,
}

impl Retention {
    /// Keeps published events and processed ids as long as `config` says.
    pub fn new(db: PgPool, config: &RetentionConfig) -> Self {
        Self { db, sweeps: Vec::new() }
            .also("outbox_deliveries", "published_at", DELETE_PUBLISHED, config.relay_retention)
            .also("processed_events", "processed_at", DELETE_PROCESSED, config.inbox_retention)
    }

    /// A table of the service's own: `delete` removes up to `$2` rows whose column `since`, which has an
    /// index, is older than `$1`.
    #[must_use]
    pub fn also(mut self, table: &'static str, since: &'static str, delete: &'static str, age: Duration) -> Self {
        self.sweeps.push(Sweep { table, since, delete, age });
        self
    }

    /// Looks how far the clean-up is behind: for how long the oldest row of each table has been due.
    ///
    /// # Errors
    /// The database's.
    pub async fn measure(&self) -> Result<(), sqlx::Error> {
        for Sweep { table, since, age, .. } in &self.sweeps {
            // The oldest stands at the end of its index.
            let lag = format!("SELECT extract(epoch FROM now() - $1::interval - min({since}))::float8 FROM {table}");
            let asking = sqlx::query_scalar(AssertSqlSafe(lag)).bind(interval(*age));
            let lag: Option<f64> = in_time(asking.fetch_one(&self.db)).await?;
            metrics::gauge!(measure::RETENTION_LAG, "table" => *table).set(lag.unwrap_or_default().max(0.0));
        }
        Ok(())
    }

    /// Removes up to one batch from each table. Returns the most that was removed from one.
    ///
    /// # Errors
    /// The database's.
    pub async fn run_once(&self) -> Result<u64, sqlx::Error> {
        let mut most = 0;
        for sweep in &self.sweeps {
            let delete = sqlx::query(sweep.delete).bind(interval(sweep.age)).bind(BATCH);
            let removed = in_time(delete.execute(&self.db)).await?.rows_affected();
            if removed > 0 {
                tracing::debug!(table = sweep.table, removed, "removed what was kept long enough");
            }
            most = most.max(removed);
        }
        Ok(most)
    }

    /// Removes what is old, again and again, until `shutdown`.
    pub async fn run(self, shutdown: CancellationToken) {
        let sweeping = async {
            let mut next_look = Instant::now();
            loop {
                match self.look_and_remove(&mut next_look).await {
                    Ok(removed) if removed == BATCH as u64 => tokio::task::yield_now().await,
                    Ok(_) => tokio::time::sleep(PAUSE).await,
                    Err(error) => {
                        if !is_away(&error) {
                            tracing::warn!(error = describe(&error), "what was kept long enough cannot be removed");
                        }
                        tokio::time::sleep(PAUSE).await;
                    }
                }
            }
        };
        shutdown.run_until_cancelled(sweeping).await;
    }

    async fn look_and_remove(&self, next_look: &mut Instant) -> Result<u64, sqlx::Error> {
        if *next_look <= Instant::now() {
            self.measure().await?;
            *next_look = Instant::now() + PAUSE;
        }
        self.run_once().await
    }
}

/// Only what was published. An event and its delivery go together.
pub(crate) const DELETE_PUBLISHED: &str = "
WITH old AS (
    SELECT event_id FROM outbox_deliveries
    WHERE published_at < now() - $1::interval
    ORDER BY published_at
    LIMIT $2
    FOR UPDATE SKIP LOCKED
), deliveries AS (
    DELETE FROM outbox_deliveries USING old WHERE outbox_deliveries.event_id = old.event_id
)
DELETE FROM outbox_events USING old WHERE outbox_events.event_id = old.event_id";

const DELETE_PROCESSED: &str = "
DELETE FROM processed_events USING (
    SELECT consumer, event_id FROM processed_events
    WHERE processed_at < now() - $1::interval
    ORDER BY processed_at
    LIMIT $2
    FOR UPDATE SKIP LOCKED
) old
WHERE processed_events.consumer = old.consumer AND processed_events.event_id = old.event_id";
