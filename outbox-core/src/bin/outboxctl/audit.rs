//! `audit`, and what it has to know of the two services.

use std::collections::BTreeMap;
use std::fmt::Write;

use outbox_core::Broker;
use outbox_core::config::RetentionConfig;
use outbox_core::operator::{Audit, BusinessTable, Kind, Operator, OperatorError, Side};

use crate::output::{Answer, Table, bad, good, heading, warning};

/// All that is known here of orders and payments. A service of your own is one entry more.
const BUSINESS_TABLES: [BusinessTable; 2] = [
    BusinessTable {
        source: "/order-service",
        table: "orders",
        aggregate_type: "order",
        id: "id",
        version: "version",
        created_at: "created_at",
        updated_at: "updated_at",
        one_for_each: None,
    },
    BusinessTable {
        source: "/payment-service",
        table: "payments",
        aggregate_type: "payment",
        id: "id",
        version: "version",
        created_at: "created_at",
        updated_at: "updated_at",
        one_for_each: Some("order_id"),
    },
];

/// So many findings of a kind are printed; JSON has all of them.
const SHOWN: usize = 50;

pub(crate) async fn audit(
    operator: &Operator,
    peer: &Operator,
    broker: &Broker,
    retention: &RetentionConfig,
) -> Result<Answer, OperatorError> {
    let side = |operator| Side { operator, outbox_retention: retention.relay_retention };
    let audit = outbox_core::operator::audit([side(operator), side(peer)], &BUSINESS_TABLES, broker).await?;
    let has_problem = !audit.findings.is_empty();
    Ok(Answer::new(&audit, describe(&audit)).with_problem(has_problem))
}

fn describe(audit: &Audit) -> String {
    let mut text = String::new();
    for (what, how_many) in &audit.checked {
        let _ = writeln!(text, "{what}: {how_many}");
    }
    for note in &audit.notes {
        text += &warning(note);
    }
    if audit.findings.is_empty() {
        return text + &good("nothing is lost, nothing is doubled");
    }
    let mut by_kind: BTreeMap<Kind, Vec<_>> = BTreeMap::new();
    for finding in &audit.findings {
        by_kind.entry(finding.kind).or_default().push(finding);
    }
    for (kind, findings) in &by_kind {
        text.push('\n');
        text += &heading(format!("{}: {}", kind.as_str(), findings.len()));
        let shown = &findings[..findings.len().min(SHOWN)];
        text += &Table::of(["service", "id", "what"], shown, |finding| {
            [(&finding.service).into(), (&finding.id).into(), (&finding.detail).into()]
        })
        .to_string();
        if findings.len() > SHOWN {
            let _ = writeln!(text, "and {} more (--json has all)", findings.len() - SHOWN);
        }
    }
    text.push('\n');
    text + &bad(format!("{} findings", audit.findings.len()))
}
