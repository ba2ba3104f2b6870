//! What payment-service tells the world: designed facts, not rows. Each shape is a contract, kept by
//! the golden files in `e2e-tests/contracts`.

use outbox_core::Event;
use serde::Serialize;
use uuid::Uuid;

use crate::payment::Money;

const AGGREGATE: &str = "payment";

/// The order's total was taken. Always the first event of its payment.
#[derive(Debug, Clone, Serialize)]
#[allow(missing_docs)]
pub struct PaymentCaptured {
    pub payment_id: Uuid,
    pub order_id: Uuid,
    pub amount: Money,
}

impl Event for PaymentCaptured {
    const AGGREGATE: &'static str = AGGREGATE;
    const TYPE: &'static str = "PaymentCaptured";
}

/// The gateway declined to take it. Always the first event of its payment.
#[derive(Debug, Clone, Serialize)]
#[allow(missing_docs)]
pub struct PaymentDeclined {
    pub payment_id: Uuid,
    pub order_id: Uuid,
    pub amount: Money,
    pub reason: String,
}

impl Event for PaymentDeclined {
    const AGGREGATE: &'static str = AGGREGATE;
    const TYPE: &'static str = "PaymentDeclined";
}

/// What had been taken was returned.
#[derive(Debug, Clone, Serialize)]
#[allow(missing_docs)]
pub struct PaymentRefunded {
    pub payment_id: Uuid,
    pub order_id: Uuid,
    pub amount: Money,
}

impl Event for PaymentRefunded {
    const AGGREGATE: &'static str = AGGREGATE;
    const TYPE: &'static str = "PaymentRefunded";
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};
    use uuid::uuid;

    use super::*;

    const ORDER: Uuid = uuid!("0199c0de-0000-7000-8000-000000000001");
    const PAYMENT: Uuid = uuid!("0199c0de-0000-7000-8000-000000000003");

    /// What the consumers' tests read is what this service writes, under the name of its file.
    fn assert_golden<E: Event>(event: &E, file: &str, golden: &str) {
        let golden: Value = serde_json::from_str(golden).unwrap();
        assert_eq!(json!(event), golden, "{file}");
        assert_eq!((E::AGGREGATE, format!("{}.v{}", E::TYPE, E::VERSION)), ("payment", file.to_owned()));
    }

    #[test]
    fn every_event_is_written_as_its_golden_file_has_it() {
        let amount = Money { amount: 12500, currency: "EUR".to_owned() };
        assert_golden(
            &PaymentCaptured { payment_id: PAYMENT, order_id: ORDER, amount: amount.clone() },
            "PaymentCaptured.v1",
            include_str!("../../e2e-tests/contracts/PaymentCaptured.v1.json"),
        );
        let reason = "insufficient_funds".to_owned();
        assert_golden(
            &PaymentDeclined { payment_id: PAYMENT, order_id: ORDER, amount: amount.clone(), reason },
            "PaymentDeclined.v1",
            include_str!("../../e2e-tests/contracts/PaymentDeclined.v1.json"),
        );
        assert_golden(
            &PaymentRefunded { payment_id: PAYMENT, order_id: ORDER, amount },
            "PaymentRefunded.v1",
            include_str!("../../e2e-tests/contracts/PaymentRefunded.v1.json"),
        );
    }
}
