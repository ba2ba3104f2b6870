//! The promise, checked from outside: orders that were answered against tables and streams.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::time::Duration;

use anyhow::{Context, ensure};
use async_nats::jetstream::{self, consumer::pull};
use futures::StreamExt;
use sqlx::PgPool;
use tokio::process::Command;
use tokio::time::timeout;
use uuid::Uuid;

use crate::programs::program;
use crate::provider::Provider;

const AUDITED_WITHIN: Duration = Duration::from_secs(60);

/// What a check counted.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Counts {
    /// Orders that exist.
    pub orders: usize,
    /// Events in both outboxes.
    pub events: usize,
    /// Messages in both streams beyond one of each event: sent twice, with no second effect.
    pub duplicates: usize,
}

/// The databases and the broker of a pair.
pub struct Checker<'a> {
    /// The database of order-service.
    pub orders_db: &'a PgPool,
    /// The database of payment-service.
    pub payments_db: &'a PgPool,
    /// The broker.
    pub jetstream: jetstream::Context,
}

#[derive(sqlx::FromRow)]
struct Order {
    id: Uuid,
    status: String,
    version: i64,
}

#[derive(sqlx::FromRow)]
struct Event {
    event_id: Uuid,
    aggregate_id: Uuid,
    aggregate_sequence: i64,
    is_published: bool,
}

impl Checker<'_> {
    /// Checks that exactly these orders exist, that each came to its end with one payment, and that
    /// every event was published in order and took effect. Returns what breaks the promise, or the
    /// counts. To be called when nothing moves any more; what still moves is a finding too.
    pub async fn check(&self, answered: &BTreeSet<Uuid>) -> anyhow::Result<Result<Counts, Vec<String>>> {
        let mut findings = Vec::new();
        let orders: Vec<Order> =
            sqlx::query_as("SELECT id, status, version FROM orders").fetch_all(self.orders_db).await?;
        let payments: Vec<(Uuid, Uuid, String, i64)> =
            sqlx::query_as("SELECT order_id, id, status, version FROM payments").fetch_all(self.payments_db).await?;

        let existing: BTreeSet<Uuid> = orders.iter().map(|order| order.id).collect();
        findings.extend(answered.difference(&existing).map(|id| format!("order {id} was answered and is lost")));
        findings.extend(existing.difference(answered).map(|id| format!("order {id} was not asked for")));
        let mut by_order: HashMap<Uuid, &str> = HashMap::new();
        for (order, _, status, _) in &payments {
            if by_order.insert(*order, status).is_some() {
                findings.push(format!("order {order} has a second payment"));
            }
            if !existing.contains(order) {
                findings.push(format!("there is a payment for order {order}, which does not exist"));
            }
        }
        for Order { id, status, .. } in &orders {
            let payment = by_order.get(id).copied();
            if !have_come_to_their_end(status, payment) {
                findings.push(format!("order {id} is {status}, its payment is {payment:?}"));
            }
        }

        let order_versions = orders.iter().map(|order| (order.id, order.version)).collect();
        let payment_versions = payments.iter().map(|(_, id, _, version)| (*id, *version)).collect();
        let sides = [
            ("ORDERS", self.orders_db, self.payments_db, "payment-service", order_versions),
            ("PAYMENTS", self.payments_db, self.orders_db, "order-service", payment_versions),
        ];
        let mut counts = Counts { orders: orders.len(), ..Counts::default() };
        for (stream, producer, consumer, name, versions) in sides {
            self.check_events(stream, producer, versions, &mut counts, &mut findings).await?;
            check_inbox(producer, consumer, name, &mut findings).await?;
        }
        Ok(if findings.is_empty() { Ok(counts) } else { Err(findings) })
    }

    /// Deliveries of the broker beyond one of each message.
    pub async fn delivered_again(&self) -> anyhow::Result<u64> {
        let mut again = 0;
        for (stream, durable) in [("ORDERS", "payment-service"), ("PAYMENTS", "order-service")] {
            let mut consumer: jetstream::consumer::PullConsumer =
                self.jetstream.get_consumer_from_stream(durable, stream).await?;
            let delivered = consumer.info().await?.delivered;
            again += delivered.consumer_sequence - delivered.stream_sequence;
        }
        Ok(again)
    }

    /// Checks that the gateway took money once for each order and returned it once for each refunded
    /// one, as the payments say, and that whoever asked again asked for the same. Returns what breaks
    /// the promise.
    pub async fn check_gateway(&self, gateway: &Provider) -> anyhow::Result<Vec<String>> {
        let mut order_of = HashMap::new();
        let mut ways: BTreeMap<(Uuid, &str), BTreeSet<_>> = BTreeMap::new();
        for call in gateway.calls() {
            let order: Uuid = serde_json::from_value(call.json()["order_id"].take())?;
            let what = if call.is_refund() { "refund" } else { "charge" };
            order_of.insert(call.key.clone(), order);
            ways.entry((order, what)).or_default().insert((call.key, call.body));
        }
        let mut findings: Vec<String> = ways
            .iter()
            .filter(|(_, ways)| ways.len() > 1)
            .map(|((order, what), ways)| {
                format!("gateway: a {what} for order {order} was asked in {} ways", ways.len())
            })
            .collect();

        let done: BTreeSet<(Uuid, String, Option<String>)> = gateway
            .effects()
            .iter()
            .map(|(key, answer)| {
                let text = |field: &str| answer[field].as_str().unwrap_or_default().to_owned();
                let status = text("status");
                let charge = (status == "captured").then(|| text("id"));
                (order_of[key], status, charge)
            })
            .collect();
        let payments: Vec<(Uuid, String, Option<String>)> =
            sqlx::query_as("SELECT order_id, status, charge_id FROM payments").fetch_all(self.payments_db).await?;
        let mut known = BTreeSet::new();
        for (order, status, charge) in payments {
            let answer = if charge.is_some() { "captured" } else { "declined" };
            known.insert((order, answer.to_owned(), charge));
            if status == "refunded" {
                known.insert((order, status, None));
            }
        }
        findings.extend(done.difference(&known).map(|effect| format!("gateway: {effect:?} is not known here")));
        findings.extend(known.difference(&done).map(|effect| format!("gateway: {effect:?} is not known there")));
        Ok(findings)
    }

    /// Every version has its event, every event is published, and first publications are in order.
    async fn check_events(
        &self,
        stream: &str,
        producer: &PgPool,
        versions: BTreeMap<Uuid, i64>,
        counts: &mut Counts,
        findings: &mut Vec<String>,
    ) -> anyhow::Result<()> {
        let events: Vec<Event> = sqlx::query_as(
            "SELECT event_id, event.aggregate_id, event.aggregate_sequence, published_at IS NOT NULL AS is_published
             FROM outbox_events event JOIN outbox_deliveries USING (event_id)
             ORDER BY event.aggregate_id, event.aggregate_sequence",
        )
        .fetch_all(producer)
        .await?;
        counts.events += events.len();
        let mut appended: BTreeMap<Uuid, Vec<i64>> = BTreeMap::new();
        for event in &events {
            appended.entry(event.aggregate_id).or_default().push(event.aggregate_sequence);
            if !event.is_published {
                findings.push(format!("{stream}: event {} is not published", event.event_id));
            }
        }
        let expected: BTreeMap<Uuid, Vec<i64>> =
            versions.into_iter().map(|(id, version)| (id, (1..=version).collect())).collect();
        differences(&format!("{stream}: events of"), &expected, &appended, findings);

        let messages = self.messages(stream).await?;
        let mut first_publications: BTreeMap<Uuid, Vec<i64>> = BTreeMap::new();
        let mut seen = HashSet::new();
        for (event_id, aggregate, sequence) in &messages {
            if seen.insert(*event_id) {
                first_publications.entry(*aggregate).or_default().push(*sequence);
            }
        }
        counts.duplicates += messages.len() - seen.len();
        differences(&format!("{stream}: first publications of"), &appended, &first_publications, findings);
        Ok(())
    }

    /// event_id, aggregate and sequence of each message, in stream order.
    async fn messages(&self, stream: &str) -> anyhow::Result<Vec<(Uuid, Uuid, i64)>> {
        let mut stream = self.jetstream.get_stream(stream).await?;
        let length = stream.info().await?.state.messages as usize;
        let consumer = stream.create_consumer(pull::OrderedConfig::default()).await?;
        let mut messages = consumer.messages().await?.take(length);
        let mut found = Vec::with_capacity(length);
        while let Some(message) = messages.next().await {
            let message = message?;
            let headers = message.headers.clone().unwrap_or_default();
            let header = |name: &str| headers.get(name).map(|value| value.as_str().to_owned()).unwrap_or_default();
            found.push((header("ce-id").parse()?, header("ce-subject").parse()?, header("ce-sequence").parse()?));
        }
        Ok(found)
    }
}

/// Whether an order and its payment are as they may stay.
pub(crate) fn have_come_to_their_end(order: &str, payment: Option<&str>) -> bool {
    matches!(
        (order, payment),
        ("paid", Some("captured")) | ("declined" | "cancelled", Some("declined")) | ("refunded", Some("refunded"))
    )
}

/// Lets the operator's auditor compare both services. Fails with what it says where something is lost or
/// doubled.
pub async fn audit(orders_url: &str, payments_url: &str, nats_url: &str) -> anyhow::Result<()> {
    let mut command = Command::new(program("outboxctl").await?);
    let settings = [("DATABASE_URL", orders_url), ("PEER_DATABASE_URL", payments_url), ("NATS_URL", nats_url)];
    command.arg("audit").envs(settings).kill_on_drop(true);
    let output = timeout(AUDITED_WITHIN, command.output()).await.context("outboxctl audit does not end")??;
    let said = [output.stdout, output.stderr].concat();
    ensure!(output.status.success(), "outboxctl audit: {}", String::from_utf8_lossy(&said));
    Ok(())
}

/// Every event of the producer took effect, once, and nothing is left over.
async fn check_inbox(
    producer: &PgPool,
    consumer: &PgPool,
    name: &str,
    findings: &mut Vec<String>,
) -> anyhow::Result<()> {
    let appended: Vec<Uuid> = sqlx::query_scalar("SELECT event_id FROM outbox_events").fetch_all(producer).await?;
    let processed: Vec<Uuid> = sqlx::query_scalar("SELECT event_id FROM processed_events WHERE consumer = $1")
        .bind(name)
        .fetch_all(consumer)
        .await?;
    let (appended, processed) = (BTreeSet::from_iter(appended), BTreeSet::from_iter(processed));
    findings.extend(appended.difference(&processed).map(|id| format!("{name}: event {id} took no effect")));
    findings.extend(processed.difference(&appended).map(|id| format!("{name}: event {id} took effect without being")));
    for (table, what) in [("parked_events", "parked"), ("dead_letters", "dead letters")] {
        let query = sqlx::AssertSqlSafe(format!("SELECT count(*) FROM {table}"));
        let left: i64 = sqlx::query_scalar(query).fetch_one(consumer).await?;
        if left > 0 {
            findings.push(format!("{name}: {left} {what}"));
        }
    }
    Ok(())
}

fn differences(
    what: &str,
    expected: &BTreeMap<Uuid, Vec<i64>>,
    found: &BTreeMap<Uuid, Vec<i64>>,
    findings: &mut Vec<String>,
) {
    let aggregates: BTreeSet<&Uuid> = expected.keys().chain(found.keys()).collect();
    for id in aggregates {
        let (expected, found) = (expected.get(id), found.get(id));
        if expected != found {
            findings.push(format!("{what} {id}: {found:?} and not {expected:?}"));
        }
    }
}
