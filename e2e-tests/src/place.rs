//! Where servers and programs put their files, and as whom servers run.

use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU16, Ordering};

use anyhow::Context;
use uuid::Uuid;

use crate::keeper::Folder;

/// The folder of the running build's programs, such as `target/debug`.
pub(crate) fn build_folder() -> anyhow::Result<PathBuf> {
    let executable = std::env::current_exe()?;
    let folder = executable.parent().context("the executable lies in no folder")?;
    let is_test = folder.ends_with("deps");
    Ok(if is_test { folder.join("..").canonicalize()? } else { folder.to_owned() })
}

/// The build's `target` folder.
pub(crate) fn target_folder() -> anyhow::Result<PathBuf> {
    Ok(build_folder()?.parent().context("the build has no target folder")?.to_owned())
}

/// The folder for everything the stack writes and does not take away at the end.
pub(crate) fn stack_folder() -> anyhow::Result<PathBuf> {
    let folder = target_folder()?.join("e2e");
    std::fs::create_dir_all(&folder)?;
    // Whatever the umask is: servers that run as another user must pass through.
    std::fs::set_permissions(&folder, PermissionsExt::from_mode(0o755))?;
    Ok(folder)
}

/// A new folder that only a server can read, for as long as it is needed.
pub(crate) fn private_folder(purpose: &str) -> anyhow::Result<Folder> {
    let name = format!("{purpose}-{}", Uuid::now_v7().simple());
    let stack = stack_folder()?;
    let parent = if server_can_enter(&stack) { stack } else { std::env::temp_dir() };
    let folder = Folder::create(parent.join(name))?;
    std::fs::set_permissions(folder.path(), PermissionsExt::from_mode(0o700))?;
    give_to_server(folder.path())?;
    Ok(folder)
}

struct User {
    uid: u32,
    gid: u32,
}

/// PostgreSQL refuses to run as root, and no server should: root's servers run as `nobody`.
static SERVER_USER: LazyLock<Option<User>> = LazyLock::new(|| {
    if !rustix::process::geteuid().is_root() {
        return None;
    }
    let users = std::fs::read_to_string("/etc/passwd").unwrap_or_default();
    let nobody = users.lines().find_map(|line| {
        let mut fields = line.strip_prefix("nobody:")?.split(':').skip(1);
        Some(User { uid: fields.next()?.parse().ok()?, gid: fields.next()?.parse().ok()? })
    });
    nobody.or(Some(User { uid: 65534, gid: 65534 }))
});

/// Makes `command` run as the user that servers run as.
pub(crate) fn as_server_user(command: &mut Command) -> &mut Command {
    match &*SERVER_USER {
        Some(user) => command.uid(user.uid).gid(user.gid),
        None => command,
    }
}

/// Makes `path` belong to the user that servers run as.
pub(crate) fn give_to_server(path: &Path) -> std::io::Result<()> {
    match &*SERVER_USER {
        Some(user) => chown(path, Some(user.uid), Some(user.gid)),
        None => Ok(()),
    }
}

/// Whether a server may use `folder`: a clone in root's home is closed to it.
pub(crate) fn server_can_enter(folder: &Path) -> bool {
    let mut nothing = Command::new("true");
    nothing.current_dir(folder).stdin(Stdio::null());
    as_server_user(&mut nothing).status().is_ok_and(|status| status.success())
}

/// A port of 127.0.0.1 that nothing listens on, and that is not handed out twice.
pub fn free_port() -> u16 {
    // Below the ports that the system gives to outgoing connections, which could take one of ours
    // between this check and its use.
    const PORTS: std::ops::Range<u16> = 15_000..32_000;
    static NEXT: LazyLock<AtomicU16> = LazyLock::new(|| AtomicU16::new(fastrand::u16(..)));
    loop {
        let next = NEXT.fetch_add(1, Ordering::Relaxed);
        let port = PORTS.start + next % (PORTS.end - PORTS.start);
        if is_free(port) {
            return port;
        }
    }
}

/// Whether a program could listen on this port of 127.0.0.1.
pub fn is_free(port: u16) -> bool {
    TcpListener::bind(SocketAddr::from((Ipv4Addr::LOCALHOST, port))).is_ok()
}

/// The last lines of a log.
pub(crate) fn tail(log: &Path) -> String {
    const LINES: usize = 40;
    let text = std::fs::read_to_string(log).unwrap_or_default();
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(LINES)..].join("\n")
}
