//! The Idempotency-Key: one order for one key, however often and however many at a time ask for it.

use futures::future::join_all;
use reqwest::header::HeaderValue;
use serde_json::{Value, json};
use uuid::Uuid;

use crate::http::{Answer, Lone, order_of, send};

fn new_key() -> String {
    format!("key-{}", Uuid::new_v4())
}

async fn post(orders: &Lone, key: &str, body: &str) -> Answer {
    let request = orders.post("/orders").header("idempotency-key", key).header("content-type", "application/json");
    send(request.body(body.to_owned())).await
}

async fn place(orders: &Lone, key: &str, body: &Value) -> Answer {
    let answer = post(orders, key, &body.to_string()).await;
    assert_eq!(answer.status, 201, "{answer:?}");
    answer
}

fn is_replayed(answer: &Answer) -> bool {
    match answer.header("idempotency-replayed") {
        None => false,
        Some("true") => true,
        Some(other) => panic!("Idempotency-Replayed is {other}"),
    }
}

#[tokio::test]
async fn the_same_key_and_the_same_body_are_the_same_order() {
    let orders = Lone::order_service().await;
    let (customer, key) = (Uuid::new_v4(), new_key());
    let first = place(&orders, &key, &order_of(customer)).await;
    assert!(!is_replayed(&first));
    for _ in 0..3 {
        let again = place(&orders, &key, &order_of(customer)).await;
        assert!(is_replayed(&again));
        assert_eq!(again.json(), first.json());
        assert_eq!(again.header("location"), first.header("location"));
    }
    assert_eq!(orders.orders_and_events_of(customer).await, (1, 1));
}

#[tokio::test]
async fn a_replay_shows_the_order_as_it_is_now() {
    let orders = Lone::order_service().await;
    let (body, key) = (order_of(Uuid::new_v4()), new_key());
    let id = place(&orders, &key, &body).await.json()["id"].as_str().unwrap().to_owned();
    let cancelled = send(orders.post(&format!("/orders/{id}/cancel"))).await.json();
    let again = place(&orders, &key, &body).await;
    assert!(is_replayed(&again));
    assert_eq!(again.json(), cancelled);
}

#[tokio::test]
async fn the_same_values_written_otherwise_are_the_same_body() {
    let orders = Lone::order_service().await;
    let (customer, key) = (Uuid::new_v4(), new_key());
    let first = place(&orders, &key, &order_of(customer)).await;
    let upper = customer.to_string().to_uppercase();
    for body in [
        format!(r#"{{"total":{{"currency":"EUR","amount":12500}},"customer_id":"{customer}"}}"#),
        format!(
            "\n{{ \"customer_id\" :\t\"{customer}\", \"total\": {{\"amount\": 12500, \"currency\": \"\\u0045UR\"}} }}\r\n"
        ),
        format!(r#"{{"customer_id":"{upper}","total":{{"amount":12500,"currency":"EUR"}}}}"#),
        format!(r#"{{"customer_id":"{customer}","total":{{"amount":12500,"currency":"EUR"}},"note":"ignored"}}"#),
    ] {
        let again = post(&orders, &key, &body).await;
        assert_eq!(again.status, 201, "{body} is answered {again:?}");
        assert!(is_replayed(&again));
        assert_eq!(again.json(), first.json());
    }
}

#[tokio::test]
async fn the_same_key_with_another_body_is_refused_and_changes_nothing() {
    let orders = Lone::order_service().await;
    let (customer, key) = (Uuid::new_v4(), new_key());
    let first = place(&orders, &key, &order_of(customer)).await;
    for other in [
        order_of(Uuid::new_v4()),
        json!({"customer_id": customer, "total": {"amount": 12501, "currency": "EUR"}}),
        json!({"customer_id": customer, "total": {"amount": 12500, "currency": "CHF"}}),
    ] {
        let problem = post(&orders, &key, &other.to_string()).await.problem(422);
        assert!(problem["detail"].as_str().unwrap().contains("Idempotency-Key"), "{problem}");
    }
    assert_eq!(orders.orders_and_events_of(customer).await, (1, 1));
    assert_eq!(place(&orders, &key, &order_of(customer)).await.json(), first.json());
}

#[tokio::test]
async fn fifty_requests_at_once_with_one_key_are_one_order() {
    let orders = Lone::order_service().await;
    let (customer, key) = (Uuid::new_v4(), new_key());
    let answers = join_all((0..50).map(|_| async { place(&orders, &key, &order_of(customer)).await })).await;
    assert_eq!(answers.iter().filter(|answer| !is_replayed(answer)).count(), 1, "one of them made the order");
    assert!(answers.iter().all(|answer| answer.json() == answers[0].json()));
    assert_eq!(orders.orders_and_events_of(customer).await, (1, 1));
}

#[tokio::test]
async fn of_many_bodies_at_once_under_one_key_one_becomes_the_order() {
    let orders = Lone::order_service().await;
    let (customer, key) = (Uuid::new_v4(), new_key());
    let body = |amount: i64| json!({"customer_id": customer, "total": {"amount": amount, "currency": "EUR"}});
    let bodies: Vec<String> = (1..=20).map(|amount| body(amount).to_string()).collect();
    let answers = join_all(bodies.iter().map(|body| post(&orders, &key, body))).await;
    let placed: Vec<&Answer> = answers.iter().filter(|answer| answer.status == 201).collect();
    assert_eq!(placed.len(), 1, "{answers:?}");
    answers.iter().filter(|answer| answer.status != 201).for_each(|answer| drop(answer.problem(422)));
    assert_eq!(orders.orders_and_events_of(customer).await, (1, 1));
}

#[tokio::test]
async fn a_request_that_was_refused_does_not_use_up_its_key() {
    let orders = Lone::order_service().await;
    let (customer, key) = (Uuid::new_v4(), new_key());
    post(&orders, &key, "{").await.problem(400);
    post(&orders, &key, "{}").await.problem(422);
    let untyped = orders.post("/orders").header("idempotency-key", &key).body(order_of(customer).to_string());
    send(untyped).await.problem(415);
    post(&orders, &key, &" ".repeat(64 * 1024 + 1)).await.problem(413);
    assert!(!is_replayed(&place(&orders, &key, &order_of(customer)).await));
}

#[tokio::test]
async fn two_keys_and_no_key_are_orders_of_their_own() {
    let orders = Lone::order_service().await;
    let customer = Uuid::new_v4();
    let key = new_key();
    // Keys are compared as they are.
    for key in [key.to_uppercase(), key, new_key()] {
        assert!(!is_replayed(&place(&orders, &key, &order_of(customer)).await));
    }
    orders.place(&order_of(customer)).await;
    orders.place(&order_of(customer)).await;
    assert_eq!(orders.orders_and_events_of(customer).await, (5, 5));
}

#[tokio::test]
async fn a_key_is_one_to_255_visible_characters_sent_once() {
    let orders = Lone::order_service().await;
    let tail = Uuid::new_v4().simple().to_string();
    for key in ["!".repeat(255 - 32), "a".to_owned(), "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~".to_owned()] {
        let key = format!("{key}{tail}");
        assert!(!is_replayed(&place(&orders, &key, &order_of(Uuid::new_v4())).await));
    }

    let customer = Uuid::new_v4();
    let refuse = async |keys: &[&[u8]]| {
        let mut request = orders.post("/orders").json(&order_of(customer));
        for key in keys {
            request = request.header("idempotency-key", HeaderValue::from_bytes(key).unwrap());
        }
        let answer = send(request).await;
        assert_eq!(answer.status, 400, "{keys:?} is answered {answer:?}");
        answer.problem(400);
    };
    let (long, longer) = ("k".repeat(256), "k".repeat(300));
    for key in [&b""[..], b"two words", b"tab\tbed", b"caf\xc3\xa9", b"\xff\xfe", long.as_bytes(), longer.as_bytes()] {
        refuse(&[key]).await;
    }
    refuse(&[b"one", b"other"]).await;
    refuse(&[b"same", b"same"]).await;
    assert_eq!(orders.orders_and_events_of(customer).await, (0, 0));
}
