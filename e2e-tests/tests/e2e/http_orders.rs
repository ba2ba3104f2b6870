//! Orders over HTTP: placed, read, listed and cancelled.

use std::collections::BTreeSet;
use std::time::Duration;

use e2e_tests::{Pair, eventually};
use futures::future::join_all;
use reqwest::Method;
use reqwest::header::HeaderValue;
use serde_json::{Value, json};
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;
use tokio::io::AsyncWriteExt;
use uuid::Uuid;

use crate::http::{Answer, Lone, SOON, connect, order_of, raw_post, send, send_raw};

fn id_of(order: &Value) -> &str {
    order["id"].as_str().expect("an order has an id")
}

fn ids_of(orders: &Value) -> Vec<&str> {
    orders["items"].as_array().expect("a list has items").iter().map(id_of).collect()
}

fn time_of(order: &Value, field: &str) -> OffsetDateTime {
    let text = order[field].as_str().expect("a time is a text");
    OffsetDateTime::parse(text, &Rfc3339).expect("times are written as RFC 3339 has them")
}

async fn get(orders: &Lone, path: &str) -> Value {
    let answer = send(orders.get(path)).await;
    assert_eq!(answer.status, 200, "{path} is answered {answer:?}");
    answer.json()
}

async fn cancel(orders: &Lone, id: &str) -> Answer {
    send(orders.post(&format!("/orders/{id}/cancel"))).await
}

#[tokio::test]
async fn a_placed_order_is_answered_whole_and_found_at_its_location() {
    let orders = Lone::order_service().await;
    let body = order_of(Uuid::new_v4());
    let answer = send(orders.post("/orders").json(&body)).await;
    assert_eq!(answer.status, 201, "{answer:?}");
    assert_eq!(answer.header("content-type"), Some("application/json"));
    assert_eq!(answer.header("idempotency-replayed"), None);

    let order = answer.json();
    let fields: BTreeSet<&str> = order.as_object().expect("an order is an object").keys().map(|key| &**key).collect();
    let expected = ["created_at", "customer_id", "id", "status", "total", "updated_at", "version"];
    assert_eq!(fields, BTreeSet::from(expected));
    assert_eq!((&order["customer_id"], &order["total"]), (&body["customer_id"], &body["total"]));
    assert_eq!((&order["status"], &order["version"]), (&json!("pending"), &json!(1)));
    let age = OffsetDateTime::now_utc() - time_of(&order, "created_at");
    assert!(age.abs() < SOON, "{order}");
    assert_eq!(order["created_at"], order["updated_at"]);

    let location = answer.header("location").expect("what is created has a location");
    assert_eq!(location, format!("/orders/{}", id_of(&order)));
    assert_eq!(get(&orders, location).await, order);
}

#[tokio::test]
async fn an_order_and_its_event_are_written_together() {
    let orders = Lone::order_service().await;
    let body = order_of(Uuid::new_v4());
    let order = orders.place(&body).await;
    let event = sqlx::query_as::<_, (String, i64, String, i32, Value, bool)>(
        "SELECT e.event_type, e.aggregate_sequence, e.aggregate_type, e.event_version, e.payload, d.published_at IS NULL
         FROM outbox_events e JOIN outbox_deliveries d USING (event_id) WHERE e.aggregate_id = $1::uuid",
    );
    let events = event.bind(id_of(&order)).fetch_all(&mut orders.db().await).await.unwrap();
    let payload = json!({"order_id": order["id"], "customer_id": body["customer_id"], "total": body["total"]});
    assert_eq!(events, [("OrderCreated".to_owned(), 1, "order".to_owned(), 1, payload, true)]);
}

#[tokio::test]
async fn what_is_not_there_is_not_found() {
    let orders = Lone::order_service().await;
    let unknown = Uuid::new_v4();
    for path in ["/", "/order", "/orders/", "/ORDERS", "/health/ready", "/metrics", "/orders/a/b/c"] {
        send(orders.get(path)).await.problem(404);
    }
    let not_ids = ["", "1", "order", "null", "..", "%00", "%ff", "%zz", "%", "%2e%2e%2f", "%F0%9F%92%B6", "'--", "*"];
    for id in not_ids.into_iter().map(str::to_owned).chain([unknown.to_string(), "0".repeat(5000)]) {
        for (method, path) in [("GET", format!("/orders/{id}")), ("POST", format!("/orders/{id}/cancel"))] {
            let request = format!("{method} {path} HTTP/1.1\r\nhost: test\r\nconnection: close\r\n\r\n");
            let answer = send_raw(orders.service(), request.as_bytes()).await;
            assert_eq!(answer.status, 404, "{path} is answered {answer:?}");
            answer.problem(404);
        }
    }
}

#[tokio::test]
async fn a_method_that_a_resource_does_not_have_is_refused_with_those_that_it_has() {
    let orders = Lone::order_service().await;
    let id = Uuid::new_v4();
    let (order, cancel) = (format!("/orders/{id}"), format!("/orders/{id}/cancel"));
    for (path, allowed) in [("/orders", "GET,HEAD,POST"), (&order, "GET,HEAD"), (&cancel, "POST")] {
        for method in ["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "PURGE"] {
            if allowed.contains(method) {
                continue;
            }
            let method = Method::from_bytes(method.as_bytes()).unwrap();
            let answer = send(orders.request(method, path)).await;
            answer.problem(405);
            let mut allow: Vec<&str> = answer.header("allow").expect("a 405 says what is allowed").split(',').collect();
            allow.sort_unstable();
            assert_eq!(allow.join(","), allowed, "{path}");
        }
    }
}

#[tokio::test]
async fn a_correlation_id_is_taken_if_it_can_be_made_if_not_and_always_returned() {
    let orders = Lone::order_service().await;
    for id in ["a", "request-7", "!#$%&'*+-.^_`|~/\\\"<>[]{}", &"x".repeat(128)] {
        for path in ["/orders", "/nowhere", "/orders/1", "/orders?limit=0"] {
            let answer = send(orders.get(path).header("x-request-id", id)).await;
            assert_eq!(answer.header("x-request-id"), Some(id));
        }
        let answer = send(orders.post("/orders").header("x-request-id", id)).await;
        assert_eq!((answer.status, answer.header("x-request-id")), (415, Some(id)));
    }

    let mut made = BTreeSet::new();
    let long = "x".repeat(129);
    for id in [&b""[..], b"two words", b"tab\there", b"caf\xc3\xa9", b"\xff", long.as_bytes()] {
        let value = HeaderValue::from_bytes(id).unwrap();
        let answer = send(orders.get("/orders").header("x-request-id", value)).await;
        made.insert(answer.header("x-request-id").expect("one is made").to_owned());
    }
    let twice = orders.get("/orders").header("x-request-id", "one").header("x-request-id", "two");
    made.insert(send(twice).await.header("x-request-id").expect("one is made").to_owned());
    made.insert(send(orders.get("/nowhere")).await.header("x-request-id").expect("one is made").to_owned());
    assert_eq!(made.len(), 8, "each request has its own: {made:?}");
    assert!(made.iter().all(|id| id.parse::<Uuid>().is_ok()), "none is what was sent: {made:?}");
}

#[tokio::test]
async fn a_request_s_correlation_id_and_trace_go_with_every_event_it_causes() {
    let orders = Lone::order_service().await;
    let trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
    let place = orders.post("/orders").header("x-request-id", "placing").header("traceparent", trace);
    let order = send(place.json(&order_of(Uuid::new_v4()))).await.json();
    let cancel = orders.post(&format!("/orders/{}/cancel", id_of(&order)));
    let answer = send(cancel.header("traceparent", "not a trace")).await;
    let made = answer.header("x-request-id").expect("one is made");

    let headers = "SELECT headers FROM outbox_events WHERE aggregate_id = $1::uuid ORDER BY aggregate_sequence";
    let headers = sqlx::query_scalar::<_, Value>(headers).bind(id_of(&order));
    let headers = headers.fetch_all(&mut orders.db().await).await.unwrap();
    let expected = [json!({"correlationid": "placing", "traceparent": trace}), json!({"correlationid": made})];
    assert_eq!(headers, expected);
}

#[tokio::test]
async fn orders_are_listed_newest_first_and_by_customer_and_status() {
    let orders = Lone::order_service().await;
    let (customer, other) = (Uuid::new_v4(), Uuid::new_v4());
    let mut placed = Vec::new();
    for _ in 0..3 {
        placed.push(orders.place(&order_of(customer)).await);
        orders.place(&order_of(other)).await;
    }
    let newest_first: Vec<&str> = placed.iter().rev().map(id_of).collect();
    let list = get(&orders, &format!("/orders?customer_id={customer}")).await;
    assert_eq!(list["items"].as_array().unwrap(), &placed.iter().rev().cloned().collect::<Vec<_>>());
    assert_eq!(list["next"], Value::Null);
    assert_eq!(list.as_object().unwrap().len(), 2, "a list is its items and the next cursor: {list}");

    assert_eq!(cancel(&orders, newest_first[1]).await.status, 200);
    let by_status = async |status: &str| get(&orders, &format!("/orders?status={status}&customer_id={customer}")).await;
    assert_eq!(ids_of(&by_status("cancelled").await), [newest_first[1]]);
    assert_eq!(ids_of(&by_status("pending").await), [newest_first[0], newest_first[2]]);
    for status in ["paid", "declined", "refunded"] {
        assert!(ids_of(&by_status(status).await).is_empty());
    }

    for path in ["/orders?limit=100", "/orders?status=cancelled"] {
        let list = get(&orders, path).await;
        let items = list["items"].as_array().unwrap();
        assert!(!items.is_empty() && items.iter().rev().is_sorted_by_key(|order| time_of(order, "created_at")));
    }
    let cancelled = get(&orders, "/orders?status=cancelled&limit=100").await;
    assert!(ids_of(&cancelled).contains(&newest_first[1]));
    assert!(cancelled["items"].as_array().unwrap().iter().all(|order| order["status"] == "cancelled"));

    let nobody = get(&orders, &format!("/orders?customer_id={}", Uuid::new_v4())).await;
    assert_eq!(nobody, json!({"items": [], "next": null}));
}

/// Follows the cursors from the first page to the last. `between` runs before each page.
async fn pages(orders: &Lone, filter: &str, mut between: impl AsyncFnMut()) -> Vec<Vec<String>> {
    let mut pages = Vec::new();
    let mut after = String::new();
    loop {
        between().await;
        let page = get(orders, &format!("/orders?{filter}{after}")).await;
        pages.push(ids_of(&page).into_iter().map(str::to_owned).collect());
        match page["next"].as_str() {
            Some(next) => after = format!("&after={next}"),
            None => return pages,
        }
    }
}

#[tokio::test]
async fn every_order_is_on_one_page_while_new_ones_arrive() {
    let orders = Lone::order_service().await;
    let customer = Uuid::new_v4();
    let mut placed = Vec::new();
    for _ in 0..17 {
        placed.push(id_of(&orders.place(&order_of(customer)).await).to_owned());
    }
    placed.reverse();
    let arrive = async || {
        join_all((0..3).map(|_| async { orders.place(&order_of(customer)).await })).await;
    };
    let seen = pages(&orders, &format!("customer_id={customer}&limit=5"), arrive).await;
    let sizes: Vec<usize> = seen.iter().map(Vec::len).collect();
    assert_eq!(sizes, [5, 5, 5, 5], "three that came before the first page, and the seventeen");
    assert_eq!(seen.concat()[3..], placed[..]);
    let arrived = get(&orders, &format!("/orders?customer_id={customer}&limit=100")).await;
    assert_eq!(ids_of(&arrived).len(), 17 + 3 * 4);
}

#[tokio::test]
async fn orders_of_the_same_instant_are_on_one_page_each() {
    let orders = Lone::order_service().await;
    let customer = Uuid::new_v4();
    let insert = "INSERT INTO orders (id, customer_id, status, amount, currency, version, created_at)
                  SELECT gen_random_uuid(), $1, 'paid', 1, 'EUR', 1, '2001-01-01' FROM generate_series(1, 7)
                  RETURNING id::text";
    let inserting = sqlx::query_scalar::<_, String>(insert).bind(customer);
    let mut inserted = inserting.fetch_all(&mut orders.db().await).await.unwrap();
    inserted.sort_unstable_by(|one, other| other.cmp(one));
    for filter in [format!("customer_id={customer}"), format!("customer_id={customer}&status=paid")] {
        let seen = pages(&orders, &format!("{filter}&limit=2"), async || {}).await;
        assert_eq!(seen.concat(), inserted);
    }
    // They are the oldest of all, and so the last of every list.
    for filter in ["limit=100", "status=paid&limit=2"] {
        let seen = pages(&orders, filter, async || {}).await.concat();
        assert_eq!(seen[seen.len() - 7..], inserted);
        assert_eq!(seen.iter().collect::<BTreeSet<_>>().len(), seen.len(), "none comes twice");
    }
}

#[tokio::test]
async fn a_page_has_as_many_orders_as_were_asked_for_and_its_cursor_only_if_there_are_more() {
    let orders = Lone::order_service().await;
    let customer = Uuid::new_v4();
    join_all((0..21).map(|_| async { orders.place(&order_of(customer)).await })).await;
    for (limit, size, is_last) in [
        ("", 20, false),
        ("&limit=1", 1, false),
        ("&limit=20", 20, false),
        ("&limit=21", 21, true),
        ("&limit=100", 21, true),
    ] {
        let page = get(&orders, &format!("/orders?customer_id={customer}{limit}")).await;
        assert_eq!((ids_of(&page).len(), page["next"].is_null()), (size, is_last), "{limit}");
    }
}

#[tokio::test]
async fn a_question_that_makes_no_sense_is_refused() {
    let orders = Lone::order_service().await;
    let unknown = Uuid::new_v4();
    let after_unknown = format!("after={unknown}");
    for query in [
        "limit=0",
        "limit=-1",
        "limit=101",
        "limit=1.5",
        "limit=1e1",
        "limit=",
        "limit=ten",
        "limit=9223372036854775808",
        "limit=5&limit=6",
        "status=",
        "status=PAID",
        "status=bogus",
        "status=paid&status=pending",
        "status=%00",
        "customer_id=",
        "customer_id=1",
        "customer_id=%00",
        "customer_id=%ff",
        "after=",
        "after=1",
        "after=%F0%9F%92%B6",
        &after_unknown,
    ] {
        let request = format!("GET /orders?{query} HTTP/1.1\r\nhost: test\r\nconnection: close\r\n\r\n");
        let answer = send_raw(orders.service(), request.as_bytes()).await;
        assert_eq!(answer.status, 400, "{query} is answered {answer:?}");
        answer.problem(400);
    }
}

#[tokio::test]
async fn an_order_is_cancelled_once_however_often_and_by_how_many_it_is_asked() {
    let orders = Lone::order_service().await;
    let placed = orders.place(&order_of(Uuid::new_v4())).await;
    let id = id_of(&placed);
    let answers = join_all((0..20).map(|_| cancel(&orders, id))).await;
    let again = cancel(&orders, id).await.json();
    assert_eq!((&again["status"], &again["version"]), (&json!("cancelled"), &json!(2)));
    assert!(time_of(&again, "updated_at") > time_of(&placed, "updated_at"));
    assert_eq!(again["created_at"], placed["created_at"]);
    for answer in answers {
        assert_eq!((answer.status, answer.json()), (200, again.clone()));
    }
    assert_eq!(get(&orders, &format!("/orders/{id}")).await, again);
    let events = "SELECT event_type FROM outbox_events WHERE aggregate_id = $1::uuid ORDER BY aggregate_sequence";
    let events = sqlx::query_scalar::<_, String>(events).bind(id).fetch_all(&mut orders.db().await).await.unwrap();
    assert_eq!(events, ["OrderCreated", "OrderCancelled"]);
}

#[tokio::test]
async fn what_became_of_a_payment_decides_whether_an_order_can_be_cancelled() {
    let pair = Pair::start().await;
    let cancel =
        async |id: Uuid| send(e2e_tests::http_client().post(pair.orders[0].url(&format!("/orders/{id}/cancel")))).await;
    let (paid, declined) = (pair.place(12500, "EUR").await, pair.place(12513, "EUR").await);
    pair.order_becomes(declined.id, "declined").await;
    cancel(declined.id).await.problem(409);
    let after = pair.order(declined.id).await;
    assert_eq!((after.status.as_str(), after.version), ("declined", 2), "a refusal changes nothing");

    let before = pair.order_becomes(paid.id, "paid").await;
    assert_eq!(before.version, 2);
    assert_eq!(cancel(paid.id).await.json()["version"], 3);
    let refunded = pair.order_becomes(paid.id, "refunded").await;
    assert_eq!(refunded.version, 4);
    let again = cancel(paid.id).await;
    assert_eq!(
        (again.status, again.json()["status"].clone(), again.json()["version"].clone()),
        (200, json!("refunded"), json!(4))
    );
}

#[tokio::test]
async fn a_client_that_hangs_up_in_the_middle_of_a_request_writes_nothing_and_harms_nobody() {
    let orders = Lone::order_service().await;
    let customer = Uuid::new_v4();
    let request = raw_post(order_of(customer).to_string().as_bytes(), "");
    let head = request.windows(4).position(|four| four == b"\r\n\r\n").expect("a request has a head") + 4;
    for sent in [1, head / 2, head - 1, head, head + 1, head + 40, request.len() - 1] {
        let mut stream = connect(orders.service()).await;
        stream.write_all(&request[..sent]).await.unwrap();
        drop(stream);
        orders.place(&order_of(Uuid::new_v4())).await;
    }
    assert_eq!(orders.orders_and_events_of(customer).await, (0, 0));
}

#[tokio::test]
async fn a_request_whose_client_does_not_wait_for_the_answer_is_written_once_or_not_at_all() {
    let orders = Lone::order_service().await;
    for n in 0..20 {
        let (customer, key) = (Uuid::new_v4(), Uuid::new_v4().to_string());
        let body = order_of(customer).to_string();
        let mut stream = connect(orders.service()).await;
        stream.write_all(&raw_post(body.as_bytes(), &format!("idempotency-key: {key}\r\n"))).await.unwrap();
        // Some hang up at once, some while the order is being written.
        tokio::time::sleep(Duration::from_micros(n * 500)).await;
        drop(stream);

        let written = orders.orders_and_events_of(customer).await;
        assert!(written == (0, 0) || written == (1, 1), "half a write: {written:?}");
        // Asking again brings the order, whichever it was, and never a second one.
        let again = send(orders.post("/orders").header("idempotency-key", &key).json(&order_of(customer))).await;
        assert_eq!(again.status, 201, "{again:?}");
        assert_eq!(orders.orders_and_events_of(customer).await, (1, 1));
    }
}

#[tokio::test]
async fn a_write_runs_to_its_end_though_its_client_has_hung_up() {
    let orders = Lone::order_service().await;
    let order = orders.place(&order_of(Uuid::new_v4())).await;
    let id = id_of(&order);
    // While this lock is held, the cancellation waits in the middle of its transaction.
    let mut db = orders.db().await;
    let mut tx = sqlx::Connection::begin(&mut db).await.unwrap();
    sqlx::query("SELECT FROM orders WHERE id = $1::uuid FOR UPDATE").bind(id).execute(&mut *tx).await.unwrap();
    let mut stream = connect(orders.service()).await;
    let request = format!("POST /orders/{id}/cancel HTTP/1.1\r\nhost: test\r\n\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    eventually(SOON, "the cancellation waits for the lock", async || {
        let waiting = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()
                       AND wait_event_type = 'Lock' AND query LIKE '%FOR UPDATE%'";
        let waiting: i64 = sqlx::query_scalar(waiting).fetch_one(&mut orders.db().await).await.unwrap();
        if waiting > 0 { Ok(()) } else { Err(waiting) }
    })
    .await;
    drop(stream);
    tx.commit().await.unwrap();
    eventually(SOON, "the order is cancelled all the same", async || {
        let order = get(&orders, &format!("/orders/{id}")).await;
        if order["status"] == "cancelled" { Ok(()) } else { Err(order) }
    })
    .await;
}
