//! The workspace's programs as running processes.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::sync::Mutex;
use std::time::Duration;

use anyhow::{Context, anyhow, ensure};
use rustix::process::Signal;

use crate::api::http_client;
use crate::keeper::{Program, watched};
use crate::place::{free_port, stack_folder, tail};
use crate::programs::{program, program_with_crash_points};
use crate::wait::wait_until;

const KILLED_WITHIN: Duration = Duration::from_secs(10);
/// The crash point at which a program dies; see `outbox_core::crash`.
const CRASH_AT: &str = "CRASH_AT";
const LOOK_AGAIN_AFTER: Duration = Duration::from_millis(100);

/// One running program of the workspace, such as `order-service`.
///
/// It is killed when this is dropped, and when this process ends. What it writes goes to a file in
/// `target/e2e/logs`, whose end is shown where a test panics.
pub struct Service {
    name: String,
    program: PathBuf,
    settings: Vec<(String, String)>,
    http: String,
    admin: String,
    log: PathBuf,
    running: tokio::sync::Mutex<Program>,
}

impl Service {
    /// Starts a program with the environment's settings and these; it listens on free ports, unless
    /// `HTTP_ADDR` and `ADMIN_ADDR` are among them.
    pub async fn start(name: &str, settings: &[(&str, &str)]) -> anyhow::Result<Self> {
        let program = match settings.iter().any(|(variable, _)| *variable == CRASH_AT) {
            true => program_with_crash_points(name).await?,
            false => program(name).await?,
        };
        let mut settings: Vec<(String, String)> =
            settings.iter().map(|(variable, value)| (variable.to_string(), value.to_string())).collect();
        let http = address(&mut settings, "HTTP_ADDR");
        let admin = address(&mut settings, "ADMIN_ADDR");
        let log = new_log(name)?;
        let running = spawn(&program, &settings, &log)?.into();
        Ok(Self { name: name.to_owned(), program, settings, http, admin, log, running })
    }

    /// Starts it again, on the same ports and with the same settings.
    pub async fn start_again(&self) -> anyhow::Result<()> {
        *self.running.lock().await = spawn(&self.program, &self.settings, &self.log)?;
        Ok(())
    }

    /// The program's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Starts it again after it died at its crash point, where it does not die again.
    pub async fn start_again_for_good(&mut self) -> anyhow::Result<()> {
        self.settings.retain(|(variable, _)| variable != CRASH_AT);
        self.start_again().await
    }

    /// The URL of a path of its public listener.
    pub fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.http)
    }

    /// The URL of a path of its admin listener.
    pub fn admin_url(&self, path: &str) -> String {
        format!("http://{}{path}", self.admin)
    }

    /// Waits until it says that it is ready; fails at once if it ends instead.
    pub async fn wait_until_ready(&self, deadline: Duration) -> anyhow::Result<()> {
        let (http, url) = (http_client(), self.admin_url("/health/ready"));
        let what = format!("{} is ready", self.name);
        let ready = wait_until(deadline, &what, async || {
            let response = http.get(&url).send().await?;
            ensure!(response.status().is_success(), response.text().await?);
            Ok(())
        });
        let ready = tokio::select! {
            ready = ready => ready,
            ended = self.wait_for_end() => Err(anyhow!("{} ended with {}", self.name, ended?)),
        };
        ready.with_context(|| self.last_words())
    }

    /// Its exit status, if it has ended.
    pub async fn ended(&self) -> anyhow::Result<Option<ExitStatus>> {
        Ok(self.running.lock().await.ended()?)
    }

    /// Waits for its end.
    pub async fn wait_for_end(&self) -> anyhow::Result<ExitStatus> {
        loop {
            if let Some(status) = self.ended().await? {
                return Ok(status);
            }
            tokio::time::sleep(LOOK_AGAIN_AFTER).await;
        }
    }

    /// Ends it as a crash would (`kill -9`).
    pub async fn kill(&self) -> anyhow::Result<ExitStatus> {
        self.running.lock().await.end(Signal::KILL, KILLED_WITHIN).await
    }

    /// Asks it to end (SIGTERM), and waits for its exit status.
    pub async fn terminate(&self, deadline: Duration) -> anyhow::Result<ExitStatus> {
        let ended = self.running.lock().await.end(Signal::TERM, deadline).await;
        ended.with_context(|| self.last_words())
    }

    /// Its process id.
    pub async fn pid(&self) -> i32 {
        self.running.lock().await.pid().as_raw_nonzero().get()
    }

    /// Sends it any signal.
    pub async fn signal(&self, signal: Signal) -> anyhow::Result<()> {
        Ok(self.running.lock().await.signal(signal)?)
    }

    /// Keeps it from running, with its connections open, until it is thawed.
    pub async fn freeze(&self) -> anyhow::Result<()> {
        self.signal(Signal::STOP).await
    }

    /// Lets it run again.
    pub async fn thaw(&self) -> anyhow::Result<()> {
        self.signal(Signal::CONT).await
    }

    /// All that it has written.
    pub fn log(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// The file that it writes to.
    pub fn log_path(&self) -> &Path {
        &self.log
    }

    /// The end of all that it has written.
    pub fn last_words(&self) -> String {
        format!("{} wrote last (all of it: {}):\n{}", self.name, self.log.display(), tail(&self.log))
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("{}", self.last_words());
        }
    }
}

/// The address under `variable`, which is set to a free one unless it is set.
fn address(settings: &mut Vec<(String, String)>, variable: &str) -> String {
    if let Some((_, address)) = settings.iter().find(|(name, _)| name == variable) {
        return address.clone();
    }
    let address = format!("127.0.0.1:{}", free_port());
    settings.push((variable.to_owned(), address.clone()));
    address
}

fn spawn(program: &Path, settings: &[(String, String)], log: &Path) -> anyhow::Result<Program> {
    let log = File::options().create(true).append(true).open(log)?;
    let mut command = watched(program, "KILL");
    command.envs(settings.iter().cloned()).stdout(log.try_clone()?).stderr(log);
    Program::spawn(command).with_context(|| format!("starting {}", program.display()))
}

/// An empty file for a program's output, named after the test that runs on this thread.
pub(crate) fn new_log(name: &str) -> anyhow::Result<PathBuf> {
    static TAKEN: Mutex<BTreeSet<PathBuf>> = Mutex::new(BTreeSet::new());
    let thread = std::thread::current();
    let test = thread.name().unwrap_or("unnamed").replace("::", ".");
    let folder = stack_folder()?.join("logs").join(test);
    std::fs::create_dir_all(&folder)?;

    let mut taken = TAKEN.lock().expect("nothing panics under this lock");
    let mut numbered = (1..).map(|number| folder.join(format!("{name}-{number}.log")));
    let log = numbered.find(|log| taken.insert(log.clone())).expect("numbers do not run out");
    match std::fs::remove_file(&log) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(error.into()),
        _ => Ok(log),
    }
}
