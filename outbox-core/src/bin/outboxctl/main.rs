//! The operator's tool: shows how events flow and where they do not, and repairs it.

mod args;
mod audit;
mod events;
mod letters;
mod output;
mod repair;
mod resend;
mod status;

use std::process::ExitCode;

use clap::CommandFactory;
use outbox_core::Broker;
use outbox_core::config::BrokerConfig;
use outbox_core::operator::{Operator, OperatorError};
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

use crate::args::{Args, Command, LettersCommand};
use crate::output::Answer;

/// Why a command ended without an answer.
#[derive(Debug, thiserror::Error)]
enum Failure {
    /// An argument or a setting that cannot work; one line that names it.
    #[error("{0}")]
    Arguments(String),
    #[error(transparent)]
    Operator(#[from] OperatorError),
}

impl From<String> for Failure {
    fn from(line: String) -> Self {
        Self::Arguments(line)
    }
}

#[tokio::main]
async fn main() -> ExitCode {
    let args: Args = outbox_core::config::read();
    if let Command::Completions { shell } = args.command {
        clap_complete::generate(shell, &mut Args::command(), "outboxctl", &mut std::io::stdout());
        return ExitCode::SUCCESS;
    }
    match run(&args).await {
        Ok(answer) => answer.print(args.json),
        Err(failure) => {
            eprintln!("outboxctl: {failure}");
            ExitCode::from(if let Failure::Arguments(_) = failure { 2 } else { 1 })
        }
    }
}

async fn run(args: &Args) -> Result<Answer, Failure> {
    let operator = operator("DATABASE_URL", args.database_url.as_deref(), args)?;
    let peer = args.peer_database_url.as_deref();
    let peer = peer.map(|url| operator_at("PEER_DATABASE_URL", url, args)).transpose()?;
    match &args.command {
        Command::Status => Ok(status::status(&operator, &broker(args).await?).await?),
        Command::List(filter) => Ok(events::list(&operator, filter).await?),
        Command::Show { subject } => Ok(events::show(&operator, peer.as_ref(), &broker(args).await?, subject).await?),
        Command::Requeue(which) => Ok(repair::requeue(&operator, which).await?),
        Command::Release { worker, yes } => Ok(repair::release(&operator, worker, yes.really()).await?),
        Command::Purge(purge) => Ok(repair::purge(&operator, purge, &stop()).await?),
        Command::Replay(replay) => Ok(resend::replay(&operator, broker(args).await?, replay, &stop()).await?),
        Command::Rebuild(rebuild) => {
            rebuild.stream.check()?;
            Ok(resend::rebuild(&operator, broker(args).await?, rebuild, &stop()).await?)
        }
        Command::DeadLetters(LettersCommand::List(which)) => Ok(letters::list(&operator, which).await?),
        Command::DeadLetters(LettersCommand::Show { id }) => Ok(letters::show(&operator, *id).await?),
        Command::DeadLetters(LettersCommand::Retry(which)) => Ok(letters::retry(&operator, which).await?),
        Command::DeadLetters(LettersCommand::Discard(which)) => Ok(letters::discard(&operator, which).await?),
        Command::Audit(retention) => {
            let peer = peer.ok_or_else(|| missing("PEER_DATABASE_URL", "the other service's database"))?;
            Ok(audit::audit(&operator, &peer, &broker(args).await?, retention).await?)
        }
        // Answered before: it needs no database.
        Command::Completions { .. } => Ok(Answer::default()),
    }
}

fn operator(setting: &str, url: Option<&str>, args: &Args) -> Result<Operator, String> {
    operator_at(setting, url.ok_or_else(|| missing(setting, "the service's database"))?, args)
}

fn operator_at(setting: &str, url: &str, args: &Args) -> Result<Operator, String> {
    Operator::connect(setting, url, &args.who())
}

fn missing(setting: &str, what: &str) -> String {
    let flag = setting.to_lowercase().replace('_', "-");
    format!("{setting} is not set, nor --{flag}: {what}")
}

/// Begins to connect. Who needs the connection waits for it.
async fn broker(args: &Args) -> Result<Broker, String> {
    let config = BrokerConfig { nats_url: args.nats_url.clone() };
    Broker::connect(&config, "outboxctl").await.map_err(|error| error.to_string())
}

/// Cancelled by SIGINT and SIGTERM: what takes its time then ends in good order.
fn stop() -> CancellationToken {
    let stop = CancellationToken::new();
    for kind in [SignalKind::interrupt(), SignalKind::terminate()] {
        // Where a signal cannot be received, it ends the process.
        let Ok(mut signal) = signal(kind) else { continue };
        let stop = stop.clone();
        tokio::spawn(async move {
            signal.recv().await;
            stop.cancel();
        });
    }
    stop
}
