//! Retention: what is done goes when its time has come, what is not done never, and nobody waits for it.

use std::io::Write;
use std::time::{Duration, Instant};

use e2e_tests::{eventually, http_client};
use futures::future::{join_all, try_join_all};
use outbox_core::config::RetentionConfig;
use outbox_core::{Gauges, Retention};
use sqlx::postgres::PgPoolOptions;
use sqlx::{AssertSqlSafe, Connection, PgConnection, PgPool};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::fixture::{Outbox, SOON, drain, settings};
use crate::http::{order_of, start_without_broker};

/// Inserts events that were appended `age` ago, each of an aggregate of its own, with one set-based
/// statement: past the foreign key's trigger, which would look up each of them. Their ids rise, as
/// those of [`outbox_core::append`] do.
pub async fn insert_events(db: &mut PgConnection, count: i64, age: &str, columns: &str, values: &str) {
    let [event_ids, aggregate_ids] = [Uuid::new_v4(), Uuid::new_v4()].map(|id| {
        let prefix = &id.to_string()[..24];
        format!("('{prefix}' || lpad(to_hex(n), 12, '0'))::uuid")
    });
    let insert = format!(
        "SET session_replication_role = replica;
         WITH event AS (
             INSERT INTO outbox_events (event_id, aggregate_type, aggregate_id, aggregate_sequence, event_type,
                                        event_version, payload, headers, created_at)
             SELECT {event_ids}, 'thing', {aggregate_ids}, 1, 'ThingHappened', 1, '{{\"amount\": 12500}}',
                    '{{\"correlationid\": \"a-test\"}}', now() - interval '{age}'
             FROM generate_series(1, {count}) AS n
             RETURNING event_id, aggregate_type, aggregate_id, aggregate_sequence, created_at
         )
         INSERT INTO outbox_deliveries (event_id, aggregate_type, aggregate_id, aggregate_sequence, created_at, {columns})
         SELECT event_id, aggregate_type, aggregate_id, aggregate_sequence, created_at, {values} FROM event;
         RESET session_replication_role"
    );
    sqlx::raw_sql(AssertSqlSafe(insert)).execute(db).await.unwrap();
}

pub async fn insert_published(db: &mut PgConnection, count: i64, age: &str) {
    insert_events(db, count, age, "published_at", &format!("now() - interval '{age}'")).await;
}

async fn insert_processed(db: &mut PgConnection, count: i64, age: &str) {
    let insert = "INSERT INTO processed_events (consumer, event_id, processed_at)
                  SELECT 'things', gen_random_uuid(), now() - $2::text::interval FROM generate_series(1, $1)";
    sqlx::query(insert).bind(count).bind(age).execute(db).await.unwrap();
}

async fn count(db: &mut PgConnection, sql: &'static str) -> i64 {
    sqlx::query_scalar(sql).fetch_one(db).await.unwrap()
}

fn retention(db: &PgPool) -> Retention {
    Retention::new(db.clone(), &settings::<RetentionConfig>(&[]))
}

#[tokio::test]
async fn what_was_done_long_enough_ago_is_removed_and_what_is_not_done_never() {
    let (service, database) = start_without_broker("order-service", &[]).await;
    let mut db = PgConnection::connect(&database).await.unwrap();
    // Each state, thirty days old: published is the only one that may go, and only past its seven days.
    insert_published(&mut db, 3, "30 days").await;
    insert_published(&mut db, 2, "6 days").await;
    insert_events(&mut db, 1, "30 days", "next_attempt_at", "now()").await;
    insert_events(&mut db, 1, "30 days", "next_attempt_at, attempts, last_error", "now() + interval '1 hour', 9, 'x'")
        .await;
    let lease = "'frozen', gen_random_uuid(), now() + interval '1 hour'";
    insert_events(&mut db, 1, "30 days", "locked_by, lease_id, lock_until", lease).await;
    insert_events(&mut db, 1, "30 days", "failed_at, last_error", "now() - interval '30 days', 'x'").await;
    let follower = "
        WITH event AS (
            INSERT INTO outbox_events (event_id, aggregate_type, aggregate_id, aggregate_sequence, event_type,
                                       event_version, payload, headers, created_at)
            SELECT gen_random_uuid(), aggregate_type, aggregate_id, 2, 'ThingHappened', 1, '{}', '{}', created_at
            FROM outbox_deliveries WHERE failed_at IS NOT NULL
            RETURNING *
        )
        INSERT INTO outbox_deliveries (event_id, aggregate_type, aggregate_id, aggregate_sequence, created_at)
        SELECT event_id, aggregate_type, aggregate_id, aggregate_sequence, created_at FROM event";
    sqlx::query(follower).execute(&mut db).await.unwrap();
    insert_processed(&mut db, 3, "16 days").await;
    insert_processed(&mut db, 2, "14 days").await;
    for key in ["old", "young"] {
        let order = http_client().post(service.url("/orders")).header("idempotency-key", key);
        assert_eq!(order.json(&order_of(Uuid::new_v4())).send().await.unwrap().status(), 201);
    }
    let age_key = "UPDATE idempotency_keys SET created_at = now() - interval '25 hours' WHERE key = 'old'";
    sqlx::query(age_key).execute(&mut db).await.unwrap();

    // It cleans when it starts, and every minute.
    service.kill().await.unwrap();
    service.start_again().await.unwrap();

    let left = "SELECT (SELECT count(*) FROM outbox_deliveries WHERE published_at < now() - interval '7 days')
                     + (SELECT count(*) FROM processed_events WHERE processed_at < now() - interval '15 days')
                     + (SELECT count(*) FROM idempotency_keys WHERE created_at < now() - interval '1 day')";
    eventually(SOON, "what is old is gone", async || match count(&mut db, left).await {
        0 => Ok(()),
        left => Err(left),
    })
    .await;
    let unpublished = "SELECT count(*) FROM outbox_deliveries JOIN outbox_events USING (event_id)
                       WHERE published_at IS NULL AND outbox_events.aggregate_type = 'thing'";
    assert_eq!(count(&mut db, unpublished).await, 5, "pending, scheduled, leased, failed, blocked");
    assert_eq!(count(&mut db, "SELECT count(*) FROM outbox_deliveries WHERE published_at IS NOT NULL").await, 2);
    assert_eq!(count(&mut db, "SELECT count(*) FROM outbox_events WHERE aggregate_type = 'thing'").await, 7);
    assert_eq!(count(&mut db, "SELECT count(*) FROM processed_events").await, 2);
    assert_eq!(count(&mut db, "SELECT count(*) FROM idempotency_keys WHERE key = 'young'").await, 1);
    assert_eq!(count(&mut db, "SELECT count(*) FROM orders").await, 2, "an order outlives its key");
}

#[tokio::test]
async fn what_the_database_refuses_to_remove_is_said_with_its_reason_and_measured() {
    let (service, database) = start_without_broker("order-service", &[]).await;
    let mut db = PgConnection::connect(&database).await.unwrap();
    insert_processed(&mut db, 1, "16 days").await;
    let refuse = "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS
                      'BEGIN RAISE EXCEPTION ''nobody may delete here''; END';
                  CREATE TRIGGER refuse BEFORE DELETE ON processed_events FOR EACH ROW EXECUTE FUNCTION refuse()";
    sqlx::raw_sql(refuse).execute(&mut db).await.unwrap();
    service.kill().await.unwrap();
    service.start_again().await.unwrap();

    eventually(SOON, "the log says so", async || {
        let log = service.log();
        let is_said = log.lines().any(|l| l.contains("cannot be removed") && l.contains("nobody may delete here"));
        if is_said { Ok(()) } else { Err(log) }
    })
    .await;
    let page = http_client().get(service.admin_url("/metrics")).send().await.unwrap().text().await.unwrap();
    let lag = page.lines().find_map(|line| line.strip_prefix("retention_lag_seconds{table=\"processed_events\"} "));
    let lag: f64 = lag.unwrap_or_else(|| panic!("{page}")).parse().unwrap();
    assert!((86_400.0..86_500.0).contains(&lag), "a day past its fifteen: {lag}");
}

#[tokio::test]
async fn several_cleaners_remove_everything_once_beside_a_relay_and_writers() {
    const OLD: i64 = 20_000;
    let outbox = Outbox::new().await;
    let mut db = outbox.db.acquire().await.unwrap().detach();
    insert_published(&mut db, OLD, "8 days").await;
    let clean = async || {
        let cleaner = retention(&outbox.db);
        let mut removed = 0;
        loop {
            match cleaner.run_once().await? {
                0 => return Ok::<_, sqlx::Error>(removed),
                batch => removed += batch as i64,
            }
        }
    };
    let stop = CancellationToken::new();
    let relay = tokio::spawn(outbox.relay(&["--relay-poll-max", "50ms"]).run(stop.clone()));
    let writing = join_all((0..4).map(async |_| {
        let aggregate = Uuid::now_v7();
        for sequence in 1..=100 {
            outbox.append(aggregate, sequence).await;
        }
    }));
    let (removed, _) = tokio::join!(try_join_all((0..4).map(|_| clean())), writing);
    assert_eq!(removed.expect("no deadlock, no wait for a lock").iter().sum::<i64>(), OLD);
    stop.cancel();
    relay.await.unwrap();
    drain(&outbox.relay(&[])).await;
    assert_eq!(outbox.count("true").await, 400);
    assert_eq!(count(&mut db, "SELECT count(*) FROM outbox_events").await, 400, "an event goes with its delivery");

    insert_processed(&mut db, OLD, "16 days").await;
    let removed = try_join_all((0..4).map(|_| clean())).await;
    assert_eq!(removed.expect("no deadlock, no wait for a lock").iter().sum::<i64>(), OLD);
    assert_eq!(count(&mut db, "SELECT count(*) FROM processed_events").await, 0);
}

/// How long each of many appends took, the shortest first.
struct Latencies(Vec<Duration>);

impl Latencies {
    fn new(mut all: Vec<Duration>) -> Self {
        all.sort();
        assert!(all.len() > 100, "{} appends say nothing", all.len());
        Self(all)
    }

    fn part(&self, percent: usize) -> Duration {
        self.0[(self.0.len() - 1) * percent / 100]
    }
}

/// Appends events, one transaction each, with four writers until `stop`.
async fn write(outbox: &Outbox, stop: CancellationToken) -> Latencies {
    let writing = join_all((0..4).map(async |_| {
        let (aggregate, mut sequence, mut took) = (Uuid::now_v7(), 0, Vec::new());
        while !stop.is_cancelled() {
            sequence += 1;
            let begun = Instant::now();
            outbox.append(aggregate, sequence).await;
            took.push(begun.elapsed());
        }
        took
    }));
    Latencies::new(writing.await.concat())
}

/// How often somebody waited for a row that somebody else had locked, each time it was looked.
async fn waits_for_rows(db: &mut PgConnection, stop: CancellationToken) -> i64 {
    let waiting = "SELECT count(*) FROM pg_stat_activity
                   WHERE datname = current_database() AND wait_event IN ('transactionid', 'tuple')";
    let mut waits = 0;
    while !stop.is_cancelled() {
        waits += count(db, waiting).await;
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    waits
}

#[tokio::test]
async fn while_a_million_events_are_removed_writers_wait_for_nobody() {
    const OLD: i64 = 1_000_000;
    let outbox = Outbox::new().await;
    let mut db = outbox.db.acquire().await.unwrap().detach();
    let begun = Instant::now();
    insert_published(&mut db, OLD, "8 days").await;
    insert_events(&mut db, 100, "1 minute", "next_attempt_at", "now()").await;
    sqlx::query("ANALYZE outbox_deliveries").execute(&mut db).await.unwrap();
    let inserted_after = begun.elapsed();
    assert_gauges_leave_retained_events_alone(&outbox.db).await;

    let stop = CancellationToken::new();
    let (before, ()) = tokio::join!(write(&outbox, stop.clone()), async {
        tokio::time::sleep(Duration::from_secs(3)).await;
        stop.cancel();
    });

    let stop = CancellationToken::new();
    let begun = Instant::now();
    let cleaning = async {
        let cleaner = retention(&outbox.db);
        while cleaner.run_once().await.expect("nobody is in its way") > 0 {}
        stop.cancel();
        begun.elapsed()
    };
    let (during, waits, cleaned_after) =
        tokio::join!(write(&outbox, stop.clone()), waits_for_rows(&mut db, stop.clone()), cleaning);

    for (what, latencies) in [("before", &before), ("while it cleans", &during)] {
        // Not eprintln: the test harness would hold the line back.
        let _ = writeln!(
            std::io::stderr(),
            "retention: appends {what}: {} of them, median {:.1?}, 99 % within {:.1?}, slowest {:.1?}",
            latencies.0.len(),
            latencies.part(50),
            latencies.part(99),
            latencies.part(100),
        );
    }
    let _ = writeln!(
        std::io::stderr(),
        "retention: {OLD} events inserted in {inserted_after:.1?}, removed in {cleaned_after:.1?}"
    );
    assert_eq!(outbox.count("published_at < now() - interval '7 days'").await, 0);
    assert_eq!(waits, 0, "nobody waits for a row that is being removed");
    assert!(during.part(50) < before.part(50) * 5 + Duration::from_millis(20), "appends became slow");
    assert!(during.part(99) < Duration::from_secs(1), "appends were held up");
}

/// Counting for the gauges reads the hundred events that wait, and none of the million that are retained.
async fn assert_gauges_leave_retained_events_alone(db: &PgPool) {
    let alone = PgPoolOptions::new().max_connections(1).connect_with(db.connect_options().as_ref().clone());
    let alone = alone.await.unwrap();
    let before = rows_read(&alone).await;
    Gauges::new(alone.clone()).run_once().await.unwrap();
    let read = rows_read(&alone).await - before;
    assert!((100..1_000).contains(&read), "{read} rows read for the gauges");

    // The tip of each index.
    retention(&alone).measure().await.unwrap();
    let read = rows_read(&alone).await - before - read;
    assert!(read < 100, "{read} rows read for retention's lag");
}

/// All rows that have been read in this database, on the way of an index or not.
async fn rows_read(alone: &PgPool) -> i64 {
    let mut db = alone.acquire().await.unwrap();
    // The session that has read them tells of it late, unless it is told to.
    sqlx::query("SELECT pg_stat_force_next_flush()").execute(&mut *db).await.unwrap();
    let read = "SELECT sum(seq_tup_read + coalesce(idx_tup_fetch, 0))::bigint FROM pg_stat_user_tables";
    count(&mut db, read).await
}
