//! outboxctl replay and rebuild.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use e2e_tests::{Pair, eventually};
use futures::future::join_all;
use outbox_core::MESSAGE_ID;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::fixture::{SOON, messages};
use crate::operator::{Ctl, everything, kinds, paid, published_outbox, run_at_a_terminal, said};

#[tokio::test]
async fn a_replay_is_delivered_inside_the_brokers_window_and_has_no_second_effect() {
    let pair = Pair::start().await;
    let orders: BTreeSet<Uuid> = join_all((0..3).map(|_| paid(&pair))).await.iter().map(|order| order.id).collect();
    let counts = pair.all_is_well(&orders).await;
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
    assert_eq!(pair.all_is_well(&orders).await, e2e_tests::Counts { duplicates: 3, ..counts });
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

    let shown = run_at_a_terminal(&ctl, &["replay", "--since", "1h", "--rate", "60", "--yes"]).await;
    assert!(shown.contains("\rpublished again 6 of 90") && shown.contains("published again 90 of 90"), "{shown}");

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

    let go_on = [&replay[..3], &["--after", &last]].concat();
    assert_eq!(ctl.json(&go_on).await["result"]["scope"]["events"], 60 - sent, "a dry run counts the rest");
    let rest = ctl.json(&[&go_on[..], &["--yes"]].concat()).await;
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
async fn operators_replay_and_rebuild_at_once_while_a_relay_runs() {
    let (outbox, ctl) = published_outbox(20).await;
    let stop = CancellationToken::new();
    let relay = tokio::spawn(outbox.relay(&["--relay-poll-max", "50ms"]).run(stop.clone()));
    let new = Uuid::now_v7();
    let writing = async {
        for sequence in 1..=30 {
            outbox.append(new, sequence).await;
        }
    };
    let replay = ["replay", "--until", "1ms", "--rate", "200", "--yes"];
    let (one, other, ()) = futures::join!(ctl.json(&replay), ctl.json(&replay), writing);
    let sent = [&one, &other].map(|replay| replay["result"]["resent"]["sent"].as_i64().unwrap());
    assert!(sent.iter().all(|sent| (60..=90).contains(sent)), "{sent:?}");
    // Each replay in an order of its own, under message ids of its own: event_id and action.
    let replayed = messages(&outbox.jetstream, &outbox.name.name).await.into_iter().filter_map(|message| {
        let (_, action) = message.headers[MESSAGE_ID].split_once(':')?;
        Some((action.to_owned(), outbox_core::Envelope::read(&message).unwrap()))
    });
    let mut replays: BTreeMap<String, Vec<outbox_core::Envelope>> = BTreeMap::new();
    replayed.for_each(|(action, event)| replays.entry(action).or_default().push(event));
    assert_eq!(replays.len(), 2);
    for events in replays.values() {
        for (aggregate, sequences) in by_aggregate(events) {
            assert!(sequences.iter().copied().eq(1..=sequences.len() as i64), "{aggregate}: {sequences:?}");
            assert!(aggregate == new || sequences.len() == 3, "{aggregate}: {sequences:?}");
        }
    }

    outbox.jetstream.delete_stream(&outbox.name.name).await.unwrap();
    let rebuild = ["rebuild", "--yes"];
    let writing = async {
        for sequence in 31..=60 {
            outbox.append(new, sequence).await;
        }
    };
    futures::join!(ctl.json(&rebuild), ctl.json(&rebuild), writing);
    eventually(SOON, "the relay has published the rest", async || match outbox.count("published_at IS NULL").await {
        0 => Ok(()),
        left => Err(left),
    })
    .await;
    stop.cancel();
    relay.await.unwrap();
    let rebuilt = outbox.published().await;
    let ids: BTreeSet<Uuid> = rebuilt.iter().map(|event| event.id).collect();
    assert_eq!((rebuilt.len(), ids.len()), (60 + 60, 60 + 60), "each event once");
}

#[tokio::test]
async fn services_that_run_take_up_a_stream_that_was_lost_and_rebuilt() {
    let pair = Pair::start().await;
    let mut orders: BTreeSet<Uuid> = join_all((0..5).map(|_| paid(&pair))).await.iter().map(|order| order.id).collect();
    pair.all_is_well(&orders).await;
    let jetstream = pair.nats.jetstream().await.unwrap();
    for (name, ctl) in [("ORDERS", Ctl::of_orders(&pair)), ("PAYMENTS", Ctl::of_payments(&pair))] {
        jetstream.delete_stream(name).await.unwrap();
        let audit = ctl.run(&["audit", "--json"]).await;
        assert_eq!(audit.code, 1, "{audit:?}");
        assert!(kinds(&audit.json()).contains_key("event_without_publication"), "{audit:?}");
        ctl.json(&["rebuild", "--yes"]).await;
    }
    orders.insert(paid(&pair).await.id);
    let counts = pair.all_is_well(&orders).await;
    assert_eq!(counts.orders, 6);
    Ctl::of_orders(&pair).json(&["audit"]).await;
}
