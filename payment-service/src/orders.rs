//! What payment-service reads of orders: its own view of order-service's events, and their effect.

use std::collections::HashMap;

use outbox_core::measure;
use outbox_core::telemetry::TRACE;
use outbox_core::{Envelope, HandleError, Handler, Incoming, NewEvent, WireError, append_all, in_time};
use serde::Deserialize;
use sqlx::{PgConnection, PgPool};
use tracing::{Instrument, Span};
use uuid::Uuid;

use crate::gateway::{Charge, Charged, Gateway, GatewayError};
use crate::payment::{self, Money, NewPayment, Payment};

/// The stream's names, agreed with order-service.
pub fn stream() -> outbox_core::StreamName {
    outbox_core::StreamName {
        name: "ORDERS".to_owned(),
        subject_prefix: "orders".to_owned(),
        source: "/order-service".to_owned(),
    }
}

/// The events that matter to a payment. Fields that do not are not read.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum OrderEvent {
    Created(Created),
    Cancelled(Cancelled),
}

#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[allow(missing_docs)]
pub struct Created {
    pub order_id: Uuid,
    pub total: Money,
}

#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[allow(missing_docs)]
pub struct Cancelled {
    pub order_id: Uuid,
}

impl OrderEvent {
    /// Reads an event; `None` for a type that means nothing to a payment.
    ///
    /// # Errors
    /// [`WireError`] for an unknown version, or a payload that is not what its type and version say.
    pub fn read(envelope: &Envelope) -> Result<Option<Self>, WireError> {
        match (envelope.event_type.as_str(), envelope.version) {
            ("OrderCreated", 1) => envelope.payload().map(Self::Created).map(Some),
            ("OrderCancelled", 1) => envelope.payload().map(Self::Cancelled).map(Some),
            ("OrderCreated" | "OrderCancelled", _) => Err(envelope.unknown_version()),
            _ => Ok(None),
        }
    }
}

/// What the gateway did for an event, before its transaction.
#[derive(Debug)]
#[allow(missing_docs)]
pub enum Prepared {
    Charged(Charged),
    Refunded,
    NothingToRefund,
}

/// Gives orders their effect on payments.
#[derive(Debug)]
pub struct Orders<G> {
    db: PgPool,
    gateway: G,
}

impl<G: Gateway> Orders<G> {
    /// Payments are in `db`, money is with `gateway`.
    pub fn new(db: PgPool, gateway: G) -> Self {
        Self { db, gateway }
    }
}

impl<G: Gateway> Handler for Orders<G> {
    type Event = OrderEvent;
    type Prepared = Prepared;

    fn decode(&self, envelope: &Envelope) -> Result<Option<OrderEvent>, WireError> {
        OrderEvent::read(envelope)
    }

    /// Money moves here, under the event's id: a retry asks for the same, and gets the same answer.
    async fn prepare(&self, envelope: &Envelope, event: &OrderEvent) -> Result<Prepared, HandleError> {
        match event {
            OrderEvent::Created(Created { order_id, total }) => {
                let Money { amount, currency } = total.clone();
                let charge = Charge { payment_id: envelope.id, order_id: *order_id, amount, currency };
                let charging = self.gateway.charge(envelope.id, &charge).instrument(gateway_span("charge"));
                let answer = charging.await;
                count_call("charge", &answer, |charged| match charged {
                    Charged::Captured { .. } => "done",
                    Charged::Declined { .. } => "declined",
                });
                answer.map(Prepared::Charged).map_err(refusal)
            }
            OrderEvent::Cancelled(Cancelled { order_id }) => {
                let payment = in_time(payment::find_by_order(&self.db, *order_id)).await?;
                let Some(refund) = payment.as_ref().and_then(Payment::refund_request) else {
                    return Ok(Prepared::NothingToRefund);
                };
                let refunding = self.gateway.refund(envelope.id, &refund).instrument(gateway_span("refund"));
                let answer = refunding.await;
                count_call("refund", &answer, |()| "done");
                answer.map_err(refusal)?;
                Ok(Prepared::Refunded)
            }
        }
    }

    async fn apply(
        &self,
        tx: &mut PgConnection,
        events: &[Incoming<'_, OrderEvent, Prepared>],
    ) -> Result<(), HandleError> {
        let mut payments = Vec::new();
        let mut refunds = HashMap::new();
        let mut told = Vec::new();
        for Incoming { envelope, event, prepared } in events {
            let context = &envelope.context;
            match (event, prepared) {
                (OrderEvent::Created(Created { order_id, total }), Prepared::Charged(charged)) => {
                    let (amount, charged) = (total.clone(), charged.clone());
                    let payment = NewPayment { id: envelope.id, order_id: *order_id, amount, charged };
                    told.push(payment.told(context)?);
                    payments.push(payment);
                }
                (OrderEvent::Cancelled(Cancelled { order_id }), Prepared::Refunded) => {
                    refunds.insert(*order_id, context);
                }
                _ => {}
            }
        }
        payment::insert_all(&mut *tx, &payments).await.map_err(taken)?;

        let order_ids: Vec<Uuid> = refunds.keys().copied().collect();
        let mut refunded = payment::lock_by_orders(&mut *tx, &order_ids).await?;
        for payment in &mut refunded {
            if let Some(event) = payment.refund() {
                told.push(NewEvent::new(payment.aggregate(), &event, refunds[&event.order_id])?);
            }
        }
        payment::save(&mut *tx, &refunded).await?;
        append_all(tx, &told).await?;
        Ok(())
    }
}

/// A second payment for an order is a mistake of the one who asked, and no retry will mend it.
fn taken(error: sqlx::Error) -> HandleError {
    match error.as_database_error().and_then(|refusal| refusal.constraint()) {
        Some("payments_one_per_order") => HandleError::Reject("the order has a payment already".to_owned()),
        _ => error.into(),
    }
}

fn count_call<A>(call: &'static str, answer: &Result<A, GatewayError>, outcome: impl Fn(&A) -> &'static str) {
    let outcome = match answer {
        Ok(answer) => outcome(answer),
        Err(GatewayError::Rejected(_)) => "rejected",
        Err(GatewayError::Transient(_)) => "transient",
    };
    metrics::counter!(measure::GATEWAY_CALLS, "call" => call, "outcome" => outcome).increment(1);
}

fn gateway_span(request: &str) -> Span {
    tracing::trace_span!(target: TRACE, "gateway", otel.name = request, otel.kind = "client")
}

fn refusal(error: GatewayError) -> HandleError {
    match error {
        GatewayError::Rejected(_) => HandleError::Reject(error.to_string()),
        GatewayError::Transient(_) => error.into(),
    }
}

#[cfg(test)]
mod tests {
    use outbox_core::{AggregateVersion, Context};
    use serde_json::{Value, json};
    use uuid::uuid;

    use super::*;

    const CREATED: &str = include_str!("../../e2e-tests/contracts/OrderCreated.v1.json");
    const CANCELLED: &str = include_str!("../../e2e-tests/contracts/OrderCancelled.v1.json");

    const GOLDEN: [(&str, &str); 2] = [("OrderCreated", CREATED), ("OrderCancelled", CANCELLED)];

    /// Events of order-service that say nothing a payment depends on.
    const PASSED_OVER: [(&str, &str); 3] = [
        ("OrderPaid", include_str!("../../e2e-tests/contracts/OrderPaid.v1.json")),
        ("OrderDeclined", include_str!("../../e2e-tests/contracts/OrderDeclined.v1.json")),
        ("OrderRefunded", include_str!("../../e2e-tests/contracts/OrderRefunded.v1.json")),
    ];

    fn envelope(event_type: &str, version: u32, payload: impl Into<Vec<u8>>) -> Envelope {
        Envelope {
            id: Uuid::now_v7(),
            source: "/order-service".to_owned(),
            event_type: event_type.to_owned(),
            version,
            aggregate_type: "order".to_owned(),
            aggregate: AggregateVersion { id: Uuid::now_v7(), sequence: 1 },
            time: String::new(),
            context: Context { correlation_id: "test".to_owned(), traceparent: None },
            payload: payload.into().into(),
        }
    }

    fn read(event_type: &str, payload: &str) -> Result<Option<OrderEvent>, WireError> {
        OrderEvent::read(&envelope(event_type, 1, payload))
    }

    #[test]
    fn the_events_of_order_service_are_understood() {
        let order_id = uuid!("0199c0de-0000-7000-8000-000000000001");
        let total = Money { amount: 12500, currency: "EUR".to_owned() };
        assert_eq!(read("OrderCreated", CREATED), Ok(Some(OrderEvent::Created(Created { order_id, total }))));
        assert_eq!(read("OrderCancelled", CANCELLED), Ok(Some(OrderEvent::Cancelled(Cancelled { order_id }))));
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
            let refused = OrderEvent::read(&envelope(event_type, 2, golden));
            assert_eq!(refused, Err(WireError::UnknownVersion { event_type: event_type.to_owned(), version: 2 }));
        }
    }

    #[test]
    fn a_payload_without_what_its_type_promises_is_refused() {
        for (event_type, _) in GOLDEN {
            for payload in ["", "{}", "[]", r#"{"order_id": 7, "total": {"amount": "1", "currency": "EUR"}}"#] {
                assert!(matches!(read(event_type, payload), Err(WireError::Payload { .. })), "{event_type}: {payload}");
            }
        }
    }

    #[test]
    fn a_type_that_means_nothing_here_is_passed_over_in_any_version() {
        for (event_type, golden) in PASSED_OVER {
            assert_eq!(read(event_type, golden), Ok(None));
            assert_eq!(OrderEvent::read(&envelope(event_type, 7, golden)), Ok(None));
        }
    }
}
