//! The relay's steps: claim, publish, ack, then mark or give back.

use std::collections::{BTreeMap, BTreeSet};

use crate::protocol::{Action, Delivery, Event, Lease, Lost, Protocol, Rule, State};

/// What a relay has in hand: nothing between two claims, nor after a crash.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Relay {
    pub claimed: BTreeMap<Event, Progress>,
    pub lease: Option<Lease>,
}

/// How far a relay has come with an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Progress {
    Claimed,
    /// On its way, and lost if the relay dies or gives up now. That it is stored all the same is
    /// another run: one in which it was stored in time or, where it comes very late, is replayed.
    Sent,
    Acked,
    NotAcked,
}

impl Protocol {
    pub fn relay_actions(&self, state: &State, n: usize, actions: &mut Vec<Action>) {
        let relay = &state.relays[n];
        if relay.claimed.is_empty() {
            actions.extend(self.claims(state).map(|events| Action::Claim(n, events)));
            return;
        }
        let mut is_publishing = false;
        for (&event, &progress) in &relay.claimed {
            if progress == Progress::Claimed && self.may_publish(relay, event) {
                actions.push(Action::Publish(n, event));
                is_publishing = true;
            }
            if progress == Progress::Sent {
                actions.push(Action::Ack(n, event));
                actions.extend([Lost::TheMessage, Lost::TheAck].map(|lost| Action::NoAck(n, event, lost)));
                is_publishing = true;
            }
        }
        let may_mark = |(event, progress): (&Event, &Progress)| match progress {
            Progress::Acked => !is_publishing,
            early => self.is_marked_early(*early) && !state.outbox[event].is_published,
        };
        if relay.claimed.iter().any(may_mark) {
            actions.push(Action::Mark(n));
        } else if !is_publishing {
            actions.push(Action::GiveBack(n));
        }
        actions.push(Action::CrashRelay(n));
    }

    /// What one claim may take: any of the free events. How many that are, which are not yet due, and
    /// which another claim has locked at this moment, so that they are skipped, is left to chance.
    fn claims(&self, state: &State) -> impl Iterator<Item = Vec<Event>> {
        let has_no_lease = |row: &Delivery| row.lease.is_none_or(|lease| lease.has_run_out);
        let is_free = |row: &Delivery| !row.is_published && (has_no_lease(row) || !self.keeps(Rule::Lease));
        let free = state.outbox.iter().filter(|(_, row)| is_free(row)).map(|(event, _)| *event);
        subsets(free.collect()).filter(|events| !self.keeps(Rule::ClaimInOrder) || is_in_order(state, events))
    }

    /// Leases these events, under an id that nobody else has.
    pub fn claim(&self, state: &mut State, n: usize, events: &[Event]) {
        let on_rows = state.outbox.values().filter_map(|row| row.lease);
        let in_hands = state.relays.iter().filter_map(|relay| relay.lease);
        let used: BTreeSet<u8> = on_rows.chain(in_hands).map(|lease| lease.id).collect();
        let id = (0..).find(|id| !used.contains(id));
        let lease = id.map(|id| Lease { id, has_run_out: false });
        for event in events {
            state.outbox.insert(*event, Delivery { is_published: false, lease });
        }
        let claimed = events.iter().map(|event| (*event, Progress::Claimed)).collect();
        state.relays[n] = Relay { claimed, lease };
    }

    fn may_publish(&self, relay: &Relay, event: Event) -> bool {
        let mut earlier = relay.claimed.iter().filter(|(other, _)| other.is_before(event));
        earlier.all(|(_, progress)| match progress {
            Progress::Claimed => false,
            Progress::Acked => true,
            Progress::Sent | Progress::NotAcked => !self.keeps(Rule::AwaitEachAck),
        })
    }

    pub fn publish(&self, state: &mut State, n: usize, event: Event) {
        state.relays[n].claimed.insert(event, Progress::Sent);
    }

    pub fn ack(&self, state: &mut State, n: usize, event: Event) {
        state.relays[n].claimed.insert(event, Progress::Acked);
        state.store(event);
    }

    pub fn no_ack(&self, state: &mut State, n: usize, event: Event, lost: Lost) {
        state.relays[n].claimed.insert(event, Progress::NotAcked);
        if lost == Lost::TheAck {
            state.store(event);
        }
    }

    /// Makes what was acked published.
    pub fn mark(&self, state: &mut State, n: usize) {
        let is_done = |progress| progress == Progress::Acked || self.is_marked_early(progress);
        self.settle(state, n, is_done, |row| *row = Delivery { is_published: true, lease: None });
        let relay = &mut state.relays[n];
        relay.claimed.retain(|_, progress| *progress != Progress::Acked);
        if relay.claimed.is_empty() {
            *relay = Relay::default();
        }
    }

    fn is_marked_early(&self, progress: Progress) -> bool {
        progress == Progress::Sent && !self.keeps(Rule::MarkAfterAck)
    }

    /// Makes what was not acked free for the next claim.
    pub fn give_back(&self, state: &mut State, n: usize) {
        self.settle(state, n, |_| true, |row| row.lease = None);
        state.relays[n] = Relay::default();
    }

    /// Changes the rows of these events: those that are still under this relay's lease.
    fn settle(&self, state: &mut State, n: usize, which: impl Fn(Progress) -> bool, change: impl Fn(&mut Delivery)) {
        let relay = &state.relays[n];
        for (event, _) in relay.claimed.iter().filter(|(_, progress)| which(**progress)) {
            if let Some(row) = state.outbox.get_mut(event)
                && (row.lease == relay.lease || !self.keeps(Rule::Fence))
            {
                change(row);
            }
        }
    }

    /// The ids of the leases that have not run out.
    pub fn running_leases(&self, state: &State) -> impl Iterator<Item = u8> {
        let leases = state.outbox.values().filter_map(|row| row.lease).filter(|lease| !lease.has_run_out);
        leases.map(|lease| lease.id).collect::<BTreeSet<u8>>().into_iter()
    }

    pub fn lease_runs_out(&self, state: &mut State, id: u8) {
        let on_rows = state.outbox.values_mut().map(|row| &mut row.lease);
        let in_hands = state.relays.iter_mut().map(|relay| &mut relay.lease);
        for lease in on_rows.chain(in_hands).flatten() {
            lease.has_run_out |= lease.id == id;
        }
    }
}

/// Every earlier event of their orders is published, or among them.
fn is_in_order(state: &State, events: &[Event]) -> bool {
    let holds_back = |(earlier, row): (&Event, &Delivery), event: &Event| {
        earlier.is_before(*event) && !row.is_published && !events.contains(earlier)
    };
    events.iter().all(|event| !state.outbox.iter().any(|entry| holds_back(entry, event)))
}

/// All but the empty one.
fn subsets(events: Vec<Event>) -> impl Iterator<Item = Vec<Event>> {
    (1_u32..1 << events.len()).map(move |chosen| {
        let is_chosen = |n: &usize| chosen & (1 << n) != 0;
        (0..events.len()).filter(is_chosen).map(|n| events[n]).collect()
    })
}
