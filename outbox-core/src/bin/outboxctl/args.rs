//! The command line.

use std::num::NonZeroU32;
use std::time::Duration;

use clap::{Parser, Subcommand};
use outbox_core::config::{RetentionConfig, StreamConfig, duration};
use outbox_core::operator::{Moment, Operator, OperatorError, Really, Selection, State};
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;
use uuid::Uuid;

/// Shows how events flow and where they do not, and repairs it.
///
/// Whatever changes something only says what it would do, until it is given --yes; then it is recorded in
/// the table operator_actions.
#[derive(Debug, Parser)]
#[command(
    name = "outboxctl",
    version,
    after_help = "Exit codes: 0 done; 1 a problem was found, or something failed; 2 bad arguments."
)]
pub(crate) struct Args {
    /// The PostgreSQL database of the service to look at.
    #[arg(long, env, global = true, hide_env_values = true)]
    pub(crate) database_url: Option<String>,
    /// NATS with JetStream; several servers by commas.
    #[arg(long, env, global = true, hide_env_values = true, default_value = "nats://127.0.0.1:4222")]
    pub(crate) nats_url: String,
    /// The database of the service at the other end: for audit, and for show.
    #[arg(long, env, global = true, hide_env_values = true)]
    pub(crate) peer_database_url: Option<String>,
    /// Who acts, for the record [default: the user of this system].
    #[arg(long, env, global = true)]
    operator: Option<String>,
    /// Print JSON.
    #[arg(long, global = true)]
    pub(crate) json: bool,
    #[command(subcommand)]
    pub(crate) command: Command,
}

impl Args {
    pub(crate) fn who(&self) -> String {
        let user = || ["SUDO_USER", "USER", "LOGNAME"].iter().find_map(|name| std::env::var(name).ok());
        self.operator.clone().or_else(user).unwrap_or_else(|| "unknown".to_owned())
    }
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Flow at a glance; exit code 1 where something needs an operator.
    Status,
    /// Events, newest first.
    List(ListArgs),
    /// All that is known of an event, an aggregate or a request.
    Show {
        /// An event_id, an aggregate id or a correlation id.
        #[arg(value_name = "ID")]
        subject: String,
    },
    /// Let failed events be tried again, and the events that wait behind them.
    Requeue(RequeueArgs),
    /// Clear the leases of a worker that is known to be dead.
    Release {
        /// As `status` shows it.
        worker: String,
        #[command(flatten)]
        yes: Yes,
    },
    /// Publish events again, so that every consumer gets them once more.
    Replay(ReplayArgs),
    /// Remove published events that are old enough, as retention does.
    Purge(PurgeArgs),
    /// What the service's consumer gave up on.
    #[command(subcommand)]
    DeadLetters(LettersCommand),
    /// Compare all that two services have told each other; exit code 1 where something is lost or doubled.
    Audit(RetentionConfig),
    /// Publish all retained events into a stream that was lost, or lost some of them.
    Rebuild(RebuildArgs),
    /// Print the completions for a shell.
    Completions {
        /// The shell.
        shell: clap_complete::Shell,
    },
}

/// Without it, nothing is changed.
#[derive(Debug, Clone, Copy, clap::Args)]
pub(crate) struct Yes {
    /// Do it.
    #[arg(long)]
    yes: bool,
}

impl Yes {
    pub(crate) fn really(self) -> Really {
        if self.yes { Really::Yes } else { Really::DryRun }
    }
}

#[derive(Debug, clap::Args)]
pub(crate) struct ListArgs {
    /// Only those that stand there.
    #[arg(long)]
    pub(crate) state: Option<State>,
    /// Only those of this type.
    #[arg(long = "type", value_name = "TYPE")]
    pub(crate) event_type: Option<String>,
    /// Only those of this aggregate.
    #[arg(long, value_name = "ID")]
    pub(crate) aggregate: Option<Uuid>,
    #[command(flatten)]
    pub(crate) range: Range,
    /// Only those whose last error contains this.
    #[arg(long, value_name = "TEXT")]
    pub(crate) error: Option<String>,
    /// No more than so many.
    #[arg(long, default_value_t = 50, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) limit: u32,
}

/// When the events were appended: RFC 3339, or a duration ago such as `2h`.
#[derive(Debug, clap::Args)]
pub(crate) struct Range {
    /// Only those appended then or later: RFC 3339, or a duration ago such as 2h.
    #[arg(long, value_name = "TIME", value_parser = moment)]
    since: Option<Moment>,
    /// Only those appended before: RFC 3339, or a duration ago such as 2h.
    #[arg(long, value_name = "TIME", value_parser = moment)]
    until: Option<Moment>,
}

impl Range {
    /// By the clock of the database.
    pub(crate) async fn resolve(
        &self,
        operator: &Operator,
    ) -> Result<(Option<OffsetDateTime>, Option<OffsetDateTime>), OperatorError> {
        let resolve = async |moment: Option<Moment>| match moment {
            Some(moment) => operator.at(moment).await.map(Some),
            None => Ok(None),
        };
        Ok((resolve(self.since).await?, resolve(self.until).await?))
    }
}

#[derive(Debug, clap::Args)]
#[group(id = "which", required = true, multiple = true, args = ["ids", "aggregate", "event_type", "all_failed"])]
pub(crate) struct RequeueArgs {
    #[command(flatten)]
    pub(crate) these: These,
    /// All that are failed.
    #[arg(long, conflicts_with_all = ["ids", "aggregate", "event_type"])]
    all_failed: bool,
    #[command(flatten)]
    pub(crate) yes: Yes,
}

/// By id, or by what they have in common.
#[derive(Debug, clap::Args)]
#[group(skip)]
pub(crate) struct These {
    /// These, by event_id.
    #[arg(value_name = "EVENT_ID", conflicts_with_all = ["aggregate", "event_type"])]
    ids: Vec<Uuid>,
    /// Those of this aggregate.
    #[arg(long, value_name = "ID")]
    aggregate: Option<Uuid>,
    /// Those of this type.
    #[arg(long = "type", value_name = "TYPE")]
    event_type: Option<String>,
}

impl These {
    pub(crate) fn selection(&self) -> Selection {
        Selection {
            ids: named(&self.ids),
            aggregate: self.aggregate,
            event_type: self.event_type.clone(),
            ..Selection::default()
        }
    }
}

#[derive(Debug, clap::Args)]
#[group(id = "which", required = true, multiple = true, args = ["ids", "aggregate", "event_type", "since", "until"])]
pub(crate) struct ReplayArgs {
    /// These events.
    #[arg(value_name = "EVENT_ID", conflicts_with_all = ["aggregate", "event_type", "since", "until"])]
    ids: Vec<Uuid>,
    /// Those of this aggregate.
    #[arg(long, value_name = "ID")]
    aggregate: Option<Uuid>,
    /// Those of this type.
    #[arg(long = "type", value_name = "TYPE")]
    event_type: Option<String>,
    #[command(flatten)]
    range: Range,
    /// The most events a second.
    #[arg(long, value_name = "N", default_value = "500")]
    pub(crate) rate: NonZeroU32,
    /// Go on after this event: the last one of a replay that was broken off.
    #[arg(long, value_name = "EVENT_ID")]
    pub(crate) after: Option<Uuid>,
    #[command(flatten)]
    pub(crate) yes: Yes,
}

impl ReplayArgs {
    pub(crate) async fn selection(&self, operator: &Operator) -> Result<Selection, OperatorError> {
        let (since, until) = self.range.resolve(operator).await?;
        let event_type = self.event_type.clone();
        Ok(Selection { ids: named(&self.ids), aggregate: self.aggregate, event_type, since, until })
    }
}

#[derive(Debug, clap::Args)]
pub(crate) struct PurgeArgs {
    /// Only those published longer ago than this.
    #[arg(long, value_name = "AGE", default_value = "7d", value_parser = duration)]
    pub(crate) older_than: Duration,
    #[command(flatten)]
    pub(crate) yes: Yes,
}

#[derive(Debug, clap::Args)]
pub(crate) struct RebuildArgs {
    /// The most events a second [default: as fast as the stream takes them].
    #[arg(long, value_name = "N")]
    pub(crate) rate: Option<NonZeroU32>,
    #[command(flatten)]
    pub(crate) stream: StreamConfig,
    #[command(flatten)]
    pub(crate) yes: Yes,
}

#[derive(Debug, Subcommand)]
pub(crate) enum LettersCommand {
    /// Dead letters, aggregate by aggregate.
    List(LettersFilter),
    /// A dead letter with all that it says.
    Show {
        /// The dead letter's id, or its event's.
        id: Uuid,
    },
    /// Hand dead letters back to the consumer; those that wait behind them follow.
    #[command(after_help = BY_EITHER_ID)]
    Retry(LettersArgs),
    /// Give dead letters up: their aggregates go on without them.
    #[command(after_help = BY_EITHER_ID)]
    Discard(LettersArgs),
}

const BY_EITHER_ID: &str = "An id may be the event's or the dead letter's own.";

#[derive(Debug, clap::Args)]
pub(crate) struct LettersFilter {
    /// Those of this aggregate.
    #[arg(long, value_name = "ID")]
    aggregate: Option<Uuid>,
    /// Those of this type.
    #[arg(long = "type", value_name = "TYPE")]
    event_type: Option<String>,
}

impl LettersFilter {
    pub(crate) fn selection(&self) -> Selection {
        Selection { aggregate: self.aggregate, event_type: self.event_type.clone(), ..Selection::default() }
    }
}

#[derive(Debug, clap::Args)]
#[group(id = "which", required = true, multiple = true, args = ["ids", "aggregate", "event_type", "all"])]
pub(crate) struct LettersArgs {
    #[command(flatten)]
    pub(crate) these: These,
    /// All of them.
    #[arg(long, conflicts_with_all = ["ids", "aggregate", "event_type"])]
    all: bool,
    #[command(flatten)]
    pub(crate) yes: Yes,
}

fn named(ids: &[Uuid]) -> Option<Vec<Uuid>> {
    (!ids.is_empty()).then(|| ids.to_vec())
}

/// Reads RFC 3339, or a duration before now.
fn moment(text: &str) -> Result<Moment, String> {
    if let Ok(time) = OffsetDateTime::parse(text, &Rfc3339) {
        return Ok(Moment::At(time));
    }
    duration(text)
        .map(Moment::Ago)
        .map_err(|_| "neither a time such as 2026-01-31T12:00:00Z nor a duration ago such as 2h".to_owned())
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_makes_sense_to_its_parser() {
        Args::command().debug_assert();
    }

    #[test]
    fn a_time_is_rfc_3339_or_a_duration_ago() {
        assert_eq!(moment("2h"), Ok(Moment::Ago(Duration::from_secs(7200))));
        assert_eq!(moment("1970-01-01T00:00:00Z"), Ok(Moment::At(OffsetDateTime::UNIX_EPOCH)));
        assert_eq!(moment("1970-01-01T01:00:00+01:00"), Ok(Moment::At(OffsetDateTime::UNIX_EPOCH)));
        for wrong in ["", "yesterday", "2h ago", "-2h", "1970-01-01", "1970-01-01T00:00:00"] {
            assert!(moment(wrong).is_err(), "{wrong}");
        }
    }
}
