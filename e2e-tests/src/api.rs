//! What the two services say over HTTP.

use std::time::Duration;

use anyhow::ensure;
use reqwest::{Client, RequestBuilder, Response, StatusCode};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::json;
use uuid::Uuid;

use crate::service::Service;

/// An amount in minor units of its currency.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[expect(missing_docs, reason = "the fields are those of the HTTP contract")]
pub struct Money {
    pub amount: i64,
    pub currency: String,
}

/// An order as order-service shows it.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[expect(missing_docs, reason = "the fields are those of the HTTP contract")]
pub struct Order {
    pub id: Uuid,
    pub customer_id: Uuid,
    pub status: String,
    pub total: Money,
    pub version: i64,
    pub created_at: String,
    pub updated_at: String,
}

/// A payment as payment-service shows it.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[expect(missing_docs, reason = "the fields are those of the HTTP contract")]
pub struct Payment {
    pub id: Uuid,
    pub order_id: Uuid,
    pub status: String,
    pub amount: Money,
    pub reason: Option<String>,
    pub version: i64,
    pub created_at: String,
    pub updated_at: String,
}

/// A client of one order-service and one payment-service.
#[derive(Clone)]
pub struct Api {
    http: Client,
    orders: String,
    payments: String,
}

impl Api {
    /// A client of these two.
    pub fn new(orders: &Service, payments: &Service) -> Self {
        Self { http: http_client(), orders: orders.url("/orders"), payments: payments.url("/payments") }
    }

    /// Places an order.
    pub async fn place(&self, customer: Uuid, amount: i64, currency: &str) -> anyhow::Result<Order> {
        let body = json!({"customer_id": customer, "total": {"amount": amount, "currency": currency}});
        read(self.http.post(&self.orders).json(&body)).await
    }

    /// Reads an order.
    pub async fn order(&self, id: Uuid) -> anyhow::Result<Order> {
        read(self.http.get(format!("{}/{id}", self.orders))).await
    }

    /// Cancels an order.
    pub async fn cancel(&self, id: Uuid) -> anyhow::Result<Order> {
        read(self.http.post(format!("{}/{id}/cancel", self.orders))).await
    }

    /// Reads an order's payment, if there is one.
    pub async fn payment_of(&self, order: Uuid) -> anyhow::Result<Option<Payment>> {
        let response = self.http.get(format!("{}?order_id={order}", self.payments)).send().await?;
        match response.status() {
            StatusCode::NOT_FOUND => Ok(None),
            _ => Ok(Some(parse(response).await?)),
        }
    }
}

async fn read<T: DeserializeOwned>(request: RequestBuilder) -> anyhow::Result<T> {
    parse(request.send().await?).await
}

async fn parse<T: DeserializeOwned>(response: Response) -> anyhow::Result<T> {
    let (status, url) = (response.status(), response.url().clone());
    let body = response.text().await?;
    ensure!(status.is_success(), "{url} answers {status}: {body}");
    Ok(serde_json::from_str(&body)?)
}

/// An HTTP client; not shared, because its connections belong to the runtime that opened them.
pub fn http_client() -> Client {
    // Its TLS needs a provider of cryptography. Somebody else may have installed one already.
    let _ = async_nats::rustls::crypto::ring::default_provider().install_default();
    Client::builder().timeout(Duration::from_secs(30)).build().expect("an HTTP client needs nothing from outside")
}
