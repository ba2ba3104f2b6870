//! The program `order-service`; `--help` lists its settings.

use std::process::ExitCode;

use clap::Parser;

#[tokio::main]
async fn main() -> ExitCode {
    match order_service::run(order_service::config::Config::parse()).await {
        Ok(code) => code,
        Err(line) => {
            eprintln!("order-service: {line}");
            ExitCode::from(2)
        }
    }
}
