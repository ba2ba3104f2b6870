//! Processes whose clocks are wrong, that are told to stop in the middle of everything, and that break.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use e2e_tests::{Nats, Pair, Service, eventually, http_client};
use outbox_core::write_source;
use serde_json::Value;
use sqlx::{ConnectOptions, Connection, PgConnection};
use time::OffsetDateTime;
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use uuid::Uuid;

use crate::faults::{count, no_event_is_blamed, unforgiving, while_orders_come};
use crate::fixture::Outbox;
use crate::http::{SOON, connect, order_of, raw_post, send, try_send};

/// The library that lets a process believe in another time, where it is installed.
fn libfaketime() -> Option<PathBuf> {
    let folders = std::fs::read_dir("/usr/lib").ok()?.flatten().map(|entry| entry.path());
    let libraries = folders.map(|folder| folder.join("faketime/libfaketimeMT.so.1"));
    libraries.chain(["/usr/lib64/faketime/libfaketimeMT.so.1".into()]).find(|library| library.exists())
}

/// How far ahead of ours the clock is that gave this id.
fn minutes_ahead(id: Uuid) -> i64 {
    let (seconds, _) = id.get_timestamp().expect("it is of version 7").to_unix();
    (seconds as i64 - OffsetDateTime::now_utc().unix_timestamp()) / 60
}

#[tokio::test]
async fn processes_whose_clocks_differ_by_twenty_minutes_keep_the_promise() {
    let Some(libfaketime) = libfaketime() else {
        println!("skipped: libfaketime is not installed (the package is called faketime)");
        return;
    };
    let settings = [
        ("LD_PRELOAD", libfaketime.to_str().expect("the path is UTF-8")),
        // Only what the clock shows is wrong, not how fast it runs.
        ("FAKETIME_DONT_FAKE_MONOTONIC", "1"),
        // Short enough that leases run out, are renewed and are taken over.
        ("RELAY_LEASE", "2s"),
        ("RELAY_PUBLISH_TIMEOUT", "1s"),
        ("RELAY_BATCH", "10"),
        ("CONSUMER_ACK_WAIT", "2s"),
        ("CONSUMER_BATCH", "10"),
    ];
    let mut builder = unforgiving().setting("FAKETIME", "+10m");
    for (variable, value) in settings {
        builder = builder.setting(variable, value);
    }
    let mut pair = builder.payment_setting("GATEWAY_TIMEOUT", "1s").start().await;
    for (name, database) in [("order-service", pair.orders_url.clone()), ("payment-service", pair.payments_url.clone())]
    {
        let needed = [
            ("DATABASE_URL", &*database),
            ("NATS_URL", pair.nats.url()),
            ("FAKETIME", "-10m"),
            ("GATEWAY_TIMEOUT", "1s"),
        ];
        let needed = &needed[..if name == "payment-service" { 4 } else { 3 }];
        let service = Service::start(name, &[needed, &settings].concat()).await.unwrap();
        service.wait_until_ready(SOON).await.unwrap();
        if name == "order-service" { pair.orders.push(service) } else { pair.payments.push(service) }
    }
    let (placed, ()) = while_orders_come(&pair, async {
        for service in pair.orders.iter().chain(&pair.payments).cycle().take(8) {
            // Longer than a lease, and what it holds is taken over.
            service.freeze().await.unwrap();
            tokio::time::sleep(Duration::from_millis(2_500)).await;
            service.thaw().await.unwrap();
        }
    })
    .await;
    pair.all_is_well(&placed.orders).await;
    for service in pair.orders.iter().chain(&pair.payments) {
        let metrics = send(http_client().get(service.admin_url("/metrics"))).await.body;
        assert!(metrics.contains("outbox_published_total{"), "{} has had its share: {metrics}", service.name());
    }
    let mut clocks: Vec<i64> = placed.orders.iter().map(|id| minutes_ahead(*id)).collect();
    clocks.sort_unstable();
    assert!(clocks[0] <= -9 && clocks[clocks.len() - 1] >= 8, "from {} to {}", clocks[0], clocks[clocks.len() - 1]);
}

#[tokio::test]
async fn a_relay_that_was_frozen_for_longer_than_its_lease_changes_nothing_when_it_wakes() {
    let nats = Nats::start().await.unwrap();
    let outbox = Outbox::on(&nats).await;
    write_source(&outbox.db, &outbox.name).await.unwrap();
    let database = outbox.db.connect_options().to_url_lossy().to_string();
    let relay = async |more: &[(&str, &str)]| {
        let timing = [("RELAY_LEASE", "2s"), ("RELAY_PUBLISH_TIMEOUT", "1s")];
        let settings = [&timing[..], &[("DATABASE_URL", &database), ("NATS_URL", nats.url())], more].concat();
        let relay = Service::start("outbox-relay", &settings).await.unwrap();
        relay.wait_until_ready(SOON).await.unwrap();
        relay
    };
    // It freezes when it has published what it holds, and before it marks it.
    let frozen = relay(&[("CRASH_AT", "relay.after_ack:1:freeze")]).await;
    let id = Uuid::now_v7();
    outbox.insert(id, 1..=20, "ThingHappened").await;
    let mut stream = outbox.jetstream.get_stream(&outbox.name.name).await.unwrap();
    eventually(SOON, "it has published them", async || match stream.info().await.unwrap().state.messages {
        20 => Ok(()),
        published => Err(published),
    })
    .await;
    let _other = relay(&[]).await;
    eventually(SOON, "another relay takes them over", async || match outbox.count("published_at IS NULL").await {
        0 => Ok(()),
        left => Err(left),
    })
    .await;
    let published = outbox.rows().await;

    frozen.thaw().await.unwrap();
    eventually(SOON, "it has noticed", async || {
        let metrics = send(http_client().get(frozen.admin_url("/metrics"))).await.body;
        if metrics.contains("outbox_lost_leases_total 20\n") { Ok(()) } else { Err(frozen.last_words()) }
    })
    .await;
    assert_eq!(outbox.rows().await, published);
    assert_eq!(outbox.published_of(id).await, (1..=20).collect::<Vec<_>>());
}

/// Connections on which nothing was sent, half of a request, and all but its last byte; and one whose
/// client has hung up halfway and still listens.
async fn half_open_connections(service: &Service) -> Vec<TcpStream> {
    let request = raw_post(order_of(Uuid::new_v4()).to_string().as_bytes(), "");
    let mut held = Vec::new();
    for sent in [0, 40, request.len() / 2, request.len() - 1] {
        let mut stream = connect(service).await;
        stream.write_all(&request[..sent]).await.unwrap();
        held.push(stream);
    }
    let mut stream = connect(service).await;
    stream.write_all(&request[..40]).await.unwrap();
    stream.shutdown().await.unwrap();
    held.push(stream);
    held
}

#[tokio::test]
async fn services_that_stop_in_the_middle_of_everything_leave_nothing_behind_until_a_lease_expires() {
    const GRACE: Duration = Duration::from_secs(4);
    // What a stopped process held would be missed for an hour.
    let pair = unforgiving()
        .setting("SHUTDOWN_GRACE", "4s")
        .setting("RELAY_LEASE", "1h")
        .setting("RELAY_BATCH", "20")
        .setting("CONSUMER_ACK_WAIT", "1h")
        .setting("CONSUMER_BATCH", "4")
        .start()
        .await;
    let (placed, ()) = while_orders_come(&pair, async {
        for round in 0..4 {
            for (service, db) in [(&pair.orders[0], &pair.orders_db), (&pair.payments[0], &pair.payments_db)] {
                tokio::time::sleep(Duration::from_millis(fastrand::u64(200..1_000))).await;
                // Without them it has less time to finish, and is told to stop at another moment.
                let held = if round % 2 == 0 { half_open_connections(service).await } else { Vec::new() };
                let asked = Instant::now();
                let status = service.terminate(SOON).await.unwrap();
                assert_eq!(status.code(), Some(0), "{}", service.last_words());
                assert!(asked.elapsed() < GRACE, "it took {:?}\n{}", asked.elapsed(), service.last_words());
                assert_eq!(count(db, "lease_id IS NOT NULL").await, 0);
                drop(held);
                service.start_again().await.unwrap();
                service.wait_until_ready(SOON).await.unwrap();
            }
        }
    })
    .await;
    pair.all_is_well(&placed.orders).await;
    no_event_is_blamed(&pair).await;
}

/// Breaks a loop of order-service, and expects the process to say so and to end.
async fn ends_when_its_loop_panics(task: &str, point: &str) {
    let crash_at = format!("{point}:panic");
    let mut pair =
        Pair::builder().order_setting("CRASH_AT", &crash_at).order_setting("SHUTDOWN_GRACE", "6s").start().await;
    let first = pair.place(100, "EUR").await.id;
    pair.order_becomes(first, "paid").await;
    // A request that waits for this lock keeps the process from ending at once.
    let mut db = PgConnection::connect(&pair.orders_url).await.unwrap();
    let mut tx = db.begin().await.unwrap();
    sqlx::query("SELECT FROM orders WHERE id = $1 FOR UPDATE").bind(first).execute(&mut *tx).await.unwrap();
    let service = &pair.orders[0];
    let cancelling = tokio::spawn(try_send(http_client().post(service.url(&format!("/orders/{first}/cancel")))));

    let http = http_client();
    let placing = async {
        let mut orders = Vec::new();
        while let Ok(answer) = try_send(http.post(service.url("/orders")).json(&order_of(Uuid::new_v4()))).await {
            orders.push(answer);
        }
        orders
    };
    let (orders, ()) = tokio::join!(placing, async {
        eventually(SOON, "readiness says which loop broke", async || {
            let ready = send(http.get(service.admin_url("/health/ready"))).await;
            let how = ready.json()["reasons"][task].as_str().unwrap_or_default().to_owned();
            if ready.status == 503 && how.contains("panic") { Ok(()) } else { Err(ready) }
        })
        .await;
        let metrics = send(http.get(service.admin_url("/metrics"))).await.body;
        assert!(metrics.contains(&format!("process_task_up{{task=\"{task}\"}} 0")), "{metrics}");
    });
    tx.commit().await.unwrap();
    // Stopping as any other, but for the end.
    assert_eq!(cancelling.await.unwrap().unwrap().status, 200);
    assert_eq!(service.wait_for_end().await.unwrap().code(), Some(1), "{}", service.last_words());

    pair.orders[0].start_again_for_good().await.unwrap();
    pair.orders[0].wait_until_ready(SOON).await.unwrap();
    let id = |answer: &Value| answer["id"].as_str().unwrap().parse().unwrap();
    let taken = orders.iter().filter(|answer| answer.status == 201).map(|answer| id(&answer.json()));
    pair.all_is_well(&taken.chain([first]).collect()).await;
}

#[tokio::test]
async fn a_process_whose_relay_panics_turns_red_and_ends_with_a_failure() {
    ends_when_its_loop_panics("relay", "relay.after_claim:3").await;
}

#[tokio::test]
async fn a_process_whose_consumer_panics_turns_red_and_ends_with_a_failure() {
    ends_when_its_loop_panics("consumer", "consumer.after_fetch:2").await;
}
