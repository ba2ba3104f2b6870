//! Repairs of the outbox: failed events, leases of the dead, what was kept long enough.

use std::time::Duration;

use serde::Serialize;
use serde_json::json;
use sqlx::{PgConnection, Row};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use super::selection::{Scope, Selection, chosen, count, fetch_scope, scope_of};
use super::{Operator, OperatorError, Really};
use crate::outbox::{self, interval};
use crate::retention;

/// What a repair did, or would do.
#[derive(Debug, Clone, Serialize)]
pub struct Repaired {
    /// The events it is about.
    pub scope: Scope,
    /// Events that waited behind these, and are due again.
    pub followers: usize,
    /// Events that were named and are in no state for it.
    pub refused: Vec<Uuid>,
}

impl Operator {
    /// Lets failed events be tried again, as if for the first time: their attempts are 0, they and
    /// those that waited behind them are due now. The last error stays readable until the next.
    ///
    /// A dry run is the same transaction, rolled back.
    ///
    /// # Errors
    /// The database's.
    pub async fn requeue(&self, selection: &Selection, really: Really) -> Result<Repaired, OperatorError> {
        let mut tx = self.db.begin().await?;
        let chosen: Vec<Uuid> = ids(selection.query(FAILED).fetch_all(&mut *tx).await?)?;
        let (failed, followers) = lock_failed_and_followers(&mut tx, &chosen).await?;
        let scope = scope_of(&mut tx, failed.clone()).await?;
        let repaired = Repaired { scope, followers: followers.len(), refused: selection.missing(&failed) };
        if really == Really::Yes && !failed.is_empty() {
            sqlx::query(REQUEUE).bind(&failed).execute(&mut *tx).await?;
            sqlx::query(MAKE_DUE).bind(&followers).execute(&mut *tx).await?;
            let details = json!({"asked": selection.as_json(), "touched": repaired, "event_ids": failed});
            self.record(&mut tx, "requeue", failed.len(), details).await?;
            tx.commit().await?;
            outbox::notify(&self.db).await?;
        }
        Ok(repaired)
    }

    /// Clears the leases that `worker` holds, so that any relay may take the events at once. If it is
    /// not dead after all, its fence is gone: it can mark nothing, and what it sent is sent again.
    ///
    /// A dry run is the same transaction, rolled back.
    ///
    /// # Errors
    /// The database's.
    pub async fn release(&self, worker: &str, really: Really) -> Result<Repaired, OperatorError> {
        let mut tx = self.db.begin().await?;
        let leased: Vec<Uuid> = ids(sqlx::query(LOCK_LEASED).bind(worker).fetch_all(&mut *tx).await?)?;
        let scope = scope_of(&mut tx, leased.clone()).await?;
        let repaired = Repaired { scope, followers: 0, refused: Vec::new() };
        if really == Really::Yes && !leased.is_empty() {
            sqlx::query(RELEASE).bind(&leased).execute(&mut *tx).await?;
            let details = json!({"asked": {"worker": worker}, "touched": repaired, "event_ids": leased});
            self.record(&mut tx, "release", leased.len(), details).await?;
            tx.commit().await?;
            outbox::notify(&self.db).await?;
        }
        Ok(repaired)
    }

    /// What [`Operator::purge`] would remove.
    ///
    /// # Errors
    /// The database's.
    pub async fn purgeable(&self, age: Duration) -> Result<Scope, OperatorError> {
        let everything = Selection::default();
        let counting = everything.query(PURGEABLE).bind(interval(age));
        Ok(fetch_scope(counting, &mut *self.db.acquire().await?).await?)
    }

    /// Removes events that were published longer than `age` ago, as retention does: in small batches
    /// that hold up nobody. Returns how many were removed, also where `stop` came first.
    ///
    /// # Errors
    /// The database's. What was removed before is recorded.
    pub async fn purge(
        &self,
        age: Duration,
        stop: &CancellationToken,
        mut progress: impl FnMut(u64),
    ) -> Result<u64, OperatorError> {
        let older_than = humantime::format_duration(age).to_string();
        let action = self.begin("purge", json!({"asked": {"older_than": older_than}})).await?;
        let mut removed = 0;
        while !stop.is_cancelled() {
            let purging = sqlx::query(retention::DELETE_PUBLISHED).bind(interval(age)).bind(retention::BATCH);
            let batch = purging.execute(&self.db).await?.rows_affected();
            removed += batch;
            // For the audit: what was published before this is rightly gone.
            let cutoff: String = sqlx::query_scalar(CUTOFF).bind(interval(age)).fetch_one(&self.db).await?;
            action.advance(batch as usize, json!({"cutoff": cutoff})).await?;
            progress(removed);
            if batch == 0 {
                action.end().await?;
                break;
            }
        }
        Ok(removed)
    }
}

fn ids(rows: Vec<sqlx::postgres::PgRow>) -> Result<Vec<Uuid>, sqlx::Error> {
    rows.iter().map(|row| row.try_get("event_id")).collect()
}

/// Locks those of `chosen` that are still failed, and what waits behind them.
async fn lock_failed_and_followers(
    tx: &mut PgConnection,
    chosen: &[Uuid],
) -> Result<(Vec<Uuid>, Vec<Uuid>), sqlx::Error> {
    let locked: Vec<(Uuid, bool)> = sqlx::query_as(LOCK_FAILED_AND_FOLLOWERS).bind(chosen).fetch_all(tx).await?;
    let (failed, followers): (Vec<_>, Vec<_>) = locked.into_iter().partition(|(_, is_chosen)| *is_chosen);
    let ids = |rows: Vec<(Uuid, bool)>| rows.into_iter().map(|(id, _)| id).collect();
    Ok((ids(failed), ids(followers)))
}

const FAILED: &str =
    concat!("SELECT delivery.event_id", chosen!("delivery.published_at IS NULL AND delivery.failed_at IS NOT NULL"));

/// touched: what was chosen, and what waits behind it.
/// In event_id order, as everything that locks many deliveries. What another operator has requeued, or
/// what has failed, since it was chosen is judged again under the lock.
const LOCK_FAILED_AND_FOLLOWERS: &str = "
WITH chosen AS (
    SELECT event_id, aggregate_type, aggregate_id, aggregate_sequence
    FROM outbox_deliveries
    WHERE event_id = ANY ($1) AND published_at IS NULL AND failed_at IS NOT NULL
), touched AS (
    SELECT event_id, true AS is_chosen
    FROM chosen
    UNION
    SELECT follower.event_id, false
    FROM chosen
    JOIN outbox_deliveries follower
      ON follower.aggregate_type = chosen.aggregate_type AND follower.aggregate_id = chosen.aggregate_id
     AND follower.aggregate_sequence > chosen.aggregate_sequence
    WHERE follower.published_at IS NULL AND follower.failed_at IS NULL
)
SELECT delivery.event_id, touched.is_chosen
FROM outbox_deliveries delivery
JOIN touched USING (event_id)
WHERE delivery.published_at IS NULL AND (delivery.failed_at IS NOT NULL) = touched.is_chosen
ORDER BY delivery.event_id
FOR UPDATE OF delivery";

/// Attempts begin anew: the cause is mended, and what was counted is in the record.
const REQUEUE: &str = "
UPDATE outbox_deliveries SET failed_at = NULL, attempts = 0, next_attempt_at = now() WHERE event_id = ANY ($1)";

const MAKE_DUE: &str = "
UPDATE outbox_deliveries SET next_attempt_at = now() WHERE event_id = ANY ($1) AND next_attempt_at > now()";

const LOCK_LEASED: &str = "
SELECT event_id
FROM outbox_deliveries
WHERE published_at IS NULL AND locked_by = $1
ORDER BY event_id
FOR UPDATE";

const RELEASE: &str = "
UPDATE outbox_deliveries SET locked_by = NULL, lease_id = NULL, lock_until = NULL WHERE event_id = ANY ($1)";

const PURGEABLE: &str = count!(chosen!("delivery.published_at < now() - $6::interval"));

const CUTOFF: &str = "SELECT to_json(now() - $1::interval) #>> '{}'";
