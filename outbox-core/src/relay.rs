//! The relay: brings committed events to the stream, in the order of each aggregate.
//!
//! One batch is: claim under a lease, publish outside any transaction, settle. A relay may die
//! between any two of these; what it had claimed is then published, again perhaps, by whoever
//! claims it once the lease has run out.

use std::collections::{HashMap, HashSet};
use std::panic::AssertUnwindSafe;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use futures::{FutureExt, StreamExt, stream::FuturesUnordered};
use sqlx::PgPool;
use sqlx::postgres::{PgListener, PgPoolOptions};
use tokio::sync::Notify;
use tokio::task::JoinSet;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tracing::{Instrument, Span};
use uuid::Uuid;

use crate::config::RelayConfig;
use crate::crash_point;
use crate::database::in_time;
use crate::event::{Context, Envelope, Message, WireError};
use crate::jetstream::{FailureKind, PublishFailure, Stream, describe, permanent};
use crate::measure;
use crate::outbox::{self, Claim, ClaimedEvent, Failure, Floor};
use crate::telemetry::TRACE;
use crate::trace;

/// Wakes a relay: given to whoever commits events. A hint that may get lost; the relay polls anyway.
#[derive(Debug, Clone, Default)]
pub struct Nudge(Arc<Notify>);

impl Nudge {
    /// Says that events were committed. Never blocks; many nudges become one.
    pub fn nudge(&self) {
        self.0.notify_one();
    }

    async fn nudged(&self) {
        self.0.notified().await;
    }
}

/// What became of one batch.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Published {
    /// Candidates that the claim saw.
    pub seen: usize,
    /// Events it took.
    pub claimed: usize,
    /// Acknowledged by the stream and marked.
    pub published: usize,
    /// Failed in a way that may pass; to be tried again after a wait.
    pub rescheduled: usize,
    /// Failed in a way that only an operator can mend.
    pub failed: usize,
    /// Not tried, or not through a fault of their own; given back.
    pub given_back: usize,
    /// No longer this relay's when it came to settle them.
    pub lost: usize,
    /// Nothing was acknowledged, and every failure may pass: the broker is away or takes nothing.
    pub outage: bool,
}

/// Why a batch could not be claimed or settled. Its leases run out by themselves.
#[derive(Debug, thiserror::Error)]
pub enum RelayError {
    /// The outbox's database did not do as asked.
    #[error("the outbox cannot be read or written")]
    Database(#[from] sqlx::Error),
}

/// Publishes one service's outbox. Any number of relays may share an outbox.
#[derive(Debug)]
pub struct Relay {
    db: PgPool,
    stream: Stream,
    config: RelayConfig,
    worker: String,
    nudge: Nudge,
    search: Mutex<Search>,
}

/// Where the next claim starts to look.
#[derive(Debug)]
struct Search {
    floor: Floor,
    raised_at: Instant,
}

impl Relay {
    /// A relay of the outbox in `db` to `stream`.
    pub fn new(db: PgPool, stream: Stream, config: RelayConfig) -> Self {
        // An alert on a counter needs its 0.
        for name in [measure::BROKER_DUPLICATES, measure::EXPIRED_LEASES, measure::LOST_LEASES] {
            metrics::counter!(name).increment(0);
        }
        let search = Mutex::new(Search { floor: Floor::none(), raised_at: Instant::now() });
        // For people who look at a lease: which process of which host holds it.
        let host = std::env::var("HOSTNAME").unwrap_or_else(|_| "localhost".to_owned());
        let worker = format!("{host}:{}:{:04x}", std::process::id(), fastrand::u16(..));
        Self { db, stream, config, worker, nudge: Nudge::default(), search }
    }

    /// Wakes this relay; to be called after a commit.
    pub fn nudge(&self) -> Nudge {
        self.nudge.clone()
    }

    /// Claims, publishes and settles one batch.
    ///
    /// # Errors
    /// [`RelayError`]; what was claimed is taken up again once its lease has run out.
    pub async fn run_once(&self) -> Result<Published, RelayError> {
        let (claim, lease) = self.claim().await?;
        self.publish_and_settle(&claim, &lease, &CancellationToken::new()).await
    }

    /// Publishes until `shutdown`, then finishes what is in flight and gives back what is not begun.
    /// Whatever goes wrong is logged and tried again.
    pub async fn run(self, shutdown: CancellationToken) {
        let relay = Arc::new(self);
        let mut in_flight = JoinSet::new();
        let mut idle = relay.config.relay_poll_min;
        let mut outages = 0;
        let mut errors = 0;
        let mut checked = 0;
        while !shutdown.is_cancelled() {
            let broker = relay.stream.broker();
            if !broker.is_connected() || broker.connections() != checked || outages > 0 {
                match shutdown.run_until_cancelled(relay.stream_is_fit(outages)).await {
                    Some(connection) => checked = connection,
                    None => break,
                }
            }
            let wait = match relay.claim_and_publish(&mut in_flight, &shutdown).await {
                Ok(turn) if turn.outage => {
                    outages += 1;
                    if outages == 1 {
                        tracing::warn!("the broker takes no events; pausing until it does");
                    }
                    continue;
                }
                Ok(turn) => {
                    if outages > 0 {
                        tracing::info!("the broker takes events again");
                    }
                    (outages, errors) = (0, 0);
                    idle = if turn.claimed > 0 {
                        relay.config.relay_poll_min
                    } else {
                        (idle * 2).min(relay.config.relay_poll_max)
                    };
                    if turn.is_full {
                        continue;
                    }
                    if turn.claimed >= MANY {
                        shutdown.run_until_cancelled(tokio::time::sleep(REST)).await;
                        continue;
                    }
                    idle
                }
                Err(error) => {
                    errors += 1;
                    if errors == 1 {
                        tracing::warn!(error = describe(&error), "the relay pauses until its database answers");
                    }
                    relay.config.backoff().delay(errors).min(MAX_PAUSE)
                }
            };
            tokio::select! {
                () = shutdown.cancelled() => {}
                () = relay.nudge.nudged(), if errors == 0 => {}
                () = tokio::time::sleep(wait) => {}
            }
        }
        if let Err(error) = finish(&mut in_flight, 0).await {
            tracing::warn!(error = describe(&error), "a batch was not settled; its leases run out");
        }
    }

    /// One turn: claims a batch, and publishes it beside those in flight. So the next claim need not wait
    /// for this one's acks; a backlog, of which a full claim leaves more behind, is worth several.
    async fn claim_and_publish(
        self: &Arc<Self>,
        in_flight: &mut JoinSet<Result<Published, RelayError>>,
        shutdown: &CancellationToken,
    ) -> Result<Turn, RelayError> {
        let (claim, lease) = self.claim().await?;
        let (claimed, is_full) = (claim.events.len(), claim.seen == self.config.relay_batch);
        if claimed > 0 {
            let (relay, shutdown) = (Arc::clone(self), shutdown.clone());
            in_flight.spawn(async move { relay.publish_and_settle(&claim, &lease, &shutdown).await });
        }
        let outage = finish(in_flight, if is_full { BATCHES_IN_FLIGHT } else { 1 }).await?;
        Ok(Turn { claimed, is_full, outage })
    }

    async fn publish_and_settle(
        &self,
        claim: &Claim,
        lease: &Lease,
        shutdown: &CancellationToken,
    ) -> Result<Published, RelayError> {
        let outcomes = self.publish(claim, lease, shutdown).await;
        let batch = self.settle(claim, lease, outcomes).await?;
        if batch.claimed > 0 {
            metrics::histogram!(measure::BATCH_SECONDS).record(lease.begun.elapsed());
        }
        Ok(batch)
    }

    async fn claim(&self) -> Result<(Claim, Lease), RelayError> {
        let floor = self.floor();
        let lease = Lease::starting_now(self.config.relay_lease);
        let claiming = outbox::claim(&self.db, &self.worker, self.config.relay_lease, self.config.relay_batch, &floor);
        let claim = in_time(claiming).await?;
        metrics::histogram!(measure::CLAIM_SECONDS).record(lease.begun.elapsed());
        metrics::counter!(measure::EXPIRED_LEASES).increment(claim.expired as u64);
        if !claim.events.is_empty() {
            metrics::histogram!(measure::CLAIMED).record(claim.events.len() as f64);
            crash_point!("relay.after_claim");
        }
        self.move_floor(&claim);
        Ok((claim, lease))
    }

    /// The floor falls every second, so that whatever came due below it is found.
    fn floor(&self) -> Floor {
        let mut search = self.search.lock().unwrap_or_else(PoisonError::into_inner);
        if search.raised_at.elapsed() > Duration::from_secs(1) {
            *search = Search { floor: Floor::none(), raised_at: Instant::now() };
        }
        search.floor.clone()
    }

    fn move_floor(&self, claim: &Claim) {
        let mut search = self.search.lock().unwrap_or_else(PoisonError::into_inner);
        let is_full = claim.seen == self.config.relay_batch;
        let took_almost_nothing = claim.events.len() * 10 <= claim.seen;
        match (&claim.floor_before_oldest, &claim.floor_past_newest) {
            // A crowd that waits stands at the front: step past it, however far it reaches.
            (_, Some(past)) if is_full && took_almost_nothing => {
                *search = Search { floor: past.clone(), raised_at: Instant::now() };
            }
            // Keep off what was just published, whose index entries an old snapshot may pin.
            (Some(before), _) if is_full => search.floor = before.clone(),
            _ => search.floor = Floor::none(),
        }
    }

    /// Publishes aggregates side by side, and the events of each one after the other.
    async fn publish<'a>(&self, claim: &'a Claim, lease: &Lease, shutdown: &CancellationToken) -> Vec<Outcome<'a>> {
        let publishing: FuturesUnordered<_> = claim
            .events
            .chunk_by(ClaimedEvent::is_of_the_aggregate_of)
            .map(|events| self.publish_in_order(events, lease, shutdown))
            .collect();
        let renewing = self.keep_lease(claim, lease);
        tokio::select! {
            outcomes = publishing.concat() => outcomes,
            never = renewing => match never {},
        }
    }

    /// The events of one aggregate: each waits for the ack of the one before it, and the first that
    /// fails ends the aggregate's turn.
    async fn publish_in_order<'a>(
        &self,
        events: &'a [ClaimedEvent],
        lease: &Lease,
        shutdown: &CancellationToken,
    ) -> Vec<Outcome<'a>> {
        let mut outcomes = Vec::with_capacity(events.len());
        for event in events {
            // A publish that outlives its lease is one duplicate more, by whoever takes the lease over.
            if shutdown.is_cancelled() || lease.left() < self.config.relay_publish_timeout {
                break;
            }
            let result = self.publish_one(event).await;
            let has_failed = result.is_err();
            outcomes.push(Outcome { event, result });
            if has_failed {
                break;
            }
        }
        outcomes
    }

    async fn publish_one(&self, event: &ClaimedEvent) -> Result<(), PublishFailure> {
        let publishing = async {
            let message = to_message(event, self.stream.name()).map_err(|error| permanent(error.to_string()))?;
            self.stream.publish(message).await
        };
        let publishing = AssertUnwindSafe(publishing.instrument(self.span(event))).catch_unwind();
        let started = Instant::now();
        let result = match tokio::time::timeout(self.config.relay_publish_timeout, publishing).await {
            Ok(Ok(result)) => result,
            Ok(Err(_panic)) => Err(permanent("publishing it panicked".to_owned())),
            Err(_elapsed) => Err(PublishFailure::new(FailureKind::Timeout, "no ack in time".to_owned())),
        };
        metrics::histogram!(measure::PUBLISH_SECONDS).record(started.elapsed());
        match &result {
            Ok(ack) if ack.duplicate => metrics::counter!(measure::BROKER_DUPLICATES).increment(1),
            Ok(_) => {}
            Err(failure) => measure::count_publish_failure(&event.event_type, failure.kind),
        }
        result.map(|_ack| ())
    }

    fn span(&self, event: &ClaimedEvent) -> Span {
        let span = tracing::trace_span!(
            target: TRACE, "publish", otel.name = format!("publish {}", event.event_type), otel.kind = "producer",
            messaging.system = "nats", messaging.operation.name = "publish", messaging.operation.type = "send",
            messaging.destination.name = self.stream.name().name, messaging.message.id = %event.id,
            aggregate_id = %event.aggregate.id, attempt = event.attempts + 1,
        );
        trace::caused_by(span, event.context.as_ref().and_then(|context| context.traceparent.as_deref()))
    }

    /// Renews the lease for as long as this is polled, when half of the time in which a publish may
    /// still be started is over.
    async fn keep_lease(&self, claim: &Claim, lease: &Lease) -> std::convert::Infallible {
        let ids = outbox::column(&claim.events, |event| event.id);
        let (length, timeout) = (self.config.relay_lease, self.config.relay_publish_timeout);
        let renew_below = timeout + length.saturating_sub(timeout) / 2;
        loop {
            let wait = lease.left().saturating_sub(renew_below).max(length / 20);
            tokio::time::sleep(wait).await;
            let renewed = Lease::starting_now(self.config.relay_lease);
            match in_time(outbox::renew(&self.db, claim.lease_id, self.config.relay_lease, &ids)).await {
                Ok(kept) if kept == ids.len() => lease.extend_to(&renewed),
                // Lost, or the database is away: publishing ends by itself when the time is up.
                Ok(_) => return std::future::pending().await,
                Err(error) => tracing::debug!(error = describe(&error), "the lease was not renewed"),
            }
        }
    }

    /// Writes down what became of the batch.
    async fn settle(&self, claim: &Claim, lease: &Lease, outcomes: Vec<Outcome<'_>>) -> Result<Published, RelayError> {
        let mut batch = Published { seen: claim.seen, claimed: claim.events.len(), ..Published::default() };
        let may_pass = |outcome: &Outcome<'_>| matches!(&outcome.result, Err(failure) if failure.kind.may_pass());
        batch.outage = !outcomes.is_empty() && outcomes.iter().all(may_pass);

        let mut unsettled: HashSet<Uuid> = claim.events.iter().map(|event| event.id).collect();
        let mut published = Vec::new();
        let mut failures = Vec::new();
        for Outcome { event, result } in outcomes {
            match result {
                Ok(()) => published.push(event.id),
                // An outage counts against nobody.
                Err(_) if batch.outage => continue,
                Err(failure) => failures.push(self.failure(event, failure)),
            }
            unsettled.remove(&event.id);
        }
        let unsettled = Vec::from_iter(unsettled);

        let lease_id = claim.lease_id;
        let mut kept = 0;
        if !published.is_empty() {
            crash_point!("relay.after_ack");
            let marked = lease.retry(|| outbox::mark_published(&self.db, lease_id, &published)).await?;
            crash_point!("relay.after_mark");
            batch.published = marked.len();
            kept += batch.published;
            count_published(claim, &marked);
        }
        if !failures.is_empty() {
            let recorded = lease.retry(|| outbox::record_failures(&self.db, lease_id, &failures)).await?;
            batch.failed = failures.iter().filter(|failure| failure.retry_in.is_none()).count().min(recorded);
            batch.rescheduled = recorded - batch.failed;
            kept += recorded;
        }
        if !unsettled.is_empty() {
            batch.given_back = lease.retry(|| outbox::give_back(&self.db, lease_id, &unsettled)).await?;
            kept += batch.given_back;
        }
        batch.lost = batch.claimed - kept;
        self.report(claim, &batch);
        Ok(batch)
    }

    fn failure(&self, event: &ClaimedEvent, failure: PublishFailure) -> Failure {
        let attempt = event.attempts as u32 + 1;
        let is_final = match failure.kind {
            FailureKind::Timeout | FailureKind::Transient => false,
            FailureKind::Permanent => true,
            FailureKind::Unrecognised => attempt >= self.config.relay_max_attempts,
        };
        let retry_in = (!is_final).then(|| self.config.backoff().delay(attempt));
        let (event_id, aggregate_id, attempts, error) = (event.id, event.aggregate.id, attempt, &failure.reason);
        let context = event.context.as_ref();
        let correlation_id = context.map(|context| &*context.correlation_id);
        let trace_id = context.and_then(Context::trace_id);
        if is_final {
            measure::count(measure::FAILED, &event.event_type);
            tracing::error!(%event_id, %aggregate_id, correlation_id, trace_id, attempts, error, "the event cannot be published");
        } else {
            tracing::warn!(%event_id, %aggregate_id, correlation_id, trace_id, attempts, error, "the event was not published yet");
        }
        Failure { id: event.id, error: failure.reason, retry_in }
    }

    fn report(&self, claim: &Claim, batch: &Published) {
        if batch.lost > 0 {
            metrics::counter!(measure::LOST_LEASES).increment(batch.lost as u64);
            tracing::warn!(events = batch.lost, lease_id = %claim.lease_id, "the lease was lost before its events were settled");
        }
    }

    /// Waits, ever longer, until the broker has the stream and it is fit. Returns the connection on
    /// which that was seen.
    async fn stream_is_fit(&self, outages: u32) -> u64 {
        let broker = self.stream.broker();
        let mut failures = outages;
        loop {
            let connection = broker.connections();
            if failures > 0 {
                let wait = self.config.backoff().delay(failures).min(MAX_PAUSE);
                // A new connection is worth a look at once.
                let _ = tokio::time::timeout(wait, broker.connected_after(connection)).await;
            }
            let connection = broker.connections();
            if broker.is_connected() && self.stream.ensure().await.is_ok() {
                return connection;
            }
            failures = failures.saturating_add(1);
        }
    }
}

/// So many batches of a backlog are in flight when the next is claimed: while some wait for the broker,
/// others are settled.
const BATCHES_IN_FLIGHT: usize = 3;

/// After a claim of many the relay rests, nudged or not, until many are there again: what a claim, a mark and
/// a round of the consumer cost by themselves is shared by more events, and on a busy machine half as many
/// orders again are paid. Where events come slower than this many in each rest, it does not rest.
const MANY: usize = 25;
const REST: Duration = Duration::from_millis(25);

/// What one turn of the loop found.
#[derive(Debug)]
struct Turn {
    claimed: usize,
    is_full: bool,
    outage: bool,
}

/// Takes note of the batches that have ended, and waits until at most `may_stay` are in flight; until
/// none is, once one went wrong. Returns whether there is an outage.
async fn finish(
    in_flight: &mut JoinSet<Result<Published, RelayError>>,
    mut may_stay: usize,
) -> Result<bool, RelayError> {
    let mut finished = Ok(false);
    loop {
        let done = match in_flight.try_join_next() {
            None if in_flight.len() > may_stay => in_flight.join_next().await,
            done => done,
        };
        let Some(batch) = done else { return finished };
        // A panic goes on to whoever supervises the relay.
        match batch.unwrap_or_else(|panicked| std::panic::resume_unwind(panicked.into_panic())) {
            Ok(batch) if !batch.outage => continue,
            Ok(_) => finished = finished.map(|_| true),
            Err(error) => finished = Err(error),
        }
        may_stay = 0;
    }
}

/// However long an outage, its end is noticed within this time.
const MAX_PAUSE: Duration = Duration::from_secs(5);

#[derive(Debug)]
struct Outcome<'a> {
    event: &'a ClaimedEvent,
    result: Result<(), PublishFailure>,
}

/// The time that is surely left of a lease: counted from before the claim was sent, so that it
/// ends here no later than in the database. It compares this process with itself only.
#[derive(Debug)]
struct Lease {
    begun: Instant,
    ends: Mutex<Instant>,
}

impl Lease {
    fn starting_now(length: Duration) -> Self {
        let begun = Instant::now();
        Self { begun, ends: Mutex::new(begun + length) }
    }

    fn left(&self) -> Duration {
        self.ends.lock().unwrap_or_else(PoisonError::into_inner).saturating_duration_since(Instant::now())
    }

    fn extend_to(&self, renewed: &Lease) {
        let ends = *renewed.ends.lock().unwrap_or_else(PoisonError::into_inner);
        *self.ends.lock().unwrap_or_else(PoisonError::into_inner) = ends;
    }

    /// Tries to settle for as long as the lease lasts: what is not marked is published again.
    async fn retry<T, F>(&self, settle: impl Fn() -> F) -> Result<T, sqlx::Error>
    where
        F: Future<Output = Result<T, sqlx::Error>>,
    {
        loop {
            match in_time(settle()).await {
                Err(error) if self.left() > Duration::from_secs(1) => {
                    tracing::debug!(error = describe(&error), "the batch could not be settled yet");
                    tokio::time::sleep(Duration::from_millis(200)).await;
                }
                result => return result,
            }
        }
    }
}

fn count_published(claim: &Claim, marked: &[(Uuid, f64)]) {
    let seconds: HashMap<Uuid, f64> = marked.iter().copied().collect();
    for event in &claim.events {
        if let Some(seconds) = seconds.get(&event.id) {
            measure::count(measure::PUBLISHED, &event.event_type);
            metrics::histogram!(measure::APPEND_TO_ACK_SECONDS).record(*seconds);
            metrics::histogram!(measure::ATTEMPTS).record(f64::from(event.attempts + 1));
        }
    }
}

pub(crate) fn to_message(event: &ClaimedEvent, stream: &crate::StreamName) -> Result<Message, WireError> {
    let malformed = |name: &str, problem| WireError::Header { name: name.to_owned(), problem };
    let envelope = Envelope {
        id: event.id,
        source: stream.source.clone(),
        event_type: event.event_type.clone(),
        version: u32::try_from(event.version).map_err(|_| malformed("event_version", "negative"))?,
        aggregate_type: event.aggregate_type.clone(),
        aggregate: event.aggregate,
        time: event.time.clone().ok_or_else(|| malformed("created_at", "not a date"))?,
        context: event.context.clone().ok_or_else(|| malformed("headers", "without a correlation id"))?,
        payload: event.payload.clone().into(),
    };
    envelope.to_message(&stream.subject_prefix)
}

/// For a service whose relay runs elsewhere: passes its nudges on through the database, at most one
/// in ten milliseconds. A notification that fails is one hint less.
pub async fn forward_nudges(db: PgPool, nudge: Nudge, shutdown: CancellationToken) {
    while shutdown.run_until_cancelled(nudge.nudged()).await.is_some() {
        if let Err(error) = in_time(outbox::notify(&db)).await {
            tracing::debug!(error = describe(&error), "the relay was not woken");
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// After this time without a notification, the connection may be one that the network has dropped.
const QUIET: Duration = Duration::from_secs(60);

const LISTENS_WITHIN: Duration = Duration::from_secs(5);

/// The other end: turns the notifications of [`forward_nudges`] into nudges. While the database is
/// away the relay polls.
pub async fn receive_nudges(db: PgPool, nudge: Nudge, shutdown: CancellationToken) {
    let listening = async {
        loop {
            // A connection beside the pool's, since it is not given back: whether it is still there
            // is not known.
            let own = PgPoolOptions::new().max_connections(1).connect_lazy_with(db.connect_options().as_ref().clone());
            if let Ok(mut listener) = PgListener::connect_with(&own).await
                && matches!(timeout(LISTENS_WITHIN, listener.listen(outbox::WAKE_CHANNEL)).await, Ok(Ok(())))
            {
                while let Ok(Ok(_)) = timeout(QUIET, listener.recv()).await {
                    nudge.nudge();
                }
            }
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
    };
    shutdown.run_until_cancelled(listening).await;
}
