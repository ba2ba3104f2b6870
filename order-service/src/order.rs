//! The order: its states, and all SQL on `orders` and `idempotency_keys`.

use outbox_core::AggregateVersion;
use serde::{Deserialize, Serialize};
use sqlx::{PgConnection, PgPool};
use time::OffsetDateTime;
use uuid::Uuid;

use crate::events::{OrderCancelled, OrderCreated, OrderDeclined, OrderPaid, OrderRefunded};

/// An amount in integer minor units of a currency.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs)]
pub struct Money {
    pub amount: i64,
    pub currency: String,
}

/// `pending` → `paid` | `declined`; `pending` or `paid` → `cancelled` → `refunded`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, sqlx::Type)]
#[serde(rename_all = "snake_case")]
#[sqlx(type_name = "text", rename_all = "snake_case")]
#[allow(missing_docs)]
pub enum Status {
    Pending,
    Paid,
    Declined,
    Cancelled,
    Refunded,
}

/// What a client asks for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs)]
pub struct NewOrder {
    pub customer_id: Uuid,
    pub total: Money,
}

/// An order as it is stored and shown. Its state changes through the methods only, each of which
/// returns the event to append, or nothing where nothing changes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Order {
    id: Uuid,
    customer_id: Uuid,
    status: Status,
    total: Money,
    version: i64,
    #[serde(with = "time::serde::rfc3339")]
    created_at: OffsetDateTime,
    #[serde(with = "time::serde::rfc3339")]
    updated_at: OffsetDateTime,
}

/// A declined order cannot be cancelled: it has already ended.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("a declined order cannot be cancelled")]
pub struct CannotCancel;

impl Order {
    /// The order's id.
    pub fn id(&self) -> Uuid {
        self.id
    }

    /// The number of the event that tells of the order's last change.
    pub fn aggregate(&self) -> AggregateVersion {
        AggregateVersion { id: self.id, sequence: self.version }
    }

    /// The event of a new order.
    pub fn created(&self) -> OrderCreated {
        OrderCreated { order_id: self.id, customer_id: self.customer_id, total: self.total.clone() }
    }

    /// Its payment was captured. Nothing changes unless it still waits for that: a cancelled order
    /// stays cancelled, and payment-service returns the money.
    pub fn pay(&mut self, payment_id: Uuid) -> Option<OrderPaid> {
        (self.status == Status::Pending).then(|| {
            self.become_(Status::Paid);
            OrderPaid { order_id: self.id, payment_id }
        })
    }

    /// Its payment was declined. Nothing changes unless it still waits for that.
    pub fn decline(&mut self, payment_id: Uuid, reason: String) -> Option<OrderDeclined> {
        (self.status == Status::Pending).then(|| {
            self.become_(Status::Declined);
            OrderDeclined { order_id: self.id, payment_id, reason }
        })
    }

    /// The client takes it back. Nothing changes if it did before.
    ///
    /// # Errors
    /// [`CannotCancel`].
    pub fn cancel(&mut self) -> Result<Option<OrderCancelled>, CannotCancel> {
        match self.status {
            Status::Pending | Status::Paid => {
                self.become_(Status::Cancelled);
                Ok(Some(OrderCancelled { order_id: self.id }))
            }
            Status::Cancelled | Status::Refunded => Ok(None),
            Status::Declined => Err(CannotCancel),
        }
    }

    /// Its money was returned. Nothing changes unless it was cancelled.
    pub fn refund(&mut self, payment_id: Uuid) -> Option<OrderRefunded> {
        (self.status == Status::Cancelled).then(|| {
            self.become_(Status::Refunded);
            OrderRefunded { order_id: self.id, payment_id }
        })
    }

    fn become_(&mut self, status: Status) {
        self.status = status;
        self.version += 1;
    }
}

/// A row of `orders`, flat as SQL has it.
struct Row {
    id: Uuid,
    customer_id: Uuid,
    status: Status,
    amount: i64,
    currency: String,
    version: i64,
    created_at: OffsetDateTime,
    updated_at: OffsetDateTime,
}

impl From<Row> for Order {
    fn from(row: Row) -> Self {
        Self {
            id: row.id,
            customer_id: row.customer_id,
            status: row.status,
            total: Money { amount: row.amount, currency: row.currency },
            version: row.version,
            created_at: row.created_at,
            updated_at: row.updated_at,
        }
    }
}

/// Stores a new order, pending, at version 1.
pub(crate) async fn insert(tx: &mut PgConnection, id: Uuid, order: &NewOrder) -> Result<Order, sqlx::Error> {
    let row = sqlx::query_as!(
        Row,
        r#"
        INSERT INTO orders (id, customer_id, status, amount, currency, version)
        VALUES ($1, $2, 'pending', $3, $4, 1)
        RETURNING id, customer_id, status AS "status: Status", amount, currency, version, created_at, updated_at
        "#,
        id,
        order.customer_id,
        order.total.amount,
        order.total.currency,
    );
    Ok(row.fetch_one(tx).await?.into())
}

/// The order, if there is one.
pub(crate) async fn find(db: &PgPool, id: Uuid) -> Result<Option<Order>, sqlx::Error> {
    let row = sqlx::query_as!(
        Row,
        r#"
        SELECT id, customer_id, status AS "status: Status", amount, currency, version, created_at, updated_at
        FROM orders
        WHERE id = $1
        "#,
        id,
    );
    Ok(row.fetch_optional(db).await?.map(Order::from))
}

/// Locks those of these orders that exist, in the order of their ids: two transactions that lock
/// several take turns instead of waiting for each other.
pub(crate) async fn lock(tx: &mut PgConnection, ids: &[Uuid]) -> Result<Vec<Order>, sqlx::Error> {
    let rows = sqlx::query_as!(
        Row,
        r#"
        SELECT id, customer_id, status AS "status: Status", amount, currency, version, created_at, updated_at
        FROM orders
        WHERE id = ANY ($1)
        ORDER BY id
        FOR UPDATE
        "#,
        ids,
    );
    Ok(rows.fetch_all(tx).await?.into_iter().map(Order::from).collect())
}

/// Stores the state of locked orders.
pub(crate) async fn save(tx: &mut PgConnection, orders: &mut [Order]) -> Result<(), sqlx::Error> {
    let ids: Vec<Uuid> = orders.iter().map(|order| order.id).collect();
    let statuses: Vec<Status> = orders.iter().map(|order| order.status).collect();
    let versions: Vec<i64> = orders.iter().map(|order| order.version).collect();
    let updated_at = sqlx::query_scalar!(
        r#"
        WITH saved AS (
            UPDATE orders
            SET status = new.status, version = new.version, updated_at = now()
            FROM unnest($1::uuid[], $2::text[], $3::bigint[]) AS new (id, status, version)
            WHERE orders.id = new.id
        )
        SELECT now() AS "updated_at!"
        "#,
        &ids,
        &statuses as &[Status],
        &versions,
    );
    let updated_at = updated_at.fetch_one(tx).await?;
    for order in orders {
        order.updated_at = updated_at;
    }
    Ok(())
}

/// Which orders to list.
#[derive(Debug, Clone, Default)]
#[allow(missing_docs)]
pub struct Filter {
    pub customer_id: Option<Uuid>,
    pub status: Option<Status>,
}

/// Where a page begins: just after the order that was created then, under this id.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Cursor {
    created_at: OffsetDateTime,
    id: Uuid,
}

impl Cursor {
    /// Before the newest order.
    pub(crate) const START: Self = Self { created_at: time::macros::datetime!(9999-12-31 0:00 UTC), id: Uuid::max() };

    /// Just after the order `id`, if there is one.
    pub(crate) async fn after(db: &PgPool, id: Uuid) -> Result<Option<Self>, sqlx::Error> {
        let created_at = sqlx::query_scalar!("SELECT created_at FROM orders WHERE id = $1", id);
        Ok(created_at.fetch_optional(db).await?.map(|created_at| Self { created_at, id }))
    }
}

/// Up to `limit` orders from the cursor on, newest first. One query for each index, so that each is
/// planned for the index it is to use.
pub(crate) async fn list(db: &PgPool, filter: &Filter, from: Cursor, limit: i64) -> Result<Vec<Order>, sqlx::Error> {
    let rows = match (filter.customer_id, filter.status) {
        (Some(customer_id), status) => {
            let rows = sqlx::query_as!(
                Row,
                r#"
                SELECT id, customer_id, status AS "status: Status", amount, currency, version, created_at, updated_at
                FROM orders
                WHERE customer_id = $1 AND ($2::text IS NULL OR status = $2) AND (created_at, id) < ($3, $4)
                ORDER BY created_at DESC, id DESC
                LIMIT $5
                "#,
                customer_id,
                status as Option<Status>,
                from.created_at,
                from.id,
                limit,
            );
            rows.fetch_all(db).await?
        }
        (None, Some(status)) => {
            let rows = sqlx::query_as!(
                Row,
                r#"
                SELECT id, customer_id, status AS "status: Status", amount, currency, version, created_at, updated_at
                FROM orders
                WHERE status = $1 AND (created_at, id) < ($2, $3)
                ORDER BY created_at DESC, id DESC
                LIMIT $4
                "#,
                status as Status,
                from.created_at,
                from.id,
                limit,
            );
            rows.fetch_all(db).await?
        }
        (None, None) => {
            let rows = sqlx::query_as!(
                Row,
                r#"
                SELECT id, customer_id, status AS "status: Status", amount, currency, version, created_at, updated_at
                FROM orders
                WHERE (created_at, id) < ($1, $2)
                ORDER BY created_at DESC, id DESC
                LIMIT $3
                "#,
                from.created_at,
                from.id,
                limit,
            );
            rows.fetch_all(db).await?
        }
    };
    Ok(rows.into_iter().map(Order::from).collect())
}

/// What an idempotency key stands for.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Key {
    /// Nothing until now: the caller writes the order.
    New,
    /// The same request, and the order it made.
    Used(Uuid),
    /// Another request.
    Taken,
}

/// Takes `key` for `request` and the order `id`, or says what it stands for. Waits for another
/// transaction that is just taking it, so that of many requests one writes the order.
pub(crate) async fn take_key(
    tx: &mut PgConnection,
    key: &str,
    request: &NewOrder,
    id: Uuid,
) -> Result<Key, sqlx::Error> {
    let request = sqlx::types::Json(request);
    loop {
        let taking = sqlx::query!(
            "INSERT INTO idempotency_keys (key, request, order_id) VALUES ($1, $2, $3) ON CONFLICT DO NOTHING",
            key,
            request as _,
            id,
        );
        if taking.execute(&mut *tx).await?.rows_affected() == 1 {
            return Ok(Key::New);
        }
        let known = sqlx::query!(
            r#"SELECT order_id, request = $2 AS "is_same!" FROM idempotency_keys WHERE key = $1"#,
            key,
            request as _,
        );
        match known.fetch_optional(&mut *tx).await? {
            Some(known) if known.is_same => return Ok(Key::Used(known.order_id)),
            Some(_) => return Ok(Key::Taken),
            // Its time was over and it was removed just now.
            None => {}
        }
    }
}

/// For [`outbox_core::Retention`]: a key that is forgotten makes a new order.
pub(crate) const DELETE_KEYS: &str = "
DELETE FROM idempotency_keys USING (
    SELECT key FROM idempotency_keys
    WHERE created_at < now() - $1::interval
    ORDER BY created_at
    LIMIT $2
    FOR UPDATE SKIP LOCKED
) old
WHERE idempotency_keys.key = old.key";

#[cfg(test)]
mod tests {
    use super::*;

    fn order(status: Status) -> Order {
        let now = OffsetDateTime::UNIX_EPOCH;
        Order {
            id: Uuid::now_v7(),
            customer_id: Uuid::now_v7(),
            status,
            total: Money { amount: 1, currency: "EUR".into() },
            version: 5,
            created_at: now,
            updated_at: now,
        }
    }

    const ALL: [Status; 5] = [Status::Pending, Status::Paid, Status::Declined, Status::Cancelled, Status::Refunded];

    /// Applies a transition in every state and returns the states and versions it leads to.
    fn after(transition: impl Fn(&mut Order) -> bool) -> Vec<(Status, i64, bool)> {
        let apply = |status| {
            let mut order = order(status);
            let told = transition(&mut order);
            (order.status, order.version, told)
        };
        ALL.into_iter().map(apply).collect()
    }

    #[test]
    fn a_payment_decides_a_pending_order_and_no_other() {
        let unchanged = |status| (status, 5, false);
        let rest = ALL[1..].iter().copied().map(unchanged);
        let paid = after(|order| order.pay(Uuid::now_v7()).is_some());
        assert_eq!(paid, [(Status::Paid, 6, true)].into_iter().chain(rest.clone()).collect::<Vec<_>>());
        let declined = after(|order| order.decline(Uuid::now_v7(), "no".into()).is_some());
        assert_eq!(declined, [(Status::Declined, 6, true)].into_iter().chain(rest).collect::<Vec<_>>());
    }

    #[test]
    fn a_cancelled_order_stays_cancelled_until_its_money_is_returned() {
        let refunded = after(|order| order.refund(Uuid::now_v7()).is_some());
        assert_eq!(refunded[3], (Status::Refunded, 6, true));
        assert!(refunded.iter().enumerate().all(|(n, (_, version, told))| n == 3 || (*version == 5 && !told)));
    }

    #[test]
    fn an_order_is_cancelled_once_and_never_when_declined() {
        let cancel = |status| {
            let mut order = order(status);
            let told = order.cancel();
            (order.status, order.version, told.map(|event| event.is_some()))
        };
        assert_eq!(cancel(Status::Pending), (Status::Cancelled, 6, Ok(true)));
        assert_eq!(cancel(Status::Paid), (Status::Cancelled, 6, Ok(true)));
        assert_eq!(cancel(Status::Cancelled), (Status::Cancelled, 5, Ok(false)));
        assert_eq!(cancel(Status::Refunded), (Status::Refunded, 5, Ok(false)));
        assert_eq!(cancel(Status::Declined), (Status::Declined, 5, Err(CannotCancel)));
    }
}
