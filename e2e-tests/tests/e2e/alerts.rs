//! Alerts: each fires when its fault is there, on real services, before a real Prometheus.

use std::collections::BTreeSet;
use std::ops::RangeInclusive;
use std::sync::Mutex;
use std::time::Duration;

use e2e_tests::{Nats, Pair, Postgres, Prometheus, Provider, Proxy, Reply, Service, eventually, http_client};
use reqwest::{StatusCode, Url};
use sqlx::{Connection, PgConnection, PgPool};
use uuid::Uuid;

use crate::dashboards::{alerts, dashboard_queries, read, without_variables};
use crate::fixture::SOON;
use crate::http::order_of;
use crate::retention::insert_published;

/// An alert has fired by then: the slowest ones wait for what must be older than a minute.
const FIRES_WITHIN: Duration = Duration::from_secs(240);

/// An amount that the gateway rejects.
const REJECTED: i64 = 400;

/// The rules with two seconds in place of each minute. Thresholds stay.
fn hurried(rules: &str) -> String {
    let words = rules.split_inclusive(|c: char| !c.is_ascii_alphanumeric());
    let hurry = |word: &str| {
        let minutes = word.trim_end_matches(|c: char| !c.is_ascii_alphanumeric()).strip_suffix('m')?;
        let seconds = 2 * minutes.parse::<u32>().ok()?;
        Some(word.replacen(&format!("{minutes}m"), &format!("{seconds}s"), 1))
    };
    words.map(|word| hurry(word).unwrap_or_else(|| word.to_owned())).collect()
}

#[test]
fn minutes_are_hurried_and_nothing_else() {
    let rules = "expr: rate(a[5m]) > 60 and m > 1000\nfor: 15m\n";
    assert_eq!(hurried(rules), "expr: rate(a[10s]) > 60 and m > 1000\nfor: 30s\n");
}

/// Events that no service would append: of so many new aggregates, each with these sequences.
async fn insert(db: &PgPool, aggregates: i64, sequences: RangeInclusive<i64>, event_type: &str) {
    let insert = "
        WITH aggregate AS MATERIALIZED (SELECT gen_random_uuid() AS id FROM generate_series(1, $1)), event AS (
            INSERT INTO outbox_events (event_id, aggregate_type, aggregate_id, aggregate_sequence,
                                       event_type, event_version, payload, headers)
            SELECT gen_random_uuid(), 'order', id, sequence, $4, 1, '{}', '{\"correlationid\": \"a-test\"}'
            FROM aggregate CROSS JOIN generate_series($2::bigint, $3::bigint) AS sequence
            ORDER BY id, sequence
            RETURNING *
        )
        INSERT INTO outbox_deliveries (event_id, aggregate_type, aggregate_id, aggregate_sequence, created_at)
        SELECT event_id, aggregate_type, aggregate_id, aggregate_sequence, created_at FROM event";
    let (first, last) = sequences.into_inner();
    sqlx::query(insert).bind(aggregates).bind(first).bind(last).bind(event_type).execute(db).await.unwrap();
}

/// A pair, and beside it a lone order-service whose broker and way to its database are its own, so that
/// what is done to them does not hide what is wrong with the pair.
struct Scene {
    pair: Pair,
    gateway: Provider,
    lone: Service,
    lone_nats: Nats,
    lone_db: PgPool,
    to_lone_db: Proxy,
    prometheus: Prometheus,
    fired: Mutex<BTreeSet<String>>,
}

impl Scene {
    async fn set() -> Option<Self> {
        let gateway = Provider::start(|call| match call.amount() {
            REJECTED => Reply::Status(402),
            _ => Reply::Done,
        })
        .await;
        let pair = Pair::builder()
            .payment_setting("PAYMENT_GATEWAY_URL", gateway.url())
            // A call that hangs, hangs until the test is over.
            .payment_setting("GATEWAY_TIMEOUT", "10m")
            .payment_setting("CONSUMER_ACK_WAIT", "15m");

        let postgres = Postgres::shared().await.unwrap();
        let database = postgres.create_database("orders").await.unwrap();
        let mut proxied: Url = database.parse().unwrap();
        let to_lone_db = Proxy::start(proxied.port().expect("the URL names a port")).await.unwrap();
        proxied.set_port(Some(to_lone_db.port())).unwrap();
        let lone_nats = Nats::start().await.unwrap();
        let settings = [
            ("DATABASE_URL", proxied.as_str()),
            ("NATS_URL", lone_nats.url()),
            ("RELAY_LEASE", "6s"),
            ("RELAY_BACKOFF_MAX", "1s"),
        ];
        let lone = Service::start("order-service", &settings).await.unwrap();
        let pair = pair.start().await;
        lone.wait_until_ready(SOON).await.unwrap();
        let targets = [("order-service", &pair.orders[0]), ("payment-service", &pair.payments[0]), ("lone", &lone)];
        let rules = hurried(&read("deploy/prometheus/rules.yml"));
        let prometheus = Prometheus::start(&targets, &rules).await.unwrap()?;
        let lone_db = PgPool::connect(&database).await.unwrap();
        Some(Self { pair, gateway, lone, lone_nats, lone_db, to_lone_db, prometheus, fired: Mutex::default() })
    }

    /// Waits until an alert about a service fires, while `fault` goes on.
    async fn fires_while(&self, alert: &str, service: &str, mut fault: impl AsyncFnMut()) {
        let expected = (alert.to_owned(), service.to_owned());
        eventually(FIRES_WITHIN, &format!("{alert} fires for {service}"), async || {
            fault().await;
            let firing = self.prometheus.firing().await.map_err(|error| error.to_string())?;
            if firing.contains(&expected) { Ok(()) } else { Err(format!("{firing:?}")) }
        })
        .await;
        self.fired.lock().unwrap().insert(alert.to_owned());
    }

    async fn fires(&self, alert: &str, service: &str) {
        self.fires_while(alert, service, async || {}).await;
    }

    /// Asks the lone service for an order. It may be refused.
    async fn order_from_the_lone(&self) -> Option<StatusCode> {
        let order = http_client().post(self.lone.url("/orders")).json(&order_of(Uuid::new_v4()));
        order.send().await.ok().map(|answer| answer.status())
    }

    /// Orders are paid, and Prometheus has seen it.
    async fn all_is_well(&self) {
        for amount in [100, 200] {
            let order = self.pair.place(amount, "EUR").await.id;
            self.pair.order_becomes(order, "paid").await;
            assert_eq!(self.order_from_the_lone().await, Some(StatusCode::CREATED));
        }
        for (query, expected) in [
            (r#"sum(inbox_deliveries_total{outcome="applied", event_type="PaymentCaptured"})"#, "2"),
            (r#"sum(outbox_published_total{service="lone"})"#, "2"),
            ("count(up == 1)", "3"),
        ] {
            eventually(SOON, query, async || {
                let found = self.prometheus.query(query).await.map_err(|error| error.to_string())?;
                if found.len() == 1 && found[0]["value"][1] == expected { Ok(()) } else { Err(format!("{found:?}")) }
            })
            .await;
        }
        assert_eq!(self.prometheus.firing().await.unwrap(), BTreeSet::new(), "all is well");
    }

    /// A session idles in a transaction, in which it has locked rows that retention is to remove.
    async fn a_transaction_is_forgotten(&self) -> PgConnection {
        let mut forgotten = PgConnection::connect(&self.pair.orders_url).await.unwrap();
        insert_published(&mut forgotten, 3, "30 days").await;
        // It has no snapshot between two statements: what it has written holds back clean-up.
        sqlx::query("BEGIN").execute(&mut forgotten).await.unwrap();
        let locking = "SELECT FROM outbox_deliveries WHERE published_at < now() - interval '7 days' FOR UPDATE";
        let locked = sqlx::query(locking).fetch_all(&mut forgotten).await.unwrap().len();
        assert_eq!(locked, 3, "retention was not faster");
        forgotten
    }

    /// One event that can never be published and its follower, one that the gateway rejects, one whose
    /// predecessor never comes: none of them in another's way.
    async fn events_get_into_trouble(&self) {
        insert(&self.pair.orders_db, 1, 1..=2, "Not a token").await;
        insert(&self.pair.orders_db, 1, 2..=2, "OrderPaid").await;
        self.pair.place(REJECTED, "EUR").await;
        let to_be_seen = "SELECT (SELECT count(*) FROM parked_events) + (SELECT count(*) FROM dead_letters)";
        eventually(SOON, "payment-service has them", async || {
            let seen: i64 = sqlx::query_scalar(to_be_seen).fetch_one(&self.pair.payments_db).await.unwrap();
            if seen == 2 { Ok(()) } else { Err(seen) }
        })
        .await;
    }

    /// The lone service dies while it publishes, and comes back.
    async fn a_relay_dies(&self) {
        insert(&self.lone_db, 1, 1..=5_000, "OrderPaid").await;
        eventually(SOON, "its relay holds events", async || {
            let leased = "SELECT count(*) FROM outbox_deliveries WHERE lease_id IS NOT NULL";
            let leased: i64 = sqlx::query_scalar(leased).fetch_one(&self.lone_db).await.unwrap();
            if leased > 0 { Ok(()) } else { Err(leased) }
        })
        .await;
        self.lone.kill().await.unwrap();
        self.fires("LoopDown", "lone").await;
        self.lone.start_again().await.unwrap();
        self.fires("OutboxLeasesExpiring", "lone").await;
    }

    /// The lone service's broker stops, and orders keep coming.
    async fn a_broker_is_away(&self) {
        self.lone_nats.stop().await.unwrap();
        let orders_come = async || {
            assert_eq!(self.order_from_the_lone().await, Some(StatusCode::CREATED));
            insert(&self.lone_db, 20, 1..=1, "OrderPaid").await;
        };
        self.fires_while("OutboxNotPublishing", "lone", orders_come).await;
        self.fires_while("OutboxBacklogGrowing", "lone", orders_come).await;
        self.fires("OutboxEventsLate", "lone").await;

        self.lone_nats.start_again().await.unwrap();
        eventually(FIRES_WITHIN, "alerts end with their fault", async || {
            let firing = self.prometheus.firing().await.map_err(|error| error.to_string())?;
            let is_outbox =
                |(alert, service): &(String, String)| service == "lone" && alert.starts_with("OutboxEvents");
            if firing.iter().any(is_outbox) { Err(format!("{firing:?}")) } else { Ok(()) }
        })
        .await;
    }

    /// The pair's gateway answers nobody any more, and orders keep coming.
    async fn a_consumer_hangs(&self) {
        self.gateway.hold();
        self.pair.place(300, "EUR").await;
        let orders_come = async || insert(&self.pair.orders_db, 20, 1..=1, "OrderPaid").await;
        self.fires_while("InboxLagGrowing", "payment-service", orders_come).await;
        self.fires("InboxNotConsuming", "payment-service").await;
    }

    async fn a_database_is_away(&self) {
        self.to_lone_db.refuse(true);
        self.to_lone_db.cut();
        let orders_come = async || assert_ne!(self.order_from_the_lone().await, Some(StatusCode::CREATED));
        self.fires_while("RequestsFailing", "lone", orders_come).await;
    }

    async fn dashboard_shows_something_everywhere(&self) {
        for query in dashboard_queries() {
            let found = self.prometheus.query(&without_variables(&query)).await.unwrap();
            assert!(!found.is_empty(), "nothing to show: {query}");
        }
    }
}

#[tokio::test]
async fn every_alert_fires_when_its_fault_is_there_and_none_while_all_is_well() {
    let Some(scene) = Scene::set().await else { return };
    scene.all_is_well().await;

    let _forgotten = scene.a_transaction_is_forgotten().await;
    scene.events_get_into_trouble().await;
    scene.a_relay_dies().await;
    tokio::join!(scene.a_broker_is_away(), scene.a_consumer_hangs());
    scene.fires("OutboxEventsFailed", "order-service").await;
    scene.fires("InboxDeadLetters", "payment-service").await;
    scene.fires("InboxEventsParked", "payment-service").await;
    scene.fires("CleanUpBehind", "order-service").await;
    scene.fires("RetentionBehind", "order-service").await;
    scene.dashboard_shows_something_everywhere().await;
    scene.a_database_is_away().await;

    assert_eq!(*scene.fired.lock().unwrap(), alerts(), "every alert has a fault here");
}
