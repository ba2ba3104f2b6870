//! The workspace's programs, built once per process.

use std::path::PathBuf;

use anyhow::{Context, ensure};
use tokio::process::Command;
use tokio::sync::OnceCell;

use crate::place::{build_folder, target_folder};
use crate::progress::say;

/// The workspace's root folder.
pub fn workspace() -> PathBuf {
    let package = env!("CARGO_MANIFEST_DIR");
    PathBuf::from(package).join("..").canonicalize().expect("the workspace is where it was built")
}

/// The path of one of the workspace's programs; the first call builds them all.
pub async fn program(name: &str) -> anyhow::Result<PathBuf> {
    static FOLDER: OnceCell<PathBuf> = OnceCell::const_new();
    Ok(FOLDER.get_or_try_init(build).await?.join(name))
}

/// Builds into the folder, and with the profile, of the program that runs now.
async fn build() -> anyhow::Result<PathBuf> {
    say("building the programs");
    let folder = build_folder()?;
    let profile = match folder.file_name().and_then(|name| name.to_str()).context("a build folder has a name")? {
        "debug" => "dev",
        other => other,
    };
    let mut build = cargo();
    build.args(["build", "--workspace", "--bins", "--profile", profile, "--target-dir"]).arg(target_folder()?);
    let status = build.current_dir(workspace()).status().await.context("running cargo")?;
    ensure!(status.success(), "the programs do not build");
    Ok(folder)
}

/// A cargo that is not told that another one runs us: build scripts look at the variables that cargo
/// sets for what it runs, and would build half of the dependencies again.
pub fn cargo() -> Command {
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or("cargo".into()));
    cargo.kill_on_drop(true);
    for (variable, _) in std::env::vars_os() {
        let name = variable.to_string_lossy();
        if name.starts_with("CARGO_PKG_") || name.starts_with("CARGO_MANIFEST_") {
            cargo.env_remove(&variable);
        }
    }
    cargo
}
