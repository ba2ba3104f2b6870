//! The clients of a nemesis run: they place and cancel orders, and ask again, under the same key and
//! wherever they like, until they are answered.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use reqwest::{Client, RequestBuilder, StatusCode};
use serde_json::{Value, json};
use tokio::time::{Instant, sleep, sleep_until};
use uuid::Uuid;

use crate::api::http_client;
use crate::schedule::OrderPlan;

/// A client hangs up after this time and asks again.
const PATIENCE: Duration = Duration::from_secs(3);
const PAUSE: Duration = Duration::from_millis(100);

/// An order that was answered with 201.
#[derive(Debug, Clone)]
pub(crate) struct Placed {
    pub(crate) id: Uuid,
    pub(crate) amount: i64,
    /// Its cancellation was answered with 200.
    pub(crate) is_cancelled: bool,
}

/// Clients of some instances of order-service.
pub(crate) struct Clients {
    http: Client,
    /// The `/orders` of each instance.
    instances: Vec<String>,
    answers: Mutex<BTreeMap<String, usize>>,
}

impl Clients {
    pub(crate) fn new(instances: Vec<String>) -> Self {
        Self { http: http_client(), instances, answers: Mutex::default() }
    }

    /// How many requests were answered with each status, or with nothing.
    pub(crate) fn answers(&self) -> BTreeMap<String, usize> {
        self.answers.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Does as planned; returns what must not be where it is answered with something else than the
    /// contract says.
    pub(crate) async fn follow(&self, plan: &OrderPlan, begun: Instant) -> Result<Placed, String> {
        sleep_until(begun + plan.at).await;
        let id = if plan.is_asked_twice {
            let (one, other) = tokio::join!(self.place(plan, plan.instance), self.place(plan, plan.instance + 1));
            let (one, other) = (one?, other?);
            if one != other {
                return Err(format!("key {} stands for two orders, {one} and {other}", plan.key));
            }
            one
        } else {
            self.place(plan, plan.instance).await?
        };
        let mut placed = Placed { id, amount: plan.amount, is_cancelled: false };
        if let Some(after) = plan.cancelled_after {
            sleep(after).await;
            placed.is_cancelled = self.cancel(id, plan.instance).await?;
        }
        Ok(placed)
    }

    async fn place(&self, plan: &OrderPlan, first: usize) -> Result<Uuid, String> {
        let body = json!({"customer_id": plan.customer, "total": {"amount": plan.amount, "currency": "EUR"}});
        let place = |orders: &str| self.http.post(orders).header("Idempotency-Key", plan.key.to_string()).json(&body);
        let (status, order) = self.until_answered(first, place).await;
        let is_as_asked = order["total"] == body["total"] && order["customer_id"] == body["customer_id"];
        match order["id"].as_str().and_then(|id| id.parse().ok()) {
            Some(id) if status == StatusCode::CREATED && is_as_asked => Ok(id),
            _ => Err(format!("placing {body} was answered with {status}: {order}")),
        }
    }

    /// Returns whether it could be cancelled: a declined order cannot.
    async fn cancel(&self, id: Uuid, first: usize) -> Result<bool, String> {
        let cancel = |orders: &str| self.http.post(format!("{orders}/{id}/cancel"));
        let (status, answer) = self.until_answered(first, cancel).await;
        match (status, answer["status"].as_str()) {
            (StatusCode::OK, Some("cancelled" | "refunded")) => Ok(true),
            (StatusCode::CONFLICT, _) => Ok(false),
            _ => Err(format!("cancelling order {id} was answered with {status}: {answer}")),
        }
    }

    /// Asks one instance after the other. No answer, or one that says that it is the service's fault,
    /// leaves open what has happened.
    async fn until_answered(&self, first: usize, request: impl Fn(&str) -> RequestBuilder) -> (StatusCode, Value) {
        for instance in self.instances.iter().cycle().skip(first) {
            let answer = read(request(instance)).await;
            self.count(&answer);
            match answer {
                Ok((status, body)) if !status.is_server_error() => return (status, body),
                _ => sleep(PAUSE).await,
            }
        }
        unreachable!("the instances are asked again and again")
    }

    fn count(&self, answer: &reqwest::Result<(StatusCode, Value)>) {
        let name = answer.as_ref().map_or("none".to_owned(), |(status, _)| status.as_str().to_owned());
        *self.answers.lock().unwrap_or_else(PoisonError::into_inner).entry(name).or_default() += 1;
    }
}

async fn read(request: RequestBuilder) -> reqwest::Result<(StatusCode, Value)> {
    let answer = request.timeout(PATIENCE).send().await?;
    Ok((answer.status(), answer.json().await?))
}
