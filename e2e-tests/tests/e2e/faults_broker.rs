//! The broker is away for long, or takes nothing: orders are taken all the same, and all that waits is
//! published when it can be.

use std::time::{Duration, Instant};

use async_nats::jetstream::consumer::PullConsumer;
use async_nats::jetstream::{self, stream};
use e2e_tests::{Nats, Pair, Provider, Reply, Service, eventually, http_client};
use serde_json::json;
use sqlx::AssertSqlSafe;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::faults::{count, no_event_is_blamed, unforgiving, while_orders_come};
use crate::fixture::Outbox;
use crate::http::{SOON, answers, send};
use crate::http_outages::{becomes_ready, becomes_unready};

/// So many times as long as the longest wait of any retry, and as a publish.
const LONG: Duration = Duration::from_secs(15);

/// What a process has said and taken until now.
struct Footprint {
    lines: usize,
    kilobytes: i64,
}

impl Footprint {
    async fn of(service: &Service) -> Self {
        // Where the system does not tell, nothing can be said of its memory.
        let status = std::fs::read_to_string(format!("/proc/{}/status", service.pid().await)).unwrap_or_default();
        let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:")?.trim().strip_suffix(" kB"));
        let kilobytes = resident.map_or(0, |number| number.parse().expect("it is a number"));
        Self { lines: service.log().lines().count(), kilobytes }
    }
}

/// Orders come from before the broker goes away, for long after, and are paid when `back` has brought it
/// back.
async fn waits_in_peace(pair: &Pair, away: impl Future<Output = ()>, back: impl Future<Output = ()>) {
    let services = [&pair.orders[0], &pair.payments[0]];
    let (placed, ()) = while_orders_come(pair, async {
        away.await;
        for service in services {
            becomes_unready(service, "broker").await;
        }
        let mut before = Vec::new();
        for service in services {
            before.push(Footprint::of(service).await);
        }
        let begun = Instant::now();
        while begun.elapsed() < LONG {
            for service in services {
                let ready = send(http_client().get(service.admin_url("/health/ready"))).await;
                assert!(ready.status == 503 && ready.json()["reasons"]["broker"].is_string(), "{ready:?}");
            }
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
        for (service, before) in services.into_iter().zip(before) {
            let now = Footprint::of(service).await;
            let (lines, kilobytes) = (now.lines - before.lines, now.kilobytes - before.kilobytes);
            println!("{}: {lines} lines, {kilobytes} kB more of {}", service.name(), now.kilobytes);
            assert!(lines <= 10, "{lines} lines in {LONG:?}\n{}", service.last_words());
            assert!(kilobytes < 4 * 1024, "{kilobytes} kB more than {}", before.kilobytes);
        }
        assert!(count(&pair.orders_db, "published_at IS NULL AND lease_id IS NULL").await > 100);
        back.await;
    })
    .await;
    assert_eq!(placed.turned_away, 0, "whatever the broker does, orders are taken");
    becomes_ready(pair).await;
    pair.all_is_well(&placed.orders).await;
    no_event_is_blamed(pair).await;
}

#[tokio::test]
async fn a_broker_that_is_away_from_the_start_and_for_long_costs_no_event_an_attempt() {
    let pair = unforgiving().setting("RELAY_PUBLISH_TIMEOUT", "500ms").own_servers().start().await;
    // As if nothing had ever been there.
    let services = [&pair.orders[0], &pair.payments[0]];
    for service in services {
        service.kill().await.unwrap();
    }
    let jetstream = pair.nats.jetstream().await.unwrap();
    for stream in ["ORDERS", "PAYMENTS"] {
        jetstream.delete_stream(stream).await.unwrap();
    }
    pair.nats.stop().await.unwrap();
    for service in services {
        service.start_again().await.unwrap();
    }
    for service in services {
        answers(service).await;
    }
    waits_in_peace(&pair, async {}, async { pair.nats.start_again().await.unwrap() }).await;
}

#[tokio::test]
async fn a_broker_that_is_silent_for_long_costs_no_event_an_attempt() {
    let pair = unforgiving()
        .setting("RELAY_PUBLISH_TIMEOUT", "500ms")
        // What was on its way when the connection broke is delivered again after this time.
        .setting("CONSUMER_ACK_WAIT", "5s")
        .own_servers()
        .start()
        .await;
    let freeze = async { pair.nats.freeze().await.unwrap() };
    waits_in_peace(&pair, freeze, async { pair.nats.thaw().await.unwrap() }).await;
}

/// Who consumes which stream.
const CONSUMERS: [(&str, &str); 2] = [("payment-service", "ORDERS"), ("order-service", "PAYMENTS")];

/// Waits until each consumer, which may have to be made first, was given all of its stream and has
/// acknowledged it.
async fn all_is_acknowledged(jetstream: &jetstream::Context) {
    for (durable, stream) in CONSUMERS {
        eventually(SOON, &format!("{durable} has acknowledged {stream}"), async || {
            let messages = jetstream.get_stream(stream).await.unwrap().cached_info().state.messages;
            let consumer: Result<PullConsumer, _> = jetstream.get_consumer_from_stream(durable, stream).await;
            let info = consumer.map_err(|error| error.to_string())?.cached_info().clone();
            let is_done = info.delivered.consumer_sequence >= messages && info.num_ack_pending == 0;
            if is_done { Ok(()) } else { Err(format!("{info:?}")) }
        })
        .await;
    }
}

/// All that both services know, but for the ids that their inboxes have processed.
async fn everything(pair: &Pair) -> Vec<String> {
    let mut rows = Vec::new();
    for (db, table) in [
        (&pair.orders_db, "orders"),
        (&pair.orders_db, "outbox_events"),
        (&pair.orders_db, "inbox_sequences"),
        (&pair.orders_db, "parked_events"),
        (&pair.orders_db, "dead_letters"),
        (&pair.payments_db, "payments"),
        (&pair.payments_db, "outbox_events"),
        (&pair.payments_db, "inbox_sequences"),
        (&pair.payments_db, "parked_events"),
        (&pair.payments_db, "dead_letters"),
    ] {
        let sql = AssertSqlSafe(format!("SELECT row::text FROM {table} row ORDER BY 1"));
        rows.extend(sqlx::query_scalar::<_, String>(sql).fetch_all(db).await.unwrap());
    }
    rows
}

#[tokio::test]
async fn streams_that_are_delivered_once_more_from_their_beginning_to_cleaned_inboxes_change_nothing() {
    let gateway = Provider::start(|_| Reply::Done).await;
    let pair = unforgiving().payment_setting("PAYMENT_GATEWAY_URL", gateway.url()).start().await;
    let jetstream = pair.nats.jetstream().await.unwrap();
    let (placed, ()) = while_orders_come(&pair, tokio::time::sleep(Duration::from_secs(2))).await;
    pair.all_is_well(&placed.orders).await;
    all_is_acknowledged(&jetstream).await;
    let (before, calls) = (everything(&pair).await, gateway.calls().len());

    for (db, (durable, stream)) in std::iter::zip([&pair.payments_db, &pair.orders_db], CONSUMERS) {
        let cleaned = sqlx::query("DELETE FROM processed_events").execute(db).await.unwrap();
        assert!(cleaned.rows_affected() >= placed.orders.len() as u64);
        jetstream.delete_consumer_from_stream(durable, stream).await.unwrap();
    }
    all_is_acknowledged(&jetstream).await;
    assert_eq!(everything(&pair).await, before);
    assert_eq!(gateway.calls().len(), calls, "nobody is asked for anything");
}

#[tokio::test]
async fn streams_that_are_deleted_are_made_again_and_orders_are_paid_as_before() {
    let pair = unforgiving().start().await;
    let jetstream = pair.nats.jetstream().await.unwrap();
    for _ in 0..3 {
        let order = pair.place(100, "EUR").await;
        pair.order_becomes(order.id, "paid").await;
        all_is_acknowledged(&jetstream).await;
        for (_, stream) in CONSUMERS {
            jetstream.delete_stream(stream).await.unwrap();
        }
    }
    let order = pair.place(100, "EUR").await;
    pair.order_becomes(order.id, "paid").await;
    no_event_is_blamed(&pair).await;
}

/// Gives a stream room for everything.
async fn make_room(jetstream: &jetstream::Context, name: &str) {
    let config = jetstream.get_stream(name).await.unwrap().cached_info().config.clone();
    jetstream.update_stream(stream::Config { max_bytes: -1, max_messages: -1, ..config }).await.unwrap();
}

#[tokio::test]
async fn what_full_streams_refuse_is_published_in_order_when_there_is_room() {
    // One is full of bytes, the other of messages.
    let pair = unforgiving().order_setting("STREAM_MAX_BYTES", "16384").start().await;
    let jetstream = pair.nats.jetstream().await.unwrap();
    let payments = jetstream.get_stream("PAYMENTS").await.unwrap().cached_info().config.clone();
    jetstream.update_stream(stream::Config { max_messages: 10, ..payments }).await.unwrap();

    let (placed, ()) = while_orders_come(&pair, async {
        for service in [&pair.orders[0], &pair.payments[0]] {
            eventually(SOON, "its relay takes notice", async || {
                if service.log().contains("the broker takes no events") { Ok(()) } else { Err(service.log()) }
            })
            .await;
        }
        // Far more than every event's share of attempts.
        tokio::time::sleep(Duration::from_secs(3)).await;
        for db in [&pair.orders_db, &pair.payments_db] {
            assert_eq!(count(db, "failed_at IS NOT NULL").await, 0);
            assert!(count(db, "published_at IS NULL").await > 0);
        }
        make_room(&jetstream, "PAYMENTS").await;
        make_room(&jetstream, "ORDERS").await;
    })
    .await;
    assert_eq!(placed.turned_away, 0);
    pair.all_is_well(&placed.orders).await;
}

#[tokio::test]
async fn in_a_full_stream_what_can_never_be_sent_fails_and_the_rest_waits_for_room() {
    let outbox = Outbox::on(Nats::shared().await.unwrap()).await;
    let stream = outbox.jetstream.get_stream(&outbox.name.name).await.unwrap();
    let config = stream.cached_info().config.clone();
    outbox.jetstream.update_stream(stream::Config { max_messages: 1, ..config }).await.unwrap();
    let (first, good, large, unsendable) = (Uuid::now_v7(), Uuid::now_v7(), Uuid::now_v7(), Uuid::now_v7());
    let patience = ["--relay-max-attempts", "1", "--relay-backoff-base", "1ms", "--relay-backoff-max", "10ms"];
    let relay = outbox.relay(&patience);
    outbox.append(first, 1).await;
    assert_eq!(relay.run_once().await.unwrap().published, 1);

    for sequence in 1..=3 {
        outbox.append(good, sequence).await;
        outbox.append(large, sequence).await;
    }
    outbox.append_payload(large, 4, json!("x".repeat(1_100_000))).await;
    outbox.insert(unsendable, 1..=1, "Thing Happened").await;
    outbox.append(unsendable, 2).await;

    let stop = CancellationToken::new();
    let running = tokio::spawn(relay.run(stop.clone()));
    eventually(SOON, "the rest was refused more often than it may fail", async || {
        let (unsendable, good) = (outbox.state(unsendable, 1).await, outbox.state(good, 1).await);
        if unsendable.is_failed && good.attempts > 0 { Ok(()) } else { Err((unsendable, good)) }
    })
    .await;
    assert_eq!(outbox.published().await.len(), 1);
    make_room(&outbox.jetstream, &outbox.name.name).await;
    eventually(SOON, "all that can be sent is", async || match outbox.count("published_at IS NULL").await {
        3 => Ok(()),
        left => Err(left),
    })
    .await;
    stop.cancel();
    running.await.unwrap();

    assert_eq!(outbox.published_of(good).await, [1, 2, 3]);
    assert_eq!(outbox.published_of(large).await, [1, 2, 3]);
    let too_large = outbox.state(large, 4).await;
    assert!(too_large.is_failed && too_large.last_error.is_some(), "{too_large:?}");
    let behind = outbox.state(unsendable, 2).await;
    assert!(!behind.is_published && !behind.is_failed && behind.attempts == 0, "{behind:?}");
}
