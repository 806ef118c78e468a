//! Configurations that `eldr envoy` makes, in a real Envoy.

use std::path::Path;

use eldr_calibrator::envoy::{parse, render};
use eldr_examples::envoy::{Envoy, validate};
use eldr_tests::client::{Connection, get, post};
use eldr_tests::{
    Answer, KV_TRANSFER_PARAMS, Upstream, blob, envoy_binary, eventually, wasm_module,
};

/// What `eldr envoy` makes of a topology; blobs are in `folder`.
fn made(topology: &str, folder: &Path) -> String {
    let module = wasm_module().to_str().expect("a path in UTF-8");
    let topology = format!("module = {module:?}\n{topology}");
    let parsed = parse("gateway.toml", &topology, folder);
    render(&parsed.unwrap_or_else(|e| panic!("{e}")))
}

const RICH: &str = r#"
listen = "[::1]:0"
access_log = "/dev/null"
[decode]
workers = [{ name = "big", address = "127.0.0.1:8000", weight = 2 }, "localhost:8001", { address = "[::1]:8002", drain = true }]
[prefill]
policy = "prefix_hash"
workers = [
    { address = "127.0.0.1:9000", bootstrap_addr = "http://127.0.0.1:8998", engine_id = "e0" },
    { name = "second", address = "127.0.0.1:9001", bootstrap_addr = "http://127.0.0.1:8999", engine_id = "e1" },
]
[[model]]
name = "chat"
blob = { server = "localhost:8089", path = "/v1/blobs/chat", interval_ms = 1000 }
rollout = { kind = "switchback", slice_ms = 60000, washout_ms = 6000, control = "p2c" }
[[model]]
policy = "top1"
tau = 0.05
max_load_factor = "none"
blob = "regions.eldr"
[[model]]
name = "batches"
policy = "hybrid"
tau = 0.5
step_t0_ms = 5.84
step_b_ms = 0.288
step_c_ms = 0.026
step_kv_ms_per_1k = 0
step_exponent = 1
learn_steps = false
[limits]
body_bytes = 1048576
header_kb = 128
[filter]
protocol = "mooncake"
log_signatures = true
load_report_interval_ms = 500
"#;

const RELAY_BY_ENDPOINT: &str = r#"
mode = "relay"
[decode]
destination = "endpoint"
workers = ["10.0.0.1:8000", { address = "10.0.0.2:8000", weight = 0.5 }]
[prefill]
policy = "least_loaded"
workers = ["prefill-0:8000", "prefill-1:8000"]
"#;

#[tokio::test]
async fn every_kind_of_topology_is_valid_to_envoy() {
    let dir = tempfile::tempdir().unwrap();
    let regions = [
        vec!["big".to_owned()],
        vec!["decode-1".to_owned(), "decode-2".to_owned()],
    ];
    let bytes = blob::one_expert_per_region(&regions).to_bytes().unwrap();
    std::fs::write(dir.path().join("regions.eldr"), bytes).unwrap();
    for topology in [
        include_str!("../../../envoy/envoy.toml"),
        include_str!("../../../envoy/relay.toml"),
        include_str!("../../../envoy/endpoint.toml"),
        RICH,
        RELAY_BY_ENDPOINT,
    ] {
        let validated = validate(envoy_binary(), &made(topology, dir.path())).await;
        assert_eq!(validated.unwrap(), Ok(()), "{topology}");
    }
}

#[tokio::test]
async fn a_value_that_the_filter_refuses_is_named_by_envoys_validation() {
    let topology = include_str!("../../../envoy/envoy.toml").replace("0.95", "2");
    let validated = validate(envoy_binary(), &made(&topology, Path::new("."))).await;
    let told = validated.unwrap().unwrap_err();
    assert!(
        told.contains("kv_usage_limit") && told.contains("0 to 1"),
        "{told}"
    );
}

/// Routes a request to the second of two decode workers, which a signature asks for.
async fn routes(destination: &str) {
    let prefill = Upstream::start(Answer::prefill(
        KV_TRANSFER_PARAMS,
        Some(&blob::signature_of(1, 2)),
    ))
    .await;
    let decode = [
        Upstream::start(Answer::json("first")).await,
        Upstream::start(Answer::json("second")).await,
    ];
    let dir = tempfile::tempdir().unwrap();
    let names = match destination {
        "endpoint" => decode.each_ref().map(|worker| worker.address.to_string()),
        _ => ["decode-0", "decode-1"].map(str::to_owned),
    };
    let bytes = blob::one_expert_per_region(&names.map(|name| vec![name])).to_bytes();
    std::fs::write(dir.path().join("task.eldr"), bytes.unwrap()).unwrap();
    let log = dir.path().join("requests.json");
    let topology = format!(
        r#"
        listen = "127.0.0.1:0"
        access_log = {log:?}
        [decode]
        destination = "{destination}"
        workers = ["{}", "{}"]
        [prefill]
        workers = ["{}"]
        [[model]]
        blob = "task.eldr"
        [filter]
        log_signatures = true
        "#,
        decode[0].address, decode[1].address, prefill.address,
    );
    let envoy = Envoy::start(envoy_binary(), &made(&topology, dir.path()), 2).await;
    let envoy = envoy.unwrap_or_else(|e| panic!("{e}"));
    let mut connection = Connection::open(envoy.listener("llm").await.unwrap()).await;
    let reply = connection
        .call(post("/v1/completions", r#"{"prompt":"hi"}"#))
        .await;
    assert_eq!(
        (reply.status.as_u16(), reply.text().as_str()),
        (200, "second")
    );
    assert_eq!(decode[0].received().len(), 0);
    let received = decode[1].only();
    assert!(
        received.text().contains("remote_block_ids"),
        "{}",
        received.text()
    );
    assert_eq!(
        connection.call(get("/v1/models")).await.status,
        200,
        "all else goes to any"
    );

    // What Envoy logs of it is a trace.
    let read = async || std::fs::read_to_string(&log).unwrap_or_default();
    let text = eventually("the access log", read, |text| text.lines().count() == 2).await;
    let record = eldr_calibrator::trace::Reader::new("log", std::io::Cursor::new(text));
    let record = record.unwrap().next().unwrap().unwrap();
    assert_eq!(record.prefill, Some(blob::signature_of(1, 2)));
}

#[tokio::test]
async fn a_request_is_routed_by_cluster() {
    routes("cluster").await;
}

#[tokio::test]
async fn a_request_is_routed_by_endpoint() {
    routes("endpoint").await;
}
