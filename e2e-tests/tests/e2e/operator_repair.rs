//! outboxctl requeue, release and purge.

use e2e_tests::eventually;
use futures::future::join_all;
use outbox_core::Retention;
use outbox_core::config::RetentionConfig;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::fixture::{Outbox, SOON, drain, settings};
use crate::operator::{Ctl, fail, published_outbox};
use crate::retention::insert_published;

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

    outbox.all_are_published().await;
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

#[tokio::test]
async fn operators_release_and_purge_at_once_beside_retention_and_a_relay() {
    const OLD: i64 = 5_000;
    let outbox = Outbox::new().await;
    let ctl = Ctl::of(&outbox).await;
    insert_published(&mut outbox.db.acquire().await.unwrap(), OLD, "8 days").await;
    let held: Vec<Uuid> = (0..50).map(|_| Uuid::now_v7()).collect();
    for aggregate in &held {
        outbox.append(*aggregate, 1).await;
        outbox.append(*aggregate, 2).await;
        outbox.lease_to_a_frozen_relay(*aggregate, 1, "1h").await;
    }
    let stop = CancellationToken::new();
    let relay = tokio::spawn(outbox.relay(&["--relay-poll-max", "50ms"]).run(stop.clone()));

    let (purge, release) = (["purge", "--yes", "--json"], ["release", "frozen", "--yes", "--json"]);
    let retention = Retention::new(outbox.db.clone(), &settings::<RetentionConfig>(&[]));
    let (first, second, third, fourth, cleaned) =
        futures::join!(ctl.run(&purge), ctl.run(&purge), ctl.run(&release), ctl.run(&release), retention.run_once());
    let said = [first, second, third, fourth];
    assert!(said.iter().all(|said| said.code == 0), "{said:?}");
    let removed: i64 = said[..2].iter().map(|said| said.json()["result"]["removed"].as_i64().unwrap()).sum();
    assert_eq!(removed + cleaned.unwrap() as i64, OLD, "each event once: {said:?}");
    let done = |what: &str, actions: &[(String, String, i64, bool, Value)]| -> i64 {
        actions.iter().filter(|(_, action, ..)| action == what).map(|(_, _, how_many, ..)| how_many).sum()
    };
    let actions = ctl.actions().await;
    assert_eq!((done("purge", &actions), done("release", &actions)), (removed, 50), "{actions:?}");

    outbox.all_are_published().await;
    stop.cancel();
    relay.await.unwrap();
    for aggregate in held {
        assert_eq!(outbox.published_of(aggregate).await, [1, 2]);
    }
}
