//! A payment provider that tests have in their hand: it does what it is asked, or fails to, as told.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::extract::{Request, State};
use axum::http::{HeaderMap, StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use axum::{Json, Router};
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

/// What the provider does with one request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reply {
    /// Takes or returns the money, and says so.
    Done,
    /// As [`Reply::Done`], beside fields that nobody knows.
    DoneAndMore,
    /// As [`Reply::Done`], after this time.
    DoneAfter(Duration),
    /// Takes or returns the money, and never says so.
    DoneInSilence,
    /// Takes or returns the money, and breaks the connection in the middle of the answer.
    DoneWithHalfAnAnswer,
    /// Takes or returns the money, and answers with this text.
    DoneAndSays(String),
    /// Declines, for this reason.
    Declined(&'static str),
    /// Does nothing and answers with this status.
    Status(u16),
}

/// One request as it came.
#[derive(Debug, Clone, PartialEq)]
pub struct Call {
    /// The method and the path, such as `POST /charges`.
    pub resource: String,
    /// All headers.
    pub headers: HeaderMap,
    /// The body, byte for byte.
    pub body: Bytes,
    /// The idempotency key.
    pub key: String,
    /// How many times this key was sent, this time included.
    pub attempt: usize,
}

impl Call {
    /// The body, read; null where it is not JSON.
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_default()
    }

    /// The amount that is to be taken or returned; 0 where the body does not say.
    pub fn amount(&self) -> i64 {
        self.json()["amount"].as_i64().unwrap_or_default()
    }

    /// Whether money is to be returned.
    pub fn is_refund(&self) -> bool {
        self.resource.ends_with("/refunds")
    }
}

#[derive(Default)]
struct Books {
    calls: Vec<Call>,
    /// What was done under each key, in the order it was done first, and the answer to it.
    effects: Vec<(String, Value)>,
    attempts: HashMap<String, usize>,
}

type Script = dyn Fn(&Call) -> Reply + Send + Sync;

#[derive(Clone)]
struct Desk {
    books: Arc<Mutex<Books>>,
    script: Arc<Script>,
    is_held: watch::Receiver<bool>,
}

/// A payment provider that listens on a port of this machine and keeps books of what it is asked and
/// what it does. It stops when this is dropped.
pub struct Provider {
    url: String,
    books: Arc<Mutex<Books>>,
    is_held: watch::Sender<bool>,
    stop: CancellationToken,
}

impl Provider {
    /// Starts one that does with each request as `script` says, on a free port.
    pub async fn start(script: impl Fn(&Call) -> Reply + Send + Sync + 'static) -> Self {
        Self::start_at(0, script).await
    }

    /// Starts one on this port.
    pub async fn start_at(port: u16, script: impl Fn(&Call) -> Reply + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", port)).await.expect("the port is free");
        let url = format!("http://{}", listener.local_addr().expect("a listener has an address"));
        let (books, stop) = (Arc::default(), CancellationToken::new());
        let (is_held, hold) = watch::channel(false);
        let desk = Desk { books: Arc::clone(&books), script: Arc::new(script), is_held: hold };
        let router = Router::new().fallback(answer).with_state(desk);
        let serving = axum::serve(listener, router).with_graceful_shutdown(stop.clone().cancelled_owned());
        tokio::spawn(serving.into_future());
        Self { url, books, is_held, stop }
    }

    /// Where it listens.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// Lets every request wait, before anything is done for it, until they are released.
    pub fn hold(&self) {
        self.is_held.send_replace(true);
    }

    /// Undoes [`Self::hold`].
    pub fn release(&self) {
        self.is_held.send_replace(false);
    }

    /// Every request, in the order they came.
    pub fn calls(&self) -> Vec<Call> {
        lock(&self.books).calls.clone()
    }

    /// Every request under this key.
    pub fn calls_of(&self, key: &str) -> Vec<Call> {
        self.calls().into_iter().filter(|call| call.key == key).collect()
    }

    /// What was done, as it was answered: once for each key, however often it was asked.
    pub fn effects(&self) -> Vec<(String, Value)> {
        lock(&self.books).effects.clone()
    }
}

impl Drop for Provider {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

fn lock(books: &Mutex<Books>) -> MutexGuard<'_, Books> {
    books.lock().unwrap_or_else(PoisonError::into_inner)
}

async fn answer(State(desk): State<Desk>, uri: Uri, request: Request) -> Response {
    let resource = format!("{} {}", request.method(), uri);
    let headers = request.headers().clone();
    let Ok(body) = axum::body::to_bytes(request.into_body(), usize::MAX).await else {
        return StatusCode::BAD_REQUEST.into_response();
    };
    let key = headers.get("idempotency-key").and_then(|key| key.to_str().ok()).unwrap_or_default().to_owned();
    let call = desk.take_in(Call { resource, headers, body, key, attempt: 0 });
    // Its sender is the provider: if that is gone, nobody waits for an answer any more.
    let _ = desk.is_held.clone().wait_for(|is_held| !is_held).await;
    match (desk.script)(&call) {
        Reply::Status(status) => StatusCode::from_u16(status).expect("it is a status").into_response(),
        Reply::Declined(reason) => {
            Json(desk.act(&call, json!({"id": format!("no-{}", call.key), "status": "declined", "reason": reason})))
                .into_response()
        }
        Reply::Done => Json(desk.done(&call)).into_response(),
        Reply::DoneAndMore => {
            let mut answer = desk.done(&call);
            answer["fee"] = json!({"amount": 1.5e300, "of": [null]});
            Json(answer).into_response()
        }
        Reply::DoneAfter(time) => {
            let answer = desk.done(&call);
            tokio::time::sleep(time).await;
            Json(answer).into_response()
        }
        Reply::DoneInSilence => {
            desk.done(&call);
            std::future::pending().await
        }
        Reply::DoneWithHalfAnAnswer => {
            let whole = desk.done(&call).to_string();
            let half = Bytes::from(whole).slice(..10);
            let broken = futures::stream::iter([Ok(half), Err(std::io::Error::other("broken on purpose"))]);
            Body::from_stream(broken).into_response()
        }
        Reply::DoneAndSays(text) => {
            desk.done(&call);
            text.into_response()
        }
    }
}

impl Desk {
    /// Writes a request into the books.
    fn take_in(&self, mut call: Call) -> Call {
        let mut books = lock(&self.books);
        let attempt = books.attempts.entry(call.key.clone()).or_default();
        *attempt += 1;
        call.attempt = *attempt;
        books.calls.push(call.clone());
        call
    }

    /// Takes or returns the money.
    fn done(&self, call: &Call) -> Value {
        let (prefix, status) = if call.is_refund() { ("re", "refunded") } else { ("ch", "captured") };
        self.act(call, json!({"id": format!("{prefix}-{}", call.key), "status": status}))
    }

    /// Acts once for each key: a second time, the answer is the one there was.
    fn act(&self, call: &Call, effect: Value) -> Value {
        let mut books = lock(&self.books);
        if let Some((_, before)) = books.effects.iter().find(|(key, _)| *key == call.key) {
            return before.clone();
        }
        books.effects.push((call.key.clone(), effect.clone()));
        effect
    }
}
