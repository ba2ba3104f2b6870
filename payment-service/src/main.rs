//! The program `payment-service`; `--help` lists its settings.

use std::process::ExitCode;

#[tokio::main]
async fn main() -> ExitCode {
    match payment_service::run(outbox_core::config::read()).await {
        Ok(code) => code,
        Err(line) => {
            eprintln!("payment-service: {line}");
            ExitCode::from(2)
        }
    }
}
