//! What the tests of the HTTP contract share: a service, requests, and answers as they are on the wire.

use std::time::Duration;

use e2e_tests::{Postgres, Service, eventually, free_port, http_client};
use reqwest::{Client, Method, RequestBuilder, header::HeaderMap};
use serde_json::{Value, json};
use sqlx::{Connection, PgConnection};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::OnceCell;
use uuid::Uuid;

/// Something to wait for is there within this time, however slow the machine.
pub const SOON: Duration = Duration::from_secs(30);

/// A service with a database and no broker, which its HTTP side does not need. All tests share it,
/// each with a client of its own.
pub struct Lone {
    http: Client,
    service: &'static Service,
    database: &'static str,
}

impl Lone {
    pub async fn order_service() -> Self {
        static SHARED: OnceCell<(Service, String)> = OnceCell::const_new();
        let (service, database) = SHARED.get_or_init(|| start_without_broker("order-service", &[])).await;
        Self { http: http_client(), service, database }
    }

    pub async fn payment_service() -> Self {
        static SHARED: OnceCell<(Service, String)> = OnceCell::const_new();
        let (service, database) = SHARED.get_or_init(|| start_without_broker("payment-service", &[])).await;
        Self { http: http_client(), service, database }
    }

    pub fn service(&self) -> &Service {
        self.service
    }

    pub fn get(&self, path: &str) -> RequestBuilder {
        self.http.get(self.service.url(path))
    }

    pub fn post(&self, path: &str) -> RequestBuilder {
        self.http.post(self.service.url(path))
    }

    pub fn request(&self, method: Method, path: &str) -> RequestBuilder {
        self.http.request(method, self.service.url(path))
    }

    /// Places an order, which must succeed.
    pub async fn place(&self, body: &Value) -> Value {
        let answer = send(self.post("/orders").json(body)).await;
        assert_eq!(answer.status, 201, "{answer:?}");
        answer.json()
    }

    pub async fn db(&self) -> PgConnection {
        PgConnection::connect(self.database).await.expect("the service's database answers")
    }

    /// How many orders this customer has, and how many events tell of one.
    pub async fn orders_and_events_of(&self, customer: Uuid) -> (i64, i64) {
        let count = "SELECT (SELECT count(*) FROM orders WHERE customer_id = $1),
                            (SELECT count(*) FROM outbox_events WHERE payload ->> 'customer_id' = $1::text)";
        sqlx::query_as(count).bind(customer).fetch_one(&mut self.db().await).await.expect("orders can be counted")
    }
}

impl Drop for Lone {
    fn drop(&mut self) {
        // A service in a static does not end with the test, and so does not show its last words.
        if std::thread::panicking() {
            eprintln!("{}", self.service.last_words());
        }
    }
}

/// Starts a service on a new database and waits until it answers. Returns the database's URL beside it.
pub async fn start_without_broker(name: &str, more: &[(&str, &str)]) -> (Service, String) {
    let postgres = Postgres::shared().await.expect("there is a database");
    let database = postgres.create_database("lone").await.expect("a database can be made");
    let broker = format!("nats://127.0.0.1:{}", free_port());
    let mut settings = vec![("DATABASE_URL", database.as_str()), ("NATS_URL", &broker)];
    settings.extend(more);
    let service = Service::start(name, &settings).await.expect("the service starts");
    answers(&service).await;
    (service, database)
}

/// Waits until the service has started and its public listener says that there is no such path.
pub async fn answers(service: &Service) {
    let (http, url) = (http_client(), service.url("/"));
    eventually(SOON, "the service answers", async || match http.get(&url).send().await {
        Ok(answer) if answer.status() == 404 => Ok(()),
        other => Err(other.map(|answer| answer.status())),
    })
    .await;
}

/// What a client is to send to place an order.
pub fn order_of(customer: Uuid) -> Value {
    json!({"customer_id": customer, "total": {"amount": 12500, "currency": "EUR"}})
}

#[derive(Debug)]
pub struct Answer {
    pub status: u16,
    pub headers: HeaderMap,
    pub body: String,
}

impl Answer {
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }

    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).map(|value| value.to_str().expect("the header is ASCII"))
    }

    /// Checks that this is an error as every error is to be, and returns its body.
    #[track_caller]
    pub fn problem(&self, status: u16) -> Value {
        assert_eq!(self.status, status, "{self:?}");
        assert_eq!(self.header("content-type"), Some("application/problem+json"), "{self:?}");
        assert!(self.header("x-request-id").is_some_and(|id| !id.is_empty()), "{self:?}");
        let problem = self.json();
        for field in ["type", "title", "detail"] {
            assert!(problem[field].as_str().is_some_and(|text| !text.is_empty()), "{field}: {self:?}");
        }
        assert_eq!(problem["status"], status, "{self:?}");
        for field in problem.as_object().expect("a problem is an object").keys() {
            assert!(matches!(&**field, "type" | "title" | "status" | "detail" | "errors"), "{field}: {self:?}");
        }
        assert_eq!(self.header("retry-after").is_some(), status == 503, "{self:?}");
        self.assert_is_not_internal();
        problem
    }

    /// Checks that this says which fields are wrong, and that it says it of these alone.
    #[track_caller]
    pub fn invalid(&self, fields: &[&str]) {
        let problem = self.problem(422);
        let errors = problem["errors"].as_object().unwrap_or_else(|| panic!("no field is named: {self:?}"));
        let mut named: Vec<&str> = errors.keys().map(String::as_str).collect();
        let mut fields = fields.to_vec();
        named.sort_unstable();
        fields.sort_unstable();
        assert_eq!(named, fields, "{self:?}");
        assert!(errors.values().all(|error| error.as_str().is_some_and(|text| !text.is_empty())), "{self:?}");
    }

    /// No word of what the service is made of.
    #[track_caller]
    fn assert_is_not_internal(&self) {
        let body = self.body.to_lowercase();
        for word in ["sqlx", "postgres", "sql", "panick", "serde", "deserialize", "axum", "tokio", "src/", ".rs"] {
            assert!(!body.contains(word), "{word}: {self:?}");
        }
    }
}

/// Sends a request.
#[track_caller]
pub fn send(request: RequestBuilder) -> impl Future<Output = Answer> {
    let caller = std::panic::Location::caller();
    async move { try_send(request).await.unwrap_or_else(|error| panic!("no answer, {caller}: {error:?}")) }
}

/// Sends a request to a service that may be away.
pub async fn try_send(request: RequestBuilder) -> reqwest::Result<Answer> {
    let response = request.send().await?;
    let (status, headers) = (response.status().as_u16(), response.headers().clone());
    Ok(Answer { status, headers, body: response.text().await? })
}

/// A connection to the service's public listener.
pub async fn connect(service: &Service) -> TcpStream {
    let url = service.url("");
    let address = url.strip_prefix("http://").expect("it is an HTTP address");
    TcpStream::connect(address).await.expect("the service listens")
}

/// Sends bytes that no polite client would, and reads the answer until the service hangs up.
pub async fn send_raw(service: &Service, request: &[u8]) -> Answer {
    let mut stream = connect(service).await;
    // A service that has seen enough may answer and hang up before everything is sent.
    let _ = stream.write_all(request).await;
    read_answer(&mut stream).await
}

/// Reads an answer until the service hangs up.
pub async fn read_answer(stream: &mut TcpStream) -> Answer {
    let mut bytes = Vec::new();
    let reading = async { while stream.read_buf(&mut bytes).await.is_ok_and(|read| read > 0) {} };
    tokio::time::timeout(SOON, reading).await.expect("the service answers and hangs up");
    parse(&bytes).unwrap_or_else(|| panic!("no answer: {:?}", String::from_utf8_lossy(&bytes)))
}

fn parse(answer: &[u8]) -> Option<Answer> {
    let answer = std::str::from_utf8(answer).ok()?;
    let (head, body) = answer.split_once("\r\n\r\n")?;
    let mut lines = head.lines();
    let status = lines.next()?.split(' ').nth(1)?.parse().ok()?;
    let mut headers = HeaderMap::new();
    for line in lines {
        let (name, value) = line.split_once(": ")?;
        headers.append(name.parse::<reqwest::header::HeaderName>().ok()?, value.parse().ok()?);
    }
    Some(Answer { status, headers, body: body.to_owned() })
}

/// A request to place an order, with a body of any bytes, after whose answer the service hangs up.
pub fn raw_post(body: &[u8], more_headers: &str) -> Vec<u8> {
    let length = body.len();
    let head = format!(
        "POST /orders HTTP/1.1\r\nhost: test\r\nconnection: close\r\ncontent-type: application/json\r\n\
         content-length: {length}\r\n{more_headers}\r\n"
    );
    [head.as_bytes(), body].concat()
}
