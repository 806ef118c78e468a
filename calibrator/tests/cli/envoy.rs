//! `eldr envoy`: what it writes and what it says of topologies that are none.

use insta::assert_snapshot;

use crate::bench::{Bench, FIT, trace};
use crate::errors::transcript;

const WORKERS: &str = r#"
[decode]
workers = ["decode-0:8000", "decode-1:8000"]
[prefill]
workers = ["prefill-0:8000"]
"#;

#[test]
fn a_configuration_is_written_with_its_blob() {
    let bench = Bench::new();
    bench.write("t.jsonl", trace(true)).eldr(FIT).succeeded();
    bench.write(
        "gateway.toml",
        format!("{WORKERS}[[model]]\nblob = \"b.eldr\"\n"),
    );
    let ran = bench.eldr("envoy gateway.toml -o a/gateway");
    assert_eq!(
        ran.succeeded().stdout,
        "a/gateway/envoy.yaml: 2 decode and 1 prefill workers, 1 models\n\
         check it: envoy --mode validate -c a/gateway/envoy.yaml\n"
    );
    let text = std::fs::read_to_string(bench.path("a/gateway/envoy.yaml")).unwrap();
    assert!(
        text.starts_with("# Made by `eldr envoy` of gateway.toml: "),
        "{text}"
    );
    assert!(
        text.contains(r#""models": [{"blob": {"inline": ""#),
        "{text}"
    );
    let again = bench.eldr("envoy gateway.toml -o again");
    again.succeeded();
    assert!(
        bench.blob("again/envoy.yaml") == text.into_bytes(),
        "the same input, the same bytes"
    );
}

#[test]
fn topologies_that_are_none() {
    let bench = Bench::new();
    bench.write("t.jsonl", trace(true)).eldr(FIT).succeeded();
    bench
        .write("empty", "")
        .write("syntax", "mode = relay\n[decode\nworkers = []\n")
        .write("types", "listen = 80\nmode = \"both\"\ndecode = 1\nmodel = 2\n[prefill]\nworkers = \"p:1\"\n")
        .write(
            "mistakes",
            r#"lisen = "0.0.0.0:80"
admin = "nowhere"
[decode]
destination = "endpoint"
workers = ["decode-0:8000", { address = "10.0.0.1:8000", name = "x", weight = 0 }, { drain = 1 }, 7]
[prefill]
workers = ["prefill-0", { address = "p:1", weight = 2 }]
[[model]]
tau = 3
policy = "bande"
max_load_factor = "some"
blob = "none.eldr"
[[model]]
blob = { server = "here" }
rollout = "shadow"
[limits]
body_bytes = 1
headers_kb = 96
[filter]
log_signature = true
mode = "relay"
release = 2026-11-30
"#,
        )
        .write(
            "names",
            "[decode]\nworkers = [\"a:1\", { name = \"decode-0\", address = \"b:1\" },\n  { name = \"o o\", address = \"c:1\" }]\n[prefill]\npolicy = \"prefix_hash\"\nworkers = [{ name = \"decode-0\", address = \"p:1\" }]\n",
        )
        .write("regions", "[decode]\nworkers = [\"a:1\"]\n[prefill]\nworkers = [\"p:1\"]\n[[model]]\nblob = \"b.eldr\"\n")
        .write("mooncake", format!("{WORKERS}[filter]\nprotocol = \"mooncake\"\n"))
        .write("good", WORKERS);
    assert_snapshot!(transcript(
        &bench,
        &[
            "envoy none -o out",
            "envoy empty -o out",
            "envoy syntax -o out",
            "envoy types -o out",
            "envoy mistakes -o out",
            "envoy names -o out",
            "envoy regions -o out",
            "envoy mooncake -o out",
            "envoy good -o good",
        ],
    ));
    assert!(!bench.path("out").exists());
}
