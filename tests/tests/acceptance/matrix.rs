//! Every promise on every pinned Envoy, when asked for: `ELDR_ENVOY_MATRIX=all cargo test -p eldr-tests`.

use std::process::Command;

use eldr_examples::setup::ENVOY_VERSIONS;

const MATRIX: &str = "ELDR_ENVOY_MATRIX";
const VERSION: &str = "ELDR_ENVOY_VERSION";

/// The default release runs in this process; the others each in a child that runs all tests but this one.
#[test]
fn all_pinned_envoys_keep_the_promises() {
    let asked = std::env::var(MATRIX).unwrap_or_default();
    let others = match asked.as_str() {
        "" => &[][..],
        "all" => &ENVOY_VERSIONS[1..],
        other => panic!(
            "{MATRIX} is {other:?}; it may be \"all\", or unset for the default release alone"
        ),
    };
    let this = std::env::current_exe().expect("a test knows its own path");
    let run = |version: &str| {
        let mut child = Command::new(&this);
        child.args(["--skip", "matrix::"]);
        child
            .env(VERSION, version)
            .env_remove(MATRIX)
            .env_remove("ENVOY_BIN");
        let output = child.output().expect("a test can start itself");
        let words = String::from_utf8_lossy(&output.stdout).into_owned();
        let result = words.lines().rfind(|line| line.starts_with("test result"));
        eprintln!("Envoy {version}: {}", result.unwrap_or("no result"));
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        (!output.status.success()).then(|| format!("Envoy {version}:\n{words}\n{errors}"))
    };
    let failed: Vec<String> = others
        .iter()
        .filter_map(|other| run(other.version))
        .collect();
    assert!(failed.is_empty(), "{}", failed.join("\n"));
}
