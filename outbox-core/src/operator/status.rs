//! Flow at a glance, as far as the database knows it.

use std::collections::BTreeMap;

use serde::Serialize;
use sqlx::FromRow;
use uuid::Uuid;

use super::{Operator, OperatorError};
use crate::gauges::{OldTransaction, oldest_transaction};
use crate::outbox::with_states;

/// A transaction is worth a line when it is this old.
const OLD_SECONDS: f64 = 60.0;

/// What moves, what waits, and what does not move.
#[derive(Debug, Clone, Serialize)]
pub struct Status {
    /// The service whose outbox and inbox these are.
    pub service: String,
    /// Its stream.
    pub stream: String,
    /// Unpublished events by state.
    pub states: BTreeMap<String, i64>,
    /// Age of the oldest event that is unpublished.
    pub oldest_unpublished_seconds: Option<f64>,
    /// Age of the oldest unpublished event that no operator has to act on.
    pub oldest_waiting_seconds: Option<f64>,
    /// Events appended in the last minute.
    pub appended_last_minute: i64,
    /// Events published in the last minute.
    pub published_last_minute: i64,
    /// Events of others that took effect in the last minute.
    pub processed_last_minute: i64,
    /// Leases by worker.
    pub leases: Vec<Lease>,
    /// Aggregates whose events are held back by a failed one; the twenty that have been for longest.
    pub blocked: Vec<BlockedAggregate>,
    /// Parked events by consumer and reason.
    pub parked: Vec<CountOfParked>,
    /// Dead letters.
    pub dead_letters: i64,
    /// The transaction that most holds back clean-up, if it is older than a minute.
    pub old_transaction: Option<OldTransaction>,
}

/// The leases of one worker.
#[derive(Debug, Clone, Serialize, FromRow)]
#[allow(missing_docs)]
pub struct Lease {
    pub worker: String,
    pub events: i64,
    pub expired: i64,
    /// How long the last of them lasts; below zero where all have run out.
    pub seconds_left: f64,
}

/// An aggregate that waits for an operator.
#[derive(Debug, Clone, Serialize, FromRow)]
#[allow(missing_docs)]
pub struct BlockedAggregate {
    pub aggregate_type: String,
    pub aggregate_id: Uuid,
    pub failed_event_id: Uuid,
    pub event_type: String,
    pub failed_at: String,
    pub last_error: Option<String>,
    pub followers: i64,
}

/// Parked events of one consumer that wait for the same.
#[derive(Debug, Clone, Serialize, FromRow)]
#[allow(missing_docs)]
pub struct CountOfParked {
    pub consumer: String,
    pub reason: String,
    pub events: i64,
    pub due: i64,
    pub oldest_seconds: f64,
}

#[derive(FromRow)]
struct Flow {
    oldest_unpublished_seconds: Option<f64>,
    appended_last_minute: i64,
    published_last_minute: i64,
    processed_last_minute: i64,
    dead_letters: i64,
}

impl Operator {
    /// Reads flow, waiting and trouble. It costs a look at the backlog, not at what is retained.
    ///
    /// # Errors
    /// The database's; [`OperatorError::NoSource`].
    pub async fn status(&self) -> Result<Status, OperatorError> {
        let db = &self.db;
        let name = self.source().await?;
        let flow: Flow = sqlx::query_as(FLOW).fetch_one(db).await?;
        let states: Vec<(String, i64, f64)> = sqlx::query_as(STATES).fetch_all(db).await?;
        let waits = |state: &str| !matches!(state, "failed" | "blocked");
        let waiting = states.iter().filter(|(state, ..)| waits(state)).map(|(.., oldest)| *oldest);
        Ok(Status {
            service: name.service().to_owned(),
            stream: name.name,
            oldest_unpublished_seconds: flow.oldest_unpublished_seconds,
            oldest_waiting_seconds: waiting.reduce(f64::max),
            states: states.into_iter().map(|(state, count, _)| (state, count)).collect(),
            appended_last_minute: flow.appended_last_minute,
            published_last_minute: flow.published_last_minute,
            processed_last_minute: flow.processed_last_minute,
            dead_letters: flow.dead_letters,
            leases: sqlx::query_as(LEASES).fetch_all(db).await?,
            blocked: sqlx::query_as(BLOCKED).bind(BLOCKED_SHOWN).fetch_all(db).await?,
            parked: sqlx::query_as(PARKED).fetch_all(db).await?,
            old_transaction: oldest_transaction(db).await?.filter(|oldest| oldest.age_seconds > OLD_SECONDS),
        })
    }
}

/// So many blocked aggregates are shown.
const BLOCKED_SHOWN: i64 = 20;

/// Each from an index that holds no more than it counts.
const FLOW: &str = "
SELECT (SELECT extract(epoch FROM clock_timestamp() - min(created_at))::float8
        FROM outbox_deliveries WHERE published_at IS NULL) AS oldest_unpublished_seconds,
       (SELECT count(*) FROM outbox_deliveries
        WHERE published_at IS NULL AND created_at > now() - interval '1 minute')
       + (SELECT count(*) FROM outbox_deliveries
          WHERE published_at > now() - interval '1 minute' AND created_at > now() - interval '1 minute')
       AS appended_last_minute,
       (SELECT count(*) FROM outbox_deliveries
        WHERE published_at > now() - interval '1 minute') AS published_last_minute,
       (SELECT count(*) FROM processed_events
        WHERE processed_at > now() - interval '1 minute') AS processed_last_minute,
       (SELECT count(*) FROM dead_letters) AS dead_letters";

const STATES: &str = concat!(
    "
WITH unpublished AS (",
    with_states!("outbox_deliveries WHERE published_at IS NULL"),
    "
)
SELECT state, count(*), extract(epoch FROM clock_timestamp() - min(created_at))::float8
FROM unpublished
GROUP BY state"
);

const LEASES: &str = "
SELECT locked_by AS worker,
       count(*) AS events,
       count(*) FILTER (WHERE lock_until < now()) AS expired,
       extract(epoch FROM max(lock_until) - now())::float8 AS seconds_left
FROM outbox_deliveries
WHERE published_at IS NULL AND locked_by IS NOT NULL
GROUP BY locked_by
ORDER BY locked_by";

/// The first failed event of each aggregate: those behind it wait, whether failed or not.
const BLOCKED: &str = "
WITH heads AS (
    SELECT DISTINCT ON (aggregate_type, aggregate_id) *
    FROM outbox_deliveries
    WHERE published_at IS NULL AND failed_at IS NOT NULL
    ORDER BY aggregate_type, aggregate_id, aggregate_sequence
), shown AS (
    SELECT * FROM heads ORDER BY failed_at LIMIT $1
)
SELECT shown.aggregate_type, shown.aggregate_id, shown.event_id AS failed_event_id, event.event_type,
       to_json(shown.failed_at) #>> '{}' AS failed_at, shown.last_error, followers.count AS followers
FROM shown
JOIN outbox_events event USING (event_id)
CROSS JOIN LATERAL (
    SELECT count(*)
    FROM outbox_deliveries later
    WHERE later.published_at IS NULL
      AND later.aggregate_type = shown.aggregate_type AND later.aggregate_id = shown.aggregate_id
      AND later.aggregate_sequence > shown.aggregate_sequence
) followers
ORDER BY shown.failed_at";

const PARKED: &str = "
SELECT consumer, reason,
       count(*) AS events,
       count(*) FILTER (WHERE next_attempt_at <= now()) AS due,
       extract(epoch FROM now() - min(parked_at))::float8 AS oldest_seconds
FROM parked_events
GROUP BY consumer, reason
ORDER BY consumer, reason";
