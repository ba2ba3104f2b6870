//! The promise, as properties of every moment and of every run.

use stateright::Property;

use crate::consumer::{Hand, Step};
use crate::protocol::{Event, Parked, Protocol, State};

pub const TOGETHER: &str = "1. an order and its event are committed together or not at all";
pub const MARKED: &str = "2. what is marked as published is in the stream";
pub const KEPT: &str = "2. what is in the stream is owed, parked or in effect";
pub const ALL_PUBLISHED: &str = "2. every event is published in the end";
pub const ALL_IN_EFFECT: &str = "2. every event takes effect in the end";
pub const ONE_EFFECT: &str = "3. no event has a second effect";
pub const ONE_CHARGE: &str = "3. no event is charged twice";
pub const PUBLISHED_IN_ORDER: &str = "4. the events of an order are first published in sequence";
pub const IN_ORDER: &str = "4. the events of an order take effect in sequence";
pub const CALLS_OUTSIDE: &str = "5. nothing is called inside a transaction";
/// Not promised, but what leases are for.
pub const ONE_RELAY: &str = "two relays have an event in hand only if a lease ran out";

// What must come to pass somewhere, or the above would say little.
const TAKEN_OVER: &str = "two relays have an event in hand";
const RACED_FOR: &str = "two consumers are about to apply an event";
const WOKEN: &str = "a parked event is woken";

type Properties = Vec<Property<Protocol>>;

pub fn properties(protocol: &Protocol) -> Properties {
    let mut properties = Vec::new();
    if protocol.relays > 0 {
        properties.extend(of_the_relays());
    }
    if protocol.consumers > 0 {
        properties.extend(of_the_consumers());
    }
    properties
}

fn of_the_relays() -> Properties {
    vec![
        Property::always(TOGETHER, |protocol, state: &State| {
            let has_order = |event: Event| event.sequence <= state.orders[event.order];
            protocol.events().all(|event| has_order(event) == state.outbox.contains_key(&event))
        }),
        Property::always(MARKED, |_, state: &State| {
            state.outbox.iter().all(|(event, row)| !row.is_published || state.stream.contains(event))
        }),
        Property::eventually(ALL_PUBLISHED, |protocol: &Protocol, state: &State| {
            protocol.events().all(|event| state.stream.contains(&event))
        }),
        Property::always(PUBLISHED_IN_ORDER, |_, state: &State| {
            state.stream.iter().all(|event| event.sequence == 1 || state.stream.iter().any(|e| e.next() == *event))
        }),
        Property::always(ONE_RELAY, |_, state: &State| {
            let held = state.relays.iter().filter(|relay| relay.lease.is_some_and(|lease| !lease.has_run_out));
            let held: Vec<&Event> = held.flat_map(|relay| relay.claimed.keys()).collect();
            held.iter().all(|event| held.iter().filter(|other| *other == event).count() == 1)
        }),
        Property::sometimes(TAKEN_OVER, |_, state: &State| {
            let mut held: Vec<&Event> = state.relays.iter().flat_map(|relay| relay.claimed.keys()).collect();
            held.sort();
            held.windows(2).any(|pair| pair[0] == pair[1])
        }),
    ]
}

fn of_the_consumers() -> Properties {
    vec![
        Property::always(KEPT, |_, state: &State| {
            let is_waiting = |event| state.owed.contains(event) || state.parked.contains_key(event);
            state.stream.iter().all(|event| is_waiting(event) || state.is_in_effect(*event))
        }),
        Property::eventually(ALL_IN_EFFECT, |protocol: &Protocol, state: &State| {
            protocol.events().all(|event| state.is_in_effect(event))
        }),
        Property::always(ONE_EFFECT, |_, state: &State| {
            let count = |effects: &[u8], sequence| effects.iter().filter(|other| **other == sequence).count();
            state.effects.iter().all(|effects| effects.iter().all(|sequence| count(effects, *sequence) == 1))
        }),
        Property::always(ONE_CHARGE, |_, state: &State| state.charges.values().all(|count| *count == 1)),
        Property::always(IN_ORDER, |_, state: &State| state.effects.iter().all(|effects| effects.is_sorted())),
        Property::always(CALLS_OUTSIDE, |_, state: &State| !state.has_called_inside_a_transaction),
        Property::sometimes(RACED_FOR, |_, state: &State| {
            let prepared = |event| Some(Hand { event, to_acknowledge: true, step: Step::Prepared });
            state.stream.iter().any(|event| state.consumers.iter().all(|consumer| *consumer == prepared(*event)))
        }),
        Property::sometimes(WOKEN, |_, state: &State| {
            state.parked.iter().any(|(event, parked)| event.sequence > 1 && *parked == Parked::Due)
        }),
    ]
}
