//! Both services on servers and databases of their own: what most tests start from.

use std::collections::BTreeSet;
use std::time::Duration;

use anyhow::{Context, ensure};
use futures::{StreamExt, TryStreamExt, stream};
use sqlx::PgPool;
use sqlx::postgres::PgPoolOptions;
use uuid::Uuid;

use crate::api::{Api, Order, Payment};
use crate::checker::{Checker, Counts, audit, have_come_to_their_end};
use crate::nats::Nats;
use crate::postgres::Postgres;
use crate::service::Service;
use crate::wait::eventually;

const READY_WITHIN: Duration = Duration::from_secs(60);
const SETTLED_WITHIN: Duration = Duration::from_secs(30);
const ALL_SETTLED_WITHIN: Duration = Duration::from_secs(90);

/// order-service and payment-service, ready to take orders.
///
/// Its methods panic where something fails, so that the services' last words are shown.
pub struct Pair {
    /// The instances of order-service.
    pub orders: Vec<Service>,
    /// The instances of payment-service.
    pub payments: Vec<Service>,
    /// The database of order-service.
    pub orders_db: PgPool,
    /// The database of payment-service.
    pub payments_db: PgPool,
    /// The URL of [`Self::orders_db`].
    pub orders_url: String,
    /// The URL of [`Self::payments_db`].
    pub payments_url: String,
    /// A client of the first instance of each.
    pub api: Api,
    /// The broker.
    pub nats: Nats,
    own_postgres: Option<Postgres>,
}

/// How a [`Pair`] is to be; by default, one instance of each service with default settings.
pub struct PairBuilder {
    orders: usize,
    payments: usize,
    order_settings: Vec<(String, String)>,
    payment_settings: Vec<(String, String)>,
    own_servers: bool,
    databases: Option<[String; 2]>,
}

impl Pair {
    /// One instance of each, with default settings.
    pub async fn start() -> Self {
        Self::builder().start().await
    }

    /// To start another kind of pair.
    pub fn builder() -> PairBuilder {
        PairBuilder {
            orders: 1,
            payments: 1,
            order_settings: vec![],
            payment_settings: vec![],
            own_servers: false,
            databases: None,
        }
    }

    /// The PostgreSQL server, where the pair has [its own](PairBuilder::own_servers).
    pub fn postgres(&self) -> &Postgres {
        self.own_postgres.as_ref().expect("the pair was started with own_servers")
    }

    /// Places an order of a new customer.
    pub async fn place(&self, amount: i64, currency: &str) -> Order {
        self.api.place(Uuid::new_v4(), amount, currency).await.expect("an order can be placed")
    }

    /// Reads an order.
    pub async fn order(&self, id: Uuid) -> Order {
        self.api.order(id).await.expect("an order can be read")
    }

    /// Cancels an order.
    pub async fn cancel(&self, id: Uuid) -> Order {
        self.api.cancel(id).await.expect("an order can be cancelled")
    }

    /// Reads an order's payment, if there is one.
    pub async fn payment_of(&self, order: Uuid) -> Option<Payment> {
        self.api.payment_of(order).await.expect("a payment can be looked up")
    }

    /// Waits until an order has this status.
    pub async fn order_becomes(&self, id: Uuid, status: &str) -> Order {
        eventually(SETTLED_WITHIN, &format!("order {id} is {status}"), async || {
            let order = self.order(id).await;
            if order.status == status { Ok(order) } else { Err(order) }
        })
        .await
    }

    /// What checks the promise from outside.
    pub async fn checker(&self) -> Checker<'_> {
        let jetstream = self.nats.jetstream().await.expect("the broker answers");
        Checker { orders_db: &self.orders_db, payments_db: &self.payments_db, jetstream }
    }

    /// Waits until exactly these orders are there and have come to their end, as promised: by the tables
    /// and streams, by the word of the operator's auditor, and as clients see it.
    pub async fn all_is_well(&self, orders: &BTreeSet<Uuid>) -> Counts {
        let checker = self.checker().await;
        let counts = eventually(ALL_SETTLED_WITHIN, "everything comes to its end", async || {
            checker.check(orders).await.map_err(|error| vec![format!("{error:#}")])?
        })
        .await;
        let audited = audit(&self.orders_url, &self.payments_url, self.nats.url()).await;
        audited.unwrap_or_else(|reason| panic!("{reason:#}"));
        let asking = stream::iter(orders).map(|id| self.check_as_a_client(*id)).buffer_unordered(8);
        asking.try_collect::<()>().await.unwrap_or_else(|reason| panic!("{reason:#}"));
        counts
    }

    async fn check_as_a_client(&self, order: Uuid) -> anyhow::Result<()> {
        let (order, payment) = (self.api.order(order).await?, self.api.payment_of(order).await?);
        let is_its_end = have_come_to_their_end(&order.status, payment.as_ref().map(|payment| &*payment.status));
        let is_its_amount = payment.as_ref().is_none_or(|payment| payment.amount == order.total);
        ensure!(is_its_end && is_its_amount, "clients see {order:?} with {payment:?}");
        Ok(())
    }
}

impl PairBuilder {
    /// Gives both services a setting.
    pub fn setting(self, variable: &str, value: &str) -> Self {
        self.order_setting(variable, value).payment_setting(variable, value)
    }

    /// Gives order-service a setting.
    pub fn order_setting(mut self, variable: &str, value: &str) -> Self {
        self.order_settings.push((variable.to_owned(), value.to_owned()));
        self
    }

    /// Gives payment-service a setting.
    pub fn payment_setting(mut self, variable: &str, value: &str) -> Self {
        self.payment_settings.push((variable.to_owned(), value.to_owned()));
        self
    }

    /// The number of instances of each service.
    pub fn instances(mut self, orders: usize, payments: usize) -> Self {
        (self.orders, self.payments) = (orders, payments);
        self
    }

    /// Servers that no other test uses, to be stopped and frozen.
    pub fn own_servers(mut self) -> Self {
        self.own_servers = true;
        self
    }

    /// Databases that are there already: of order-service, and of payment-service. A setting may tell
    /// a service to go there by another way.
    pub fn databases(mut self, orders: &str, payments: &str) -> Self {
        self.databases = Some([orders.to_owned(), payments.to_owned()]);
        self
    }

    /// Starts the pair, and returns when it is ready.
    pub async fn start(self) -> Pair {
        self.try_start().await.unwrap_or_else(|reason| panic!("the pair does not start: {reason:?}"))
    }

    async fn try_start(self) -> anyhow::Result<Pair> {
        let own_postgres = if self.own_servers { Some(Postgres::start().await?) } else { None };
        let postgres = match &own_postgres {
            Some(own) => own,
            None => Postgres::shared().await?,
        };
        let [orders_url, payments_url] = match self.databases {
            Some(databases) => databases,
            None => [postgres.create_database("orders").await?, postgres.create_database("payments").await?],
        };
        let nats = if self.own_servers { Nats::start().await? } else { Nats::fresh().await? };

        let orders = start(self.orders, "order-service", &orders_url, &nats, &self.order_settings).await?;
        let payments = start(self.payments, "payment-service", &payments_url, &nats, &self.payment_settings).await?;
        for service in orders.iter().chain(&payments) {
            service.wait_until_ready(READY_WITHIN).await?;
        }
        let first = (orders.first().context("no order-service")?, payments.first().context("no payment-service")?);
        Ok(Pair {
            api: Api::new(first.0, first.1),
            orders_db: pool(&orders_url).await?,
            payments_db: pool(&payments_url).await?,
            orders,
            payments,
            orders_url,
            payments_url,
            nats,
            own_postgres,
        })
    }
}

async fn start(
    instances: usize,
    name: &str,
    database: &str,
    nats: &Nats,
    more: &[(String, String)],
) -> anyhow::Result<Vec<Service>> {
    let mut settings = vec![("DATABASE_URL", database), ("NATS_URL", nats.url())];
    settings.extend(more.iter().map(|(variable, value)| (variable.as_str(), value.as_str())));
    let mut services = Vec::new();
    for _ in 0..instances {
        services.push(Service::start(name, &settings).await?);
    }
    Ok(services)
}

async fn pool(url: &str) -> anyhow::Result<PgPool> {
    Ok(PgPoolOptions::new().max_connections(4).connect(url).await?)
}
