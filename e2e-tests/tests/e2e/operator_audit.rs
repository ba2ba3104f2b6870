//! outboxctl audit.

use std::collections::BTreeSet;
use std::time::Duration;

use e2e_tests::{Nats, Pair, eventually};
use futures::future::join_all;
use outbox_core::write_source;
use sqlx::{ConnectOptions, PgPool};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::fixture::{Outbox, SOON, drain, messages};
use crate::operator::{Ctl, event_of, kinds, paid, publish_order_event};
use crate::retention::insert_events;

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
    pair.all_is_well(&placed.into_iter().collect()).await;
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
    pair.all_is_well(&orders.iter().copied().collect()).await;
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
async fn an_audit_of_a_large_stream_ends_in_time_while_a_relay_publishes_and_when_the_broker_falls_silent() {
    const EVENTS: i64 = 50_000;
    let nats = Nats::start().await.unwrap();
    let (outbox, other) = (Outbox::on(&nats).await, Outbox::on(&nats).await);
    for outbox in [&outbox, &other] {
        write_source(&outbox.db, &outbox.name).await.unwrap();
    }
    let mut db = outbox.db.acquire().await.unwrap().detach();
    insert_events(&mut db, EVENTS, "1 minute", "next_attempt_at", "now()").await;
    drain(&outbox.relay(&["--relay-batch", "5000"])).await;
    let ctl = Ctl::new(&outbox.db, nats.url()).with_peer(other.db.connect_options().to_url_lossy().as_str());

    let stop = CancellationToken::new();
    let relay = tokio::spawn(outbox.relay(&["--relay-poll-max", "50ms"]).run(stop.clone()));
    let writing = async {
        while !stop.is_cancelled() {
            outbox.append(Uuid::now_v7(), 1).await;
        }
    };
    let auditing = async {
        let audit = ctl.json(&["audit"]).await;
        stop.cancel();
        audit
    };
    let (audit, ()) = futures::join!(auditing, writing);
    relay.await.unwrap();
    let checked = |what: &str| audit["checked"][what].as_i64().unwrap();
    let in_stream = format!("{}: events in the stream", outbox.name.name);
    assert!(checked("things: events") > EVENTS && checked(&in_stream) > EVENTS, "{audit}");

    let silencing = async {
        let stream = outbox.jetstream.get_stream(&outbox.name.name).await.unwrap();
        eventually(SOON, "it reads the stream", async || match stream.get_info().await.unwrap().state.consumer_count {
            0 => Err("no reader"),
            _ => Ok(()),
        })
        .await;
        nats.freeze().await.unwrap();
    };
    let (audit, ()) = futures::join!(ctl.run(&["audit"]), silencing);
    nats.thaw().await.unwrap();
    assert_eq!((audit.code, audit.out.as_str(), audit.err.lines().count()), (1, "", 1), "{audit:?}");
}
