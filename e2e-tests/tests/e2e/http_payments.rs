//! Payments over HTTP: read by their own id and by their order's.

use std::collections::BTreeSet;

use e2e_tests::{Pair, http_client};
use serde_json::{Value, json};
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;
use uuid::Uuid;

use crate::http::{Lone, send, send_raw};

/// Reads a payment both ways, which must show the same, and checks its form.
async fn payment_of(pair: &Pair, order: Uuid) -> Value {
    let (http, service) = (http_client(), &pair.payments[0]);
    let found = send(http.get(service.url(&format!("/payments?order_id={order}")))).await;
    assert_eq!((found.status, found.header("content-type")), (200, Some("application/json")), "{found:?}");
    assert!(found.header("x-request-id").is_some());
    let payment = found.json();
    let id = payment["id"].as_str().expect("a payment has an id");
    assert_eq!(send(http.get(service.url(&format!("/payments/{id}")))).await.json(), payment);

    let fields: BTreeSet<&str> = payment.as_object().unwrap().keys().map(|key| &**key).collect();
    let expected = ["amount", "created_at", "id", "order_id", "reason", "status", "updated_at", "version"];
    assert_eq!(fields, BTreeSet::from(expected));
    for field in ["created_at", "updated_at"] {
        OffsetDateTime::parse(payment[field].as_str().unwrap(), &Rfc3339).expect("times are RFC 3339");
    }
    assert_eq!(payment["order_id"], json!(order));
    payment
}

#[tokio::test]
async fn a_payment_is_found_by_its_id_and_by_its_order_in_each_of_its_states() {
    let pair = Pair::start().await;
    let (order, declined) = (pair.place(12500, "EUR").await, pair.place(12513, "CHF").await);

    pair.order_becomes(order.id, "paid").await;
    let payment = payment_of(&pair, order.id).await;
    assert_eq!((&payment["status"], &payment["version"]), (&json!("captured"), &json!(1)));
    assert_eq!((&payment["reason"], &payment["amount"]), (&Value::Null, &json!({"amount": 12500, "currency": "EUR"})));
    // A payment's id is the id of the event that asked for it.
    let created = "SELECT event_id FROM outbox_events WHERE aggregate_id = $1 AND event_type = 'OrderCreated'";
    let created: Uuid = sqlx::query_scalar(created).bind(order.id).fetch_one(&pair.orders_db).await.unwrap();
    assert_eq!(payment["id"], json!(created));

    pair.order_becomes(declined.id, "declined").await;
    let payment = payment_of(&pair, declined.id).await;
    assert_eq!((&payment["status"], &payment["version"]), (&json!("declined"), &json!(1)));
    assert_eq!(payment["reason"], "insufficient_funds");
    assert_eq!(payment["amount"], json!({"amount": 12513, "currency": "CHF"}));

    pair.cancel(order.id).await;
    pair.order_becomes(order.id, "refunded").await;
    let payment = payment_of(&pair, order.id).await;
    assert_eq!((&payment["status"], &payment["version"]), (&json!("refunded"), &json!(2)));
    assert_eq!((&payment["reason"], &payment["amount"]), (&Value::Null, &json!({"amount": 12500, "currency": "EUR"})));
}

#[tokio::test]
async fn a_payment_that_is_not_there_is_not_found() {
    let payments = Lone::payment_service().await;
    let unknown = Uuid::new_v4();
    send(payments.get(&format!("/payments/{unknown}"))).await.problem(404);
    send(payments.get(&format!("/payments?order_id={unknown}"))).await.problem(404);
    for path in ["/", "/payment", "/payments/", "/payments/1/refund", "/orders", "/metrics"] {
        send(payments.get(path)).await.problem(404);
    }
    for id in ["1", "null", "%00", "%ff", "%zz", "%2e%2e%2f", "%F0%9F%92%B6"] {
        let request = format!("GET /payments/{id} HTTP/1.1\r\nhost: test\r\nconnection: close\r\n\r\n");
        send_raw(payments.service(), request.as_bytes()).await.problem(404);
    }
}

#[tokio::test]
async fn payments_are_asked_for_by_one_order_that_is_a_uuid() {
    let payments = Lone::payment_service().await;
    let id = Uuid::new_v4();
    let twice = format!("?order_id={id}&order_id={id}");
    for query in ["", "?", "?order=1", "?order_id=", "?order_id=1", "?order_id=%00", "?order_id=%ff", &twice] {
        let request = format!("GET /payments{query} HTTP/1.1\r\nhost: test\r\nconnection: close\r\n\r\n");
        let answer = send_raw(payments.service(), request.as_bytes()).await;
        assert_eq!(answer.status, 400, "{query} is answered {answer:?}");
        answer.problem(400);
    }
}

#[tokio::test]
async fn payments_can_only_be_read() {
    let payments = Lone::payment_service().await;
    for path in ["/payments", &format!("/payments/{}", Uuid::new_v4())] {
        for method in ["POST", "PUT", "PATCH", "DELETE", "OPTIONS"] {
            let answer = send(payments.request(method.parse().unwrap(), path)).await;
            answer.problem(405);
            assert_eq!(answer.header("allow"), Some("GET,HEAD"));
        }
    }
}

#[tokio::test]
async fn the_correlation_id_of_a_question_is_returned() {
    let payments = Lone::payment_service().await;
    for path in ["/payments", "/payments/1", "/nowhere"] {
        let answer = send(payments.get(path).header("x-request-id", "mine")).await;
        assert_eq!(answer.header("x-request-id"), Some("mine"));
    }
}
