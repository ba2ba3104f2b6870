//! Start-up checks of what only the broker can tell. (Settings that contradict each other are in
//! `process`.)

use std::time::{Duration, Instant};

use async_nats::jetstream::{self, consumer, stream};
use e2e_tests::{Api, Nats, Postgres, Service, eventually, http_client};

use crate::fixture::SOON;

/// order-service on a broker of its own, on which something was made before it came.
async fn order_service(nats: &Nats, settings: &[(&str, &str)]) -> Service {
    let database = Postgres::shared().await.unwrap().create_database("orders").await.unwrap();
    let needed = [("DATABASE_URL", &*database), ("NATS_URL", nats.url())];
    Service::start("order-service", &[&needed, settings].concat()).await.unwrap()
}

/// Waits until readiness is red with a reason that contains `line`, while orders are taken.
async fn is_refused_with(service: &Service, line: &str) {
    let http = http_client();
    eventually(SOON, &format!("readiness says: {line}"), async || {
        let ready = http.get(service.admin_url("/health/ready")).send().await.map_err(|error| error.to_string())?;
        let (status, text) = (ready.status().as_u16(), ready.text().await.map_err(|error| error.to_string())?);
        if status == 503 && text.contains(line) { Ok(()) } else { Err(text) }
    })
    .await;
    let body = serde_json::json!({"customer_id": uuid::Uuid::new_v4(), "total": {"amount": 1, "currency": "EUR"}});
    let answer = http.post(service.url("/orders")).json(&body).send().await.unwrap();
    assert_eq!(answer.status(), 201);
}

fn orders_stream() -> stream::Config {
    stream::Config {
        name: "ORDERS".into(),
        subjects: vec!["orders.*".into()],
        discard: stream::DiscardPolicy::New,
        max_age: Duration::from_secs(7 * 86_400),
        ..Default::default()
    }
}

/// The relay has time to publish, and does not.
async fn nothing_is_published(jetstream: &jetstream::Context) {
    let mut stream = jetstream.get_stream("ORDERS").await.unwrap();
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_secs(1) {
        assert_eq!(stream.info().await.unwrap().state.messages, 0, "the relay has stopped");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

async fn the_order_is_published(jetstream: &jetstream::Context) {
    let mut stream = jetstream.get_stream("ORDERS").await.unwrap();
    eventually(SOON, "the order is published", async || match stream.info().await.unwrap().state.messages {
        0 => Err(()),
        _ => Ok(()),
    })
    .await;
}

#[tokio::test]
async fn a_stream_that_would_lose_events_is_refused_until_it_is_mended() {
    let unfit = [
        (stream::Config { discard: stream::DiscardPolicy::Old, ..orders_stream() }, "discard is old, must be new"),
        (
            stream::Config { max_age: Duration::from_secs(3600), ..orders_stream() },
            "max_age is 1h, which is shorter than STREAM_MAX_AGE (7days)",
        ),
        (
            stream::Config { subjects: vec!["orders.OrderCreated".into()], ..orders_stream() },
            r#"subjects are [\"orders.OrderCreated\"], must contain orders.*"#,
        ),
        (stream::Config { max_messages_per_subject: 5, ..orders_stream() }, "max_msgs_per_subject is 5, must be -1"),
        (
            stream::Config { retention: stream::RetentionPolicy::Interest, ..orders_stream() },
            "retention is interest, must be limits",
        ),
        (stream::Config { storage: stream::StorageType::Memory, ..orders_stream() }, "storage is memory, must be file"),
    ];
    for (config, line) in unfit {
        let nats = Nats::start().await.unwrap();
        let jetstream = nats.jetstream().await.unwrap();
        jetstream.create_stream(config).await.unwrap();
        let service = order_service(&nats, &[]).await;
        is_refused_with(&service, &format!("stream ORDERS: {line}")).await;
        nothing_is_published(&jetstream).await;

        // Some things the broker never changes.
        if jetstream.update_stream(orders_stream()).await.is_err() {
            jetstream.delete_stream("ORDERS").await.unwrap();
        }
        // A connection is when it is looked at again; here, soon enough without one.
        service.wait_until_ready(SOON).await.unwrap();
        the_order_is_published(&jetstream).await;
    }
}

#[tokio::test]
async fn a_stream_that_becomes_unfit_is_refused_at_the_next_connection() {
    let nats = Nats::start().await.unwrap();
    let service = order_service(&nats, &[]).await;
    service.wait_until_ready(SOON).await.unwrap();
    let jetstream = nats.jetstream().await.unwrap();
    let spoilt = stream::Config { discard: stream::DiscardPolicy::Old, ..orders_stream() };
    jetstream.update_stream(spoilt).await.unwrap();
    nats.stop().await.unwrap();
    nats.start_again().await.unwrap();
    is_refused_with(&service, "discard is old, must be new").await;
    let jetstream = nats.jetstream().await.unwrap();
    nothing_is_published(&jetstream).await;
    jetstream.update_stream(orders_stream()).await.unwrap();
    service.wait_until_ready(SOON).await.unwrap();
    the_order_is_published(&jetstream).await;
}

#[tokio::test]
async fn the_stream_of_the_other_service_is_waited_for() {
    let (postgres, nats) = (Postgres::shared().await.unwrap(), Nats::start().await.unwrap());
    let mut settings =
        [("DATABASE_URL", postgres.create_database("payments").await.unwrap()), ("NATS_URL", nats.url().into())];
    let start = async |name: &str, settings: &[(&str, String)]| {
        let settings: Vec<(&str, &str)> = settings.iter().map(|(variable, value)| (*variable, &**value)).collect();
        let service = Service::start(name, &settings).await.unwrap();
        service.wait_until_ready(SOON).await.unwrap();
        service
    };
    let payments = start("payment-service", &settings).await;
    assert!(payments.log().contains("stream ORDERS does not exist"), "{}", payments.last_words());
    settings[0].1 = postgres.create_database("orders").await.unwrap();
    let orders = start("order-service", &settings).await;
    let api = Api::new(&orders, &payments);
    let order = api.place(uuid::Uuid::new_v4(), 100, "EUR").await.unwrap();
    eventually(SOON, "it is paid", async || {
        let order = api.order(order.id).await.map_err(|error| error.to_string())?;
        if order.status == "paid" { Ok(()) } else { Err(order.status) }
    })
    .await;
}

#[tokio::test]
async fn an_inbox_that_forgets_what_a_stream_still_delivers_is_refused() {
    let nats = Nats::start().await.unwrap();
    let jetstream = nats.jetstream().await.unwrap();
    let payments = stream::Config {
        name: "PAYMENTS".into(),
        subjects: vec!["payments.*".into()],
        max_age: Duration::from_secs(30 * 86_400),
        ..orders_stream()
    };
    jetstream.create_stream(payments).await.unwrap();
    let service = order_service(&nats, &[]).await;
    is_refused_with(&service, "INBOX_RETENTION is 15days, which is shorter than max_age of stream PAYMENTS").await;
    assert!(
        jetstream.get_consumer_from_stream::<consumer::pull::Config, _, _>("order-service", "PAYMENTS").await.is_err()
    );
}

#[tokio::test]
async fn a_consumer_whose_settings_the_broker_changes_is_brought_up_to_date() {
    let nats = Nats::start().await.unwrap();
    let jetstream = nats.jetstream().await.unwrap();
    let payments = stream::Config { name: "PAYMENTS".into(), subjects: vec!["payments.*".into()], ..orders_stream() };
    let stream = jetstream.create_stream(payments).await.unwrap();
    let other = consumer::pull::Config {
        durable_name: Some("order-service".into()),
        ack_wait: Duration::from_secs(1),
        max_deliver: 3,
        filter_subject: "payments.PaymentCaptured".into(),
        ..Default::default()
    };
    stream.create_consumer(other).await.unwrap();
    let service = order_service(&nats, &[("CONSUMER_ACK_WAIT", "45s")]).await;
    service.wait_until_ready(SOON).await.unwrap();
    eventually(SOON, "the consumer is as it should be", async || {
        let config = stream.consumer_info("order-service").await.unwrap().config;
        let found = (config.ack_wait.as_secs(), config.max_deliver, config.filter_subject);
        if found == (45, -1, "payments.*".to_owned()) { Ok(()) } else { Err(found) }
    })
    .await;
}

#[tokio::test]
async fn a_consumer_that_the_broker_cannot_change_is_refused_until_it_is_deleted() {
    let unfit = [
        (
            consumer::pull::Config { deliver_policy: consumer::DeliverPolicy::New, ..Default::default() },
            "deliver_policy is new, must be all",
        ),
        (
            consumer::pull::Config { ack_policy: consumer::AckPolicy::None, ..Default::default() },
            "ack_policy is none, must be explicit",
        ),
        (consumer::pull::Config { max_waiting: 7, ..Default::default() }, "max waiting can not be updated"),
    ];
    for (config, line) in unfit {
        let nats = Nats::start().await.unwrap();
        let jetstream = nats.jetstream().await.unwrap();
        let payments =
            stream::Config { name: "PAYMENTS".into(), subjects: vec!["payments.*".into()], ..orders_stream() };
        let stream = jetstream.create_stream(payments).await.unwrap();
        let other = consumer::pull::Config { durable_name: Some("order-service".into()), ..config };
        stream.create_consumer(other).await.unwrap();
        let service = order_service(&nats, &[]).await;
        is_refused_with(&service, &format!("consumer order-service of stream PAYMENTS: {line}")).await;
        stream.delete_consumer("order-service").await.unwrap();
        service.wait_until_ready(SOON).await.unwrap();
    }
}
