//! What `POST /orders` makes of every body that is not an order.

use std::fmt::Write;

use serde_json::{Value, json};
use uuid::Uuid;

use crate::http::{Lone, order_of, raw_post, send, send_raw};

/// An order with one field, given as JSON text, in the place of the right one.
fn order_with(customer: Uuid, field: &str, json: &str) -> String {
    let mut fields = [
        ("customer_id", format!(r#""{customer}""#)),
        ("total.amount", "12500".to_owned()),
        ("total.currency", r#""EUR""#.to_owned()),
    ];
    for (name, value) in &mut fields {
        if *name == field {
            *value = json.to_owned();
        }
    }
    let [(_, customer), (_, amount), (_, currency)] = fields;
    format!(r#"{{"customer_id": {customer}, "total": {{"amount": {amount}, "currency": {currency}}}}}"#)
}

async fn assert_malformed(orders: &Lone, bodies: &[&[u8]]) {
    for body in bodies {
        let request = orders.post("/orders").header("content-type", "application/json").body(body.to_vec());
        let answer = send(request).await;
        assert_eq!(answer.status, 400, "{:?} is answered {answer:?}", String::from_utf8_lossy(body));
        answer.problem(400);
    }
}

async fn assert_invalid(orders: &Lone, body: &str, fields: &[&str]) {
    let request = orders.post("/orders").header("content-type", "application/json").body(body.to_owned());
    let answer = send(request).await;
    assert_eq!(answer.status, 422, "{body} is answered {answer:?}");
    answer.invalid(fields);
}

#[tokio::test]
async fn a_body_that_is_not_json_is_malformed() {
    let orders = Lone::order_service().await;
    let customer = Uuid::new_v4();
    let whole = order_of(customer).to_string();
    let truncated = &whole.as_bytes()[..whole.len() - 1];
    let bodies: [&[u8]; 16] = [
        b"",
        b" \r\n",
        b"order",
        b"{",
        b"}",
        b"[1, 2",
        truncated,
        &[whole.as_bytes(), b" {}"].concat(),
        &[b"\xef\xbb\xbf", whole.as_bytes()].concat(),
        &[whole.as_bytes(), b"\0"].concat(),
        b"customer_id=1&total=2",
        b"{'customer_id': 1}",
        b"{\"customer_id\": \"a\nb\"}",
        b"{\"customer_id\": \"\xff\xfe\"}",
        b"{\"customer_id\": \"\\u12\"}",
        b"{\"customer_id\": NaN}",
    ];
    assert_malformed(&orders, &bodies).await;
    // A number in JSON has one form only.
    for amount in ["+1", "01", "1.", ".5", "0x10", "1_000", "1e", "-", "Infinity"] {
        assert_malformed(&orders, &[order_with(customer, "total.amount", amount).as_bytes()]).await;
    }
    assert_eq!(orders.orders_and_events_of(customer).await, (0, 0));
}

#[tokio::test]
async fn an_amount_that_is_not_an_integer_in_range_is_invalid() {
    let orders = Lone::order_service().await;
    let customer = Uuid::new_v4();
    let huge = "9".repeat(1000);
    let amounts = [
        "0",
        "-0",
        "-1",
        "-12500",
        "1e3",
        "1E3",
        "12500.0",
        "12500.5",
        "0.1",
        "1e-3",
        "9007199254740992",     // 2^53
        "9223372036854775807",  // 2^63 - 1
        "9223372036854775808",  // 2^63
        "18446744073709551616", // 2^64
        "-9223372036854775809",
        "1e400",
        "-1e400",
        &huge,
        "null",
        "true",
        r#""12500""#,
        r#""""#,
        "[12500]",
        r#"{"amount": 12500}"#,
    ];
    for amount in amounts {
        assert_invalid(&orders, &order_with(customer, "total.amount", amount), &["total.amount"]).await;
    }
    assert_eq!(orders.orders_and_events_of(customer).await, (0, 0));
}

#[tokio::test]
async fn a_currency_that_is_not_a_code_of_iso_4217_is_invalid() {
    let orders = Lone::order_service().await;
    let customer = Uuid::new_v4();
    let currencies = [
        r#""eur""#,
        r#""Eur""#,
        r#""EURO""#,
        r#""EU""#,
        r#"" EUR""#,
        r#""EUR ""#,
        r#""ABC""#,
        r#""€""#,
        r#""ＥＵＲ""#,
        r#""""#,
        r#""EUR\u0000""#,
        r#""\u0000""#,
        r#""\ud800""#,
        r#""EUR\udc00""#,
        r#""\udc00\ud800""#,
        "978",
        "null",
        "false",
        r#"["EUR"]"#,
        r#"{"code": "EUR"}"#,
    ];
    for currency in currencies {
        assert_invalid(&orders, &order_with(customer, "total.currency", currency), &["total.currency"]).await;
    }
    assert_eq!(orders.orders_and_events_of(customer).await, (0, 0));
}

#[tokio::test]
async fn a_customer_that_is_not_a_uuid_is_invalid() {
    let orders = Lone::order_service().await;
    let id = "0199c0de-0000-7000-8000-000000000002";
    let customers = [
        json!(""),
        json!("customer"),
        json!(format!("{id}0")),
        json!(format!(" {id}")),
        json!(format!("{{{id}}}")),
        json!(format!("urn:uuid:{id}")),
        json!(id.replace('-', "")),
        json!(id.replace('c', "g")),
        json!("\0"),
        json!("0199c0de-0000-7000-8000-00000000000\0"),
        json!(7),
        json!(null),
        json!([id]),
        json!({"id": id}),
    ];
    for customer in customers.iter().map(Value::to_string).chain([r#""\ud800""#.to_owned()]) {
        assert_invalid(&orders, &order_with(Uuid::nil(), "customer_id", &customer), &["customer_id"]).await;
    }
}

#[tokio::test]
async fn everything_that_is_wrong_with_a_body_is_named_at_once() {
    let orders = Lone::order_service().await;
    let (customer, amount, currency) = ("customer_id", "total.amount", "total.currency");
    let id = Uuid::new_v4();
    let cases = [
        (json!({}), vec![customer, amount, currency]),
        (json!([]), vec![customer, amount, currency]),
        (json!([order_of(id)]), vec![customer, amount, currency]),
        (json!(null), vec![customer, amount, currency]),
        (json!(12500), vec![customer, amount, currency]),
        (json!("order"), vec![customer, amount, currency]),
        (json!({"customer_id": id}), vec![amount, currency]),
        (json!({"customer_id": id, "total": 12500}), vec![amount, currency]),
        (json!({"customer_id": id, "total": [12500, "EUR"]}), vec![amount, currency]),
        (json!({"customer_id": id, "total": {}}), vec![amount, currency]),
        (json!({"customer_id": id, "total": {"amount": 12500}}), vec![currency]),
        (json!({"total": {"amount": 0, "currency": "EUR"}}), vec![customer, amount]),
        (json!({"customer_id": 1, "total": {"amount": "1", "currency": 1}}), vec![customer, amount, currency]),
        // Names are written one way.
        (json!({"customerId": id, "total": {"Amount": 1, "CURRENCY": "EUR"}}), vec![customer, amount, currency]),
    ];
    for (body, fields) in cases {
        assert_invalid(&orders, &body.to_string(), &fields).await;
    }
    assert_eq!(orders.orders_and_events_of(id).await, (0, 0));
}

#[tokio::test]
async fn what_a_body_says_beyond_an_order_is_ignored_and_harms_nothing() {
    let orders = Lone::order_service().await;
    let deep = format!("{}{}", "[".repeat(5000), "]".repeat(5000));
    for more in [r#""\u0000""#, r#""\ud800""#, "1e400", "[{}]", &deep] {
        let customer = Uuid::new_v4();
        let whole = order_of(customer).to_string();
        let body = format!(r#"{{"note": {more}, "\u0000": 1, {}"#, &whole[1..]);
        let answer = send(orders.post("/orders").header("content-type", "application/json").body(body)).await;
        assert_eq!(answer.status, 201, "{more} beside an order is answered {answer:?}");
        assert_eq!(orders.orders_and_events_of(customer).await, (1, 1));
    }
    // Where a field is meant, its nesting is as wrong as any other type.
    assert_invalid(&orders, &order_with(Uuid::nil(), "total.amount", &deep), &["total.amount"]).await;
    assert_invalid(&orders, &deep, &["customer_id", "total.amount", "total.currency"]).await;
}

#[tokio::test]
async fn of_a_field_that_is_written_twice_the_last_one_counts() {
    let orders = Lone::order_service().await;
    let customer = Uuid::new_v4();
    let body = format!(
        r#"{{"customer_id": "{}", "customer_id": "{customer}", "total": 1,
            "total": {{"amount": 0, "amount": 7, "currency": "", "currency": "CHF"}}}}"#,
        Uuid::new_v4()
    );
    let answer = send(orders.post("/orders").header("content-type", "application/json").body(body)).await;
    assert_eq!(answer.status, 201, "{answer:?}");
    assert_eq!(answer.json()["customer_id"], json!(customer));
    assert_eq!(answer.json()["total"], json!({"amount": 7, "currency": "CHF"}));
}

#[tokio::test]
async fn an_amount_may_be_anything_from_one_to_the_largest_exact_integer() {
    let orders = Lone::order_service().await;
    for (amount, currency) in [(1, "EUR"), (9_007_199_254_740_991_i64, "JPY"), (100, "KWD")] {
        let body = json!({"customer_id": Uuid::new_v4(), "total": {"amount": amount, "currency": currency}});
        let placed = orders.place(&body).await;
        assert_eq!(placed["total"], body["total"]);
    }
}

#[tokio::test]
async fn whatever_happens_to_a_body_on_its_way_the_service_does_not_fail() {
    let orders = Lone::order_service().await;
    let seed = fastrand::u64(..);
    let mut random = fastrand::Rng::with_seed(seed);
    for _ in 0..500 {
        let mut body = order_of(Uuid::new_v4()).to_string().into_bytes();
        for _ in 0..random.usize(1..4) {
            let (place, byte) = (random.usize(..body.len()), random.u8(..));
            match random.u8(..4) {
                0 => body[place] = byte,
                1 => body.insert(place, byte),
                2 => drop(body.remove(place)),
                _ => body.extend_from_within(place..),
            }
        }
        let text = String::from_utf8_lossy(&body).into_owned();
        let answer = send(orders.post("/orders").header("content-type", "application/json").body(body)).await;
        match answer.status {
            201 => {}
            400 | 422 => drop(answer.problem(answer.status)),
            _ => panic!("seed {seed}: {text:?} is answered {answer:?}"),
        }
    }
}

/// An order, with spaces up to `length` bytes.
fn padded(customer: Uuid, length: usize) -> Vec<u8> {
    let mut body = order_of(customer).to_string().into_bytes();
    body.resize(length, b' ');
    body
}

/// A body in chunks, whose length nobody says beforehand.
fn raw_chunked_post(body: &[u8]) -> Vec<u8> {
    let mut request = String::from(
        "POST /orders HTTP/1.1\r\nhost: test\r\nconnection: close\r\n\
         content-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n",
    );
    for chunk in body.chunks(10_000) {
        let text = std::str::from_utf8(chunk).expect("the body is text");
        write!(request, "{:x}\r\n{text}\r\n", chunk.len()).expect("a string can be written to");
    }
    request.push_str("0\r\n\r\n");
    request.into_bytes()
}

#[tokio::test]
async fn a_body_of_64_kib_is_judged_by_what_it_says_and_one_byte_more_is_too_large() {
    const LIMIT: usize = 64 * 1024;
    let orders = Lone::order_service().await;
    let service = orders.service();
    let customer = Uuid::new_v4();
    for request in [raw_post(&padded(customer, LIMIT), ""), raw_chunked_post(&padded(customer, LIMIT))] {
        let answer = send_raw(service, &request).await;
        assert_eq!(answer.status, 201, "{answer:?}");
    }
    assert_eq!(orders.orders_and_events_of(customer).await, (2, 2));

    send_raw(service, &raw_post(&[b' '; LIMIT], "")).await.problem(400);
    let customer = Uuid::new_v4();
    for request in [raw_post(&padded(customer, LIMIT + 1), ""), raw_chunked_post(&padded(customer, LIMIT + 1))] {
        send_raw(service, &request).await.problem(413);
    }
    // A client reads this answer even while it still sends, as long as the service does not hang up on it.
    for length in [LIMIT + 1, 2 * LIMIT, 16 * LIMIT] {
        let request = orders.post("/orders").header("content-type", "application/json");
        send(request.body(padded(customer, length))).await.problem(413);
    }
    assert_eq!(orders.orders_and_events_of(customer).await, (0, 0));
}

#[tokio::test]
async fn a_body_that_does_not_say_that_it_is_json_is_of_an_unsupported_type() {
    let orders = Lone::order_service().await;
    let customer = Uuid::new_v4();
    let body = order_of(customer).to_string();
    send(orders.post("/orders").body(body.clone())).await.problem(415);
    for content_type in ["", "text/plain", "text/json", "application/xml", "application/jsonp", "json", "*/*"] {
        let request = orders.post("/orders").header("content-type", content_type);
        let answer = send(request.body(body.clone())).await;
        assert_eq!(answer.status, 415, "{content_type:?} is answered {answer:?}");
        answer.problem(415);
    }
    let twice = orders.post("/orders").header("content-type", "application/json");
    send(twice.header("content-type", "application/json").body(body.clone())).await.problem(400);
    assert_eq!(orders.orders_and_events_of(customer).await, (0, 0));

    for content_type in ["application/json; charset=utf-8", "Application/JSON", "application/json ;charset=utf-8"] {
        let request = orders.post("/orders").header("content-type", content_type);
        assert_eq!(send(request.body(body.clone())).await.status, 201, "{content_type}");
    }
}
