//! The program `payment-service`; `--help` lists its settings.

use std::process::ExitCode;

use clap::Parser;

#[tokio::main]
async fn main() -> ExitCode {
    match payment_service::run(payment_service::config::Config::parse()).await {
        Ok(code) => code,
        Err(line) => {
            eprintln!("payment-service: {line}");
            ExitCode::from(2)
        }
    }
}
