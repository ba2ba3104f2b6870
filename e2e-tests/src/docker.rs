//! Servers in containers.

use std::process::{Command, Output};
use std::sync::LazyLock;
use std::time::Duration;

use anyhow::Context;
use rustix::process::Signal;
use testcontainers::bollard::models::PortBinding;
use testcontainers::core::IntoContainerPort;
use testcontainers::runners::AsyncRunner;
use testcontainers::{ContainerRequest, GenericImage, ImageExt};
use tokio::runtime::Runtime;
use tokio::time::timeout;
use uuid::Uuid;

use crate::find::run;
use crate::keeper::AtEnd;
use crate::progress::say;

const ENGINE_ANSWERS_WITHIN: Duration = Duration::from_secs(10);
const PULLED_WITHIN: Duration = Duration::from_secs(120);

/// The client's connections belong to the runtime that made them, and every test has its own.
static RUNTIME: LazyLock<Runtime> =
    LazyLock::new(|| Runtime::new().expect("a runtime for the Docker client can be made"));

/// An image with a server.
pub(crate) struct Image {
    pub(crate) name: &'static str,
    pub(crate) tag: &'static str,
    pub(crate) port: u16,
}

impl Image {
    /// Makes sure that an engine answers and has the image, which is pulled if need be.
    pub(crate) async fn fetch(&self) -> anyhow::Result<()> {
        let reference = format!("{}:{}", self.name, self.tag);
        timeout(ENGINE_ANSWERS_WITHIN, docker(["version"])).await.context("no engine answers")?.context("no engine")?;
        if docker(["image", "inspect", &reference]).await.is_ok() {
            return Ok(());
        }
        say(&format!("pulling {reference}"));
        let pulling = RUNTIME.spawn(GenericImage::new(self.name, self.tag).pull_image());
        let pulled = timeout(PULLED_WITHIN, pulling).await.context("pulling the image takes too long")?;
        pulled?.map(drop).context("pulling the image")
    }

    /// Starts a container whose server answers on `port` of 127.0.0.1.
    pub(crate) async fn start(
        &self,
        port: u16,
        environment: &[(&str, &str)],
        arguments: &[&str],
    ) -> anyhow::Result<Container> {
        let name = format!("outbox-e2e-{}", Uuid::now_v7().simple());
        let removal = AtEnd::run(r#"docker rm --force --volumes "$1""#, &name)?;
        let published = format!("{}/tcp", self.port);
        let mut request: ContainerRequest<GenericImage> = GenericImage::new(self.name, self.tag)
            .with_exposed_port(self.port.tcp())
            .with_container_name(&name)
            .with_cmd(arguments.iter().copied())
            .with_host_config_modifier(move |host| {
                let binding = PortBinding { host_ip: Some("127.0.0.1".into()), host_port: Some(port.to_string()) };
                host.publish_all_ports = Some(false);
                host.port_bindings = Some([(published.clone(), Some(vec![binding]))].into());
            });
        for (variable, value) in environment {
            request = request.with_env_var(*variable, *value);
        }
        let container = RUNTIME.spawn(request.start()).await?.context("starting a container")?;
        // Its own removal does not happen when this process is killed: ours does, in either case.
        std::mem::forget(container);
        Ok(Container { name, _removal: removal })
    }
}

/// A container that is removed when this is dropped, or when this process ends.
pub(crate) struct Container {
    name: String,
    _removal: AtEnd,
}

impl Container {
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    pub(crate) async fn end(&self, signal: Signal) -> anyhow::Result<()> {
        docker(["kill", "--signal", &signal.as_raw().to_string(), &self.name]).await?;
        docker(["wait", &self.name]).await?;
        Ok(())
    }

    pub(crate) async fn start_again(&self) -> anyhow::Result<()> {
        docker(["start", &self.name]).await.map(drop)
    }

    pub(crate) async fn freeze(&self) -> anyhow::Result<()> {
        docker(["pause", &self.name]).await.map(drop)
    }

    pub(crate) async fn thaw(&self) -> anyhow::Result<()> {
        docker(["unpause", &self.name]).await.map(drop)
    }
}

async fn docker<const N: usize>(arguments: [&str; N]) -> anyhow::Result<Output> {
    let mut command = Command::new("docker");
    command.args(arguments);
    run(command).await
}
