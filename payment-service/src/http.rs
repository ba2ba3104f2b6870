//! The HTTP side: payments are read. Nobody asks for one over HTTP; orders do, through events.

use axum::extract::rejection::{PathRejection, QueryRejection};
use axum::extract::{Path, Query, State};
use axum::routing::get;
use axum::{Json, Router};
use outbox_core::Health;
use outbox_core::http::{Problem, with_context};
use serde::Deserialize;
use sqlx::PgPool;
use uuid::Uuid;

use crate::payment::{self, Payment};

/// The service's routes.
pub fn router(db: PgPool, health: Health) -> Router {
    let routes = Router::new().route("/payments", get(find)).route("/payments/{id}", get(show)).with_state(db);
    with_context(routes, health)
}

async fn show(State(db): State<PgPool>, id: Result<Path<Uuid>, PathRejection>) -> Result<Json<Payment>, Problem> {
    // An id that is not a UUID is as unknown as any other.
    let Path(id) = id.map_err(|_| no_such_payment())?;
    payment::find(&db, id).await?.map(Json).ok_or_else(no_such_payment)
}

#[derive(Debug, Deserialize)]
struct FindQuery {
    order_id: Uuid,
}

async fn find(
    State(db): State<PgPool>,
    query: Result<Query<FindQuery>, QueryRejection>,
) -> Result<Json<Payment>, Problem> {
    let Query(query) = query?;
    payment::find_by_order(&db, query.order_id).await?.map(Json).ok_or_else(no_such_payment)
}

fn no_such_payment() -> Problem {
    Problem::not_found("there is no such payment")
}
