//! The payment: its states, and all SQL on `payments`.

use outbox_core::{AggregateVersion, AppendError, Context, NewEvent};
use serde::{Deserialize, Serialize};
use sqlx::{PgConnection, PgPool};
use time::OffsetDateTime;
use uuid::Uuid;

use crate::events::{PaymentCaptured, PaymentDeclined, PaymentRefunded};
use crate::gateway::{Charged, Refund};

/// An amount in integer minor units of a currency.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs)]
pub struct Money {
    pub amount: i64,
    pub currency: String,
}

/// `captured` | `declined`; `captured` → `refunded`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, sqlx::Type)]
#[serde(rename_all = "snake_case")]
#[sqlx(type_name = "text", rename_all = "snake_case")]
#[allow(missing_docs)]
pub enum Status {
    Captured,
    Declined,
    Refunded,
}

/// A payment as it is stored and shown.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Payment {
    id: Uuid,
    order_id: Uuid,
    status: Status,
    amount: Money,
    /// The gateway's own id of the charge: between it and us.
    #[serde(skip)]
    charge_id: Option<String>,
    reason: Option<String>,
    version: i64,
    #[serde(with = "time::serde::rfc3339")]
    created_at: OffsetDateTime,
    #[serde(with = "time::serde::rfc3339")]
    updated_at: OffsetDateTime,
}

/// A payment that the gateway has answered and that is not stored yet.
#[derive(Debug, Clone)]
pub(crate) struct NewPayment {
    /// The event_id of the `OrderCreated` that asked for it.
    pub(crate) id: Uuid,
    pub(crate) order_id: Uuid,
    pub(crate) amount: Money,
    pub(crate) charged: Charged,
}

impl NewPayment {
    /// The event that tells of it.
    pub(crate) fn told(&self, context: &Context) -> Result<NewEvent, AppendError> {
        let aggregate = AggregateVersion { id: self.id, sequence: 1 };
        let (payment_id, order_id, amount) = (self.id, self.order_id, self.amount.clone());
        match &self.charged {
            Charged::Captured { .. } => {
                NewEvent::new(aggregate, &PaymentCaptured { payment_id, order_id, amount }, context)
            }
            Charged::Declined { reason } => {
                let reason = reason.clone();
                NewEvent::new(aggregate, &PaymentDeclined { payment_id, order_id, amount, reason }, context)
            }
        }
    }
}

impl Payment {
    /// The number of the event that tells of the payment's last change.
    pub fn aggregate(&self) -> AggregateVersion {
        AggregateVersion { id: self.id, sequence: self.version }
    }

    /// What to ask of the gateway to return its money; nothing where none is held.
    pub fn refund_request(&self) -> Option<Refund> {
        let charge_id = self.charge_id.clone().filter(|_| self.status == Status::Captured)?;
        let Money { amount, currency } = self.amount.clone();
        Some(Refund { payment_id: self.id, order_id: self.order_id, charge_id, amount, currency })
    }

    /// Its money was returned. Nothing changes unless it was held.
    pub fn refund(&mut self) -> Option<PaymentRefunded> {
        (self.status == Status::Captured).then(|| {
            self.status = Status::Refunded;
            self.version += 1;
            PaymentRefunded { payment_id: self.id, order_id: self.order_id, amount: self.amount.clone() }
        })
    }
}

/// A row of `payments`, flat as SQL has it.
struct Row {
    id: Uuid,
    order_id: Uuid,
    status: Status,
    amount: i64,
    currency: String,
    charge_id: Option<String>,
    reason: Option<String>,
    version: i64,
    created_at: OffsetDateTime,
    updated_at: OffsetDateTime,
}

impl From<Row> for Payment {
    fn from(row: Row) -> Self {
        Self {
            id: row.id,
            order_id: row.order_id,
            status: row.status,
            amount: Money { amount: row.amount, currency: row.currency },
            charge_id: row.charge_id,
            reason: row.reason,
            version: row.version,
            created_at: row.created_at,
            updated_at: row.updated_at,
        }
    }
}

/// Stores new payments. Refuses a second one for an order: `payments_one_per_order`.
pub(crate) async fn insert_all(tx: &mut PgConnection, payments: &[NewPayment]) -> Result<(), sqlx::Error> {
    let status = |payment: &NewPayment| match payment.charged {
        Charged::Captured { .. } => Status::Captured,
        Charged::Declined { .. } => Status::Declined,
    };
    let charge_id = |payment: &NewPayment| match &payment.charged {
        Charged::Captured { charge_id } => Some(charge_id.clone()),
        Charged::Declined { .. } => None,
    };
    let reason = |payment: &NewPayment| match &payment.charged {
        Charged::Captured { .. } => None,
        Charged::Declined { reason } => Some(reason.clone()),
    };
    let ids: Vec<Uuid> = payments.iter().map(|payment| payment.id).collect();
    let order_ids: Vec<Uuid> = payments.iter().map(|payment| payment.order_id).collect();
    let statuses: Vec<Status> = payments.iter().map(status).collect();
    let amounts: Vec<i64> = payments.iter().map(|payment| payment.amount.amount).collect();
    let currencies: Vec<String> = payments.iter().map(|payment| payment.amount.currency.clone()).collect();
    let charge_ids: Vec<Option<String>> = payments.iter().map(charge_id).collect();
    let reasons: Vec<Option<String>> = payments.iter().map(reason).collect();
    let inserting = sqlx::query!(
        r#"
        INSERT INTO payments (id, order_id, status, amount, currency, charge_id, reason, version)
        SELECT id, order_id, status, amount, currency, charge_id, reason, 1
        FROM unnest($1::uuid[], $2::uuid[], $3::text[], $4::bigint[], $5::text[], $6::text[], $7::text[])
             AS new (id, order_id, status, amount, currency, charge_id, reason)
        "#,
        &ids,
        &order_ids,
        &statuses as &[Status],
        &amounts,
        &currencies,
        &charge_ids as &[Option<String>],
        &reasons as &[Option<String>],
    );
    inserting.execute(tx).await?;
    Ok(())
}

/// The payment, if there is one.
pub(crate) async fn find(db: &PgPool, id: Uuid) -> Result<Option<Payment>, sqlx::Error> {
    let row = sqlx::query_as!(
        Row,
        r#"
        SELECT id, order_id, status AS "status: Status", amount, currency, charge_id, reason, version,
               created_at, updated_at
        FROM payments
        WHERE id = $1
        "#,
        id,
    );
    Ok(row.fetch_optional(db).await?.map(Payment::from))
}

/// The payment of an order, if there is one.
pub(crate) async fn find_by_order(db: &PgPool, order_id: Uuid) -> Result<Option<Payment>, sqlx::Error> {
    let row = sqlx::query_as!(
        Row,
        r#"
        SELECT id, order_id, status AS "status: Status", amount, currency, charge_id, reason, version,
               created_at, updated_at
        FROM payments
        WHERE order_id = $1
        "#,
        order_id,
    );
    Ok(row.fetch_optional(db).await?.map(Payment::from))
}

/// Locks the payments of these orders, in the order of their ids.
pub(crate) async fn lock_by_orders(tx: &mut PgConnection, order_ids: &[Uuid]) -> Result<Vec<Payment>, sqlx::Error> {
    if order_ids.is_empty() {
        return Ok(Vec::new());
    }
    let rows = sqlx::query_as!(
        Row,
        r#"
        SELECT id, order_id, status AS "status: Status", amount, currency, charge_id, reason, version,
               created_at, updated_at
        FROM payments
        WHERE order_id = ANY ($1)
        ORDER BY id
        FOR UPDATE
        "#,
        order_ids,
    );
    Ok(rows.fetch_all(tx).await?.into_iter().map(Payment::from).collect())
}

/// Stores the state of locked payments.
pub(crate) async fn save(tx: &mut PgConnection, payments: &[Payment]) -> Result<(), sqlx::Error> {
    if payments.is_empty() {
        return Ok(());
    }
    let ids: Vec<Uuid> = payments.iter().map(|payment| payment.id).collect();
    let statuses: Vec<Status> = payments.iter().map(|payment| payment.status).collect();
    let versions: Vec<i64> = payments.iter().map(|payment| payment.version).collect();
    let saving = sqlx::query!(
        r#"
        UPDATE payments
        SET status = new.status, version = new.version, updated_at = now()
        FROM unnest($1::uuid[], $2::text[], $3::bigint[]) AS new (id, status, version)
        WHERE payments.id = new.id
        "#,
        &ids,
        &statuses as &[Status],
        &versions,
    );
    saving.execute(tx).await?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn payment(status: Status) -> Payment {
        let now = OffsetDateTime::UNIX_EPOCH;
        Payment {
            id: Uuid::now_v7(),
            order_id: Uuid::now_v7(),
            status,
            amount: Money { amount: 1, currency: "EUR".into() },
            charge_id: Some("charge".into()),
            reason: None,
            version: 1,
            created_at: now,
            updated_at: now,
        }
    }

    #[test]
    fn only_captured_money_is_returned_and_only_once() {
        let mut captured = payment(Status::Captured);
        assert!(captured.refund_request().is_some());
        assert!(captured.refund().is_some());
        assert_eq!((captured.status, captured.version), (Status::Refunded, 2));
        for mut other in [captured, payment(Status::Declined)] {
            let version = other.version;
            assert_eq!(other.refund_request(), None);
            assert!(other.refund().is_none());
            assert_eq!(other.version, version);
        }
    }
}
