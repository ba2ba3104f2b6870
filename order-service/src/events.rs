//! What order-service tells the world: designed facts, not rows. Each shape is a contract, kept by
//! the golden files in `e2e-tests/contracts`.

use outbox_core::Event;
use serde::Serialize;
use uuid::Uuid;

use crate::order::Money;

const AGGREGATE: &str = "order";

/// A client placed an order. Always the first event of its order.
#[derive(Debug, Clone, Serialize)]
#[allow(missing_docs)]
pub struct OrderCreated {
    pub order_id: Uuid,
    pub customer_id: Uuid,
    pub total: Money,
}

impl Event for OrderCreated {
    const AGGREGATE: &'static str = AGGREGATE;
    const TYPE: &'static str = "OrderCreated";
}

/// The order's payment was captured.
#[derive(Debug, Clone, Serialize)]
#[allow(missing_docs)]
pub struct OrderPaid {
    pub order_id: Uuid,
    pub payment_id: Uuid,
}

impl Event for OrderPaid {
    const AGGREGATE: &'static str = AGGREGATE;
    const TYPE: &'static str = "OrderPaid";
}

/// The order's payment was declined.
#[derive(Debug, Clone, Serialize)]
#[allow(missing_docs)]
pub struct OrderDeclined {
    pub order_id: Uuid,
    pub payment_id: Uuid,
    pub reason: String,
}

impl Event for OrderDeclined {
    const AGGREGATE: &'static str = AGGREGATE;
    const TYPE: &'static str = "OrderDeclined";
}

/// The client cancelled the order.
#[derive(Debug, Clone, Serialize)]
#[allow(missing_docs)]
pub struct OrderCancelled {
    pub order_id: Uuid,
}

impl Event for OrderCancelled {
    const AGGREGATE: &'static str = AGGREGATE;
    const TYPE: &'static str = "OrderCancelled";
}

/// Money that had been taken for a cancelled order was returned.
#[derive(Debug, Clone, Serialize)]
#[allow(missing_docs)]
pub struct OrderRefunded {
    pub order_id: Uuid,
    pub payment_id: Uuid,
}

impl Event for OrderRefunded {
    const AGGREGATE: &'static str = AGGREGATE;
    const TYPE: &'static str = "OrderRefunded";
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};
    use uuid::uuid;

    use super::*;

    const ORDER: Uuid = uuid!("0199c0de-0000-7000-8000-000000000001");
    const CUSTOMER: Uuid = uuid!("0199c0de-0000-7000-8000-000000000002");
    const PAYMENT: Uuid = uuid!("0199c0de-0000-7000-8000-000000000003");

    /// What the consumers' tests read is what this service writes, under the name of its file.
    fn assert_golden<E: Event>(event: &E, file: &str, golden: &str) {
        let golden: Value = serde_json::from_str(golden).unwrap();
        assert_eq!(json!(event), golden, "{file}");
        assert_eq!((E::AGGREGATE, format!("{}.v{}", E::TYPE, E::VERSION)), ("order", file.to_owned()));
    }

    #[test]
    fn every_event_is_written_as_its_golden_file_has_it() {
        let total = Money { amount: 12500, currency: "EUR".to_owned() };
        assert_golden(
            &OrderCreated { order_id: ORDER, customer_id: CUSTOMER, total },
            "OrderCreated.v1",
            include_str!("../../e2e-tests/contracts/OrderCreated.v1.json"),
        );
        assert_golden(
            &OrderPaid { order_id: ORDER, payment_id: PAYMENT },
            "OrderPaid.v1",
            include_str!("../../e2e-tests/contracts/OrderPaid.v1.json"),
        );
        assert_golden(
            &OrderDeclined { order_id: ORDER, payment_id: PAYMENT, reason: "insufficient_funds".to_owned() },
            "OrderDeclined.v1",
            include_str!("../../e2e-tests/contracts/OrderDeclined.v1.json"),
        );
        assert_golden(
            &OrderCancelled { order_id: ORDER },
            "OrderCancelled.v1",
            include_str!("../../e2e-tests/contracts/OrderCancelled.v1.json"),
        );
        assert_golden(
            &OrderRefunded { order_id: ORDER, payment_id: PAYMENT },
            "OrderRefunded.v1",
            include_str!("../../e2e-tests/contracts/OrderRefunded.v1.json"),
        );
    }
}
