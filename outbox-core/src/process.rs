//! A process: tasks that are watched, a way to stop, and what an operator can ask it.

use std::collections::{BTreeMap, HashMap};
use std::io::ErrorKind;
use std::net::SocketAddr;
use std::process::ExitCode;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::IntoResponse;
use axum::routing::get;
use axum::{Json, Router};
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use metrics_exporter_prometheus::PrometheusHandle;
use sqlx::PgPool;
use sqlx::migrate::{MigrateError, Migrator};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::signal::unix::{SignalKind, signal};
use tokio::task::{Id, JoinError, JoinSet};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::config::ProcessConfig;
use crate::database::{in_time, is_away, migrate, takes_writes};
use crate::jetstream::{Broker, StreamName, describe};
use crate::measure;
use crate::outbox::write_source;

/// What readiness waits for before anything else: that all of the process's tasks run.
const START: &str = "start";

/// What readiness is red for at the end.
const STOP: &str = "stop";

/// How often a database that is away at start is tried.
const DATABASE_RETRY: Duration = Duration::from_secs(1);

/// How long a listener waits when the process can have no more connections.
const ACCEPT_RETRY: Duration = Duration::from_secs(1);

/// How long a connection may be there without the whole head of a request: longer than balancers keep one
/// that is idle.
const HEAD_WITHIN: Duration = Duration::from_secs(75);

/// Tasks that run for as long as the process does. If one ends by itself, the process says so, stops
/// the others and ends with a non-zero code.
#[derive(Debug)]
pub struct Process {
    tasks: JoinSet<()>,
    names: HashMap<Id, &'static str>,
    shutdown: CancellationToken,
    writes: TaskTracker,
    health: Health,
    grace: Duration,
}

impl Process {
    /// A process without tasks yet.
    pub fn new(config: &ProcessConfig) -> Self {
        let mut process = Self {
            tasks: JoinSet::new(),
            names: HashMap::new(),
            shutdown: CancellationToken::new(),
            writes: TaskTracker::new(),
            health: Health::default(),
            grace: config.shutdown_grace,
        };
        process.health.fail(START, "still starting".to_owned());
        // This makes the recorder: before the first metric is counted.
        process.supervise("metrics", measure::fold_histograms(measure::handle(), process.shutdown()));
        process
    }

    /// Cancelled when the process is to stop.
    pub fn shutdown(&self) -> CancellationToken {
        self.shutdown.clone()
    }

    /// Writes that must run to their end, whoever waits for them.
    pub fn writes(&self) -> TaskTracker {
        self.writes.clone()
    }

    /// What readiness is made of.
    pub fn health(&self) -> Health {
        self.health.clone()
    }

    /// Starts a task that must not end before the shutdown.
    pub fn supervise(&mut self, name: &'static str, task: impl Future<Output = ()> + Send + 'static) {
        let handle = self.tasks.spawn(task);
        self.names.insert(handle.id(), name);
        metrics::gauge!(measure::TASK_UP, "task" => name).set(1.0);
    }

    /// Serves `router` until the shutdown, then lets open requests finish for half the grace period.
    pub fn serve(&mut self, name: &'static str, listener: TcpListener, router: Router) {
        let (shutdown, drain) = (self.shutdown(), self.grace / 2);
        self.supervise(name, serve(listener, router, HEAD_WITHIN, shutdown, drain));
    }

    /// Serves the admin listener's `router` to the very end: that the process stops, and why, is asked then.
    pub fn serve_admin(&self, listener: TcpListener, router: Router) {
        tokio::spawn(serve(listener, router, HEAD_WITHIN, CancellationToken::new(), Duration::ZERO));
        metrics::gauge!(measure::TASK_UP, "task" => "admin").set(1.0);
    }

    /// Migrates the database, unless another role does that, and says in it whose outbox it holds.
    /// Waits for a database that is away. Returns an exit code where the process cannot go on.
    pub async fn prepare_database(
        &self,
        db: &PgPool,
        migrations: Option<Migrator>,
        stream: &StreamName,
    ) -> Option<ExitCode> {
        let preparing = async {
            let mut last_said = String::new();
            loop {
                let error = match try_prepare(db, migrations.as_ref(), stream).await {
                    Ok(()) => break None,
                    Err(error) => error,
                };
                let reason = describe(&error);
                if !is_away(&error) && migrations.is_some() {
                    tracing::error!(reason, "the database cannot be migrated");
                    break Some(ExitCode::FAILURE);
                }
                if last_said != reason {
                    tracing::warn!(reason, "the service waits for its database");
                    last_said.clone_from(&reason);
                }
                self.health.fail("database", reason);
                tokio::time::sleep(DATABASE_RETRY).await;
            }
        };
        tokio::select! {
            code = preparing => {
                self.health.recover("database");
                code
            }
            () = self.stopped() => Some(ExitCode::SUCCESS),
        }
    }

    /// Waits for SIGTERM or SIGINT: for what comes before [`Process::run`].
    pub async fn stopped(&self) {
        stop_signal().await;
    }

    /// Runs until SIGTERM, SIGINT or the end of a task; then stops within the grace period, whatever
    /// a client holds open.
    pub async fn run(mut self) -> ExitCode {
        self.health.recover(START);
        let code = tokio::select! {
            () = stop_signal() => {
                tracing::info!("stopping");
                ExitCode::SUCCESS
            }
            Some(ended) = self.tasks.join_next_with_id() => {
                self.report(ended);
                ExitCode::FAILURE
            }
        };
        self.health.fail(STOP, "stopping".to_owned());
        self.shutdown.cancel();
        self.writes.close();
        let stopping = async {
            while let Some(ended) = self.tasks.join_next().await {
                if let Err(error) = ended {
                    tracing::error!(%error, "a task panicked while it stopped");
                }
            }
            self.writes.wait().await;
        };
        // With a reserve, so that the process has ended when the grace period does.
        if tokio::time::timeout(self.grace.mul_f64(0.9), stopping).await.is_err() {
            tracing::warn!(grace_seconds = self.grace.as_secs_f64(), "stopped without waiting any longer");
        }
        code
    }

    fn report(&self, ended: Result<(Id, ()), JoinError>) {
        let (id, how) = match ended {
            Ok((id, ())) => (id, "ended".to_owned()),
            Err(error) => (error.id(), error.to_string()),
        };
        let task = self.names.get(&id).copied().unwrap_or("unnamed");
        tracing::error!(task, how, "a task ended that must not; stopping");
        self.health.fail(task, how);
        metrics::gauge!(measure::TASK_UP, "task" => task).set(0.0);
    }
}

async fn try_prepare(db: &PgPool, migrations: Option<&Migrator>, stream: &StreamName) -> Result<(), MigrateError> {
    if let Some(migrations) = migrations {
        migrate(db, migrations).await?;
    }
    Ok(in_time(write_source(db, stream)).await?)
}

/// The `migrate` command of a service.
pub async fn migrate_and_exit(db: &PgPool, migrations: &Migrator) -> ExitCode {
    match migrate(db, migrations).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => complain(&describe(&error)),
    }
}

async fn stop_signal() {
    let wait = async |kind| match signal(kind) {
        Ok(mut signal) => _ = signal.recv().await,
        Err(error) => {
            tracing::error!(%error, "signals cannot be received; kill -9 is the only way to stop");
            std::future::pending().await
        }
    };
    tokio::select! {
        () = wait(SignalKind::terminate()) => {}
        () = wait(SignalKind::interrupt()) => {}
    }
}

/// Why the process is not ready, by the part that says so.
#[derive(Debug, Clone, Default)]
pub struct Health(Arc<Mutex<BTreeMap<&'static str, String>>>);

impl Health {
    /// Readiness is red until `part` recovers.
    pub fn fail(&self, part: &'static str, reason: String) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).insert(part, reason);
    }

    /// Takes back [`Health::fail`].
    pub fn recover(&self, part: &'static str) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).remove(part);
    }

    /// Do the process's tasks not run yet?
    pub(crate) fn is_starting(&self) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).contains_key(START)
    }

    fn reasons(&self) -> BTreeMap<&'static str, String> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// The admin listener's pages: `/health/live`, `/health/ready`, `/metrics`.
pub fn admin(health: Health, db: PgPool, broker: Broker) -> Router {
    Router::new()
        .route("/health/live", get(|| async { "live\n" }))
        .route("/health/ready", get(ready))
        .route("/metrics", get(metrics_page))
        .with_state(Admin { health, db, broker, metrics: measure::handle() })
}

#[derive(Clone)]
struct Admin {
    health: Health,
    db: PgPool,
    broker: Broker,
    metrics: PrometheusHandle,
}

async fn ready(State(admin): State<Admin>) -> impl IntoResponse {
    let mut reasons = admin.health.reasons();
    match tokio::time::timeout(Duration::from_secs(2), takes_writes(&admin.db)).await {
        Ok(Ok(true)) => {}
        Ok(Ok(false)) => _ = reasons.insert("database", "takes no writes".to_owned()),
        Ok(Err(error)) => _ = reasons.insert("database", error.to_string()),
        Err(_elapsed) => _ = reasons.insert("database", "no answer in 2 seconds".to_owned()),
    }
    if !admin.broker.is_connected() {
        reasons.insert("broker", "not connected".to_owned());
    }
    if reasons.is_empty() {
        (StatusCode::OK, Json(serde_json::json!({"status": "ready"})))
    } else {
        (StatusCode::SERVICE_UNAVAILABLE, Json(serde_json::json!({"status": "not ready", "reasons": reasons})))
    }
}

async fn metrics_page(State(admin): State<Admin>) -> impl IntoResponse {
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4")], admin.metrics.render())
}

/// Binds an address; the error is one line that names the setting.
///
/// # Errors
/// The address is taken, or is not this machine's.
pub async fn bind(setting: &str, address: SocketAddr) -> Result<TcpListener, String> {
    TcpListener::bind(address).await.map_err(|error| format!("{setting}: {address}: {error}"))
}

/// Serves until `shutdown`, then lets open requests finish for at most `drain`. In the place of axum's own
/// loop, which lets a client keep its connection for ever with half the head of a request.
async fn serve(
    listener: TcpListener,
    router: Router,
    head_within: Duration,
    shutdown: CancellationToken,
    drain: Duration,
) {
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(head_within);
    let open = GracefulShutdown::new();
    while let Some(accepted) = shutdown.run_until_cancelled(listener.accept()).await {
        match accepted {
            Ok((client, _)) => {
                let connection = http.serve_connection(TokioIo::new(client), TowerToHyperService::new(router.clone()));
                // What breaks a connection is its client's to know.
                tokio::spawn(open.watch(connection));
            }
            Err(error) if error.kind() == ErrorKind::ConnectionAborted => {}
            // Too many are open: some will be closed.
            Err(error) => {
                tracing::warn!(%error, "no connection can be accepted");
                tokio::time::sleep(ACCEPT_RETRY).await;
            }
        }
    }
    drop(listener);
    if tokio::time::timeout(drain, open.shutdown()).await.is_err() {
        tracing::warn!("connections were still open and are cut");
    }
}

/// Asks an admin listener whether its process is ready: the health check of a container that has no
/// shell and no curl.
pub async fn check_health(admin_addr: SocketAddr) -> ExitCode {
    let asking = async {
        let mut stream = TcpStream::connect(admin_addr).await?;
        stream.write_all(b"GET /health/ready HTTP/1.0\r\n\r\n").await?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await?;
        Ok::<_, std::io::Error>(answer)
    };
    match tokio::time::timeout(Duration::from_secs(4), asking).await {
        Ok(Ok(answer)) if answer.split(' ').nth(1) == Some("200") => ExitCode::SUCCESS,
        Ok(Ok(answer)) => complain(answer.lines().last().unwrap_or("no answer")),
        Ok(Err(error)) => complain(&format!("{admin_addr}: {error}")),
        Err(_elapsed) => complain(&format!("{admin_addr}: no answer in 4 seconds")),
    }
}

fn complain(line: &str) -> ExitCode {
    eprintln!("{line}");
    ExitCode::FAILURE
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_client_that_does_not_finish_the_head_of_its_request_is_cut_off_and_others_are_served() {
        let listener = bind("HTTP_ADDR", ([127, 0, 0, 1], 0).into()).await.unwrap();
        let address = listener.local_addr().unwrap();
        let router = Router::new().route("/", get(|| async { "hello" }));
        let head_within = Duration::from_millis(500);
        tokio::spawn(serve(listener, router, head_within, CancellationToken::new(), Duration::ZERO));
        let read_all = async |request: &[u8]| {
            let mut client = TcpStream::connect(address).await.unwrap();
            client.write_all(request).await.unwrap();
            let mut answer = String::new();
            let reading = client.read_to_string(&mut answer);
            // Cut off with or without a reset.
            let _ = tokio::time::timeout(60 * head_within, reading).await.expect("the connection ends");
            answer
        };
        let (silent, half, whole) = tokio::join!(
            read_all(b""),
            read_all(b"GET / HTTP/1.1\r\nhost"),
            read_all(b"GET / HTTP/1.1\r\nhost: test\r\n\r\n"),
        );
        assert_eq!((silent.as_str(), half.as_str()), ("", ""));
        assert!(whole.ends_with("hello"), "{whole}");
    }
}
