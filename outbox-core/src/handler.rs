//! What a service brings to a consumer.

use std::error::Error;

use sqlx::PgConnection;

use crate::event::{Envelope, WireError};

/// What a service does with the events of a stream.
pub trait Handler: Send + Sync + 'static {
    /// The service's own view of the events it knows.
    type Event: Send + Sync;
    /// What [`Handler::prepare`] found out or brought about.
    type Prepared: Send + Sync;

    /// Reads an event. `None` for a type that this service does not know: it takes its place in its
    /// aggregate's order and has no effect.
    ///
    /// # Errors
    /// [`WireError`]: the event becomes a dead letter. An unknown version of a known type is one.
    fn decode(&self, envelope: &Envelope) -> Result<Option<Self::Event>, WireError>;

    /// External effects, outside any transaction. May run again for the same event, here or in
    /// another instance: `envelope.id` is the idempotency key.
    fn prepare(
        &self,
        envelope: &Envelope,
        event: &Self::Event,
    ) -> impl Future<Output = Result<Self::Prepared, HandleError>> + Send;

    /// The effect, in the transaction that records the events as processed. They are new, in stream
    /// order, and at most one of each aggregate.
    fn apply(
        &self,
        tx: &mut PgConnection,
        events: &[Incoming<'_, Self::Event, Self::Prepared>],
    ) -> impl Future<Output = Result<(), HandleError>> + Send;
}

/// An event as [`Handler::apply`] is given it.
#[derive(Debug)]
pub struct Incoming<'a, E, P> {
    /// Its identity and order.
    pub envelope: &'a Envelope,
    /// What it says.
    pub event: &'a E,
    /// What was prepared for it.
    pub prepared: &'a P,
}

/// Why a handler did not handle an event.
#[derive(Debug)]
pub enum HandleError {
    /// Try again later; the default of `?`.
    Retry(Box<dyn Error + Send + Sync>),
    /// Never: the event becomes a dead letter for this reason.
    Reject(String),
}

impl<E: Error + Send + Sync + 'static> From<E> for HandleError {
    fn from(error: E) -> Self {
        Self::Retry(Box::new(error))
    }
}
