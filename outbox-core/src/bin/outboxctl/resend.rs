//! `replay` and `rebuild`.

use std::io::{IsTerminal, Write};
use std::num::NonZeroU32;
use std::time::{Duration, Instant};

use outbox_core::operator::{
    Operator, OperatorError, Progress, Really, Resent, Scope, Selection, await_connection, stream_status,
};
use outbox_core::{Broker, BrokerError, Stream};
use serde_json::json;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::args::{RebuildArgs, ReplayArgs};
use crate::output::{Answer, bad, events, not_done, scope, warning};

/// How long to wait for the ack of one event.
const PUBLISH_TIMEOUT: Duration = Duration::from_secs(5);

/// How often progress is shown where nobody watches it move.
const SHOWN_EVERY: Duration = Duration::from_secs(5);

pub(crate) async fn replay(
    operator: &Operator,
    broker: Broker,
    args: &ReplayArgs,
    stop: &CancellationToken,
) -> Result<Answer, OperatorError> {
    let selection = args.selection(operator).await?;
    let refused = operator.not_published(&selection).await?;
    let answer = if args.yes.really() == Really::DryRun {
        let chosen = operator.published(&selection, args.after).await?;
        let text = format!("would publish {} again, {} a second\n", events(chosen.total.events), args.rate);
        would("replay", &chosen, &refused, text, chosen.total.events)
    } else {
        await_connection(&broker).await?;
        let stream = Stream::existing(broker, operator.source().await?, PUBLISH_TIMEOUT);
        let mut meter = Meter::new("published again");
        let progress = |progress: Progress| meter.show(progress.sent as i64, Some(progress.of));
        let resent = operator.replay(&stream, &selection, args.after, args.rate.get(), stop, progress).await?;
        let last = resent.last.or(args.after);
        let go_on = last.map_or_else(
            || "it begins anew with the same arguments".to_owned(),
            |last| format!("it goes on with the same arguments and --after {last}"),
        );
        done("replay", &resent, &refused, format!("published {} again\n", events(resent.sent as i64)), &go_on)
    };
    Ok(answer.with_problem(!refused.is_empty()))
}

pub(crate) async fn rebuild(
    operator: &Operator,
    broker: Broker,
    args: &RebuildArgs,
    stop: &CancellationToken,
) -> Result<Answer, OperatorError> {
    await_connection(&broker).await?;
    let stream = Stream::new(broker, operator.source().await?, args.stream.clone(), PUBLISH_TIMEOUT);
    if args.yes.really() == Really::DryRun {
        let chosen = operator.published(&Selection::default(), None).await?;
        let missing = operator.missing_in_stream(&stream).await?;
        let holds = match stream_status(stream.broker(), &stream.name().name).await {
            Ok(status) => format!("stream {} holds {} messages", status.name, status.messages),
            Err(BrokerError::NoStream(name)) => format!("stream {name} does not exist, and would be made"),
            Err(error) => return Err(error.into()),
        };
        let retained = events(chosen.total.events);
        let text = format!("{holds}\nwould publish the {missing} of {retained} retained that it does not hold\n");
        return Ok(would("rebuild", &chosen, &[], text, missing as i64));
    }
    let mut meter = Meter::new("published");
    let progress = |progress: Progress| meter.show(progress.sent as i64, Some(progress.of));
    let resent = operator.rebuild(&stream, args.rate.map(NonZeroU32::get), stop, progress).await?;
    let text = format!("published {}\n", events(resent.sent as i64));
    Ok(done("rebuild", &resent, &[], text, "run it again: what the stream holds by then is not sent again"))
}

fn would(what: &str, chosen: &Scope, refused: &[Uuid], text: String, count: i64) -> Answer {
    let json = json!({"what": what, "dry_run": true, "result": {"scope": chosen, "refused": refused}});
    Answer::new(&json, text + &scope(chosen) + &described(refused) + &not_done(count))
}

fn done(what: &str, resent: &Resent, refused: &[Uuid], mut text: String, go_on: &str) -> Answer {
    text += &described(refused);
    if let Some(reason) = &resent.broken_off {
        text += &bad(format!("broken off: {reason}"));
        text += &warning(go_on);
    }
    let json = json!({"what": what, "dry_run": false, "result": {"resent": resent, "refused": refused}});
    Answer::new(&json, text).with_problem(resent.broken_off.is_some())
}

fn described(refused: &[Uuid]) -> String {
    refused.iter().map(|id| bad(format!("{id} is not published, or not there"))).collect()
}

/// Progress, for people only, on standard error: over and over in one line of a terminal, and elsewhere
/// a line from time to time.
pub(crate) struct Meter {
    done: &'static str,
    is_terminal: bool,
    shown_at: Instant,
}

impl Meter {
    pub(crate) fn new(done: &'static str) -> Self {
        Self { done, is_terminal: std::io::stderr().is_terminal(), shown_at: Instant::now() }
    }

    pub(crate) fn show(&mut self, count: i64, of: Option<i64>) {
        let of = of.map(|of| format!(" of {of}")).unwrap_or_default();
        let line = format!("{} {count}{of}", self.done);
        let mut out = std::io::stderr();
        // Progress that cannot be shown is no reason to stop.
        let _ = if self.is_terminal {
            write!(out, "\r{line}")
        } else if self.shown_at.elapsed() > SHOWN_EVERY {
            self.shown_at = Instant::now();
            writeln!(out, "{line}")
        } else {
            Ok(())
        };
    }
}

impl Drop for Meter {
    fn drop(&mut self) {
        if self.is_terminal {
            let _ = writeln!(std::io::stderr());
        }
    }
}
