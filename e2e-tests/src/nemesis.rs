//! A nemesis: everything that runs is killed, cut off, frozen and restarted, at random times drawn
//! from a seed, while clients place and cancel orders. Then all of it ends, and the promise is checked.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::Write;
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::Context;
use futures::future::{join_all, try_join_all};
use rustix::process::Signal;
use sqlx::PgPool;
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;
use tokio::time::{Instant, sleep, sleep_until, timeout};
use uuid::Uuid;

use crate::checker::{Checker, Counts, audit};
use crate::clients::{Clients, Placed};
use crate::nats::Nats;
use crate::postgres::Postgres;
use crate::progress::say;
use crate::provider::{Call, Provider, Reply};
use crate::proxy::Proxy;
use crate::report::{Report, listed};
use crate::schedule::{Fault, Outage, PROCESSES, Schedule, Server, Trouble};
use crate::service::{Service, new_log};

const READY_WITHIN: Duration = Duration::from_secs(60);
/// When all faults have ended, this is the time for everything to come to its end, unaided.
const HEALS_WITHIN: Duration = Duration::from_secs(90);
const STOPPED_WITHIN: Duration = Duration::from_secs(15);
const CHECK_AGAIN_AFTER: Duration = Duration::from_millis(500);
const PROGRESS_EVERY: Duration = Duration::from_secs(15);

/// Runs the nemesis of this seed against servers, services and relays of its own.
///
/// # Errors
/// Where the stack itself fails; what is wrong with the services is in the report.
pub async fn run_nemesis(seed: u64, length: Duration) -> anyhow::Result<Report> {
    let schedule = Schedule::draw(seed, length);
    say(&format!("nemesis: seed {seed}, {} s", length.as_secs()));
    let stack = Stack::start(&schedule).await?;
    let begun = Instant::now();
    let clients = Clients::new(stack.processes[..2].iter().map(|process| process.service.url("/orders")).collect());

    let (placed, ended) = tokio::select! {
        both = async { tokio::join!(stack.place(&clients, &schedule, begun), stack.rage(&schedule, begun)) } => both,
        never = stack.tell(&clients, length, begun) => match never {},
    };
    let ended = ended?;
    stack.note("all faults have ended");
    stack.report(&schedule, &clients, &placed, ended).await
}

/// The servers, and the processes that reach them through proxies.
struct Stack {
    // Before the servers they use, because fields are dropped in this order.
    processes: Vec<Process>,
    gateway: Provider,
    nats: Nats,
    orders_db: PgPool,
    payments_db: PgPool,
    orders_url: String,
    payments_url: String,
    postgres: Postgres,
    done: Mutex<Done>,
    journal: Mutex<File>,
    logs: PathBuf,
}

struct Process {
    service: Service,
    to_postgres: Proxy,
    to_nats: Proxy,
}

#[derive(Default)]
struct Done {
    faults: BTreeMap<String, usize>,
    findings: Vec<String>,
}

/// Does as the amount says, so that the same order meets the same gateway in every run.
fn gateway_by_amount(call: &Call) -> Reply {
    let is_first = call.attempt == 1;
    match call.amount() % 100 {
        13 if !call.is_refund() => Reply::Declined("insufficient_funds"),
        20..30 if call.attempt <= 2 => Reply::Status(503),
        30..32 if is_first => Reply::DoneInSilence,
        40..50 if is_first => Reply::DoneWithHalfAnAnswer,
        50..53 => Reply::DoneAfter(Duration::from_millis(300)),
        60..65 if is_first => Reply::Status(429),
        _ => Reply::Done,
    }
}

impl Stack {
    async fn start(schedule: &Schedule) -> anyhow::Result<Self> {
        let (postgres, nats) = (Postgres::start().await?, Nats::start().await?);
        let orders_url = postgres.create_database("orders").await?;
        let payments_url = postgres.create_database("payments").await?;
        let gateway = Provider::start(gateway_by_amount).await;
        let journal = new_log("nemesis")?;
        let mut processes = Vec::new();
        for program in PROCESSES {
            let database = if program == "order-service" { &orders_url } else { &payments_url };
            processes.push(Process::start(program, database, nats.url(), gateway.url(), schedule).await?);
        }
        for process in &processes {
            process.service.wait_until_ready(READY_WITHIN).await?;
        }
        Ok(Self {
            processes,
            gateway,
            nats,
            orders_db: PgPool::connect(&orders_url).await?,
            payments_db: PgPool::connect(&payments_url).await?,
            orders_url,
            payments_url,
            postgres,
            done: Mutex::default(),
            logs: journal.parent().context("a log is in a folder")?.to_owned(),
            journal: Mutex::new(File::create(journal)?),
        })
    }

    fn done(&self) -> MutexGuard<'_, Done> {
        self.done.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Writes down what happens, with the time as the services' logs have it.
    fn note(&self, what: &str) {
        let now = OffsetDateTime::now_utc().format(&Rfc3339).unwrap_or_default();
        let mut journal = self.journal.lock().unwrap_or_else(PoisonError::into_inner);
        // A journal that cannot be written is no reason to stop.
        let _ = writeln!(journal, "{now} {what}");
    }

    fn find(&self, finding: String) {
        self.note(&finding);
        self.done().findings.push(finding);
    }

    /// Says now and then how far the run is.
    async fn tell(&self, clients: &Clients, length: Duration, begun: Instant) -> std::convert::Infallible {
        loop {
            sleep(PROGRESS_EVERY).await;
            let faults: usize = self.done().faults.values().sum();
            let (now, length) = (begun.elapsed().as_secs(), length.as_secs());
            say(&format!("{now} of {length} s: {faults} faults, answers {}", listed(&clients.answers())));
        }
    }

    /// All clients place their orders. Nobody may wait for ever.
    async fn place(&self, clients: &Clients, schedule: &Schedule, begun: Instant) -> Vec<Placed> {
        let placing = schedule.orders.iter().map(async |plan| {
            let deadline = schedule.length + HEALS_WITHIN - begun.elapsed();
            match timeout(deadline, clients.follow(plan, begun)).await {
                Ok(Ok(placed)) => return Some(placed),
                Ok(Err(finding)) => self.find(finding),
                Err(_elapsed) => self.find(format!("the order under key {} was not answered", plan.key)),
            }
            None
        });
        join_all(placing).await.into_iter().flatten().collect()
    }

    /// All lanes of the schedule side by side. Returns when they have ended.
    async fn rage(&self, schedule: &Schedule, begun: Instant) -> anyhow::Result<Instant> {
        try_join_all(schedule.lanes.iter().map(async |lane| {
            for plan in lane {
                sleep_until(begun + plan.at).await;
                self.note(&plan.to_string());
                *self.done().faults.entry(plan.fault.kind()).or_default() += 1;
                self.begin(&plan.fault).await.with_context(|| plan.to_string())?;
                sleep(plan.lasts).await;
                self.end(&plan.fault).await.with_context(|| format!("the end of: {plan}"))?;
                self.note(&format!("ended: {plan}"));
            }
            anyhow::Ok(())
        }))
        .await?;
        Ok(Instant::now())
    }

    async fn begin(&self, fault: &Fault) -> anyhow::Result<()> {
        match fault {
            Fault::Kill(victims) => drop(try_join_all(self.all(victims).map(|it| self.stop(it, Signal::KILL))).await?),
            Fault::Stop(victims) => drop(try_join_all(self.all(victims).map(|it| self.stop(it, Signal::TERM))).await?),
            Fault::Freeze(victims) => drop(try_join_all(self.all(victims).map(|it| it.service.freeze())).await?),
            Fault::Server(Server::Postgres, Outage::Stop) => self.postgres.stop().await?,
            Fault::Server(Server::Postgres, Outage::Crash) => self.postgres.stop_at_once().await?,
            Fault::Server(Server::Postgres, Outage::Freeze) => self.postgres.freeze().await?,
            Fault::Server(Server::Nats, Outage::Stop) => self.nats.stop().await?,
            Fault::Server(Server::Nats, Outage::Crash) => self.nats.stop_at_once().await?,
            Fault::Server(Server::Nats, Outage::Freeze) => self.nats.freeze().await?,
            Fault::Network(server, trouble, victims) => self.all(victims).for_each(|it| match trouble {
                Trouble::Cut => it.proxy_to(*server).cut(),
                Trouble::Lose => it.proxy_to(*server).lose(),
                Trouble::Refuse => it.proxy_to(*server).refuse(true),
                Trouble::Hold => it.proxy_to(*server).hold(true),
                Trouble::Delay(delay) => it.proxy_to(*server).delay(*delay),
            }),
            Fault::Gateway => self.gateway.hold(),
        }
        Ok(())
    }

    async fn end(&self, fault: &Fault) -> anyhow::Result<()> {
        match fault {
            Fault::Kill(victims) | Fault::Stop(victims) => {
                try_join_all(self.all(victims).map(|it| it.service.start_again())).await?;
            }
            Fault::Freeze(victims) => drop(try_join_all(self.all(victims).map(|it| it.service.thaw())).await?),
            Fault::Server(Server::Postgres, Outage::Stop | Outage::Crash) => self.postgres.start_again().await?,
            Fault::Server(Server::Postgres, Outage::Freeze) => self.postgres.thaw().await?,
            Fault::Server(Server::Nats, Outage::Stop | Outage::Crash) => self.nats.start_again().await?,
            Fault::Server(Server::Nats, Outage::Freeze) => self.nats.thaw().await?,
            Fault::Network(server, trouble, victims) => self.all(victims).for_each(|it| match trouble {
                Trouble::Cut | Trouble::Lose => {}
                Trouble::Refuse => it.proxy_to(*server).refuse(false),
                Trouble::Hold => it.proxy_to(*server).hold(false),
                Trouble::Delay(_) => it.proxy_to(*server).delay(Duration::ZERO),
            }),
            Fault::Gateway => self.gateway.release(),
        }
        Ok(())
    }

    fn all(&self, victims: &[usize]) -> impl Iterator<Item = &Process> {
        victims.iter().map(|victim| &self.processes[*victim])
    }

    /// Ends a process, which must be running, and must obey.
    async fn stop(&self, process: &Process, signal: Signal) -> anyhow::Result<()> {
        self.find_ended(process).await?;
        let ended = match signal {
            Signal::KILL => process.service.kill().await?,
            _ => process.service.terminate(STOPPED_WITHIN).await?,
        };
        // One that is told to stop before it listens for that has no code.
        if ended.code().is_some_and(|code| code != 0) {
            self.find(format!("{} was told to stop and ended with {ended}", process.service.name()));
        }
        Ok(())
    }

    /// A process that has ended by itself is a finding.
    async fn find_ended(&self, process: &Process) -> anyhow::Result<()> {
        if let Some(status) = process.service.ended().await? {
            self.find(format!("{} ended by itself with {status}", process.service.name()));
        }
        Ok(())
    }

    /// Waits until everything has come to its end, and puts together what is known.
    async fn report(
        &self,
        schedule: &Schedule,
        clients: &Clients,
        placed: &[Placed],
        ended: Instant,
    ) -> anyhow::Result<Report> {
        let (counts, left) = loop {
            let checked = self.check(placed).await;
            let is_over = ended.elapsed() > HEALS_WITHIN;
            match checked {
                Ok(Ok(counts)) => break (counts, Vec::new()),
                Ok(Err(findings)) if is_over => break (Counts::default(), findings),
                Err(error) if is_over => break (Counts::default(), vec![format!("nothing can be checked: {error:#}")]),
                _ => sleep(CHECK_AGAIN_AFTER).await,
            }
        };
        let healed_after = ended.elapsed();
        if let Err(reason) = audit(&self.orders_url, &self.payments_url, self.nats.url()).await {
            self.find(format!("{reason:#}"));
        }
        for process in &self.processes {
            self.find_ended(process).await?;
            if process.service.log().contains("panicked at") {
                self.find(format!("{} panicked", process.service.name()));
            }
        }
        let answers = clients.answers();
        if let Some(times) = answers.get("500") {
            self.find(format!("{times} requests were answered with 500"));
        }
        left.into_iter().for_each(|finding| self.find(finding));
        let done = std::mem::take(&mut *self.done());
        Ok(Report {
            seed: schedule.seed,
            length: schedule.length,
            orders: placed.len(),
            cancellations: placed.iter().filter(|placed| placed.is_cancelled).count(),
            answers,
            faults: done.faults,
            events: counts.events,
            published_again: counts.duplicates,
            delivered_again: self.checker().await?.delivered_again().await.unwrap_or_default(),
            asked_again: self.gateway.calls().len() - self.gateway.effects().len(),
            healed_after,
            findings: done.findings,
            logs: self.logs.clone(),
        })
    }

    async fn checker(&self) -> anyhow::Result<Checker<'_>> {
        let jetstream = self.nats.jetstream().await?;
        Ok(Checker { orders_db: &self.orders_db, payments_db: &self.payments_db, jetstream })
    }

    /// One look at the whole promise, and at each process's own word that it is well.
    async fn check(&self, placed: &[Placed]) -> anyhow::Result<Result<Counts, Vec<String>>> {
        let checker = self.checker().await?;
        let answered: BTreeSet<Uuid> = placed.iter().map(|placed| placed.id).collect();
        let (counts, mut findings) = match checker.check(&answered).await? {
            Ok(counts) => (counts, checker.check_gateway(&self.gateway).await?),
            Err(findings) => (Counts::default(), findings),
        };
        findings.extend(self.unexpected_ends(placed).await?);
        for process in &self.processes {
            if let Err(reason) = process.service.wait_until_ready(Duration::from_secs(2)).await {
                findings.push(format!("{} is not ready: {}", process.service.name(), reason.root_cause()));
            }
        }
        Ok(if findings.is_empty() { Ok(counts) } else { Err(findings) })
    }

    /// Orders that came to another end than their client was told or must expect.
    async fn unexpected_ends(&self, placed: &[Placed]) -> anyhow::Result<Vec<String>> {
        let orders: Vec<(Uuid, String)> =
            sqlx::query_as("SELECT id, status FROM orders").fetch_all(&self.orders_db).await?;
        let status_of: BTreeMap<Uuid, String> = orders.into_iter().collect();
        let unexpected = placed.iter().filter_map(|order| {
            let status = status_of.get(&order.id).map(String::as_str);
            let expected = match (order.amount % 100, order.is_cancelled) {
                (13, false) => "declined",
                (13, true) => "cancelled",
                (_, false) => "paid",
                (_, true) => "refunded",
            };
            (status != Some(expected)).then(|| format!("order {} is {status:?} and not {expected}", order.id))
        });
        Ok(unexpected.collect())
    }
}

impl Process {
    async fn start(
        program: &str,
        database: &str,
        broker: &str,
        gateway: &str,
        schedule: &Schedule,
    ) -> anyhow::Result<Self> {
        let (database, to_postgres) = Proxy::of(database).await?;
        let (broker, to_nats) = Proxy::of(broker).await?;
        let mut settings = vec![("DATABASE_URL", database.as_str()), ("NATS_URL", broker.as_str())];
        if program == "payment-service" {
            settings.extend([("PAYMENT_GATEWAY_URL", gateway), ("RELAY", "off")]);
        }
        settings.extend(schedule.settings.iter().map(|(variable, value)| (*variable, value.as_str())));
        Ok(Self { service: Service::start(program, &settings).await?, to_postgres, to_nats })
    }

    fn proxy_to(&self, server: Server) -> &Proxy {
        match server {
            Server::Postgres => &self.to_postgres,
            Server::Nats => &self.to_nats,
        }
    }
}
