//! Dead letters: what a consumer gave up on, to be tried again or to be given up for good.
//!
//! Both happen aggregate by aggregate, each in a transaction under the lock that consumers take too, so
//! that no consumer sees half of it. A dry run is the same transactions, rolled back.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::Serialize;
use serde_json::{Value, json};
use sqlx::types::Json;
use sqlx::{FromRow, PgConnection};
use uuid::Uuid;

use super::selection::Selection;
use super::{Operator, OperatorError, Really};
use crate::event::{Envelope, Message};
use crate::inbox::{self, ParkReason, Parked};

/// A dead letter, without its contents. The identity is missing where it was not legible.
#[derive(Debug, Clone, Serialize, FromRow)]
#[allow(missing_docs)]
pub struct DeadLetter {
    pub dead_letter_id: Uuid,
    pub consumer: String,
    pub event_id: Option<Uuid>,
    pub source: Option<String>,
    pub event_type: Option<String>,
    pub aggregate_id: Option<Uuid>,
    pub aggregate_sequence: Option<i64>,
    pub stream: Option<String>,
    pub stream_sequence: Option<i64>,
    pub subject: String,
    pub reason: String,
    pub attempts: i32,
    pub dead_at: String,
}

/// What a dead letter says.
#[derive(Debug, Clone, Serialize)]
pub struct DeadLetterContents {
    /// Its headers, as they are on the wire.
    pub headers: BTreeMap<String, String>,
    /// Its payload; what is not UTF-8 is shown as U+FFFD.
    pub payload: String,
    /// Why its identity cannot be read; then it can only be discarded.
    pub illegible: Option<String>,
}

#[derive(FromRow)]
struct Row {
    #[sqlx(flatten)]
    letter: DeadLetter,
    headers: Json<BTreeMap<String, String>>,
    payload: Vec<u8>,
}

impl Row {
    fn message(&self) -> Message {
        Message {
            subject: self.letter.subject.clone(),
            headers: self.headers.0.clone(),
            payload: self.payload.clone().into(),
            position: None,
        }
    }
}

/// What became of dead letters, or would become of them.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Settled {
    /// Those that were retried or discarded.
    pub settled: Vec<DeadLetter>,
    /// Those that could not be, and why.
    pub refused: Vec<(DeadLetter, String)>,
    /// Named, and not there.
    pub unknown: Vec<Uuid>,
    /// Sequences that never came, and are given up with a letter behind them: aggregate, first, last.
    pub given_up: Vec<(Uuid, i64, i64)>,
}

/// What is done with the letters of one aggregate, under its lock.
enum Verdict {
    Settled {
        letter: Value,
        given_up: Option<(Uuid, i64, i64)>,
    },
    Refused(String),
    /// Another operator was faster.
    Gone,
}

impl Operator {
    /// The dead letters that a selection means; its ids may be those of letters or of events.
    ///
    /// # Errors
    /// The database's.
    pub async fn dead_letters(&self, selection: &Selection) -> Result<Vec<DeadLetter>, OperatorError> {
        Ok(self.read_letters(selection).await?.into_iter().map(|row| row.letter).collect())
    }

    /// The dead letters that a selection means, with what they say.
    ///
    /// # Errors
    /// The database's.
    pub async fn open_dead_letters(
        &self,
        selection: &Selection,
    ) -> Result<Vec<(DeadLetter, DeadLetterContents)>, OperatorError> {
        let open = |row: Row| {
            let illegible = Envelope::read(&row.message()).err().map(|error| error.to_string());
            let payload = String::from_utf8_lossy(&row.payload).into_owned();
            (row.letter, DeadLetterContents { headers: row.headers.0, payload, illegible })
        };
        Ok(self.read_letters(selection).await?.into_iter().map(open).collect())
    }

    /// Hands dead letters back to their consumer: each becomes a parked event that is due, with no
    /// attempts counted. Its followers wait parked, and take effect after it.
    ///
    /// # Errors
    /// The database's; the aggregates before are done.
    pub async fn retry(&self, selection: &Selection, really: Really) -> Result<Settled, OperatorError> {
        self.settle("dead-letters retry", selection, really, retry).await
    }

    /// Gives dead letters up: their aggregates go on as if they had taken effect. The letter stays as
    /// whole in the record.
    ///
    /// # Errors
    /// The database's; the aggregates before are done.
    pub async fn discard(&self, selection: &Selection, really: Really) -> Result<Settled, OperatorError> {
        self.settle("dead-letters discard", selection, really, discard).await
    }

    async fn settle(
        &self,
        what: &str,
        selection: &Selection,
        really: Really,
        settle_one: impl AsyncFn(&mut PgConnection, &str, &Row) -> Result<Verdict, sqlx::Error>,
    ) -> Result<Settled, OperatorError> {
        let rows = self.read_letters(selection).await?;
        let mut done = Settled::default();
        let is_meant =
            |id: &Uuid| rows.iter().any(|row| row.letter.dead_letter_id == *id || row.letter.event_id == Some(*id));
        done.unknown = selection.ids.iter().flatten().filter(|id| !is_meant(id)).copied().collect();

        let aggregate = |row: &Row| {
            let letter = &row.letter;
            (letter.consumer.clone(), letter.source.clone(), letter.aggregate_id)
        };
        for rows in rows.chunk_by(|a, b| aggregate(a) == aggregate(b)) {
            let mut tx = self.db.begin().await?;
            let (mut letters, mut given_up) = (Vec::new(), Vec::new());
            for row in rows {
                match settle_one(&mut tx, &row.letter.consumer, row).await? {
                    Verdict::Settled { letter, given_up: gap } => {
                        letters.push(letter);
                        given_up.extend(gap);
                        done.settled.push(row.letter.clone());
                    }
                    Verdict::Refused(reason) => done.refused.push((row.letter.clone(), reason)),
                    Verdict::Gone => {}
                }
            }
            if really == Really::Yes && !letters.is_empty() {
                let how_many = letters.len();
                let details = json!({"asked": selection.as_json(), "letters": letters, "given_up": given_up});
                self.record(&mut tx, what, how_many, details).await?;
                tx.commit().await?;
            }
            done.given_up.extend(given_up);
        }
        Ok(done)
    }

    async fn read_letters(&self, selection: &Selection) -> Result<Vec<Row>, sqlx::Error> {
        let rows = selection.query(LETTERS).fetch_all(&self.db).await?;
        rows.iter().map(Row::from_row).collect()
    }
}

/// Aggregate by aggregate and in order, so that a letter is settled before those behind it.
const LETTERS: &str = "
SELECT dead_letter_id, consumer, event_id, source, event_type, aggregate_id, aggregate_sequence,
       stream, stream_sequence, subject, reason, attempts, to_json(dead_at) #>> '{}' AS dead_at, headers, payload
FROM dead_letters
WHERE ($1::uuid[] IS NULL OR dead_letter_id = ANY ($1) OR event_id = ANY ($1))
  AND ($2::uuid IS NULL OR aggregate_id = $2)
  AND ($3::text IS NULL OR event_type = $3)
  AND ($4::timestamptz IS NULL OR dead_at >= $4)
  AND ($5::timestamptz IS NULL OR dead_at < $5)
ORDER BY consumer, source, aggregate_id, aggregate_sequence, dead_letters.dead_at, dead_letter_id";

async fn retry(tx: &mut PgConnection, consumer: &str, row: &Row) -> Result<Verdict, sqlx::Error> {
    let message = row.message();
    let envelope = match Envelope::read(&message) {
        Ok(envelope) => envelope,
        Err(error) => return Ok(Verdict::Refused(format!("{error}; it can only be discarded"))),
    };
    let last = lock(tx, consumer, &envelope).await?;
    if envelope.aggregate.sequence <= last {
        return Ok(Verdict::Refused(format!("its aggregate is at {last} already; it can only be discarded")));
    }
    let Some(letter) = take(tx, row).await? else { return Ok(Verdict::Gone) };
    let parked = Parked {
        message: &message,
        envelope: &envelope,
        reason: ParkReason::Retry,
        attempts: 0,
        wait: Duration::ZERO,
        error: Some(row.letter.reason.clone()),
    };
    inbox::park(tx, consumer, &[parked]).await?;
    Ok(Verdict::Settled { letter, given_up: None })
}

async fn discard(tx: &mut PgConnection, consumer: &str, row: &Row) -> Result<Verdict, sqlx::Error> {
    let settled = |letter: Option<Value>, given_up| match letter {
        Some(letter) => Verdict::Settled { letter, given_up },
        None => Verdict::Gone,
    };
    // What does not say whose event it is holds up nobody.
    let Ok(envelope) = Envelope::read(&row.message()) else { return Ok(settled(take(tx, row).await?, None)) };
    let last = lock(tx, consumer, &envelope).await?;
    let sequence = envelope.aggregate.sequence;
    if sequence <= last {
        return Ok(settled(take(tx, row).await?, None));
    }
    if inbox::gap_is_known(tx, consumer, &envelope).await? {
        let reason = "an earlier event of its aggregate is parked or a dead letter: that one comes first";
        return Ok(Verdict::Refused(reason.to_owned()));
    }
    let Some(letter) = take(tx, row).await? else { return Ok(Verdict::Gone) };
    inbox::advance(tx, consumer, &[&envelope]).await?;
    let gap = (sequence > last + 1).then_some((envelope.aggregate.id, last + 1, sequence - 1));
    Ok(settled(Some(letter), gap))
}

/// Locks the event's aggregate, as its consumer does; returns the last sequence that took effect.
async fn lock(tx: &mut PgConnection, consumer: &str, envelope: &Envelope) -> Result<i64, sqlx::Error> {
    let last = inbox::lock(tx, consumer, &[envelope]).await?;
    last.first().copied().ok_or(sqlx::Error::RowNotFound)
}

/// Takes a letter out of the dead letters, as whole, for the record.
async fn take(tx: &mut PgConnection, row: &Row) -> Result<Option<Value>, sqlx::Error> {
    sqlx::query_scalar(TAKE).bind(row.letter.dead_letter_id).fetch_optional(tx).await
}

/// Bytes are written in hexadecimal, so that nothing of them is lost.
const TAKE: &str = "
DELETE FROM dead_letters WHERE dead_letter_id = $1 RETURNING to_jsonb(dead_letters)";
