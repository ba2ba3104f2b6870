//! The database is there, and does not do as asked: clients are turned away, all goes on unaided when it
//! does, and nobody is blamed for it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use e2e_tests::{Pair, Postgres, Proxy};
use futures::future::join_all;
use sqlx::{AssertSqlSafe, Connection, PgConnection, PgPool};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use crate::faults::{no_event_is_blamed, unforgiving, while_orders_come};
use crate::http_outages::{becomes_ready, becomes_unready};

/// How long a fault lasts once everybody has noticed it.
const A_WHILE: Duration = Duration::from_secs(3);

async fn run(db: &PgPool, sql: &str) {
    sqlx::raw_sql(AssertSqlSafe(sql)).execute(db).await.unwrap_or_else(|error| panic!("{sql}: {error}"));
}

/// Ends the sessions of both services.
async fn end_sessions(pair: &Pair) {
    let end = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity
               WHERE datname = current_database() AND application_name IN ('order-service', 'payment-service')";
    for db in [&pair.orders_db, &pair.payments_db] {
        run(db, end).await;
    }
}

async fn both_become_unready(pair: &Pair) {
    becomes_unready(&pair.orders[0], "database").await;
    becomes_unready(&pair.payments[0], "database").await;
}

/// New sessions take no writes, or take them. Sessions that there are stay as they are.
async fn take_writes(pair: &Pair, takes_writes: bool) {
    for db in [&pair.orders_db, &pair.payments_db] {
        let name: String = sqlx::query_scalar("SELECT current_database()").fetch_one(db).await.unwrap();
        let value =
            if takes_writes { "RESET default_transaction_read_only" } else { "SET default_transaction_read_only = on" };
        // In a session that takes writes whatever the default is.
        run(db, &format!(r#"BEGIN READ WRITE; ALTER DATABASE "{name}" {value}; COMMIT"#)).await;
    }
}

#[tokio::test]
async fn after_a_failover_to_a_server_without_writes_no_session_to_it_is_kept() {
    let pair = unforgiving().start().await;
    let (placed, ()) = while_orders_come(&pair, async {
        // As when the name of the database leads to a standby for a while: who connects then stays there.
        take_writes(&pair, false).await;
        end_sessions(&pair).await;
        both_become_unready(&pair).await;
        // Who starts now waits.
        pair.payments[0].kill().await.unwrap();
        pair.payments[0].start_again().await.unwrap();
        becomes_unready(&pair.payments[0], "start").await;
        tokio::time::sleep(A_WHILE).await;
        take_writes(&pair, true).await;
        becomes_ready(&pair).await;
    })
    .await;
    assert!(placed.turned_away > 0);

    // More at once than there are sessions: none of them takes no writes.
    let orders = join_all((0..50).map(|_| pair.place(100, "EUR"))).await;
    let mut placed = placed;
    placed.orders.extend(orders.into_iter().map(|order| order.id));
    pair.all_is_well(&placed.orders).await;
    no_event_is_blamed(&pair).await;
}

#[tokio::test]
async fn a_database_that_is_out_of_connections_turns_clients_away_and_costs_no_event_an_attempt() {
    let postgres = Postgres::start().await.unwrap();
    let (orders, payments) =
        (postgres.create_database("orders").await.unwrap(), postgres.create_database("payments").await.unwrap());
    // Superusers are let in whatever the limit is.
    let mut admin = PgConnection::connect(&orders).await.unwrap();
    sqlx::query("CREATE ROLE services LOGIN PASSWORD 'secret'").execute(&mut admin).await.unwrap();
    let mut as_services = Vec::new();
    for url in [&orders, &payments] {
        let mut url: reqwest::Url = url.parse().unwrap();
        let name = url.path().trim_start_matches('/').to_owned();
        sqlx::query(AssertSqlSafe(format!(r#"ALTER DATABASE "{name}" OWNER TO services"#)))
            .execute(&mut admin)
            .await
            .unwrap();
        url.set_username("services").unwrap();
        url.set_password(Some("secret")).unwrap();
        as_services.push(url.to_string());
    }
    let pair = unforgiving()
        .databases(&orders, &payments)
        .order_setting("DATABASE_URL", &as_services[0])
        .payment_setting("DATABASE_URL", &as_services[1])
        .start()
        .await;

    let limit = async |limit: i32| run(&pair.orders_db, &format!("ALTER ROLE services CONNECTION LIMIT {limit}")).await;
    let (placed, ()) = while_orders_come(&pair, async {
        limit(0).await;
        end_sessions(&pair).await;
        both_become_unready(&pair).await;
        tokio::time::sleep(A_WHILE).await;
        // Some, and far fewer than asked for.
        limit(3).await;
        tokio::time::sleep(A_WHILE).await;
        limit(-1).await;
        becomes_ready(&pair).await;
    })
    .await;
    assert!(placed.turned_away > 0);
    pair.all_is_well(&placed.orders).await;
    no_event_is_blamed(&pair).await;
}

#[tokio::test]
async fn sessions_that_are_ended_again_and_again_lose_and_double_nothing() {
    let pair = unforgiving().setting("RELAY_LEASE", "3s").setting("RELAY_PUBLISH_TIMEOUT", "2s").start().await;
    let (placed, ()) = while_orders_come(&pair, async {
        for _ in 0..40 {
            end_sessions(&pair).await;
            tokio::time::sleep(Duration::from_millis(fastrand::u64(20..300))).await;
        }
    })
    .await;
    assert!(placed.turned_away > 0);
    pair.all_is_well(&placed.orders).await;
    no_event_is_blamed(&pair).await;
}

#[tokio::test]
async fn a_database_that_answers_later_than_leases_last_delays_everything_and_blames_nobody() {
    let postgres = Postgres::shared().await.unwrap();
    let (orders, payments) =
        (postgres.create_database("orders").await.unwrap(), postgres.create_database("payments").await.unwrap());
    let (orders_way, to_orders) = Proxy::of(&orders).await.unwrap();
    let (payments_way, to_payments) = Proxy::of(&payments).await.unwrap();
    let pair = unforgiving()
        .databases(&orders, &payments)
        .order_setting("DATABASE_URL", &orders_way)
        .payment_setting("DATABASE_URL", &payments_way)
        .setting("RELAY_LEASE", "3s")
        .setting("RELAY_PUBLISH_TIMEOUT", "2s")
        .setting("CONSUMER_ACK_WAIT", "5s")
        .start()
        .await;
    let (placed, ()) = while_orders_come(&pair, async {
        for delay in [150, 600] {
            for proxy in [&to_orders, &to_payments] {
                proxy.delay(Duration::from_millis(delay));
            }
            tokio::time::sleep(3 * A_WHILE).await;
        }
        for proxy in [&to_orders, &to_payments] {
            proxy.delay(Duration::ZERO);
        }
        becomes_ready(&pair).await;
    })
    .await;
    pair.all_is_well(&placed.orders).await;
    no_event_is_blamed(&pair).await;
}

#[tokio::test]
async fn tables_that_are_locked_for_longer_than_anyone_waits_delay_everything_and_blame_nobody() {
    let pair = unforgiving().setting("RELAY_LEASE", "3s").setting("RELAY_PUBLISH_TIMEOUT", "2s").start().await;
    let lock = async |db: &PgPool, tables: &str, time: Duration| {
        let mut tx = db.begin().await.unwrap();
        sqlx::query(AssertSqlSafe(format!("LOCK TABLE {tables}"))).execute(&mut *tx).await.unwrap();
        tokio::time::sleep(time).await;
        tx.commit().await.unwrap();
    };
    let (placed, ()) = while_orders_come(&pair, async {
        // Longer than a lease.
        let long = Duration::from_secs(4);
        for tables in ["outbox_deliveries", "processed_events, parked_events"] {
            tokio::join!(lock(&pair.orders_db, tables, long), lock(&pair.payments_db, tables, long));
        }
        // The services wait for a lock for ten seconds. In the order in which a consumer takes them.
        let long = Duration::from_secs(12);
        tokio::join!(
            lock(&pair.orders_db, "inbox_sequences, orders", long),
            lock(&pair.payments_db, "inbox_sequences, payments", long)
        );
        becomes_ready(&pair).await;
    })
    .await;
    for service in [&pair.orders[0], &pair.payments[0]] {
        let lines = service.log().lines().count();
        assert!(lines < 50, "it said {lines} lines\n{}", service.last_words());
    }
    assert!(placed.turned_away > 0);
    pair.all_is_well(&placed.orders).await;
    no_event_is_blamed(&pair).await;
}

/// A way to a database on which every other connection that commits is cut: in turn before the database
/// hears of it, and before the client hears that it was done. Neither can be told from the other.
struct Guillotine {
    is_up: Arc<AtomicBool>,
    commits: Arc<AtomicUsize>,
}

impl Guillotine {
    /// Stands on the way to the database at this URL. Returns the URL of that way.
    async fn before(database: &str) -> (String, Self) {
        let mut url: reqwest::Url = database.parse().unwrap();
        let server = ("127.0.0.1", url.port().expect("the URL names a port"));
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        url.set_port(Some(listener.local_addr().unwrap().port())).unwrap();
        let (is_up, commits) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
        let guillotine = Self { is_up: Arc::clone(&is_up), commits: Arc::clone(&commits) };
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let (is_up, commits) = (Arc::clone(&is_up), Arc::clone(&commits));
                tokio::spawn(async move { pass_on(client, TcpStream::connect(server).await?, &is_up, &commits).await });
            }
        });
        (url.into(), guillotine)
    }
}

async fn pass_on(
    mut client: TcpStream,
    mut server: TcpStream,
    is_up: &AtomicBool,
    commits: &AtomicUsize,
) -> std::io::Result<()> {
    let (mut asked, mut answered) = (vec![0; 16 * 1024], vec![0; 16 * 1024]);
    loop {
        tokio::select! {
            length = client.read(&mut asked) => {
                let asked = &asked[..length?];
                if asked.is_empty() {
                    return Ok(());
                }
                let is_commit = asked.windows(7).any(|bytes| bytes == b"COMMIT\0");
                let number = if is_commit && is_up.load(Ordering::SeqCst) { commits.fetch_add(1, Ordering::SeqCst) } else { 1 };
                if number % 4 == 0 {
                    return Ok(());
                }
                server.write_all(asked).await?;
                if number % 4 == 2 {
                    // It is done when the database says so.
                    let _ = server.read(&mut answered).await?;
                    return Ok(());
                }
            }
            length = server.read(&mut answered) => {
                let answered = &answered[..length?];
                if answered.is_empty() {
                    return Ok(());
                }
                client.write_all(answered).await?;
            }
        }
    }
}

#[tokio::test]
async fn a_commit_whose_outcome_nobody_knows_is_found_again_or_made_again() {
    let postgres = Postgres::shared().await.unwrap();
    let (orders, payments) =
        (postgres.create_database("orders").await.unwrap(), postgres.create_database("payments").await.unwrap());
    let (orders_way, orders_guillotine) = Guillotine::before(&orders).await;
    let (payments_way, payments_guillotine) = Guillotine::before(&payments).await;
    let pair = unforgiving()
        .databases(&orders, &payments)
        .order_setting("DATABASE_URL", &orders_way)
        .payment_setting("DATABASE_URL", &payments_way)
        .start()
        .await;
    let (placed, ()) = while_orders_come(&pair, async {
        for guillotine in [&orders_guillotine, &payments_guillotine] {
            guillotine.is_up.store(true, Ordering::SeqCst);
        }
        tokio::time::sleep(2 * A_WHILE).await;
        for guillotine in [&orders_guillotine, &payments_guillotine] {
            guillotine.is_up.store(false, Ordering::SeqCst);
            let commits = guillotine.commits.load(Ordering::SeqCst);
            assert!(commits >= 20, "{commits} commits met it");
        }
        becomes_ready(&pair).await;
    })
    .await;
    assert!(placed.turned_away > 0 && placed.replayed > 0, "{} and {}", placed.turned_away, placed.replayed);
    pair.all_is_well(&placed.orders).await;
    no_event_is_blamed(&pair).await;
}
