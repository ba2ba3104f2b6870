//! The protocol as a state machine: what is stored where, and the steps that change it.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use stateright::{Model, Property};

use crate::consumer::Consumer;
use crate::promise;
use crate::relay::Relay;

/// What the protocol asks of its parts. Each rule can be taken away, to see what it is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rule {
    /// An order and its event are written in one transaction.
    AppendWithTheOrder,
    /// An event under another's lease is not claimed before the lease has run out.
    Lease,
    /// An event is claimed only if each earlier one of its order is published or in the same claim.
    ClaimInOrder,
    /// The events of an order are sent one after the other, each after the ack of the one before.
    AwaitEachAck,
    /// An event is marked as published after its ack.
    MarkAfterAck,
    /// What a relay marks or gives back is still under its lease.
    Fence,
    /// The gateway is called before the transaction.
    ChargeBeforeTheTransaction,
    /// The gateway is given the event id as idempotency key.
    ChargeUnderTheEventId,
    /// An event that is not above its order's last sequence is a duplicate.
    LastSequence,
    /// An event that is not its order's next is parked.
    ParkWhatIsEarly,
    /// Whether an event is a duplicate, or next, is judged again under the lock.
    JudgeUnderTheLock,
    /// Inbox and effect are written in one transaction.
    ApplyInOneTransaction,
    /// A delivery is acknowledged after the commit.
    AcknowledgeAfterTheCommit,
}

/// The protocol, within bounds that make its runs finite.
#[derive(Debug, Clone)]
pub struct Protocol {
    /// How many events each order will have.
    pub orders: Vec<u8>,
    /// With none, events come into the stream by themselves, and in any order.
    pub relays: usize,
    /// With none, deliveries stay with the broker.
    pub consumers: usize,
    /// How often something goes wrong: a crash, a lease that runs out while its relay works on, a
    /// publish or a charge without an answer. A replay and a clean-up of the inbox count as one too.
    pub faults: u8,
    /// The rules that are taken away.
    pub without: Vec<Rule>,
}

impl Protocol {
    pub fn keeps(&self, rule: Rule) -> bool {
        !self.without.contains(&rule)
    }

    pub fn events(&self) -> impl Iterator<Item = Event> {
        let of = |(order, count): (usize, &u8)| (1..=*count).map(move |sequence| Event { order, sequence });
        self.orders.iter().enumerate().flat_map(of)
    }
}

/// The event number `sequence` of an order: A1 is the first of the first order, B2 the second of
/// the second.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Event {
    pub order: usize,
    pub sequence: u8,
}

impl Event {
    pub fn next(self) -> Self {
        Self { sequence: self.sequence + 1, ..self }
    }

    pub fn is_before(self, other: Self) -> bool {
        self.order == other.order && self.sequence < other.sequence
    }
}

impl fmt::Debug for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", ["A", "B"][self.order], self.sequence)
    }
}

/// A row of `outbox_deliveries`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub struct Delivery {
    pub is_published: bool,
    pub lease: Option<Lease>,
}

/// `lease_id` and `lock_until`. A lease that has run out stays on the row until another replaces it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Lease {
    pub id: u8,
    pub has_run_out: bool,
}

/// When a row of `parked_events` may be taken up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Parked {
    /// Once the event before it has taken effect.
    UntilWoken,
    Due,
}

/// All there is at one moment.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct State {
    // The order-service's database, and its relays.
    /// The version of each order; 0 before it is placed.
    pub orders: Vec<u8>,
    pub outbox: BTreeMap<Event, Delivery>,
    pub relays: Vec<Relay>,

    // The broker.
    pub stream: BTreeSet<Event>,
    /// Not acknowledged yet: may be delivered at any time, to any consumer, any number of times.
    pub owed: BTreeSet<Event>,

    // The payment-service's database, its consumers, and the gateway.
    pub consumers: Vec<Consumer>,
    pub processed: BTreeSet<Event>,
    pub last_sequence: Vec<u8>,
    pub parked: BTreeMap<Event, Parked>,
    /// The events that took effect, of each order, in the order of their commits.
    pub effects: Vec<Vec<u8>>,
    /// How often the gateway took money for an event.
    pub charges: BTreeMap<Event, u8>,
    pub has_called_inside_a_transaction: bool,

    pub faults_left: u8,
}

impl State {
    fn at_first(protocol: &Protocol) -> Self {
        Self {
            orders: vec![0; protocol.orders.len()],
            outbox: BTreeMap::new(),
            relays: vec![Relay::default(); protocol.relays],
            stream: BTreeSet::new(),
            owed: BTreeSet::new(),
            consumers: vec![None; protocol.consumers],
            processed: BTreeSet::new(),
            last_sequence: vec![0; protocol.orders.len()],
            parked: BTreeMap::new(),
            effects: vec![Vec::new(); protocol.orders.len()],
            charges: BTreeMap::new(),
            has_called_inside_a_transaction: false,
            faults_left: protocol.faults,
        }
    }

    /// The stream stores an event, for the first time or once more.
    pub fn store(&mut self, event: Event) {
        self.stream.insert(event);
        self.owed.insert(event);
    }

    pub fn is_in_effect(&self, event: Event) -> bool {
        self.effects[event.order].contains(&event.sequence)
    }

    /// Relays are alike, and so are consumers: states that differ only in which is which are one.
    pub fn with_actors_in_order(&self) -> Self {
        let mut state = self.clone();
        state.relays.sort();
        state.consumers.sort();
        state
    }
}

/// A step: one transaction, or one message that goes or arrives. A number says whose step it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    // The order-service.
    /// Writes the order's next version and its event.
    Append(Event),
    /// The order is written, and the process dies before the event is.
    CrashInAppend(Event),

    // A relay.
    /// Leases some of the events that are free.
    Claim(usize, Vec<Event>),
    /// Sends the message.
    Publish(usize, Event),
    /// The stream has stored it, and the relay hears so.
    Ack(usize, Event),
    /// The relay hears nothing in time.
    NoAck(usize, Event, Lost),
    /// Makes what was acked published.
    Mark(usize),
    /// Makes what was not acked free for the next claim.
    GiveBack(usize),
    CrashRelay(usize),
    LeaseRunsOut(u8),

    // The broker.
    /// Without relays only: an event comes into the stream.
    Store(Event),
    /// Delivers an event that is owed.
    Deliver(usize, Event),
    /// An operator sends an event again, or the durable consumer is made anew.
    Replay(Event),

    // A consumer.
    /// Takes up a parked event that is due.
    TakeDue(usize, Event),
    /// Reads what is on record about the event, without a lock.
    Look(usize),
    /// The gateway charges for the event.
    Prepare(usize),
    /// The gateway charges, and its answer gets lost.
    PrepareFails(usize),
    /// The transaction: judges again under the lock, then writes inbox and effect, or parks the event.
    Apply(usize),
    /// The effect is written, and the process dies before the inbox is.
    CrashInApply(usize),
    Acknowledge(usize),
    CrashConsumer(usize),
    /// The retention of the processed ids has passed.
    CleanUpProcessed,
}

/// What got lost, where a relay hears nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lost {
    TheMessage,
    TheAck,
}

impl Model for Protocol {
    type State = State;
    type Action = Action;

    fn init_states(&self) -> Vec<State> {
        vec![State::at_first(self)]
    }

    fn actions(&self, state: &State, actions: &mut Vec<Action>) {
        if self.relays == 0 {
            actions.extend(self.events().filter(|event| !state.stream.contains(event)).map(Action::Store));
        } else {
            let next = self.events().filter(|event| event.sequence == state.orders[event.order] + 1);
            actions.extend(next.flat_map(|event| [Action::Append(event), Action::CrashInAppend(event)]));
        }
        actions.extend(self.running_leases(state).map(Action::LeaseRunsOut));
        for n in 0..self.relays {
            self.relay_actions(state, n, actions);
        }
        for n in 0..self.consumers {
            self.consumer_actions(state, n, actions);
        }
        if self.consumers > 0 {
            actions.extend(state.stream.difference(&state.owed).map(|event| Action::Replay(*event)));
            actions.extend((!state.processed.is_empty()).then_some(Action::CleanUpProcessed));
        }
        if state.faults_left == 0 {
            actions.retain(|action| !is_fault(state, action));
        }
    }

    fn next_state(&self, last: &State, action: Action) -> Option<State> {
        let mut state = last.clone();
        state.faults_left -= u8::from(is_fault(last, &action));
        match action {
            Action::Append(event) => {
                state.orders[event.order] = event.sequence;
                state.outbox.insert(event, Delivery::default());
            }
            Action::CrashInAppend(event) => {
                if !self.keeps(Rule::AppendWithTheOrder) {
                    state.orders[event.order] = event.sequence;
                }
            }
            Action::Claim(n, events) => self.claim(&mut state, n, &events),
            Action::Publish(n, event) => self.publish(&mut state, n, event),
            Action::Ack(n, event) => self.ack(&mut state, n, event),
            Action::NoAck(n, event, lost) => self.no_ack(&mut state, n, event, lost),
            Action::Mark(n) => self.mark(&mut state, n),
            Action::GiveBack(n) => self.give_back(&mut state, n),
            Action::CrashRelay(n) => state.relays[n] = Relay::default(),
            Action::LeaseRunsOut(id) => self.lease_runs_out(&mut state, id),
            Action::Store(event) | Action::Replay(event) => state.store(event),
            Action::Deliver(n, event) => self.deliver(&mut state, n, event),
            Action::TakeDue(n, event) => self.take_due(&mut state, n, event),
            Action::Look(n) => self.look(&mut state, n),
            Action::Prepare(n) => self.prepare(&mut state, n),
            Action::PrepareFails(n) => self.prepare_fails(&mut state, n),
            Action::Apply(n) => self.apply(&mut state, n),
            Action::CrashInApply(n) => self.crash_in_apply(&mut state, n),
            Action::Acknowledge(n) => self.acknowledge(&mut state, n),
            Action::CrashConsumer(n) => state.consumers[n] = None,
            Action::CleanUpProcessed => state.processed.clear(),
        }
        Some(state)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        promise::properties(self)
    }
}

/// That a lease runs out is a fault while its relay works on, and a matter of time after a crash.
fn is_fault(state: &State, action: &Action) -> bool {
    match action {
        Action::LeaseRunsOut(id) => state.relays.iter().any(|relay| relay.lease.is_some_and(|lease| lease.id == *id)),
        Action::NoAck(..) | Action::Replay(_) | Action::PrepareFails(_) | Action::CleanUpProcessed => true,
        Action::CrashInAppend(_) | Action::CrashRelay(_) | Action::CrashInApply(_) | Action::CrashConsumer(_) => true,
        _ => false,
    }
}
