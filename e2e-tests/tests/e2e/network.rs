//! Connections that the network drops in silence: open on both sides, and nothing passes any more.

use std::collections::BTreeSet;
use std::time::Duration;

use e2e_tests::{Api, Nats, Postgres, Proxy, Service, eventually};
use futures::future::join_all;
use uuid::Uuid;

use crate::fixture::SOON;

/// One instance of each service, each behind its own proxies.
struct Pair {
    orders: Service,
    payments: Service,
    to_postgres: Vec<Proxy>,
    to_nats: Vec<Proxy>,
    _nats: Nats,
}

impl Pair {
    async fn start() -> Self {
        let (postgres, nats) = (Postgres::shared().await.unwrap(), Nats::fresh().await.unwrap());
        let (mut to_postgres, mut to_nats, mut services) = (Vec::new(), Vec::new(), Vec::new());
        for name in ["order-service", "payment-service"] {
            let (database, proxy) = Proxy::of(&postgres.create_database(name).await.unwrap()).await.unwrap();
            to_postgres.push(proxy);
            let (broker, proxy) = Proxy::of(nats.url()).await.unwrap();
            to_nats.push(proxy);
            services.push(Service::start(name, &[("DATABASE_URL", &database), ("NATS_URL", &broker)]).await.unwrap());
        }
        for service in &services {
            service.wait_until_ready(SOON).await.unwrap();
        }
        let (payments, orders) = (services.pop().unwrap(), services.pop().unwrap());
        Self { orders, payments, to_postgres, to_nats, _nats: nats }
    }

    /// Loses connections in the middle of a stream of orders, and expects all of them to be paid.
    async fn all_orders_are_paid_though(&self, lost: &[Proxy]) {
        let api = Api::new(&self.orders, &self.payments);
        let clients = join_all((0..100).map(async |n| {
            tokio::time::sleep(Duration::from_millis(20 * n)).await;
            // One that is not answered may be there all the same; nobody asks for it again.
            tokio::time::timeout(Duration::from_secs(5), api.place(Uuid::new_v4(), 100, "EUR")).await.ok()?.ok()
        }));
        let network = async {
            tokio::time::sleep(Duration::from_secs(1)).await;
            lost.iter().for_each(Proxy::lose);
        };
        let (orders, ()) = futures::join!(clients, network);
        let mut left: BTreeSet<Uuid> = orders.into_iter().flatten().map(|order| order.id).collect();
        assert!(left.len() >= 50, "{} orders were answered", left.len());
        eventually(2 * SOON, "all orders are paid", async || {
            for id in left.clone() {
                if api.order(id).await.is_ok_and(|order| order.status == "paid") {
                    left.remove(&id);
                }
            }
            if left.is_empty() { Ok(()) } else { Err(left.len()) }
        })
        .await;
    }
}

#[tokio::test]
async fn connections_to_the_database_that_are_lost_in_silence_are_replaced() {
    let pair = Pair::start().await;
    pair.all_orders_are_paid_though(&pair.to_postgres).await;
}

#[tokio::test]
async fn connections_to_the_broker_that_are_lost_in_silence_are_replaced() {
    let pair = Pair::start().await;
    pair.all_orders_are_paid_though(&pair.to_nats).await;
}
