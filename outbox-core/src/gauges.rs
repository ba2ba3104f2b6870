//! What is counted in the database and at the broker rather than in passing, every few seconds.

use std::time::Duration;

use sqlx::{PgPool, Row};
use tokio_util::sync::CancellationToken;

use crate::database::in_time;
use crate::jetstream::{Broker, Subscription, describe};
use crate::{inbox, measure, outbox};

/// How often it is counted.
const PERIOD: Duration = Duration::from_secs(5);

/// An old transaction is worth a line in the log when it is this old.
const OLD_SNAPSHOT_SECONDS: f64 = 300.0;

/// Counts what waits in one service's outbox and inbox.
#[derive(Debug)]
pub struct Gauges {
    db: PgPool,
    consumer: Option<(Broker, Subscription)>,
}

impl Gauges {
    /// The gauges of the outbox in `db`.
    pub fn new(db: PgPool) -> Self {
        Self { db, consumer: None }
    }

    /// And of the inbox there, with the lag of its consumer at the broker.
    #[must_use]
    pub fn with_consumer(self, broker: Broker, subscription: Subscription) -> Self {
        Self { consumer: Some((broker, subscription)), ..self }
    }

    /// Counts once.
    ///
    /// # Errors
    /// The database's. A broker that is away leaves its gauges as they were.
    pub async fn run_once(&self) -> Result<(), sqlx::Error> {
        let used = f64::from(self.db.size()) - self.db.num_idle() as f64;
        metrics::gauge!(measure::POOL, "state" => "used").set(used);
        metrics::gauge!(measure::POOL, "state" => "idle").set(self.db.num_idle() as f64);

        let waiting = outbox::count_unpublished(&self.db).await?;
        metrics::gauge!(measure::OLDEST_UNPUBLISHED).set(waiting.oldest_age_seconds);
        for (state, count) in waiting.by_state {
            metrics::gauge!(measure::EVENTS, "state" => state).set(count as f64);
        }
        self.look_for_old_snapshots().await?;
        if let Some((broker, subscription)) = &self.consumer {
            let counts = inbox::count_waiting(&self.db, &subscription.durable).await?;
            metrics::gauge!(measure::PARKED, "reason" => "gap").set(counts.gap as f64);
            metrics::gauge!(measure::PARKED, "reason" => "retry").set(counts.retry as f64);
            metrics::gauge!(measure::DEAD_LETTERS).set(counts.dead as f64);
            if let Ok((pending, ack_pending)) = broker.lag(subscription).await {
                metrics::gauge!(measure::PENDING).set(pending as f64);
                metrics::gauge!(measure::ACK_PENDING).set(ack_pending as f64);
            }
        }
        Ok(())
    }

    /// An old snapshot keeps vacuum from removing what claims and marks leave behind: the outbox grows
    /// slow. Names who holds it.
    async fn look_for_old_snapshots(&self) -> Result<(), sqlx::Error> {
        let row = sqlx::query(OLDEST_SNAPSHOT).fetch_optional(&self.db).await?;
        let age: f64 = row.as_ref().map(|row| row.try_get("age")).transpose()?.unwrap_or_default();
        metrics::gauge!(measure::SNAPSHOT_AGE).set(age);
        if let Some(row) = row.filter(|_| age > OLD_SNAPSHOT_SECONDS) {
            let (pid, application): (i32, String) = (row.try_get("pid")?, row.try_get("application_name")?);
            tracing::warn!(pid, application, age_seconds = age, "an old transaction holds back clean-up of the outbox");
        }
        Ok(())
    }

    /// Counts, again and again, until `shutdown`.
    pub async fn run(self, shutdown: CancellationToken) {
        let counting = async {
            loop {
                if let Err(error) = in_time(self.run_once()).await {
                    tracing::debug!(error = describe(&error), "the gauges stay as they are");
                }
                tokio::time::sleep(PERIOD).await;
            }
        };
        shutdown.run_until_cancelled(counting).await;
    }
}

/// Sees the sessions of its own role only, unless it may see more (pg_monitor); that is enough for
/// the commonest culprit, a forgotten transaction of the service itself.
const OLDEST_SNAPSHOT: &str = "
SELECT pid, application_name, extract(epoch FROM clock_timestamp() - xact_start)::float8 AS age
FROM pg_stat_activity
WHERE datname = current_database() AND backend_xmin IS NOT NULL AND pid <> pg_backend_pid()
  AND xact_start IS NOT NULL
ORDER BY xact_start
LIMIT 1";
