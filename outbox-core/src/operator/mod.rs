//! The operator's side: what `outboxctl` shows of an outbox and an inbox, and what it does to them.
//!
//! Whatever changes something is a dry run unless it is [`Really::Yes`], is safe beside running
//! relays, consumers and other operators, and is recorded in `operator_actions`.
//!
//! - [`Operator::status`], [`Operator::list`], [`Operator::show`] only look.
//! - [`Operator::requeue`], [`Operator::release`], [`Operator::purge`] mend the outbox.
//! - [`Operator::replay`], [`Operator::rebuild`] publish again what was published.
//! - [`Operator::dead_letters`], [`Operator::retry`], [`Operator::discard`] are about the inbox.
//! - [`audit()`] compares everything two services have told each other.

mod action;
mod audit;
mod letters;
mod look;
mod repair;
mod resend;
mod selection;
mod status;
mod stream;

use std::time::Duration;

use sqlx::PgPool;
use sqlx::postgres::PgPoolOptions;
use time::OffsetDateTime;
use uuid::Uuid;

use crate::database::connect_options;
use crate::event::WireError;
use crate::jetstream::{BrokerError, StreamName, describe};
use crate::outbox;

pub use crate::gauges::OldTransaction;
pub use audit::{Audit, BusinessTable, Finding, Kind, Side, audit};
pub use letters::{DeadLetter, DeadLetterContents, Settled};
pub use look::{EventRow, Filter, InboxRecord, SequenceRow, Shown, State};
pub use repair::Repaired;
pub use resend::{Progress, Resent};
pub use selection::{Scope, Selection, TypeScope};
pub use status::{BlockedAggregate, CountOfParked, Lease, Status};
pub use stream::{ConsumerStatus, Copy, StreamStatus, await_connection, consumers_named, first_copy, stream_status};

/// Does it, or says what it would do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Really {
    Yes,
    DryRun,
}

/// Why something could not be shown or done.
#[derive(Debug, thiserror::Error)]
pub enum OperatorError {
    /// The database is away, or refused.
    #[error("the database did not do as asked: {}", describe(.0))]
    Database(#[from] sqlx::Error),
    /// The broker is away, or refused.
    #[error(transparent)]
    Broker(#[from] BrokerError),
    /// The service has never run on this database.
    #[error("this database does not say whose outbox it holds: start its service once")]
    NoSource,
    /// There is no such event.
    #[error("event {0} is not in this outbox")]
    NoEvent(Uuid),
    /// A row that never can be sent.
    #[error("event {0} cannot be sent: {1}")]
    Unsendable(Uuid, WireError),
    /// Somebody does not answer any more.
    #[error("given up after {}", humantime::format_duration(*.0))]
    GaveUp(Duration),
    /// The stream did not take an event.
    #[error("event {0} was not published: {1}")]
    NotPublished(Uuid, String),
}

/// Somebody who looks at one service's database, or repairs it.
#[derive(Debug, Clone)]
pub struct Operator {
    db: PgPool,
    who: String,
}

/// A point in time, as an operator writes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Moment {
    At(OffsetDateTime),
    Ago(Duration),
}

impl Operator {
    /// On the database at `url`, which `setting` names in complaints; `who` is for the record.
    ///
    /// # Errors
    /// One line that names the setting where the URL cannot be read.
    pub fn connect(setting: &str, url: &str, who: &str) -> Result<Self, String> {
        let options = connect_options(setting, url, "outboxctl")?.options([
            // To look at everything that is retained takes its time.
            ("statement_timeout", "15min"),
            ("work_mem", "64MB"),
            // Times are shown as the database writes them.
            ("TimeZone", "UTC"),
        ]);
        let pool = PgPoolOptions::new().max_connections(4).acquire_timeout(Duration::from_secs(5));
        Ok(Self { db: pool.connect_lazy_with(options), who: who.to_owned() })
    }

    /// Whose outbox this is.
    ///
    /// # Errors
    /// [`OperatorError::NoSource`] where nobody has said so yet.
    pub async fn source(&self) -> Result<StreamName, OperatorError> {
        outbox::source(&self.db).await?.ok_or(OperatorError::NoSource)
    }

    /// What `moment` is by the database's clock.
    ///
    /// # Errors
    /// The database's.
    pub async fn at(&self, moment: Moment) -> Result<OffsetDateTime, OperatorError> {
        match moment {
            Moment::At(time) => Ok(time),
            Moment::Ago(age) => {
                let asking = sqlx::query_scalar("SELECT now() - $1::interval").bind(outbox::interval(age));
                Ok(asking.fetch_one(&self.db).await?)
            }
        }
    }
}

impl StreamName {
    /// The name of the service that owns the stream: its durable consumers' name, and its inbox's.
    pub fn service(&self) -> &str {
        self.source.trim_start_matches('/')
    }
}
