//! The protocol of relay and consumer as a model, and the promise, checked in all of its runs.
//!
//! Where to begin: `protocol.rs` has the rules, what is stored where, and the list of steps.
//! `relay.rs` and `consumer.rs` say when each step may be taken and what it does, as the files of
//! the same names in outbox-core do. `promise.rs` has the five points. The tests below first go
//! through all runs, then take one rule away after the other and tell the run that breaks the promise.
//!
//! A step is one transaction, or one message that goes or arrives. The steps of all processes follow
//! each other in every order there is. There is no clock: what waits for a time (a lease, a redelivery,
//! a retry) may come at any moment. A process may die between any two steps, and within a transaction,
//! and starts again with empty hands.
//!
//! **Bounds.** A rule speaks of an event and the one before it, and of a process and the one that comes
//! after it: so there are two of each, and three events where a chain may matter. No run below that
//! breaks the promise needs more than two events and two faults. The relays read nothing that the
//! consumers write, and all the consumers see of the relays is the stream: so each side is checked
//! alone too, further than both together, the consumers with a stream that fills in any order.
//!
//! **Left out.** Backoff and batch sizes: chance decides what a claim takes. Renewals: a lease that is
//! renewed does not run out. The broker's deduplication: it stores whatever comes. The stream's order:
//! any message that is owed may be the next. Failed events and dead letters: they stay where they are,
//! and hold back what follows. Batches of a consumer: it has one event at a time. That a claim judges
//! on a snapshot older than its locks: it may take an event for unpublished that no longer is, never
//! the other way round.

mod consumer;
mod promise;
mod protocol;
mod relay;

use std::collections::HashSet;

use protocol::Action::*;
use protocol::{Action, Event, Lost, Protocol, Rule, State};
use stateright::{Checker, HasDiscoveries, Model};

const A1: Event = Event { order: 0, sequence: 1 };
const A2: Event = Event { order: 0, sequence: 2 };

/// Two relays and two consumers, with orders of so many events each.
fn both_sides(orders: &[u8], faults: u8) -> Protocol {
    Protocol { orders: orders.to_vec(), relays: 2, consumers: 2, faults, without: Vec::new() }
}

fn relays(orders: &[u8], faults: u8) -> Protocol {
    Protocol { consumers: 0, ..both_sides(orders, faults) }
}

fn consumers(orders: &[u8], faults: u8) -> Protocol {
    Protocol { relays: 0, ..both_sides(orders, faults) }
}

impl Protocol {
    fn without(self, rules: &[Rule]) -> Self {
        Self { without: rules.to_vec(), ..self }
    }

    fn check_all_runs(self) -> impl Checker<Self> {
        let checker = self.checker().symmetry_fn(State::with_actors_in_order).threads(2).spawn_dfs().join();
        println!("{} states, {} steps", checker.unique_state_count(), checker.state_count());
        checker
    }
}

fn assert_kept(protocol: Protocol) {
    protocol.check_all_runs().assert_properties();
}

fn assert_all_kept_but(broken: &'static str, protocol: Protocol) {
    let checker = protocol.check_all_runs();
    checker.assert_any_discovery(broken);
    let properties = checker.model().properties();
    let others = properties.iter().filter(|other| other.expectation.discovery_is_failure() && other.name != broken);
    others.for_each(|other| checker.assert_no_discovery(other.name));
}

/// The checker finds that `property` does not hold, and `run` is one that shows it.
fn assert_broken(property: &'static str, protocol: Protocol, run: Vec<Action>) {
    let when_found = HasDiscoveries::AllOf([property].into());
    let checker = protocol.checker().finish_when(when_found).spawn_bfs().join();
    println!("broken within {} states", checker.unique_state_count());
    checker.assert_discovery(property, run);
}

// The protocol.

#[test]
fn two_relays_and_two_consumers_keep_the_promise() {
    assert_kept(both_sides(&[2], 1));
}

#[test]
#[ignore = "goes further than the one above: a minute, or some seconds with --release"]
fn two_relays_and_two_consumers_keep_the_promise_through_more_faults_and_with_more_events() {
    assert_kept(both_sides(&[2], 2));
    assert_kept(both_sides(&[3], 1));
}

#[test]
fn two_relays_publish_all_events_in_order_through_any_three_faults() {
    assert_kept(relays(&[3], 3));
}

#[test]
fn two_consumers_apply_all_events_once_and_in_order_whatever_comes_when() {
    assert_kept(consumers(&[3], 3));
}

#[test]
fn the_events_of_two_orders_do_not_stand_in_each_others_way() {
    assert_kept(relays(&[2, 1], 2));
    assert_kept(consumers(&[2, 1], 2));
}

/// The checker looks for what comes to pass in the end only where a run ends.
#[test]
fn every_run_ends() {
    fn visit(protocol: &Protocol, state: State, run: &mut HashSet<State>, done: &mut HashSet<State>) {
        assert!(!run.contains(&state), "a run goes in circles: {state:?}");
        if done.contains(&state) {
            return;
        }
        run.insert(state.clone());
        for next in protocol.next_states(&state) {
            visit(protocol, next, run, done);
        }
        run.remove(&state);
        done.insert(state);
    }
    for protocol in [relays(&[3], 1), consumers(&[3], 1), both_sides(&[1], 1)] {
        let mut done = HashSet::new();
        let first = protocol.init_states();
        first.into_iter().for_each(|state| visit(&protocol, state, &mut HashSet::new(), &mut done));
        println!("{} states", done.len());
    }
}

// The order-service and the relays, with a rule less.

#[test]
fn an_event_in_a_transaction_of_its_own_may_be_missing() {
    let protocol = relays(&[1], 1).without(&[Rule::AppendWithTheOrder]);
    assert_broken(promise::TOGETHER, protocol, vec![CrashInAppend(A1)]);
}

#[test]
fn a_claim_without_the_order_rule_lets_one_relay_overtake_the_other() {
    let protocol = relays(&[2], 0).without(&[Rule::ClaimInOrder]);
    let claims = [Append(A1), Append(A2), Claim(0, vec![A1]), Claim(1, vec![A2])];
    let second = [Publish(1, A2), Ack(1, A2)];
    assert_broken(promise::PUBLISHED_IN_ORDER, protocol, [&claims[..], &second].concat());
}

#[test]
fn publishing_without_awaiting_each_ack_steps_over_a_lost_message() {
    let protocol = relays(&[2], 1).without(&[Rule::AwaitEachAck]);
    let claim = [Append(A1), Append(A2), Claim(0, vec![A1, A2])];
    let publish = [Publish(0, A1), Publish(0, A2), NoAck(0, A1, Lost::TheMessage), Ack(0, A2)];
    assert_broken(promise::PUBLISHED_IN_ORDER, protocol, [&claim[..], &publish].concat());
}

#[test]
fn a_mark_before_the_ack_loses_an_event_with_the_relay() {
    let protocol = relays(&[1], 1).without(&[Rule::MarkAfterAck]);
    let mut run = vec![Append(A1), Claim(0, vec![A1]), Publish(0, A1), Mark(0)];
    assert_broken(promise::MARKED, protocol.clone(), run.clone());
    run.push(CrashRelay(0));
    assert_broken(promise::ALL_PUBLISHED, protocol, run);
}

/// Relay 0 gives back what relay 1 holds, and claims it again, while relay 1 is at work in good time.
/// The promise is kept all the same: a mark after an ack is true, whoever makes it.
#[test]
fn without_the_fence_a_relay_that_lost_its_lease_ends_the_lease_of_another() {
    let protocol = relays(&[1], 2).without(&[Rule::Fence]);
    let claims = [Append(A1), Claim(0, vec![A1]), LeaseRunsOut(0), Claim(1, vec![A1])];
    let comes_late = [Publish(0, A1), NoAck(0, A1, Lost::TheMessage), GiveBack(0), Claim(0, vec![A1])];
    assert_broken(promise::ONE_RELAY, protocol, [&claims[..], &comes_late].concat());
    assert_all_kept_but(promise::ONE_RELAY, relays(&[2], 2).without(&[Rule::Fence]));
}

/// What keeps the order is that an event is sent only after the ack of the one before it.
#[test]
fn leases_spare_work_and_the_promise_does_not_rest_on_them() {
    assert_all_kept_but(promise::ONE_RELAY, relays(&[3], 1).without(&[Rule::Lease, Rule::Fence]));
}

// The consumers, with a rule less.

#[test]
fn a_charge_inside_the_transaction_calls_the_gateway_inside_a_transaction() {
    let protocol = consumers(&[1], 0).without(&[Rule::ChargeBeforeTheTransaction]);
    assert_broken(promise::CALLS_OUTSIDE, protocol, vec![Store(A1), Deliver(0, A1), Look(0), Apply(0)]);
}

#[test]
fn a_charge_without_idempotency_key_is_made_again_after_a_crash() {
    let protocol = consumers(&[1], 1).without(&[Rule::ChargeUnderTheEventId]);
    let charge = [Deliver(0, A1), Look(0), Prepare(0)];
    assert_broken(promise::ONE_CHARGE, protocol, [&[Store(A1)], &charge[..], &[CrashConsumer(0)], &charge].concat());
}

#[test]
fn an_inbox_without_the_last_sequence_forgets_when_its_processed_ids_are_cleaned_up() {
    let protocol = consumers(&[1], 2).without(&[Rule::LastSequence]);
    let apply = [Deliver(0, A1), Look(0), Prepare(0), Apply(0)];
    let later = [Acknowledge(0), CleanUpProcessed, Replay(A1)];
    assert_broken(promise::ONE_EFFECT, protocol, [&[Store(A1)], &apply[..], &later, &apply].concat());
}

/// Consumer 0 is slow with A1, and consumer 1 has A2.
#[test]
fn an_early_event_that_is_not_parked_makes_the_one_before_it_pass_for_a_duplicate() {
    let protocol = consumers(&[2], 0).without(&[Rule::ParkWhatIsEarly]);
    let deliver = [Store(A1), Store(A2), Deliver(0, A1), Deliver(1, A2)];
    let second = [Look(1), Prepare(1), Apply(1), Acknowledge(1)];
    let first = [Look(0), Acknowledge(0)];
    assert_broken(promise::KEPT, protocol, [&deliver[..], &second, &first].concat());
}

#[test]
fn an_inbox_of_processed_ids_alone_applies_events_out_of_order() {
    let protocol = consumers(&[2], 0).without(&[Rule::ParkWhatIsEarly, Rule::LastSequence]);
    let deliver = [Store(A1), Store(A2), Deliver(0, A1), Deliver(1, A2)];
    let second = [Look(1), Prepare(1), Apply(1)];
    let first = [Look(0), Prepare(0), Apply(0)];
    assert_broken(promise::IN_ORDER, protocol, [&deliver[..], &second, &first].concat());
}

/// A2 is early when consumer 1 looks, and next when it is parked: there is nobody left to wake it.
#[test]
fn an_event_that_is_parked_without_being_judged_again_waits_for_ever() {
    let protocol = consumers(&[2], 0).without(&[Rule::JudgeUnderTheLock]);
    let look = [Store(A1), Store(A2), Deliver(0, A1), Look(0), Prepare(0), Deliver(1, A2), Look(1)];
    let apply = [Apply(0), Apply(1), Acknowledge(0), Acknowledge(1)];
    assert_broken(promise::ALL_IN_EFFECT, protocol, [&look[..], &apply].concat());
}

#[test]
fn an_effect_in_a_transaction_of_its_own_is_repeated_after_a_crash() {
    let protocol = consumers(&[1], 1).without(&[Rule::ApplyInOneTransaction]);
    let prepare = [Deliver(0, A1), Look(0), Prepare(0)];
    let run = [&[Store(A1)], &prepare[..], &[CrashInApply(0)], &prepare, &[Apply(0)]].concat();
    assert_broken(promise::ONE_EFFECT, protocol, run);
}

#[test]
fn an_acknowledgement_before_the_commit_loses_an_event_with_the_consumer() {
    let protocol = consumers(&[1], 1).without(&[Rule::AcknowledgeAfterTheCommit]);
    let mut run = vec![Store(A1), Deliver(0, A1), Look(0), Acknowledge(0)];
    assert_broken(promise::KEPT, protocol.clone(), run.clone());
    run.push(CrashConsumer(0));
    assert_broken(promise::ALL_IN_EFFECT, protocol, run);
}
