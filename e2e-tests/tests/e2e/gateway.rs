//! The payment gateway over HTTP: whatever it does to a request, money moves once or not at all.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use e2e_tests::{Call, Order, Pair, PairBuilder, Provider, Reply, eventually, free_port};
use serde_json::{Value, json};
use uuid::Uuid;

use crate::http::SOON;

/// A pair whose payments go to this gateway, and whose retries come quickly.
fn pair(gateway: &str) -> PairBuilder {
    Pair::builder()
        .payment_setting("PAYMENT_GATEWAY_URL", gateway)
        .payment_setting("CONSUMER_BACKOFF_BASE", "50ms")
        .payment_setting("CONSUMER_BACKOFF_MAX", "200ms")
}

/// The id of an order's event: the idempotency key of what it asks of the gateway.
async fn key_of(pair: &Pair, order: Uuid, event_type: &str) -> String {
    let id = "SELECT event_id FROM outbox_events WHERE aggregate_id = $1 AND event_type = $2";
    let id = sqlx::query_scalar::<_, Uuid>(id).bind(order).bind(event_type).fetch_one(&pair.orders_db).await;
    id.expect("the order has the event").to_string()
}

async fn place_all(pair: &Pair, amounts: impl IntoIterator<Item = i64>) -> Vec<Order> {
    let mut orders = Vec::new();
    for amount in amounts {
        orders.push(pair.place(amount, "EUR").await);
    }
    orders
}

async fn become_all(pair: &Pair, orders: &[Order], status: &str) {
    for order in orders {
        pair.order_becomes(order.id, status).await;
    }
}

/// Why payment-service gave up on an event, and after how many failures that counted.
async fn dead_letter(pair: &Pair, event: &str) -> Result<(String, i32), String> {
    let letter = "SELECT reason, attempts FROM dead_letters WHERE event_id = $1::uuid";
    let letter = sqlx::query_as(letter).bind(event).fetch_optional(&pair.payments_db).await.unwrap();
    letter.ok_or(format!("no dead letter {event}"))
}

async fn dead_letters(pair: &Pair) -> i64 {
    sqlx::query_scalar("SELECT count(*) FROM dead_letters").fetch_one(&pair.payments_db).await.unwrap()
}

/// Waits until payment-service is through with an event.
async fn is_processed(pair: &Pair, event: &str) {
    eventually(SOON, &format!("event {event} is processed"), async || {
        let processed = "SELECT count(*) FROM processed_events WHERE event_id = $1::uuid";
        let processed: i64 = sqlx::query_scalar(processed).bind(event).fetch_one(&pair.payments_db).await.unwrap();
        if processed == 1 { Ok(()) } else { Err("not yet") }
    })
    .await;
}

/// A key stands for one request: whoever repeats it repeats every byte.
fn assert_repeated_exactly(provider: &Provider) {
    for call in provider.calls() {
        let first = &provider.calls_of(&call.key)[0];
        assert_eq!((&call.resource, &call.body), (&first.resource, &first.body));
    }
}

/// The answers to the requests of a kind, by the order they were about.
fn effects(provider: &Provider, is_refund: bool) -> Vec<(Value, Value)> {
    let is_wanted = |call: &Call| call.is_refund() == is_refund;
    let effects = provider.effects().into_iter();
    let with_call = effects.map(|(key, effect)| (provider.calls_of(&key)[0].clone(), effect));
    with_call
        .filter(|(call, _)| is_wanted(call))
        .map(|(call, effect)| (call.json()["order_id"].clone(), effect))
        .collect()
}

#[tokio::test]
async fn a_charge_and_its_refund_are_asked_for_as_the_contract_says() {
    // It answers with fields that nobody knows, and lives under a path.
    let provider = Provider::start(|_| Reply::DoneAndMore).await;
    let pair = pair(&format!("{}/v1/", provider.url())).start().await;
    let order = pair.place(12500, "CHF").await;
    pair.order_becomes(order.id, "paid").await;
    let created = key_of(&pair, order.id, "OrderCreated").await;
    let [charge] = &provider.calls()[..] else { panic!("one request: {:?}", provider.calls()) };
    assert_eq!((charge.resource.as_str(), charge.key.as_str()), ("POST /v1/charges", created.as_str()));
    assert_eq!(charge.headers["content-type"], "application/json");
    assert_eq!(charge.headers.get_all("idempotency-key").iter().count(), 1);
    let expected = json!({"payment_id": created, "order_id": order.id, "amount": 12500, "currency": "CHF"});
    assert_eq!(charge.json(), expected);

    pair.cancel(order.id).await;
    pair.order_becomes(order.id, "refunded").await;
    let cancelled = key_of(&pair, order.id, "OrderCancelled").await;
    let [_, refund] = &provider.calls()[..] else { panic!("two requests: {:?}", provider.calls()) };
    assert_eq!((refund.resource.as_str(), refund.key.as_str()), ("POST /v1/refunds", cancelled.as_str()));
    assert_eq!(refund.headers["content-type"], "application/json");
    // The charge is named as the gateway named it.
    let charge_id = format!("ch-{created}");
    let expected = json!({
        "payment_id": created, "order_id": order.id, "charge_id": charge_id, "amount": 12500, "currency": "CHF"
    });
    assert_eq!(refund.json(), expected);
}

#[tokio::test]
async fn a_decline_is_an_answer() {
    let provider = Provider::start(|call| match call.amount() {
        700 => Reply::Declined("card_expired"),
        _ => Reply::Done,
    });
    let provider = provider.await;
    let pair = pair(provider.url()).start().await;
    let orders = place_all(&pair, [700, 100]).await;
    pair.order_becomes(orders[0].id, "declined").await;
    pair.order_becomes(orders[1].id, "paid").await;
    let payment = pair.payment_of(orders[0].id).await.expect("a declined payment is one");
    assert_eq!((payment.status.as_str(), payment.reason.as_deref()), ("declined", Some("card_expired")));
    let key = key_of(&pair, orders[0].id, "OrderCreated").await;
    assert_eq!(provider.calls_of(&key).len(), 1, "nobody asks again");
    assert_eq!(dead_letters(&pair).await, 0);
}

const GARBAGE: [&str; 12] = [
    "",
    "it worked",
    "<html>",
    "null",
    "[]",
    "{}",
    r#"{"id":"ch-1"}"#,
    r#"{"status":"captured"}"#,
    r#"{"id":7,"status":"captured"}"#,
    r#"{"id":"ch-1","status":"perhaps"}"#,
    r#"{"id":"ch-\u0000","status":"captured"}"#,
    r#"{"id":"ch-1","status":"captured""#,
];

/// What happens to a first request, by its amount: it is done, and nobody learns of it.
fn lost(call: &Call) -> Reply {
    if call.attempt > 1 {
        return Reply::Done;
    }
    match call.amount() {
        1 => Reply::DoneInSilence,
        2 => Reply::DoneWithHalfAnAnswer,
        3 => Reply::DoneAfter(Duration::from_secs(2)),
        4 => Reply::DoneAndSays(" ".repeat(100_000)),
        amount => match GARBAGE.get(amount as usize - 5) {
            Some(text) => Reply::DoneAndSays(text.to_string()),
            None => Reply::Done,
        },
    }
}

#[tokio::test]
async fn an_answer_that_is_lost_is_asked_for_again_and_the_money_moves_once() {
    let provider = Provider::start(lost).await;
    let pair = pair(provider.url()).payment_setting("GATEWAY_TIMEOUT", "500ms").start().await;
    let orders = place_all(&pair, 1..=20).await;
    become_all(&pair, &orders, "paid").await;
    assert_eq!(effects(&provider, false).len(), orders.len(), "one charge for each order");
    assert!(provider.calls().len() > orders.len(), "some had to be asked for again");
    assert_repeated_exactly(&provider);

    for order in &orders {
        pair.cancel(order.id).await;
    }
    become_all(&pair, &orders, "refunded").await;
    let refunds = effects(&provider, true);
    assert_eq!(refunds.len(), orders.len(), "one refund for each order");
    assert_repeated_exactly(&provider);
    assert_eq!(dead_letters(&pair).await, 0);
}

const PASSING: [u16; 7] = [429, 500, 501, 502, 503, 504, 307];

/// The first two requests under a key get a status that passes, each amount its own.
fn passing(call: &Call) -> Reply {
    match call.attempt {
        1 | 2 => Reply::Status(PASSING[call.amount() as usize - 1]),
        _ => Reply::Done,
    }
}

#[tokio::test]
async fn an_error_that_passes_is_tried_again_until_it_has_passed() {
    let provider = Provider::start(passing).await;
    let pair = pair(provider.url()).start().await;
    let orders = place_all(&pair, 1..=PASSING.len() as i64).await;
    become_all(&pair, &orders, "paid").await;
    for order in &orders {
        pair.cancel(order.id).await;
    }
    become_all(&pair, &orders, "refunded").await;
    assert_repeated_exactly(&provider);
    for order in &orders {
        for event in ["OrderCreated", "OrderCancelled"] {
            assert_eq!(provider.calls_of(&key_of(&pair, order.id, event).await).len(), 3);
        }
    }
    assert_eq!(dead_letters(&pair).await, 0);
}

#[tokio::test]
async fn while_the_gateway_is_down_nothing_counts_against_any_order() {
    const MAX_ATTEMPTS: usize = 2;
    let port = free_port();
    let gateway = format!("http://127.0.0.1:{port}");
    let pair = pair(&gateway).payment_setting("CONSUMER_MAX_ATTEMPTS", &MAX_ATTEMPTS.to_string()).start().await;
    // First nobody listens there.
    let mut orders = place_all(&pair, 1..=5).await;
    eventually(SOON, "payment-service has tried each", async || {
        let parked = "SELECT count(*) FROM parked_events WHERE reason = 'retry'";
        let parked: i64 = sqlx::query_scalar(parked).fetch_one(&pair.payments_db).await.unwrap();
        if parked == 5 { Ok(()) } else { Err(parked) }
    })
    .await;

    // Then somebody does, who has no time for anybody.
    let is_down = Arc::new(AtomicBool::new(true));
    let down = Arc::clone(&is_down);
    let script = move |_: &Call| if down.load(Ordering::Relaxed) { Reply::Status(503) } else { Reply::Done };
    let provider = Provider::start_at(port, script).await;
    orders.extend(place_all(&pair, 6..=8).await);
    let mut keys = Vec::new();
    for order in &orders {
        keys.push(key_of(&pair, order.id, "OrderCreated").await);
    }
    eventually(SOON, "each was tried far more often than any may fail", async || {
        let tries: Vec<usize> = keys.iter().map(|key| provider.calls_of(key).len()).collect();
        if tries.iter().all(|tries| *tries >= 3 * MAX_ATTEMPTS) { Ok(()) } else { Err(tries) }
    })
    .await;
    let counted = "SELECT coalesce(max(attempts), 0), count(*) FROM parked_events";
    let counted: (i32, i64) = sqlx::query_as(counted).fetch_one(&pair.payments_db).await.unwrap();
    assert_eq!(counted, (0, orders.len() as i64));

    is_down.store(false, Ordering::Relaxed);
    become_all(&pair, &orders, "paid").await;
    assert_eq!(provider.effects().len(), orders.len());
    assert_repeated_exactly(&provider);
    assert_eq!(dead_letters(&pair).await, 0);
}

#[tokio::test]
async fn an_order_that_alone_is_never_answered_becomes_a_dead_letter_and_harms_no_neighbour() {
    const POISON: i64 = 666;
    let provider = Provider::start(|call| match call.amount() {
        POISON => Reply::Status(500),
        _ => Reply::Done,
    });
    let provider = provider.await;
    let pair = pair(provider.url()).payment_setting("CONSUMER_MAX_ATTEMPTS", "3").start().await;
    let poison = pair.place(POISON, "EUR").await;
    let key = key_of(&pair, poison.id, "OrderCreated").await;
    // A failure counts once others are answered, so others have to come.
    let mut neighbours = Vec::new();
    let (reason, attempts) = eventually(SOON, "the order is given up", async || {
        neighbours.push(pair.place(100, "EUR").await);
        dead_letter(&pair, &key).await
    })
    .await;
    assert_eq!(attempts, 3);
    assert!(reason.contains("500"), "{reason}");
    assert!(provider.calls_of(&key).len() >= 3);
    let tries = provider.calls_of(&key).len();

    neighbours.push(pair.place(100, "EUR").await);
    become_all(&pair, &neighbours, "paid").await;
    assert_eq!(dead_letters(&pair).await, 1);
    assert_eq!(pair.order(poison.id).await, poison, "it stays as it was placed");
    assert_eq!(pair.payment_of(poison.id).await, None);
    assert_eq!(provider.calls_of(&key).len(), tries, "nobody asks again");
}

#[tokio::test]
async fn a_charge_that_is_rejected_is_a_dead_letter_at_once_and_its_order_stays_pending() {
    const REJECTIONS: [i64; 6] = [400, 401, 402, 404, 409, 422];
    let provider = Provider::start(|call| match call.amount() {
        amount if REJECTIONS.contains(&amount) => Reply::Status(amount as u16),
        500 if call.is_refund() => Reply::Status(422),
        _ => Reply::Done,
    });
    let provider = provider.await;
    let pair = pair(provider.url()).start().await;
    let rejected = place_all(&pair, REJECTIONS).await;
    let neighbours = place_all(&pair, [500, 600]).await;
    become_all(&pair, &neighbours, "paid").await;
    for order in &rejected {
        let key = key_of(&pair, order.id, "OrderCreated").await;
        let (reason, _) = eventually(SOON, "the charge is given up", async || dead_letter(&pair, &key).await).await;
        assert!(reason.contains(&order.total.amount.to_string()), "{reason}");
        assert_eq!(provider.calls_of(&key).len(), 1, "nobody asks again");
        assert_eq!(pair.order(order.id).await, *order);
        assert_eq!(pair.payment_of(order.id).await, None);
    }

    // So is a refund, and the money stays where it is.
    pair.cancel(neighbours[0].id).await;
    let key = key_of(&pair, neighbours[0].id, "OrderCancelled").await;
    eventually(SOON, "the refund is given up", async || dead_letter(&pair, &key).await).await;
    assert_eq!(provider.calls_of(&key).len(), 1);
    assert_eq!(pair.order(neighbours[0].id).await.status, "cancelled");
    assert_eq!(pair.payment_of(neighbours[0].id).await.expect("it was captured").status, "captured");
    assert_eq!(dead_letters(&pair).await, rejected.len() as i64 + 1);
}

#[tokio::test]
async fn an_order_cancelled_while_it_is_charged_gets_its_money_back() {
    let provider = Provider::start(|call| match call.amount() {
        700 => Reply::Declined("card_expired"),
        _ => Reply::Done,
    });
    let provider = provider.await;
    let pair = pair(provider.url()).start().await;
    provider.hold();
    let orders = place_all(&pair, [100, 700]).await;
    eventually(SOON, "a charge is being asked for", async || {
        if provider.calls().is_empty() { Err("no request") } else { Ok(()) }
    })
    .await;
    for order in &orders {
        assert_eq!(pair.cancel(order.id).await.status, "cancelled");
    }
    provider.release();

    pair.order_becomes(orders[0].id, "refunded").await;
    let refunds = effects(&provider, true);
    assert_eq!(refunds.len(), 1, "what was declined needs no refund: {refunds:?}");
    assert_eq!(refunds[0].0, json!(orders[0].id));

    is_processed(&pair, &key_of(&pair, orders[1].id, "OrderCancelled").await).await;
    assert_eq!(pair.order(orders[1].id).await.status, "cancelled");
    assert_eq!(provider.effects().len(), 3);
    let told = "SELECT event_type FROM outbox_events WHERE aggregate_id = $1 ORDER BY aggregate_sequence";
    for (order, expected) in orders
        .iter()
        .zip([&["OrderCreated", "OrderCancelled", "OrderRefunded"][..], &["OrderCreated", "OrderCancelled"]])
    {
        let told: Vec<String> = sqlx::query_scalar(told).bind(order.id).fetch_all(&pair.orders_db).await.unwrap();
        assert_eq!(told, expected);
    }
}
