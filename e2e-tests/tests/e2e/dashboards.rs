//! Alerts, dashboard and runbook agree with each other and with the metrics that there are.

use std::collections::BTreeSet;

use e2e_tests::{Prometheus, program, promtool, workspace};
use futures::future::join_all;
use outbox_core::measure::{self, Kind, Metric};
use serde_json::Value;
use tokio::process::Command;

const RULES: &str = "deploy/prometheus/rules.yml";

/// Labels that Prometheus itself adds, or a rule.
const ADDED_LABELS: [&str; 4] = ["job", "instance", "service", "le"];

pub fn read(path: &str) -> String {
    std::fs::read_to_string(workspace().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// The names of all alerts.
pub fn alerts() -> BTreeSet<String> {
    let rules = read(RULES);
    rules.lines().filter_map(|line| line.trim().strip_prefix("- alert: ").map(str::to_owned)).collect()
}

/// Every expression of the dashboard's panels.
pub fn dashboard_queries() -> Vec<String> {
    let dashboard: Value = serde_json::from_str(&read("deploy/grafana/dashboard.json")).expect("it is JSON");
    let panels = dashboard["panels"].as_array().expect("it has panels");
    let targets = panels.iter().flat_map(|panel| panel["targets"].as_array().into_iter().flatten());
    targets.map(|target| target["expr"].as_str().expect("a target has an expression").to_owned()).collect()
}

/// An expression of the dashboard as Prometheus is to be asked: with what Grafana puts in.
pub fn without_variables(query: &str) -> String {
    query.replace("$service", ".*").replace("$__rate_interval", "1m")
}

/// The words of an expression, and whether each stands where a label does.
fn words(expression: &str) -> Vec<(&str, bool)> {
    let mut words = Vec::new();
    let is_word = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | ':' | '$');
    let (mut in_braces, mut in_quotes, mut in_labels) = (false, false, false);
    let mut rest = expression;
    while let Some(c) = rest.chars().next() {
        let length = rest.find(|c| !is_word(c)).unwrap_or(rest.len());
        if length == 0 {
            match c {
                '"' => in_quotes = !in_quotes,
                '{' => in_braces = true,
                '}' => in_braces = false,
                ')' => in_labels = false,
                _ => {}
            }
            rest = &rest[c.len_utf8()..];
            continue;
        }
        let (word, after) = rest.split_at(length);
        if !in_quotes {
            words.push((word, in_braces || in_labels));
        }
        // `by (…)`, `on (…)`: what stands in the next brackets are labels.
        in_labels |= matches!(word, "by" | "on" | "without");
        rest = after;
    }
    words
}

/// The metric that a series belongs to: a histogram has three.
fn metric_of(series: &str) -> Option<&'static Metric> {
    measure::ALL.iter().find(|metric| match metric.kind {
        Kind::Histogram => ["_bucket", "_sum", "_count"].iter().any(|part| series == format!("{}{part}", metric.name)),
        Kind::Counter | Kind::Gauge => series == metric.name,
    })
}

/// Checks that an expression names what there is, and returns the metrics it names.
fn check(expression: &str) -> BTreeSet<&'static str> {
    let first_word = |name: &str| name.split('_').next().unwrap_or_default().to_owned();
    let ours: BTreeSet<String> = measure::ALL.iter().map(|metric| first_word(metric.name)).collect();
    let words = words(expression);
    let mut metrics = BTreeSet::new();
    let mut labels: BTreeSet<&str> = ADDED_LABELS.into();
    let series =
        words.iter().filter(|(word, is_label)| !is_label && word.contains('_') && ours.contains(&first_word(word)));
    for (word, _) in series {
        let metric = metric_of(word).unwrap_or_else(|| panic!("there is no {word}: {expression}"));
        metrics.insert(metric.name);
        labels.extend(metric.labels);
    }
    for (word, _) in words.iter().filter(|(_, is_label)| *is_label) {
        assert!(labels.contains(word), "no metric here has a label {word}: {expression}");
    }
    metrics
}

/// The expressions of the rules: on one line, or on the lines below that stand deeper.
fn rule_expressions() -> Vec<String> {
    let rules = read(RULES);
    let mut lines = rules.lines().peekable();
    let mut expressions = Vec::new();
    while let Some(line) = lines.next() {
        let Some(expression) = line.trim().strip_prefix("expr: ") else { continue };
        let mut expression = expression.trim_start_matches('|').to_owned();
        while let Some(more) = lines.next_if(|next| next.starts_with("          ")) {
            expression = format!("{expression} {}", more.trim());
        }
        expressions.push(expression);
    }
    expressions
}

#[test]
fn every_metric_that_a_rule_names_exists_and_has_the_labels_that_it_names() {
    let expressions = rule_expressions();
    assert!(expressions.len() > alerts().len(), "{expressions:?}");
    let named: BTreeSet<&str> = expressions.iter().flat_map(|expression| check(expression)).collect();
    assert!(named.len() > 10, "{named:?}");
}

#[test]
fn every_metric_that_the_dashboard_names_exists_and_every_metric_is_on_the_dashboard() {
    let shown: BTreeSet<&str> = dashboard_queries().iter().flat_map(|query| check(query)).collect();
    assert_eq!(shown, measure::ALL.iter().map(|metric| metric.name).collect());
}

#[test]
fn a_name_that_does_not_exist_would_be_noticed() {
    for wrong in [
        "rate(outbox_publishes_total[5m])",
        "outbox_events_count",
        "rate(outbox_batch_seconds[5m])",
        r#"outbox_events{status="failed"}"#,
        "sum by (type) (outbox_published_total)",
        "up unless on (pod) process_task_up",
    ] {
        assert!(std::panic::catch_unwind(|| check(wrong)).is_err(), "{wrong}");
    }
}

#[test]
fn every_alert_has_a_severity_a_summary_and_its_own_section_of_the_runbook() {
    let (rules, page) = (read(RULES), read("docs/runbook.md"));
    for alert in rules.split("- alert: ").skip(1) {
        let name = alert.lines().next().unwrap();
        let link = format!("runbook_url: docs/runbook.md#{}\n", name.to_lowercase());
        assert!(alert.contains(&link), "{name} has no {link}");
        assert!(alert.contains("severity: critical") || alert.contains("severity: warning"), "{name}");
        assert!(alert.contains("summary: \""), "{name}");
    }
    let mut sections = BTreeSet::new();
    for section in page.split("\n## ").skip(1) {
        let name = section.lines().next().unwrap();
        for part in ["**It means**", "**Look**", "**Do**"] {
            assert!(section.contains(part), "{name} has no {part}");
        }
        assert!(section.contains("\noutboxctl ") || section.contains(" outboxctl "), "{name} has no command");
        sections.insert(name.to_owned());
    }
    assert_eq!(sections, alerts());
}

#[test]
fn every_panel_that_the_runbook_names_is_on_the_dashboard() {
    let (page, dashboard) = (read("docs/runbook.md"), read("deploy/grafana/dashboard.json"));
    let quoted: Vec<&str> =
        page.split('"').skip(1).step_by(2).filter(|text| text.starts_with(char::is_uppercase)).collect();
    assert!(quoted.len() > 5, "{quoted:?}");
    for title in quoted {
        let title = title.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(dashboard.contains(&format!("\"title\": \"{title}\"")), "no panel {title}");
    }
}

#[tokio::test]
async fn every_outboxctl_line_of_the_runbook_can_be_run() {
    let outboxctl = program("outboxctl").await.expect("the programs build");
    let page = read("docs/runbook.md");
    let lines: BTreeSet<&str> = page.lines().map(str::trim).filter(|line| line.starts_with("outboxctl ")).collect();
    assert!(lines.len() > 20, "{lines:?}");
    let running = lines.into_iter().map(async |line| {
        // An id stands for each variable.
        let words = line.split_whitespace().skip(1).map(|word| match word.starts_with("\"$") {
            true => "0199c0de-0000-7000-8000-000000000001",
            false => word,
        });
        // Nobody is there: whose arguments are right fails later than at them.
        let nowhere = "postgres://nobody:secret@127.0.0.1:1/nothing";
        let mut command = Command::new(&outboxctl);
        command.args(words).env("DATABASE_URL", nowhere).env("PEER_DATABASE_URL", nowhere);
        let output = command.env("NATS_URL", "nats://127.0.0.1:1").kill_on_drop(true).output().await.unwrap();
        assert_eq!(output.status.code(), Some(1), "{line}: {}", String::from_utf8_lossy(&output.stderr));
    });
    join_all(running).await;
}

#[tokio::test]
async fn rules_and_their_unit_tests_pass_promtool() {
    let path = |file: &str| workspace().join("deploy/prometheus").join(file).display().to_string();
    for arguments in [
        ["check", "config", &path("prometheus.yml")],
        ["check", "rules", &path("rules.yml")],
        ["test", "rules", &path("rules_test.yml")],
    ] {
        promtool(&arguments).await.unwrap();
    }
    let tests = read("deploy/prometheus/rules_test.yml");
    for alert in alerts() {
        assert!(tests.contains(&format!("alertname: {alert}\n")), "{alert} has no unit test in which it fires");
    }
}

#[tokio::test]
async fn prometheus_understands_every_query_of_the_dashboard() {
    let Some(prometheus) = Prometheus::start(&[], "groups: []").await.unwrap() else { return };
    for query in dashboard_queries() {
        prometheus.query(&without_variables(&query)).await.unwrap();
    }
}
