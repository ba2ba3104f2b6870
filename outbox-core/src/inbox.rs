//! The inbox: all of its SQL, in the order of a delivery's life.
//!
//! look → (prepare, which is the consumer's) → lock, record, (apply), advance, wake → park, bury.
//!
//! From `lock` on everything happens in one transaction with the effect. The lock on an aggregate's
//! row in `inbox_sequences` is what makes instances take turns, and rows are locked in the order of
//! their keys, so that no two batches can deadlock.

use std::collections::{BTreeMap, HashSet};
use std::time::Duration;

use sqlx::postgres::PgRow;
use sqlx::types::Json;
use sqlx::{PgConnection, PgPool, Row};
use uuid::Uuid;

use crate::database::storable;
use crate::event::{Envelope, Message};
use crate::outbox::{column, interval};

/// What is on record about a delivered event.
#[derive(Debug)]
pub(crate) struct Seen {
    /// Number of the aggregate's last event that took effect; 0 before the first.
    pub(crate) last_sequence: i64,
    pub(crate) is_processed: bool,
    pub(crate) is_dead: bool,
    pub(crate) is_parked: bool,
}

/// Reads what is on record about each event, in their order. Takes no lock.
pub(crate) async fn look(db: &PgPool, consumer: &str, events: &[&Envelope]) -> Result<Vec<Seen>, sqlx::Error> {
    let rows = sqlx::query(LOOK)
        .bind(consumer)
        .bind(column(events, |e| e.id))
        .bind(column(events, |e| e.source.as_str()))
        .bind(column(events, |e| e.aggregate.id))
        .fetch_all(db)
        .await?;
    let seen = |row: &PgRow| {
        Ok(Seen {
            last_sequence: row.try_get("last_sequence")?,
            is_processed: row.try_get("is_processed")?,
            is_dead: row.try_get("is_dead")?,
            is_parked: row.try_get("is_parked")?,
        })
    };
    rows.iter().map(seen).collect()
}

/// LATERAL, here and below: each record is looked up by its whole key, whatever the planner believes
/// of a table that it has no statistics of yet. A join would read all that a consumer has on record.
const LOOK: &str = "
SELECT coalesce(sequence.last_sequence, 0) AS last_sequence,
       processed.event_id IS NOT NULL AS is_processed,
       dead.event_id IS NOT NULL AS is_dead,
       parked.event_id IS NOT NULL AS is_parked
FROM unnest($2::uuid[], $3::text[], $4::uuid[]) WITH ORDINALITY AS event (event_id, source, aggregate_id, place)
LEFT JOIN LATERAL (
    SELECT last_sequence FROM inbox_sequences
    WHERE consumer = $1 AND source = event.source AND aggregate_id = event.aggregate_id LIMIT 1
) sequence ON true
LEFT JOIN LATERAL (
    SELECT event_id FROM processed_events WHERE consumer = $1 AND event_id = event.event_id LIMIT 1
) processed ON true
LEFT JOIN LATERAL (
    SELECT event_id FROM dead_letters WHERE consumer = $1 AND event_id = event.event_id LIMIT 1
) dead ON true
LEFT JOIN LATERAL (
    SELECT event_id FROM parked_events WHERE consumer = $1 AND event_id = event.event_id LIMIT 1
) parked ON true
ORDER BY event.place";

/// Locks the rows of these events' aggregates, making those that are not there, and returns each
/// event's last sequence, in the order of `events`.
pub(crate) async fn lock(tx: &mut PgConnection, consumer: &str, events: &[&Envelope]) -> Result<Vec<i64>, sqlx::Error> {
    let mut aggregates = column(events, |e| (e.source.as_str(), e.aggregate.id));
    aggregates.sort_unstable();
    aggregates.dedup();
    let (sources, ids): (Vec<&str>, Vec<Uuid>) = aggregates.iter().copied().unzip();
    let made = sqlx::query(MAKE_SEQUENCES).bind(consumer).bind(&sources).bind(&ids).fetch_all(&mut *tx).await?;
    let mut last = last_sequences(&made)?;
    // What was made here is this transaction's own, and needs no lock.
    aggregates.retain(|aggregate| !last.contains_key(aggregate));
    let locked;
    if !aggregates.is_empty() {
        let (sources, ids): (Vec<&str>, Vec<Uuid>) = aggregates.into_iter().unzip();
        locked = sqlx::query(LOCK_SEQUENCES).bind(consumer).bind(&sources).bind(&ids).fetch_all(tx).await?;
        last.extend(last_sequences(&locked)?);
    }
    let of = |event: &&Envelope| last.get(&(event.source.as_str(), event.aggregate.id)).copied();
    events.iter().map(|event| of(event).ok_or(sqlx::Error::RowNotFound)).collect()
}

fn last_sequences(rows: &[PgRow]) -> Result<BTreeMap<(&str, Uuid), i64>, sqlx::Error> {
    let one = |row| Ok(((PgRow::try_get(row, "source")?, row.try_get("aggregate_id")?), row.try_get("last_sequence")?));
    rows.iter().map(one).collect()
}

/// In key order: two batches that make the same new rows wait for each other, never both ways.
const MAKE_SEQUENCES: &str = "
INSERT INTO inbox_sequences (consumer, source, aggregate_id, last_sequence)
SELECT $1, source, aggregate_id, 0
FROM unnest($2::text[], $3::uuid[]) AS aggregate (source, aggregate_id)
ORDER BY source COLLATE \"C\", aggregate_id
ON CONFLICT DO NOTHING
RETURNING source, aggregate_id, last_sequence";

/// One after the other, in the order of the subquery.
const LOCK_SEQUENCES: &str = "
SELECT sequence.source, sequence.aggregate_id, sequence.last_sequence
FROM (
    SELECT source, aggregate_id FROM unnest($2::text[], $3::uuid[]) AS key (source, aggregate_id)
    ORDER BY source COLLATE \"C\", aggregate_id
) aggregate
CROSS JOIN LATERAL (
    SELECT source, aggregate_id, last_sequence FROM inbox_sequences
    WHERE consumer = $1 AND source = aggregate.source AND aggregate_id = aggregate.aggregate_id
    FOR UPDATE
) sequence";

/// Records these events as processed. Returns those that were not before: only they may take effect.
pub(crate) async fn record(tx: &mut PgConnection, consumer: &str, ids: &[Uuid]) -> Result<HashSet<Uuid>, sqlx::Error> {
    let new: Vec<Uuid> = sqlx::query_scalar(RECORD).bind(consumer).bind(ids).fetch_all(tx).await?;
    Ok(new.into_iter().collect())
}

const RECORD: &str = "
INSERT INTO processed_events (consumer, event_id)
SELECT $1, event_id FROM unnest($2::uuid[]) AS event (event_id)
ORDER BY event_id
ON CONFLICT DO NOTHING
RETURNING event_id";

/// Makes these events the last of their aggregates, and makes the parked events that come next due.
/// Returns how many those are.
pub(crate) async fn advance(tx: &mut PgConnection, consumer: &str, events: &[&Envelope]) -> Result<u64, sqlx::Error> {
    let sources = column(events, |e| e.source.as_str());
    let aggregates = column(events, |e| e.aggregate.id);
    let sequences = column(events, |e| e.aggregate.sequence);
    let advance = sqlx::query(ADVANCE).bind(consumer).bind(&sources).bind(&aggregates).bind(&sequences);
    Ok(advance.execute(tx).await?.rows_affected())
}

/// advanced: the rows are there, and locked; it is always the update.
/// The rest is under the aggregate's lock, so that an event is either parked before this and woken by
///   it, or parked after it and due at once: none can be forgotten.
const ADVANCE: &str = "
WITH advanced AS (
    INSERT INTO inbox_sequences (consumer, source, aggregate_id, last_sequence)
    SELECT $1, source, aggregate_id, aggregate_sequence
    FROM unnest($2::text[], $3::uuid[], $4::bigint[]) AS event (source, aggregate_id, aggregate_sequence)
    ON CONFLICT (consumer, source, aggregate_id) DO UPDATE SET last_sequence = excluded.last_sequence
)
UPDATE parked_events SET next_attempt_at = now()
WHERE consumer = $1 AND event_id = ANY (ARRAY(
    SELECT next.event_id
    FROM unnest($2::text[], $3::uuid[], $4::bigint[]) AS event (source, aggregate_id, aggregate_sequence)
    CROSS JOIN LATERAL (
        SELECT event_id FROM parked_events
        WHERE consumer = $1 AND source = event.source AND aggregate_id = event.aggregate_id
          AND aggregate_sequence = event.aggregate_sequence + 1 AND reason = 'gap'
        LIMIT 1
    ) next
))";

/// An event that must wait.
#[derive(Debug)]
pub(crate) struct Parked<'a> {
    pub(crate) message: &'a Message,
    pub(crate) envelope: &'a Envelope,
    pub(crate) reason: ParkReason,
    pub(crate) attempts: i32,
    /// When to look again.
    pub(crate) wait: Duration,
    pub(crate) error: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ParkReason {
    /// An earlier event of its aggregate has not taken effect.
    Gap,
    /// Its handler failed.
    Retry,
}

impl ParkReason {
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Gap => "gap",
            Self::Retry => "retry",
        }
    }
}

/// Parks events, or parks them anew under another reason, count and time.
pub(crate) async fn park(tx: &mut PgConnection, consumer: &str, parked: &[Parked<'_>]) -> Result<(), sqlx::Error> {
    if parked.is_empty() {
        return Ok(());
    }
    sqlx::query(PARK)
        .bind(consumer)
        .bind(column(parked, |p| p.envelope.id))
        .bind(column(parked, |p| p.envelope.source.as_str()))
        .bind(column(parked, |p| p.envelope.aggregate.id))
        .bind(column(parked, |p| p.envelope.aggregate.sequence))
        .bind(column(parked, |p| p.envelope.event_type.as_str()))
        .bind(column(parked, |p| p.message.subject.as_str()))
        .bind(column(parked, |p| Json(&p.message.headers)))
        .bind(column(parked, |p| p.message.payload.as_ref()))
        .bind(column(parked, |p| p.reason.as_str()))
        .bind(column(parked, |p| p.attempts))
        .bind(column(parked, |p| interval(p.wait)))
        .bind(column(parked, |p| p.error.as_deref().map(storable)))
        .execute(tx)
        .await?;
    Ok(())
}

/// A redelivery of an event that is parked for its handler's failure must not set its count back.
const PARK: &str = "
INSERT INTO parked_events (consumer, event_id, source, aggregate_id, aggregate_sequence, event_type,
                           subject, headers, payload, reason, attempts, next_attempt_at, last_error)
SELECT $1, event_id, source, aggregate_id, aggregate_sequence, event_type,
       subject, headers, payload, reason, attempts, now() + wait, last_error
FROM unnest($2::uuid[], $3::text[], $4::uuid[], $5::bigint[], $6::text[], $7::text[], $8::jsonb[], $9::bytea[],
            $10::text[], $11::int[], $12::interval[], $13::text[])
     AS event (event_id, source, aggregate_id, aggregate_sequence, event_type, subject, headers, payload,
               reason, attempts, wait, last_error)
ORDER BY event_id
ON CONFLICT (consumer, event_id) DO UPDATE
SET reason = excluded.reason, attempts = greatest(parked_events.attempts, excluded.attempts),
    next_attempt_at = excluded.next_attempt_at, last_error = coalesce(excluded.last_error, parked_events.last_error)";

/// A parked event that one instance has in hand.
#[derive(Debug)]
pub(crate) struct Due {
    pub(crate) message: Message,
    pub(crate) attempts: i32,
    /// It has waited for its gap deadline.
    pub(crate) is_overdue: bool,
}

/// Takes up to `limit` parked events that are due, for `hold`: after that another instance may take
/// them too, should this one die.
pub(crate) async fn take_due(
    db: &PgPool,
    consumer: &str,
    limit: usize,
    hold: Duration,
    gap_deadline: Duration,
) -> Result<Vec<Due>, sqlx::Error> {
    let rows = sqlx::query(TAKE_DUE)
        // Planned for this limit: a plan for any limit reads the whole table.
        .persistent(false)
        .bind(consumer)
        .bind(limit as i64)
        .bind(interval(hold))
        .bind(interval(gap_deadline))
        .fetch_all(db)
        .await?;
    let due = |row: &PgRow| {
        Ok(Due {
            message: Message {
                subject: row.try_get("subject")?,
                headers: row.try_get::<Json<_>, _>("headers")?.0,
                payload: row.try_get::<Vec<u8>, _>("payload")?.into(),
                position: None,
            },
            attempts: row.try_get("attempts")?,
            is_overdue: row.try_get("is_overdue")?,
        })
    };
    rows.iter().map(due).collect()
}

const TAKE_DUE: &str = "
WITH due AS (
    SELECT event_id FROM parked_events
    WHERE consumer = $1 AND next_attempt_at <= now()
    ORDER BY next_attempt_at
    LIMIT $2
    FOR UPDATE SKIP LOCKED
), taken AS (
    UPDATE parked_events parked
    SET next_attempt_at = now() + $3
    FROM due
    WHERE parked.consumer = $1 AND parked.event_id = due.event_id
    RETURNING parked.*
)
SELECT subject, headers, payload, attempts, reason = 'gap' AND parked_at <= now() - $4::interval AS is_overdue
FROM taken
ORDER BY source, aggregate_id, aggregate_sequence";

/// Takes these events out of the parked ones: they took effect, or are dead letters now.
pub(crate) async fn unpark(tx: &mut PgConnection, consumer: &str, ids: &[Uuid]) -> Result<(), sqlx::Error> {
    if !ids.is_empty() {
        sqlx::query("DELETE FROM parked_events WHERE consumer = $1 AND event_id = ANY ($2)")
            .bind(consumer)
            .bind(ids)
            .execute(tx)
            .await?;
    }
    Ok(())
}

/// Is an earlier event of this one's aggregate parked or a dead letter, so that the gap before it is
/// known to be in somebody's hands?
pub(crate) async fn gap_is_known(tx: &mut PgConnection, consumer: &str, event: &Envelope) -> Result<bool, sqlx::Error> {
    sqlx::query_scalar(GAP_IS_KNOWN)
        .bind(consumer)
        .bind(&event.source)
        .bind(event.aggregate.id)
        .bind(event.aggregate.sequence)
        .fetch_one(tx)
        .await
}

const GAP_IS_KNOWN: &str = "
SELECT EXISTS (
    SELECT FROM parked_events
    WHERE consumer = $1 AND source = $2 AND aggregate_id = $3 AND aggregate_sequence < $4
) OR EXISTS (
    SELECT FROM dead_letters
    WHERE consumer = $1 AND source = $2 AND aggregate_id = $3 AND aggregate_sequence < $4
)";

/// Lets this event be its aggregate's next, whatever came before it.
pub(crate) async fn accept_gap(tx: &mut PgConnection, consumer: &str, event: &Envelope) -> Result<(), sqlx::Error> {
    sqlx::query(
        "UPDATE inbox_sequences SET last_sequence = $4
         WHERE consumer = $1 AND source = $2 AND aggregate_id = $3 AND last_sequence < $4",
    )
    .bind(consumer)
    .bind(&event.source)
    .bind(event.aggregate.id)
    .bind(event.aggregate.sequence - 1)
    .execute(tx)
    .await?;
    Ok(())
}

/// What waits in the inbox.
#[derive(Debug, sqlx::FromRow)]
pub(crate) struct Waiting {
    pub(crate) gap: i64,
    pub(crate) retry: i64,
    pub(crate) dead: i64,
}

/// Counts parked events and dead letters.
pub(crate) async fn count_waiting(db: &PgPool, consumer: &str) -> Result<Waiting, sqlx::Error> {
    sqlx::query_as(COUNT_WAITING).bind(consumer).fetch_one(db).await
}

const COUNT_WAITING: &str = "
SELECT (SELECT count(*) FROM parked_events WHERE consumer = $1 AND reason = 'gap') AS gap,
       (SELECT count(*) FROM parked_events WHERE consumer = $1 AND reason = 'retry') AS retry,
       (SELECT count(*) FROM dead_letters WHERE consumer = $1) AS dead";

/// What a consumer gives up on.
#[derive(Debug)]
pub(crate) struct DeadLetter<'a> {
    pub(crate) message: &'a Message,
    /// As much of the event's identity as is legible.
    pub(crate) event_id: Option<Uuid>,
    pub(crate) envelope: Option<&'a Envelope>,
    pub(crate) reason: &'a str,
    pub(crate) attempts: i32,
}

/// Makes dead letters and returns how many are new. One that is known already stays as it was.
pub(crate) async fn bury(
    tx: &mut PgConnection,
    consumer: &str,
    letters: &[DeadLetter<'_>],
) -> Result<u64, sqlx::Error> {
    if letters.is_empty() {
        return Ok(0);
    }
    let position = |letter: &DeadLetter<'_>| letter.message.position.clone();
    let done = sqlx::query(BURY)
        .bind(consumer)
        .bind(column(letters, |_| Uuid::now_v7()))
        .bind(column(letters, |l| l.event_id))
        .bind(column(letters, |l| l.envelope.map(|e| e.source.as_str())))
        .bind(column(letters, |l| l.envelope.map(|e| e.aggregate.id)))
        .bind(column(letters, |l| l.envelope.map(|e| e.aggregate.sequence)))
        .bind(column(letters, |l| l.envelope.map(|e| e.event_type.as_str())))
        .bind(column(letters, |l| position(l).map(|p| p.stream)))
        .bind(column(letters, |l| position(l).map(|p| p.sequence as i64)))
        .bind(column(letters, |l| l.message.subject.as_str()))
        .bind(column(letters, |l| Json(&l.message.headers)))
        .bind(column(letters, |l| l.message.payload.as_ref()))
        .bind(column(letters, |l| storable(l.reason)))
        .bind(column(letters, |l| l.attempts))
        .execute(tx)
        .await?;
    Ok(done.rows_affected())
}

const BURY: &str = "
INSERT INTO dead_letters (consumer, dead_letter_id, event_id, source, aggregate_id, aggregate_sequence, event_type,
                          stream, stream_sequence, subject, headers, payload, reason, attempts)
SELECT $1, * FROM unnest($2::uuid[], $3::uuid[], $4::text[], $5::uuid[], $6::bigint[], $7::text[], $8::text[],
                         $9::bigint[], $10::text[], $11::jsonb[], $12::bytea[], $13::text[], $14::int[])
ON CONFLICT DO NOTHING";
