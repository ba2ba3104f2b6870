//! README's walk through the services, walked.

use std::process::Command;

use e2e_tests::{Pair, eventually, workspace};

use crate::fixture::SOON;

/// Ids and times differ each time; everything else is as README shows it.
fn without_ids_and_times(text: &str) -> String {
    let is_part = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | ':' | '.');
    let shape = |word: &str| match word {
        id if id.len() == 36 && id.matches('-').count() == 4 => "<id>".to_owned(),
        time if time.ends_with('Z') && time.contains('T') && time.matches(':').count() == 2 => "<time>".to_owned(),
        other => other.to_owned(),
    };
    let words = text.trim().split_inclusive(|c| !is_part(c));
    words
        .map(|word| {
            let end = word.trim_end_matches(|c| !is_part(c)).len();
            shape(&word[..end]) + &word[end..]
        })
        .collect()
}

/// The commands of README's console blocks, each with the output that README shows.
fn walk_through(readme: &str) -> Vec<(String, String)> {
    let mut steps: Vec<(String, String)> = Vec::new();
    let mut is_console = false;
    for line in readme.lines() {
        match line {
            "```console" => is_console = true,
            "```" => is_console = false,
            _ if !is_console => {}
            line => match (line.strip_prefix("$ "), steps.last_mut()) {
                (Some(command), _) => steps.push((command.to_owned(), String::new())),
                (None, Some((_, output))) => *output += line,
                (None, None) => panic!("a console block begins with a command: {line}"),
            },
        }
    }
    steps
}

#[tokio::test]
async fn the_walk_through_of_the_readme_shows_what_happens() {
    let readme = std::fs::read_to_string(workspace().join("README.md")).unwrap();
    let pair = Pair::start().await;
    let local = |text: &str| {
        let orders = pair.orders[0].url("").replace("http://", "");
        let payments = pair.payments[0].url("").replace("http://", "");
        text.replace("127.0.0.1:8080", &orders).replace("127.0.0.1:8081", &payments)
    };
    let steps = walk_through(&readme);
    assert!(steps.len() > 8, "README has a walk-through");
    let mut variables = String::new();
    for (command, expected) in steps {
        if expected.is_empty() {
            variables += &format!("{}\n", local(&command));
            continue;
        }
        let script = format!("{variables}{}", local(&command));
        let run = async || {
            let output = Command::new("sh").arg("-c").arg(&script).output().expect("there is a shell");
            let shown = without_ids_and_times(&String::from_utf8_lossy(&output.stdout));
            if shown == without_ids_and_times(&expected) { Ok(()) } else { Err(shown) }
        };
        // What a read shows may take a moment; a write is done once.
        if command.contains(" -d ") || command.contains(" -X ") {
            run().await.unwrap_or_else(|shown| panic!("{command}\nshows {shown}"));
        } else {
            eventually(SOON, &command, run).await;
        }
    }
}

#[test]
fn every_test_that_the_pages_name_exists() {
    let page = |name| std::fs::read_to_string(workspace().join(name)).unwrap();
    let pages = page("README.md") + &page("ARCHITECTURE.md");
    let tests = workspace().join("e2e-tests/tests/e2e");
    let mut named = 0;
    for name in pages.split('`').filter(|code| code.contains("::") && !code.contains(' ')) {
        let Some((module, test)) = name.split_once("::") else { continue };
        let Ok(source) = std::fs::read_to_string(tests.join(format!("{module}.rs"))) else { continue };
        assert!(source.contains(&format!("fn {test}(")) || source.contains(&format!("{test}:")), "a page names {name}");
        named += 1;
    }
    assert!(named > 20, "README maps ideas to tests, and ARCHITECTURE crash points");
}

#[test]
fn every_file_that_the_readme_links_exists() {
    let readme = std::fs::read_to_string(workspace().join("README.md")).unwrap();
    for target in readme.split("](").skip(1).filter_map(|rest| rest.split(')').next()) {
        assert!(workspace().join(target).exists(), "README links {target}");
    }
}
