//! The program `order-service`; `--help` lists its settings.

use std::process::ExitCode;

#[tokio::main]
async fn main() -> ExitCode {
    match order_service::run(outbox_core::config::read()).await {
        Ok(code) => code,
        Err(line) => {
            eprintln!("order-service: {line}");
            ExitCode::from(2)
        }
    }
}
