//! A process dies at each point where it matters, under a stream of orders, and is started again. The
//! table in ARCHITECTURE says what each point leaves behind.

use std::collections::BTreeSet;
use std::os::unix::process::ExitStatusExt;
use std::time::Duration;

use e2e_tests::{Checker, Pair, Provider, Reply, eventually, http_client};
use futures::future::join_all;
use serde_json::{Value, json};
use uuid::Uuid;

use crate::fixture::SOON;

const SIGABRT: i32 = 6;

#[derive(Clone, Copy, PartialEq)]
enum Dies {
    OrderService,
    PaymentService,
}

/// Kills at the third time that `point` is reached, and expects the whole promise to hold.
async fn nothing_is_lost_or_doubled(dies: Dies, point: &str) {
    let provider = Provider::start(|_| Reply::Done).await;
    let crash_at = format!("{point}:3");
    let builder = Pair::builder()
        .setting("RELAY_LEASE", "1s")
        .setting("RELAY_PUBLISH_TIMEOUT", "500ms")
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
    let clients = join_all((0..20).map(|n| client(&orders_url, n)));
    let victim = match dies {
        Dies::OrderService => &mut pair.orders[0],
        Dies::PaymentService => &mut pair.payments[0],
    };
    let crash = async {
        let died = tokio::time::timeout(SOON, victim.wait_for_end()).await.expect("the point is reached").unwrap();
        assert_eq!(died.signal(), Some(SIGABRT), "it died of its crash point");
        victim.start_again_for_good().await.unwrap();
    };
    let (orders, ()) = futures::join!(clients, crash);

    let orders: BTreeSet<Uuid> = orders.into_iter().collect();
    let jetstream = pair.nats.jetstream().await.unwrap();
    let checker = Checker { orders_db: &pair.orders_db, payments_db: &pair.payments_db, jetstream };
    eventually(SOON, "everything comes to its end", async || checker.check(&orders).await.unwrap()).await;

    let (refunds, charges): (Vec<_>, Vec<_>) = provider.calls().into_iter().partition(|call| call.is_refund());
    let charged: BTreeSet<String> = charges.iter().map(|call| call.key.clone()).collect();
    assert_eq!(charged.len(), orders.len(), "one charge for each order, however often it was asked for");
    let refunded: BTreeSet<String> = refunds.iter().map(|call| call.key.clone()).collect();
    let cancelled: i64 = sqlx::query_scalar("SELECT count(*) FROM orders WHERE status = 'refunded'")
        .fetch_one(&pair.orders_db)
        .await
        .unwrap();
    assert_eq!(refunded.len() as i64, cancelled);
}

/// Places an order, and cancels every fourth; asks again, under the same key, until it is answered.
async fn client(orders_url: &str, n: u64) -> Uuid {
    let http = http_client();
    tokio::time::sleep(Duration::from_millis(n * 30)).await;
    let key = Uuid::new_v4().to_string();
    let body = json!({"customer_id": Uuid::new_v4(), "total": {"amount": 100, "currency": "EUR"}});
    let id = eventually(SOON, "the order is answered", async || {
        let answer = http.post(orders_url).header("Idempotency-Key", &key).json(&body).send().await?;
        let order: Value = answer.error_for_status()?.json().await?;
        Ok::<Uuid, reqwest::Error>(order["id"].as_str().expect("an order has an id").parse().expect("a UUID"))
    })
    .await;
    if n.is_multiple_of(4) {
        eventually(SOON, "the cancellation is answered", async || {
            http.post(format!("{orders_url}/{id}/cancel")).send().await?.error_for_status()
        })
        .await;
    }
    id
}

macro_rules! crashes {
    ($($name:ident: $dies:ident at $point:literal,)*) => {
        $(#[tokio::test]
        async fn $name() {
            nothing_is_lost_or_doubled(Dies::$dies, $point).await;
        })*
    };
}

crashes! {
    an_order_without_its_event_is_not_there: OrderService at "order.after_insert",
    an_order_and_its_event_that_are_not_committed_are_not_there: OrderService at "order.after_append",
    an_order_that_was_not_answered_is_found_again_by_its_key: OrderService at "order.after_commit",
    what_a_dead_relay_had_claimed_is_published_when_its_lease_runs_out: OrderService at "relay.after_claim",
    what_was_sent_and_not_acknowledged_is_sent_again: OrderService at "relay.after_publish",
    what_was_acknowledged_and_not_marked_is_sent_again: OrderService at "relay.after_ack",
    what_was_marked_is_not_sent_again: OrderService at "relay.after_mark",
    payments_relay_dies_between_ack_and_mark: PaymentService at "relay.after_ack",
    what_was_fetched_is_delivered_again: PaymentService at "consumer.after_fetch",
    a_charge_without_its_payment_is_asked_for_again_and_not_taken_again: PaymentService at "consumer.after_prepare",
    an_inbox_record_without_its_effect_is_not_there: PaymentService at "consumer.after_record",
    an_effect_that_is_not_committed_is_not_there: PaymentService at "consumer.after_effect",
    an_effect_that_was_not_acknowledged_is_a_duplicate_the_second_time: PaymentService at "consumer.after_commit",
    what_was_acknowledged_is_done: PaymentService at "consumer.after_acknowledge",
    orders_consumer_dies_between_commit_and_acknowledgement: OrderService at "consumer.after_commit",
}
