//! outboxctl dead-letters.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use e2e_tests::{Pair, Provider, Reply, eventually};
use serde_json::{Value, json};
use uuid::Uuid;

use crate::fixture::SOON;
use crate::operator::{Ctl, event_of, is_processed, kinds, publish_order_event, uuid};

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
    pair.all_is_well(&orders.into_iter().collect()).await;
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

    // Its consumer looks at the follower again and again, so that the tables never stand still.
    let discard = ["dead-letters", "discard", &late.to_string()];
    for discard in [&discard[..], &[&discard[..], &["--yes"]].concat()] {
        assert_eq!(ctl.json(discard).await["result"]["given_up"], json!([[order, 1, 2]]));
    }
    is_processed(&pair, follower).await;
}
