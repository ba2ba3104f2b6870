//! Whose fault is it: the event's, or that of what all handlers depend on?

use std::collections::HashMap;

use uuid::Uuid;

/// Tells an outage of what handlers depend on from events that fail by themselves. A failure counts
/// against an event only if another event was answered beside it, or since it failed before: while
/// nobody is answered, it is nobody's fault.
#[derive(Debug, Default)]
pub(crate) struct Outage {
    answers: u64,
    /// For each failing event, the answers there had been when it last failed.
    failing: HashMap<Uuid, u64>,
    /// Batches in a row in which nobody was answered.
    pub(crate) batches: u32,
}

impl Outage {
    /// Does a failure of this event count against it?
    pub(crate) fn counts(&self, event: Uuid, is_another_answered: bool) -> bool {
        is_another_answered || self.failing.get(&event).is_some_and(|answers| *answers < self.answers)
    }

    /// Takes note of a batch.
    pub(crate) fn record(&mut self, answered: &[Uuid], failed: &[Uuid]) {
        self.answers += answered.len() as u64;
        for event in answered {
            self.failing.remove(event);
        }
        self.failing.extend(failed.iter().map(|event| (*event, self.answers)));
        match (answered, failed) {
            ([], []) => {}
            ([], _) => self.batches = self.batches.saturating_add(1),
            _ => self.batches = 0,
        }
    }

    /// It is a dead letter: it fails no more.
    pub(crate) fn forget(&mut self, event: Uuid) {
        self.failing.remove(&event);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn while_nobody_is_answered_no_failure_counts() {
        let mut outage = Outage::default();
        let event = Uuid::now_v7();
        for batches in 1..100 {
            assert!(!outage.counts(event, false));
            outage.record(&[], &[event]);
            assert_eq!(outage.batches, batches);
        }
    }

    #[test]
    fn a_failure_counts_once_others_are_answered() {
        let mut outage = Outage::default();
        let (poison, other) = (Uuid::now_v7(), Uuid::now_v7());
        assert!(outage.counts(poison, true), "answered beside it");
        outage.record(&[], &[poison]);
        outage.record(&[other], &[]);
        assert!(outage.counts(poison, false), "answered since it failed");
        outage.record(&[], &[poison]);
        assert!(!outage.counts(poison, false), "not again until the next answer");
    }
}
