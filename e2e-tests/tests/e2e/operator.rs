//! outboxctl, run as an operator runs it: what it shows, what it changes, and that it changes nothing
//! before it is told to.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::Read;
use std::process::Output;

use async_nats::HeaderMap;
use e2e_tests::{Nats, Order, Pair, eventually, program};
use outbox_core::write_source;
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use serde_json::{Value, json};
use sqlx::{ConnectOptions, PgPool};
use tokio::process::Command;
use uuid::Uuid;

use crate::fixture::{Outbox, SOON, drain};

/// How an operator reaches one service.
pub struct Ctl {
    pub db: PgPool,
    settings: Vec<(&'static str, String)>,
}

/// What a run of outboxctl said.
#[derive(Debug)]
pub struct Said {
    pub code: i32,
    pub out: String,
    pub err: String,
}

impl Said {
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.out).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }
}

impl Ctl {
    pub fn new(db: &PgPool, nats: &str) -> Self {
        let url = db.connect_options().to_url_lossy().to_string();
        let settings = vec![("DATABASE_URL", url), ("NATS_URL", nats.to_owned()), ("OPERATOR", "alice".to_owned())];
        Self { db: db.clone(), settings }
    }

    pub async fn of(outbox: &Outbox) -> Self {
        write_source(&outbox.db, &outbox.name).await.unwrap();
        Self::new(&outbox.db, Nats::shared().await.unwrap().url())
    }

    pub fn of_orders(pair: &Pair) -> Self {
        Self::new(&pair.orders_db, pair.nats.url()).with_peer(&pair.payments_url)
    }

    pub fn of_payments(pair: &Pair) -> Self {
        Self::new(&pair.payments_db, pair.nats.url()).with_peer(&pair.orders_url)
    }

    pub fn with_peer(mut self, url: &str) -> Self {
        self.settings.push(("PEER_DATABASE_URL", url.to_owned()));
        self
    }

    pub async fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(program("outboxctl").await.expect("the programs build"));
        command.args(arguments).env_clear().envs(self.settings.iter().map(|(name, value)| (name, value)));
        command.kill_on_drop(true);
        command
    }

    pub async fn run(&self, arguments: &[&str]) -> Said {
        let output = tokio::time::timeout(SOON * 2, self.command(arguments).await.output()).await;
        said(output.unwrap_or_else(|_| panic!("{arguments:?} does not end")).expect("it can be started"))
    }

    /// Runs what must succeed, and returns what it says in JSON.
    pub async fn json(&self, arguments: &[&str]) -> Value {
        let said = self.run(&[arguments, &["--json"]].concat()).await;
        assert_eq!(said.code, 0, "{arguments:?}: {said:?}");
        said.json()
    }

    /// Runs what changes something, first dry and then really. Returns what each said.
    pub async fn dry_then_really(&self, arguments: &[&str]) -> (Value, Value) {
        let before = everything(&self.db).await;
        let dry = self.json(arguments).await;
        assert_eq!(dry["dry_run"], true);
        assert_eq!(everything(&self.db).await, before, "{arguments:?} changes nothing without --yes");
        let text = self.run(arguments).await;
        assert!(text.out.contains("Nothing was changed"), "{text:?}");
        let really = self.json(&[arguments, &["--yes"]].concat()).await;
        assert_eq!(really["dry_run"], false);
        (dry, really)
    }

    /// What is on record, oldest first: who, what, how many, whether it ended, details.
    pub async fn actions(&self) -> Vec<(String, String, i64, bool, Value)> {
        let query =
            "SELECT who, what, how_many, ended_at IS NOT NULL, details FROM operator_actions ORDER BY action_id";
        sqlx::query_as(query).fetch_all(&self.db).await.unwrap()
    }

    pub async fn last_action(&self) -> (String, String, i64, bool) {
        let (who, what, how_many, has_ended, _) = self.actions().await.pop().expect("something is on record");
        (who, what, how_many, has_ended)
    }
}

pub fn said(output: Output) -> Said {
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("it writes UTF-8");
    Said { code: output.status.code().expect("it exits"), out: text(output.stdout), err: text(output.stderr) }
}

/// All rows of all tables that an operator may change.
pub async fn everything(db: &PgPool) -> BTreeMap<&'static str, String> {
    let mut everything = BTreeMap::new();
    for table in [
        "outbox_events",
        "outbox_deliveries",
        "processed_events",
        "inbox_sequences",
        "parked_events",
        "dead_letters",
        "operator_actions",
    ] {
        let sql = format!("SELECT coalesce(string_agg(t::text, E'\\n' ORDER BY t::text), '') FROM {table} t");
        let rows: String = sqlx::query_scalar(sqlx::AssertSqlSafe(sql)).fetch_one(db).await.unwrap();
        everything.insert(table, rows);
    }
    everything
}

pub async fn fail(outbox: &Outbox, aggregate: Uuid, sequence: i64) {
    let failing = "UPDATE outbox_deliveries SET failed_at = now(), attempts = 10, last_error = 'refused by the Broker'
                   WHERE aggregate_id = $1 AND aggregate_sequence = $2";
    sqlx::query(failing).bind(aggregate).bind(sequence).execute(&outbox.db).await.unwrap();
}

pub fn uuid(value: &Value) -> Uuid {
    value.as_str().and_then(|text| text.parse().ok()).unwrap_or_else(|| panic!("{value} is not a UUID"))
}

pub async fn paid(pair: &Pair) -> Order {
    let order = pair.place(100, "EUR").await;
    pair.order_becomes(order.id, "paid").await
}

/// The event_id of an order's event.
pub async fn event_of(pair: &Pair, order: Uuid, event_type: &str) -> Uuid {
    let query = sqlx::query_scalar("SELECT event_id FROM outbox_events WHERE aggregate_id = $1 AND event_type = $2");
    query.bind(order).bind(event_type).fetch_one(&pair.orders_db).await.unwrap()
}

pub async fn is_processed(pair: &Pair, event: Uuid) {
    eventually(SOON, "the event is processed", async || {
        let query = sqlx::query_scalar("SELECT count(*) FROM processed_events WHERE event_id = $1").bind(event);
        let count: i64 = query.fetch_one(&pair.payments_db).await.unwrap();
        if count == 1 { Ok(()) } else { Err("not yet") }
    })
    .await;
}

/// Publishes an event of order-service that order-service knows nothing of.
pub async fn publish_order_event(pair: &Pair, event: Uuid, order: Uuid, sequence: i64, version: &str) {
    let mut headers = HeaderMap::new();
    for (name, value) in [
        ("ce-specversion", "1.0"),
        ("ce-id", &event.to_string()),
        ("ce-source", "/order-service"),
        ("ce-type", "OrderCancelled"),
        ("ce-subject", &order.to_string()),
        ("ce-sequence", &sequence.to_string()),
        ("ce-aggregatetype", "order"),
        ("ce-dataschemaversion", version),
    ] {
        headers.insert(name, value);
    }
    let jetstream = pair.nats.jetstream().await.unwrap();
    let payload = json!({"order_id": order}).to_string();
    let sent = jetstream.publish_with_headers("orders.OrderCancelled", headers, payload.into()).await.unwrap();
    sent.await.unwrap();
}

/// A published outbox of `aggregates` with three events each.
pub async fn published_outbox(aggregates: usize) -> (Outbox, Ctl) {
    let outbox = Outbox::new().await;
    let ctl = Ctl::of(&outbox).await;
    for _ in 0..aggregates {
        let aggregate = Uuid::now_v7();
        for sequence in 1..=3 {
            outbox.append(aggregate, sequence).await;
        }
    }
    drain(&outbox.relay(&[])).await;
    (outbox, ctl)
}

/// The ids of an audit's findings by kind.
pub fn kinds(audit: &Value) -> BTreeMap<String, BTreeSet<String>> {
    let mut kinds: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for finding in audit["findings"].as_array().expect("an audit has findings") {
        let text = |name: &str| finding[name].as_str().expect("it is text").to_owned();
        kinds.entry(text("kind")).or_default().insert(text("id"));
    }
    kinds
}

#[tokio::test]
async fn bad_arguments_are_one_line_and_exit_code_2() {
    let id = "0197a5c0-0000-7000-8000-000000000001";
    let database = ["--database-url", "postgres://user:secret@127.0.0.1:1/nothing"];
    for arguments in [
        &[][..],
        &["frobnicate"],
        &["--nonsense", "status"],
        &["list", "--state", "lost"],
        &["list", "--since", "yesterday"],
        &["list", "--until", "2026-13-01T00:00:00Z"],
        &["list", "--limit", "0"],
        &["list", "--aggregate", "7"],
        &["show"],
        &["requeue"],
        &["requeue", "7"],
        &["requeue", id, "--all-failed"],
        &["requeue", id, "--aggregate", id],
        &["release"],
        &["replay"],
        &["replay", "--rate", "10"],
        &["replay", id, "--rate", "0"],
        &["replay", id, "--type", "ThingHappened"],
        &["purge", "--older-than", "7"],
        &["dead-letters"],
        &["dead-letters", "retry"],
        &["dead-letters", "discard", "--yes"],
        &["dead-letters", "show", "first"],
        &["rebuild", "--stream-max-age", "1m", "--stream-duplicate-window", "2m"],
        &["audit"],
        &["completions", "fishy"],
        &["status", "--database-url", "mysql://127.0.0.1/orders"],
        &["status", "--database-url", "postgres://user:secret@127.0.0.1:port/orders"],
        &["status", "--nats-url", "nats://127.0.0.1:port"],
        &["audit", "--peer-database-url", "orders"],
    ] {
        let has_database = arguments.contains(&"--database-url");
        let arguments = if has_database { arguments.to_vec() } else { [arguments, &database].concat() };
        let mut command = Command::new(program("outboxctl").await.unwrap());
        let said = said(command.args(&arguments).env_clear().output().await.unwrap());
        assert_eq!((said.code, said.out.as_str(), said.err.lines().count()), (2, "", 1), "{arguments:?}: {said:?}");
        assert!(said.err.starts_with("outboxctl: ") && !said.err.contains("secret"), "{arguments:?}: {said:?}");
    }
    let mut command = Command::new(program("outboxctl").await.unwrap());
    let said = said(command.arg("status").env_clear().output().await.unwrap());
    assert_eq!((said.code, said.err.lines().count()), (2, 1), "{said:?}");
    assert!(said.err.contains("DATABASE_URL"), "{said:?}");
}

#[tokio::test]
async fn completions_and_help_need_no_database() {
    for shell in ["bash", "zsh", "fish"] {
        let mut command = Command::new(program("outboxctl").await.unwrap());
        let said = said(command.args(["completions", shell]).env_clear().output().await.unwrap());
        assert_eq!((said.code, said.err.as_str()), (0, ""));
        assert!(said.out.contains("dead-letters") && said.out.contains("older-than"), "{shell}: {}", said.out);
    }
    let mut command = Command::new(program("outboxctl").await.unwrap());
    let said = said(command.arg("--help").env_clear().output().await.unwrap());
    assert_eq!(said.code, 0);
    for word in ["Exit codes", "status", "list", "show", "requeue", "release", "replay", "purge", "audit", "rebuild"] {
        assert!(said.out.contains(word), "{word} is not in\n{}", said.out);
    }
}

#[tokio::test]
async fn a_database_or_broker_that_is_away_is_one_line_and_exit_code_1() {
    let outbox = Outbox::new().await;
    let ctl = Ctl::of(&outbox).await;
    let away = ctl.run(&["list", "--database-url", "postgres://nobody:secret@127.0.0.1:1/nothing"]).await;
    assert_eq!((away.code, away.out.as_str(), away.err.lines().count()), (1, "", 1), "{away:?}");
    assert!(!away.err.contains("secret"), "{away:?}");

    outbox.append(Uuid::now_v7(), 1).await;
    let nowhere = ["--nats-url", "nats://127.0.0.1:1"];
    // What the database knows is shown all the same.
    let status = ctl.run(&[&["status", "--json"][..], &nowhere].concat()).await;
    assert_eq!((status.code, &status.json()["states"]["ready"]), (1, &json!(1)), "{status:?}");
    let replay = ctl.run(&[&["replay", "--since", "1h", "--yes"][..], &nowhere].concat()).await;
    assert_eq!((replay.code, replay.err.lines().count()), (1, 1), "{replay:?}");
}

#[tokio::test]
async fn events_are_listed_by_state_type_aggregate_time_and_error() {
    let outbox = Outbox::new().await;
    let ctl = Ctl::of(&outbox).await;
    let [published, failed, backoff, leased, ready] = std::array::from_fn(|_| Uuid::now_v7());
    outbox.append(published, 1).await;
    drain(&outbox.relay(&[])).await;
    for aggregate in [failed, backoff, leased] {
        outbox.append(aggregate, 1).await;
        outbox.append(aggregate, 2).await;
    }
    outbox.insert(ready, 1..=1, "Other").await;
    fail(&outbox, failed, 1).await;
    let waits = "UPDATE outbox_deliveries SET next_attempt_at = now() + interval '1 hour', attempts = 1
                 WHERE aggregate_id = $1 AND aggregate_sequence = 1";
    sqlx::query(waits).bind(backoff).execute(&outbox.db).await.unwrap();
    outbox.lease_to_a_frozen_relay(leased, 1, "1h").await;

    let list = async |filter: &[&str]| -> BTreeSet<(Uuid, i64)> {
        let rows = ctl.json(&[&["list"], filter].concat()).await;
        let rows = rows.as_array().unwrap().clone();
        rows.iter().map(|row| (uuid(&row["aggregate_id"]), row["aggregate_sequence"].as_i64().unwrap())).collect()
    };
    assert_eq!(list(&["--state", "published"]).await, [(published, 1)].into());
    assert_eq!(list(&["--state", "failed"]).await, [(failed, 1)].into());
    assert_eq!(list(&["--state", "blocked"]).await, [(failed, 2)].into());
    assert_eq!(list(&["--state", "scheduled"]).await, [(backoff, 1), (backoff, 2)].into());
    assert_eq!(list(&["--state", "leased"]).await, [(leased, 1)].into());
    assert_eq!(list(&["--state", "ready"]).await, [(leased, 2), (ready, 1)].into());
    assert_eq!(list(&[]).await.len(), 8);
    assert_eq!(list(&["--limit", "3"]).await.len(), 3);
    assert_eq!(list(&["--type", "Other"]).await, [(ready, 1)].into());
    assert_eq!(list(&["--aggregate", &leased.to_string()]).await, [(leased, 1), (leased, 2)].into());
    assert_eq!(list(&["--error", "REFUSED by"]).await, [(failed, 1)].into());
    assert_eq!(list(&["--error", "nothing"]).await, [].into());
    assert_eq!(list(&["--since", "1h", "--state", "failed"]).await.len(), 1);
    assert_eq!(list(&["--until", "1h"]).await, [].into());
    assert_eq!(list(&["--since", "2100-01-01T00:00:00Z"]).await, [].into());
    let states = ctl.run(&["status", "--json"]).await.json()["states"].clone();
    assert_eq!(states, json!({"failed": 1, "blocked": 1, "scheduled": 2, "leased": 1, "ready": 2}));

    let text = ctl.run(&["list", "--state", "failed"]).await.out;
    assert!(text.starts_with("EVENT") && text.contains("refused by the Broker"), "{text}");
}

/// Runs it at a terminal, and returns what that is sent.
pub async fn run_at_a_terminal(ctl: &Ctl, arguments: &[&str]) -> String {
    let screen = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
    grantpt(&screen).unwrap();
    unlockpt(&screen).unwrap();
    let terminal = ptsname(&screen, Vec::new()).unwrap().into_string().unwrap();
    let terminal = File::options().read(true).write(true).open(terminal).unwrap();
    let mut command = ctl.command(arguments).await;
    command.stderr(terminal.try_clone().unwrap()).stdout(terminal);
    let mut child = command.env("TERM", "xterm").spawn().unwrap();
    child.wait().await.unwrap();
    // Nobody else holds the terminal now: reading the screen ends with an error instead of waiting.
    drop(command);
    let mut shown = Vec::new();
    let _ = File::from(screen).read_to_end(&mut shown);
    String::from_utf8(shown).unwrap()
}

#[tokio::test]
async fn colours_are_for_people_at_a_terminal_only() {
    let outbox = Outbox::new().await;
    let ctl = Ctl::of(&outbox).await;
    let aggregate = Uuid::now_v7();
    outbox.append(aggregate, 1).await;
    fail(&outbox, aggregate, 1).await;
    let (list, json) = (["list", "--state", "failed"], ["list", "--json"]);
    assert!(run_at_a_terminal(&ctl, &list).await.contains("\u{1b}[31mfailed\u{1b}[0m"), "red");
    for plain in [run_at_a_terminal(&ctl, &json).await, ctl.run(&list).await.out, ctl.run(&json).await.out] {
        assert!(plain.contains("failed") && !plain.contains('\u{1b}'), "{plain}");
    }
}

#[tokio::test]
async fn the_whole_way_of_an_event_is_shown_from_either_side_by_any_of_its_ids() {
    let pair = Pair::start().await;
    let order = paid(&pair).await.id;
    pair.all_is_well(&[order].into()).await;
    let created = event_of(&pair, order, "OrderCreated").await;
    let correlation: String =
        sqlx::query_scalar("SELECT headers ->> 'correlationid' FROM outbox_events WHERE event_id = $1")
            .bind(created)
            .fetch_one(&pair.orders_db)
            .await
            .unwrap();

    let orders = Ctl::of_orders(&pair);
    let shown = orders.json(&["show", &created.to_string()]).await;
    let [ours, theirs] = &shown["databases"].as_array().unwrap()[..] else { panic!("{shown}") };
    assert_eq!((&ours["service"], &ours["outbox"][0]["state"]), (&json!("order-service"), &json!("published")));
    assert_eq!(ours["outbox"][0]["payload"]["order_id"], json!(order));
    assert_eq!((&theirs["inbox"][0]["state"], &theirs["inbox"][0]["event_id"]), (&json!("processed"), &json!(created)));
    let found = &shown["messages"][0];
    assert_eq!((&found["message"]["stream"], &found["message"]["sequence"]), (&json!("ORDERS"), &json!(1)));
    assert_eq!(found["consumers"], json!([{"consumer": "payment-service", "state": "acknowledged"}]));

    let of_aggregate = orders.json(&["show", &order.to_string()]).await;
    assert_eq!(of_aggregate["databases"][0]["outbox"].as_array().unwrap().len(), 2, "created and paid");
    assert_eq!(of_aggregate["databases"][1]["sequences"][0]["last_sequence"], 2);
    let of_request = orders.json(&["show", &correlation]).await;
    let events = |side: usize| of_request["databases"][side]["outbox"].as_array().unwrap().len();
    assert_eq!((events(0), events(1)), (2, 1), "what the request led to, in both services");

    // payment-service alone knows what it did with it.
    let alone = Ctl::new(&pair.payments_db, pair.nats.url()).json(&["show", &created.to_string()]).await;
    assert_eq!(alone["databases"][0]["inbox"][0]["state"], "processed");
    let text = orders.run(&["show", &created.to_string()]).await.out;
    for word in ["OrderCreated", "ORDERS 1", "acknowledged", "inbox of payment-service", &correlation] {
        assert!(text.contains(word), "{word} is not in\n{text}");
    }
    let unknown = orders.run(&["show", "no-such-request"]).await;
    assert_eq!((unknown.code, unknown.out.as_str()), (1, "nothing is known of no-such-request\n"));
}

#[tokio::test]
async fn status_of_a_healthy_pair_is_good_and_says_how_far_consumers_are() {
    let pair = Pair::start().await;
    let order = paid(&pair).await.id;
    pair.all_is_well(&[order].into()).await;
    let ctl = Ctl::of_orders(&pair);
    let status = eventually(SOON, "the consumers have acknowledged", async || {
        let said = ctl.run(&["status", "--json"]).await;
        let status = said.json();
        let is_done = |consumer: &Value| consumer["ack_pending"] == 0 && consumer["pending"] == 0;
        let consumers = [&status["broker"]["stream"]["consumers"][0], &status["broker"]["consumes"][0]];
        if said.code == 0 && consumers.iter().all(|consumer| is_done(consumer)) { Ok(status) } else { Err(said) }
    })
    .await;
    assert_eq!(status["broker"]["stream"]["messages"], 2);
    assert_eq!(status["broker"]["stream"]["consumers"][0]["name"], "payment-service");
    let consumes = &status["broker"]["consumes"][0];
    assert_eq!((&consumes["stream"], &consumes["name"]), (&json!("PAYMENTS"), &json!("order-service")));
    assert_eq!((&status["published_last_minute"], &status["processed_last_minute"]), (&json!(2), &json!(1)));
    assert_eq!((&status["states"], &status["problems"]), (&json!({}), &json!([])));
    let text = ctl.run(&["status"]).await.out;
    for line in ["order-service → stream ORDERS", "everything is published", "no problem"] {
        assert!(text.contains(line), "{line} is not in\n{text}");
    }
}

#[tokio::test]
async fn status_names_what_is_failed_and_what_is_behind_it() {
    let outbox = Outbox::new().await;
    let ctl = Ctl::of(&outbox).await;
    let aggregate = Uuid::now_v7();
    for sequence in 1..=3 {
        outbox.append(aggregate, sequence).await;
    }
    fail(&outbox, aggregate, 1).await;
    let said = ctl.run(&["status", "--json"]).await;
    let blocked = &said.json()["blocked"][0];
    assert_eq!((said.code, uuid(&blocked["aggregate_id"]), &blocked["followers"]), (1, aggregate, &json!(2)));
    let text = ctl.run(&["status"]).await.out;
    assert!(text.contains("1 event failed: outboxctl list --state failed"), "{text}");
    assert!(text.contains("2 events blocked"), "{text}");
}
