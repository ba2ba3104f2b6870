//! outboxctl, run as an operator runs it: what it shows, what it changes, and that it changes nothing
//! before it is told to.

use std::collections::{BTreeMap, BTreeSet};
use std::process::Output;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use async_nats::HeaderMap;
use e2e_tests::{Checker, Nats, Order, Pair, Provider, Reply, eventually, program};
use futures::future::join_all;
use outbox_core::{MESSAGE_ID, write_source};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use sqlx::{ConnectOptions, PgPool};
use tokio::process::Command;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::fixture::{Outbox, SOON, drain, messages};

/// How an operator reaches one service.
struct Ctl {
    db: PgPool,
    settings: Vec<(&'static str, String)>,
}

/// What a run of outboxctl said.
#[derive(Debug)]
struct Said {
    code: i32,
    out: String,
    err: String,
}

impl Said {
    fn json(&self) -> Value {
        serde_json::from_str(&self.out).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }
}

impl Ctl {
    fn new(db: &PgPool, nats: &str) -> Self {
        let url = db.connect_options().to_url_lossy().to_string();
        let settings = vec![("DATABASE_URL", url), ("NATS_URL", nats.to_owned()), ("OPERATOR", "alice".to_owned())];
        Self { db: db.clone(), settings }
    }

    async fn of(outbox: &Outbox) -> Self {
        write_source(&outbox.db, &outbox.name).await.unwrap();
        Self::new(&outbox.db, Nats::shared().await.unwrap().url())
    }

    fn of_orders(pair: &Pair) -> Self {
        Self::new(&pair.orders_db, pair.nats.url()).with_peer(&pair.payments_url)
    }

    fn of_payments(pair: &Pair) -> Self {
        Self::new(&pair.payments_db, pair.nats.url()).with_peer(&pair.orders_url)
    }

    fn with_peer(mut self, url: &str) -> Self {
        self.settings.push(("PEER_DATABASE_URL", url.to_owned()));
        self
    }

    async fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(program("outboxctl").await.expect("the programs build"));
        command.args(arguments).env_clear().envs(self.settings.iter().map(|(name, value)| (name, value)));
        command.kill_on_drop(true);
        command
    }

    async fn run(&self, arguments: &[&str]) -> Said {
        let output = tokio::time::timeout(SOON * 2, self.command(arguments).await.output()).await;
        said(output.unwrap_or_else(|_| panic!("{arguments:?} does not end")).expect("it can be started"))
    }

    /// Runs what must succeed, and returns what it says in JSON.
    async fn json(&self, arguments: &[&str]) -> Value {
        let said = self.run(&[arguments, &["--json"]].concat()).await;
        assert_eq!(said.code, 0, "{arguments:?}: {said:?}");
        said.json()
    }

    /// Runs what changes something, first dry and then really. Returns what each said.
    async fn dry_then_really(&self, arguments: &[&str]) -> (Value, Value) {
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
    async fn actions(&self) -> Vec<(String, String, i64, bool, Value)> {
        let query =
            "SELECT who, what, how_many, ended_at IS NOT NULL, details FROM operator_actions ORDER BY action_id";
        sqlx::query_as(query).fetch_all(&self.db).await.unwrap()
    }

    async fn last_action(&self) -> (String, String, i64, bool) {
        let (who, what, how_many, has_ended, _) = self.actions().await.pop().expect("something is on record");
        (who, what, how_many, has_ended)
    }
}

fn said(output: Output) -> Said {
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("it writes UTF-8");
    Said { code: output.status.code().expect("it exits"), out: text(output.stdout), err: text(output.stderr) }
}

/// All rows of all tables that an operator may change.
async fn everything(db: &PgPool) -> BTreeMap<&'static str, String> {
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

async fn fail(outbox: &Outbox, aggregate: Uuid, sequence: i64) {
    let failing = "UPDATE outbox_deliveries SET failed_at = now(), attempts = 10, last_error = 'refused by the Broker'
                   WHERE aggregate_id = $1 AND aggregate_sequence = $2";
    sqlx::query(failing).bind(aggregate).bind(sequence).execute(&outbox.db).await.unwrap();
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
async fn a_requeued_head_lets_its_followers_flow_in_order() {
    let outbox = Outbox::new().await;
    let ctl = Ctl::of(&outbox).await;
    let (broken, other) = (Uuid::now_v7(), Uuid::now_v7());
    for sequence in 1..=4 {
        outbox.append(broken, sequence).await;
    }
    outbox.append(other, 1).await;
    fail(&outbox, broken, 1).await;
    let relay = outbox.relay(&[]);
    drain(&relay).await;
    assert!(!outbox.state(broken, 2).await.is_due, "what waits behind a failed event is put off");

    let (dry, really) = ctl.dry_then_really(&["requeue", "--aggregate", &broken.to_string()]).await;
    for answer in [dry, really] {
        let result = &answer["result"];
        assert_eq!((&result["scope"]["events"], &result["followers"]), (&json!(1), &json!(3)), "{answer}");
        assert_eq!(result["scope"]["types"][0]["event_type"], "ThingHappened");
    }
    let state = outbox.state(broken, 1).await;
    assert!(!state.is_failed && state.is_due && state.attempts == 0, "{state:?}");
    assert_eq!(state.last_error.as_deref(), Some("refused by the Broker"), "it stays readable");
    assert_eq!(ctl.last_action().await, ("alice".into(), "requeue".into(), 1, true));
    drain(&relay).await;
    assert_eq!(outbox.published_of(broken).await, [1, 2, 3, 4]);

    let again = ctl.json(&["requeue", "--all-failed", "--yes"]).await;
    assert_eq!(again["result"]["scope"]["events"], 0);
    assert_eq!(ctl.actions().await.len(), 1, "nothing was done, and nothing is on record");
}

#[tokio::test]
async fn requeue_takes_events_by_id_and_type_and_says_which_it_cannot() {
    let outbox = Outbox::new().await;
    let ctl = Ctl::of(&outbox).await;
    let aggregate = Uuid::now_v7();
    let (first, second) = (outbox.append(aggregate, 1).await, outbox.append(aggregate, 2).await);
    fail(&outbox, aggregate, 1).await;
    fail(&outbox, aggregate, 2).await;
    // An event behind another failed one stays blocked, and is requeued all the same.
    ctl.dry_then_really(&["requeue", &second.to_string()]).await;
    assert!(outbox.state(aggregate, 1).await.is_failed && !outbox.state(aggregate, 2).await.is_failed);

    let unknown = Uuid::now_v7().to_string();
    let said = ctl.run(&["requeue", &first.to_string(), &second.to_string(), &unknown, "--yes"]).await;
    assert_eq!(said.code, 1, "{said:?}");
    assert!(said.out.contains("requeued 1 event") && said.out.contains(&unknown), "{said:?}");
    assert!(!outbox.state(aggregate, 1).await.is_failed);

    fail(&outbox, aggregate, 1).await;
    assert_eq!(ctl.json(&["requeue", "--type", "Other", "--yes"]).await["result"]["scope"]["events"], 0);
    assert_eq!(ctl.json(&["requeue", "--type", "ThingHappened", "--yes"]).await["result"]["scope"]["events"], 1);
}

#[tokio::test]
async fn two_operators_requeue_each_event_once_while_relays_run() {
    let outbox = Outbox::new().await;
    let ctl = Ctl::of(&outbox).await;
    let aggregates: Vec<Uuid> = (0..100).map(|_| Uuid::now_v7()).collect();
    for aggregate in &aggregates {
        for sequence in 1..=3 {
            outbox.append(*aggregate, sequence).await;
        }
        fail(&outbox, *aggregate, 1).await;
    }
    let stop = CancellationToken::new();
    let relays: Vec<_> =
        (0..2).map(|_| tokio::spawn(outbox.relay(&["--relay-poll-max", "50ms"]).run(stop.clone()))).collect();
    let requeue = ["requeue", "--all-failed", "--yes"];
    let said = join_all((0..3).map(|_| ctl.run(&requeue))).await;
    assert!(said.iter().all(|said| said.code == 0), "{said:?}");
    let requeued: i64 = ctl.actions().await.iter().map(|(_, _, how_many, ..)| how_many).sum();
    assert_eq!(requeued, 100);

    eventually(SOON, "all are published", async || match outbox.count("published_at IS NULL").await {
        0 => Ok(()),
        left => Err(left),
    })
    .await;
    stop.cancel();
    join_all(relays).await;
    for aggregate in aggregates {
        assert_eq!(outbox.published_of(aggregate).await, [1, 2, 3]);
    }
}

#[tokio::test]
async fn a_dead_workers_leases_are_released_while_relays_run() {
    let outbox = Outbox::new().await;
    let ctl = Ctl::of(&outbox).await;
    let (held, free) = (Uuid::now_v7(), Uuid::now_v7());
    for aggregate in [held, free] {
        outbox.append(aggregate, 1).await;
        outbox.append(aggregate, 2).await;
    }
    outbox.lease_to_a_frozen_relay(held, 1, "1h").await;
    let stop = CancellationToken::new();
    let relay = tokio::spawn(outbox.relay(&["--relay-poll-max", "50ms"]).run(stop.clone()));
    eventually(SOON, "the others flow", async || match outbox.published_of(free).await.as_slice() {
        [1, 2] => Ok(()),
        published => Err(published.to_vec()),
    })
    .await;

    let status = ctl.run(&["status", "--json"]).await.json();
    assert_eq!((&status["leases"][0]["worker"], &status["leases"][0]["events"]), (&json!("frozen"), &json!(1)));
    let nobody = ctl.json(&["release", "somebody", "--yes"]).await;
    assert_eq!(nobody["result"]["scope"]["events"], 0);
    let (dry, really) = ctl.dry_then_really(&["release", "frozen"]).await;
    assert_eq!((&dry["result"]["scope"]["events"], &really["result"]["scope"]["events"]), (&json!(1), &json!(1)));
    assert_eq!(ctl.last_action().await, ("alice".into(), "release".into(), 1, true));
    eventually(SOON, "they are published", async || match outbox.published_of(held).await.as_slice() {
        [1, 2] => Ok(()),
        published => Err(published.to_vec()),
    })
    .await;
    stop.cancel();
    relay.await.unwrap();
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
    assert!(!text.contains('\u{1b}'), "no colours where no terminal is: {text}");
}

fn uuid(value: &Value) -> Uuid {
    value.as_str().and_then(|text| text.parse().ok()).unwrap_or_else(|| panic!("{value} is not a UUID"))
}

async fn paid(pair: &Pair) -> Order {
    let order = pair.place(100, "EUR").await;
    pair.order_becomes(order.id, "paid").await
}

/// The event_id of an order's event.
async fn event_of(pair: &Pair, order: Uuid, event_type: &str) -> Uuid {
    let query = sqlx::query_scalar("SELECT event_id FROM outbox_events WHERE aggregate_id = $1 AND event_type = $2");
    query.bind(order).bind(event_type).fetch_one(&pair.orders_db).await.unwrap()
}

async fn settled(pair: &Pair, orders: &BTreeSet<Uuid>) -> e2e_tests::Counts {
    let jetstream = pair.nats.jetstream().await.unwrap();
    let checker = Checker { orders_db: &pair.orders_db, payments_db: &pair.payments_db, jetstream };
    eventually(SOON, "everything comes to its end", async || checker.check(orders).await.unwrap()).await
}

#[tokio::test]
async fn the_whole_way_of_an_event_is_shown_from_either_side_by_any_of_its_ids() {
    let pair = Pair::start().await;
    let order = paid(&pair).await.id;
    settled(&pair, &[order].into()).await;
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
async fn a_replay_is_delivered_inside_the_brokers_window_and_has_no_second_effect() {
    let pair = Pair::start().await;
    let orders: BTreeSet<Uuid> = join_all((0..3).map(|_| paid(&pair))).await.iter().map(|order| order.id).collect();
    let counts = settled(&pair, &orders).await;
    let before = everything(&pair.orders_db).await;
    let effects = everything(&pair.payments_db).await;
    let ctl = Ctl::of_orders(&pair);

    let (dry, really) = ctl.dry_then_really(&["replay", "--type", "OrderCreated", "--since", "1h"]).await;
    assert_eq!((&dry["result"]["scope"]["events"], &really["result"]["resent"]["sent"]), (&json!(3), &json!(3)));
    assert_eq!(ctl.last_action().await, ("alice".into(), "replay".into(), 3, true));

    let jetstream = pair.nats.jetstream().await.unwrap();
    let sent = messages(&jetstream, "ORDERS").await;
    assert_eq!(sent.len(), 6 + 3);
    for again in &sent[6..] {
        let first = sent[..6].iter().find(|first| first.headers["ce-id"] == again.headers["ce-id"]).unwrap();
        assert_ne!(first.headers[MESSAGE_ID], again.headers[MESSAGE_ID]);
        let others = |message: &outbox_core::Message| {
            let mut headers = message.headers.clone();
            headers.remove(MESSAGE_ID);
            (headers, message.payload.clone())
        };
        assert_eq!(others(first), others(again), "it differs in nothing else");
    }
    eventually(SOON, "the consumer has taken them all", async || {
        let stream = jetstream.get_stream("ORDERS").await.unwrap();
        let consumer = stream.consumer_info("payment-service").await.unwrap();
        let acknowledged = consumer.ack_floor.stream_sequence;
        if acknowledged == 9 { Ok(()) } else { Err(acknowledged) }
    })
    .await;
    assert_eq!(everything(&pair.payments_db).await, effects, "no second effect");
    let after = everything(&pair.orders_db).await;
    assert_eq!(after["outbox_deliveries"], before["outbox_deliveries"], "what is published stays as it is");
    assert_eq!(settled(&pair, &orders).await, e2e_tests::Counts { duplicates: 3, ..counts });
}

/// A published outbox of `aggregates` with three events each.
async fn published_outbox(aggregates: usize) -> (Outbox, Ctl) {
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

/// The sequences of each aggregate in these messages, in their order.
fn by_aggregate(published: &[outbox_core::Envelope]) -> BTreeMap<Uuid, Vec<i64>> {
    let mut found: BTreeMap<Uuid, Vec<i64>> = BTreeMap::new();
    for event in published {
        found.entry(event.aggregate.id).or_default().push(event.aggregate.sequence);
    }
    found
}

#[tokio::test]
async fn a_replay_keeps_its_rate_and_the_order_of_each_aggregate() {
    let (outbox, ctl) = published_outbox(30).await;
    let started = Instant::now();
    let replayed = ctl.json(&["replay", "--since", "1h", "--until", "0.001s", "--rate", "60", "--yes"]).await;
    assert_eq!(replayed["result"]["resent"]["sent"], 90);
    let took = started.elapsed();
    assert!(took > Duration::from_millis(1300), "90 events at 60 a second took {took:?}");
    let again = by_aggregate(&outbox.published().await[90..]);
    assert_eq!(again.len(), 30);
    assert!(again.values().all(|sequences| *sequences == [1, 2, 3]), "{again:?}");

    let aggregate = again.keys().next().unwrap();
    let one = ctl.json(&["replay", "--aggregate", &aggregate.to_string(), "--yes"]).await;
    assert_eq!(one["result"]["resent"]["sent"], 3);
    let first = outbox.published().await[0].id;
    let refused = ctl.run(&["replay", &first.to_string(), &Uuid::now_v7().to_string(), "--yes"]).await;
    assert_eq!(refused.code, 1, "{refused:?}");
    assert!(refused.out.contains("published 1 event again") && refused.out.contains("not published"), "{refused:?}");
}

#[tokio::test]
async fn a_replay_that_was_stopped_goes_on_where_it_was() {
    let (outbox, ctl) = published_outbox(20).await;
    let replay = ["replay", "--type", "ThingHappened", "--yes", "--json", "--rate", "30"];
    let mut command = ctl.command(&replay).await;
    command.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped());
    let child = command.spawn().unwrap();
    let pid = Pid::from_raw(child.id().unwrap() as i32).unwrap();
    eventually(SOON, "some are sent", async || match outbox.published().await.len() {
        sent if sent > 70 => Ok(()),
        sent => Err(sent),
    })
    .await;
    kill_process(pid, Signal::INT).unwrap();
    let stopped = said(child.wait_with_output().await.unwrap());
    assert_eq!(stopped.code, 1, "{stopped:?}");
    let resent = stopped.json()["result"]["resent"].clone();
    let (sent, last) = (resent["sent"].as_i64().unwrap(), resent["last"].as_str().unwrap().to_owned());
    assert!((10..60).contains(&sent), "{resent}");
    let (_, _, recorded, has_ended, details) = ctl.actions().await.pop().unwrap();
    assert_eq!((recorded, has_ended, &details["last"]), (sent, false, &json!(last)), "how far it came is on record");

    let rest = ctl.json(&[&replay[..4], &["--after", &last]].concat()).await;
    assert_eq!(rest["result"]["resent"]["sent"], 60 - sent);
    let again = by_aggregate(&outbox.published().await[60..]);
    assert!(again.len() == 20 && again.values().all(|sequences| *sequences == [1, 2, 3]), "{again:?}");
    let nowhere = ctl.run(&["replay", "--since", "1h", "--after", &Uuid::now_v7().to_string(), "--yes"]).await;
    assert_eq!((nowhere.code, nowhere.err.lines().count()), (1, 1), "{nowhere:?}");
}

#[tokio::test]
async fn a_lost_stream_is_rebuilt_from_the_outbox_and_a_second_time_changes_nothing() {
    let (outbox, ctl) = published_outbox(20).await;
    let waiting = Uuid::now_v7();
    outbox.append(waiting, 1).await;
    let name = &outbox.name.name;
    let before = outbox.published().await;
    outbox.jetstream.delete_stream(name).await.unwrap();

    let dry = ctl.run(&["rebuild"]).await;
    assert!(dry.code == 0 && dry.out.contains("does not exist") && dry.out.contains("the 60 of 60 events"), "{dry:?}");
    assert!(outbox.jetstream.get_stream(name).await.is_err(), "a dry run does not make it");
    let replay = ctl.run(&["replay", "--since", "1h", "--yes"]).await;
    assert_eq!((replay.code, replay.err.lines().count()), (1, 1), "a replay does not make it either: {replay:?}");

    ctl.json(&["rebuild", "--yes", "--rate", "1000"]).await;
    let after = outbox.published().await;
    let sorted = |mut events: Vec<outbox_core::Envelope>| {
        events.sort_by_key(|event| (event.aggregate.id, event.aggregate.sequence));
        events
    };
    assert!(by_aggregate(&after).values().all(|sequences| *sequences == [1, 2, 3]));
    assert_eq!(sorted(after), sorted(before), "the same events, and not one that was never published");
    assert!(messages(&outbox.jetstream, name).await.iter().all(|m| m.headers[MESSAGE_ID] == m.headers["ce-id"]));
    assert_eq!(ctl.last_action().await, ("alice".into(), "rebuild".into(), 60, true));

    let again = ctl.json(&["rebuild", "--yes"]).await;
    assert_eq!(again["result"]["resent"]["sent"], 0);
    // A stream that lost some of its messages gets those.
    let stream = outbox.jetstream.get_stream(name).await.unwrap();
    for sequence in [2, 30, 31] {
        stream.delete_message(sequence).await.unwrap();
    }
    // Their message ids are still in the stream's window: an hour later they would not be.
    let mut config = stream.cached_info().config.clone();
    config.duplicate_window = Duration::from_millis(100);
    outbox.jetstream.update_stream(config).await.unwrap();
    tokio::time::sleep(Duration::from_millis(300)).await;
    let (dry, some) = ctl.dry_then_really(&["rebuild"]).await;
    assert_eq!((&dry["result"]["resent"], &some["result"]["resent"]["sent"]), (&Value::Null, &json!(3)));
}

#[tokio::test]
async fn services_that_run_take_up_a_stream_that_was_lost_and_rebuilt() {
    let pair = Pair::start().await;
    let mut orders: BTreeSet<Uuid> = join_all((0..5).map(|_| paid(&pair))).await.iter().map(|order| order.id).collect();
    settled(&pair, &orders).await;
    let jetstream = pair.nats.jetstream().await.unwrap();
    for (name, ctl) in [("ORDERS", Ctl::of_orders(&pair)), ("PAYMENTS", Ctl::of_payments(&pair))] {
        jetstream.delete_stream(name).await.unwrap();
        let audit = ctl.run(&["audit", "--json"]).await;
        assert_eq!(audit.code, 1, "{audit:?}");
        assert!(kinds(&audit.json()).contains_key("event_without_publication"), "{audit:?}");
        ctl.json(&["rebuild", "--yes"]).await;
    }
    orders.insert(paid(&pair).await.id);
    let counts = settled(&pair, &orders).await;
    assert_eq!(counts.orders, 6);
    Ctl::of_orders(&pair).json(&["audit"]).await;
}

#[tokio::test]
async fn only_what_was_published_long_enough_ago_is_purged() {
    let (outbox, ctl) = published_outbox(700).await;
    let [failed, waiting] = std::array::from_fn(|_| Uuid::now_v7());
    for aggregate in [failed, waiting] {
        outbox.append(aggregate, 1).await;
    }
    fail(&outbox, failed, 1).await;
    let aged = "UPDATE outbox_deliveries SET created_at = created_at - interval '8 days',
                published_at = published_at - interval '8 days' WHERE aggregate_sequence < 3 OR published_at IS NULL";
    sqlx::query(aged).execute(&outbox.db).await.unwrap();

    let (dry, really) = ctl.dry_then_really(&["purge"]).await;
    assert_eq!(dry["result"]["scope"]["events"], 1400);
    assert_eq!(really["result"]["removed"], 1400);
    assert_eq!((outbox.count("published_at IS NOT NULL").await, outbox.count("published_at IS NULL").await), (700, 2));
    let (who, what, how_many, has_ended, details) = ctl.actions().await.pop().unwrap();
    assert_eq!((who.as_str(), what.as_str(), how_many, has_ended), ("alice", "purge", 1400, true));
    assert!(details["cutoff"].is_string(), "{details}");
    let all = ctl.json(&["purge", "--older-than", "1ms", "--yes"]).await;
    assert_eq!(all["result"]["removed"], 700);
    assert_eq!(outbox.count("published_at IS NULL").await, 2);
}

/// A pair whose gateway rejects everything until it is mended, with three orders whose charges are dead
/// letters, each with a cancellation behind it.
async fn with_dead_letters() -> (Pair, Arc<AtomicBool>, Vec<Uuid>, Provider) {
    let is_mended = Arc::new(AtomicBool::new(false));
    let mended = Arc::clone(&is_mended);
    let script = move |_: &_| if mended.load(Ordering::SeqCst) { Reply::Done } else { Reply::Status(402) };
    let provider = Provider::start(script).await;
    let pair = Pair::builder().payment_setting("PAYMENT_GATEWAY_URL", provider.url()).start().await;
    let mut orders = Vec::new();
    for _ in 0..3 {
        let order = pair.place(100, "EUR").await.id;
        pair.cancel(order).await;
        orders.push(order);
    }
    eventually(SOON, "they are dead, and their followers parked", async || {
        let count =
            "SELECT (SELECT count(*) FROM dead_letters), (SELECT count(*) FROM parked_events WHERE reason = 'gap')";
        let counts: (i64, i64) = sqlx::query_as(count).fetch_one(&pair.payments_db).await.unwrap();
        if counts == (3, 3) { Ok(()) } else { Err(counts) }
    })
    .await;
    (pair, is_mended, orders, provider)
}

#[tokio::test]
async fn a_retried_dead_letter_takes_effect_and_its_followers_after_it() {
    let (pair, is_mended, orders, _provider) = with_dead_letters().await;
    let ctl = Ctl::of_payments(&pair);
    let status = ctl.run(&["status"]).await;
    assert_eq!(status.code, 1);
    assert!(status.out.contains("3 dead letters: outboxctl dead-letters list"), "{}", status.out);
    let letters = ctl.json(&["dead-letters", "list"]).await;
    let aggregates: BTreeSet<Uuid> = letters.as_array().unwrap().iter().map(|l| uuid(&l["aggregate_id"])).collect();
    assert_eq!(aggregates, orders.iter().copied().collect());
    let letter = &letters[0]["dead_letter_id"].as_str().unwrap();
    let shown = ctl.json(&["dead-letters", "show", letter]).await;
    assert_eq!(shown[0][1]["headers"]["ce-type"], "OrderCreated");
    assert!(shown[0][1]["payload"].as_str().unwrap().contains("EUR"), "{shown}");
    assert!(ctl.run(&["dead-letters", "show", letter]).await.out.contains("ce-type"));

    is_mended.store(true, Ordering::SeqCst);
    let (dry, really) = ctl.dry_then_really(&["dead-letters", "retry", letter]).await;
    for answer in [dry, really] {
        assert_eq!(answer["result"]["settled"].as_array().unwrap().len(), 1, "{answer}");
    }
    assert_eq!(ctl.last_action().await, ("alice".into(), "dead-letters retry".into(), 1, true));
    pair.order_becomes(uuid(&letters[0]["aggregate_id"]), "refunded").await;

    // The others, by two operators at once.
    let retry = ["dead-letters", "retry", "--all", "--yes"];
    let said = futures::join!(ctl.run(&retry), ctl.run(&retry));
    assert_eq!((said.0.code, said.1.code), (0, 0), "{said:?}");
    let retried: i64 = ctl.actions().await.iter().map(|(_, _, how_many, ..)| how_many).sum();
    assert_eq!(retried, 3);
    for order in &orders {
        pair.order_becomes(*order, "refunded").await;
    }
    settled(&pair, &orders.into_iter().collect()).await;
    ctl.json(&["audit"]).await;
    assert_eq!(ctl.run(&["status"]).await.code, 0);
}

#[tokio::test]
async fn a_discarded_dead_letter_stays_on_record_and_its_followers_go_on() {
    let (pair, _, orders, _provider) = with_dead_letters().await;
    let ctl = Ctl::of_payments(&pair);
    let created = event_of(&pair, orders[0], "OrderCreated").await.to_string();
    let whole: Value = sqlx::query_scalar("SELECT to_jsonb(d) FROM dead_letters d WHERE event_id = $1::uuid")
        .bind(uuid(&json!(created)))
        .fetch_one(&pair.payments_db)
        .await
        .unwrap();

    ctl.dry_then_really(&["dead-letters", "discard", &created]).await;
    let (_, what, how_many, _, details) = ctl.actions().await.pop().unwrap();
    assert_eq!((what.as_str(), how_many), ("dead-letters discard", 1));
    assert_eq!(details["letters"], json!([whole]), "nothing of it is lost");
    let cancelled = event_of(&pair, orders[0], "OrderCancelled").await;
    is_processed(&pair, cancelled).await;
    assert_eq!(pair.order(orders[0]).await.status, "cancelled");
    assert_eq!(pair.payment_of(orders[0]).await, None);
    let unknown = ctl.run(&["dead-letters", "discard", &created, "--yes"]).await;
    assert_eq!(unknown.code, 1, "{unknown:?}");

    // What was given up is no loss; what still waits is.
    let audit = ctl.run(&["audit", "--json"]).await;
    let lost = &kinds(&audit.json())["publication_without_effect"];
    assert_eq!((audit.code, lost.len()), (1, 4), "two orders' creations, dead, and cancellations, parked: {audit:?}");
    assert!(!lost.contains(&created), "{audit:?}");
    ctl.json(&["dead-letters", "discard", "--all", "--yes"]).await;
    for order in &orders {
        is_processed(&pair, event_of(&pair, *order, "OrderCancelled").await).await;
    }
    ctl.json(&["audit"]).await;
}

async fn is_processed(pair: &Pair, event: Uuid) {
    eventually(SOON, "the event is processed", async || {
        let query = sqlx::query_scalar("SELECT count(*) FROM processed_events WHERE event_id = $1").bind(event);
        let count: i64 = query.fetch_one(&pair.payments_db).await.unwrap();
        if count == 1 { Ok(()) } else { Err("not yet") }
    })
    .await;
}

/// Publishes an event of order-service that order-service knows nothing of.
async fn publish_order_event(pair: &Pair, event: Uuid, order: Uuid, sequence: i64, version: &str) {
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

async fn dead_letters_are(pair: &Pair, expected: i64) {
    eventually(SOON, "so many dead letters", async || {
        let count = sqlx::query_scalar("SELECT count(*) FROM dead_letters").fetch_one(&pair.payments_db);
        let count: i64 = count.await.unwrap();
        if count == expected { Ok(()) } else { Err(count) }
    })
    .await;
}

#[tokio::test]
async fn dead_letters_are_settled_in_order_and_illegible_ones_only_discarded() {
    let pair = Pair::start().await;
    let ctl = Ctl::of_payments(&pair);
    let jetstream = pair.nats.jetstream().await.unwrap();
    jetstream.publish("orders.Rubbish", "\u{0}\u{1}not an event".into()).await.unwrap().await.unwrap();
    // Versions that nobody knows: dead, though legible; the second behind the first.
    let (order, first, second) = (Uuid::now_v7(), Uuid::now_v7(), Uuid::now_v7());
    publish_order_event(&pair, first, order, 1, "9").await;
    publish_order_event(&pair, second, order, 2, "9").await;
    dead_letters_are(&pair, 3).await;

    let (first, second) = (first.to_string(), second.to_string());
    let early = ctl.run(&["dead-letters", "discard", &second, "--yes"]).await;
    assert_eq!(early.code, 1);
    assert!(early.out.contains("that one comes first"), "{early:?}");
    let all = ctl.run(&["dead-letters", "retry", "--all", "--yes", "--json"]).await;
    assert_eq!((all.code, all.json()["result"]["settled"].as_array().unwrap().len()), (1, 2), "{all:?}");
    assert!(all.out.contains("it can only be discarded"), "{all:?}");
    // Nothing has changed for the two, so they die again.
    dead_letters_are(&pair, 3).await;

    let discarded = ctl.json(&["dead-letters", "discard", "--all", "--yes"]).await;
    assert_eq!(discarded["result"]["settled"].as_array().unwrap().len(), 3, "{discarded}");
    dead_letters_are(&pair, 0).await;
    let last: i64 = sqlx::query_scalar("SELECT last_sequence FROM inbox_sequences WHERE aggregate_id = $1")
        .bind(order)
        .fetch_one(&pair.payments_db)
        .await
        .unwrap();
    assert_eq!(last, 2);
    let events = ctl.actions().await.iter().filter(|(_, what, ..)| what == "dead-letters discard").count();
    assert_eq!(events, 2, "one of the aggregate, one of what says nothing: {first} {second}");
}

#[tokio::test]
async fn a_letter_behind_events_that_never_came_is_discarded_with_them() {
    let pair = Pair::builder().payment_setting("CONSUMER_GAP_DEADLINE", "1s").start().await;
    let ctl = Ctl::of_payments(&pair);
    let (order, late, follower) = (Uuid::now_v7(), Uuid::now_v7(), Uuid::now_v7());
    publish_order_event(&pair, late, order, 3, "1").await;
    dead_letters_are(&pair, 1).await;
    publish_order_event(&pair, follower, order, 4, "1").await;

    let (dry, _) = ctl.dry_then_really(&["dead-letters", "discard", &late.to_string()]).await;
    assert_eq!(dry["result"]["given_up"], json!([[order, 1, 2]]));
    is_processed(&pair, follower).await;
}

/// The ids of an audit's findings by kind.
fn kinds(audit: &Value) -> BTreeMap<String, BTreeSet<String>> {
    let mut kinds: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for finding in audit["findings"].as_array().expect("an audit has findings") {
        let text = |name: &str| finding[name].as_str().expect("it is text").to_owned();
        kinds.entry(text("kind")).or_default().insert(text("id"));
    }
    kinds
}

#[tokio::test]
async fn an_audit_of_a_healthy_pair_finds_nothing_while_orders_come() {
    let pair = Pair::start().await;
    let (orders, payments) = (Ctl::of_orders(&pair), Ctl::of_payments(&pair));
    let placing = join_all((0..60).map(async |n| {
        tokio::time::sleep(Duration::from_millis(n * 25)).await;
        let order = pair.place(if n % 5 == 0 { 113 } else { 100 }, "EUR").await.id;
        if n % 4 == 0 {
            let _ = pair.api.cancel(order).await;
        }
        order
    }));
    let auditing = async {
        for ctl in [&orders, &payments, &orders] {
            ctl.json(&["audit"]).await;
        }
    };
    let (placed, ()) = futures::join!(placing, auditing);
    settled(&pair, &placed.into_iter().collect()).await;
    let audit = orders.json(&["audit"]).await;
    assert_eq!(audit["checked"]["order-service: orders"], 60, "{audit}");
    let text = payments.run(&["audit"]).await;
    assert!(text.code == 0 && text.out.contains("nothing is lost, nothing is doubled"), "{text:?}");
}

#[tokio::test]
async fn an_audit_finds_each_kind_of_damage() {
    let pair = Pair::start().await;
    let mut orders = Vec::new();
    for _ in 0..6 {
        orders.push(paid(&pair).await.id);
    }
    pair.cancel(orders[5]).await;
    pair.order_becomes(orders[5], "refunded").await;
    settled(&pair, &orders.iter().copied().collect()).await;
    // From here on nobody mends anything.
    pair.orders[0].kill().await.unwrap();
    pair.payments[0].kill().await.unwrap();
    let (db, peer) = (&pair.orders_db, &pair.payments_db);
    let run = async |db: &PgPool, sql: &'static str, id: Uuid| {
        sqlx::query(sql).bind(id).execute(db).await.unwrap();
    };

    let untold = Uuid::now_v7();
    let insert = "INSERT INTO orders (id, customer_id, status, amount, currency, version)
                  VALUES ($1, gen_random_uuid(), 'pending', 100, 'EUR', 1)";
    run(db, insert, untold).await;

    let (phantom, phantom_event) = (Uuid::now_v7(), Uuid::now_v7());
    let event = "WITH event AS (
                     INSERT INTO outbox_events (event_id, aggregate_type, aggregate_id, aggregate_sequence, event_type,
                                                event_version, payload, headers)
                     VALUES ($1, 'order', $2, 1, 'OrderCreated', 1, '{}', '{\"correlationid\": \"x\"}') RETURNING *)
                 INSERT INTO outbox_deliveries (event_id, aggregate_type, aggregate_id, aggregate_sequence, created_at)
                 SELECT event_id, aggregate_type, aggregate_id, aggregate_sequence, created_at FROM event";
    sqlx::query(event).bind(phantom_event).bind(phantom).execute(db).await.unwrap();

    let unpublished = event_of(&pair, orders[0], "OrderPaid").await;
    let jetstream = pair.nats.jetstream().await.unwrap();
    let stream = jetstream.get_stream("ORDERS").await.unwrap();
    let position = |event: Uuid| {
        let jetstream = jetstream.clone();
        async move {
            let all = messages(&jetstream, "ORDERS").await;
            all.iter().position(|m| m.headers["ce-id"] == event.to_string()).unwrap() as u64 + 1
        }
    };
    stream.delete_message(position(unpublished).await).await.unwrap();

    let without_effect = event_of(&pair, orders[1], "OrderCreated").await;
    run(peer, "DELETE FROM processed_events WHERE event_id = $1", without_effect).await;
    let orphan = Uuid::now_v7();
    run(peer, "INSERT INTO processed_events (consumer, event_id) VALUES ('payment-service', $1)", orphan).await;
    let stray = Uuid::now_v7();
    publish_order_event(&pair, stray, Uuid::now_v7(), 1, "1").await;

    sqlx::query("ALTER TABLE payments DROP CONSTRAINT payments_one_per_order").execute(peer).await.unwrap();
    let twice = "INSERT INTO payments (id, order_id, status, amount, currency, charge_id, version)
                 SELECT gen_random_uuid(), order_id, status, amount, currency, charge_id, version
                 FROM payments WHERE order_id = $1";
    run(peer, twice, orders[2]).await;

    let lost = event_of(&pair, orders[5], "OrderPaid").await;
    run(db, "DELETE FROM outbox_deliveries WHERE event_id = $1", lost).await;
    run(db, "DELETE FROM outbox_events WHERE event_id = $1", lost).await;

    for ctl in [Ctl::of_orders(&pair), Ctl::of_payments(&pair)] {
        let audit = ctl.run(&["audit", "--json"]).await;
        assert_eq!(audit.code, 1, "{audit:?}");
        let kinds = kinds(&audit.json());
        let found = |kind: &str, ids: &[Uuid]| {
            let ids: BTreeSet<String> = ids.iter().map(Uuid::to_string).collect();
            assert!(kinds.get(kind).is_some_and(|found| ids.is_subset(found)), "{kind} {ids:?} is not in {kinds:#?}");
        };
        found("row_without_event", &[untold, orders[5]]);
        found("event_without_row", &[phantom]);
        found("event_without_publication", &[phantom_event, unpublished]);
        found("publication_without_effect", &[without_effect]);
        found("publication_without_event", &[stray, lost]);
        found("effect_without_event", &[orphan, lost]);
        found("double_effect", &[orders[2]]);
        found("sequence_gap", &[orders[5]]);
        for sound in [orders[3], orders[4]] {
            assert!(!audit.out.contains(&sound.to_string()), "{sound} is sound: {audit:?}");
        }
        let text = ctl.run(&["audit"]).await;
        assert!(text.code == 1 && text.out.contains("effect without event: 2"), "{text:?}");
    }
}

#[tokio::test]
async fn status_of_a_healthy_pair_is_good_and_says_how_far_consumers_are() {
    let pair = Pair::start().await;
    let order = paid(&pair).await.id;
    settled(&pair, &[order].into()).await;
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
