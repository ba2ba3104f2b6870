//! The consumer's steps: look, prepare, apply, acknowledge.

use crate::protocol::{Action, Event, Parked, Protocol, Rule, State};

/// What a consumer has in hand: nothing between two events, nor after a crash.
pub type Consumer = Option<Hand>;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Hand {
    pub event: Event,
    /// The broker delivered it and waits for the acknowledgement. Otherwise it was a parked one.
    pub to_acknowledge: bool,
    pub step: Step,
}

/// How far a consumer has come with its event.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Step {
    Fetched,
    /// It is its order's next …
    Next,
    /// … and the gateway has charged for it.
    Prepared,
    /// The gateway's answer got lost: to be tried again later.
    Failed,
    /// An earlier event of its order has not taken effect.
    Early,
    /// It took effect before.
    Duplicate,
    /// Nothing is left to be written.
    Settled,
}

impl Protocol {
    pub fn consumer_actions(&self, state: &State, n: usize, actions: &mut Vec<Action>) {
        let Some(hand) = state.consumers[n] else {
            actions.extend(state.owed.iter().map(|event| Action::Deliver(n, *event)));
            let due = state.parked.iter().filter(|(_, parked)| **parked == Parked::Due);
            actions.extend(due.map(|(event, _)| Action::TakeDue(n, *event)));
            return;
        };
        match hand.step {
            Step::Fetched => actions.push(Action::Look(n)),
            Step::Next if self.keeps(Rule::ChargeBeforeTheTransaction) => {
                actions.extend([Action::Prepare(n), Action::PrepareFails(n)]);
            }
            Step::Next | Step::Prepared => actions.extend([Action::Apply(n), Action::CrashInApply(n)]),
            Step::Failed | Step::Early | Step::Duplicate => actions.push(Action::Apply(n)),
            Step::Settled => actions.push(Action::Acknowledge(n)),
        }
        let hurries = !self.keeps(Rule::AcknowledgeAfterTheCommit) && hand.to_acknowledge;
        actions.extend((hurries && hand.step == Step::Next).then_some(Action::Acknowledge(n)));
        actions.push(Action::CrashConsumer(n));
    }

    pub fn deliver(&self, state: &mut State, n: usize, event: Event) {
        state.consumers[n] = Some(Hand { event, to_acknowledge: true, step: Step::Fetched });
    }

    pub fn take_due(&self, state: &mut State, n: usize, event: Event) {
        state.consumers[n] = Some(Hand { event, to_acknowledge: false, step: Step::Fetched });
    }

    pub fn look(&self, state: &mut State, n: usize) {
        let Some(Hand { event, to_acknowledge, .. }) = state.consumers[n] else { return };
        let is_parked = state.parked.contains_key(&event);
        let step = if self.is_duplicate(state, event) {
            // One that was parked is to be taken out of there.
            if to_acknowledge { Step::Settled } else { Step::Duplicate }
        } else if is_parked && to_acknowledge {
            Step::Settled
        } else if self.is_early(state, event) {
            Step::Early
        } else {
            Step::Next
        };
        proceed(state, n, step);
    }

    fn is_duplicate(&self, state: &State, event: Event) -> bool {
        let is_past = event.sequence <= state.last_sequence[event.order];
        state.processed.contains(&event) || (is_past && self.keeps(Rule::LastSequence))
    }

    fn is_early(&self, state: &State, event: Event) -> bool {
        event.sequence > state.last_sequence[event.order] + 1 && self.keeps(Rule::ParkWhatIsEarly)
    }

    pub fn prepare(&self, state: &mut State, n: usize) {
        self.charge(state, n);
        proceed(state, n, Step::Prepared);
    }

    pub fn prepare_fails(&self, state: &mut State, n: usize) {
        self.charge(state, n);
        proceed(state, n, Step::Failed);
    }

    fn charge(&self, state: &mut State, n: usize) {
        let Some(Hand { event, .. }) = state.consumers[n] else { return };
        let charges = state.charges.entry(event).or_default();
        if *charges == 0 || !self.keeps(Rule::ChargeUnderTheEventId) {
            *charges += 1;
        }
    }

    /// Another consumer may have come between since the look. An event that was early then is not
    /// applied even if it is next by now, since nothing was prepared for it.
    pub fn apply(&self, state: &mut State, n: usize) {
        let Some(Hand { event, step, .. }) = state.consumers[n] else { return };
        let judges = self.keeps(Rule::JudgeUnderTheLock);
        match step {
            _ if judges && self.is_duplicate(state, event) => unpark(state, event),
            Step::Duplicate => unpark(state, event),
            Step::Failed => park(state, event, Parked::Due),
            Step::Early if judges && !self.is_early(state, event) => park(state, event, Parked::Due),
            Step::Early => park(state, event, Parked::UntilWoken),
            Step::Next | Step::Prepared => {
                if !self.keeps(Rule::ChargeBeforeTheTransaction) {
                    state.has_called_inside_a_transaction = true;
                    self.charge(state, n);
                }
                // The processed id is the second line of defence.
                if state.processed.insert(event) {
                    state.effects[event.order].push(event.sequence);
                    advance(state, event);
                }
                unpark(state, event);
            }
            Step::Fetched | Step::Settled => {}
        }
        proceed(state, n, Step::Settled);
    }

    pub fn crash_in_apply(&self, state: &mut State, n: usize) {
        let Some(Hand { event, .. }) = state.consumers[n].take() else { return };
        if !self.keeps(Rule::ApplyInOneTransaction) && !self.is_duplicate(state, event) {
            state.effects[event.order].push(event.sequence);
        }
    }

    pub fn acknowledge(&self, state: &mut State, n: usize) {
        let Some(hand) = &mut state.consumers[n] else { return };
        hand.to_acknowledge = false;
        let step = hand.step;
        state.owed.remove(&hand.event);
        proceed(state, n, step);
    }
}

/// The hand is empty once all is written and acknowledged.
fn proceed(state: &mut State, n: usize, step: Step) {
    if let Some(hand) = &mut state.consumers[n] {
        hand.step = step;
    }
    state.consumers[n].take_if(|hand| hand.step == Step::Settled && !hand.to_acknowledge);
}

/// The event is its order's last, and the one that comes next is woken.
fn advance(state: &mut State, event: Event) {
    state.last_sequence[event.order] = event.sequence;
    if let Some(next) = state.parked.get_mut(&event.next()) {
        *next = Parked::Due;
    }
}

fn park(state: &mut State, event: Event, parked: Parked) {
    state.parked.insert(event, parked);
}

fn unpark(state: &mut State, event: Event) {
    state.parked.remove(&event);
}
