//! An order's path, shown as it happens: order, outbox, stream, inbox, payment, and order again.
//!
//! Nothing reports to this: it looks at the tables and the streams, as an operator would.

use std::collections::HashSet;
use std::time::Duration;

use anstream::println;
use async_nats::jetstream;
use async_nats::jetstream::consumer::DeliverPolicy;
use async_nats::jetstream::consumer::pull::OrderedConfig;
use e2e_tests::{Nats, Order, wait_until};
use futures::StreamExt;
use sqlx::{AssertSqlSafe, PgPool};
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use uuid::Uuid;

use crate::screen::{BLUE, BOLD, CYAN, DIM, GREEN, MAGENTA, PLAIN, YELLOW};

const STREAM_WITHIN: Duration = Duration::from_secs(30);

const ORDER: &str = "SELECT 'order' AS name, id, status, version, updated_at FROM orders WHERE id = $1";
const PAYMENT: &str = "SELECT 'payment' AS name, id, status, version, updated_at FROM payments WHERE order_id = $1";

/// The places where an order's path can be seen.
pub struct Watch {
    orders: PgPool,
    payments: PgPool,
    arriving: UnboundedReceiver<Fact>,
    stored: Vec<Fact>,
}

/// One order's path, as far as it was shown.
pub struct Journey {
    order: Uuid,
    began: OffsetDateTime,
    shown: HashSet<Fact>,
}

/// Something that has happened.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, sqlx::FromRow)]
struct Fact {
    at: OffsetDateTime,
    /// `order`, `outbox`, `stream`, `relay`, `inbox` or `payment`.
    place: String,
    what: String,
    /// The event, the order or the payment.
    id: Uuid,
}

impl Watch {
    /// Watches both databases, and both streams from now on.
    pub async fn open(orders_url: &str, payments_url: &str, nats: &Nats) -> anyhow::Result<Self> {
        let (arrives, arriving) = unbounded_channel();
        let jetstream = nats.jetstream().await?;
        for stream in ["ORDERS", "PAYMENTS"] {
            watch_stream(&jetstream, stream, arrives.clone()).await?;
        }
        let (orders, payments) = (PgPool::connect(orders_url).await?, PgPool::connect(payments_url).await?);
        Ok(Self { orders, payments, arriving, stored: vec![] })
    }

    /// Shows what happens to an order until it has this status and all events about it have arrived.
    pub async fn follow(&mut self, journey: &mut Journey, status: &str, deadline: Duration) -> anyhow::Result<()> {
        wait_until(deadline, &format!("order {} is {status}", journey.order), async || {
            let facts = self.facts_about(journey.order).await.map_err(|error| error.to_string())?;
            journey.show(&facts);
            let order = facts.iter().find(|fact| fact.place == "order").map_or("missing", |fact| &fact.what);
            match order.starts_with(status) && all_events_have_arrived(&facts) {
                true => Ok(()),
                false => Err(order.to_owned()),
            }
        })
        .await
    }

    async fn facts_about(&mut self, order: Uuid) -> anyhow::Result<Vec<Fact>> {
        let mut facts = produced(&self.orders, ORDER, order).await?;
        facts.extend(produced(&self.payments, PAYMENT, order).await?);
        let events: Vec<Uuid> = facts.iter().filter(|fact| fact.place == "outbox").map(|fact| fact.id).collect();
        facts.extend(consumed(&self.payments, &events).await?);
        facts.extend(consumed(&self.orders, &events).await?);
        while let Ok(message) = self.arriving.try_recv() {
            self.stored.push(message);
        }
        facts.extend(self.stored.iter().filter(|message| events.contains(&message.id)).cloned());
        facts.sort();
        Ok(facts)
    }
}

/// The aggregate's row, its events, and which of them were sent.
async fn produced(database: &PgPool, aggregate: &str, order: Uuid) -> sqlx::Result<Vec<Fact>> {
    let query = format!(
        "WITH aggregate AS ({aggregate}), events AS (
             SELECT event_id, event_type, event.created_at, published_at
             FROM outbox_events event JOIN outbox_deliveries USING (event_id)
             WHERE event.aggregate_id IN (SELECT id FROM aggregate)
         )
         SELECT name AS place, status || ' (version ' || version || ')' AS what, id, updated_at AS at FROM aggregate
         UNION ALL SELECT 'outbox', event_type, event_id, created_at FROM events
         UNION ALL SELECT 'relay', event_type || ' is published', event_id, published_at FROM events WHERE published_at IS NOT NULL"
    );
    sqlx::query_as(AssertSqlSafe(query)).bind(order).fetch_all(database).await
}

/// Which events the consumer of this database has in its inbox.
async fn consumed(database: &PgPool, events: &[Uuid]) -> sqlx::Result<Vec<Fact>> {
    let query = "SELECT 'inbox' AS place, 'taken by ' || consumer AS what, event_id AS id, processed_at AS at
                 FROM processed_events WHERE event_id = ANY ($1)";
    sqlx::query_as(query).bind(events).fetch_all(database).await
}

/// Whether each event was stored by the broker, marked by the relay, and taken by its consumer.
fn all_events_have_arrived(facts: &[Fact]) -> bool {
    let count = |place| facts.iter().filter(|fact| fact.place == place).count();
    ["stream", "relay", "inbox"].into_iter().all(|place| count(place) == count("outbox"))
}

/// Reports every message that comes into a stream from now on.
async fn watch_stream(
    jetstream: &jetstream::Context,
    name: &'static str,
    arrives: UnboundedSender<Fact>,
) -> anyhow::Result<()> {
    let made_by_its_service = format!("the stream {name} is there");
    let stream = wait_until(STREAM_WITHIN, &made_by_its_service, async || jetstream.get_stream(name).await).await?;
    let from_now_on = OrderedConfig { deliver_policy: DeliverPolicy::New, ..Default::default() };
    let consumer = stream.create_consumer(from_now_on).await?;
    let mut messages = consumer.messages().await?;
    tokio::spawn(async move {
        while let Some(Ok(message)) = messages.next().await {
            if let Some(fact) = stored(name, &message) {
                // Nobody listens any more when the run is over.
                let _ = arrives.send(fact);
            }
        }
    });
    Ok(())
}

fn stored(stream: &str, message: &jetstream::Message) -> Option<Fact> {
    let event = message.headers.as_ref()?.get("ce-id")?.as_str().parse().ok()?;
    let info = message.info().ok()?;
    let what = format!("{stream} #{} {}", info.stream_sequence, message.subject);
    Some(Fact { at: info.published, place: "stream".to_owned(), what, id: event })
}

impl Journey {
    /// Begins to show the path of an order that was just placed.
    pub fn begin(order: &Order, what: &str) -> anyhow::Result<Self> {
        let began = OffsetDateTime::parse(&order.created_at, &Rfc3339)?;
        println!("\n{BOLD}An order of {what}{PLAIN}  {DIM}placed at {}{PLAIN}", order.created_at);
        Ok(Self { order: order.id, began, shown: HashSet::new() })
    }

    fn show(&mut self, facts: &[Fact]) {
        for fact in facts {
            if self.shown.insert(fact.clone()) {
                self.show_fact(fact);
            }
        }
    }

    fn show_fact(&self, fact: &Fact) {
        let Fact { at, place, what, id } = fact;
        let after = (*at - self.began).as_seconds_f64() * 1000.0;
        let (color, thing) = match place.as_str() {
            "order" => (CYAN, "order"),
            "payment" => (GREEN, "payment"),
            "outbox" => (YELLOW, "event"),
            "stream" => (MAGENTA, "event"),
            "inbox" => (BLUE, "event"),
            _ => (DIM, "event"),
        };
        println!("{DIM}{after:>9.1} ms{PLAIN}  {color}{place:<9}{what:<39}{PLAIN}{DIM}{thing:<8}{id}{PLAIN}");
    }
}
