//! Programs, folders and containers that are gone when this process is, however it ends.
//!
//! A destructor does not run after a Ctrl-C, a `kill -9` or in a static. So whatever must not
//! outlive this process is watched by a small shell that reads from a pipe of ours: the kernel
//! closes the pipe when we end, the read returns, and the shell cleans up.

use std::io::{self, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};

use crate::wait::wait_until;

/// The shell becomes the program, so that its process id and exit status are the program's; the
/// watcher is a grandchild, so that the program is never asked to wait for a child it did not start.
const RUN_WATCHED: &str = r#"
exec 3<&0 </dev/null
program=$$ signal=$1
shift
(
  (
    trap '' HUP INT TERM
    read -r released <&3 && exit
    kill -s "$signal" "$program"
    kill -s CONT "$program"
    tries=0
    while [ $tries -lt 100 ]; do
      kill -0 "$program" || exit
      sleep 0.1
      tries=$((tries + 1))
    done
    kill -s KILL "$program"
  ) >/dev/null 2>&1 &
)
exec 3<&-
exec "$@"
"#;

/// A program's `Command`, to be completed with arguments and environment and started by
/// [`Program::spawn`]. `last_signal` ends it when this process is gone.
pub(crate) fn watched(program: &Path, last_signal: &str) -> Command {
    let mut command = Command::new("sh");
    command.args(["-c", RUN_WATCHED, "sh", last_signal]).arg(program);
    command
}

/// A running program that ends when this is dropped, or when this process ends.
pub(crate) struct Program {
    child: Child,
    leash: Option<ChildStdin>,
}

impl Program {
    /// Starts a [`watched`] command in a process group of its own, which Ctrl-C does not reach.
    pub(crate) fn spawn(mut watched: Command) -> io::Result<Self> {
        let mut child = watched.stdin(Stdio::piped()).process_group(0).spawn()?;
        let leash = child.stdin.take();
        Ok(Self { child, leash })
    }

    pub(crate) fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    /// Its exit status, if it has ended.
    pub(crate) fn ended(&mut self) -> io::Result<Option<ExitStatus>> {
        let status = self.child.try_wait()?;
        if status.is_some()
            && let Some(mut leash) = self.leash.take()
        {
            // The process id may belong to another program soon: the watcher must not use it. If the
            // watcher itself is gone, so is the danger.
            let _ = leash.write_all(b"released\n");
        }
        Ok(status)
    }

    pub(crate) fn signal(&self, signal: Signal) -> io::Result<()> {
        Ok(kill_process(self.pid(), signal)?)
    }

    /// Sends `signal` and waits for the end.
    pub(crate) async fn end(&mut self, signal: Signal, deadline: Duration) -> anyhow::Result<ExitStatus> {
        if let Some(status) = self.ended()? {
            return Ok(status);
        }
        self.signal(signal)?;
        wait_until(deadline, "the program's end", async || {
            self.ended()?.ok_or_else(|| io::Error::other("it still runs"))
        })
        .await
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        if !matches!(self.ended(), Ok(Some(_))) {
            drop(self.leash.take());
            let _ = self.child.wait();
        }
    }
}

/// A shell command that runs when this is dropped, or when this process ends.
pub(crate) struct AtEnd {
    shell: Child,
}

impl AtEnd {
    pub(crate) fn run(script: &str, argument: &str) -> io::Result<Self> {
        let script = format!("trap '' HUP INT TERM; read -r _; {script}");
        let shell = Command::new("sh")
            .args(["-c", &script, "sh", argument])
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .process_group(0)
            .spawn()?;
        Ok(Self { shell })
    }
}

impl Drop for AtEnd {
    fn drop(&mut self) {
        drop(self.shell.stdin.take());
        let _ = self.shell.wait();
    }
}

/// A folder that is removed when this is dropped, or when this process ends.
pub(crate) struct Folder {
    path: PathBuf,
    _removal: AtEnd,
}

impl Folder {
    pub(crate) fn create(path: PathBuf) -> anyhow::Result<Self> {
        // Again and again, because a server that is ending beside it may still write into it.
        let removal = AtEnd::run(
            r#"tries=0; while [ -e "$1" ] && [ $tries -lt 300 ]; do
                 rm -rf -- "$1" || sleep 0.1; tries=$((tries + 1)); done"#,
            path.to_str().ok_or_else(|| anyhow::anyhow!("{} is not UTF-8", path.display()))?,
        )?;
        std::fs::create_dir(&path)?;
        Ok(Self { path, _removal: removal })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }
}
