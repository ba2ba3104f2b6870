//! The HTTP side: orders are placed, read, listed and cancelled.

use std::collections::{BTreeMap, HashMap};

use axum::extract::rejection::{PathRejection, QueryRejection};
use axum::extract::{Extension, FromRef, Path, Query, Request, State};
use axum::http::{HeaderName, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use iso_currency::Currency;
use outbox_core::http::{Problem, is_visible_ascii, json_body, run_to_end, single, with_context};
use outbox_core::{Context, Health, Nudge, append, crash_point};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use sqlx::PgPool;
use tokio_util::task::TaskTracker;
use uuid::Uuid;

use crate::order::{self, Cursor, Filter, Key, Money, NewOrder, Order, Status};

const IDEMPOTENCY_KEY: HeaderName = HeaderName::from_static("idempotency-key");
const IDEMPOTENCY_REPLAYED: HeaderName = HeaderName::from_static("idempotency-replayed");

/// 2^53 - 1: the largest integer that every JSON reader takes exactly.
const MAX_AMOUNT: i64 = (1 << 53) - 1;

const DEFAULT_LIMIT: i64 = 20;
const MAX_LIMIT: i64 = 100;

#[derive(Debug, Clone, FromRef)]
struct App {
    db: PgPool,
    relay: Nudge,
    writes: TaskTracker,
}

/// The service's routes. `relay` is woken after each commit; `writes` run to their end.
pub fn router(db: PgPool, relay: Nudge, writes: TaskTracker, health: Health) -> Router {
    let routes = Router::new()
        .route("/orders", post(place).get(list))
        .route("/orders/{id}", get(show))
        .route("/orders/{id}/cancel", post(cancel))
        .with_state(App { db, relay, writes });
    with_context(routes, health)
}

async fn place(
    State(App { db, relay, .. }): State<App>,
    writes: State<TaskTracker>,
    Extension(context): Extension<Context>,
    request: Request,
) -> Result<Response, Problem> {
    let key = idempotency_key(&request)?;
    let order = new_order(&json_body(request).await?)?;
    let (order, is_replayed) = run_to_end(&writes, async move {
        let placed = write_order(&db, &order, key.as_deref(), &context).await?;
        relay.nudge();
        Ok(placed)
    })
    .await?;
    let location = format!("/orders/{}", order.id());
    let mut response = (StatusCode::CREATED, [(header::LOCATION, location)], Json(order)).into_response();
    if is_replayed {
        response.headers_mut().insert(IDEMPOTENCY_REPLAYED, header::HeaderValue::from_static("true"));
    }
    Ok(response)
}

/// The pattern's first half: the order and its event, in one transaction. Returns the order, and
/// whether it is the one that the key stood for before.
async fn write_order(
    db: &PgPool,
    request: &NewOrder,
    key: Option<&str>,
    context: &Context,
) -> Result<(Order, bool), Problem> {
    let id = Uuid::now_v7();
    let mut tx = db.begin().await?;
    if let Some(key) = key {
        match order::take_key(&mut tx, key, request, id).await? {
            Key::New => {}
            Key::Used(id) => {
                tx.commit().await?;
                return Ok((find(db, id).await?, true));
            }
            Key::Taken => {
                let detail = "the Idempotency-Key was used for another request";
                return Err(Problem::new(StatusCode::UNPROCESSABLE_ENTITY, detail));
            }
        }
    }
    let order = order::insert(&mut tx, id, request).await?;
    crash_point!("order.after_insert");
    append(&mut tx, order.aggregate(), &order.created(), context).await?;
    crash_point!("order.after_append");
    tx.commit().await?;
    crash_point!("order.after_commit");
    Ok((order, false))
}

async fn show(State(db): State<PgPool>, id: Result<Path<Uuid>, PathRejection>) -> Result<Json<Order>, Problem> {
    Ok(Json(find(&db, known(id)?).await?))
}

async fn find(db: &PgPool, id: Uuid) -> Result<Order, Problem> {
    order::find(db, id).await?.ok_or_else(no_such_order)
}

/// An id that is not a UUID is as unknown as any other.
fn known(id: Result<Path<Uuid>, PathRejection>) -> Result<Uuid, Problem> {
    id.map(|Path(id)| id).map_err(|_| no_such_order())
}

fn no_such_order() -> Problem {
    Problem::not_found("there is no such order")
}

#[derive(Debug, Deserialize)]
struct ListQuery {
    customer_id: Option<Uuid>,
    status: Option<Status>,
    limit: Option<i64>,
    after: Option<Uuid>,
}

#[derive(Debug, Serialize)]
struct List {
    items: Vec<Order>,
    next: Option<Uuid>,
}

async fn list(
    State(db): State<PgPool>,
    query: Result<Query<ListQuery>, QueryRejection>,
) -> Result<Json<List>, Problem> {
    let Query(query) = query?;
    let limit = query.limit.unwrap_or(DEFAULT_LIMIT);
    if !(1..=MAX_LIMIT).contains(&limit) {
        return Err(Problem::bad_request(format!("limit must be from 1 to {MAX_LIMIT}")));
    }
    let from = match query.after {
        None => Cursor::START,
        Some(id) => {
            Cursor::after(&db, id).await?.ok_or_else(|| Problem::bad_request("after is not a cursor of this list"))?
        }
    };
    // One more than asked for tells whether there is a next page.
    let filter = Filter { customer_id: query.customer_id, status: query.status };
    let mut items = order::list(&db, &filter, from, limit + 1).await?;
    let has_more = items.len() as i64 > limit;
    items.truncate(limit as usize);
    let next = items.last().filter(|_| has_more).map(Order::id);
    Ok(Json(List { items, next }))
}

async fn cancel(
    State(App { db, relay, .. }): State<App>,
    writes: State<TaskTracker>,
    Extension(context): Extension<Context>,
    id: Result<Path<Uuid>, PathRejection>,
) -> Result<Json<Order>, Problem> {
    let id = known(id)?;
    let order = run_to_end(&writes, async move {
        let order = write_cancellation(&db, id, &context).await?;
        relay.nudge();
        Ok(order)
    });
    Ok(Json(order.await?))
}

async fn write_cancellation(db: &PgPool, id: Uuid, context: &Context) -> Result<Order, Problem> {
    let mut tx = db.begin().await?;
    let mut orders = order::lock(&mut tx, &[id]).await?;
    let [order] = &mut orders[..] else { return Err(no_such_order()) };
    let told = order.cancel().map_err(|refusal| Problem::new(StatusCode::CONFLICT, refusal.to_string()))?;
    if let Some(event) = told {
        order::save(&mut tx, std::slice::from_mut(order)).await?;
        append(&mut tx, order.aggregate(), &event, context).await?;
    }
    tx.commit().await?;
    Ok(order.clone())
}

fn idempotency_key(request: &Request) -> Result<Option<String>, Problem> {
    match single(request.headers(), &IDEMPOTENCY_KEY)? {
        Some(key) if !is_visible_ascii(key, 255) => {
            Err(Problem::bad_request("the Idempotency-Key must be 1 to 255 visible ASCII characters"))
        }
        key => Ok(key.map(str::to_owned)),
    }
}

/// Reads an order from well-formed JSON, and names everything that is wrong with it at once.
fn new_order(body: &RawValue) -> Result<NewOrder, Problem> {
    let body = fields(Some(body));
    let total = fields(body.get("total").copied());
    let mut errors = BTreeMap::new();
    let customer_id = uuid(body.get("customer_id")).map_err(|error| errors.insert("customer_id", error));
    let amount = amount(total.get("amount")).map_err(|error| errors.insert("total.amount", error));
    let currency = currency(total.get("currency")).map_err(|error| errors.insert("total.currency", error));
    match (customer_id, amount, currency) {
        (Ok(customer_id), Ok(amount), Ok(currency)) => Ok(NewOrder { customer_id, total: Money { amount, currency } }),
        _ => Err(Problem::invalid(errors)),
    }
}

/// A field as it was written, if it was.
type Field<'a, 'b> = Option<&'b &'a RawValue>;

/// The fields of an object; what is none has none.
fn fields(value: Option<&RawValue>) -> HashMap<String, &RawValue> {
    value.and_then(|value| serde_json::from_str(value.get()).ok()).unwrap_or_default()
}

fn read<T: DeserializeOwned>(field: Field<'_, '_>) -> Option<T> {
    serde_json::from_str(field?.get()).ok()
}

fn uuid(field: Field<'_, '_>) -> Result<Uuid, String> {
    let text = read::<String>(field).filter(|text| text.len() == 36);
    text.and_then(|text| text.parse().ok()).ok_or_else(|| missing_or(field, "must be a UUID"))
}

fn amount(field: Field<'_, '_>) -> Result<i64, String> {
    let in_range = |amount: &i64| (1..=MAX_AMOUNT).contains(amount);
    let problem = || missing_or(field, &format!("must be an integer from 1 to {MAX_AMOUNT}"));
    read(field).filter(in_range).ok_or_else(problem)
}

fn currency(field: Field<'_, '_>) -> Result<String, String> {
    let code = read(field).filter(|code: &String| Currency::from_code(code).is_some());
    code.ok_or_else(|| missing_or(field, "must be an ISO 4217 currency code"))
}

fn missing_or(field: Field<'_, '_>, problem: &str) -> String {
    if field.is_none_or(|field| field.get() == "null") { "is missing".to_owned() } else { problem.to_owned() }
}
