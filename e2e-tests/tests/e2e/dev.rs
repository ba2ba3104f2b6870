//! `cargo dev`, as its users start it.

use std::io::{BufRead, BufReader};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use anyhow::Context;
use e2e_tests::wait_until;
use rustix::process::{Pid, Signal, kill_process};

const ENDS_WITHIN: Duration = Duration::from_secs(30);

#[tokio::test]
async fn cargo_dev_once_succeeds_when_every_order_has_reached_its_state_even_if_a_port_is_taken() -> anyhow::Result<()>
{
    // Whoever has the port, it is taken.
    let _taken = TcpListener::bind("127.0.0.1:8080");

    let output = dev().arg("--once").output()?;

    let shown = String::from_utf8(output.stdout)?;
    assert!(output.status.success(), "{shown}");
    assert!(shown.contains("port 8080 is taken: order-service uses "), "{shown}");
    for end in ["paid after", "declined after", "refunded after"] {
        assert!(shown.contains(end), "no order is shown as {end} …:\n{shown}");
    }
    Ok(())
}

#[tokio::test]
async fn cargo_dev_stays_up_until_it_is_told_to_stop_and_leaves_nothing_behind() -> anyhow::Result<()> {
    let mut process = dev().stdout(Stdio::piped()).spawn()?;
    let lines = BufReader::new(process.stdout.take().context("its output is piped")?).lines();
    let shown: Vec<String> =
        lines.map_while(Result::ok).take_while(|line| !line.starts_with("Place an order")).collect();
    let addresses: Vec<&str> = shown.iter().filter_map(|line| address_in(line)).collect();
    assert_eq!(addresses.len(), 5, "two services, two databases and a broker are shown:\n{}", shown.join("\n"));
    for address in &addresses {
        TcpStream::connect(address).with_context(|| format!("{address} is shown and does not answer"))?;
    }

    kill_process(Pid::from_child(&process), Signal::TERM)?;

    assert!(end_of(&mut process).await?.success());
    for address in &addresses {
        assert!(TcpStream::connect(address).is_err(), "{address} still answers");
    }
    Ok(())
}

fn dev() -> Command {
    let mut dev = Command::new(env!("CARGO_BIN_EXE_dev"));
    dev.stdin(Stdio::null()).stderr(Stdio::inherit());
    dev
}

/// The address in a line such as `  NATS             nats --server nats://127.0.0.1:4222 stream ls`.
fn address_in(line: &str) -> Option<&str> {
    let from = &line[line.find("127.0.0.1:")?..];
    from.split(['/', ' ']).next()
}

async fn end_of(process: &mut Child) -> anyhow::Result<ExitStatus> {
    wait_until(ENDS_WITHIN, "the end of cargo dev", async || process.try_wait()?.context("it still runs")).await
}
