//! A Prometheus that watches services and evaluates alert rules about them.

use std::collections::BTreeSet;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, ensure};
use reqwest::{Client, Url};
use serde_json::{Value, json};

use crate::api::http_client;
use crate::find::Installed;
use crate::keeper::watched;
use crate::place::{free_port, private_folder};
use crate::progress::say;
use crate::server::Server;
use crate::service::Service;
use crate::wait::wait_until;

static INSTALLED: Installed =
    Installed { name: "prometheus", oldest: (2, 42), companions: &["promtool"], elsewhere: &[] };

const ANSWERS_WITHIN: Duration = Duration::from_secs(30);

/// A Prometheus that looks every second. It and its data are gone when this is dropped.
pub struct Prometheus {
    url: Url,
    http: Client,
    server: Server,
}

impl Prometheus {
    /// Starts the machine's Prometheus with `rules` and these targets, each with the `service` label it
    /// gets; its job is the program's name. `None` where the machine has none: a line says so.
    pub async fn start(targets: &[(&str, &Service)], rules: &str) -> anyhow::Result<Option<Self>> {
        let program = match INSTALLED.find() {
            Ok(program) => program,
            Err(reason) => {
                say(&format!("skipped where Prometheus is needed: {reason:#} (Debian's package is `prometheus`)"));
                return Ok(None);
            }
        };
        let folder = private_folder("prometheus")?;
        let [config, rules_file, data] = ["prometheus.yml", "rules.yml", "data"].map(|name| folder.path().join(name));
        let jobs: Vec<Value> = targets.iter().enumerate().map(|(n, target)| job(n, *target)).collect();
        // JSON is YAML.
        let settings = json!({
            "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
            "rule_files": ["rules.yml"],
            "scrape_configs": jobs,
        });
        std::fs::write(&config, settings.to_string())?;
        std::fs::write(&rules_file, rules)?;
        let address = format!("127.0.0.1:{}", free_port());
        let url = format!("http://{address}/").parse()?;
        let server = Server::run(folder, move || {
            let mut command = watched(&program, "KILL");
            command.arg("--config.file").arg(&config).arg("--storage.tsdb.path").arg(&data);
            command.args(["--web.listen-address", &address, "--log.level", "warn"]);
            command
        })?;
        let prometheus = Self { url, http: http_client(), server };
        prometheus.wait_until_it_answers().await?;
        Ok(Some(prometheus))
    }

    async fn wait_until_it_answers(&self) -> anyhow::Result<()> {
        let url = self.url.join("-/ready")?;
        let answers = wait_until(ANSWERS_WITHIN, "Prometheus answers", async || {
            self.http.get(url.clone()).send().await?.error_for_status()?;
            reqwest::Result::Ok(())
        });
        self.server.wait_until(answers).await
    }

    /// The alerts that fire now: each with its name and the `service` it is about, which is empty where
    /// it does not say.
    pub async fn firing(&self) -> anyhow::Result<BTreeSet<(String, String)>> {
        let answer = self.ask("api/v1/alerts", &[]).await?;
        let alerts = answer["alerts"].as_array().context("a list of alerts")?;
        let label = |alert: &Value, name: &str| alert["labels"][name].as_str().unwrap_or_default().to_owned();
        let firing = alerts.iter().filter(|alert| alert["state"] == "firing");
        Ok(firing.map(|alert| (label(alert, "alertname"), label(alert, "service"))).collect())
    }

    /// The series that an expression finds now.
    ///
    /// # Errors
    /// It does not understand the expression, among others.
    pub async fn query(&self, expression: &str) -> anyhow::Result<Vec<Value>> {
        let answer = self.ask("api/v1/query", &[("query", expression)]).await?;
        Ok(answer["result"].as_array().with_context(|| format!("{expression} finds no series"))?.clone())
    }

    async fn ask(&self, path: &str, query: &[(&str, &str)]) -> anyhow::Result<Value> {
        let mut url = self.url.join(path)?;
        url.query_pairs_mut().extend_pairs(query);
        let mut answer: Value = self.http.get(url).send().await?.json().await?;
        ensure!(answer["status"] == "success", "Prometheus answers {answer}");
        Ok(answer["data"].take())
    }
}

fn job(number: usize, (label, service): (&str, &Service)) -> Value {
    let address = service.admin_url("").replace("http://", "");
    json!({
        // Each needs a name of its own; the label is what rules read.
        "job_name": number.to_string(),
        "static_configs": [{"targets": [address], "labels": {"job": service.name(), "service": label}}],
    })
}

/// Runs `promtool` on this file; `None` where the machine has none: a line says so.
pub async fn promtool(arguments: &[&str]) -> anyhow::Result<Option<String>> {
    let Ok(program) = INSTALLED.find() else {
        say("skipped where promtool is needed (Debian's package is `prometheus`)");
        return Ok(None);
    };
    let mut command = Command::new(program.with_file_name("promtool"));
    command.args(arguments);
    let output = crate::find::run(command).await?;
    Ok(Some(String::from_utf8(output.stdout)?))
}
