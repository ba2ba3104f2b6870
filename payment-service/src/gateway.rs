//! The payment gateway: the one effect of this project that no transaction can take back. It is asked
//! under an idempotency key, so that asking again is safe: the same key gets the same answer.

use std::time::Duration;

use reqwest::{StatusCode, Url};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

/// Money to be taken.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[allow(missing_docs)]
pub struct Charge {
    pub payment_id: Uuid,
    pub order_id: Uuid,
    pub amount: i64,
    pub currency: String,
}

/// Money to be returned.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[allow(missing_docs)]
pub struct Refund {
    pub payment_id: Uuid,
    pub order_id: Uuid,
    pub charge_id: String,
    pub amount: i64,
    pub currency: String,
}

/// The answer to a charge. A decline is an answer, not an error.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Charged {
    /// The money was taken, under the gateway's own id.
    Captured {
        /// The gateway's id of the charge.
        charge_id: String,
    },
    /// It was not.
    Declined {
        /// Why, in the gateway's words.
        reason: String,
    },
}

/// Why there is no answer.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum GatewayError {
    /// Asking again, under the same key, may bring one.
    #[error("the gateway gave no answer: {0}")]
    Transient(String),
    /// The gateway will never do this.
    #[error("the gateway rejected the request: {0}")]
    Rejected(String),
}

/// A gateway. `key` is the idempotency key.
pub trait Gateway: Send + Sync + 'static {
    /// Takes money.
    ///
    /// # Errors
    /// [`GatewayError`]; after a transient one it may have been taken all the same.
    fn charge(&self, key: Uuid, charge: &Charge) -> impl Future<Output = Result<Charged, GatewayError>> + Send;

    /// Returns money.
    ///
    /// # Errors
    /// [`GatewayError`]; after a transient one it may have been returned all the same.
    fn refund(&self, key: Uuid, refund: &Refund) -> impl Future<Output = Result<(), GatewayError>> + Send;
}

/// The built-in gateway: takes everything, except amounts whose last two digits are 13.
#[derive(Debug)]
pub struct Sandbox;

impl Gateway for Sandbox {
    async fn charge(&self, key: Uuid, charge: &Charge) -> Result<Charged, GatewayError> {
        if charge.amount % 100 == 13 {
            return Ok(Charged::Declined { reason: "insufficient_funds".to_owned() });
        }
        Ok(Charged::Captured { charge_id: format!("sandbox-{key}") })
    }

    async fn refund(&self, _key: Uuid, _refund: &Refund) -> Result<(), GatewayError> {
        Ok(())
    }
}

/// A gateway over HTTP.
#[derive(Debug)]
pub struct HttpGateway {
    client: reqwest::Client,
    charges: Url,
    refunds: Url,
}

/// The largest answer that is read, in bytes.
const ANSWER_LIMIT: usize = 64 * 1024;

#[derive(Debug, Deserialize)]
#[serde(tag = "status", rename_all = "snake_case")]
enum ChargeAnswer {
    Captured { id: String },
    Declined { reason: String },
}

#[derive(Debug, Deserialize)]
#[serde(tag = "status", rename_all = "snake_case")]
enum RefundAnswer {
    Refunded {},
}

impl HttpGateway {
    /// The gateway at `url`, whose answers are awaited for `timeout`.
    ///
    /// # Errors
    /// One line that names the setting where the URL cannot be used.
    pub fn new(url: &str, timeout: Duration) -> Result<Self, String> {
        let problem = |error: &dyn std::fmt::Display| format!("PAYMENT_GATEWAY_URL: {error}");
        let base = Url::parse(url).map_err(|error| problem(&error))?;
        if !matches!(base.scheme(), "http" | "https") {
            return Err(problem(&"must begin with http:// or https://"));
        }
        let under = |path: &str| {
            let mut url = base.clone();
            let path = format!("{}/{path}", base.path().trim_end_matches('/'));
            url.set_path(&path);
            url
        };
        // The same one that the database's and the broker's TLS use; a second call changes nothing.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let client = reqwest::Client::builder().timeout(timeout).redirect(reqwest::redirect::Policy::none()).build();
        let client = client.map_err(|error| problem(&error))?;
        Ok(Self { client, charges: under("charges"), refunds: under("refunds") })
    }

    async fn ask<A: for<'a> Deserialize<'a>>(
        &self,
        url: &Url,
        key: Uuid,
        body: &impl Serialize,
    ) -> Result<A, GatewayError> {
        let request = self.client.post(url.clone()).header("Idempotency-Key", key.to_string()).json(body);
        let mut response = request.send().await.map_err(|error| no_answer(&error))?;
        let status = response.status();
        if status.is_client_error() && status != StatusCode::TOO_MANY_REQUESTS {
            return Err(GatewayError::Rejected(status.to_string()));
        }
        if !status.is_success() {
            return Err(GatewayError::Transient(status.to_string()));
        }
        let mut answer = Vec::new();
        while let Some(chunk) = response.chunk().await.map_err(|error| no_answer(&error))? {
            answer.extend_from_slice(&chunk);
            if answer.len() > ANSWER_LIMIT {
                return Err(GatewayError::Transient("the answer is too large".to_owned()));
            }
        }
        // Money may have moved: an answer that is not understood is not an answer.
        serde_json::from_slice(&answer).map_err(|error| GatewayError::Transient(format!("not understood: {error}")))
    }
}

impl Gateway for HttpGateway {
    async fn charge(&self, key: Uuid, charge: &Charge) -> Result<Charged, GatewayError> {
        let answer = self.ask(&self.charges, key, charge).await?;
        let (charged, text) = match answer {
            ChargeAnswer::Captured { id } => (Charged::Captured { charge_id: id.clone() }, id),
            ChargeAnswer::Declined { reason } => (Charged::Declined { reason: reason.clone() }, reason),
        };
        if text.contains('\0') {
            return Err(GatewayError::Transient("not understood: a NUL in the answer".to_owned()));
        }
        Ok(charged)
    }

    async fn refund(&self, key: Uuid, refund: &Refund) -> Result<(), GatewayError> {
        let RefundAnswer::Refunded {} = self.ask(&self.refunds, key, refund).await?;
        Ok(())
    }
}

/// Without the URL, which may hold a secret.
fn no_answer(error: &reqwest::Error) -> GatewayError {
    let kind = match error {
        error if error.is_timeout() => "timeout",
        error if error.is_connect() => "no connection",
        _ => "the connection broke",
    };
    GatewayError::Transient(kind.to_owned())
}
