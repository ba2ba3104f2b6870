//! The programs as processes: their settings, how they start and how they end.

use std::process::Output;
use std::time::{Duration, Instant};

use e2e_tests::{Pair, Postgres, Service, eventually, free_port, http_client, program};
use futures::future::join_all;
use rustix::process::Signal;
use sqlx::{Connection, PgConnection};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::process::Command;
use uuid::Uuid;

use crate::http::{SOON, answers, connect, order_of, raw_post, read_answer, send, start_without_broker};

const PROGRAMS: [&str; 3] = ["order-service", "payment-service", "outbox-relay"];

/// A URL that is a good one, though nothing answers there.
const NOWHERE: (&str, &str) = ("DATABASE_URL", "postgres://nobody:secret@127.0.0.1:1/nothing");

/// Runs a program that is to end by itself, with no more settings than these.
async fn run(name: &str, arguments: &[&str], settings: &[(&str, &str)]) -> Output {
    let mut command = Command::new(program(name).await.expect("the programs build"));
    command.args(arguments).env_clear().envs(settings.iter().copied()).kill_on_drop(true);
    let output = tokio::time::timeout(SOON, command.output()).await;
    output.unwrap_or_else(|_| panic!("{name} does not end with {settings:?}")).expect("it can be started")
}

/// Runs a program that is to refuse these settings, and returns its only line.
async fn refusal(name: &str, settings: &[(&str, &str)]) -> String {
    let output = run(name, &[], settings).await;
    let (said, error) = (text(&output.stdout), text(&output.stderr));
    assert_eq!(output.status.code(), Some(2), "{name} {settings:?}: {said}{error}");
    assert_eq!((said.as_str(), error.lines().count()), ("", 1), "{name} {settings:?}: {said}{error}");
    for word in ["panicked", "secret", "Error {", "src/", "RUST_BACKTRACE"] {
        assert!(!error.contains(word), "{name} {settings:?}: {error}");
    }
    error
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("programs write UTF-8")
}

#[tokio::test]
async fn a_setting_that_cannot_be_is_one_line_that_names_it() {
    let everywhere = [
        ("DATABASE_URL", "orders"),
        ("DATABASE_URL", "mysql://127.0.0.1/orders"),
        ("DATABASE_URL", "postgres://user:secret@127.0.0.1:port/orders"),
        ("DATABASE_POOL", "1"),
        ("DATABASE_POOL", "many"),
        ("NATS_URL", "nats://127.0.0.1:port"),
        ("ADMIN_ADDR", "x"),
        ("ADMIN_ADDR", "127.0.0.1"),
        ("LOG_FORMAT", "xml"),
        ("RUST_LOG", "a=b=c"),
        ("SHUTDOWN_GRACE", "10"),
        ("RELAY_BATCH", "0"),
        ("RELAY_BATCH", "10001"),
        ("RELAY_LEASE", "-1s"),
        ("RELAY_PUBLISH_TIMEOUT", "soon"),
        ("RELAY_POLL_MIN", "5"),
        ("RELAY_POLL_MAX", "0s"),
        ("RELAY_BACKOFF_BASE", ""),
        ("RELAY_BACKOFF_MAX", "1"),
        ("RELAY_MAX_ATTEMPTS", "0"),
        ("STREAM_MAX_AGE", "week"),
        ("STREAM_MAX_BYTES", "0"),
        ("STREAM_DUPLICATE_WINDOW", "2"),
        ("STREAM_REPLICAS", "one"),
    ];
    let services = [
        ("HTTP_ADDR", "x"),
        ("HTTP_ADDR", "127.0.0.1:65536"),
        ("RELAY", "maybe"),
        ("MIGRATE", "yes"),
        ("CONSUMER_BATCH", "0"),
        ("CONSUMER_BATCH", "-1"),
        ("CONSUMER_ACK_WAIT", "30"),
        ("CONSUMER_MAX_ATTEMPTS", "0"),
        ("CONSUMER_BACKOFF_BASE", "fast"),
        ("CONSUMER_BACKOFF_MAX", "0s"),
        ("CONSUMER_GAP_DEADLINE", "never"),
        ("RELAY_RETENTION", "7"),
        ("INBOX_RETENTION", "long"),
    ];
    let payments = [
        ("GATEWAY_TIMEOUT", "5"),
        ("PAYMENT_GATEWAY_URL", "gateway.example"),
        ("PAYMENT_GATEWAY_URL", "ftp://user:secret@gateway.example"),
        ("PAYMENT_GATEWAY_URL", "http://"),
    ];
    for name in PROGRAMS {
        let of_services: &[_] = if name == "outbox-relay" { &[] } else { &services };
        let of_payments: &[_] = if name == "payment-service" { &payments } else { &[] };
        for (variable, value) in [&everywhere, of_services, of_payments].concat() {
            let line = refusal(name, &[NOWHERE, (variable, value)]).await;
            assert!(line.contains(variable), "{name} {variable}={value}: {line}");
        }
        let line = refusal(name, &[]).await;
        assert!(line.contains("DATABASE_URL"), "{name} without a database: {line}");
    }
}

#[tokio::test]
async fn settings_that_contradict_each_other_are_one_line_that_names_both() {
    let relay: [[(&str, &str); 2]; 5] = [
        [("RELAY_LEASE", "1s"), ("RELAY_PUBLISH_TIMEOUT", "5s")],
        [("RELAY_LEASE", "4s"), ("RELAY_PUBLISH_TIMEOUT", "4s")],
        [("RELAY_POLL_MAX", "10ms"), ("RELAY_POLL_MIN", "20ms")],
        [("RELAY_BACKOFF_MAX", "1s"), ("RELAY_BACKOFF_BASE", "2s")],
        [("STREAM_MAX_AGE", "1m"), ("STREAM_DUPLICATE_WINDOW", "2m")],
    ];
    let consumer = [[("CONSUMER_BACKOFF_MAX", "1s"), ("CONSUMER_BACKOFF_BASE", "2s")]];
    let gateway = [[("CONSUMER_ACK_WAIT", "5s"), ("GATEWAY_TIMEOUT", "6s")]];
    for name in PROGRAMS {
        let of_services: &[_] = if name == "outbox-relay" { &[] } else { &consumer };
        let of_payments: &[_] = if name == "payment-service" { &gateway } else { &[] };
        for [one, other] in [&relay, of_services, of_payments].concat() {
            let line = refusal(name, &[NOWHERE, one, other]).await;
            for (variable, value) in [one, other] {
                assert!(line.contains(variable) && line.contains(value), "{name} {variable}={value}: {line}");
            }
        }
    }
    // A bound of two settings.
    let settings = [NOWHERE, ("INBOX_RETENTION", "6d"), ("STREAM_MAX_AGE", "2d"), ("RELAY_RETENTION", "5d")];
    for name in ["order-service", "payment-service"] {
        let line = refusal(name, &settings).await;
        let complaint = "INBOX_RETENTION is 6days, which is shorter than STREAM_MAX_AGE plus RELAY_RETENTION (7days)";
        assert!(line.contains(complaint), "{name}: {line}");
    }
}

#[tokio::test]
async fn a_port_that_is_taken_is_one_line_that_names_the_setting() {
    let taken = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let taken = taken.local_addr().unwrap().to_string();
    let broker = ("NATS_URL", "nats://127.0.0.1:1");
    for name in PROGRAMS {
        for variable in ["HTTP_ADDR", "ADMIN_ADDR"] {
            if (name, variable) == ("outbox-relay", "HTTP_ADDR") {
                continue;
            }
            let (http, admin) = (format!("127.0.0.1:{}", free_port()), format!("127.0.0.1:{}", free_port()));
            let addresses = [("HTTP_ADDR", &*http), ("ADMIN_ADDR", &*admin), (variable, &taken)];
            // The log may tell of a broker that is away; this is about the rest.
            let settings = [&[NOWHERE, broker, ("RUST_LOG", "off")][..], &addresses].concat();
            let line = refusal(name, &settings).await;
            assert!(line.contains(variable) && line.contains(&taken), "{name}: {line}");
        }
    }
}

#[tokio::test]
async fn help_lists_every_setting_as_variable_and_as_flag() {
    let everywhere = "DATABASE_URL DATABASE_POOL NATS_URL ADMIN_ADDR LOG_FORMAT RUST_LOG SHUTDOWN_GRACE
        OTEL_EXPORTER_OTLP_ENDPOINT
        RELAY_BATCH RELAY_LEASE RELAY_PUBLISH_TIMEOUT RELAY_POLL_MIN RELAY_POLL_MAX RELAY_BACKOFF_BASE
        RELAY_BACKOFF_MAX RELAY_MAX_ATTEMPTS STREAM_MAX_AGE STREAM_MAX_BYTES STREAM_DUPLICATE_WINDOW STREAM_REPLICAS";
    let services = "HTTP_ADDR RELAY MIGRATE CONSUMER_BATCH CONSUMER_ACK_WAIT CONSUMER_MAX_ATTEMPTS
        CONSUMER_BACKOFF_BASE CONSUMER_BACKOFF_MAX CONSUMER_GAP_DEADLINE
        RELAY_RETENTION INBOX_RETENTION";
    for name in PROGRAMS {
        let of_services = if name == "outbox-relay" { "" } else { services };
        let of_one = match name {
            "order-service" => "IDEMPOTENCY_RETENTION",
            "payment-service" => "PAYMENT_GATEWAY_URL GATEWAY_TIMEOUT",
            _ => "",
        };
        let output = run(name, &["--help"], &[("DATABASE_URL", "postgres://user:secret@host/name")]).await;
        let help = text(&output.stdout);
        assert_eq!(output.status.code(), Some(0), "{name}: {help}");
        for variable in [everywhere, of_services, of_one].join(" ").split_whitespace() {
            let flag = format!("--{}", variable.to_lowercase().replace('_', "-"));
            let names = |word: &str| help.split([' ', '\n', '[', ']', '=', ':']).any(|other| other == word);
            assert!(help.contains(&format!("[env: {variable}")), "{name}: {variable} is not in\n{help}");
            assert!(names(&flag), "{name}: {flag} is not in\n{help}");
        }
        assert!(!help.contains("secret"), "{name} shows a password:\n{help}");
    }
}

#[tokio::test]
async fn the_documented_ports_are_those_used_unless_others_are_set() {
    for (name, addresses) in [
        ("order-service", &["127.0.0.1:8080", "127.0.0.1:9080"][..]),
        ("payment-service", &["127.0.0.1:8081", "127.0.0.1:9081"]),
        ("outbox-relay", &["127.0.0.1:9082"]),
    ] {
        let help = text(&run(name, &["--help"], &[]).await.stdout);
        for address in addresses {
            assert!(help.contains(&format!("[default: {address}]")), "{name}: {address} is not in\n{help}");
        }
    }
}

/// Signals a program and returns how long it took to end, which it must do with exit code 0.
async fn time_to_end(service: &Service, signal: Signal) -> Duration {
    let started = Instant::now();
    service.signal(signal).await.unwrap();
    let status = tokio::time::timeout(SOON, service.wait_for_end()).await;
    let status = status.unwrap_or_else(|_| panic!("it does not end\n{}", service.last_words())).unwrap();
    assert_eq!(status.code(), Some(0), "{}", service.last_words());
    started.elapsed()
}

#[tokio::test]
async fn an_idle_service_ends_within_a_second_of_a_signal_to_stop() {
    let pair = Pair::start().await;
    let settings = [("DATABASE_URL", pair.orders_url.as_str()), ("NATS_URL", pair.nats.url())];
    let relay = Service::start("outbox-relay", &settings).await.unwrap();
    relay.wait_until_ready(SOON).await.unwrap();
    for signal in [Signal::TERM, Signal::INT] {
        for service in [&pair.orders[0], &pair.payments[0], &relay] {
            let took = time_to_end(service, signal).await;
            assert!(took < Duration::from_secs(1), "it took {took:?}\n{}", service.last_words());
            service.start_again().await.unwrap();
        }
        for service in [&pair.orders[0], &pair.payments[0], &relay] {
            service.wait_until_ready(SOON).await.unwrap();
        }
    }
}

#[tokio::test]
async fn a_service_that_waits_for_its_database_or_broker_ends_as_soon() {
    let broker = format!("nats://127.0.0.1:{}", free_port());
    for name in PROGRAMS {
        let service = Service::start(name, &[NOWHERE, ("NATS_URL", &broker)]).await.unwrap();
        if name == "outbox-relay" {
            // It listens to nobody before it knows whose outbox it serves.
            eventually(SOON, "it says what it waits for", async || {
                if service.log().contains("waiting") { Ok(()) } else { Err(service.log()) }
            })
            .await;
        } else {
            let (http, live) = (http_client(), service.admin_url("/health/live"));
            eventually(SOON, "it lives", async || http.get(&live).send().await.map(drop)).await;
        }
        let took = time_to_end(&service, Signal::TERM).await;
        assert!(took < Duration::from_secs(1), "{name} took {took:?}\n{}", service.last_words());
    }
    for name in ["order-service", "payment-service"] {
        let (service, _) = start_without_broker(name, &[]).await;
        let took = time_to_end(&service, Signal::TERM).await;
        assert!(took < Duration::from_secs(1), "{name} took {took:?}\n{}", service.last_words());
    }
}

#[tokio::test]
async fn a_service_ends_within_its_grace_whatever_clients_hold_open() {
    let grace = Duration::from_secs(2);
    for name in ["order-service", "payment-service"] {
        let (service, _) = start_without_broker(name, &[("SHUTDOWN_GRACE", "2s")]).await;
        let request = raw_post(order_of(Uuid::new_v4()).to_string().as_bytes(), "");
        let mut held = Vec::new();
        for sent in [0, 1, 40, request.len() - 1] {
            let mut stream = connect(&service).await;
            stream.write_all(&request[..sent]).await.unwrap();
            held.push(stream);
        }
        // One that was answered, and is kept for the next request.
        let mut kept = connect(&service).await;
        kept.write_all(b"GET /nowhere HTTP/1.1\r\nhost: test\r\n\r\n").await.unwrap();
        assert!(kept.read(&mut [0; 1024]).await.unwrap() > 0);

        let took = time_to_end(&service, Signal::TERM).await;
        assert!(took < grace, "{name} took {took:?}\n{}", service.last_words());
    }
}

#[tokio::test]
async fn a_kept_connection_alone_delays_the_end_by_nothing() {
    let (service, _) = start_without_broker("order-service", &[]).await;
    let mut kept = connect(&service).await;
    kept.write_all(b"GET /nowhere HTTP/1.1\r\nhost: test\r\n\r\n").await.unwrap();
    assert!(kept.read(&mut [0; 1024]).await.unwrap() > 0);
    let took = time_to_end(&service, Signal::TERM).await;
    assert!(took < Duration::from_secs(1), "it took {took:?}\n{}", service.last_words());
}

#[tokio::test]
async fn a_request_in_hand_at_the_signal_is_finished_and_answered() {
    let (service, database) = start_without_broker("order-service", &[]).await;
    let order = send(http_client().post(service.url("/orders")).json(&order_of(Uuid::new_v4()))).await.json();
    let id = order["id"].as_str().unwrap();

    // While this lock is held, the cancellation waits in the middle of its transaction.
    let mut db = PgConnection::connect(&database).await.unwrap();
    let mut tx = db.begin().await.unwrap();
    sqlx::query("SELECT FROM orders WHERE id = $1::uuid FOR UPDATE").bind(id).execute(&mut *tx).await.unwrap();
    let mut client = connect(&service).await;
    let request = format!("POST /orders/{id}/cancel HTTP/1.1\r\nhost: test\r\n\r\n");
    client.write_all(request.as_bytes()).await.unwrap();
    let mut watch = PgConnection::connect(&database).await.unwrap();
    eventually(SOON, "the cancellation waits for the lock", async || {
        let waiting = "SELECT count(*) FROM pg_stat_activity
                       WHERE datname = current_database() AND wait_event_type = 'Lock'";
        let waiting: i64 = sqlx::query_scalar(waiting).fetch_one(&mut watch).await.unwrap();
        if waiting > 0 { Ok(()) } else { Err(waiting) }
    })
    .await;

    service.signal(Signal::TERM).await.unwrap();
    eventually(SOON, "nobody is let in any more", async || {
        if http_client().get(service.url("/orders")).send().await.is_err() { Ok(()) } else { Err("still open") }
    })
    .await;
    tx.commit().await.unwrap();
    let answer = read_answer(&mut client).await;
    assert_eq!((answer.status, &answer.json()["status"]), (200, &serde_json::json!("cancelled")));
    assert_eq!(service.wait_for_end().await.unwrap().code(), Some(0));
}

#[tokio::test]
async fn five_replicas_of_each_service_that_start_at_once_share_one_empty_database_and_broker() {
    let pair = Pair::builder().own_servers().instances(5, 5).start().await;
    let orders = join_all(pair.orders.iter().map(async |replica| {
        let placed = send(http_client().post(replica.url("/orders")).json(&order_of(Uuid::new_v4()))).await;
        assert_eq!(placed.status, 201, "{placed:?}");
        placed.json()["id"].as_str().unwrap().parse().unwrap()
    }));
    pair.all_is_well(&orders.await.into_iter().collect()).await;
    for service in pair.orders.iter().chain(&pair.payments) {
        assert_eq!(service.ended().await.unwrap(), None, "{}", service.last_words());
        assert!(!service.log().contains("ERROR"), "{}", service.last_words());
    }
}

#[tokio::test]
async fn migrations_may_be_left_to_another_role() {
    for name in ["order-service", "payment-service"] {
        let database = Postgres::shared().await.unwrap().create_database("migrated").await.unwrap();
        let broker = format!("nats://127.0.0.1:{}", free_port());
        let settings = [("DATABASE_URL", database.as_str()), ("NATS_URL", &broker), ("MIGRATE", "off")];
        // Started too early, it waits for its tables.
        let service = Service::start(name, &settings).await.unwrap();
        let (http, ready) = (http_client(), service.admin_url("/health/ready"));
        eventually(SOON, "it says that it has not started, and why", async || {
            let ready = http.get(&ready).send().await.map_err(|error| error.to_string())?.text().await.unwrap();
            if ready.contains("outbox_source") && ready.contains("start") { Ok(()) } else { Err(ready) }
        })
        .await;
        for _ in 0..2 {
            let output = run(name, &["migrate"], &settings).await;
            assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
        }
        answers(&service).await;
    }
}

#[tokio::test]
async fn the_health_command_says_whether_its_service_is_ready() {
    let pair = Pair::start().await;
    for (name, service) in [("order-service", &pair.orders[0]), ("payment-service", &pair.payments[0])] {
        let admin = service.admin_url("");
        let admin = admin.strip_prefix("http://").unwrap();
        let health = async || run(name, &["health"], &[NOWHERE, ("ADMIN_ADDR", admin)]).await;
        assert_eq!(health().await.status.code(), Some(0));
        service.kill().await.unwrap();
        let output = health().await;
        assert_eq!((output.status.code(), text(&output.stderr).lines().count()), (Some(1), 1));
    }
}
