//! What the HTTP sides of services have in common: problems, the correlation id, request bodies.

use std::collections::BTreeMap;
use std::error::Error;
use std::time::{Duration, Instant};

use axum::extract::MatchedPath;
use axum::extract::rejection::QueryRejection;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};
use axum::middleware::{Next, from_fn, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::{Json, Router};
use serde_json::json;
use serde_json::value::RawValue;
use tokio::time::timeout;
use tokio_util::task::TaskTracker;
use tracing::Instrument;
use tracing::field::Empty;
use uuid::Uuid;

use crate::database::{in_time, is_away};
use crate::event::Context;
use crate::jetstream::describe;
use crate::measure;
use crate::process::Health;
use crate::telemetry::TRACE;
use crate::trace;

/// The largest request body, in bytes.
pub const BODY_LIMIT: usize = 64 * 1024;

/// How long a client may take to send its body.
const BODY_TIMEOUT: Duration = Duration::from_secs(10);

/// How long any request may take: its body, and what it asks of the database.
const ANSWERED_WITHIN: Duration = Duration::from_secs(50);

const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// An error as the client sees it: RFC 9457 problem details. Never an internal text.
#[derive(Debug)]
pub struct Problem {
    status: StatusCode,
    detail: String,
    errors: BTreeMap<&'static str, String>,
    /// For the log only.
    cause: Option<String>,
}

impl Problem {
    /// A problem that `detail` explains to the client.
    pub fn new(status: StatusCode, detail: impl Into<String>) -> Self {
        Self { status, detail: detail.into(), errors: BTreeMap::new(), cause: None }
    }

    /// 400: the request is malformed.
    pub fn bad_request(detail: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, detail)
    }

    /// 404: there is no such thing.
    pub fn not_found(detail: impl Into<String>) -> Self {
        Self::new(StatusCode::NOT_FOUND, detail)
    }

    /// 422: what is wrong with each field.
    pub fn invalid(errors: BTreeMap<&'static str, String>) -> Self {
        let detail = "one or more fields are not valid".to_owned();
        Self { status: StatusCode::UNPROCESSABLE_ENTITY, detail, errors, cause: None }
    }

    /// 500, or 503 where the database is away.
    pub fn internal(cause: &(dyn Error + 'static)) -> Self {
        let (status, detail) = if is_away(cause) {
            (StatusCode::SERVICE_UNAVAILABLE, "the service cannot reach its database; try again soon")
        } else {
            (StatusCode::INTERNAL_SERVER_ERROR, "the service failed; the failure has been recorded")
        };
        Self { status, detail: detail.to_owned(), errors: BTreeMap::new(), cause: Some(describe(cause)) }
    }
}

impl From<sqlx::Error> for Problem {
    fn from(error: sqlx::Error) -> Self {
        Self::internal(&error)
    }
}

impl From<crate::AppendError> for Problem {
    fn from(error: crate::AppendError) -> Self {
        Self::internal(&error)
    }
}

impl From<QueryRejection> for Problem {
    fn from(rejection: QueryRejection) -> Self {
        // What comes first is how the query was read; what is wrong with it follows.
        let text = rejection.body_text();
        let (_, reason) = text.split_once(": ").unwrap_or_default();
        Self::bad_request(format!("the query is not valid: {reason}"))
    }
}

/// For the middleware that logs: why a response is an error.
#[derive(Debug, Clone)]
struct Cause(String);

impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        let mut body = json!({
            // RFC 9457, 4.2.1: the problem means no more than its status.
            "type": "about:blank",
            "title": self.status.canonical_reason().unwrap_or("Error"),
            "status": self.status.as_u16(),
            "detail": self.detail,
        });
        if !self.errors.is_empty() {
            body["errors"] = json!(self.errors);
        }
        let mut response = (self.status, Json(body)).into_response();
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/problem+json"));
        if self.status == StatusCode::SERVICE_UNAVAILABLE {
            headers.insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
        }
        if let Some(cause) = self.cause {
            response.extensions_mut().insert(Cause(cause));
        }
        response
    }
}

/// Adds to a service's routes what all of them have: problems for unknown paths and methods, the
/// correlation id of each request as a [`Context`] extension, and one log line for each failure. Until
/// the process has started, its database above all, the answer is 503.
pub fn with_context(routes: Router, health: Health) -> Router {
    routes
        .fallback(|| async { Problem::not_found("there is no such resource") })
        .method_not_allowed_fallback(|| async {
            Problem::new(StatusCode::METHOD_NOT_ALLOWED, "the resource does not support this method")
        })
        .layer(from_fn_with_state(health, refuse_until_started))
        .layer(from_fn(correlate))
}

async fn refuse_until_started(State(health): State<Health>, request: Request, next: Next) -> Response {
    if health.is_starting() {
        let detail = "the service is still starting; try again soon";
        return Problem::new(StatusCode::SERVICE_UNAVAILABLE, detail).into_response();
    }
    next.run(request).await
}

async fn correlate(mut request: Request, next: Next) -> Response {
    let mut context = context_of(request.headers());
    let id = context.correlation_id.clone();
    let (method, path) = (request.method().clone(), request.uri().path().to_owned());
    let route = request.extensions().get::<MatchedPath>().map_or("", MatchedPath::as_str).to_owned();
    let span = tracing::trace_span!(
        target: TRACE, "request", otel.name = format!("{method} {route}"), otel.kind = "server",
        http.request.method = %method, http.route = route.clone(), http.response.status_code = Empty, correlation_id = id,
    );
    let span = trace::caused_by(span, context.traceparent.as_deref());
    context.traceparent = trace::traceparent(&span).or(context.traceparent);
    request.extensions_mut().insert(context);
    let started = Instant::now();
    let answering = next.run(request).instrument(span.clone());
    let mut response = timeout(ANSWERED_WITHIN, answering).await.unwrap_or_else(|_elapsed| {
        Problem::new(StatusCode::SERVICE_UNAVAILABLE, "the service got no answer itself; try again soon")
            .into_response()
    });
    let labels = [("method", method.to_string()), ("route", route), ("status", response.status().as_u16().to_string())];
    metrics::histogram!(measure::HTTP_SECONDS, &labels).record(started.elapsed());
    span.record("http.response.status_code", response.status().as_u16());
    if let Some(Cause(cause)) = response.extensions().get::<Cause>() {
        if response.status() == StatusCode::SERVICE_UNAVAILABLE {
            // Once per request would be a flood: that the database is away is said elsewhere.
            tracing::debug!(correlation_id = id, %method, path, cause, "the request was turned away");
        } else {
            tracing::error!(correlation_id = id, %method, path, cause, "the request failed");
        }
    }
    if let Ok(id) = HeaderValue::from_str(&id) {
        response.headers_mut().insert(REQUEST_ID, id);
    }
    response
}

fn context_of(headers: &HeaderMap) -> Context {
    let correlation_id = match single(headers, &REQUEST_ID) {
        Ok(Some(id)) if is_visible_ascii(id, 128) => id.to_owned(),
        _ => Uuid::now_v7().to_string(),
    };
    let traceparent = single(headers, &HeaderName::from_static("traceparent")).ok().flatten();
    Context { correlation_id, traceparent: traceparent.filter(|value| is_traceparent(value)).map(str::to_owned) }
}

/// The one value of a header that must not be repeated.
///
/// # Errors
/// 400 where it is, or where its value is not ASCII.
pub fn single<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Result<Option<&'a str>, Problem> {
    let mut values = headers.get_all(name).iter();
    let first = values.next();
    if values.next().is_some() {
        return Err(Problem::bad_request(format!("the header {name} is repeated")));
    }
    let malformed = |_| Problem::bad_request(format!("the header {name} is malformed"));
    first.map(HeaderValue::to_str).transpose().map_err(malformed)
}

/// 1 to `longest` visible ASCII characters?
pub fn is_visible_ascii(text: &str, longest: usize) -> bool {
    (1..=longest).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_graphic())
}

/// <https://www.w3.org/TR/trace-context/#traceparent-header>, version 00.
fn is_traceparent(value: &str) -> bool {
    let parts: Vec<&str> = value.split('-').collect();
    let is_hex = |part: &str, length| {
        part.len() == length && part.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b))
    };
    let is_zero = |part: &str| part.bytes().all(|byte| byte == b'0');
    matches!(parts[..], ["00", trace, span, flags]
        if is_hex(trace, 32) && !is_zero(trace) && is_hex(span, 16) && !is_zero(span) && is_hex(flags, 2))
}

/// Reads a JSON body, whatever its shape and its values, which are still as they were written: a
/// number beyond all bounds is JSON too.
///
/// # Errors
/// 415 for another content type, 413 for more than [`BODY_LIMIT`] bytes, 400 for what is not JSON,
/// 408 for a client that does not finish.
pub async fn json_body(request: Request) -> Result<Box<RawValue>, Problem> {
    let content_type = single(request.headers(), &header::CONTENT_TYPE)?.unwrap_or_default();
    let essence = content_type.split(';').next().unwrap_or_default().trim();
    if !essence.eq_ignore_ascii_case("application/json") {
        return Err(Problem::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "the body must be application/json"));
    }
    let too_large = || Problem::new(StatusCode::PAYLOAD_TOO_LARGE, "the body is larger than 64 KiB");
    let reading = axum::body::to_bytes(request.into_body(), BODY_LIMIT);
    let body = match tokio::time::timeout(BODY_TIMEOUT, reading).await {
        Ok(Ok(body)) => body,
        Ok(Err(error)) if is_length_limit(&error) => return Err(too_large()),
        Ok(Err(_)) => return Err(Problem::bad_request("the body did not arrive whole")),
        Err(_elapsed) => return Err(Problem::new(StatusCode::REQUEST_TIMEOUT, "the body did not arrive in time")),
    };
    serde_json::from_slice(&body).map_err(|error| {
        let place = format!("line {}, column {}", error.line(), error.column());
        Problem::bad_request(format!("the body is not valid JSON at {place}"))
    })
}

fn is_length_limit(error: &(dyn Error + 'static)) -> bool {
    error.is::<http_body_util::LengthLimitError>() || error.source().is_some_and(is_length_limit)
}

/// Runs a write to its end even if the client hangs up, and the process's shutdown waits for it.
///
/// # Errors
/// What the write returns; 500 if it panicked.
pub async fn run_to_end<T, F>(State(writes): &State<TaskTracker>, write: F) -> Result<T, Problem>
where
    F: Future<Output = Result<T, Problem>> + Send + 'static,
    T: Send + 'static,
{
    writes.spawn(in_time(write)).await.unwrap_or_else(|error| Err(Problem::internal(&error)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_traceparent_is_taken_only_if_it_is_one() {
        assert!(is_traceparent("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"));
        for wrong in [
            "",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7",
            "00-00000000000000000000000000000000-00f067aa0ba902b7-01",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-0000000000000000-01",
            "00-4BF92F3577B34DA6A3CE929D0E0E4736-00f067aa0ba902b7-01",
            "ff-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-more",
        ] {
            assert!(!is_traceparent(wrong), "{wrong}");
        }
    }
}
