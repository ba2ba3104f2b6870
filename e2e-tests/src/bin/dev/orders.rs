//! A handful of orders, one for each way that an order can go.

use std::time::{Duration, Instant};

use anstream::println;
use e2e_tests::{Api, Order};
use uuid::Uuid;

use crate::journey::{Journey, Watch};
use crate::screen::{BOLD, GREEN, PLAIN, RED};

const SETTLED_WITHIN: Duration = Duration::from_secs(30);

/// An order to place, and the states it is expected to go through.
struct Plan {
    what: &'static str,
    amount: i64,
    currency: &'static str,
    becomes: &'static str,
    once_cancelled: Option<&'static str>,
}

const PLANS: [Plan; 5] = [
    Plan { what: "to be paid", amount: 12_500, currency: "EUR", becomes: "paid", once_cancelled: None },
    Plan {
        what: "to be paid in another currency",
        amount: 999,
        currency: "USD",
        becomes: "paid",
        once_cancelled: None,
    },
    Plan {
        what: "to be declined, as it ends in 13",
        amount: 4_213,
        currency: "EUR",
        becomes: "declined",
        once_cancelled: None,
    },
    Plan {
        what: "to be paid, cancelled and refunded",
        amount: 8_000,
        currency: "EUR",
        becomes: "paid",
        once_cancelled: Some("refunded"),
    },
    Plan {
        what: "a large one, to be paid",
        amount: 129_900_000,
        currency: "GBP",
        becomes: "paid",
        once_cancelled: None,
    },
];

/// Places one order after the other, shows their paths, and returns how many did not reach the
/// expected state.
pub async fn place_all(api: &Api, watch: &mut Watch) -> usize {
    let mut astray = 0;
    for plan in &PLANS {
        let began = Instant::now();
        match place_order(plan, api, watch).await {
            Ok(()) => println!("{:>14}{GREEN}✓ {} after {} ms{PLAIN}", "", plan.end(), began.elapsed().as_millis()),
            Err(reason) => {
                println!("{:>14}{RED}✗ {reason:#}{PLAIN}", "");
                astray += 1;
            }
        }
    }
    astray
}

async fn place_order(plan: &Plan, api: &Api, watch: &mut Watch) -> anyhow::Result<()> {
    let order = api.place(Uuid::new_v4(), plan.amount, plan.currency).await?;
    let mut journey = Journey::begin(&order, &format!("{}, {}", money(&order), plan.what))?;
    watch.follow(&mut journey, plan.becomes, SETTLED_WITHIN).await?;
    if let Some(end) = plan.once_cancelled {
        println!("{:>14}{BOLD}cancelled by its customer{PLAIN}", "");
        api.cancel(order.id).await?;
        watch.follow(&mut journey, end, SETTLED_WITHIN).await?;
    }
    Ok(())
}

impl Plan {
    fn end(&self) -> &str {
        self.once_cancelled.unwrap_or(self.becomes)
    }
}

fn money(order: &Order) -> String {
    format!("{}.{:02} {}", order.total.amount / 100, order.total.amount % 100, order.total.currency)
}
