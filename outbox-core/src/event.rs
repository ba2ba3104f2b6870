//! Events, and the form they have on the wire: CloudEvents 1.0, NATS binding, binary mode.
//!
//! The binding is the working draft of the CloudEvents project (release 1.0.2 knows structured
//! mode only): attributes travel as `ce-` headers, percent-encoded, and the payload as it is.

use std::collections::BTreeMap;

use bytes::Bytes;
use percent_encoding::{AsciiSet, CONTROLS, percent_decode_str, utf8_percent_encode};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use uuid::Uuid;

/// A fact about one aggregate. The constants are the wire contract and never change for a given
/// meaning: a new shape of the payload is a new `VERSION`.
pub trait Event: Serialize {
    /// The kind of aggregate the fact is about, such as `order`.
    const AGGREGATE: &'static str;
    /// The name of the fact, such as `OrderCreated`; the last token of its subject.
    const TYPE: &'static str;
    /// The version of the payload's shape.
    const VERSION: u32 = 1;
}

/// An aggregate and the version it has after a change: the number of the event that tells of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AggregateVersion {
    /// The aggregate's id.
    pub id: Uuid,
    /// Starts at 1 and rises by one with every event of the aggregate.
    pub sequence: i64,
}

/// What travels with an event from the request that caused it to everything that follows.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Context {
    /// Names the request; the same in every log line and event that follows from it.
    #[serde(rename = "correlationid")]
    pub correlation_id: String,
    /// W3C trace context of the span that appended the event, if there was one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub traceparent: Option<String>,
}

impl Context {
    /// The trace's id, for the log.
    pub(crate) fn trace_id(&self) -> Option<&str> {
        Some(self.traceparent.as_deref()?.split('-').nth(1).unwrap_or_default())
    }
}

/// A message as a broker carries it: what the relay sends and what a consumer is given.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Message {
    /// Where it is published, such as `orders.OrderCreated`.
    pub subject: String,
    /// Header names in lower case, except the broker's own; values as they are on the wire.
    pub headers: BTreeMap<String, String>,
    /// The event's payload, JSON.
    pub payload: Bytes,
    /// Which message of which stream it is; known once the broker has stored it.
    pub position: Option<StreamPosition>,
}

/// The place of a message in its stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StreamPosition {
    /// The stream's name.
    pub stream: String,
    /// The stream's own number of the message.
    pub sequence: u64,
}

/// An event as its consumer sees it: the attributes read, the payload still bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Envelope {
    /// The event_id: the same however often and by whatever path the event arrives.
    pub id: Uuid,
    /// The service that the event comes from, such as `/order-service`.
    pub source: String,
    /// [`Event::TYPE`].
    pub event_type: String,
    /// [`Event::VERSION`].
    pub version: u32,
    /// [`Event::AGGREGATE`].
    pub aggregate_type: String,
    /// The aggregate and this event's number in it.
    pub aggregate: AggregateVersion,
    /// When it was appended, RFC 3339, by the clock of the producer's database.
    pub time: String,
    /// Correlation id and trace context of its cause.
    pub context: Context,
    /// The payload, JSON.
    pub payload: Bytes,
}

/// Why an event cannot be sent, or a message not be read. Trying again will not help.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum WireError {
    /// An attribute is missing or does not have the form it must have.
    #[error("header {name} is {problem}")]
    Header {
        /// The header's name.
        name: String,
        /// What is wrong with it.
        problem: &'static str,
    },
    /// The event type is not one token of a subject.
    #[error("event type {0:?} cannot be part of a subject")]
    Subject(String),
    /// The payload is not the JSON that the consumer expects of this type and version.
    #[error("payload is not a valid {event_type}: {problem}")]
    Payload {
        /// The event's type.
        event_type: String,
        /// The parser's complaint, without the payload.
        problem: String,
    },
    /// The type is known, this version of it is not.
    #[error("version {version} of {event_type} is unknown")]
    UnknownVersion {
        /// The event's type.
        event_type: String,
        /// Its version.
        version: u32,
    },
}

/// What the binding has encoded: anything outside visible ASCII, the quote and the percent sign.
const ENCODED: &AsciiSet = &CONTROLS.add(b' ').add(b'"').add(b'%');

const SPEC_VERSION: &str = "ce-specversion";
pub(crate) const ID: &str = "ce-id";
const SOURCE: &str = "ce-source";
const TYPE: &str = "ce-type";
const TIME: &str = "ce-time";
const AGGREGATE_ID: &str = "ce-subject";
const SEQUENCE: &str = "ce-sequence";
const AGGREGATE_TYPE: &str = "ce-aggregatetype";
const VERSION: &str = "ce-dataschemaversion";
const TRACEPARENT: &str = "ce-traceparent";
const CORRELATION_ID: &str = "ce-correlationid";
/// The broker drops a message whose id it saw within the stream's duplicate window.
pub const MESSAGE_ID: &str = "Nats-Msg-Id";

impl Envelope {
    /// The message that carries this event on `<subject_prefix>.<event type>`.
    ///
    /// # Errors
    /// [`WireError::Subject`] where the event type cannot be the last token of a subject.
    pub fn to_message(&self, subject_prefix: &str) -> Result<Message, WireError> {
        let is_token = |c: char| c.is_ascii_graphic() && !matches!(c, '.' | '*' | '>');
        if self.event_type.is_empty() || !self.event_type.chars().all(is_token) {
            return Err(WireError::Subject(self.event_type.clone()));
        }
        let id = self.id.to_string();
        let mut headers: BTreeMap<String, String> = [
            (SPEC_VERSION, "1.0".to_owned()),
            (ID, id.clone()),
            (SOURCE, encode(&self.source)),
            (TYPE, encode(&self.event_type)),
            (TIME, encode(&self.time)),
            (AGGREGATE_ID, self.aggregate.id.to_string()),
            (SEQUENCE, self.aggregate.sequence.to_string()),
            (AGGREGATE_TYPE, encode(&self.aggregate_type)),
            (VERSION, self.version.to_string()),
            (CORRELATION_ID, encode(&self.context.correlation_id)),
            ("ce-datacontenttype", "application/json".to_owned()),
            ("content-type", "application/json".to_owned()),
            (MESSAGE_ID, id),
        ]
        .map(|(name, value)| (name.to_owned(), value))
        .into();
        if let Some(traceparent) = &self.context.traceparent {
            headers.insert(TRACEPARENT.to_owned(), encode(traceparent));
        }
        Ok(Message {
            subject: format!("{subject_prefix}.{}", self.event_type),
            headers,
            payload: self.payload.clone(),
            position: None,
        })
    }

    /// Reads the attributes of a message. A tolerant reader: headers it does not know, and the
    /// message id, mean nothing to it.
    ///
    /// # Errors
    /// [`WireError::Header`] names the first attribute that is missing or malformed.
    pub fn read(message: &Message) -> Result<Self, WireError> {
        let attributes = Attributes(&message.headers);
        if attributes.text(SPEC_VERSION)? != "1.0" {
            return Err(malformed(SPEC_VERSION, "not 1.0"));
        }
        let sequence: i64 = attributes.parsed(SEQUENCE, "not a number")?;
        if sequence < 1 {
            return Err(malformed(SEQUENCE, "below 1"));
        }
        Ok(Self {
            id: attributes.parsed(ID, "not a UUID")?,
            source: attributes.text(SOURCE)?,
            event_type: attributes.text(TYPE)?,
            version: attributes.parsed(VERSION, "not a number")?,
            aggregate_type: attributes.text(AGGREGATE_TYPE)?,
            aggregate: AggregateVersion { id: attributes.parsed(AGGREGATE_ID, "not a UUID")?, sequence },
            time: attributes.optional(TIME)?.unwrap_or_default(),
            context: Context {
                // An event from a producer that knows no correlation id correlates with itself.
                correlation_id: match attributes.optional(CORRELATION_ID)? {
                    Some(id) => id,
                    None => attributes.text(ID)?,
                },
                traceparent: attributes.optional(TRACEPARENT)?,
            },
            payload: message.payload.clone(),
        })
    }

    /// Reads the payload as `T`, the consumer's own view of this type and version.
    ///
    /// # Errors
    /// [`WireError::Payload`] where it is not.
    pub fn payload<T: DeserializeOwned>(&self) -> Result<T, WireError> {
        serde_json::from_slice(&self.payload)
            .map_err(|error| WireError::Payload { event_type: self.event_type.clone(), problem: error.to_string() })
    }

    /// The answer to a type that the consumer knows in a version that it does not.
    pub fn unknown_version(&self) -> WireError {
        WireError::UnknownVersion { event_type: self.event_type.clone(), version: self.version }
    }
}

/// What can be told of the event in a message that [`Envelope::read`] refused, if anything.
pub(crate) fn legible_id(message: &Message) -> Option<Uuid> {
    Attributes(&message.headers).parsed(ID, "not a UUID").ok()
}

/// In bytes: PostgreSQL takes nothing much longer into an index.
const LONGEST: usize = 1_000;

struct Attributes<'a>(&'a BTreeMap<String, String>);

impl Attributes<'_> {
    fn optional(&self, name: &str) -> Result<Option<String>, WireError> {
        let Some(value) = self.0.get(name) else { return Ok(None) };
        let decoded = percent_decode_str(value).decode_utf8();
        match decoded {
            // PostgreSQL stores no NUL in a text.
            Ok(text) if !text.contains('\0') => Ok(Some(text.into_owned())),
            _ => Err(malformed(name, "not percent-encoded UTF-8")),
        }
    }

    fn text(&self, name: &str) -> Result<String, WireError> {
        match self.optional(name)? {
            Some(text) if text.is_empty() => Err(malformed(name, "empty")),
            Some(text) if text.len() > LONGEST => Err(malformed(name, "too long")),
            Some(text) => Ok(text),
            None => Err(malformed(name, "missing")),
        }
    }

    fn parsed<T: std::str::FromStr>(&self, name: &str, problem: &'static str) -> Result<T, WireError> {
        self.text(name)?.parse().map_err(|_| malformed(name, problem))
    }
}

fn encode(value: &str) -> String {
    utf8_percent_encode(value, ENCODED).to_string()
}

fn malformed(name: &str, problem: &'static str) -> WireError {
    WireError::Header { name: name.to_owned(), problem }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn envelope() -> Envelope {
        Envelope {
            id: Uuid::now_v7(),
            source: "/tests".into(),
            event_type: "ThingHappened".into(),
            version: 3,
            aggregate_type: "thing".into(),
            aggregate: AggregateVersion { id: Uuid::now_v7(), sequence: 7 },
            time: "2026-01-02T03:04:05.000006Z".into(),
            context: Context { correlation_id: "käse \"50%\"".into(), traceparent: Some("00-1-2-01".into()) },
            payload: Bytes::from_static(b"{}"),
        }
    }

    #[test]
    fn an_event_reads_back_as_it_was_written() {
        let written = envelope();
        let message = written.to_message("things").unwrap();
        assert_eq!(message.subject, "things.ThingHappened");
        assert_eq!(Envelope::read(&message), Ok(written));
    }

    #[test]
    fn header_values_are_visible_ascii_on_the_wire() {
        let message = envelope().to_message("things").unwrap();
        assert_eq!(message.headers[CORRELATION_ID], "k%C3%A4se%20%2250%25%22");
        assert!(message.headers.values().all(|value| value.bytes().all(|b| b.is_ascii_graphic())));
    }

    #[test]
    fn a_type_that_is_not_one_subject_token_cannot_be_sent() {
        for event_type in ["", "a.b", "a b", "*", ">", "naïve", "a\0"] {
            let event = Envelope { event_type: event_type.into(), ..envelope() };
            assert_eq!(event.to_message("things"), Err(WireError::Subject(event_type.into())));
        }
    }

    #[test]
    fn a_message_without_a_needed_attribute_names_it() {
        for name in [SPEC_VERSION, ID, SOURCE, TYPE, AGGREGATE_ID, SEQUENCE, AGGREGATE_TYPE, VERSION] {
            let mut message = envelope().to_message("things").unwrap();
            message.headers.remove(name);
            assert_eq!(Envelope::read(&message), Err(malformed(name, "missing")));
        }
    }

    #[test]
    fn malformed_attributes_are_refused_one_by_one() {
        for (name, value, problem) in [
            (SPEC_VERSION, "0.3", "not 1.0"),
            (ID, "7", "not a UUID"),
            (AGGREGATE_ID, "order", "not a UUID"),
            (SEQUENCE, "0", "below 1"),
            (SEQUENCE, "9223372036854775808", "not a number"),
            (VERSION, "-1", "not a number"),
            (SOURCE, "", "empty"),
            (TYPE, "%00", "not percent-encoded UTF-8"),
            (TYPE, "%ff", "not percent-encoded UTF-8"),
        ] {
            let mut message = envelope().to_message("things").unwrap();
            message.headers.insert(name.into(), value.into());
            assert_eq!(Envelope::read(&message), Err(malformed(name, problem)), "{name}: {value}");
        }
    }
}
