//! Publishing again what was published: for consumers that are to see it once more, and into a stream
//! that was lost. Never touches a delivery: what is published stays published.
//!
//! Events go out aggregate by aggregate in the order of their sequence, each waiting for the ack of the
//! one before it, several aggregates at once.
//!
//! The message id decides what the broker makes of it. A replay is to be delivered although the
//! broker's window may still hold the event_id, so it sends under an id of its own: event_id and action,
//! the same however often the replay has to try. A rebuild sends under the event_id, as the relay does:
//! a new stream knows none of the old ones, and what relay or another rebuild has put into it meanwhile
//! is dropped.

use std::time::{Duration, Instant};

use futures::future::join_all;
use serde::Serialize;
use serde_json::json;
use sqlx::postgres::PgArguments;
use sqlx::{Postgres, Row, query::Query};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use super::selection::{Scope, Selection, chosen, count, fetch_scope};
use super::stream::event_ids;
use super::{Operator, OperatorError};
use crate::backoff::Backoff;
use crate::event::{MESSAGE_ID, Message};
use crate::jetstream::Stream;
use crate::outbox::{ClaimedEvent, claimed_event};
use crate::relay::to_message;

/// The most events in flight.
const CHUNK: usize = 2_000;

/// How often one event is tried.
const ATTEMPTS: u32 = 8;

/// How long to wait between these attempts: half a minute in all.
const RETRY: Backoff = Backoff { base: Duration::from_millis(250), max: Duration::from_secs(10) };

/// How far it has come.
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs)]
pub struct Progress {
    pub sent: usize,
    pub of: i64,
    pub last: Option<Uuid>,
}

/// What was published again.
#[derive(Debug, Clone, Serialize)]
pub struct Resent {
    /// So many events.
    pub sent: usize,
    /// The last one, in the order of the outbox: everything before it is sent.
    pub last: Option<Uuid>,
    /// Why it was broken off, if it was.
    pub broken_off: Option<String>,
}

/// A place in the order of the outbox: an aggregate's event.
#[derive(Debug, Clone)]
struct Position {
    aggregate_type: String,
    aggregate_id: Uuid,
    aggregate_sequence: i64,
}

impl Position {
    /// Before everything.
    fn start() -> Self {
        Self { aggregate_type: String::new(), aggregate_id: Uuid::nil(), aggregate_sequence: 0 }
    }

    /// As $6 to $8, as [`published_after`] wants it.
    fn bind_to(self, query: Query<'_, Postgres, PgArguments>) -> Query<'_, Postgres, PgArguments> {
        query.bind(self.aggregate_type).bind(self.aggregate_id).bind(self.aggregate_sequence)
    }

    fn of(event: &ClaimedEvent) -> Self {
        Self {
            aggregate_type: event.aggregate_type.clone(),
            aggregate_id: event.aggregate.id,
            aggregate_sequence: event.aggregate.sequence,
        }
    }
}

/// How to send.
struct Sending<'a> {
    what: &'static str,
    selection: &'a Selection,
    from: Position,
    rate: Option<u32>,
    /// What the stream holds already, sorted: not to be sent.
    held: Vec<Uuid>,
    /// Under an id of its own, not the event_id.
    is_fresh: bool,
    of: i64,
}

impl Operator {
    /// What a selection amounts to of what was published, from after the event `after` on.
    ///
    /// # Errors
    /// The database's; [`OperatorError::NoEvent`].
    pub async fn published(&self, selection: &Selection, after: Option<Uuid>) -> Result<Scope, OperatorError> {
        let counting = self.position(after).await?.bind_to(selection.query(PUBLISHED));
        Ok(fetch_scope(counting, &mut *self.db.acquire().await?).await?)
    }

    /// Which of the events that a selection names by id were not published.
    ///
    /// # Errors
    /// The database's.
    pub async fn not_published(&self, selection: &Selection) -> Result<Vec<Uuid>, OperatorError> {
        let ids: Vec<Uuid> = selection.ids.clone().unwrap_or_default();
        let published: Vec<Uuid> = sqlx::query_scalar(PUBLISHED_OF).bind(&ids).fetch_all(&self.db).await?;
        Ok(selection.missing(&published))
    }

    /// Publishes what was published before this begins to `stream` once more, so that every consumer
    /// really gets it; at most `rate` a second; from after the event `after` on, where an earlier replay
    /// was broken off.
    ///
    /// # Errors
    /// [`OperatorError`], before anything is sent. Whatever comes later breaks it off.
    pub async fn replay(
        &self,
        stream: &Stream,
        selection: &Selection,
        after: Option<Uuid>,
        rate: u32,
        stop: &CancellationToken,
        progress: impl FnMut(Progress),
    ) -> Result<Resent, OperatorError> {
        stream.ensure().await?;
        let from = self.position(after).await?;
        let counting = from.clone().bind_to(selection.query(COUNT_PUBLISHED)).fetch_one(&self.db);
        let (of, rate) = (counting.await?.try_get(0)?, Some(rate));
        let sending = Sending { what: "replay", selection, from, rate, held: Vec::new(), is_fresh: true, of };
        self.send(stream, sending, stop, progress).await
    }

    /// How many retained published events the stream does not hold.
    ///
    /// # Errors
    /// [`OperatorError`].
    pub async fn missing_in_stream(&self, stream: &Stream) -> Result<usize, OperatorError> {
        self.missing_in(&event_ids(stream.broker(), &stream.name().name).await?).await
    }

    async fn missing_in(&self, held: &[Uuid]) -> Result<usize, OperatorError> {
        let published: Vec<Uuid> = sqlx::query_scalar(ALL_PUBLISHED).fetch_all(&self.db).await?;
        Ok(published.iter().filter(|id| held.binary_search(id).is_err()).count())
    }

    /// Publishes every retained published event that `stream` does not hold, and makes the stream first
    /// if it is not there. One that was broken off is simply run again.
    ///
    /// # Errors
    /// [`OperatorError`], before anything is sent. Whatever comes later breaks it off.
    pub async fn rebuild(
        &self,
        stream: &Stream,
        rate: Option<u32>,
        stop: &CancellationToken,
        progress: impl FnMut(Progress),
    ) -> Result<Resent, OperatorError> {
        stream.ensure().await?;
        let everything = Selection::default();
        let held = event_ids(stream.broker(), &stream.name().name).await?;
        let sending = Sending {
            what: "rebuild",
            selection: &everything,
            from: Position::start(),
            rate,
            of: self.missing_in(&held).await? as i64,
            held,
            is_fresh: false,
        };
        self.send(stream, sending, stop, progress).await
    }

    async fn position(&self, after: Option<Uuid>) -> Result<Position, OperatorError> {
        let Some(event) = after else { return Ok(Position::start()) };
        let found: Option<(String, Uuid, i64)> = sqlx::query_as(POSITION).bind(event).fetch_optional(&self.db).await?;
        let (aggregate_type, aggregate_id, aggregate_sequence) = found.ok_or(OperatorError::NoEvent(event))?;
        Ok(Position { aggregate_type, aggregate_id, aggregate_sequence })
    }

    /// Sends chunk by chunk, and writes down after each how far it has come.
    async fn send(
        &self,
        stream: &Stream,
        sending: Sending<'_>,
        stop: &CancellationToken,
        mut progress: impl FnMut(Progress),
    ) -> Result<Resent, OperatorError> {
        let details = json!({"asked": sending.selection.as_json(), "rate": sending.rate});
        let action = self.begin(sending.what, details).await?;
        let started = Instant::now();
        // A tenth of a second's worth, so that the rate is kept evenly.
        let chunk = sending.rate.map_or(CHUNK, |rate| (rate as usize / 10).clamp(1, CHUNK));
        let mut position = sending.from.clone();
        let mut resent = Resent { sent: 0, last: None, broken_off: None };
        while resent.broken_off.is_none() {
            if stop.is_cancelled() {
                resent.broken_off = Some("told to stop".to_owned());
                break;
            }
            let mut events = self.page(sending.selection, action.id, &position, chunk).await?;
            let Some(last) = events.last() else { break };
            let last_of_page = last.id;
            position = Position::of(last);
            events.retain(|event| sending.held.binary_search(&event.id).is_err());

            let message_id = |event: &ClaimedEvent| match sending.is_fresh {
                true => format!("{}:{}", event.id, action.id),
                false => event.id.to_string(),
            };
            let sent = match send_chunk(stream, &events, message_id).await {
                Ok(()) => {
                    resent.last = Some(last_of_page);
                    events.len()
                }
                Err((sent, error)) => {
                    resent.broken_off = Some(error.to_string());
                    resent.last = events[..sent].last().map(|event| event.id).or(resent.last);
                    sent
                }
            };
            resent.sent += sent;
            action.advance(sent, json!({"last": resent.last})).await?;
            progress(Progress { sent: resent.sent, of: sending.of, last: resent.last });
            if let Some(rate) = sending.rate {
                let due = started + Duration::from_secs_f64(resent.sent as f64 / f64::from(rate));
                stop.run_until_cancelled(tokio::time::sleep_until(due.into())).await;
            }
        }
        if resent.broken_off.is_none() {
            action.end().await?;
        }
        Ok(resent)
    }

    async fn page(
        &self,
        selection: &Selection,
        action: Uuid,
        after: &Position,
        limit: usize,
    ) -> Result<Vec<ClaimedEvent>, OperatorError> {
        let paging = after.clone().bind_to(selection.query(PAGE)).bind(action).bind(limit as i64);
        let rows = paging.fetch_all(&self.db).await?;
        let events = rows.iter().filter_map(|row| claimed_event(row).transpose());
        Ok(events.collect::<Result<_, _>>()?)
    }
}

/// Sends events that stand in order. Where that fails, says how many from the first on are sent.
async fn send_chunk(
    stream: &Stream,
    events: &[ClaimedEvent],
    message_id: impl Fn(&ClaimedEvent) -> String,
) -> Result<(), (usize, OperatorError)> {
    let sending = events.chunk_by(ClaimedEvent::is_of_the_aggregate_of).map(async |events| {
        for (sent, event) in events.iter().enumerate() {
            send_one(stream, event, message_id(event)).await.map_err(|error| (sent, error))?;
        }
        Ok(events.len())
    });
    let mut sent = 0;
    for result in join_all(sending).await {
        match result {
            Ok(events) => sent += events,
            Err((events, error)) => return Err((sent + events, error)),
        }
    }
    Ok(())
}

async fn send_one(stream: &Stream, event: &ClaimedEvent, message_id: String) -> Result<(), OperatorError> {
    let message = to_message(event, stream.name()).map_err(|error| OperatorError::Unsendable(event.id, error))?;
    let headers = [message.headers, [(MESSAGE_ID.to_owned(), message_id)].into()].into_iter().flatten().collect();
    let message = Message { headers, ..message };
    let mut attempt = 1;
    loop {
        let Err(failure) = stream.publish(message.clone()).await else { return Ok(()) };
        if !failure.kind.may_pass() || attempt == ATTEMPTS {
            return Err(OperatorError::NotPublished(event.id, failure.reason));
        }
        tokio::time::sleep(RETRY.delay(attempt)).await;
        attempt += 1;
    }
}

/// What of a [`Selection`] was published and stands after a [`Position`].
macro_rules! published_after {
    () => {
        chosen!(
            "delivery.published_at IS NOT NULL
  AND (event.aggregate_type, event.aggregate_id, event.aggregate_sequence) > ($6, $7, $8)"
        )
    };
}

const PUBLISHED: &str = count!(published_after!());

const COUNT_PUBLISHED: &str = concat!("SELECT count(*)", published_after!());

const PUBLISHED_OF: &str = "
SELECT event_id FROM outbox_deliveries WHERE event_id = ANY ($1) AND published_at IS NOT NULL";

const ALL_PUBLISHED: &str = "
SELECT event_id FROM outbox_deliveries WHERE published_at IS NOT NULL";

const POSITION: &str = "
SELECT aggregate_type, aggregate_id, aggregate_sequence FROM outbox_events WHERE event_id = $1";

/// What was published before the action began, so that it ends however fast events come. By the unique
/// index of aggregates and sequences: the order that counts, and a place to go on from.
const PAGE: &str = concat!(
    "
SELECT event.event_id, event.aggregate_type, event.aggregate_id, event.aggregate_sequence,
       event.event_type, event.event_version, event.payload::text AS payload, event.headers,
       to_char(event.created_at AT TIME ZONE 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS.US\"Z\"') AS time,
       delivery.attempts",
    published_after!(),
    "
  AND delivery.published_at <= (SELECT begun_at FROM operator_actions WHERE action_id = $9)
ORDER BY event.aggregate_type, event.aggregate_id, event.aggregate_sequence
LIMIT $10"
);
