//! Single events: found by what is asked for, and their whole way from outbox to inbox.

use clap::ValueEnum;
use serde::Serialize;
use sqlx::PgPool;
use time::OffsetDateTime;
use uuid::Uuid;

use super::{Operator, OperatorError};
use crate::outbox::with_states;

/// Where an event stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum State {
    /// May be claimed now.
    Ready,
    /// It, or the head it waits for, is in backoff.
    Scheduled,
    /// A relay has it in hand.
    Leased,
    /// An earlier event of its aggregate is failed.
    Blocked,
    /// Only an operator can help.
    Failed,
    /// The stream has it.
    Published,
}

impl State {
    /// As it is written.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Ready => "ready",
            Self::Scheduled => "scheduled",
            Self::Leased => "leased",
            Self::Blocked => "blocked",
            Self::Failed => "failed",
            Self::Published => "published",
        }
    }
}

/// Which events to list.
#[derive(Debug, Clone, Default)]
pub struct Filter {
    /// Only those that stand there.
    pub state: Option<State>,
    /// Only those of this type.
    pub event_type: Option<String>,
    /// Only those of this aggregate.
    pub aggregate: Option<Uuid>,
    /// Only those appended then or later.
    pub since: Option<OffsetDateTime>,
    /// Only those appended before.
    pub until: Option<OffsetDateTime>,
    /// Only those whose last error contains this, in upper or lower case.
    pub error: Option<String>,
    /// No more than so many.
    pub limit: i64,
}

/// An event and its delivery. Times are as the database writes them.
#[derive(Debug, Clone, Serialize, sqlx::FromRow)]
#[allow(missing_docs)]
pub struct EventRow {
    pub event_id: Uuid,
    pub event_type: String,
    pub event_version: i32,
    pub aggregate_type: String,
    pub aggregate_id: Uuid,
    pub aggregate_sequence: i64,
    pub state: String,
    pub created_at: String,
    pub published_at: Option<String>,
    pub failed_at: Option<String>,
    pub attempts: i32,
    pub next_attempt_at: String,
    pub locked_by: Option<String>,
    pub lock_until: Option<String>,
    pub last_error: Option<String>,
    pub correlation_id: Option<String>,
    /// In [`Operator::show`] only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub payload: Option<serde_json::Value>,
}

/// The columns of an [`EventRow`], but for state and payload.
macro_rules! event_columns {
    () => {
        "
       event.event_id, event.event_type, event.event_version,
       event.aggregate_type, event.aggregate_id, event.aggregate_sequence,
       to_json(event.created_at) #>> '{}' AS created_at,
       to_json(delivery.published_at) #>> '{}' AS published_at,
       to_json(delivery.failed_at) #>> '{}' AS failed_at,
       delivery.attempts,
       to_json(delivery.next_attempt_at) #>> '{}' AS next_attempt_at,
       delivery.locked_by,
       to_json(delivery.lock_until) #>> '{}' AS lock_until,
       delivery.last_error,
       event.headers ->> 'correlationid' AS correlation_id"
    };
}

/// What a [`Filter`] asks for, but for the state. A clause of what was not asked for is constant, and
/// costs nothing.
macro_rules! filtered {
    () => {
        "
      AND ($2::text IS NULL OR event.event_type = $2)
      AND ($3::uuid IS NULL OR event.aggregate_id = $3)
      AND ($4::timestamptz IS NULL OR delivery.created_at >= $4)
      AND ($5::timestamptz IS NULL OR delivery.created_at < $5)
      AND ($6::text IS NULL OR strpos(lower(delivery.last_error), lower($6)) > 0)"
    };
}

impl Operator {
    /// Lists events, newest first.
    ///
    /// # Errors
    /// The database's.
    pub async fn list(&self, filter: &Filter) -> Result<Vec<EventRow>, OperatorError> {
        let listing = sqlx::query_as(LIST)
            .bind(filter.state.map(State::as_str))
            .bind(&filter.event_type)
            .bind(filter.aggregate)
            .bind(filter.since)
            .bind(filter.until)
            .bind(&filter.error)
            .bind(filter.limit);
        Ok(listing.fetch_all(&self.db).await?)
    }

    /// The ids of the events in this outbox that `subject` names: an event, an aggregate, or what
    /// correlates with a request.
    ///
    /// # Errors
    /// The database's.
    pub async fn find(&self, subject: &str) -> Result<Vec<Uuid>, OperatorError> {
        if let Ok(id) = Uuid::parse_str(subject) {
            let found: Vec<Uuid> = sqlx::query_scalar(FIND).bind(id).fetch_all(&self.db).await?;
            if !found.is_empty() {
                return Ok(found);
            }
        }
        Ok(sqlx::query_scalar(FIND_CORRELATED).bind(subject).fetch_all(&self.db).await?)
    }

    /// What this database knows of the events `ids`, of its own outbox and of another's, and of the
    /// aggregate or the correlation id `subject`.
    ///
    /// # Errors
    /// The database's.
    pub async fn show(&self, subject: &str, ids: &[Uuid]) -> Result<Shown, OperatorError> {
        let service = self.source().await?.service().to_owned();
        let mut ids = ids.to_vec();
        let aggregate = Uuid::parse_str(subject).ok();
        ids.extend(aggregate);
        Ok(Shown {
            outbox: sqlx::query_as(SHOW).bind(&ids).fetch_all(&self.db).await?,
            inbox: inbox_records(&self.db, &service, &ids, aggregate, subject).await?,
            sequences: sqlx::query_as(SEQUENCES).bind(&service).bind(aggregate).fetch_all(&self.db).await?,
            service,
        })
    }
}

/// Two halves, each with an index that gives it the newest: the unpublished by when they were appended,
/// the published by when they were published.
const LIST: &str = concat!(
    "
WITH unpublished AS (",
    with_states!("outbox_deliveries WHERE published_at IS NULL"),
    "
), found AS (
    (SELECT ",
    event_columns!(),
    ", delivery.state, event.created_at AS appended_at
    FROM unpublished delivery
    JOIN outbox_events event USING (event_id)
    WHERE ($1::text IS NULL OR delivery.state = $1)",
    filtered!(),
    "
    ORDER BY delivery.created_at DESC
    LIMIT $7)
    UNION ALL
    (SELECT ",
    event_columns!(),
    ", 'published' AS state, event.created_at AS appended_at
    FROM outbox_deliveries delivery
    JOIN outbox_events event USING (event_id)
    WHERE delivery.published_at IS NOT NULL AND ($1::text IS NULL OR $1 = 'published')",
    filtered!(),
    "
    ORDER BY delivery.published_at DESC
    LIMIT $7)
)
SELECT *, NULL::jsonb AS payload FROM found
ORDER BY appended_at DESC, aggregate_sequence DESC
LIMIT $7"
);

/// By event_id or aggregate id.
const FIND: &str = "
SELECT event_id FROM outbox_events WHERE event_id = $1 OR aggregate_id = $1";

/// By correlation id. No index: it is asked for rarely, and appended with every event.
const FIND_CORRELATED: &str = "
SELECT event_id FROM outbox_events WHERE headers ->> 'correlationid' = $1";

const SHOW: &str = concat!(
    "
WITH unpublished AS (",
    with_states!("outbox_deliveries WHERE published_at IS NULL"),
    "
)
SELECT ",
    event_columns!(),
    ", coalesce(unpublished.state, 'published') AS state, event.payload
FROM outbox_events event
JOIN outbox_deliveries delivery USING (event_id)
LEFT JOIN unpublished USING (event_id)
WHERE event.event_id = ANY ($1)
ORDER BY event.aggregate_type, event.aggregate_id, event.aggregate_sequence"
);

/// What one service's database knows.
#[derive(Debug, Clone, Serialize)]
pub struct Shown {
    /// The service.
    pub service: String,
    /// Its own events.
    pub outbox: Vec<EventRow>,
    /// What became of others' events.
    pub inbox: Vec<InboxRecord>,
    /// The last events of others' aggregates that took effect.
    pub sequences: Vec<SequenceRow>,
}

impl Shown {
    /// Is nothing known?
    pub fn is_empty(&self) -> bool {
        self.outbox.is_empty() && self.inbox.is_empty() && self.sequences.is_empty()
    }
}

/// What became of another service's event.
#[derive(Debug, Clone, Serialize, sqlx::FromRow)]
#[allow(missing_docs)]
pub struct InboxRecord {
    pub event_id: Option<Uuid>,
    pub event_type: Option<String>,
    pub aggregate_id: Option<Uuid>,
    pub aggregate_sequence: Option<i64>,
    /// `processed`, `parked` or `dead letter`.
    pub state: String,
    /// Since when.
    pub at: String,
    /// Why it is parked or a dead letter.
    pub reason: Option<String>,
    pub attempts: Option<i32>,
    pub dead_letter_id: Option<Uuid>,
}

/// How far a consumer has come with an aggregate of another service.
#[derive(Debug, Clone, Serialize, sqlx::FromRow)]
#[allow(missing_docs)]
pub struct SequenceRow {
    pub source: String,
    pub aggregate_id: Uuid,
    pub last_sequence: i64,
}

async fn inbox_records(
    db: &PgPool,
    consumer: &str,
    ids: &[Uuid],
    aggregate: Option<Uuid>,
    correlation_id: &str,
) -> Result<Vec<InboxRecord>, sqlx::Error> {
    sqlx::query_as(INBOX).bind(consumer).bind(ids).bind(aggregate).bind(correlation_id).fetch_all(db).await
}

/// What took effect is known by its id only; what waits or is dead, as whole.
const INBOX: &str = "
SELECT event_id, NULL AS event_type, NULL::uuid AS aggregate_id, NULL::bigint AS aggregate_sequence,
       'processed' AS state, to_json(processed_at) #>> '{}' AS at, NULL AS reason, NULL::int AS attempts,
       NULL::uuid AS dead_letter_id
FROM processed_events
WHERE consumer = $1 AND event_id = ANY ($2)
UNION ALL
SELECT event_id, event_type, aggregate_id, aggregate_sequence,
       'parked', to_json(parked_at) #>> '{}', concat_ws(': ', reason, last_error), attempts, NULL
FROM parked_events
WHERE consumer = $1 AND (event_id = ANY ($2) OR aggregate_id = $3 OR headers ->> 'ce-correlationid' = $4)
UNION ALL
SELECT event_id, event_type, aggregate_id, aggregate_sequence,
       'dead letter', to_json(dead_at) #>> '{}', reason, attempts, dead_letter_id
FROM dead_letters
WHERE consumer = $1 AND (event_id = ANY ($2) OR dead_letter_id = ANY ($2) OR aggregate_id = $3
                         OR headers ->> 'ce-correlationid' = $4)
ORDER BY at";

const SEQUENCES: &str = "
SELECT source, aggregate_id, last_sequence
FROM inbox_sequences
WHERE consumer = $1 AND aggregate_id = $2 AND last_sequence > 0
ORDER BY source";
