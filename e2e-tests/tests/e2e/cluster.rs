//! A broker of three servers that all hold the streams, as in production.

use std::time::Duration;

use async_nats::jetstream::Context;
use e2e_tests::{Checker, Nats, eventually};

use crate::faults::{count, unforgiving, while_orders_come};
use crate::http::SOON;

/// So long orders come while all servers are there, before and after each loss.
const QUIET: Duration = Duration::from_secs(1);

#[tokio::test]
async fn a_cluster_whose_leaders_die_under_load_loses_and_doubles_nothing() {
    let nodes = Nats::cluster(3).await.expect("a cluster starts");
    let urls: Vec<&str> = nodes.iter().map(Nats::url).collect();
    let pair = unforgiving().setting("NATS_URL", &urls.join(",")).setting("STREAM_REPLICAS", "3").start().await;

    let mut without_a_leader = Vec::new();
    let (mut placed, ()) = while_orders_come(&pair, async {
        for stream in ["ORDERS", "PAYMENTS"] {
            tokio::time::sleep(QUIET).await;
            let leader = leader_of(&nodes, stream).await;
            nodes[leader].stop_at_once().await.expect("a node can be killed");
            // Without it, and without anybody's help.
            let order = pair.place(100, "EUR").await;
            pair.order_becomes(order.id, "paid").await;
            without_a_leader.push(order.id);
            nodes[leader].start_again().await.expect("a node can be started again");
            eventually(3 * SOON, "all nodes are up to date", async || replicas_are_current(&nodes[0], stream).await)
                .await;
        }
        tokio::time::sleep(QUIET).await;
    })
    .await;

    placed.orders.extend(without_a_leader);
    let jetstream = nodes[0].jetstream().await.expect("the cluster answers");
    let checker = Checker { orders_db: &pair.orders_db, payments_db: &pair.payments_db, jetstream };
    eventually(3 * SOON, "everything comes to its end", async || {
        checker.check(&placed.orders).await.map_err(|error| vec![format!("{error:#}")])?
    })
    .await;
    for db in [&pair.orders_db, &pair.payments_db] {
        assert_eq!(count(db, "failed_at IS NOT NULL").await, 0);
    }
}

/// The node that leads a stream, by its number.
async fn leader_of(nodes: &[Nats], stream: &str) -> usize {
    let leader = eventually(SOON, "the stream has a leader", async || {
        let info = info(&nodes[0].jetstream().await.map_err(|error| error.to_string())?, stream).await?;
        info.cluster.and_then(|cluster| cluster.leader).ok_or_else(|| "it has none".to_owned())
    })
    .await;
    leader.strip_prefix("node-").and_then(|number| number.parse().ok()).expect("nodes are named by their numbers")
}

async fn replicas_are_current(node: &Nats, stream: &str) -> Result<(), String> {
    let info = info(&node.jetstream().await.map_err(|error| error.to_string())?, stream).await?;
    let replicas = info.cluster.map(|cluster| cluster.replicas).unwrap_or_default();
    let are_current = replicas.len() == 2 && replicas.iter().all(|replica| replica.current);
    if are_current { Ok(()) } else { Err(format!("{replicas:?}")) }
}

async fn info(jetstream: &Context, stream: &str) -> Result<async_nats::jetstream::stream::Info, String> {
    let mut stream = jetstream.get_stream(stream).await.map_err(|error| error.to_string())?;
    stream.info().await.cloned().map_err(|error| error.to_string())
}
