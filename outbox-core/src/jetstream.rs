//! The broker: one connection, the stream a service publishes to, and what an answer means.

use std::collections::BTreeMap;
use std::str::FromStr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_nats::connection::State;
use async_nats::jetstream::context::{
    Context as JetStream, ContextBuilder, CreateStreamErrorKind, GetStreamErrorKind, PublishError, PublishErrorKind,
};
use async_nats::jetstream::stream::ConsumerErrorKind;
use async_nats::jetstream::{self, ErrorCode, consumer, stream};
use async_nats::{Client, ConnectOptions, HeaderMap, HeaderName, HeaderValue, ServerAddr};
use percent_encoding::percent_decode_str;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::config::{BrokerConfig, ConsumerConfig, StreamConfig, at_least};
use crate::crash_point;
use crate::database::storable;
use crate::event::{Message, StreamPosition};
use crate::process::Health;

/// How long any request to the broker, other than a publish, may take.
pub(crate) const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);

/// How long a silent broker is believed to be there before it is asked; three questions without an
/// answer and the connection is made anew. A network that drops a connection tells nobody.
const PING_INTERVAL: Duration = Duration::from_secs(5);

/// How often a stream that could not be made is tried.
const STREAM_RETRY: Duration = Duration::from_secs(1);

/// A durable consumer, to pull from.
pub(crate) type PullConsumer = consumer::Consumer<consumer::pull::Config>;

/// The names of a service's stream: the contract with its consumers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StreamName {
    /// The stream, such as `ORDERS`.
    pub name: String,
    /// What its subjects begin with, such as `orders` for `orders.*`.
    pub subject_prefix: String,
    /// The service its events come from, such as `/order-service`.
    pub source: String,
}

impl StreamName {
    /// All of the stream's subjects.
    pub fn subjects(&self) -> String {
        format!("{}.*", self.subject_prefix)
    }
}

/// Why the broker could not be used.
#[derive(Debug, thiserror::Error)]
pub enum BrokerError {
    /// A setting that can never work.
    #[error("{0}")]
    Setting(String),
    /// The stream is not there.
    #[error("stream {0} does not exist")]
    NoStream(String),
    /// What is there would break the promise, until an operator mends it.
    #[error("{0}")]
    Unfit(String),
    /// Anything that may pass.
    #[error("the broker did not do as asked: {0}")]
    Request(String),
}

/// A connection that is made in the background and made again whenever it breaks.
#[derive(Debug, Clone)]
pub struct Broker {
    client: Client,
    connections: watch::Receiver<u64>,
}

impl Broker {
    /// Begins to connect as `service`, which names the connection and its inbox, and returns at
    /// once: the broker may be away.
    ///
    /// # Errors
    /// [`BrokerError::Setting`] where an address cannot be understood.
    pub async fn connect(config: &BrokerConfig, service: &str) -> Result<Self, BrokerError> {
        let servers = config.servers().map_err(BrokerError::Setting)?;
        let (connected, connections) = watch::channel(0);
        let client = credentials(&servers)
            .name(service)
            // An inbox of its own, so that the broker can refuse it everybody else's.
            .custom_inbox_prefix(format!("_INBOX_{service}"))
            .request_timeout(Some(REQUEST_TIMEOUT))
            .ping_interval(PING_INTERVAL)
            .retry_on_initial_connect()
            .event_callback(log_event(connected))
            .connect(servers)
            .await
            .map_err(|error| BrokerError::Setting(format!("NATS_URL: {error}")))?;
        Ok(Self { client, connections })
    }

    /// Is there a connection now?
    pub fn is_connected(&self) -> bool {
        self.client.connection_state() == State::Connected
    }

    /// Messages that the consumer has not been given yet, and those it has not acknowledged yet.
    pub(crate) async fn lag(&self, subscription: &Subscription) -> Result<(u64, u64), BrokerError> {
        let context = self.jetstream(REQUEST_TIMEOUT);
        let stream = context.get_stream_no_info(&subscription.stream.name).await.map_err(request)?;
        let info = stream.consumer_info(&subscription.durable).await.map_err(request)?;
        Ok((info.num_pending, info.num_ack_pending as u64))
    }

    /// Waits until what was sent, acknowledgements above all, has left this process. Without a
    /// connection it never will, and is sent again by whoever misses it.
    pub async fn flush(&self) {
        if !self.is_connected() {
            return;
        }
        let _ = tokio::time::timeout(Duration::from_secs(1), self.client.flush()).await;
    }

    /// A number that rises with every connection made: what was checked on one is checked again.
    pub(crate) fn connections(&self) -> u64 {
        *self.connections.borrow()
    }

    /// Waits for a connection after that one.
    pub(crate) async fn connected_after(&self, connection: u64) {
        if self.connections.clone().wait_for(|count| *count > connection).await.is_err() {
            std::future::pending().await
        }
    }

    pub(crate) fn jetstream(&self, timeout: Duration) -> JetStream {
        ContextBuilder::new().timeout(timeout).build(self.client.clone())
    }

    /// Makes the durable consumer, or brings its settings up to date. An inbox that would forget what
    /// the stream still delivers is refused.
    pub(crate) async fn durable_consumer(
        &self,
        subscription: &Subscription,
        config: &ConsumerConfig,
    ) -> Result<PullConsumer, BrokerError> {
        let context = self.jetstream(REQUEST_TIMEOUT);
        let stream = get_stream(&context, &subscription.stream.name).await?;
        let longest = age(&stream).saturating_add(config.retention.relay_retention);
        let bound = format!("max_age of stream {} plus RELAY_RETENTION", subscription.stream.name);
        at_least("INBOX_RETENTION", config.retention.inbox_retention, &bound, longest).map_err(BrokerError::Unfit)?;
        let durable = consumer::pull::Config {
            durable_name: Some(subscription.durable.clone()),
            filter_subject: subscription.stream.subjects(),
            deliver_policy: consumer::DeliverPolicy::All,
            ack_policy: consumer::AckPolicy::Explicit,
            ack_wait: config.consumer_ack_wait,
            // The inbox, not the broker, decides when to give up.
            max_deliver: -1,
            ..Default::default()
        };
        let refusal = match stream.create_consumer(durable).await {
            Ok(durable) => return Ok(durable),
            Err(error) => match error.kind() {
                ConsumerErrorKind::JetStream(refusal) => refusal,
                _ => return Err(request(error)),
            },
        };
        // The broker changes its other settings, and these only where the consumer is made anew.
        let found = stream.consumer_info(&subscription.durable).await.map_err(request)?.config;
        let (deliver, ack) = (word(found.deliver_policy), word(found.ack_policy));
        let reason = match (&*deliver, &*ack) {
            ("all", "explicit") => refusal.to_string(),
            ("all", _) => format!("ack_policy is {ack}, must be explicit"),
            _ => format!("deliver_policy is {deliver}, must be all"),
        };
        let (consumer, stream) = (&subscription.durable, &subscription.stream.name);
        Err(BrokerError::Unfit(format!("consumer {consumer} of stream {stream}: {reason}")))
    }
}

/// Who consumes what: the stream of another service, under a durable name of one's own.
#[derive(Debug, Clone)]
pub struct Subscription {
    /// The stream to read.
    pub stream: StreamName,
    /// The durable consumer's name and, in the inbox, the consumer's: the consuming service's.
    pub durable: String,
}

/// The stream that a service owns and publishes to.
#[derive(Debug, Clone)]
pub struct Stream {
    broker: Broker,
    context: JetStream,
    name: StreamName,
    /// Nothing where it is not to be made.
    config: Option<StreamConfig>,
}

impl Stream {
    /// The stream `name`, with `config` where it has to be made; an ack is awaited for
    /// `publish_timeout`.
    pub fn new(broker: Broker, name: StreamName, config: StreamConfig, publish_timeout: Duration) -> Self {
        Self { context: broker.jetstream(publish_timeout), broker, name, config: Some(config) }
    }

    /// The stream `name`, which must be there.
    pub fn existing(broker: Broker, name: StreamName, publish_timeout: Duration) -> Self {
        Self { context: broker.jetstream(publish_timeout), broker, name, config: None }
    }

    /// The stream's names.
    pub fn name(&self) -> &StreamName {
        &self.name
    }

    /// The connection it is reached over.
    pub fn broker(&self) -> &Broker {
        &self.broker
    }

    /// Makes the stream if it is not there. One that is there is left as it is, and must be fit.
    ///
    /// # Errors
    /// [`BrokerError::Unfit`] where it would lose events, or [`BrokerError::Request`].
    pub async fn ensure(&self) -> Result<(), BrokerError> {
        let context = self.broker.jetstream(REQUEST_TIMEOUT);
        match get_stream(&context, &self.name.name).await {
            Ok(stream) => return self.check(&stream),
            Err(BrokerError::NoStream(_)) => {}
            Err(error) => return Err(error),
        }
        let Some(settings) = &self.config else { return Err(BrokerError::NoStream(self.name.name.clone())) };
        let config = stream::Config {
            name: self.name.name.clone(),
            subjects: vec![self.name.subjects()],
            storage: stream::StorageType::File,
            retention: stream::RetentionPolicy::Limits,
            // Refuse new events rather than drop old ones: what is refused stays in the outbox.
            discard: stream::DiscardPolicy::New,
            max_age: settings.stream_max_age,
            max_bytes: settings.stream_max_bytes.unwrap_or(-1),
            duplicate_window: settings.stream_duplicate_window,
            num_replicas: settings.stream_replicas,
            ..Default::default()
        };
        match context.create_stream(config).await {
            Ok(_) => {
                tracing::info!(stream = self.name.name, "made the stream");
                Ok(())
            }
            // Another replica was faster, with other settings; whether those will do is checked.
            Err(error)
                if matches!(error.kind(), CreateStreamErrorKind::JetStream(error)
                    if error.error_code() == ErrorCode::STREAM_NAME_EXIST) =>
            {
                self.check(&get_stream(&context, &self.name.name).await?)
            }
            Err(error) => Err(request(error)),
        }
    }

    fn check(&self, stream: &stream::Stream) -> Result<(), BrokerError> {
        let (name, config) = (&self.name.name, &stream.cached_info().config);
        let unfit = |line: String| Err(BrokerError::Unfit(line));
        for (setting, value, must_be) in [
            ("discard", word(config.discard), "new"),
            ("retention", word(config.retention), "limits"),
            ("storage", word(config.storage), "file"),
        ] {
            if value != must_be {
                return unfit(format!("stream {name}: {setting} is {value}, must be {must_be}: it would lose events"));
            }
        }
        if config.max_messages_per_subject > 0 && !config.discard_new_per_subject {
            return unfit(format!(
                "stream {name}: max_msgs_per_subject is {}, must be -1 unless discard_new_per_subject is set: it would \
                 lose events",
                config.max_messages_per_subject
            ));
        }
        if !config.subjects.contains(&self.name.subjects()) {
            return unfit(format!(
                "stream {name}: subjects are {:?}, must contain {}",
                config.subjects,
                self.name.subjects()
            ));
        }
        let Some(settings) = &self.config else { return Ok(()) };
        let setting = format!("stream {name}: max_age");
        at_least(&setting, age(stream), "STREAM_MAX_AGE", settings.stream_max_age).map_err(BrokerError::Unfit)
    }

    /// Makes the stream as soon as the broker answers, and looks at it again with every connection.
    /// Readiness is red until it is there and fit.
    pub async fn keep(self, health: Health, shutdown: CancellationToken) {
        let mut connections = self.broker.connections.clone();
        let keeping = async {
            loop {
                connections.mark_unchanged();
                match self.ensure().await {
                    Ok(()) => {
                        health.recover("stream");
                        if connections.changed().await.is_err() {
                            std::future::pending::<()>().await;
                        }
                    }
                    Err(error) => {
                        health.fail("stream", error.to_string());
                        let _ = tokio::time::timeout(STREAM_RETRY, connections.changed()).await;
                    }
                }
            }
        };
        shutdown.run_until_cancelled(keeping).await;
    }

    /// Publishes one message and waits for the stream's ack. Nothing else counts as published.
    pub(crate) async fn publish(&self, message: Message) -> Result<Ack, PublishFailure> {
        let mut headers = HeaderMap::new();
        for (name, value) in &message.headers {
            headers.insert(
                HeaderName::from_str(name).map_err(|error| permanent(format!("header {name}: {error}")))?,
                HeaderValue::from_str(value).map_err(|error| permanent(format!("header {name}: {error}")))?,
            );
        }
        let sent = self.context.publish_with_headers(message.subject, headers, message.payload).await;
        let ack = sent.map_err(|error| classify(&error))?;
        crash_point!("relay.after_publish");
        let ack = ack.await.map_err(|error| classify(&error))?;
        if ack.stream != self.name.name {
            return Err(PublishFailure::new(
                FailureKind::Unrecognised,
                format!("acknowledged by stream {}", ack.stream),
            ));
        }
        Ok(Ack { duplicate: ack.duplicate })
    }
}

/// A choice as the broker writes it.
fn word(choice: impl std::fmt::Debug) -> String {
    format!("{choice:?}").to_lowercase()
}

/// How long the stream keeps a message; the broker writes "for ever" as nothing.
fn age(stream: &stream::Stream) -> Duration {
    let max_age = stream.cached_info().config.max_age;
    if max_age.is_zero() { Duration::MAX } else { max_age }
}

pub(crate) async fn get_stream(context: &JetStream, name: &str) -> Result<stream::Stream, BrokerError> {
    context.get_stream(name).await.map_err(|error| match error.kind() {
        GetStreamErrorKind::JetStream(cause) if cause.error_code() == ErrorCode::STREAM_NOT_FOUND => {
            BrokerError::NoStream(name.to_owned())
        }
        _ => request(error),
    })
}

/// The stream has the message.
#[derive(Debug)]
pub(crate) struct Ack {
    /// It had it before, under the same message id and within its duplicate window.
    pub(crate) duplicate: bool,
}

/// Why a message was not acknowledged, for a relay to decide by and for a person to read.
#[derive(Debug)]
pub(crate) struct PublishFailure {
    pub(crate) kind: FailureKind,
    pub(crate) reason: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FailureKind {
    /// No ack in time; may pass.
    Timeout,
    /// May pass; says nothing about the message.
    Transient,
    /// This message will never be taken.
    Permanent,
    /// An answer that is neither known to pass nor known to stay.
    Unrecognised,
}

impl FailureKind {
    pub(crate) fn may_pass(self) -> bool {
        matches!(self, Self::Timeout | Self::Transient)
    }
}

impl PublishFailure {
    pub(crate) fn new(kind: FailureKind, reason: String) -> Self {
        Self { kind, reason }
    }
}

pub(crate) fn permanent(reason: String) -> PublishFailure {
    PublishFailure::new(FailureKind::Permanent, reason)
}

fn classify(error: &PublishError) -> PublishFailure {
    use std::error::Error as _;
    let refusal = error.source().and_then(|source| source.downcast_ref::<jetstream::Error>());
    let kind = match error.kind() {
        PublishErrorKind::TimedOut => FailureKind::Timeout,
        PublishErrorKind::StreamNotFound | PublishErrorKind::BrokenPipe | PublishErrorKind::MaxAckPending => {
            FailureKind::Transient
        }
        PublishErrorKind::MaxPayloadExceeded => FailureKind::Permanent,
        _ => refusal.map_or(FailureKind::Unrecognised, |refusal| kind_of(refusal.error_code())),
    };
    PublishFailure::new(kind, refusal.map_or_else(|| describe(error), |refusal| refusal.to_string()))
}

/// What JetStream's own codes say of trying again. Names and numbers: nats-server's errors.json.
fn kind_of(code: ErrorCode) -> FailureKind {
    match code {
        // The stream is full and refuses new messages.
        ErrorCode::STREAM_STORE_FAILED
        // The server or its disk is, or the cluster has no leader for the stream just now.
        | ErrorCode::ACCOUNT_RESOURCES_EXCEEDED
        | ErrorCode::INSUFFICIENT_RESOURCES
        | ErrorCode::STORAGE_RESOURCES_EXCEEDED
        | ErrorCode::MEMORY_RESOURCES_EXCEEDED
        | ErrorCode::CLUSTER_NOT_AVAILABLE
        | ErrorCode::CLUSTER_NO_PEERS
        | ErrorCode::JETSTREAM_NOT_ENABLED
        | ErrorCode::STREAM_NOT_FOUND
        | ErrorCode::STREAM_OFFLINE
        // The same message id is being stored at this moment.
        | ErrorCode::STREAM_DUPLICATE_MESSAGE_CONFLICT => FailureKind::Transient,
        ErrorCode::STREAM_MESSAGE_EXCEEDS_MAXIMUM | ErrorCode::STREAM_HEADER_EXCEEDS_MAXIMUM => FailureKind::Permanent,
        _ => FailureKind::Unrecognised,
    }
}

/// The message as the rest of the library knows it.
pub(crate) fn received(message: &jetstream::Message) -> Message {
    let position = message.info().ok();
    Message {
        subject: message.subject.to_string(),
        headers: message.headers.as_ref().map(readable).unwrap_or_default(),
        payload: message.payload.clone(),
        position: position
            .map(|info| StreamPosition { stream: info.stream.to_owned(), sequence: info.stream_sequence }),
    }
}

/// Headers as PostgreSQL can store them.
fn readable(headers: &HeaderMap) -> BTreeMap<String, String> {
    let first = |(name, values): (&HeaderName, &Vec<HeaderValue>)| {
        let value = values.first().map(|value| storable(value.as_str())).unwrap_or_default();
        (name.to_string(), value)
    };
    headers.iter().map(first).collect()
}

/// Logs what the client reports. A broker that is away is reported again and again: what was said
/// last is not repeated.
fn log_event(connections: watch::Sender<u64>) -> impl Fn(async_nats::Event) -> std::future::Ready<()> + Send + Sync {
    let last = Arc::new(Mutex::new(String::new()));
    move |event| {
        let said = event.to_string();
        let mut last = last.lock().unwrap_or_else(PoisonError::into_inner);
        let is_news = *last != said;
        match event {
            async_nats::Event::Connected => {
                tracing::info!("connected to the broker");
                connections.send_modify(|count| *count += 1);
            }
            async_nats::Event::Disconnected if is_news => tracing::warn!("disconnected from the broker"),
            // A denied publish or subscription shows here only.
            async_nats::Event::ServerError(error) if is_news => tracing::error!(%error, "the broker refused"),
            async_nats::Event::ClientError(error) if is_news => tracing::warn!(%error, "the broker cannot be reached"),
            other => tracing::debug!(event = %other, "broker client"),
        }
        *last = said;
        std::future::ready(())
    }
}

/// The user and password of the first address that names them, as in `nats://user:password@host`: the
/// client itself leaves them aside.
fn credentials(servers: &[ServerAddr]) -> ConnectOptions {
    let named = servers.iter().find_map(|server| Some((server.username()?, server.password()?)));
    let decode = |text: &str| percent_decode_str(text).decode_utf8_lossy().into_owned();
    match named {
        Some((user, password)) => ConnectOptions::with_user_and_password(decode(user), decode(password)),
        None => ConnectOptions::new(),
    }
}

pub(crate) fn request(error: impl std::error::Error) -> BrokerError {
    BrokerError::Request(describe(&error))
}

/// An error with its causes, on one line.
pub(crate) fn describe(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let reason = error.to_string();
        if !text.contains(&reason) {
            text = format!("{text}: {reason}");
        }
        cause = error.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_stream_may_pass_and_a_message_too_large_for_it_may_not() {
        assert_eq!(kind_of(ErrorCode::STREAM_STORE_FAILED), FailureKind::Transient);
        assert_eq!(kind_of(ErrorCode::STREAM_MESSAGE_EXCEEDS_MAXIMUM), FailureKind::Permanent);
        assert_eq!(kind_of(ErrorCode(19999)), FailureKind::Unrecognised);
    }
}
