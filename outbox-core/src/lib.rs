//! Transactional outbox, ordered relay and idempotent inbox, on PostgreSQL and NATS JetStream.
//!
//! The promise: a committed event is never lost; it may be sent twice; a second delivery has no
//! second effect; the events of one aggregate take effect in order.
//!
//! - [`append`] records an event in the caller's transaction, beside the change it tells of.
//! - [`Relay`] brings committed events to the service's [`Stream`].
//! - [`Consumer`] gives the events of another service's stream their effect, through a [`Handler`].
//! - [`Process`] watches the tasks that do this, and stops them.

pub mod config;
#[doc(hidden)]
pub mod crash;
pub mod http;
pub mod measure;
pub mod operator;
pub mod telemetry;

mod backoff;
mod consumer;
mod consuming;
mod database;
mod event;
mod gauges;
mod handler;
mod inbox;
mod jetstream;
mod outage;
mod outbox;
mod process;
mod relay;
mod retention;
mod trace;

pub use backoff::Backoff;
pub use consumer::{Consumer, ConsumerError, Delivery};
pub use database::{Pools, in_time, is_away, migrate, relay_pool};
pub use event::{AggregateVersion, Context, Envelope, Event, MESSAGE_ID, Message, StreamPosition, WireError};
pub use gauges::Gauges;
pub use handler::{HandleError, Handler, Incoming};
pub use jetstream::{Broker, BrokerError, Stream, StreamName, Subscription};
pub use outbox::{AppendError, NewEvent, append, append_all, source, write_source};
pub use process::{Health, Process, admin, bind, check_health, migrate_and_exit};
pub use relay::{Nudge, Published, Relay, RelayError, forward_nudges, receive_nudges};
pub use retention::Retention;
