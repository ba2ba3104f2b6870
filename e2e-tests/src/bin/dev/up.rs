//! The whole pair, a few orders through it, and then everything stays until Ctrl-C.

use std::time::Duration;

use anstream::println;
use anyhow::{bail, ensure};
use e2e_tests::{Api, Nats, Postgres, Service, free_port, is_free, program};
use tokio::signal::unix::{Signal, SignalKind, signal};
use uuid::Uuid;

use crate::journey::Watch;
use crate::orders;
use crate::screen::{BOLD, CYAN, DIM, GREEN, PLAIN, YELLOW, step};

const READY_WITHIN: Duration = Duration::from_secs(60);
const STOPPED_WITHIN: Duration = Duration::from_secs(15);

/// Brings everything up and places the orders; then it ends, if that is asked for, or stays until a
/// signal.
pub async fn up(once: bool) -> anyhow::Result<()> {
    let mut stop = Stop::listen()?;
    let stack = tokio::select! {
        stack = Stack::start() => stack?,
        () = stop.told() => bail!("stopped before everything was up"),
    };
    let astray = tokio::select! {
        astray = stack.place_orders() => astray?,
        died = stack.service_that_died() => bail!(died),
        () = stop.told() => bail!("stopped before the orders were settled"),
    };
    if !once {
        stack.show_addresses();
        tokio::select! {
            died = stack.service_that_died() => bail!(died),
            () = stop.told() => println!("\n{DIM}stopping{PLAIN}"),
        }
    }
    stack.stop().await?;
    ensure!(!once || astray == 0, "{astray} orders did not reach the expected state");
    Ok(())
}

/// Everything that runs.
struct Stack {
    // Before the servers they use, because fields are dropped in this order.
    orders: Service,
    payments: Service,
    nats: Nats,
    postgres: Postgres,
}

impl Stack {
    async fn start() -> anyhow::Result<Self> {
        let postgres = step("PostgreSQL", Postgres::get()).await?;
        let nats = step("NATS JetStream", Nats::get()).await?;
        program("order-service").await?;
        let (orders, payments) = step("order-service and payment-service", async {
            let (orders, payments) =
                (postgres.ensure_database("orders").await?, postgres.ensure_database("payments").await?);
            let orders = start_service("order-service", 8080, 9080, &orders, &nats).await?;
            let payments = start_service("payment-service", 8081, 9081, &payments, &nats).await?;
            orders.wait_until_ready(READY_WITHIN).await?;
            payments.wait_until_ready(READY_WITHIN).await?;
            Ok((orders, payments))
        })
        .await?;
        Ok(Self { orders, payments, nats, postgres })
    }

    async fn place_orders(&self) -> anyhow::Result<usize> {
        let (orders, payments) = (self.postgres.url("orders"), self.postgres.url("payments"));
        let mut watch = Watch::open(&orders, &payments, &self.nats).await?;
        Ok(orders::place_all(&Api::new(&self.orders, &self.payments), &mut watch).await)
    }

    /// Returns when a service ends that should not, and says which and why.
    async fn service_that_died(&self) -> String {
        let (service, status) = tokio::select! {
            status = self.orders.wait_for_end() => (&self.orders, status),
            status = self.payments.wait_for_end() => (&self.payments, status),
        };
        match status {
            Ok(status) => format!("{} ended with {status}\n{}", service.name(), service.last_words()),
            Err(reason) => format!("{} cannot be watched: {reason:#}", service.name()),
        }
    }

    async fn stop(self) -> anyhow::Result<()> {
        for service in [&self.orders, &self.payments] {
            service.terminate(STOPPED_WITHIN).await?;
        }
        Ok(())
    }

    fn show_addresses(&self) {
        let (orders, payments) = (self.orders.url("/orders"), self.payments.url("/payments"));
        let rows = [
            ("order-service", format!("{orders:<34}health {}", self.orders.admin_url("/health/ready"))),
            ("payment-service", format!("{payments:<34}health {}", self.payments.admin_url("/health/ready"))),
            ("PostgreSQL", format!("psql {}", self.postgres.url("orders"))),
            ("", format!("psql {}", self.postgres.url("payments"))),
            ("NATS", format!("nats --server {} stream ls", self.nats.url())),
            ("logs", format!("tail -f {} {}", self.orders.log_path().display(), self.payments.log_path().display())),
        ];
        println!("\n{GREEN}Everything is up.{PLAIN} Ctrl-C stops it and leaves nothing behind.\n");
        for (name, text) in rows {
            println!("  {CYAN}{name:<17}{PLAIN}{text}");
        }
        let customer = Uuid::new_v4();
        println!("\n{BOLD}Place an order, look at it, cancel it, see its payment:{PLAIN}\n");
        println!("  curl -i {orders} -H 'content-type: application/json' \\");
        println!(r#"    -d '{{"customer_id": "{customer}", "total": {{"amount": 12500, "currency": "EUR"}}}}'"#);
        println!("  curl '{orders}?customer_id={customer}'");
        println!("  curl -X POST {orders}/ORDER_ID/cancel");
        println!("  curl '{payments}?order_id=ORDER_ID'");
        println!("\n{BOLD}Look at it as an operator does (docs/runbook.md):{PLAIN}\n");
        println!("  export DATABASE_URL={}", self.postgres.url("orders"));
        println!("  export PEER_DATABASE_URL={}", self.postgres.url("payments"));
        println!("  export NATS_URL={}", self.nats.url());
        println!("  alias outboxctl='cargo run --quiet --package outbox-core --bin outboxctl --'");
        println!("  outboxctl status");
    }
}

async fn start_service(name: &str, http: u16, admin: u16, database: &str, nats: &Nats) -> anyhow::Result<Service> {
    let settings = [
        ("DATABASE_URL", database),
        ("NATS_URL", nats.url()),
        ("HTTP_ADDR", &address(name, http)),
        ("ADMIN_ADDR", &address(name, admin)),
    ];
    Service::start(name, &settings).await
}

/// The documented address, or another one where that is taken.
fn address(service: &str, documented: u16) -> String {
    let mut port = documented;
    if !is_free(documented) {
        port = free_port();
        println!("  {YELLOW}port {documented} is taken: {service} uses {port} instead{PLAIN}");
    }
    format!("127.0.0.1:{port}")
}

/// The signals that end the run.
struct Stop {
    interrupt: Signal,
    terminate: Signal,
    hang_up: Signal,
}

impl Stop {
    fn listen() -> std::io::Result<Self> {
        Ok(Self {
            interrupt: signal(SignalKind::interrupt())?,
            terminate: signal(SignalKind::terminate())?,
            hang_up: signal(SignalKind::hangup())?,
        })
    }

    async fn told(&mut self) {
        tokio::select! {
            _ = self.interrupt.recv() => {}
            _ = self.terminate.recv() => {}
            _ = self.hang_up.recv() => {}
        }
    }
}
