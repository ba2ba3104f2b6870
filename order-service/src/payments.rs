//! What order-service reads of payments: its own view of payment-service's events, and their effect.

use std::collections::HashMap;

use outbox_core::{Envelope, HandleError, Handler, Incoming, NewEvent, WireError, append_all};
use serde::Deserialize;
use sqlx::PgConnection;
use uuid::Uuid;

use crate::order::{self, Order};

/// The stream's names, agreed with payment-service.
pub fn stream() -> outbox_core::StreamName {
    outbox_core::StreamName {
        name: "PAYMENTS".to_owned(),
        subject_prefix: "payments".to_owned(),
        source: "/payment-service".to_owned(),
    }
}

/// The events that matter to an order. Fields that do not are not read.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum PaymentEvent {
    Captured(Captured),
    Declined(Declined),
    Refunded(Refunded),
}

#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[allow(missing_docs)]
pub struct Captured {
    pub payment_id: Uuid,
    pub order_id: Uuid,
}

#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[allow(missing_docs)]
pub struct Declined {
    pub payment_id: Uuid,
    pub order_id: Uuid,
    pub reason: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[allow(missing_docs)]
pub struct Refunded {
    pub payment_id: Uuid,
    pub order_id: Uuid,
}

impl PaymentEvent {
    /// Reads an event; `None` for a type that means nothing to an order.
    ///
    /// # Errors
    /// [`WireError`] for an unknown version, or a payload that is not what its type and version say.
    pub fn read(envelope: &Envelope) -> Result<Option<Self>, WireError> {
        match (envelope.event_type.as_str(), envelope.version) {
            ("PaymentCaptured", 1) => envelope.payload().map(Self::Captured).map(Some),
            ("PaymentDeclined", 1) => envelope.payload().map(Self::Declined).map(Some),
            ("PaymentRefunded", 1) => envelope.payload().map(Self::Refunded).map(Some),
            ("PaymentCaptured" | "PaymentDeclined" | "PaymentRefunded", _) => Err(envelope.unknown_version()),
            _ => Ok(None),
        }
    }

    fn order_id(&self) -> Uuid {
        match self {
            Self::Captured(event) => event.order_id,
            Self::Declined(event) => event.order_id,
            Self::Refunded(event) => event.order_id,
        }
    }

    /// Changes the order, and returns the event that tells of it.
    fn apply_to(&self, order: &mut Order, envelope: &Envelope) -> Result<Option<NewEvent>, HandleError> {
        let context = &envelope.context;
        let event = match self {
            Self::Captured(event) => {
                order.pay(event.payment_id).map(|told| NewEvent::new(order.aggregate(), &told, context))
            }
            Self::Declined(event) => order
                .decline(event.payment_id, event.reason.clone())
                .map(|told| NewEvent::new(order.aggregate(), &told, context)),
            Self::Refunded(event) => {
                order.refund(event.payment_id).map(|told| NewEvent::new(order.aggregate(), &told, context))
            }
        };
        Ok(event.transpose()?)
    }
}

/// Gives payments their effect on orders.
#[derive(Debug)]
pub struct Payments;

impl Handler for Payments {
    type Event = PaymentEvent;
    type Prepared = ();

    fn decode(&self, envelope: &Envelope) -> Result<Option<PaymentEvent>, WireError> {
        PaymentEvent::read(envelope)
    }

    async fn prepare(&self, _envelope: &Envelope, _event: &PaymentEvent) -> Result<(), HandleError> {
        Ok(())
    }

    async fn apply(&self, tx: &mut PgConnection, events: &[Incoming<'_, PaymentEvent, ()>]) -> Result<(), HandleError> {
        let ids: Vec<Uuid> = events.iter().map(|incoming| incoming.event.order_id()).collect();
        let orders = order::lock(&mut *tx, &ids).await?;
        let mut orders: HashMap<Uuid, Order> = orders.into_iter().map(|order| (order.id(), order)).collect();

        let mut changed = Vec::new();
        let mut told = Vec::new();
        for Incoming { event, envelope, .. } in events {
            let order_id = event.order_id();
            let Some(order) = orders.get_mut(&order_id) else {
                return Err(HandleError::Reject(format!("there is no order {order_id}")));
            };
            if let Some(event) = event.apply_to(order, envelope)? {
                told.push(event);
                changed.push(order.clone());
            }
        }
        order::save(&mut *tx, &mut changed).await?;
        append_all(tx, &told).await?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use outbox_core::{AggregateVersion, Context};
    use serde_json::{Value, json};
    use uuid::uuid;

    use super::*;

    const CAPTURED: &str = include_str!("../../e2e-tests/contracts/PaymentCaptured.v1.json");
    const DECLINED: &str = include_str!("../../e2e-tests/contracts/PaymentDeclined.v1.json");
    const REFUNDED: &str = include_str!("../../e2e-tests/contracts/PaymentRefunded.v1.json");

    const GOLDEN: [(&str, &str); 3] =
        [("PaymentCaptured", CAPTURED), ("PaymentDeclined", DECLINED), ("PaymentRefunded", REFUNDED)];

    fn envelope(event_type: &str, version: u32, payload: impl Into<Vec<u8>>) -> Envelope {
        Envelope {
            id: Uuid::now_v7(),
            source: "/payment-service".to_owned(),
            event_type: event_type.to_owned(),
            version,
            aggregate_type: "payment".to_owned(),
            aggregate: AggregateVersion { id: Uuid::now_v7(), sequence: 1 },
            time: String::new(),
            context: Context { correlation_id: "test".to_owned(), traceparent: None },
            payload: payload.into().into(),
        }
    }

    fn read(event_type: &str, payload: &str) -> Result<Option<PaymentEvent>, WireError> {
        PaymentEvent::read(&envelope(event_type, 1, payload))
    }

    #[test]
    fn the_events_of_payment_service_are_understood() {
        let order_id = uuid!("0199c0de-0000-7000-8000-000000000001");
        let payment_id = uuid!("0199c0de-0000-7000-8000-000000000003");
        let captured = PaymentEvent::Captured(Captured { payment_id, order_id });
        assert_eq!(read("PaymentCaptured", CAPTURED), Ok(Some(captured)));
        let reason = "insufficient_funds".to_owned();
        let declined = PaymentEvent::Declined(Declined { payment_id, order_id, reason });
        assert_eq!(read("PaymentDeclined", DECLINED), Ok(Some(declined)));
        let refunded = PaymentEvent::Refunded(Refunded { payment_id, order_id });
        assert_eq!(read("PaymentRefunded", REFUNDED), Ok(Some(refunded)));
    }

    #[test]
    fn fields_that_are_not_known_are_not_read() {
        for (event_type, golden) in GOLDEN {
            let mut payload: Value = serde_json::from_str(golden).unwrap();
            payload["from_the_future"] = json!({"nested": [1, 2, 3]});
            assert_eq!(read(event_type, &payload.to_string()), read(event_type, golden));
        }
    }

    #[test]
    fn a_version_that_is_not_known_is_refused_and_not_guessed() {
        for (event_type, golden) in GOLDEN {
            let refused = PaymentEvent::read(&envelope(event_type, 2, golden));
            assert_eq!(refused, Err(WireError::UnknownVersion { event_type: event_type.to_owned(), version: 2 }));
        }
    }

    #[test]
    fn a_payload_without_what_its_type_promises_is_refused() {
        for (event_type, _) in GOLDEN {
            for payload in ["", "{}", "[]", r#"{"payment_id": 7, "order_id": 8, "reason": 9}"#] {
                assert!(matches!(read(event_type, payload), Err(WireError::Payload { .. })), "{event_type}: {payload}");
            }
        }
    }

    #[test]
    fn a_type_that_means_nothing_here_is_passed_over_in_any_version() {
        assert_eq!(read("PaymentDisputed", "not even JSON"), Ok(None));
        assert_eq!(PaymentEvent::read(&envelope("PaymentDisputed", 7, "{}")), Ok(None));
    }
}
