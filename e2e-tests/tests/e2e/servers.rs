//! What the tests' own stack guarantees.

use std::env;
use std::io::{BufRead, BufReader};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use e2e_tests::{Nats, Postgres, eventually};
use rustix::process::{Pid, Signal, kill_process};
use sqlx::{Connection, PgConnection};

const GONE_WITHIN: Duration = Duration::from_secs(20);

/// Tells the processes that are started to see what they leave behind how they will end.
const END: &str = "E2E_END";

#[tokio::test]
async fn a_stopped_server_comes_back_on_its_port_with_its_data() -> anyhow::Result<()> {
    let postgres = Postgres::start().await?;
    let nats = Nats::start().await?;
    let database = postgres.create_database("kept").await?;
    let mut connection = PgConnection::connect(&database).await?;
    sqlx::query("CREATE TABLE kept AS SELECT 42 AS answer").execute(&mut connection).await?;

    postgres.stop_at_once().await?;
    postgres.start_again().await?;
    nats.stop_at_once().await?;
    nats.start_again().await?;

    let mut connection = PgConnection::connect(&database).await?;
    let answer: i32 = sqlx::query_scalar("SELECT answer FROM kept").fetch_one(&mut connection).await?;
    assert_eq!(answer, 42);
    Ok(())
}

#[tokio::test]
async fn a_frozen_server_does_not_answer_until_it_is_thawed() -> anyhow::Result<()> {
    let postgres = Postgres::start().await?;
    let mut connection = PgConnection::connect(&postgres.url("postgres")).await?;

    postgres.freeze().await?;
    let mut ping = Box::pin(connection.ping());
    let answer = tokio::time::timeout(Duration::from_millis(300), &mut ping).await;
    assert!(answer.is_err(), "a frozen server answers: {answer:?}");

    postgres.thaw().await?;
    ping.await?;
    Ok(())
}

#[tokio::test]
async fn servers_and_their_folders_are_gone_after_a_process_that_had_them() -> anyhow::Result<()> {
    let processes =
        ["SIGKILL", "SIGINT", "SIGTERM", "panic", "return"].map(|end| (end, start_process_with_servers(end)));
    for (end, mut process) in processes {
        let traces = traces_of(&mut process);
        for trace in &traces {
            assert!(is_there(trace), "{trace} is not there while the process that has it runs");
        }
        let pid = Pid::from_child(&process);
        match end {
            "SIGKILL" => kill_process(pid, Signal::KILL)?,
            "SIGINT" => kill_process(pid, Signal::INT)?,
            "SIGTERM" => kill_process(pid, Signal::TERM)?,
            _ => drop(process.stdin.take()),
        }
        process.wait()?;
        for trace in &traces {
            eventually(GONE_WITHIN, &format!("{trace} is gone after {end}"), async || {
                if is_there(trace) { Err("still there") } else { Ok(()) }
            })
            .await;
        }
    }
    Ok(())
}

/// Starts this test program again, to run the test below.
fn start_process_with_servers(end: &str) -> Child {
    Command::new(env::current_exe().expect("this program has a path"))
        .args(["--exact", "servers::a_process_with_servers", "--nocapture"])
        .env(END, end)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .expect("this program can be started again")
}

/// What the process will have to take away, when it has it all.
fn traces_of(process: &mut Child) -> Vec<String> {
    let lines = BufReader::new(process.stdout.take().expect("its output is piped")).lines().map_while(Result::ok);
    let traces: Vec<String> = lines
        .take_while(|line| line != "ready")
        .filter_map(|line| Some(line.strip_prefix("trace ")?.to_owned()))
        .collect();
    assert_eq!(traces.len(), 6, "the process has three servers, each with a folder or container and an address");
    traces
}

#[tokio::test]
async fn a_process_with_servers() -> anyhow::Result<()> {
    let Ok(end) = env::var(END) else { return Ok(()) };
    // One in a static, which never drops, and two that do.
    let postgres = Postgres::shared().await?;
    let (own, nats) = (Postgres::start().await?, Nats::start().await?);
    for trace in [postgres.trace(), own.trace(), nats.trace()] {
        println!("trace {}", trace.expect("none of these servers was given"));
    }
    for url in [postgres.url(""), own.url(""), nats.url().to_owned()] {
        let address = url.trim_end_matches('/').rsplit(['@', '/']).next().expect("a URL has an address");
        println!("trace {address}");
    }
    println!("ready");
    std::io::stdin().read_line(&mut String::new())?;
    assert_ne!(end, "panic", "as a test that fails");
    Ok(())
}

/// Whether a folder, a listener or a container is there.
fn is_there(trace: &str) -> bool {
    let is_container = || Command::new("docker").args(["container", "inspect", trace]).output();
    Path::new(trace).exists()
        || TcpStream::connect(trace).is_ok()
        || is_container().is_ok_and(|inspected| inspected.status.success())
}
