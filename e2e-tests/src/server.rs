//! A running server, to be stopped, frozen and started again.

use std::fs::File;
use std::path::Path;
use std::process::{Command, ExitStatus};
use std::time::Duration;

use anyhow::{Context, anyhow, bail};
use rustix::process::{Pid, Signal, kill_process};
use tokio::sync::Mutex;
use tokio::time::sleep;

use crate::docker::Container;
use crate::find::run;
use crate::keeper::{Folder, Program};
use crate::place::{as_server_user, tail};

const STOPPED_WITHIN: Duration = Duration::from_secs(30);
const GIVEN: &str = "a given server can be neither stopped nor frozen";
const STOPPED: &str = "the server is stopped";
const LOG: &str = "log";
const LOOK_AGAIN_AFTER: Duration = Duration::from_millis(100);

/// A running server; unless it was given, it and its data are gone when this is dropped.
pub(crate) enum Server {
    Given,
    Container(Container),
    Process(Process),
}

/// A server that runs on this machine, with its data in a folder of its own.
pub(crate) struct Process {
    command: Box<dyn Fn() -> Command + Send + Sync>,
    running: Mutex<Option<Program>>,
    // After the program, because fields are dropped in this order.
    folder: Folder,
}

impl Server {
    /// Runs `command`, now and again after a stop, on data in `folder`.
    pub(crate) fn run(folder: Folder, command: impl Fn() -> Command + Send + Sync + 'static) -> anyhow::Result<Self> {
        let running = Mutex::new(Some(spawn(command(), folder.path())?));
        Ok(Self::Process(Process { command: Box::new(command), running, folder }))
    }

    /// Stops it by a signal, and returns when it has ended.
    pub(crate) async fn stop(&self, signal: Signal) -> anyhow::Result<()> {
        match self {
            Self::Given => bail!(GIVEN),
            Self::Container(container) => container.end(signal).await,
            Self::Process(process) => {
                let mut running = process.running.lock().await;
                running.as_mut().context(STOPPED)?.end(signal, STOPPED_WITHIN).await?;
                *running = None;
                Ok(())
            }
        }
    }

    /// Starts it after a stop, on the same port and data.
    pub(crate) async fn start_again(&self) -> anyhow::Result<()> {
        match self {
            Self::Given => bail!(GIVEN),
            Self::Container(container) => container.start_again().await,
            Self::Process(process) => {
                *process.running.lock().await = Some(spawn((process.command)(), process.folder.path())?);
                Ok(())
            }
        }
    }

    /// Keeps it from running, with its connections open, until it is thawed.
    pub(crate) async fn freeze(&self) -> anyhow::Result<()> {
        match self {
            Self::Given => bail!(GIVEN),
            Self::Container(container) => container.freeze().await,
            Self::Process(process) => process.signal_family(Signal::STOP).await,
        }
    }

    /// Undoes [`Self::freeze`].
    pub(crate) async fn thaw(&self) -> anyhow::Result<()> {
        match self {
            Self::Given => bail!(GIVEN),
            Self::Container(container) => container.thaw().await,
            Self::Process(process) => process.signal_family(Signal::CONT).await,
        }
    }

    /// What must be gone at the end: its folder, or the name of its container.
    pub(crate) fn trace(&self) -> Option<String> {
        match self {
            Self::Given => None,
            Self::Container(container) => Some(container.name().to_owned()),
            Self::Process(process) => Some(process.folder.path().display().to_string()),
        }
    }

    /// Waits until `it_answers`, but not for a program that has ended instead.
    pub(crate) async fn wait_until(&self, it_answers: impl Future<Output = anyhow::Result<()>>) -> anyhow::Result<()> {
        let Self::Process(process) = self else { return it_answers.await };
        let answered = tokio::select! {
            answered = it_answers => answered,
            status = process.end() => Err(anyhow!("it ended with {status}")),
        };
        answered.with_context(|| tail(&process.folder.path().join(LOG)))
    }
}

impl Process {
    async fn end(&self) -> ExitStatus {
        loop {
            if let Some(Ok(Some(status))) = self.running.lock().await.as_mut().map(Program::ended) {
                return status;
            }
            sleep(LOOK_AGAIN_AFTER).await;
        }
    }

    /// Signals the server and the processes that it started.
    async fn signal_family(&self, signal: Signal) -> anyhow::Result<()> {
        let head = self.running.lock().await.as_ref().context(STOPPED)?.pid();
        let mut list = Command::new("ps");
        list.args(["-A", "-o", "pid=,ppid="]);
        let processes = run(list).await?;
        kill_process(head, signal)?;
        for line in String::from_utf8(processes.stdout)?.lines() {
            let ids: Vec<_> = line.split_whitespace().flat_map(str::parse).map(Pid::from_raw).collect();
            if let [Some(process), Some(parent)] = ids[..]
                && parent == head
            {
                // It may have ended since it was listed.
                let _ = kill_process(process, signal);
            }
        }
        Ok(())
    }
}

fn spawn(mut command: Command, folder: &Path) -> anyhow::Result<Program> {
    let log = File::options().create(true).append(true).open(folder.join(LOG))?;
    as_server_user(&mut command).current_dir(folder).stdout(log.try_clone()?).stderr(log);
    Ok(Program::spawn(command)?)
}
