//! What is counted in the database and at the broker rather than in passing, every few seconds.

use std::sync::atomic::{AtomicI32, Ordering};
use std::time::Duration;

use serde::Serialize;
use sqlx::{FromRow, PgPool};
use tokio_util::sync::CancellationToken;

use crate::database::in_time;
use crate::jetstream::{Broker, Subscription, describe};
use crate::{inbox, measure, outbox};

/// How often it is counted.
const PERIOD: Duration = Duration::from_secs(5);

/// A transaction is worth a line in the log when it is this old.
const OLD_SECONDS: f64 = 300.0;

/// Counts what waits in one service's outbox and inbox.
#[derive(Debug)]
pub struct Gauges {
    db: PgPool,
    requests: Option<PgPool>,
    consumer: Option<(Broker, Subscription)>,
    /// The process whose old transaction was named last; 0 while there is none.
    named: AtomicI32,
}

impl Gauges {
    /// The gauges of the outbox in `db`.
    pub fn new(db: PgPool) -> Self {
        Self { db, requests: None, consumer: None, named: AtomicI32::new(0) }
    }

    /// And of the connections that are kept for requests.
    #[must_use]
    pub fn with_requests(self, requests: PgPool) -> Self {
        Self { requests: Some(requests), ..self }
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
        count_connections("work", &self.db);
        if let Some(requests) = &self.requests {
            count_connections("requests", requests);
        }
        let waiting = outbox::count_unpublished(&self.db).await?;
        metrics::gauge!(measure::OLDEST_UNPUBLISHED).set(waiting.oldest_age_seconds);
        for (state, count) in waiting.by_state {
            metrics::gauge!(measure::EVENTS, "state" => state).set(count as f64);
        }
        self.look_for_old_transactions().await?;
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

    /// Names who keeps vacuum from removing what claims and marks leave behind: the outbox grows slow.
    async fn look_for_old_transactions(&self) -> Result<(), sqlx::Error> {
        let oldest = oldest_transaction(&self.db).await?;
        metrics::gauge!(measure::SNAPSHOT_AGE).set(oldest.as_ref().map_or(0.0, |oldest| oldest.age_seconds));
        let old = oldest.filter(|oldest| oldest.age_seconds > OLD_SECONDS);
        let pid = old.as_ref().map_or(0, |old| old.pid);
        // Once, however long it lasts.
        if self.named.swap(pid, Ordering::Relaxed) != pid
            && let Some(old) = old
        {
            tracing::warn!(
                pid,
                application = old.application,
                database_user = old.database_user,
                state = old.state,
                age_seconds = old.age_seconds,
                "an old transaction holds back clean-up of the outbox"
            );
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

fn count_connections(pool: &'static str, db: &PgPool) {
    let (all, idle) = (f64::from(db.size()), db.num_idle() as f64);
    metrics::gauge!(measure::POOL, "pool" => pool, "state" => "used").set(all - idle);
    metrics::gauge!(measure::POOL, "pool" => pool, "state" => "idle").set(idle);
}

/// A transaction that keeps vacuum from removing what claims and marks leave behind.
#[derive(Debug, Clone, Serialize, FromRow)]
#[allow(missing_docs)]
pub struct OldTransaction {
    pub pid: i32,
    pub application: String,
    pub database_user: String,
    pub state: String,
    pub age_seconds: f64,
    /// So many transactions have begun since.
    pub transactions_since: i32,
}

/// The transaction that most holds back clean-up, if there is one.
pub(crate) async fn oldest_transaction(db: &PgPool) -> Result<Option<OldTransaction>, sqlx::Error> {
    sqlx::query_as(OLDEST_TRANSACTION).fetch_optional(db).await
}

/// By its snapshot, or by its own changes: a session that has written something and then idles has no
/// snapshot, and holds back clean-up all the same.
/// Sees the sessions of its own role only, unless it may see more (pg_read_all_stats); that is enough for
/// the commonest culprit, a forgotten transaction of the service itself.
const OLDEST_TRANSACTION: &str = "
SELECT pid, application_name AS application, usename::text AS database_user, coalesce(state, '') AS state,
       extract(epoch FROM clock_timestamp() - xact_start)::float8 AS age_seconds,
       greatest(age(backend_xmin), age(backend_xid)) AS transactions_since
FROM pg_stat_activity
WHERE datname = current_database() AND pid <> pg_backend_pid()
  AND (backend_xmin IS NOT NULL OR backend_xid IS NOT NULL)
  AND xact_start IS NOT NULL
ORDER BY transactions_since DESC, xact_start
LIMIT 1";
