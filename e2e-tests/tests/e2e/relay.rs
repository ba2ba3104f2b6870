//! The relay: nothing is lost, each aggregate stays in order, and nobody waits for another's trouble.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use async_nats::jetstream::stream;
use e2e_tests::{Nats, eventually};
use futures::future::join_all;
use outbox_core::{AggregateVersion, Context, append};
use serde_json::json;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::fixture::{Outbox, SOON, ThingHappened, drain};

const THING: &str = "ThingHappened";
/// Not one token of a subject, so that it can never be published.
const UNSENDABLE: &str = "Thing Happened";

/// A stream with other limits than a service makes it with.
async fn outbox_with_stream(limits: stream::Config) -> Outbox {
    let outbox = Outbox::without_stream(Nats::shared().await.unwrap()).await;
    let config = stream::Config {
        name: outbox.name.name.clone(),
        subjects: vec![outbox.name.subjects()],
        discard: stream::DiscardPolicy::New,
        ..limits
    };
    outbox.jetstream.create_stream(config).await.unwrap();
    outbox
}

#[tokio::test]
async fn three_relays_publish_every_event_once_and_each_aggregate_in_order() {
    let outbox = Outbox::new().await;
    let aggregates: Vec<Uuid> = (0..40).map(|_| Uuid::now_v7()).collect();
    let stop = CancellationToken::new();
    let relays: Vec<_> = (0..3)
        .map(|_| tokio::spawn(outbox.relay(&["--relay-batch", "25", "--relay-poll-max", "50ms"]).run(stop.clone())))
        .collect();

    // While they run, every aggregate's events are appended one after the other.
    join_all(aggregates.iter().map(async |aggregate| {
        for sequence in 1..=25 {
            outbox.append(*aggregate, sequence).await;
        }
    }))
    .await;
    outbox.all_are_published().await;
    stop.cancel();
    join_all(relays).await;

    let mut published: HashMap<Uuid, Vec<i64>> = HashMap::new();
    for event in outbox.published().await {
        published.entry(event.aggregate.id).or_default().push(event.aggregate.sequence);
    }
    for aggregate in aggregates {
        assert_eq!(published.remove(&aggregate), Some((1..=25).collect()));
    }
}

#[tokio::test]
async fn a_relay_that_died_is_replaced_when_its_lease_runs_out_and_not_before() {
    let outbox = Outbox::new().await;
    let id = Uuid::now_v7();
    outbox.append(id, 1).await;
    outbox.lease_to_a_frozen_relay(id, 1, "1500ms").await;
    let relay = outbox.relay(&[]);
    assert_eq!(relay.run_once().await.unwrap().claimed, 0);
    assert!(outbox.state(id, 1).await.is_leased);
    eventually(SOON, "another relay publishes it", async || match relay.run_once().await.unwrap() {
        batch if batch.published == 1 => Ok(()),
        batch => Err(batch),
    })
    .await;
}

#[tokio::test]
async fn a_relay_that_lost_its_lease_changes_nothing() {
    let nats = Nats::start().await.unwrap();
    let outbox = Outbox::on(&nats).await;
    // One to be marked, one to be failed, and one to be given back.
    let (sound, broken) = (Uuid::now_v7(), Uuid::now_v7());
    outbox.append(sound, 1).await;
    outbox.insert(broken, 1..=1, UNSENDABLE).await;
    outbox.append(broken, 2).await;
    let relay = outbox.relay(&["--relay-lease", "8s", "--relay-publish-timeout", "6s"]);

    nats.freeze().await.unwrap();
    let batch = tokio::spawn(async move { relay.run_once().await.unwrap() });
    eventually(SOON, "the relay holds them", async || match outbox.count("lease_id IS NOT NULL").await {
        3 => Ok(()),
        leased => Err(leased),
    })
    .await;
    // As if its lease had run out and another relay had taken them.
    for (id, sequence) in [(sound, 1), (broken, 1), (broken, 2)] {
        outbox.lease_to_a_frozen_relay(id, sequence, "1h").await;
    }
    let held = outbox.rows().await;
    // Long enough for it to renew its lease, and not for its publish to time out.
    tokio::time::sleep(Duration::from_secs(2)).await;
    nats.thaw().await.unwrap();

    let batch = batch.await.unwrap();
    assert_eq!((batch.claimed, batch.published, batch.failed, batch.given_back, batch.lost), (3, 0, 0, 0, 3));
    assert_eq!(outbox.published_of(sound).await, [1], "there was something to be marked");
    assert_eq!(outbox.rows().await, held);
}

#[tokio::test]
async fn an_event_behind_one_that_another_relay_holds_is_not_stepped_over() {
    let outbox = Outbox::new().await;
    let (held, free) = (Uuid::now_v7(), Uuid::now_v7());
    for id in [held, free] {
        outbox.append(id, 1).await;
        outbox.append(id, 2).await;
    }
    // As another relay's claim does, for as long as its statement runs.
    let mut claim = outbox.db.begin().await.unwrap();
    let lock = "SELECT FROM outbox_deliveries WHERE aggregate_id = $1 AND aggregate_sequence = 1 FOR UPDATE";
    sqlx::query(lock).bind(held).execute(&mut *claim).await.unwrap();

    let relay = outbox.relay(&[]);
    relay.run_once().await.unwrap();
    assert_eq!(outbox.published_of(free).await, [1, 2]);
    assert_eq!(outbox.published_of(held).await, [0; 0]);
    claim.rollback().await.unwrap();
    relay.run_once().await.unwrap();
    assert_eq!(outbox.published_of(held).await, [1, 2]);
}

#[tokio::test]
async fn a_failed_event_holds_back_its_own_aggregate_and_no_other() {
    let outbox = Outbox::new().await;
    let (broken, sound) = (Uuid::now_v7(), Uuid::now_v7());
    outbox.append(broken, 1).await;
    outbox.insert(broken, 2..=2, UNSENDABLE).await;
    outbox.append(broken, 3).await;
    outbox.append(sound, 1).await;

    let total = drain(&outbox.relay(&[])).await;

    assert_eq!((total.published, total.failed), (2, 1));
    assert_eq!(outbox.published_of(broken).await, [1]);
    assert_eq!(outbox.published_of(sound).await, [1]);
    let failed = outbox.state(broken, 2).await;
    assert!(failed.is_failed && !failed.is_leased && failed.attempts == 1, "{failed:?}");
    assert!(failed.last_error.unwrap().contains(UNSENDABLE));
    let blocked = outbox.state(broken, 3).await;
    assert!(!blocked.is_published && !blocked.is_failed && blocked.attempts == 0, "{blocked:?}");
}

#[tokio::test]
async fn ten_thousand_followers_of_a_failed_event_do_not_hold_up_the_others() {
    let outbox = Outbox::new().await;
    let (broken, sound) = (Uuid::now_v7(), Uuid::now_v7());
    outbox.insert(broken, 1..=1, UNSENDABLE).await;
    outbox.insert(broken, 2..=10_001, THING).await;
    outbox.append(sound, 1).await;
    let relay = outbox.relay(&["--relay-batch", "500"]);
    let mut batches = 0;
    while outbox.published_of(sound).await.is_empty() {
        relay.run_once().await.unwrap();
        batches += 1;
        assert!(batches <= 25, "the followers must be put off, not looked at again and again");
    }
    assert_eq!(
        outbox.count("published_at IS NULL AND next_attempt_at <= now()").await,
        1,
        "only the failed one is due"
    );
}

#[tokio::test]
async fn ten_thousand_followers_of_a_frozen_relays_event_do_not_hold_up_the_others() {
    let outbox = Outbox::new().await;
    let (frozen, sound) = (Uuid::now_v7(), Uuid::now_v7());
    outbox.insert(frozen, 1..=10_001, THING).await;
    outbox.lease_to_a_frozen_relay(frozen, 1, "1h").await;
    outbox.append(sound, 1).await;
    let relay = outbox.relay(&["--relay-batch", "500"]);
    let mut batches = 0;
    while outbox.published_of(sound).await.is_empty() {
        relay.run_once().await.unwrap();
        batches += 1;
        assert!(batches <= 25, "the search must move past the followers");
    }
    assert_eq!(outbox.published_of(frozen).await, [0; 0]);
}

#[tokio::test]
async fn what_the_stream_refuses_for_now_is_tried_again_and_its_followers_wait_with_it() {
    // One message of each type: a second one of the same type is refused until there is room.
    let outbox = outbox_with_stream(stream::Config {
        max_messages_per_subject: 1,
        discard_new_per_subject: true,
        ..Default::default()
    })
    .await;
    let (first, second, other) = (Uuid::now_v7(), Uuid::now_v7(), Uuid::now_v7());
    outbox.insert(first, 1..=1, "Full").await;
    drain(&outbox.relay(&[])).await;
    outbox.insert(second, 1..=1, "Full").await;
    outbox.insert(second, 2..=2, "Roomy").await;
    outbox.insert(other, 1..=1, "Wide").await;

    let relay = outbox.relay(&["--relay-backoff-base", "1h", "--relay-backoff-max", "1h"]);
    let batch = relay.run_once().await.unwrap();
    assert_eq!((batch.published, batch.rescheduled, batch.failed, batch.outage), (1, 1, 0, false));
    let refused = outbox.state(second, 1).await;
    assert!(refused.attempts == 1 && !refused.is_due && !refused.is_leased, "{refused:?}");
    assert!(refused.last_error.unwrap().contains("maximum messages per subject"));
    let follower = outbox.state(second, 2).await;
    assert!(follower.attempts == 0 && !follower.is_leased, "{follower:?}");
    relay.run_once().await.unwrap();
    assert!(!outbox.state(second, 2).await.is_due, "it is put off to when its head is tried again");

    // Room, and time.
    outbox.jetstream.get_stream(&outbox.name.name).await.unwrap().purge().await.unwrap();
    sqlx::query("UPDATE outbox_deliveries SET next_attempt_at = now()").execute(&outbox.db).await.unwrap();
    assert_eq!(drain(&relay).await.published, 2);
    assert_eq!(outbox.published_of(second).await, [1, 2]);
}

#[tokio::test]
async fn an_event_that_is_too_large_fails_at_once_and_harms_no_other() {
    let outbox = outbox_with_stream(stream::Config { max_message_size: 2000, ..Default::default() }).await;
    let (for_stream, for_broker, sound) = (Uuid::now_v7(), Uuid::now_v7(), Uuid::now_v7());
    outbox.append_payload(for_stream, 1, json!("x".repeat(3000))).await;
    outbox.append_payload(for_broker, 1, json!("x".repeat(1_100_000))).await;
    outbox.append(sound, 1).await;
    let total = drain(&outbox.relay(&[])).await;
    assert_eq!((total.published, total.failed), (1, 2));
    for (id, reason) in [(for_stream, "size exceeds"), (for_broker, "payload")] {
        let state = outbox.state(id, 1).await;
        let says_why = state.last_error.as_ref().is_some_and(|error| error.contains(reason));
        assert!(state.is_failed && state.attempts == 1 && says_why, "{state:?}");
    }
}

#[tokio::test]
async fn an_event_whose_row_cannot_be_sent_fails_at_once_and_harms_no_other() {
    let outbox = Outbox::new().await;
    let [no_context, no_date, large_header, sound] = [(); 4].map(|()| Uuid::now_v7());
    let mut tx = outbox.db.begin().await.unwrap();
    let context = Context { correlation_id: "x".repeat(70_000), traceparent: None };
    let large = AggregateVersion { id: large_header, sequence: 1 };
    append(&mut tx, large, &ThingHappened(json!({})), &context).await.unwrap();
    tx.commit().await.unwrap();
    for id in [no_context, no_date] {
        outbox.insert(id, 1..=1, THING).await;
    }
    // Past the trigger, as only a superuser's mistake could.
    let damage = "SET session_replication_role = replica;
        UPDATE outbox_events SET headers = '{\"correlationid\": 7}' WHERE aggregate_id = '{no_context}';
        UPDATE outbox_events SET created_at = 'infinity' WHERE aggregate_id = '{no_date}';
        RESET session_replication_role";
    let damage = damage.replace("{no_context}", &no_context.to_string()).replace("{no_date}", &no_date.to_string());
    sqlx::raw_sql(sqlx::AssertSqlSafe(damage)).execute(&outbox.db).await.unwrap();
    outbox.append(sound, 1).await;
    let total = drain(&outbox.relay(&[])).await;
    assert_eq!((total.published, total.failed), (1, 3));
    assert!(outbox.state(large_header, 1).await.last_error.unwrap().contains("header size exceeds"));
    assert!(outbox.state(no_context, 1).await.last_error.unwrap().contains("correlation id"));
    assert!(outbox.state(no_date, 1).await.last_error.unwrap().contains("created_at"));
}

#[tokio::test]
async fn what_the_broker_refuses_for_no_known_reason_fails_after_the_last_attempt() {
    let outbox = outbox_with_stream(stream::Config::default()).await;
    let mut config = outbox.jetstream.get_stream(&outbox.name.name).await.unwrap().cached_info().config.clone();
    config.sealed = true;
    outbox.jetstream.update_stream(config).await.unwrap();
    let id = Uuid::now_v7();
    outbox.append(id, 1).await;
    let relay =
        outbox.relay(&["--relay-max-attempts", "3", "--relay-backoff-base", "1ms", "--relay-backoff-max", "1ms"]);
    eventually(SOON, "it is failed", async || {
        relay.run_once().await.unwrap();
        let state = outbox.state(id, 1).await;
        if state.is_failed { Ok(()) } else { Err(state) }
    })
    .await;
    assert_eq!(outbox.state(id, 1).await.attempts, 3);
}

#[tokio::test]
async fn an_outage_counts_against_nobody_and_everything_is_published_after_it() {
    let nats = Nats::start().await.unwrap();
    let outbox = Outbox::on(&nats).await;
    let (one, two) = (Uuid::now_v7(), Uuid::now_v7());
    for sequence in 1..=3 {
        outbox.append(one, sequence).await;
        outbox.append(two, sequence).await;
    }
    nats.freeze().await.unwrap();
    let relay = outbox.relay(&["--relay-publish-timeout", "300ms", "--relay-backoff-base", "10ms"]);
    let batch = relay.run_once().await.unwrap();
    assert!(batch.outage && batch.given_back == 6, "{batch:?}");
    assert_eq!(outbox.count("attempts = 0 AND lease_id IS NULL AND next_attempt_at <= now()").await, 6);

    let stop = CancellationToken::new();
    let running = tokio::spawn(relay.run(stop.clone()));
    nats.thaw().await.unwrap();
    outbox.all_are_published().await;
    stop.cancel();
    running.await.unwrap();
    assert_eq!(outbox.count("attempts > 0").await, 0);
    for id in [one, two] {
        let mut first_publications = outbox.published_of(id).await;
        let mut seen = std::collections::HashSet::new();
        first_publications.retain(|sequence| seen.insert(*sequence));
        assert_eq!(first_publications, [1, 2, 3]);
    }
}

#[tokio::test]
async fn a_missing_stream_is_made_again_and_nothing_that_waited_for_it_is_failed() {
    let outbox = Outbox::without_stream(Nats::shared().await.unwrap()).await;
    let id = Uuid::now_v7();
    outbox.append(id, 1).await;
    let relay = outbox.relay(&["--relay-backoff-base", "10ms"]);
    assert!(relay.run_once().await.unwrap().outage);
    let stop = CancellationToken::new();
    let running = tokio::spawn(relay.run(stop.clone()));
    eventually(SOON, "it is published", async || {
        let state = outbox.state(id, 1).await;
        if state.is_published { Ok(()) } else { Err(state) }
    })
    .await;
    stop.cancel();
    running.await.unwrap();
    assert_eq!(outbox.state(id, 1).await.attempts, 0);
}

#[tokio::test]
async fn a_batch_that_outlives_its_lease_renews_it_and_loses_nothing() {
    let nats = Nats::start().await.unwrap();
    let outbox = Outbox::on(&nats).await;
    // One aggregate, so that each event waits for the ack of the one before, on a broker that stutters.
    let id = Uuid::now_v7();
    outbox.insert(id, 1..=2_000, THING).await;
    let flags = ["--relay-batch", "2000", "--relay-lease", "5s", "--relay-publish-timeout", "3s"];
    let relay = outbox.relay(&flags);
    let started = Instant::now();
    let batch = tokio::spawn(async move { relay.run_once().await.unwrap() });
    while started.elapsed() < Duration::from_secs(7) {
        nats.freeze().await.unwrap();
        tokio::time::sleep(Duration::from_millis(700)).await;
        nats.thaw().await.unwrap();
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let batch = batch.await.unwrap();
    assert!(started.elapsed() > Duration::from_secs(6), "the batch must outlive its lease to prove anything");
    assert_eq!((batch.published, batch.lost, batch.given_back), (2_000, 0, 0));
}

#[tokio::test]
async fn a_relay_that_is_stopped_gives_back_what_it_has_not_begun() {
    let outbox = Outbox::new().await;
    let id = Uuid::now_v7();
    outbox.insert(id, 1..=10_000, THING).await;
    let stop = CancellationToken::new();
    let running = tokio::spawn(outbox.relay(&["--relay-batch", "10000"]).run(stop.clone()));
    eventually(SOON, "the first is published", async || {
        let mut stream = outbox.jetstream.get_stream(&outbox.name.name).await.unwrap();
        if stream.info().await.unwrap().state.messages > 0 { Ok(()) } else { Err(()) }
    })
    .await;
    stop.cancel();
    tokio::time::timeout(Duration::from_secs(5), running).await.expect("it stops soon").unwrap();
    let published = outbox.count("published_at IS NOT NULL").await;
    assert!((1..10_000).contains(&published), "{published}");
    assert_eq!(outbox.count("lease_id IS NOT NULL").await, 0);
    // What it gave back is there for another at once, and nothing is sent twice.
    drain(&outbox.relay(&["--relay-batch", "10000"])).await;
    let mut stream = outbox.jetstream.get_stream(&outbox.name.name).await.unwrap();
    assert_eq!(stream.info().await.unwrap().state.messages, 10_000);
}

#[tokio::test]
async fn a_nudge_wakes_an_idle_relay_at_once() {
    let outbox = Outbox::new().await;
    let relay = outbox.relay(&["--relay-poll-min", "1h", "--relay-poll-max", "1h"]);
    let nudge = relay.nudge();
    let stop = CancellationToken::new();
    let running = tokio::spawn(relay.run(stop.clone()));
    for sequence in 1..=3 {
        let id = Uuid::now_v7();
        outbox.append(id, sequence).await;
        nudge.nudge();
        eventually(SOON, "it is published without a poll", async || {
            let state = outbox.state(id, sequence).await;
            if state.is_published { Ok(()) } else { Err(state) }
        })
        .await;
    }
    stop.cancel();
    running.await.unwrap();
}

#[tokio::test]
async fn after_a_claim_of_many_events_the_relay_rests_whatever_nudges_it() {
    let nats = Nats::start().await.unwrap();
    let outbox = Outbox::on(&nats).await;
    let relay = outbox.relay(&["--relay-poll-min", "1h", "--relay-poll-max", "1h"]);
    let nudge = relay.nudge();
    let stop = CancellationToken::new();
    let running = tokio::spawn(relay.run(stop.clone()));
    outbox.append(Uuid::now_v7(), 1).await;
    nudge.nudge();
    outbox.all_are_published().await;

    // Without acks the leases stay, which tell when each claim was.
    nats.freeze().await.unwrap();
    outbox.insert(Uuid::now_v7(), 1..=25, THING).await;
    nudge.nudge();
    let mut claims: Vec<i64> = Vec::new();
    let until = Instant::now() + SOON;
    while claims.len() < 2 {
        assert!(Instant::now() < until, "{claims:?}");
        outbox.append(Uuid::now_v7(), 1).await;
        nudge.nudge();
        let claimed_at = "SELECT DISTINCT (extract(epoch FROM lock_until) * 1000)::bigint FROM outbox_deliveries
                          WHERE lock_until IS NOT NULL ORDER BY 1";
        claims = sqlx::query_scalar(claimed_at).fetch_all(&outbox.db).await.unwrap();
    }
    assert!(claims[1] - claims[0] >= 25, "{claims:?}");

    nats.thaw().await.unwrap();
    outbox.all_are_published().await;
    stop.cancel();
    running.await.unwrap();
}

#[tokio::test]
async fn without_any_nudge_polling_finds_every_event() {
    let outbox = Outbox::new().await;
    let stop = CancellationToken::new();
    let running = tokio::spawn(outbox.relay(&["--relay-poll-max", "100ms"]).run(stop.clone()));
    let id = Uuid::now_v7();
    for sequence in 1..=3 {
        outbox.append(id, sequence).await;
        eventually(SOON, "it is published", async || {
            let state = outbox.state(id, sequence).await;
            if state.is_published { Ok(()) } else { Err(state) }
        })
        .await;
    }
    stop.cancel();
    running.await.unwrap();
}
