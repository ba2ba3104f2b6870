//! What a nemesis run did, and what it found.

use std::collections::BTreeMap;
use std::fmt::{self, Display, Formatter};
use std::path::PathBuf;
use std::time::Duration;

/// How many findings are shown: what is broken once may be so in every order.
const SHOWN: usize = 20;

/// What a run did, and what it found.
#[derive(Debug)]
pub struct Report {
    /// All that was random follows from it.
    pub seed: u64,
    /// How long there were faults.
    pub length: Duration,
    /// Orders that were answered with 201.
    pub orders: usize,
    /// Cancellations that were answered with 200.
    pub cancellations: usize,
    /// Requests of clients by the status of their answer; `none` where there was none.
    pub answers: BTreeMap<String, usize>,
    /// Faults by their kind.
    pub faults: BTreeMap<String, usize>,
    /// Events in both outboxes.
    pub events: usize,
    /// Messages in the streams beyond one of each event.
    pub published_again: usize,
    /// Deliveries of the broker beyond one of each message.
    pub delivered_again: u64,
    /// Requests to the gateway beyond one for each effect.
    pub asked_again: usize,
    /// How long after the last fault everything had come to its end.
    pub healed_after: Duration,
    /// What breaks the promise; nothing else does.
    pub findings: Vec<String>,
    /// Where the processes' logs are, and what happened when.
    pub logs: PathBuf,
}

/// `one 1, other 2`
pub(crate) fn listed(counts: &BTreeMap<String, usize>) -> String {
    let each: Vec<String> = counts.iter().map(|(name, count)| format!("{name} {count}")).collect();
    each.join(", ")
}

impl Display for Report {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        writeln!(f, "seed           {}", self.seed)?;
        writeln!(f, "faults         {} in {} s", self.faults.values().sum::<usize>(), self.length.as_secs())?;
        for (kind, count) in &self.faults {
            writeln!(f, "  {count:>11}  {kind}")?;
        }
        writeln!(f, "orders         {} placed, {} of them cancelled", self.orders, self.cancellations)?;
        writeln!(f, "answers        {}", listed(&self.answers))?;
        writeln!(f, "events         {}", self.events)?;
        writeln!(f, "duplicates     {} published again,", self.published_again)?;
        writeln!(f, "               {} delivered again by the broker,", self.delivered_again)?;
        writeln!(f, "               {} asked of the gateway again", self.asked_again)?;
        if self.findings.is_empty() {
            return write!(
                f,
                "result         healed after {:.1} s; lost 0, doubled 0",
                self.healed_after.as_secs_f32()
            );
        }
        writeln!(f, "result         {} findings; logs in {}", self.findings.len(), self.logs.display())?;
        for finding in self.findings.iter().take(SHOWN) {
            writeln!(f, "  {finding}")?;
        }
        if self.findings.len() > SHOWN {
            writeln!(f, "  and so on; all of them are in the log of the nemesis")?;
        }
        write!(f, "again with     cargo dev chaos --seed {} --for {}s", self.seed, self.length.as_secs())
    }
}
