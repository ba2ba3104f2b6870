//! The database connection, and which of its errors say that it is away.

use std::error::Error;
use std::io;
use std::str::FromStr;
use std::time::Duration;

use sqlx::migrate::{MigrateError, Migrator};
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use sqlx::{Connection, PgExecutor, PgPool};
use tokio::time::timeout;

use crate::config::DatabaseConfig;

/// The database ends every statement before this: who has no answer by then will never get one.
const ANSWERS_WITHIN: Duration = Duration::from_secs(35);

/// A migration that takes longer is to be cut into smaller ones.
const MIGRATED_WITHIN: Duration = Duration::from_secs(15 * 60);

/// How long a connection that is not in use may take to say that it is there.
const PING_WITHIN: Duration = Duration::from_secs(1);

/// How long a connection that was there is believed to be there: to ask before each use has its cost, and
/// more requests than were under way when a database falls silent should not wait for it.
const BELIEVED_FOR: Duration = Duration::from_millis(50);

/// The outbox and inbox tables. Its own bookkeeping table lets it stand beside a service's.
fn outbox_migrations() -> Migrator {
    let mut migrator = sqlx::migrate!("../migrations/outbox");
    migrator.dangerous_set_table_name("_outbox_migrations");
    migrator
}

/// The connections of a service, at most `database_pool` in all, made when they are needed: the database
/// may be away now. Requests that pile up keep neither relay nor consumer from theirs.
#[derive(Debug, Clone)]
pub struct Pools {
    /// For what clients ask for: half of them.
    pub requests: PgPool,
    /// For the consumer and whatever else runs by itself: a quarter.
    pub work: PgPool,
    /// For the relay: a quarter, as of [`relay_pool`].
    pub relay: PgPool,
}

impl Pools {
    /// Connections to the database of `service`.
    ///
    /// # Errors
    /// One line that names the setting where the URL cannot be read.
    pub fn new(config: &DatabaseConfig, service: &str) -> Result<Self, String> {
        let options = connect_options("DATABASE_URL", &config.database_url, service)?;
        let quarter = config.database_pool / 4;
        Ok(Self {
            requests: pool(config.database_pool - 2 * quarter, options.clone()),
            work: pool(quarter, options.clone()),
            relay: pool(quarter, for_a_relay(options)),
        })
    }
}

/// At most `database_pool` connections for a relay.
///
/// # Errors
/// One line that names the setting where the URL cannot be read.
pub fn relay_pool(config: &DatabaseConfig, service: &str) -> Result<PgPool, String> {
    let options = connect_options("DATABASE_URL", &config.database_url, service)?;
    Ok(pool(config.database_pool, for_a_relay(options)))
}

fn for_a_relay(options: PgConnectOptions) -> PgConnectOptions {
    options.options([
        // A claim or a mark that a crash of the database takes back is one publication more. It takes back
        // all that came after it too, so that the order holds.
        ("synchronous_commit", "off"),
        // A plan that was made while the outbox was empty is kept while it fills.
        ("enable_seqscan", "off"),
    ])
}

fn pool(connections: u32, options: PgConnectOptions) -> PgPool {
    let pool = PgPoolOptions::new()
        .max_connections(connections)
        .acquire_timeout(Duration::from_secs(3))
        // In the place of the pool's own tests, which wait for an answer for ever. In a failover the address
        // may lead to a server that takes no writes for a moment: a session made then would be kept for good.
        // Asked after each use, and before the next only where that is some time ago: a use has its cost.
        .test_before_acquire(false)
        .before_acquire(|connection, usage| {
            let is_fresh = usage.idle_for < BELIEVED_FOR;
            Box::pin(async move { Ok(is_fresh || within_a_ping(takes_writes(connection)).await?) })
        })
        .after_release(|connection, _| Box::pin(within_a_ping(takes_writes(connection))));
    pool.connect_lazy_with(options)
}

async fn within_a_ping(asking: impl Future<Output = Result<bool, sqlx::Error>>) -> Result<bool, sqlx::Error> {
    timeout(PING_WITHIN, asking).await.unwrap_or_else(|_elapsed| Err(no_answer()))
}

/// Gives up work on the database that gets no answer any more: the network drops a connection, or the
/// database's host dies, and tells nobody. Whether the work was done is then not known.
///
/// # Errors
/// The work's own; [`is_away`] where there was no answer.
pub async fn in_time<T, E: From<sqlx::Error>>(work: impl Future<Output = Result<T, E>>) -> Result<T, E> {
    timeout(ANSWERS_WITHIN, work).await.unwrap_or_else(|_elapsed| Err(no_answer().into()))
}

fn no_answer() -> sqlx::Error {
    sqlx::Error::Io(io::Error::new(io::ErrorKind::TimedOut, "no answer"))
}

/// Asks the database whether it takes writes in this session. A standby does not.
pub(crate) async fn takes_writes(db: impl PgExecutor<'_>) -> Result<bool, sqlx::Error> {
    sqlx::query_scalar("SELECT current_setting('transaction_read_only') = 'off'").fetch_one(db).await
}

/// This text as PostgreSQL can store it: without NUL.
pub(crate) fn storable(text: &str) -> String {
    text.replace('\0', "\u{fffd}")
}

/// How to connect to the database at `url`, which `setting` names where it cannot be read.
pub(crate) fn connect_options(setting: &str, url: &str, application: &str) -> Result<PgConnectOptions, String> {
    if !["postgres://", "postgresql://"].iter().any(|scheme| url.starts_with(scheme)) {
        return Err(format!("{setting}: must begin with postgres://"));
    }
    let options = PgConnectOptions::from_str(url).map_err(|error| format!("{setting}: {error}"))?;
    Ok(options.application_name(application).options([
        // No wait without an end, whatever happens to the other side.
        ("statement_timeout", "30s"),
        ("lock_timeout", "10s"),
        ("idle_in_transaction_session_timeout", "30s"),
        ("tcp_user_timeout", "15s"),
        // Every statement here is about some keys, and no disk of today minds where it reads: look them up.
        ("random_page_cost", "1.1"),
    ]))
}

/// Brings the shared tables and then the service's own up to date. Safe with many replicas at once:
/// they queue for a lock in the database.
///
/// # Errors
/// The migrator's.
pub async fn migrate(db: &PgPool, service: &Migrator) -> Result<(), MigrateError> {
    let migrating = async {
        // On a connection that is not given back: a migration may take its time, and one that fails
        // leaves the migrator's lock behind.
        let mut connection = db.acquire().await?.detach();
        // The database lets go of the lock, too, once the network has dropped the connection.
        sqlx::raw_sql("SET statement_timeout = '15min'; SET idle_session_timeout = '1min'")
            .execute(&mut connection)
            .await?;
        outbox_migrations().run(&mut connection).await?;
        service.run(&mut connection).await?;
        connection.close().await?;
        Ok(())
    };
    timeout(MIGRATED_WITHIN, migrating).await.unwrap_or_else(|_elapsed| Err(no_answer().into()))
}

/// Does this error say that the database is away, or that this was not its fault, so that the same
/// may well succeed later? Anything else is about what was asked.
///
/// A handler's error counts too if a database error is among its causes.
pub fn is_away(error: &(dyn Error + 'static)) -> bool {
    let mut cause = Some(error);
    while let Some(error) = cause {
        if let Some(error) = error.downcast_ref::<sqlx::Error>() {
            return is_away_itself(error);
        }
        cause = error.source();
    }
    false
}

fn is_away_itself(error: &sqlx::Error) -> bool {
    let Some(refusal) = error.as_database_error() else {
        return matches!(
            error,
            sqlx::Error::Io(_)
                | sqlx::Error::Tls(_)
                | sqlx::Error::Protocol(_)
                | sqlx::Error::PoolTimedOut
                | sqlx::Error::PoolClosed
                | sqlx::Error::WorkerCrashed
        );
    };
    let code = refusal.code().unwrap_or_default();
    // https://www.postgresql.org/docs/current/errcodes-appendix.html
    match code.get(..2) {
        // Connection exceptions; too many connections, disk or memory full; shut down or starting;
        // disk and internal errors.
        Some("08" | "53" | "57" | "58") => true,
        // Serialisation failure and deadlock, lock timeout, a standby that takes no writes, a
        // session that was idle too long, a password or role being changed.
        _ => matches!(&*code, "40001" | "40P01" | "55P03" | "25006" | "25P03" | "28P01" | "28000"),
    }
}
