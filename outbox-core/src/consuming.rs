//! The loops around the consumer's steps: messages are pulled, delivered and acknowledged, parked
//! events are looked after, and both pause while what they need is away.

use std::pin::{Pin, pin};
use std::time::Duration;

use async_nats::jetstream::consumer::pull;
use async_nats::jetstream::{self, AckKind};
use futures::stream::ReadyChunks;
use futures::{FutureExt, StreamExt};
use tokio::task::unconstrained;
use tokio_util::sync::CancellationToken;

use crate::backoff::Backoff;
use crate::consumer::{Consumer, Delivery};
use crate::crash_point;
use crate::event::Message;
use crate::handler::Handler;
use crate::jetstream::{Broker, BrokerError, PullConsumer, describe, received, request};
use crate::process::Health;

/// How often the parked events are looked at where nothing wakes them.
const PARKED_POLL: Duration = Duration::from_secs(1);

/// How long the broker keeps a request for messages: the shorter, the sooner a shutdown; the longer,
/// the less is said while nothing happens.
const PULL_EXPIRES: Duration = Duration::from_millis(500);

/// How the consumer waits for a stream that is not there, or a pull that broke.
const STREAM_RETRY: Backoff = Backoff { base: Duration::from_millis(100), max: MAX_PAUSE };

/// However long the database or the broker is away, its return is noticed within this time.
const MAX_PAUSE: Duration = Duration::from_secs(5);

/// A request for messages, and what comes of it.
struct Pull {
    most: usize,
    missing: usize,
    batches: ReadyChunks<pull::Batch>,
}

impl<H: Handler> Consumer<H> {
    /// Consumes from `broker` until `shutdown`, then finishes the batch in hand. Whatever goes wrong
    /// is logged and tried again.
    /// What of the broker's would break the promise turns readiness red and is waited for.
    pub async fn run(self, broker: Broker, health: Health, shutdown: CancellationToken) {
        tokio::join!(self.run_stream(&broker, &health, &shutdown), self.run_parked(&shutdown));
        broker.flush().await;
    }

    async fn run_parked(&self, shutdown: &CancellationToken) {
        let poll = PARKED_POLL.min(self.config.consumer_backoff_max);
        while shutdown.run_until_cancelled(tokio::time::sleep(poll)).await.is_some() {
            let is_full = |handled: &Vec<Delivery>| handled.len() == self.config.consumer_batch;
            // A database that is away is reported by the other loop.
            while let Ok((handled, woken)) = self.handle_parked().await
                && (woken > 0 || is_full(&handled))
                && !shutdown.is_cancelled()
            {}
        }
    }

    async fn run_stream(&self, broker: &Broker, health: &Health, shutdown: &CancellationToken) {
        let mut failures = 0;
        let mut last_said = String::new();
        loop {
            let connection = broker.connections();
            let making = broker.durable_consumer(&self.subscription, &self.config);
            let Some(made) = shutdown.run_until_cancelled(making).await else { return };
            match made {
                Ok(durable) => {
                    failures = 0;
                    last_said.clear();
                    health.recover("consumer");
                    self.consume(&durable, broker.connected_after(connection), shutdown).await;
                }
                Err(error) => {
                    failures += 1;
                    let reason = error.to_string();
                    if matches!(error, BrokerError::Unfit(_)) {
                        health.fail("consumer", reason.clone());
                    }
                    if last_said != reason {
                        tracing::warn!(reason, "the consumer waits for its stream");
                        last_said = reason;
                    }
                }
            }
            let wait = STREAM_RETRY.delay(failures);
            shutdown.run_until_cancelled(tokio::time::sleep(wait)).await;
        }
    }

    /// Consumes until `shutdown`, or until the consumer must be looked at anew: a pull broke, or there
    /// is a new connection.
    async fn consume(&self, from: &PullConsumer, reconnected: impl Future<Output = ()>, shutdown: &CancellationToken) {
        let mut unanswered = pin!(
            async {
                tokio::select! {
                    () = reconnected => {}
                    () = shutdown.cancelled() => tokio::time::sleep(2 * PULL_EXPIRES).await,
                }
            }
            .fuse()
        );
        let consuming = async {
            // A message whose headers the client cannot read breaks the connection, and takes along all that
            // were asked for with it. So each pull begins with one, and grows as it goes well.
            let mut pull = self.ask(from, 1).await?;
            loop {
                pull = match self.consume_pull(from, &mut pull, unanswered.as_mut(), shutdown).await? {
                    Some(next) => next,
                    None if shutdown.is_cancelled() => return Ok(()),
                    None => self.ask(from, pull.most).await?,
                };
            }
        };
        let consumed: Result<(), BrokerError> = consuming.await;
        if let Err(error) = consumed {
            tracing::debug!(error = describe(&error), "the pull is made anew");
        }
    }

    /// Asks the broker for messages. The request is short, and its end is waited for even at a shutdown:
    /// a message that is on its way to nobody is missed until the ack wait is over.
    async fn ask(&self, from: &PullConsumer, most: usize) -> Result<Pull, BrokerError> {
        let batch = from.batch().max_messages(most).expires(PULL_EXPIRES).messages().await.map_err(request)?;
        Ok(Pull { most, missing: most, batches: batch.ready_chunks(most) })
    }

    /// Consumes what comes of one request. Once all of it is here, a larger one is made, so that its
    /// messages come while these are handled; it is returned.
    async fn consume_pull(
        &self,
        from: &PullConsumer,
        pull: &mut Pull,
        mut unanswered: Pin<&mut impl Future<Output = ()>>,
        shutdown: &CancellationToken,
    ) -> Result<Option<Pull>, BrokerError> {
        let mut next = None;
        loop {
            let batch = tokio::select! {
                biased;
                () = &mut unanswered => return Err(BrokerError::Request("nothing more comes on this connection".to_owned())),
                // Unconstrained: all that is there, not as much as the runtime finds fair to hand out at once.
                batch = unconstrained(pull.batches.next()) => batch,
            };
            let Some(batch) = batch else { return Ok(next) };
            let size = batch.len();
            let messages: Vec<_> = batch.into_iter().map_while(Result::ok).collect();
            if shutdown.is_cancelled() {
                // Fetched and not begun: another instance may have them at once.
                acknowledge(&messages, AckKind::Nak(None)).await;
                continue;
            }
            pull.missing -= messages.len();
            if pull.missing == 0 {
                next = Some(self.ask(from, (2 * pull.most).min(self.config.consumer_batch)).await?);
            }
            let outages = self.outage().batches;
            self.deliver_and_acknowledge(&messages, shutdown).await;
            if messages.len() < size {
                return Err(BrokerError::Request("the pull broke".to_owned()));
            }
            if self.outage().batches > outages {
                let wait = self.config.backoff().delay(self.outage().batches);
                shutdown.run_until_cancelled(tokio::time::sleep(wait)).await;
            }
        }
    }

    /// Steps 1 to 5, again and again while the database is away. The broker is kept from delivering
    /// the messages elsewhere in the meantime.
    async fn deliver_and_acknowledge(&self, messages: &[jetstream::Message], shutdown: &CancellationToken) {
        crash_point!("consumer.after_fetch");
        let batch: Vec<Message> = messages.iter().map(received).collect();
        let delivering = async {
            let mut failures = 0;
            while let Err(error) = self.deliver(&batch).await {
                failures += 1;
                if failures == 1 {
                    tracing::warn!(error = describe(&error), "the consumer pauses until the database answers");
                }
                let wait = self.config.backoff().delay(failures).min(MAX_PAUSE);
                if shutdown.run_until_cancelled(tokio::time::sleep(wait)).await.is_none() {
                    return AckKind::Nak(None);
                }
            }
            AckKind::Ack
        };
        let extending = async {
            loop {
                tokio::time::sleep(self.config.consumer_ack_wait / 3).await;
                acknowledge(messages, AckKind::Progress).await;
            }
        };
        let verdict = tokio::select! {
            verdict = delivering => verdict,
            () = extending => AckKind::Progress,
        };
        acknowledge(messages, verdict).await;
        crash_point!("consumer.after_acknowledge");
    }
}

/// Step 5. An acknowledgement that gets lost is one redelivery more.
async fn acknowledge(messages: impl IntoIterator<Item = &jetstream::Message>, kind: AckKind) {
    for message in messages {
        if let Err(error) = message.ack_with(kind).await {
            tracing::debug!(%error, "a message was not acknowledged");
        }
    }
}
