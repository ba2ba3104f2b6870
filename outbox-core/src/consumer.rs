//! The consumer: gives each event its effect once, in the order of its aggregate.
//!
//! A batch goes through five steps: decode, look, prepare (external effects, outside any
//! transaction), apply (one transaction: inbox, effect, sequence), acknowledge. An event that cannot
//! be applied now is parked in the database, one that never can is a dead letter there; the broker
//! is told "done" in every case, and never before the commit.

use std::collections::HashSet;
use std::error::Error;
use std::panic::AssertUnwindSafe;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use futures::future::join_all;
use futures::{FutureExt, StreamExt};
use sqlx::{PgConnection, PgPool};
use tracing::{Instrument, Span};
use uuid::Uuid;

use crate::config::{ConsumerConfig, Switch};
use crate::crash_point;
use crate::database::{in_time, is_away};
use crate::event::{self, Envelope, Message, WireError};
use crate::handler::{HandleError, Handler, Incoming};
use crate::inbox::{self, DeadLetter, ParkReason, Parked};
use crate::jetstream::{Subscription, describe};
use crate::measure;
use crate::outage::Outage;
use crate::relay::Nudge;
use crate::trace;

/// What became of one delivered message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Delivery {
    /// It took effect, and did not before.
    Applied,
    /// It took effect before; nothing happened.
    Duplicate,
    /// It waits in the database.
    Parked,
    /// It is a dead letter, now or since before.
    Dead,
}

/// Why a batch was not handled. Nothing is counted against its events; deliver it again.
#[derive(Debug, thiserror::Error)]
pub enum ConsumerError {
    /// The inbox's database is away, or did not do as asked.
    #[error("the inbox cannot be read or written")]
    Database(#[from] sqlx::Error),
    /// A handler's work met a database that is away.
    #[error("the handler's database is away")]
    Handler(#[source] Box<dyn Error + Send + Sync>),
}

/// Consumes one stream into one database. Any number of instances may share both.
#[derive(Debug)]
pub struct Consumer<H> {
    pub(crate) db: PgPool,
    pub(crate) subscription: Subscription,
    handler: H,
    pub(crate) config: ConsumerConfig,
    nudge: Option<Nudge>,
    outage: Mutex<Outage>,
}

/// How many events are prepared side by side.
const PREPARE_WIDTH: usize = 32;

/// How many events are applied in one transaction. More are applied in several, side by side.
const APPLIED_TOGETHER: usize = 250;

/// One event in hand, and how far it has come.
struct Item<'a, H: Handler> {
    place: usize,
    message: &'a Message,
    envelope: Envelope,
    is_known: bool,
    /// Open for as long as it is in hand.
    span: Span,
    parked: Option<WasParked>,
    step: Step<H::Event, H::Prepared>,
}

/// What is known of an event that comes out of the parked ones.
#[derive(Debug, Clone, Copy)]
struct WasParked {
    attempts: i32,
    is_overdue: bool,
}

enum Step<E, P> {
    /// Its payload is read; `None` for a type that the handler does not know.
    Decoded(Option<E>),
    /// It is its aggregate's next.
    Next(E),
    /// It is next, and its external effect is brought about.
    Prepared(E, P),
    /// It is next and has no effect.
    WithoutEffect,
    /// An earlier event of its aggregate has not taken effect.
    Early,
    /// It is parked until the gap before it is closed, or for so long.
    Waits(Duration),
    /// Its handler failed.
    Failed { attempts: i32, wait: Duration, error: String },
    /// It never can be handled.
    Rejected { attempts: i32, reason: String },
    /// There is nothing to do about it.
    Settled(Delivery),
}

enum ApplyError {
    /// The batch is to be delivered again.
    Consumer(ConsumerError),
    /// The handler refused; nothing of the batch was written.
    Handler(HandleError),
}

impl From<sqlx::Error> for ApplyError {
    fn from(error: sqlx::Error) -> Self {
        Self::Consumer(error.into())
    }
}

#[derive(Debug, thiserror::Error)]
#[error("the handler panicked")]
struct Panicked;

impl<H: Handler> Item<'_, H> {
    fn attempts(&self) -> i32 {
        self.parked.map_or(0, |parked| parked.attempts)
    }

    fn is_to_be_applied(&self) -> bool {
        matches!(self.step, Step::Prepared(..) | Step::WithoutEffect)
    }

    fn delivery(&self) -> Delivery {
        match self.step {
            Step::Prepared(..) | Step::WithoutEffect => Delivery::Applied,
            Step::Settled(delivery) => delivery,
            Step::Rejected { .. } => Delivery::Dead,
            Step::Decoded(_) | Step::Next(_) | Step::Early | Step::Waits(_) | Step::Failed { .. } => Delivery::Parked,
        }
    }

    /// Its type as a label: a producer's types that nobody here knows must not become labels.
    fn type_label(&self) -> &str {
        if self.is_known { &self.envelope.event_type } else { "other" }
    }

    fn count(&self) {
        let delivery = self.delivery();
        measure::count_delivery(self.type_label(), delivery);
        if let Some(age) = measure::age(&self.envelope.time).filter(|_| delivery == Delivery::Applied) {
            metrics::histogram!(measure::APPEND_TO_EFFECT_SECONDS).record(age);
        }
    }

    fn incoming(&self) -> Option<Incoming<'_, H::Event, H::Prepared>> {
        let Step::Prepared(event, prepared) = &self.step else { return None };
        Some(Incoming { envelope: &self.envelope, event, prepared })
    }

    fn parked(&self, reason: ParkReason, attempts: i32, wait: Duration, error: Option<String>) -> Parked<'_> {
        Parked { message: self.message, envelope: &self.envelope, reason, attempts, wait, error }
    }
}

impl<H: Handler> Consumer<H> {
    /// A consumer of `subscription` whose inbox is in `db`.
    pub fn new(db: PgPool, subscription: Subscription, handler: H, config: ConsumerConfig) -> Self {
        Self { db, subscription, handler, config, nudge: None, outage: Mutex::default() }
    }

    /// Wakes this relay after each commit: for handlers that append events of their own.
    #[must_use]
    pub fn nudging(self, nudge: Nudge) -> Self {
        Self { nudge: Some(nudge), ..self }
    }

    /// Handles messages as if a broker had delivered them, and then every parked event that became
    /// due by it. Returns what became of each message, in their order. May be called again with the
    /// same messages.
    ///
    /// # Errors
    /// [`ConsumerError`]: some of the messages may have been handled, and none counts as failed.
    pub async fn deliver(&self, batch: &[Message]) -> Result<Vec<Delivery>, ConsumerError> {
        let started = Instant::now();
        let (deliveries, mut woken) = self.handle(batch.iter().map(|message| (message, None)).collect()).await?;
        while woken > 0 {
            (_, woken) = self.handle_parked().await?;
        }
        metrics::histogram!(measure::INBOX_BATCH).record(batch.len() as f64);
        metrics::histogram!(measure::INBOX_BATCH_SECONDS).record(started.elapsed());
        Ok(deliveries)
    }

    /// Handles parked events that are due, a batch of them at most. Returns how many there were.
    ///
    /// # Errors
    /// [`ConsumerError`]; they come due again.
    pub async fn deliver_parked(&self) -> Result<usize, ConsumerError> {
        let (deliveries, _woken) = self.handle_parked().await?;
        Ok(deliveries.len())
    }

    pub(crate) async fn handle_parked(&self) -> Result<(Vec<Delivery>, u64), ConsumerError> {
        let (consumer, config) = (self.name(), &self.config);
        let taking = inbox::take_due(
            &self.db,
            consumer,
            config.consumer_batch,
            config.consumer_ack_wait,
            config.consumer_gap_deadline,
        );
        let due = in_time(taking).await?;
        let parked = |due: &inbox::Due| WasParked { attempts: due.attempts, is_overdue: due.is_overdue };
        self.handle(due.iter().map(|due| (&due.message, Some(parked(due)))).collect()).await
    }

    fn name(&self) -> &str {
        &self.subscription.durable
    }

    /// Handles a batch in rounds of one event of each aggregate. Returns what became of each, and
    /// how many parked events became due.
    async fn handle(&self, batch: Vec<(&Message, Option<WasParked>)>) -> Result<(Vec<Delivery>, u64), ConsumerError> {
        let mut deliveries = vec![Delivery::Dead; batch.len()];
        let mut waiting = self.decode(batch).await?;
        let mut woken = 0;
        while !waiting.is_empty() {
            let (mut round, later) = one_of_each_aggregate(waiting);
            self.look(&mut round).await?;
            self.prepare(&mut round).await?;
            // Its events are of different aggregates, so that nothing orders one part before another.
            let parts = round.chunks_mut(APPLIED_TOGETHER).map(|part| self.apply_or_set_aside(part));
            for part in join_all(parts).await {
                woken += part?;
            }
            for item in &round {
                deliveries[item.place] = item.delivery();
                item.count();
            }
            waiting = later;
        }
        Ok((deliveries, woken))
    }

    /// Step 1: reads the events. What cannot be read is a dead letter at once.
    async fn decode<'a>(
        &self,
        batch: Vec<(&'a Message, Option<WasParked>)>,
    ) -> Result<Vec<Item<'a, H>>, ConsumerError> {
        let mut items = Vec::with_capacity(batch.len());
        let mut illegible = Vec::new();
        for (place, (message, parked)) in batch.into_iter().enumerate() {
            match Envelope::read(message) {
                Err(error) => illegible.push((message, None, error)),
                Ok(mut envelope) => match self.handler.decode(&envelope) {
                    Err(error) => illegible.push((message, Some(envelope), error)),
                    Ok(event) => {
                        let (span, is_known) = (trace::process(self.name(), &mut envelope), event.is_some());
                        items.push(Item {
                            place,
                            message,
                            envelope,
                            is_known,
                            span,
                            parked,
                            step: Step::Decoded(event),
                        });
                    }
                },
            }
        }
        if !illegible.is_empty() {
            in_time(self.bury_illegible(&illegible)).await?;
        }
        Ok(items)
    }

    async fn bury_illegible(&self, illegible: &[(&Message, Option<Envelope>, WireError)]) -> Result<(), ConsumerError> {
        let reasons: Vec<String> = illegible.iter().map(|(_, _, error)| error.to_string()).collect();
        let letters: Vec<DeadLetter<'_>> = std::iter::zip(illegible, &reasons)
            .map(|((message, envelope, _), reason)| {
                let event_id = event::legible_id(message);
                DeadLetter { message, event_id, envelope: envelope.as_ref(), reason, attempts: 0 }
            })
            .collect();
        let ids: Vec<Uuid> = letters.iter().filter_map(|letter| letter.event_id).collect();
        let mut tx = self.db.begin().await?;
        let buried = inbox::bury(&mut tx, self.name(), &letters).await?;
        inbox::unpark(&mut tx, self.name(), &ids).await?;
        tx.commit().await?;
        if buried > 0 {
            letters.iter().for_each(log_dead_letter);
            letters.iter().for_each(|_| measure::count_delivery("illegible", Delivery::Dead));
        }
        Ok(())
    }

    /// Step 2: what is on record about each event, and is it its aggregate's next?
    async fn look(&self, round: &mut [Item<'_, H>]) -> Result<(), ConsumerError> {
        let envelopes: Vec<&Envelope> = round.iter().map(|item| &item.envelope).collect();
        let seen = in_time(inbox::look(&self.db, self.name(), &envelopes)).await?;
        for (item, seen) in std::iter::zip(round, seen) {
            let sequence = item.envelope.aggregate.sequence;
            let step = std::mem::replace(&mut item.step, Step::Early);
            item.step = if seen.is_processed || sequence <= seen.last_sequence {
                Step::Settled(Delivery::Duplicate)
            } else if seen.is_dead {
                Step::Settled(Delivery::Dead)
            } else if seen.is_parked && item.parked.is_none() {
                // It waits for its own time; a redelivery does not hurry it.
                Step::Settled(Delivery::Parked)
            } else if sequence > seen.last_sequence + 1 {
                Step::Early
            } else if let Step::Decoded(Some(event)) = step {
                Step::Next(event)
            } else {
                Step::WithoutEffect
            };
        }
        Ok(())
    }

    /// Step 3: the external effects of what is next, side by side and outside any transaction.
    async fn prepare(&self, round: &mut [Item<'_, H>]) -> Result<(), ConsumerError> {
        let preparing: Vec<_> = round.iter().enumerate().filter_map(|(n, item)| self.prepare_one(n, item)).collect();
        let results: Vec<_> = futures::stream::iter(preparing).buffer_unordered(PREPARE_WIDTH).collect().await;

        if !results.is_empty() {
            crash_point!("consumer.after_prepare");
        }
        let answered = |result: &Result<H::Prepared, HandleError>| !matches!(result, Err(HandleError::Retry(_)));
        let ids = |want: bool| -> Vec<Uuid> {
            let wanted = results.iter().filter(|(_, result)| answered(result) == want);
            wanted.map(|(n, _)| round[*n].envelope.id).collect()
        };
        let (answers, failures) = (ids(true), ids(false));
        for (n, result) in results {
            let item = &mut round[n];
            let step = std::mem::replace(&mut item.step, Step::Early);
            item.step = match (step, result) {
                (Step::Next(event), Ok(prepared)) => Step::Prepared(event, prepared),
                (_, Err(error)) => {
                    let counts = self.outage().counts(item.envelope.id, !answers.is_empty());
                    self.after_failure(item, error, counts)?
                }
                (step, Ok(_)) => step,
            };
        }
        self.outage().record(&answers, &failures);
        Ok(())
    }

    fn prepare_one<'r>(
        &'r self,
        n: usize,
        item: &'r Item<'_, H>,
    ) -> Option<impl Future<Output = (usize, Result<H::Prepared, HandleError>)> + Send + 'r> {
        let Step::Next(event) = &item.step else { return None };
        let envelope = &item.envelope;
        Some(async move {
            let preparing = self.handler.prepare(envelope, event).instrument(item.span.clone());
            let preparing = AssertUnwindSafe(preparing).catch_unwind();
            (n, preparing.await.unwrap_or_else(|_panic| Err(Panicked.into())))
        })
    }

    /// Step 4; where the handler refuses the events together, each on its own, so that a poison event
    /// harms no neighbour. Returns how many parked events became due.
    async fn apply_or_set_aside(&self, items: &mut [Item<'_, H>]) -> Result<u64, ConsumerError> {
        let mut woken = 0;
        match in_time(self.apply(items)).await {
            Ok(due) => woken += due,
            Err(ApplyError::Consumer(error)) => return Err(error),
            Err(ApplyError::Handler(error)) => match items {
                [item] => {
                    item.step = self.after_failure(item, error, true)?;
                    woken += Box::pin(self.apply_or_set_aside(items)).await?;
                }
                _ => {
                    for item in items {
                        woken += Box::pin(self.apply_or_set_aside(std::slice::from_mut(item))).await?;
                    }
                }
            },
        }
        Ok(woken)
    }

    /// Step 4: one transaction for inbox, effect, sequences, parked events and dead letters.
    async fn apply(&self, items: &mut [Item<'_, H>]) -> Result<u64, ApplyError> {
        let changes_nothing = |item: &Item<'_, H>| matches!(item.step, Step::Settled(_)) && item.parked.is_none();
        if items.iter().all(changes_nothing) {
            return Ok(0);
        }
        let mut tx = self.db.begin().await?;
        let envelopes: Vec<&Envelope> = items.iter().map(|item| &item.envelope).collect();
        let last_sequences = inbox::lock(&mut tx, self.name(), &envelopes).await?;

        // Judged again under the lock: another instance may have applied it since step 2.
        for (item, last) in std::iter::zip(&mut *items, &last_sequences) {
            if item.envelope.aggregate.sequence <= *last {
                item.step = Step::Settled(Delivery::Duplicate);
            }
        }
        let to_be_applied: Vec<Uuid> =
            items.iter().filter(|item| item.is_to_be_applied()).map(|item| item.envelope.id).collect();
        let new = inbox::record(&mut tx, self.name(), &to_be_applied).await?;
        crash_point!("consumer.after_record");
        for item in items.iter_mut().filter(|item| item.is_to_be_applied()) {
            if !new.contains(&item.envelope.id) {
                item.step = Step::Settled(Delivery::Duplicate);
            }
        }
        self.apply_effects(&mut tx, items).await?;
        crash_point!("consumer.after_effect");
        let applied: Vec<&Envelope> =
            items.iter().filter(|item| item.is_to_be_applied()).map(|item| &item.envelope).collect();
        let mut woken = inbox::advance(&mut tx, self.name(), &applied).await?;

        for (item, last) in std::iter::zip(&mut *items, &last_sequences) {
            if matches!(item.step, Step::Early) {
                item.step = self.wait_for_gap(&mut tx, item, *last).await?;
            }
        }
        let (mut parked, mut dead, mut done) = (Vec::new(), Vec::new(), Vec::new());
        for item in &*items {
            match &item.step {
                Step::Waits(wait) => {
                    woken += u64::from(wait.is_zero());
                    parked.push(item.parked(ParkReason::Gap, item.attempts(), *wait, None));
                }
                Step::Failed { attempts, wait, error } => {
                    parked.push(item.parked(ParkReason::Retry, *attempts, *wait, Some(error.clone())));
                }
                Step::Rejected { attempts, reason } => {
                    let (message, envelope, attempts) = (item.message, &item.envelope, *attempts);
                    dead.push(DeadLetter {
                        message,
                        event_id: Some(envelope.id),
                        envelope: Some(envelope),
                        reason,
                        attempts,
                    });
                }
                _ => {}
            }
            // One that another instance parks at this moment is found to be a duplicate when it comes due.
            if item.parked.is_some() && !matches!(item.step, Step::Waits(_) | Step::Failed { .. }) {
                done.push(item.envelope.id);
            }
        }
        inbox::park(&mut tx, self.name(), &parked).await?;
        inbox::bury(&mut tx, self.name(), &dead).await?;
        inbox::unpark(&mut tx, self.name(), &done).await?;
        tx.commit().await?;
        crash_point!("consumer.after_commit");

        dead.iter().for_each(log_dead_letter);
        for item in &*items {
            match item.step {
                Step::Waits(_) => measure::count_parked(item.type_label(), ParkReason::Gap),
                Step::Failed { .. } => measure::count_parked(item.type_label(), ParkReason::Retry),
                _ => {}
            }
        }
        if let Some(nudge) = &self.nudge {
            nudge.nudge();
        }
        Ok(woken)
    }

    async fn apply_effects(&self, tx: &mut PgConnection, items: &[Item<'_, H>]) -> Result<(), ApplyError> {
        let events: Vec<_> = items.iter().filter_map(Item::incoming).collect();
        if events.is_empty() {
            return Ok(());
        }
        let applying = AssertUnwindSafe(self.handler.apply(tx, &events)).catch_unwind();
        let result = applying.await.unwrap_or_else(|_panic| Err(Panicked.into()));
        result.map_err(|error| match error {
            HandleError::Retry(error) if is_away(&*error) => ApplyError::Consumer(ConsumerError::Handler(error)),
            error => ApplyError::Handler(error),
        })
    }

    /// How long an early event waits. Its deadline stands still while an earlier one is parked or a
    /// dead letter: then the gap is in somebody's hands.
    async fn wait_for_gap(
        &self,
        tx: &mut PgConnection,
        item: &Item<'_, H>,
        last: i64,
    ) -> Result<Step<H::Event, H::Prepared>, sqlx::Error> {
        let envelope = &item.envelope;
        // The gap closed since step 2. Still not in this pass: what it needs is not prepared.
        if envelope.aggregate.sequence == last + 1 {
            return Ok(Step::Waits(Duration::ZERO));
        }
        let is_overdue = item.parked.is_some_and(|parked| parked.is_overdue);
        if !is_overdue || inbox::gap_is_known(tx, self.name(), envelope).await? {
            return Ok(Step::Waits(self.config.consumer_gap_deadline));
        }
        if self.config.consumer_joins_late == Switch::On && last == 0 {
            inbox::accept_gap(tx, self.name(), envelope).await?;
            return Ok(Step::Waits(Duration::ZERO));
        }
        let reason = format!("event {} of its aggregate is missing", last + 1);
        Ok(Step::Rejected { attempts: item.attempts(), reason })
    }

    /// What becomes of an event whose handler failed.
    fn after_failure(
        &self,
        item: &Item<'_, H>,
        error: HandleError,
        counts: bool,
    ) -> Result<Step<H::Event, H::Prepared>, ConsumerError> {
        let attempts = item.attempts() + i32::from(counts);
        let error = match error {
            HandleError::Reject(reason) => return Ok(Step::Rejected { attempts, reason }),
            HandleError::Retry(error) if is_away(&*error) => return Err(ConsumerError::Handler(error)),
            HandleError::Retry(error) => describe(&*error),
        };
        if attempts >= self.config.consumer_max_attempts as i32 {
            self.outage().forget(item.envelope.id);
            return Ok(Step::Rejected { attempts, reason: format!("failed {attempts} times: {error}") });
        }
        let envelope = &item.envelope;
        tracing::warn!(
            event_id = %envelope.id, aggregate_id = %envelope.aggregate.id,
            correlation_id = envelope.context.correlation_id, trace_id = envelope.context.trace_id(),
            attempts, error, "the event was not handled yet"
        );
        let failures = self.outage().batches.max(attempts as u32).max(1);
        Ok(Step::Failed { attempts, wait: self.config.backoff().delay(failures), error })
    }

    pub(crate) fn outage(&self) -> MutexGuard<'_, Outage> {
        self.outage.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Splits a batch: the first event of each aggregate, in order, and what comes after those.
fn one_of_each_aggregate<'a, H: Handler>(items: Vec<Item<'a, H>>) -> (Vec<Item<'a, H>>, Vec<Item<'a, H>>) {
    let mut aggregates = HashSet::new();
    let mut is_first =
        |item: &Item<'a, H>| aggregates.insert((item.envelope.source.clone(), item.envelope.aggregate.id));
    items.into_iter().partition(|item| is_first(item))
}

fn log_dead_letter(letter: &DeadLetter<'_>) {
    tracing::error!(
        event_id = letter.event_id.map(tracing::field::display),
        aggregate_id = letter.envelope.map(|envelope| tracing::field::display(envelope.aggregate.id)),
        correlation_id = letter.envelope.map(|envelope| &*envelope.context.correlation_id),
        trace_id = letter.envelope.and_then(|envelope| envelope.context.trace_id()),
        subject = letter.message.subject,
        attempts = letter.attempts,
        error = letter.reason,
        "the event is a dead letter"
    );
}
