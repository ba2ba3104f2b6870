//! Which events an operator means, and what they amount to.

use serde::Serialize;
use sqlx::postgres::PgArguments;
use sqlx::{FromRow, PgConnection, Postgres, query::Query};
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;
use uuid::Uuid;

/// Events that an operator means: those that all of this is true of.
#[derive(Debug, Clone, Default)]
pub struct Selection {
    /// These, by event_id.
    pub ids: Option<Vec<Uuid>>,
    /// Those of this aggregate.
    pub aggregate: Option<Uuid>,
    /// Those of this type.
    pub event_type: Option<String>,
    /// Those appended then or later.
    pub since: Option<OffsetDateTime>,
    /// Those appended before.
    pub until: Option<OffsetDateTime>,
}

impl Selection {
    /// These events and no others.
    pub fn of(ids: Vec<Uuid>) -> Self {
        Self { ids: Some(ids), ..Self::default() }
    }

    /// `sql` with this selection as $1 to $5, as [`chosen`] wants it.
    pub(super) fn query(&self, sql: &'static str) -> Query<'_, Postgres, PgArguments> {
        sqlx::query(sql).bind(&self.ids).bind(self.aggregate).bind(&self.event_type).bind(self.since).bind(self.until)
    }

    /// Those it names by id that are not among `found`.
    pub(super) fn missing(&self, found: &[Uuid]) -> Vec<Uuid> {
        self.ids.iter().flatten().filter(|id| !found.contains(id)).copied().collect()
    }

    /// For the record.
    pub(super) fn as_json(&self) -> serde_json::Value {
        let time = |time: Option<OffsetDateTime>| time.and_then(|time| time.format(&Rfc3339).ok());
        serde_json::json!({
            "ids": self.ids, "aggregate": self.aggregate, "type": self.event_type,
            "since": time(self.since), "until": time(self.until),
        })
    }
}

/// The deliveries, with their events, that a [`Selection`] means and that are in this state. A clause
/// of what was not asked for is constant, and costs nothing.
macro_rules! chosen {
    ($state:literal) => {
        concat!(
            "
FROM outbox_deliveries delivery
JOIN outbox_events event USING (event_id)
WHERE ",
            $state,
            "
  AND ($1::uuid[] IS NULL OR delivery.event_id = ANY ($1))
  AND ($2::uuid IS NULL OR event.aggregate_id = $2)
  AND ($3::text IS NULL OR event.event_type = $3)
  AND ($4::timestamptz IS NULL OR delivery.created_at >= $4)
  AND ($5::timestamptz IS NULL OR delivery.created_at < $5)
"
        )
    };
}
pub(super) use chosen;

/// What a selection amounts to.
#[derive(Debug, Clone, Serialize)]
pub struct Scope {
    /// All of it.
    #[serde(flatten)]
    pub total: TypeScope,
    /// Type by type.
    pub types: Vec<TypeScope>,
}

/// Events, and the time range in which they were appended.
#[derive(Debug, Clone, Serialize, FromRow)]
#[allow(missing_docs)]
pub struct TypeScope {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub event_type: Option<String>,
    pub events: i64,
    pub aggregates: i64,
    pub oldest: Option<String>,
    pub newest: Option<String>,
}

/// The scope that a query made with [`count`] finds: its first row is the total.
pub(super) async fn fetch_scope(
    query: Query<'_, Postgres, PgArguments>,
    db: &mut PgConnection,
) -> Result<Scope, sqlx::Error> {
    let rows = query.fetch_all(db).await?;
    let mut parts = rows.iter().map(TypeScope::from_row);
    let total = parts.next().ok_or(sqlx::Error::RowNotFound)??;
    Ok(Scope { total, types: parts.collect::<Result<_, _>>()? })
}

/// Counts what [`chosen`] finds: type by type, and, on a first row without a type, altogether.
/// Aggregate by aggregate first, which is hashed: counting distinct ones would sort everything.
macro_rules! count {
    ($($from:tt)+) => {
        concat!(
            "
WITH by_aggregate AS (
    SELECT event.event_type, event.aggregate_type, event.aggregate_id,
           count(*) AS events, min(delivery.created_at) AS oldest, max(delivery.created_at) AS newest",
            $($from)+,
            "
    GROUP BY event.event_type, event.aggregate_type, event.aggregate_id
)
SELECT event_type, sum(events)::bigint AS events, count(*) AS aggregates,
       to_json(min(oldest)) #>> '{}' AS oldest, to_json(max(newest)) #>> '{}' AS newest
FROM by_aggregate
GROUP BY event_type
UNION ALL
SELECT NULL, coalesce(sum(events), 0)::bigint, count(*),
       to_json(min(oldest)) #>> '{}', to_json(max(newest)) #>> '{}'
FROM (
    SELECT sum(events) AS events, min(oldest) AS oldest, max(newest) AS newest
    FROM by_aggregate
    GROUP BY aggregate_type, aggregate_id
) aggregate
ORDER BY event_type NULLS FIRST"
        )
    };
}
pub(super) use count;

/// What these events amount to.
pub(super) async fn scope_of(db: &mut PgConnection, ids: Vec<Uuid>) -> Result<Scope, sqlx::Error> {
    fetch_scope(Selection::of(ids).query(count!(chosen!("true"))), db).await
}
