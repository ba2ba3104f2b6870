//! What the broker knows: streams, their messages, and how far consumers have come.

use std::time::Duration;

use async_nats::HeaderMap;
use async_nats::jetstream::Message;
use async_nats::jetstream::consumer::{self, AckPolicy, DeliverPolicy, pull};
use futures::{StreamExt, TryStreamExt};
use serde::Serialize;
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;
use uuid::Uuid;

use crate::event::ID;
use crate::jetstream::{Broker, BrokerError, REQUEST_TIMEOUT, StreamName, get_stream, request};

/// How many messages a reader asks for at once, and how long the stream may keep it waiting for the next.
const PAGE: usize = 1_000;
const NEXT_MESSAGE_WITHIN: Duration = Duration::from_secs(10);

/// How long the broker remembers a reader that has gone.
const READER_FORGOTTEN_AFTER: Duration = Duration::from_secs(30);

/// How far a clock may be off.
const CLOCKS: Duration = Duration::from_secs(60);

/// A stream, as the broker describes it.
#[derive(Debug, Clone, Serialize)]
#[allow(missing_docs)]
pub struct StreamStatus {
    pub name: String,
    pub messages: u64,
    pub bytes: u64,
    pub first_sequence: u64,
    pub last_sequence: u64,
    /// Nothing where messages stay for ever.
    pub max_age_seconds: Option<f64>,
    pub consumers: Vec<ConsumerStatus>,
}

/// A durable consumer, as the broker describes it.
#[derive(Debug, Clone, Serialize)]
#[allow(missing_docs)]
pub struct ConsumerStatus {
    pub stream: String,
    pub name: String,
    /// Messages that it has not been given yet: its lag.
    pub pending: u64,
    /// Messages that it was given and has not acknowledged.
    pub ack_pending: u64,
    pub redelivered: u64,
    /// The stream's number of the last message it was given.
    pub delivered_up_to: u64,
    /// The stream's number up to which it has acknowledged everything.
    pub acknowledged_up_to: u64,
    /// For so long it was given nothing and has acknowledged nothing, as far as this machine's clock can tell.
    pub idle_seconds: f64,
}

impl From<consumer::Info> for ConsumerStatus {
    fn from(info: consumer::Info) -> Self {
        let moved = [Some(info.created), info.delivered.last_active, info.ack_floor.last_active].into_iter().flatten();
        let idle = moved.max().map(|moved| OffsetDateTime::now_utc() - moved);
        Self {
            stream: info.stream_name,
            name: info.name,
            pending: info.num_pending,
            ack_pending: info.num_ack_pending as u64,
            redelivered: info.num_redelivered as u64,
            delivered_up_to: info.delivered.stream_sequence,
            acknowledged_up_to: info.ack_floor.stream_sequence,
            idle_seconds: idle.map_or(0.0, |idle| idle.as_seconds_f64().max(0.0)),
        }
    }
}

/// One message of an event.
#[derive(Debug, Clone, Serialize)]
#[allow(missing_docs)]
pub struct Copy {
    pub stream: String,
    pub sequence: u64,
    pub stored_at: String,
}

/// Waits for the connection.
///
/// # Errors
/// [`BrokerError::Request`] where there is none within five seconds.
pub async fn await_connection(broker: &Broker) -> Result<(), BrokerError> {
    let connecting = tokio::time::timeout(REQUEST_TIMEOUT, broker.connected_after(0));
    connecting.await.map_err(|_elapsed| BrokerError::Request("it cannot be reached".to_owned()))
}

/// What the broker says of a stream and its durable consumers.
///
/// # Errors
/// [`BrokerError::NoStream`], or [`BrokerError::Request`].
pub async fn stream_status(broker: &Broker, name: &str) -> Result<StreamStatus, BrokerError> {
    let stream = get_stream(&broker.jetstream(REQUEST_TIMEOUT), name).await?;
    let info = stream.cached_info();
    let max_age = info.config.max_age;
    let consumers: Vec<consumer::Info> = stream.consumers().try_collect().await.map_err(request)?;
    let durable = consumers.into_iter().filter(|info| info.config.durable_name.is_some());
    Ok(StreamStatus {
        name: info.config.name.clone(),
        messages: info.state.messages,
        bytes: info.state.bytes,
        first_sequence: info.state.first_sequence,
        last_sequence: info.state.last_sequence,
        max_age_seconds: (!max_age.is_zero()).then_some(max_age.as_secs_f64()),
        consumers: durable.map(ConsumerStatus::from).collect(),
    })
}

/// The consumers of this durable name, on whichever streams they are: how far a service is behind others.
///
/// # Errors
/// [`BrokerError::Request`].
pub async fn consumers_named(broker: &Broker, durable: &str) -> Result<Vec<ConsumerStatus>, BrokerError> {
    let context = broker.jetstream(REQUEST_TIMEOUT);
    let streams: Vec<String> = context.stream_names().try_collect().await.map_err(request)?;
    let asking = futures::stream::iter(streams).map(async |name| {
        let stream = context.get_stream_no_info(&name).await.ok()?;
        stream.consumer_info(durable).await.ok().map(ConsumerStatus::from)
    });
    Ok(asking.buffer_unordered(16).filter_map(std::future::ready).collect().await)
}

/// Where the stream first stored an event that was published then.
///
/// # Errors
/// [`BrokerError`].
pub async fn first_copy(
    broker: &Broker,
    name: &StreamName,
    event_id: Uuid,
    event_type: &str,
    published_at: OffsetDateTime,
) -> Result<Option<Copy>, BrokerError> {
    let search = pull::Config {
        filter_subject: format!("{}.{event_type}", name.subject_prefix),
        deliver_policy: DeliverPolicy::ByStartTime { start_time: published_at - CLOCKS },
        ..pull::Config::default()
    };
    let mut found = None;
    read_headers(broker, &name.name, search, |message| {
        let Ok(info) = message.info() else { return true };
        if id_in(message.headers.as_ref()) == Some(event_id) {
            let (stream, sequence) = (info.stream.to_owned(), info.stream_sequence);
            found = Some(Copy { stream, sequence, stored_at: rfc3339(info.published) });
        }
        found.is_none() && info.published < published_at + CLOCKS
    })
    .await?;
    Ok(found)
}

/// The ids of all events in a stream, sorted; none where there is no stream.
pub(super) async fn event_ids(broker: &Broker, name: &str) -> Result<Vec<Uuid>, BrokerError> {
    let mut ids = Vec::new();
    let reading = read_headers(broker, name, pull::Config::default(), |message| {
        ids.extend(id_in(message.headers.as_ref()));
        true
    });
    match reading.await {
        Ok(()) | Err(BrokerError::NoStream(_)) => {}
        Err(error) => return Err(error),
    }
    ids.sort_unstable();
    ids.dedup();
    Ok(ids)
}

/// Hands the headers of the messages that are in a stream now to `read`, in their order, until `read` has
/// seen enough. What is published meanwhile is not read, so that it ends however fast events come.
async fn read_headers(
    broker: &Broker,
    name: &str,
    config: pull::Config,
    mut read: impl FnMut(&Message) -> bool,
) -> Result<(), BrokerError> {
    let stream = get_stream(&broker.jetstream(REQUEST_TIMEOUT), name).await?;
    // A reader without a name, which leaves nothing behind. Nothing is delivered to it twice: what it
    // misses shows as a gap in its numbers.
    let config = pull::Config {
        headers_only: true,
        ack_policy: AckPolicy::None,
        inactive_threshold: READER_FORGOTTEN_AFTER,
        memory_storage: true,
        num_replicas: 1,
        ..config
    };
    let mut reader = stream.create_consumer(config).await.map_err(request)?;
    let there_are = reader.cached_info().num_pending;
    let halted = |how: &str| BrokerError::Request(format!("reading stream {name} {how}"));
    let mut seen = 0;
    while seen < there_are {
        let page = PAGE.min((there_are - seen) as usize);
        let mut messages = reader.fetch().max_messages(page).messages().await.map_err(request)?;
        let seen_before = seen;
        while let Some(message) = tokio::time::timeout(NEXT_MESSAGE_WITHIN, messages.next())
            .await
            .map_err(|_elapsed| halted("came to a halt"))?
        {
            let message = message.map_err(|error| halted(&format!("ended: {error}")))?;
            seen += 1;
            if message.info().map_or(true, |info| info.consumer_sequence != seen) {
                return Err(halted("was interrupted"));
            }
            if !read(&message) {
                return Ok(());
            }
        }
        // Fewer than there were: the stream has dropped some since, by age.
        if seen == seen_before {
            return match reader.info().await.map_err(request)?.num_pending {
                0 => Ok(()),
                _ => Err(halted("came to a halt")),
            };
        }
    }
    Ok(())
}

fn rfc3339(time: OffsetDateTime) -> String {
    // Only years beyond 9999 cannot be written so.
    time.format(&Rfc3339).unwrap_or_else(|_| time.to_string())
}

fn id_in(headers: Option<&HeaderMap>) -> Option<Uuid> {
    headers?.get(ID)?.as_str().parse().ok()
}
