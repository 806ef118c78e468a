use std::collections::BTreeSet;

use super::*;

const SHIPPED: [(&str, &str, &str); 3] = [
    (
        "envoy",
        include_str!("../../../envoy/envoy.toml"),
        include_str!("../../../envoy/envoy.yaml"),
    ),
    (
        "relay",
        include_str!("../../../envoy/relay.toml"),
        include_str!("../../../envoy/relay.yaml"),
    ),
    (
        "endpoint",
        include_str!("../../../envoy/endpoint.toml"),
        include_str!("../../../envoy/endpoint.yaml"),
    ),
];

fn made(text: &str) -> Result<String, Error> {
    parse("t.toml", text, Path::new(".")).map(|topology| render(&topology))
}

#[test]
fn the_shipped_configurations_are_what_their_topologies_make() {
    for (name, topology, expected) in SHIPPED {
        let found = made(topology).unwrap();
        for (line, (found, expected)) in found.lines().zip(expected.lines()).enumerate() {
            assert_eq!(found, expected, "envoy/{name}.yaml, line {}", line + 1);
        }
        assert_eq!(found.len(), expected.len(), "envoy/{name}.yaml");
    }
}

/// The first column of README's table of the plugin's configuration.
#[test]
fn every_field_of_the_filter_is_passed_on_or_made() {
    let readme = include_str!("../../../README.md");
    let (_, table) = readme.split_once("### Plugin configuration").unwrap();
    let (table, _) = table
        .split_once("\n\nTwo settings around the plugin")
        .unwrap();
    let documented: BTreeSet<&str> = table
        .lines()
        .filter_map(|line| line.strip_prefix("| `")?.split_once('`'))
        .map(|(field, _)| field)
        .filter(|field| !field.starts_with("models["))
        .collect();
    let made = [
        "decode_clusters",
        "decode_endpoints",
        "destination",
        "mode",
        "mooncake",
        "prefill_clusters",
        "prefill_policy",
    ];
    let known: BTreeSet<&str> = FILTER_FIELDS.into_iter().chain(made).collect();
    assert_eq!(documented, known);
}

#[test]
fn everything_that_can_be_said_arrives() {
    let text = made(
        r#"
        listen = "[::1]:8080"
        admin = "127.0.0.1:1"
        module = "/opt/my filter.wasm"
        access_log = "/var/log/requests.json"
        [decode]
        workers = [{ name = "big", address = "10.0.0.1:8000", weight = 2, drain = true }, "b:80"]
        [prefill]
        policy = "prefix_hash"
        workers = ["p:1", { name = "other", address = "q:2" }]
        [[model]]
        name = "chat"
        policy = "top1"
        tau = 0.2
        max_load_factor = "none"
        rollout = { kind = "percentage", percent = 10 }
        blob = { server = "blobs:8089", path = "/v1/blobs/chat", interval_ms = 1000 }
        [[model]]
        blob = { server = "blobs:8089" }
        max_load_factor = 2
        candidates = 16
        [limits]
        body_bytes = 65536
        header_kb = 128
        [filter]
        log_signatures = true
        "#,
    )
    .unwrap();
    for expected in [
        r#"{ address: "::1", port_value: 8080 }"#,
        r#"filename: "/opt/my filter.wasm""#,
        "envoy.access_loggers.file\n",
        "path: /var/log/requests.json\n",
        "per_connection_buffer_limit_bytes: 65536",
        "max_request_headers_kb: 128",
        "max_response_headers_kb: 128",
        r#""decode_clusters": [{"drain": true, "name": "big", "weight": 2.0}, "decode-1"],"#,
        r#""prefill_clusters": ["prefill-0", "other"],"#,
        r#""prefill_policy": "prefix_hash","#,
        r#"{"blob": {"http": {"cluster": "eldr-serve", "interval_ms": 1000, "path": "/v1/blobs/chat"}}, "max_load_factor": "none", "model": "chat", "policy": "top1", "rollout": {"kind": "percentage", "percent": 10}, "tau": 0.2}"#,
        r#"{"blob": {"http": {"cluster": "eldr-serve", "path": "/v1/blob"}}, "candidates": 16, "max_load_factor": 2.0, "model": "*", "policy": "band"}"#,
        "\"log_signatures\": true\n",
        "    - name: big\n",
        "    - name: eldr-serve\n",
    ] {
        assert!(text.contains(expected), "{expected} is missing:\n{text}");
    }
    assert_eq!(
        text.matches("cluster_name: eldr-serve").count(),
        1,
        "one server, one cluster"
    );
}

#[test]
fn mooncake_engines_are_clusters_of_their_own() {
    let worker = r#"{ address = "p:1", bootstrap_addr = "http://p:8998", engine_id = "e0" }"#;
    let text = format!(
        "[decode]\nworkers = [\"d:1\"]\n[prefill]\nworkers = [{worker}]\n[filter]\nprotocol = \"mooncake\"\n"
    );
    let text = made(&text).unwrap();
    let expected =
        r#""mooncake": {"prefill-0": {"bootstrap_addr": "http://p:8998", "engine_id": "e0"}},"#;
    assert!(text.contains(expected), "{text}");
}

#[test]
fn a_topology_may_be_very_short() {
    let text = made("decode.workers = ['d:1']\nprefill.workers = ['p:1']").unwrap();
    assert!(text.contains(r#""models": [{"model": "*", "policy": "band"}],"#));
}
