//! The outbox: all of its SQL, in the order of an event's life.
//!
//! append → claim → (publish, which is the relay's) → mark, or reschedule, fail, give back.
//!
//! Whatever settles a claim names its `lease_id`: a relay whose lease ran out, and was taken by
//! another, can change nothing. Whatever touches many deliveries locks them in `event_id` order, so
//! that no two of these statements can deadlock.

use std::time::Duration;

use sqlx::postgres::types::PgInterval;
use sqlx::{AssertSqlSafe, PgConnection, PgPool, Row, postgres::PgRow, types::Json};
use uuid::Uuid;

use crate::event::{AggregateVersion, Context, Event};
use crate::jetstream::StreamName;
use crate::measure;

/// Why an event was not appended. The caller's transaction must be rolled back.
#[derive(Debug, thiserror::Error)]
pub enum AppendError {
    /// The event cannot be written as JSON.
    #[error("the event cannot be serialised")]
    Serialize(#[from] serde_json::Error),
    /// The database refused it; an aggregate_sequence that is taken is one reason.
    #[error("the event was not stored")]
    Database(#[from] sqlx::Error),
}

/// An event ready to be appended.
#[derive(Debug)]
pub struct NewEvent {
    id: Uuid,
    aggregate_type: &'static str,
    aggregate: AggregateVersion,
    event_type: &'static str,
    version: u32,
    payload: String,
    headers: String,
}

impl NewEvent {
    /// `event` as number `aggregate.sequence` of its aggregate, under a fresh event_id.
    ///
    /// # Errors
    /// [`AppendError::Serialize`].
    pub fn new<E: Event>(aggregate: AggregateVersion, event: &E, context: &Context) -> Result<Self, AppendError> {
        Ok(Self {
            id: Uuid::now_v7(),
            aggregate_type: E::AGGREGATE,
            aggregate,
            event_type: E::TYPE,
            version: E::VERSION,
            payload: serde_json::to_string(event)?,
            headers: serde_json::to_string(context)?,
        })
    }
}

/// Records `event` as number `aggregate.sequence` of its aggregate, in the caller's transaction: it
/// is sent if the caller commits, and only then. The caller holds the lock on the aggregate's row.
/// Returns the event_id.
///
/// # Errors
/// [`AppendError`]; the transaction is then of no more use.
pub async fn append<E: Event>(
    tx: &mut PgConnection,
    aggregate: AggregateVersion,
    event: &E,
    context: &Context,
) -> Result<Uuid, AppendError> {
    let event = NewEvent::new(aggregate, event, context)?;
    let id = event.id;
    append_all(tx, &[event]).await?;
    Ok(id)
}

/// Records many events with one statement; otherwise as [`append`].
///
/// # Errors
/// [`AppendError`]; the transaction is then of no more use.
pub async fn append_all(tx: &mut PgConnection, events: &[NewEvent]) -> Result<(), AppendError> {
    if events.is_empty() {
        return Ok(());
    }
    sqlx::query(APPEND)
        .bind(column(events, |e| e.id))
        .bind(column(events, |e| e.aggregate_type))
        .bind(column(events, |e| e.aggregate.id))
        .bind(column(events, |e| e.aggregate.sequence))
        .bind(column(events, |e| e.event_type))
        .bind(column(events, |e| e.version as i32))
        .bind(column(events, |e| e.payload.as_str()))
        .bind(column(events, |e| e.headers.as_str()))
        .execute(tx)
        .await?;
    events.iter().for_each(|event| measure::count(measure::APPENDED, event.event_type));
    Ok(())
}

/// One statement for both tables: an event without its delivery cannot exist.
const APPEND: &str = "
WITH appended AS (
    INSERT INTO outbox_events (event_id, aggregate_type, aggregate_id, aggregate_sequence,
                               event_type, event_version, payload, headers)
    SELECT event_id, aggregate_type, aggregate_id, aggregate_sequence,
           event_type, event_version, payload::jsonb, headers::jsonb
    FROM unnest($1::uuid[], $2::text[], $3::uuid[], $4::bigint[], $5::text[], $6::int[], $7::text[], $8::text[])
         AS new (event_id, aggregate_type, aggregate_id, aggregate_sequence,
                 event_type, event_version, payload, headers)
    RETURNING event_id, aggregate_type, aggregate_id, aggregate_sequence, created_at
)
INSERT INTO outbox_deliveries (event_id, aggregate_type, aggregate_id, aggregate_sequence, created_at)
SELECT event_id, aggregate_type, aggregate_id, aggregate_sequence, created_at FROM appended";

/// What one claim took, and what it saw on the way.
#[derive(Debug)]
pub(crate) struct Claim {
    pub(crate) lease_id: Uuid,
    /// By aggregate and sequence.
    pub(crate) events: Vec<ClaimedEvent>,
    /// Candidates seen, taken or not.
    pub(crate) seen: usize,
    /// Of these, those whose lease another relay had let run out.
    pub(crate) expired: usize,
    /// Where the next search may start if this claim was full and took its share.
    pub(crate) floor_before_oldest: Option<Floor>,
    /// Where the next search may start if this claim was full and took almost nothing.
    pub(crate) floor_past_newest: Option<Floor>,
}

/// An event under lease. Its columns are as they are stored: what of them cannot be sent is found
/// out when its message is made, so that one bad row fails alone.
#[derive(Debug)]
pub(crate) struct ClaimedEvent {
    pub(crate) id: Uuid,
    pub(crate) aggregate_type: String,
    pub(crate) aggregate: AggregateVersion,
    pub(crate) event_type: String,
    pub(crate) version: i32,
    pub(crate) payload: String,
    /// Nothing where the row holds something else.
    pub(crate) context: Option<Context>,
    /// NULL for a time that has no date, such as infinity.
    pub(crate) time: Option<String>,
    pub(crate) attempts: i32,
}

impl ClaimedEvent {
    pub(crate) fn is_of_the_aggregate_of(&self, other: &Self) -> bool {
        self.aggregate.id == other.aggregate.id && self.aggregate_type == other.aggregate_type
    }
}

/// A bound on `created_at` where a claim starts its search, in the database's own notation: a hint
/// that keeps the scan off what is done or must wait, never a rule.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Floor(String);

impl Floor {
    /// Search everything.
    pub(crate) fn none() -> Self {
        Self("-infinity".to_owned())
    }
}

/// Leases up to `batch` events that may be published now, oldest first.
pub(crate) async fn claim(
    db: &PgPool,
    worker: &str,
    lease: Duration,
    batch: usize,
    floor: &Floor,
) -> Result<Claim, sqlx::Error> {
    let lease_id = Uuid::now_v7();
    // In the text, so that the plan, which is kept, is one for this limit.
    let sql = CLAIM.replace("$batch", &batch.to_string());
    let rows = sqlx::query(AssertSqlSafe(sql))
        .bind(&floor.0)
        .bind(worker)
        .bind(lease_id)
        .bind(interval(lease))
        .fetch_all(db)
        .await?;
    let Some(first) = rows.first() else { return Err(sqlx::Error::RowNotFound) };
    Ok(Claim {
        lease_id,
        seen: first.try_get::<i64, _>("seen")? as usize,
        expired: first.try_get::<i64, _>("expired")? as usize,
        floor_before_oldest: first.try_get::<Option<String>, _>("floor_before_oldest")?.map(Floor),
        floor_past_newest: first.try_get::<Option<String>, _>("floor_past_newest")?.map(Floor),
        events: rows.iter().filter_map(|row| claimed_event(row).transpose()).collect::<Result<_, _>>()?,
    })
}

pub(crate) fn claimed_event(row: &PgRow) -> Result<Option<ClaimedEvent>, sqlx::Error> {
    let Some(id) = row.try_get("event_id")? else { return Ok(None) };
    Ok(Some(ClaimedEvent {
        id,
        aggregate_type: row.try_get("aggregate_type")?,
        aggregate: AggregateVersion { id: row.try_get("aggregate_id")?, sequence: row.try_get("aggregate_sequence")? },
        event_type: row.try_get("event_type")?,
        version: row.try_get("event_version")?,
        payload: row.try_get("payload")?,
        context: row.try_get::<Json<_>, _>("headers").ok().map(|headers| headers.0),
        time: row.try_get("time")?,
        attempts: row.try_get("attempts")?,
    }))
}

/// candidates: what is due and free, oldest first, from the floor on. SKIP LOCKED lets relays claim
///   at once without waiting for each other; the locks last for this statement.
/// blockers: the first unpublished event of each aggregate that is not a candidate too. SKIP LOCKED
///   may have stepped over it, another relay may be publishing it, it may be in backoff, or failed.
///   This reads the statement's snapshot, which is safe because published_at never returns to NULL and
///   an aggregate's events commit in order. MATERIALIZED, so that it is looked up once for each
///   aggregate whatever the planner believes: once for each event is quadratic in a long aggregate.
/// judged: a candidate behind its aggregate's blocker is not free.
/// taken: what is free is leased. What waits behind a failed event or one in backoff is put off to
///   when that may have changed, so that waiting events cannot fill every claim. What waits behind
///   an event that is only leased is left as it is: it will be free in a moment, and putting it off
///   too cost a third of the throughput.
/// The summary comes on every row, and on a row of its own where nothing was taken.
const CLAIM: &str = "
WITH candidates AS (
    SELECT event_id, aggregate_type, aggregate_id, aggregate_sequence, created_at, lock_until
    FROM outbox_deliveries
    WHERE published_at IS NULL AND failed_at IS NULL AND next_attempt_at <= now()
      AND (lock_until IS NULL OR lock_until < now())
      AND created_at >= $1::text::timestamptz
    ORDER BY created_at
    LIMIT $batch
    FOR UPDATE SKIP LOCKED
), blockers AS MATERIALIZED (
    SELECT aggregate.aggregate_type, aggregate.aggregate_id, blocker.aggregate_sequence,
           CASE WHEN blocker.failed_at IS NOT NULL THEN now() + interval '1 minute'
                WHEN blocker.next_attempt_at > now() THEN blocker.next_attempt_at
                ELSE now() END AS until
    FROM (
        SELECT aggregate_type, aggregate_id, max(aggregate_sequence) AS last_sequence
        FROM candidates
        GROUP BY aggregate_type, aggregate_id
    ) aggregate
    CROSS JOIN LATERAL (
        SELECT aggregate_sequence, failed_at, next_attempt_at
        FROM outbox_deliveries other
        WHERE other.published_at IS NULL
          AND other.aggregate_type = aggregate.aggregate_type
          AND other.aggregate_id = aggregate.aggregate_id
          AND other.aggregate_sequence < aggregate.last_sequence
          AND other.event_id NOT IN (SELECT event_id FROM candidates)
        ORDER BY other.aggregate_sequence
        LIMIT 1
    ) blocker
), judged AS (
    SELECT candidate.event_id, blocker.until, blocker.until IS NULL AS free
    FROM candidates candidate
    LEFT JOIN blockers blocker
           ON blocker.aggregate_type = candidate.aggregate_type AND blocker.aggregate_id = candidate.aggregate_id
          AND blocker.aggregate_sequence < candidate.aggregate_sequence
), taken AS (
    UPDATE outbox_deliveries delivery
    SET locked_by       = CASE WHEN judged.free THEN $2 END,
        lease_id        = CASE WHEN judged.free THEN $3::uuid END,
        lock_until      = CASE WHEN judged.free THEN now() + $4::interval END,
        next_attempt_at = coalesce(judged.until, delivery.next_attempt_at)
    FROM judged
    WHERE delivery.event_id = judged.event_id AND (judged.free OR judged.until > now())
    RETURNING delivery.event_id, delivery.attempts, judged.free
), summary AS (
    SELECT count(*) AS seen, count(lock_until) AS expired,
           (min(created_at) - interval '5 seconds')::text AS floor_before_oldest,
           (max(created_at) + interval '1 microsecond')::text AS floor_past_newest
    FROM candidates
)
SELECT summary.*, event.event_id, event.aggregate_type, event.aggregate_id, event.aggregate_sequence,
       event.event_type, event.event_version, event.payload::text AS payload, event.headers,
       to_char(event.created_at AT TIME ZONE 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS.US\"Z\"') AS time,
       taken.attempts
FROM summary
LEFT JOIN (taken JOIN outbox_events event USING (event_id)) ON taken.free
ORDER BY event.aggregate_type, event.aggregate_id, event.aggregate_sequence";

/// Records that the stream has these events. Returns those that were still under this lease, with the
/// seconds from append to now.
pub(crate) async fn mark_published(db: &PgPool, lease_id: Uuid, ids: &[Uuid]) -> Result<Vec<(Uuid, f64)>, sqlx::Error> {
    sqlx::query_as(MARK_PUBLISHED).bind(ids).bind(lease_id).fetch_all(db).await
}

const MARK_PUBLISHED: &str = "
WITH mine AS (
    SELECT event_id FROM outbox_deliveries
    WHERE event_id = ANY ($1) AND lease_id = $2
    ORDER BY event_id
    FOR UPDATE
)
UPDATE outbox_deliveries delivery
SET published_at = now(), locked_by = NULL, lease_id = NULL, lock_until = NULL
FROM mine
WHERE delivery.event_id = mine.event_id
RETURNING delivery.event_id, extract(epoch FROM now() - delivery.created_at)::float8";

/// Makes the lease of these events last `lease` from now. Returns how many were still under it.
pub(crate) async fn renew(db: &PgPool, lease_id: Uuid, lease: Duration, ids: &[Uuid]) -> Result<usize, sqlx::Error> {
    let done = sqlx::query(RENEW).bind(ids).bind(lease_id).bind(interval(lease)).execute(db).await?;
    Ok(done.rows_affected() as usize)
}

const RENEW: &str = "
WITH mine AS (
    SELECT event_id FROM outbox_deliveries
    WHERE event_id = ANY ($1) AND lease_id = $2
    ORDER BY event_id
    FOR UPDATE
)
UPDATE outbox_deliveries delivery
SET lock_until = now() + $3
FROM mine
WHERE delivery.event_id = mine.event_id";

/// Gives up the lease of events that were not tried, or not through a fault of their own: any relay
/// may take them at once. Returns how many were still under it.
pub(crate) async fn give_back(db: &PgPool, lease_id: Uuid, ids: &[Uuid]) -> Result<usize, sqlx::Error> {
    let done = sqlx::query(GIVE_BACK).bind(ids).bind(lease_id).execute(db).await?;
    Ok(done.rows_affected() as usize)
}

const GIVE_BACK: &str = "
WITH mine AS (
    SELECT event_id FROM outbox_deliveries
    WHERE event_id = ANY ($1) AND lease_id = $2
    ORDER BY event_id
    FOR UPDATE
)
UPDATE outbox_deliveries delivery
SET locked_by = NULL, lease_id = NULL, lock_until = NULL
FROM mine
WHERE delivery.event_id = mine.event_id";

/// A recorded failure of one event.
#[derive(Debug)]
pub(crate) struct Failure {
    pub(crate) id: Uuid,
    pub(crate) error: String,
    /// When to try again; never, where only an operator can help.
    pub(crate) retry_in: Option<Duration>,
}

/// Records failures: the event is tried again after its wait, or is failed. Returns how many were
/// still under this lease.
pub(crate) async fn record_failures(db: &PgPool, lease_id: Uuid, failures: &[Failure]) -> Result<usize, sqlx::Error> {
    let done = sqlx::query(RECORD_FAILURES)
        .bind(column(failures, |f| f.id))
        .bind(lease_id)
        .bind(column(failures, |f| f.error.as_str()))
        .bind(column(failures, |f| f.retry_in.map(interval)))
        .execute(db)
        .await?;
    Ok(done.rows_affected() as usize)
}

const RECORD_FAILURES: &str = "
WITH mine AS (
    SELECT event_id, failure.error, failure.retry_in
    FROM outbox_deliveries
    JOIN unnest($1::uuid[], $3::text[], $4::interval[]) AS failure (event_id, error, retry_in) USING (event_id)
    WHERE lease_id = $2
    ORDER BY event_id
    FOR UPDATE OF outbox_deliveries
)
UPDATE outbox_deliveries delivery
SET attempts = attempts + 1, last_error = mine.error,
    next_attempt_at = coalesce(now() + mine.retry_in, next_attempt_at),
    failed_at = CASE WHEN mine.retry_in IS NULL THEN now() END,
    locked_by = NULL, lease_id = NULL, lock_until = NULL
FROM mine
WHERE delivery.event_id = mine.event_id";

/// What waits in the outbox.
#[derive(Debug)]
pub(crate) struct Waiting {
    pub(crate) oldest_age_seconds: f64,
    pub(crate) by_state: [(&'static str, i64); 5],
}

/// Counts unpublished events by state, and the age of the oldest that should be on its way.
pub(crate) async fn count_unpublished(db: &PgPool) -> Result<Waiting, sqlx::Error> {
    let row = sqlx::query(COUNT_UNPUBLISHED).fetch_one(db).await?;
    let count = |state| Ok::<_, sqlx::Error>((state, row.try_get(state)?));
    Ok(Waiting {
        oldest_age_seconds: row.try_get("oldest_age")?,
        by_state: [count("ready")?, count("scheduled")?, count("leased")?, count("blocked")?, count("failed")?],
    })
}

/// Unpublished deliveries, each with its state: the first that fits. `$rows` says where they come from. One
/// pass over them, however many wait behind one another, and whatever the planner believes: joined with
/// the failed ones, a backlog that came faster than its statistics took minutes.
///
/// blocked: an earlier event of the aggregate is failed. scheduled: it, or the first of these events of its
/// aggregate, waits for its next attempt.
macro_rules! with_states {
    ($rows:literal) => {
        concat!(
            "
    SELECT *,
           CASE WHEN failed_at IS NOT NULL THEN 'failed'
                WHEN lock_until >= now() THEN 'leased'
                WHEN bool_or(failed_at IS NOT NULL) OVER earlier THEN 'blocked'
                WHEN greatest(next_attempt_at, first_value(next_attempt_at) OVER aggregate) > now() THEN 'scheduled'
                ELSE 'ready' END AS state
    FROM ",
            $rows,
            "
    WINDOW aggregate AS (PARTITION BY aggregate_id, aggregate_type ORDER BY aggregate_sequence),
           earlier AS (aggregate ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING)"
        )
    };
}
pub(crate) use with_states;

/// Reads the partial index of unpublished events, and no more than 100,000 of them: retained events
/// cost nothing, a backlog costs little.
const COUNT_UNPUBLISHED: &str = concat!(
    "
WITH unpublished AS (
    SELECT aggregate_type, aggregate_id, aggregate_sequence, created_at, failed_at, lock_until, next_attempt_at
    FROM outbox_deliveries
    WHERE published_at IS NULL
    ORDER BY created_at
    LIMIT 100000
), judged AS (",
    with_states!("unpublished"),
    "
)
SELECT count(*) FILTER (WHERE state = 'ready') AS ready,
       count(*) FILTER (WHERE state = 'scheduled') AS scheduled,
       count(*) FILTER (WHERE state = 'leased') AS leased,
       count(*) FILTER (WHERE state = 'blocked') AS blocked,
       count(*) FILTER (WHERE state = 'failed') AS failed,
       coalesce(extract(epoch FROM clock_timestamp() - min(created_at)
                FILTER (WHERE state NOT IN ('failed', 'blocked'))), 0)::float8 AS oldest_age
FROM judged"
);

/// Says whose outbox this database holds, for [`source`].
///
/// # Errors
/// The database's.
pub async fn write_source(db: &PgPool, stream: &StreamName) -> Result<(), sqlx::Error> {
    sqlx::query(
        "INSERT INTO outbox_source (stream, subject_prefix, source) VALUES ($1, $2, $3)
         ON CONFLICT (only_row) DO UPDATE
         SET stream = excluded.stream, subject_prefix = excluded.subject_prefix, source = excluded.source",
    )
    .bind(&stream.name)
    .bind(&stream.subject_prefix)
    .bind(&stream.source)
    .execute(db)
    .await?;
    Ok(())
}

/// Whose outbox this database holds; `None` until its service has started once.
///
/// # Errors
/// The database's.
pub async fn source(db: &PgPool) -> Result<Option<StreamName>, sqlx::Error> {
    let row = sqlx::query("SELECT stream, subject_prefix, source FROM outbox_source").fetch_optional(db).await?;
    row.map(|row| {
        Ok(StreamName {
            name: row.try_get("stream")?,
            subject_prefix: row.try_get("subject_prefix")?,
            source: row.try_get("source")?,
        })
    })
    .transpose()
}

/// The channel on which a service wakes a relay in another process.
pub(crate) const WAKE_CHANNEL: &str = "outbox_events";

/// Wakes the relays that listen. In a transaction of its own: a NOTIFY inside an order's would make
/// all commits queue for one lock.
pub(crate) async fn notify(db: &PgPool) -> Result<(), sqlx::Error> {
    sqlx::query("SELECT pg_notify($1, '')").bind(WAKE_CHANNEL).execute(db).await?;
    Ok(())
}

pub(crate) fn interval(duration: Duration) -> PgInterval {
    PgInterval { months: 0, days: 0, microseconds: i64::try_from(duration.as_micros()).unwrap_or(i64::MAX) }
}

/// One column of `rows`, to be bound as an array.
pub(crate) fn column<'a, R, T>(rows: &'a [R], field: impl Fn(&'a R) -> T) -> Vec<T> {
    rows.iter().map(field).collect()
}
