//! `replay` and `rebuild`.

use std::io::{IsTerminal, Write};
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
    let chosen = operator.published(&selection).await?;
    let refused = operator.not_published(&selection).await?;
    if args.yes.really() == Really::DryRun {
        let text = format!("would publish {} again, {} a second\n", events(chosen.total.events), args.rate);
        return Ok(answer("replay", &chosen, &refused, None, text));
    }
    await_connection(&broker).await?;
    let stream = Stream::existing(broker, operator.source().await?, PUBLISH_TIMEOUT);
    let mut meter = Meter::new("published again");
    let progress = |progress: Progress| meter.show(progress.sent as i64, progress.of);
    let resent = operator.replay(&stream, &selection, args.after, args.rate.get(), stop, progress).await?;
    let mut text = format!("published {} again\n", events(resent.sent as i64));
    if let Some(reason) = &resent.broken_off {
        text += &bad(format!("broken off: {reason}"));
        if let Some(last) = resent.last.or(args.after) {
            text += &warning(format!("it goes on with the same arguments and --after {last}"));
        }
    }
    Ok(answer("replay", &chosen, &refused, Some(&resent), text))
}

pub(crate) async fn rebuild(
    operator: &Operator,
    broker: Broker,
    args: &RebuildArgs,
    stop: &CancellationToken,
) -> Result<Answer, OperatorError> {
    let chosen = operator.published(&Selection::default()).await?;
    await_connection(&broker).await?;
    let stream = Stream::new(broker, operator.source().await?, args.stream.clone(), PUBLISH_TIMEOUT);
    if args.yes.really() == Really::DryRun {
        let missing = operator.missing_in_stream(&stream).await?;
        let holds = match stream_status(stream.broker(), &stream.name().name).await {
            Ok(status) => format!("stream {} holds {} messages", status.name, status.messages),
            Err(BrokerError::NoStream(name)) => format!("stream {name} does not exist, and would be made"),
            Err(error) => return Err(error.into()),
        };
        let retained = events(chosen.total.events);
        let text = format!("{holds}\nwould publish the {missing} of {retained} retained that it does not hold\n");
        return Ok(answer("rebuild", &chosen, &[], None, text));
    }
    let mut meter = Meter::new("published");
    let progress = |progress: Progress| meter.show(progress.sent as i64, progress.of);
    let rate = args.rate.map(std::num::NonZeroU32::get);
    let resent = operator.rebuild(&stream, rate, stop, progress).await?;
    let mut text = format!("published {}\n", events(resent.sent as i64));
    if let Some(reason) = &resent.broken_off {
        text += &bad(format!("broken off: {reason}"));
        text += &warning("run it again: what the stream holds by then is not sent again");
    }
    Ok(answer("rebuild", &chosen, &[], Some(&resent), text))
}

fn answer(what: &str, chosen: &Scope, refused: &[Uuid], resent: Option<&Resent>, mut text: String) -> Answer {
    text += &scope(chosen);
    for id in refused {
        text += &bad(format!("{id} is not published, or not there"));
    }
    if resent.is_none() {
        text += &not_done();
    }
    let is_broken_off = resent.is_some_and(|resent| resent.broken_off.is_some());
    let json = json!({
        "what": what, "dry_run": resent.is_none(),
        "result": {"scope": chosen, "refused": refused, "resent": resent},
    });
    Answer::new(&json, text).with_problem(is_broken_off || !refused.is_empty())
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

    pub(crate) fn show(&mut self, count: i64, of: i64) {
        let line = format!("{} {count} of {of}", self.done);
        let mut out = std::io::stderr();
        // Progress that cannot be shown is no reason to stop.
        let _ = if self.is_terminal {
            write!(out, "\r{line}{}", if count == of { "\n" } else { "" })
        } else if self.shown_at.elapsed() > SHOWN_EVERY {
            self.shown_at = Instant::now();
            writeln!(out, "{line}")
        } else {
            Ok(())
        };
    }
}
