//! `requeue`, `release` and `purge`.

use std::fmt::Write;

use outbox_core::operator::{Operator, OperatorError, Really, Repaired};
use serde_json::json;
use tokio_util::sync::CancellationToken;

use crate::args::{PurgeArgs, RequeueArgs};
use crate::output::{Answer, bad, events, not_done, scope};
use crate::resend::Meter;

pub(crate) async fn requeue(operator: &Operator, args: &RequeueArgs) -> Result<Answer, OperatorError> {
    let repaired = operator.requeue(&args.these.selection(), args.yes.really()).await?;
    Ok(answer("requeue", "requeued", &repaired, args.yes.really()))
}

pub(crate) async fn release(operator: &Operator, worker: &str, really: Really) -> Result<Answer, OperatorError> {
    let repaired = operator.release(worker, really).await?;
    Ok(answer("release", "released", &repaired, really))
}

fn answer(what: &str, done: &str, repaired: &Repaired, really: Really) -> Answer {
    let count = events(repaired.scope.total.events);
    let mut text = match really {
        Really::Yes => format!("{done} {count}"),
        Really::DryRun => format!("would {what} {count}"),
    };
    if repaired.followers > 0 {
        let are_due = if really == Really::Yes { "due again" } else { "to be due again" };
        let _ = write!(text, "; behind, {} {are_due}", events(repaired.followers as i64));
    }
    text.push('\n');
    text += &scope(&repaired.scope);
    for id in &repaired.refused {
        text += &bad(format!("{id} is not failed, or not there"));
    }
    if really == Really::DryRun {
        text += &not_done(repaired.scope.total.events);
    }
    let json = json!({"what": what, "dry_run": really == Really::DryRun, "result": repaired});
    Answer::new(&json, text).with_problem(!repaired.refused.is_empty())
}

pub(crate) async fn purge(
    operator: &Operator,
    args: &PurgeArgs,
    stop: &CancellationToken,
) -> Result<Answer, OperatorError> {
    if args.yes.really() == Really::DryRun {
        let purgeable = operator.purgeable(args.older_than).await?;
        let text = format!("would remove {}\n", events(purgeable.total.events))
            + &scope(&purgeable)
            + &not_done(purgeable.total.events);
        return Ok(Answer::new(&json!({"what": "purge", "dry_run": true, "result": {"scope": purgeable}}), text));
    }
    let mut meter = Meter::new("removed");
    let removed = operator.purge(args.older_than, stop, |removed| meter.show(removed as i64, None)).await?;
    let mut text = format!("removed {}\n", events(removed as i64));
    if stop.is_cancelled() {
        text += &bad("stopped before its end");
    }
    let json = json!({"what": "purge", "dry_run": false, "result": {"removed": removed}});
    Ok(Answer::new(&json, text).with_problem(stop.is_cancelled()))
}
