//! The loss auditor: compares everything that two services have told each other. Business rows against
//! outbox, outbox against stream, stream against the other's inbox, and back.
//!
//! It only reads. What is on its way between two reads looks like a loss for a moment; so whatever is
//! found is looked at again, and counts only if it stays.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::time::Duration;

use futures::TryStreamExt;
use serde::Serialize;
use sqlx::{AssertSqlSafe, FromRow, PgPool};
use time::OffsetDateTime;
use uuid::Uuid;

use super::stream::{await_connection, event_ids, stream_status};
use super::{Operator, OperatorError};
use crate::jetstream::{Broker, BrokerError, StreamName};
use crate::outbox::{interval, with_states};

/// How often what was found is looked at again, and after how long.
const LOOKS: [Duration; 3] = [Duration::from_secs(1), Duration::from_secs(2), Duration::from_secs(3)];

/// One look takes no longer, or it is given up. A database that dies in the middle tells nobody.
const LOOKS_WITHIN: Duration = Duration::from_secs(30 * 60);

/// How far the clock of a service may be off from its database's.
const CLOCKS: Duration = Duration::from_secs(300);

/// A table whose rows are the aggregates of a service: what the auditor has to know of a domain.
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs)]
pub struct BusinessTable {
    /// The service, as its events' source.
    pub source: &'static str,
    pub table: &'static str,
    pub aggregate_type: &'static str,
    /// Column: the aggregate's id.
    pub id: &'static str,
    /// Column: its version, the number of its last event.
    pub version: &'static str,
    /// Columns: when the row was made, and when it was last changed.
    pub created_at: &'static str,
    pub updated_at: &'static str,
    /// Column: what there may be only one row for, whatever is delivered how often.
    pub one_for_each: Option<&'static str>,
}

/// What can be wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// A business row has a version of which no event tells.
    RowWithoutEvent,
    /// An event tells of a version that no business row has.
    EventWithoutRow,
    /// The outbox lacks an event between two others of an aggregate.
    SequenceGap,
    /// An event is not published, or its stream does not have it.
    EventWithoutPublication,
    /// A stream has an event that its outbox does not know.
    PublicationWithoutEvent,
    /// A published event has not taken effect at its consumer.
    PublicationWithoutEffect,
    /// A consumer gave effect to an event that its producer does not know.
    EffectWithoutEvent,
    /// Something happened twice.
    DoubleEffect,
}

impl Kind {
    /// In words.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::RowWithoutEvent => "row without event",
            Self::EventWithoutRow => "event without row",
            Self::SequenceGap => "sequence gap",
            Self::EventWithoutPublication => "event without publication",
            Self::PublicationWithoutEvent => "publication without event",
            Self::PublicationWithoutEffect => "publication without effect",
            Self::EffectWithoutEvent => "effect without event",
            Self::DoubleEffect => "double effect",
        }
    }
}

/// Something that breaks the promise.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Finding {
    /// What is wrong.
    pub kind: Kind,
    /// The service at which it shows.
    pub service: String,
    /// The event or the aggregate.
    pub id: String,
    /// More of it.
    pub detail: String,
}

/// What was compared, and what does not fit.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Audit {
    /// Rows, events, messages and effects that were looked at, by service.
    pub checked: BTreeMap<String, i64>,
    /// What could not be compared, and why.
    pub notes: BTreeSet<String>,
    /// What is wrong.
    pub findings: Vec<Finding>,
}

/// One service, to be audited with the other.
#[derive(Debug)]
pub struct Side<'a> {
    /// Its database.
    pub operator: &'a Operator,
    /// How long its published events are retained.
    pub outbox_retention: Duration,
}

/// Compares two services, in both directions.
///
/// # Errors
/// [`OperatorError`]: then nothing is known.
pub async fn audit(sides: [Side<'_>; 2], tables: &[BusinessTable], broker: &Broker) -> Result<Audit, OperatorError> {
    await_connection(broker).await?;
    let mut audit = look(&sides, tables, broker).await?;
    for wait in LOOKS {
        if audit.findings.is_empty() {
            break;
        }
        tokio::time::sleep(wait).await;
        let before: HashSet<_> = audit.findings.into_iter().map(|f| (f.kind, f.service, f.id)).collect();
        audit = look(&sides, tables, broker).await?;
        audit.findings.retain(|f| before.contains(&(f.kind, f.service.clone(), f.id.clone())));
    }
    audit.findings.sort();
    Ok(audit)
}

async fn look(sides: &[Side<'_>; 2], tables: &[BusinessTable], broker: &Broker) -> Result<Audit, OperatorError> {
    let looking = async {
        let mut look = Look { broker, audit: Audit::default() };
        let [a, b] = sides;
        for side in [a, b] {
            let name = side.operator.source().await?;
            look.rows_against_outbox(side, &name, tables).await?;
        }
        look.told(a, b).await?;
        look.told(b, a).await?;
        Ok(look.audit)
    };
    tokio::time::timeout(LOOKS_WITHIN, looking).await.unwrap_or(Err(OperatorError::GaveUp(LOOKS_WITHIN)))
}

struct Look<'a> {
    broker: &'a Broker,
    audit: Audit,
}

/// An event in the outbox. What is not published says where it stands.
#[derive(FromRow)]
struct Event {
    event_id: Uuid,
    event_type: String,
    aggregate_id: Uuid,
    aggregate_sequence: i64,
    state: String,
    /// Its message is young enough to be in the stream.
    is_in_retention: bool,
}

impl Event {
    fn described(&self) -> String {
        format!("{} {} of {}", self.event_type, self.aggregate_sequence, self.aggregate_id)
    }
}

/// An effect that a consumer recorded.
#[derive(FromRow)]
struct Effect {
    event_id: Uuid,
    processed_at: OffsetDateTime,
}

/// When an event was made: its id begins with the time.
fn made_at(event_id: Uuid) -> Option<OffsetDateTime> {
    let seconds = event_id.get_timestamp()?.to_unix().0;
    OffsetDateTime::from_unix_timestamp(i64::try_from(seconds).ok()?).ok()
}

impl Look<'_> {
    fn find(&mut self, kind: Kind, service: &str, id: impl ToString, detail: String) {
        self.audit.findings.push(Finding { kind, service: service.to_owned(), id: id.to_string(), detail });
    }

    fn count(&mut self, what: String, how_many: usize) {
        *self.audit.checked.entry(what).or_default() += how_many as i64;
    }

    /// Within one database: rows and events, the events of each aggregate, and what may be only once.
    async fn rows_against_outbox(
        &mut self,
        side: &Side<'_>,
        name: &StreamName,
        tables: &[BusinessTable],
    ) -> Result<(), OperatorError> {
        let (db, service) = (&side.operator.db, name.service());
        let gaps: Vec<(Uuid, i64, i64)> = sqlx::query_as(SEQUENCE_GAPS).fetch_all(db).await?;
        for (aggregate, first, last) in gaps {
            self.find(Kind::SequenceGap, service, aggregate, format!("events {first} to {last} are missing"));
        }
        let horizon = horizon(side).await?;
        for table in tables.iter().filter(|table| table.source == name.source) {
            if !exists(db, table.table).await? {
                self.audit.notes.insert(format!("{service} has no table {}", table.table));
                continue;
            }
            let rows: i64 = sqlx::query_scalar(table.sql(COUNT_ROWS)).fetch_one(db).await?;
            self.count(format!("{service}: {}", table.table), rows as usize);
            let missing: Vec<(Uuid, i64)> = sqlx::query_as(table.sql(ROWS_WITHOUT_EVENTS))
                .bind(table.aggregate_type)
                .bind(horizon)
                .fetch_all(db)
                .await?;
            for (id, version) in missing {
                self.find(Kind::RowWithoutEvent, service, id, format!("version {version} has no event"));
            }
            let ahead: Vec<(Uuid, i64, i64)> =
                sqlx::query_as(table.sql(EVENTS_WITHOUT_ROWS)).bind(table.aggregate_type).fetch_all(db).await?;
            for (id, sequence, version) in ahead {
                let detail = format!("event {sequence}, and {} is at version {version}", table.table);
                self.find(Kind::EventWithoutRow, service, id, detail);
            }
            let twice: Vec<(Uuid, String, i64)> =
                sqlx::query_as(TWICE_IN_AN_AGGREGATE).bind(table.aggregate_type).fetch_all(db).await?;
            for (id, event_type, times) in twice {
                self.find(Kind::DoubleEffect, service, id, format!("{event_type} {times} times"));
            }
            if let Some(column) = table.one_for_each {
                let twice: Vec<(String, i64)> = sqlx::query_as(table.sql(TWICE_IN_A_TABLE)).fetch_all(db).await?;
                for (id, times) in twice {
                    self.find(Kind::DoubleEffect, service, id, format!("{times} {} for one {column}", table.table));
                }
            }
        }
        Ok(())
    }

    /// What one service told, and the other was told: outbox, stream and inbox.
    async fn told(&mut self, producer: &Side<'_>, consumer: &Side<'_>) -> Result<(), OperatorError> {
        let (from, to) = (&producer.operator.db, &consumer.operator.db);
        let name = producer.operator.source().await?;
        let (service, reader) = (name.service(), consumer.operator.source().await?.service().to_owned());
        let horizon = horizon(producer).await?;

        // In this order: what is read first has been told before what is read later.
        let effects: Vec<Effect> = sqlx::query_as(EFFECTS).bind(&reader).fetch_all(to).await?;
        let in_stream = event_ids(self.broker, &name.name).await?;
        let (max_age, is_consumed) = match stream_status(self.broker, &name.name).await {
            Ok(status) => (status.max_age_seconds, status.consumers.iter().any(|consumer| consumer.name == reader)),
            Err(BrokerError::NoStream(_)) => (None, false),
            Err(error) => return Err(error.into()),
        };
        let (knows_it, knows_others): (bool, bool) =
            sqlx::query_as(KNOWS_SOURCES).bind(&reader).bind(&name.source).fetch_one(to).await?;
        let is_consumed = is_consumed || knows_it;
        if !is_consumed {
            self.audit.notes.insert(format!("{reader} does not consume {}: its effects are not compared", name.name));
        }

        let processed: Vec<Uuid> = effects.iter().map(|effect| effect.event_id).collect();
        let max_age = max_age.map(|seconds| interval(Duration::from_secs_f64(seconds)));
        let mut events = sqlx::query_as(EVENTS).bind(max_age).bind(interval(CLOCKS)).fetch(from);
        let mut known = Vec::new();
        let mut without_effect: BTreeMap<Uuid, String> = BTreeMap::new();
        while let Some(event) = events.try_next().await? {
            let event: Event = event;
            known.push(event.event_id);
            let is_in_stream = in_stream.binary_search(&event.event_id).is_ok();
            let is_published = event.state == "published";
            if !is_published {
                let detail = format!("{}: {}", event.described(), event.state);
                self.find(Kind::EventWithoutPublication, service, event.event_id, detail);
            } else if !is_in_stream && event.is_in_retention {
                let detail = format!("{}: not in stream {}", event.described(), name.name);
                self.find(Kind::EventWithoutPublication, service, event.event_id, detail);
            }
            let is_told = is_published || is_in_stream;
            if is_consumed && is_told && processed.binary_search(&event.event_id).is_err() {
                without_effect.insert(event.event_id, event.described());
            }
        }
        drop(events);
        known.sort_unstable();
        self.count(format!("{service}: events"), known.len());
        self.count(format!("{}: events in the stream", name.name), in_stream.len());

        let is_unknown = |id: &Uuid| known.binary_search(id).is_err();
        let is_young = |id: &&Uuid| made_at(**id).is_some_and(|made| made > horizon);
        for id in in_stream.iter().filter(|id| is_unknown(id)).filter(is_young) {
            self.find(Kind::PublicationWithoutEvent, service, id, format!("in stream {}", name.name));
        }
        if is_consumed {
            self.count(format!("{reader}: effects"), effects.len());
            self.explain_missing_effects(to, &reader, without_effect).await?;
        }
        if knows_others {
            self.audit
                .notes
                .insert(format!("{reader} consumes others too: whether each effect has an event is not known"));
        } else {
            let is_young = |effect: &&Effect| made_at(effect.event_id).unwrap_or(effect.processed_at) > horizon;
            for effect in effects.iter().filter(|effect| is_unknown(&effect.event_id)).filter(is_young) {
                let detail = format!("processed at {}, unknown to {service}", effect.processed_at);
                self.find(Kind::EffectWithoutEvent, &reader, effect.event_id, detail);
            }
        }
        Ok(())
    }

    /// What waits, is dead or was never delivered. What an operator discarded is no finding.
    async fn explain_missing_effects(
        &mut self,
        to: &PgPool,
        reader: &str,
        mut missing: BTreeMap<Uuid, String>,
    ) -> Result<(), OperatorError> {
        let ids: Vec<Uuid> = missing.keys().copied().collect();
        let discarded: Vec<Uuid> = sqlx::query_scalar(DISCARDED).fetch_all(to).await?;
        for id in discarded {
            missing.remove(&id);
        }
        let held: Vec<(Uuid, String)> = sqlx::query_as(HELD).bind(reader).bind(&ids).fetch_all(to).await?;
        let held: BTreeMap<Uuid, String> = held.into_iter().collect();
        for (id, described) in missing {
            let where_it_is = held.get(&id).map_or("not in the inbox", String::as_str);
            self.find(Kind::PublicationWithoutEffect, reader, id, format!("{described}: {where_it_is}"));
        }
        Ok(())
    }
}

/// Whatever was published after this time is still in the outbox: retention and operators have not
/// removed it.
async fn horizon(side: &Side<'_>) -> Result<OffsetDateTime, sqlx::Error> {
    let asking = sqlx::query_scalar(HORIZON).bind(interval(side.outbox_retention)).bind(interval(CLOCKS));
    asking.fetch_one(&side.operator.db).await
}

async fn exists(db: &PgPool, table: &str) -> Result<bool, sqlx::Error> {
    sqlx::query_scalar("SELECT to_regclass($1) IS NOT NULL").bind(table).fetch_one(db).await
}

impl BusinessTable {
    /// `sql` for this table. Its names are constants of a program, never anybody's input.
    fn sql(&self, sql: &str) -> AssertSqlSafe<String> {
        let names = [
            ("{table}", self.table),
            ("{id}", self.id),
            ("{version}", self.version),
            ("{created_at}", self.created_at),
            ("{updated_at}", self.updated_at),
            ("{one_for_each}", self.one_for_each.unwrap_or("NULL")),
        ];
        AssertSqlSafe(names.iter().fold(sql.to_owned(), |sql, (placeholder, name)| sql.replace(placeholder, name)))
    }
}

/// An operator who purged more than retention did has said so.
const HORIZON: &str = "
SELECT greatest(now() - $1::interval, max((details ->> 'cutoff')::timestamptz)) + $2::interval
FROM operator_actions
WHERE what = 'purge'";

const COUNT_ROWS: &str = "SELECT count(*) FROM {table}";

/// A row that was made since the horizon must have all of its events, one that was changed since then
/// its last.
const ROWS_WITHOUT_EVENTS: &str = "
SELECT business.{id}, wanted.version
FROM {table} business
CROSS JOIN LATERAL generate_series(
    CASE WHEN business.{created_at} > $2 THEN 1 ELSE business.{version} END, business.{version}) AS wanted (version)
LEFT JOIN outbox_events event
       ON event.aggregate_type = $1 AND event.aggregate_id = business.{id} AND event.aggregate_sequence = wanted.version
WHERE business.{updated_at} > $2 AND event.event_id IS NULL";

const EVENTS_WITHOUT_ROWS: &str = "
SELECT event.aggregate_id, max(event.aggregate_sequence), coalesce(max(business.{version}), 0)
FROM outbox_events event
LEFT JOIN {table} business ON business.{id} = event.aggregate_id
WHERE event.aggregate_type = $1
GROUP BY event.aggregate_id
HAVING max(event.aggregate_sequence) > coalesce(max(business.{version}), 0)";

const SEQUENCE_GAPS: &str = "
SELECT aggregate_id, previous + 1, aggregate_sequence - 1
FROM (
    SELECT aggregate_id, aggregate_sequence,
           lag(aggregate_sequence) OVER (PARTITION BY aggregate_type, aggregate_id ORDER BY aggregate_sequence)
           AS previous
    FROM outbox_events
) event
WHERE aggregate_sequence > previous + 1";

/// Each change of such an aggregate happens once in its life.
const TWICE_IN_AN_AGGREGATE: &str = "
SELECT aggregate_id, event_type, count(*)
FROM outbox_events
WHERE aggregate_type = $1
GROUP BY aggregate_id, event_type
HAVING count(*) > 1";

const TWICE_IN_A_TABLE: &str = "
SELECT {one_for_each}::text, count(*) FROM {table} GROUP BY {one_for_each} HAVING count(*) > 1";

/// In the order of ids, as the effects.
const EFFECTS: &str = "
SELECT event_id, processed_at FROM processed_events WHERE consumer = $1 ORDER BY event_id";

const KNOWS_SOURCES: &str = "
SELECT EXISTS (SELECT FROM inbox_sequences WHERE consumer = $1 AND source = $2),
       EXISTS (SELECT FROM inbox_sequences WHERE consumer = $1 AND source <> $2)";

/// An event without a delivery will never be published.
const EVENTS: &str = concat!(
    "
WITH unpublished AS (",
    with_states!("outbox_deliveries WHERE published_at IS NULL"),
    "
)
SELECT event.event_id, event.event_type, event.aggregate_id, event.aggregate_sequence,
       CASE WHEN delivery.event_id IS NULL THEN 'without a delivery'
            WHEN delivery.published_at IS NOT NULL THEN 'published'
            ELSE unpublished.state END AS state,
       coalesce(delivery.published_at > coalesce(now() - $1::interval, '-infinity') + $2::interval, false)
       AS is_in_retention
FROM outbox_events event
LEFT JOIN outbox_deliveries delivery USING (event_id)
LEFT JOIN unpublished USING (event_id)"
);

const HELD: &str = "
SELECT event_id, 'parked, ' || concat_ws(': ', reason, last_error)
FROM parked_events
WHERE consumer = $1 AND event_id = ANY ($2)
UNION ALL
SELECT event_id, 'dead letter, ' || reason
FROM dead_letters
WHERE consumer = $1 AND event_id = ANY ($2)";

/// Letters that say whose they are.
const DISCARDED: &str = "
SELECT (letter ->> 'event_id')::uuid
FROM operator_actions, jsonb_array_elements(details -> 'letters') AS letter
WHERE what = 'dead-letters discard' AND letter ->> 'event_id' IS NOT NULL";
