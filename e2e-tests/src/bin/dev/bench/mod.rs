//! `cargo dev bench`: how fast it is, beside the limit of what it stands on, in the same run.

mod consumer;
mod http;
mod pair;
mod relay;

use anstream::println;
use anyhow::ensure;
use clap::ValueEnum;
use e2e_tests::{Nats, Postgres, cargo, workspace};
use serde::Serialize;
use uuid::Uuid;

use crate::screen::{BOLD, DIM, GREEN, PLAIN, YELLOW, step, step_of};

/// What is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "snake_case")]
pub enum Part {
    /// POST /orders, beside the same two inserts over SQL
    Http,
    /// The same while an embedded relay publishes, beside it without
    HttpWithRelay,
    /// A relay drains the outbox in order, beside a pipelined publish of the same messages
    Relay,
    /// The same with many published events kept
    RelayRetained,
    /// The same while an old transaction pins the snapshot
    RelayOldSnapshot,
    /// The first and the last tenth of a drain
    RelayClaims,
    /// Two relays, beside one
    #[value(name = "relays_2")]
    Relays2,
    /// Four relays, beside one
    #[value(name = "relays_4")]
    Relays4,
    /// Inbox and payment, beside consuming and acknowledging without a database
    Consumer,
    /// Order to paid, everything on this machine
    Loop,
    /// From commit to consumer and from POST to paid, at a steady rate
    Latency,
    /// A night's backlog, released at once
    Backlog,
    /// What it costs when nothing happens
    Idle,
}

/// One figure.
#[derive(Debug, Serialize)]
pub struct Row {
    part: String,
    metric: String,
    value: f64,
    unit: &'static str,
    limit: Option<f64>,
    ratio: Option<f64>,
    target: String,
    met: bool,
}

/// Where it is measured, and how much of it.
pub struct Bench {
    pub postgres: Postgres,
    /// Everything is this many times smaller than it is meant to be.
    pub smaller: u64,
    /// Orders a second in the part `latency`.
    pub rate: u64,
    part: String,
    rows: Vec<Row>,
}

impl Bench {
    /// A figure that is measured by its part of a limit.
    pub fn against(&mut self, metric: &str, unit: &'static str, value: f64, limit: f64, least: f64) {
        let ratio = value / limit;
        self.row(metric, unit, value, Some((limit, ratio)), format!("≥ {least} of the limit"), ratio >= least);
    }

    /// A figure that must reach a number.
    pub fn at_least(&mut self, metric: &str, unit: &'static str, value: f64, least: f64) {
        self.row(metric, unit, value, None, format!("≥ {least}"), value >= least);
    }

    /// A figure that must stay below a number.
    pub fn at_most(&mut self, metric: &str, unit: &'static str, value: f64, most: f64) {
        self.row(metric, unit, value, None, format!("≤ {most}"), value <= most);
    }

    fn row(
        &mut self,
        metric: &str,
        unit: &'static str,
        value: f64,
        limit: Option<(f64, f64)>,
        target: String,
        met: bool,
    ) {
        let (limit, ratio) = limit.unzip();
        self.rows.push(Row {
            part: self.part.clone(),
            metric: metric.to_owned(),
            value,
            unit,
            limit,
            ratio,
            target,
            met,
        });
    }

    /// A broker with nothing in it.
    pub async fn nats(&self) -> anyhow::Result<Nats> {
        Nats::start().await
    }
}

/// Both sides of a comparison are measured so often.
const ROUNDS: u32 = 3;

/// Measures two rates in turn, so that a machine that slows down slows both. Returns the mean of each.
async fn in_turn(
    mut one: impl AsyncFnMut() -> anyhow::Result<f64>,
    mut other: impl AsyncFnMut() -> anyhow::Result<f64>,
) -> anyhow::Result<(f64, f64)> {
    let (mut ones, mut others) = (0.0, 0.0);
    for _ in 0..ROUNDS {
        ones += one().await?;
        others += other().await?;
    }
    Ok((ones / f64::from(ROUNDS), others / f64::from(ROUNDS)))
}

/// What a client asks for.
fn an_order() -> serde_json::Value {
    serde_json::json!({"customer_id": Uuid::new_v4(), "total": {"amount": 12500, "currency": "EUR"}})
}

/// Measures these parts, or all, and shows a table or, on standard output, JSON.
pub async fn bench(parts: Vec<Part>, smaller: u64, rate: u64, json: bool) -> anyhow::Result<()> {
    if cfg!(debug_assertions) {
        return in_release(&parts, smaller, rate, json).await;
    }
    let parts = if parts.is_empty() { Part::value_variants().to_vec() } else { parts };
    let postgres = step("PostgreSQL", Postgres::start()).await?;
    let mut bench = Bench { postgres, smaller, rate, part: String::new(), rows: Vec::new() };
    let all = parts.len();
    for (done, part) in parts.into_iter().enumerate() {
        bench.part = part.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default();
        let name = bench.part.clone();
        step_of(all, done, &name, measure(part, &mut bench)).await?;
    }
    if json {
        std::println!("{}", serde_json::to_string_pretty(&bench.rows)?);
    } else {
        show(&bench.rows);
    }
    Ok(())
}

async fn measure(part: Part, bench: &mut Bench) -> anyhow::Result<()> {
    match part {
        Part::Http => http::http(bench).await,
        Part::HttpWithRelay => http::http_with_relay(bench).await,
        Part::Relay => relay::relay(bench).await,
        Part::RelayRetained => relay::retained(bench).await,
        Part::RelayOldSnapshot => relay::old_snapshot(bench).await,
        Part::RelayClaims => relay::claims(bench).await,
        Part::Relays2 => relay::several(bench, 2).await,
        Part::Relays4 => relay::several(bench, 4).await,
        Part::Consumer => consumer::consumer(bench).await,
        Part::Loop => pair::whole_loop(bench).await,
        Part::Latency => pair::latency(bench).await,
        Part::Backlog => pair::backlog(bench).await,
        Part::Idle => pair::idle(bench).await,
    }
}

/// Figures of an unoptimised build mean nothing.
async fn in_release(parts: &[Part], smaller: u64, rate: u64, json: bool) -> anyhow::Result<()> {
    let mut run = cargo();
    run.args(["run", "--release", "--package", "e2e-tests", "--bin", "dev", "--", "bench"]).current_dir(workspace());
    run.args(parts.iter().filter_map(|part| Some(part.to_possible_value()?.get_name().to_owned())));
    run.args(["--smaller", &smaller.to_string(), "--rate", &rate.to_string()]).args(json.then_some("--json"));
    ensure!(run.status().await?.success(), "the benchmark did not run to its end");
    Ok(())
}

fn show(rows: &[Row]) {
    println!(
        "\n{BOLD}{:<20}{:<30}{:>12} {:<10}{:>12}{:>8}  target{PLAIN}",
        "part", "metric", "value", "unit", "limit", "ratio"
    );
    for Row { part, metric, value, unit, limit, ratio, target, met } in rows {
        let number = |number: &Option<f64>, digits| number.map_or(String::new(), |number| format!("{number:.digits$}"));
        let (colour, verdict) = if *met { (GREEN, "✓") } else { (YELLOW, "missed") };
        let digits = if *value < 100.0 { 2 } else { 0 };
        let (limit, ratio) = (number(limit, 0), number(ratio, 2));
        println!(
            "{part:<20}{metric:<30}{value:>12.digits$} {DIM}{unit:<10}{limit:>12}{PLAIN}{ratio:>8}  {target} {colour}{verdict}{PLAIN}"
        );
    }
}
