//! A process dies at each point where it matters, under a stream of orders, and is started again. The
//! table in ARCHITECTURE says what each point leaves behind.

use std::collections::BTreeSet;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::time::Duration;

use e2e_tests::{Counts, Pair, PairBuilder, Provider, Reply, eventually, http_client, workspace};
use futures::future::join_all;
use serde_json::{Value, json};
use tokio::process::Command;
use uuid::Uuid;

use crate::fixture::{SOON, messages};

const SIGABRT: i32 = 6;

#[derive(Clone, Copy, PartialEq)]
enum Dies {
    OrderService,
    PaymentService,
}

/// What a death at this point makes happen a second time, and must therefore be seen. More than that may:
/// the same death interrupts whatever else the process was doing.
#[derive(Clone, Copy, PartialEq)]
enum Again {
    Anything,
    /// A client is answered with the order that its first request made.
    Answered,
    Published,
    /// Not what was marked. Other batches were in flight, and may be.
    MarkedIsNot,
    Delivered,
    /// And the gateway is asked for the same again.
    Charged,
}

impl Again {
    /// What is to be published again is, when its lease has run out and the broker has forgotten it.
    fn settings(self, builder: PairBuilder) -> PairBuilder {
        if self == Self::MarkedIsNot {
            return builder;
        }
        builder.setting("RELAY_LEASE", "1s").setting("RELAY_PUBLISH_TIMEOUT", "500ms")
    }

    /// What is delivered again may be so when everything else has come to its end.
    async fn is_seen(self, pair: &Pair, provider: &Provider, counts: &Counts, replayed: usize, marked: &[Uuid]) {
        let (checker, published_again) = (pair.checker().await, counts.duplicates);
        let sent = messages(&checker.jetstream, "ORDERS").await;
        let times_sent = |id: &Uuid| sent.iter().filter(|message| message.headers["ce-id"] == id.to_string()).count();
        eventually(SOON, "what its death makes happen again", async || {
            let delivered_again = checker.delivered_again().await.unwrap();
            let asked_again = provider.calls().len() - provider.effects().len();
            let is_seen = match self {
                Self::Anything => true,
                Self::Answered => replayed > 0,
                Self::Published => published_again > 0,
                Self::MarkedIsNot => marked.len() > 2 && marked.iter().all(|id| times_sent(id) == 1),
                Self::Delivered => delivered_again > 0,
                Self::Charged => delivered_again > 0 && asked_again > 0,
            };
            let seen = format!(
                "{published_again} published, {delivered_again} delivered, {asked_again} asked, {replayed} answered"
            );
            if is_seen { Ok(()) } else { Err(seen) }
        })
        .await;
    }
}

/// Kills at the third time that `point` is reached, and expects the whole promise to hold.
async fn nothing_is_lost_or_doubled(dies: Dies, point: &str, again: Again) {
    let provider = Provider::start(|_| Reply::Done).await;
    let crash_at = format!("{point}:3");
    let builder = again.settings(Pair::builder());
    let builder = builder
        .setting("STREAM_DUPLICATE_WINDOW", "100ms")
        .setting("CONSUMER_ACK_WAIT", "2s")
        .payment_setting("GATEWAY_TIMEOUT", "1s")
        .payment_setting("PAYMENT_GATEWAY_URL", provider.url());
    let mut pair = match dies {
        Dies::OrderService => builder.order_setting("CRASH_AT", &crash_at),
        Dies::PaymentService => builder.payment_setting("CRASH_AT", &crash_at),
    }
    .start()
    .await;

    let orders_url = pair.orders[0].url("/orders");
    let orders_db = pair.orders_db.clone();
    let clients = join_all((0..20).map(|n| client(&orders_url, n)));
    let victim = match dies {
        Dies::OrderService => &mut pair.orders[0],
        Dies::PaymentService => &mut pair.payments[0],
    };
    let crash = async {
        let died = tokio::time::timeout(SOON, victim.wait_for_end()).await.expect("the point is reached").unwrap();
        assert_eq!(died.signal(), Some(SIGABRT), "it died of its crash point");
        let marked = "SELECT event_id FROM outbox_deliveries WHERE published_at IS NOT NULL";
        let marked: Vec<Uuid> = sqlx::query_scalar(marked).fetch_all(&orders_db).await.unwrap();
        victim.start_again_for_good().await.unwrap();
        marked
    };
    let (answers, marked) = futures::join!(clients, crash);

    let replayed = answers.iter().filter(|(_, is_replayed)| *is_replayed).count();
    let orders: BTreeSet<Uuid> = answers.into_iter().map(|(order, _)| order).collect();
    assert_eq!(orders.len(), 20, "every client has an order of its own");
    let counts = pair.all_is_well(&orders).await;
    let gateway = pair.checker().await.check_gateway(&provider).await.unwrap();
    assert!(gateway.is_empty(), "{gateway:#?}");
    again.is_seen(&pair, &provider, &counts, replayed, &marked).await;
}

/// Places an order, and cancels every fourth; asks again, under the same key, until it is answered.
/// Returns the order, and whether it was there when the answer came.
async fn client(orders_url: &str, n: u64) -> (Uuid, bool) {
    let http = http_client();
    tokio::time::sleep(Duration::from_millis(n * 30)).await;
    let key = Uuid::new_v4().to_string();
    let body = json!({"customer_id": Uuid::new_v4(), "total": {"amount": 100, "currency": "EUR"}});
    let (id, is_replayed) = eventually(SOON, "the order is answered", async || {
        let answer = http.post(orders_url).header("Idempotency-Key", &key).json(&body).send().await?;
        let answer = answer.error_for_status()?;
        let is_replayed = answer.headers().contains_key("idempotency-replayed");
        let order: Value = answer.json().await?;
        let id: Uuid = order["id"].as_str().expect("an order has an id").parse().expect("a UUID");
        Ok::<_, reqwest::Error>((id, is_replayed))
    })
    .await;
    if n.is_multiple_of(4) {
        eventually(SOON, "the cancellation is answered", async || {
            http.post(format!("{orders_url}/{id}/cancel")).send().await?.error_for_status()
        })
        .await;
    }
    (id, is_replayed)
}

macro_rules! crashes {
    ($($name:ident: $dies:ident at $point:literal, again $again:ident;)*) => {
        const POINTS: &[(&str, &str)] = &[$(($point, stringify!($name))),*];

        $(#[tokio::test]
        async fn $name() {
            nothing_is_lost_or_doubled(Dies::$dies, $point, Again::$again).await;
        })*
    };
}

crashes! {
    an_order_without_its_event_is_not_there:
        OrderService at "order.after_insert", again Anything;
    an_order_and_its_event_that_are_not_committed_are_not_there:
        OrderService at "order.after_append", again Anything;
    an_order_that_was_not_answered_is_found_again_by_its_key:
        OrderService at "order.after_commit", again Answered;
    what_a_dead_relay_had_claimed_is_published_when_its_lease_runs_out:
        OrderService at "relay.after_claim", again Anything;
    what_was_sent_and_not_acknowledged_is_sent_again:
        OrderService at "relay.after_publish", again Anything;
    what_was_acknowledged_and_not_marked_is_sent_again:
        OrderService at "relay.after_ack", again Published;
    what_was_marked_is_not_sent_again:
        OrderService at "relay.after_mark", again MarkedIsNot;
    payments_relay_dies_between_ack_and_mark:
        PaymentService at "relay.after_ack", again Published;
    what_was_fetched_is_delivered_again:
        PaymentService at "consumer.after_fetch", again Delivered;
    a_charge_without_its_payment_is_asked_for_again_and_not_taken_again:
        PaymentService at "consumer.after_prepare", again Charged;
    an_inbox_record_without_its_effect_is_not_there:
        PaymentService at "consumer.after_record", again Delivered;
    an_effect_that_is_not_committed_is_not_there:
        PaymentService at "consumer.after_effect", again Delivered;
    an_effect_that_was_not_acknowledged_is_a_duplicate_the_second_time:
        PaymentService at "consumer.after_commit", again Delivered;
    what_was_acknowledged_is_done:
        PaymentService at "consumer.after_acknowledge", again Anything;
    orders_consumer_dies_between_commit_and_acknowledgement:
        OrderService at "consumer.after_commit", again Delivered;
}

async fn says(program: &Path, text: &str) -> bool {
    let search = Command::new("grep").args(["--quiet", "--text", "--fixed-strings", text]).arg(program).status();
    search.await.expect("grep is installed").success()
}

#[tokio::test]
async fn a_normal_build_has_no_trace_of_the_crash_points() {
    for name in ["order-service", "payment-service", "outbox-relay"] {
        let normal = e2e_tests::program(name).await.unwrap();
        for point in POINTS.iter().map(|(point, _)| *point).chain(["CRASH_AT"]) {
            assert!(!says(&normal, point).await, "{name} knows {point}");
        }
    }
    let with_crash_points = e2e_tests::program_with_crash_points("payment-service").await.unwrap();
    assert!(says(&with_crash_points, "relay.after_ack").await, "it would be found");
}

#[tokio::test]
async fn every_crash_point_is_tested_and_stands_in_the_table_of_architecture() {
    let mut search = Command::new("grep");
    search.args(["--recursive", "--no-filename", "--only-matching", "--extended-regexp", r#"crash_point!\("[^"]+"#]);
    let found =
        search.args(["outbox-core", "order-service", "payment-service"]).current_dir(workspace()).output().await;
    let found = String::from_utf8(found.unwrap().stdout).unwrap();
    let in_code: BTreeSet<&str> = found.lines().filter_map(|line| line.strip_prefix("crash_point!(\"")).collect();
    let tested: BTreeSet<&str> = POINTS.iter().map(|(point, _)| *point).collect();
    assert_eq!(in_code, tested);

    let architecture = std::fs::read_to_string(workspace().join("ARCHITECTURE.md")).unwrap();
    for (point, test) in POINTS {
        let mut rows = architecture.lines().filter(|line| line.starts_with(&format!("| `{point}` |")));
        let is_told = rows.next().is_some_and(|row| row.contains(&format!("`crash::{test}`")));
        assert!(is_told, "{point} and {test} are not in a row of the table");
    }
}
