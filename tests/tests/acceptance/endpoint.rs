//! Decode workers that are endpoints of one Envoy cluster.

use std::net::SocketAddr;

use eldr_examples::envoy::Envoy;
use eldr_tests::client::{Connection, get, post};
use eldr_tests::{
    Answer, Gateway, KV_TRANSFER_PARAMS, Options, Upstream, blob, envoy_binary, eventually,
    wasm_module,
};
use serde_json::{Value, json};

use crate::reference::replace;

const BODY: &str = r#"{"model":"m","prompt":"hi"}"#;
const FALLBACK: &str = "eldr.endpoint_fallback";

/// A gateway whose filter knows the workers `named`, of which Envoy's cluster has `known`.
async fn gateway(named: &[SocketAddr], known: &[SocketAddr], more: Value) -> Gateway {
    let names: Vec<String> = named.iter().map(ToString::to_string).collect();
    let regions: Vec<Vec<String>> = names.iter().map(|name| vec![name.clone()]).collect();
    let inline = blob::inline(&blob::one_expert_per_region(&regions));
    let mut filter = json!({
        "models": [{ "model": "*", "blob": { "inline": inline } }],
        "destination": "endpoint",
        "decode_clusters": ["pool"],
        "decode_endpoints": names,
        "load_refresh_ms": 0,
    });
    for (key, value) in more.as_object().expect("an object") {
        filter[key] = value.clone();
    }
    Gateway::start(Options {
        workers: named.len(),
        pool: known.to_vec(),
        ..Options::filter(filter)
    })
    .await
}

async fn workers() -> [Upstream; 3] {
    let start = async |name: &str| Upstream::start(Answer::json(name.to_owned())).await;
    [start("w0").await, start("w1").await, start("w2").await]
}

#[tokio::test]
async fn the_endpoint_that_a_signature_names_serves() {
    let workers = workers().await;
    let addresses = workers.each_ref().map(|worker| worker.address);
    let gateway = gateway(&addresses, &addresses, json!({})).await;
    for region in [0, 1, 2, 1] {
        gateway.prefill_says(Some(region));
        let reply = gateway.post("/v1/completions", BODY).await;
        assert_eq!(reply.text(), format!("w{region}"));
        let decision = reply.header("x-eldr-decision");
        let expected = format!("{};reason=in_band", addresses[region]);
        assert!(decision.starts_with(&expected), "{decision}");
    }
    gateway.expect_stat(FALLBACK, 0).await;
    gateway.expect_outcomes(&[("routed(in_band)", 4)]).await;
}

#[tokio::test]
async fn a_client_cannot_choose_the_endpoint() {
    let workers = workers().await;
    let addresses = workers.each_ref().map(|worker| worker.address);
    let gateway = gateway(&addresses, &addresses, json!({})).await;
    let mut request = post("/v1/completions", BODY);
    let steered = addresses[2].to_string().parse().expect("a header value");
    request
        .headers_mut()
        .insert("x-gateway-destination-endpoint", steered);
    let reply = gateway.connect().await.call(request).await;
    assert_eq!(reply.text(), "w0");
}

#[tokio::test]
async fn an_endpoint_that_envoy_does_not_have_is_counted_and_left_out() {
    let workers = workers().await;
    let addresses = workers.each_ref().map(|worker| worker.address);
    // The first is not in Envoy's cluster.
    let eject = json!({ "eject_ms": 600_000, "eject_max_ms": 600_000 });
    let gateway = gateway(&addresses, &addresses[1..], eject).await;
    let reply = gateway.post("/v1/completions", BODY).await;
    assert_eq!(reply.status, 200);
    assert!(workers[0].received().is_empty());
    for _ in 0..3 {
        let reply = gateway.post("/v1/completions", BODY).await;
        let decision = reply.header("x-eldr-decision");
        assert!(
            !decision.starts_with(&addresses[0].to_string()),
            "{decision}"
        );
    }
    gateway.expect_stat(FALLBACK, 1).await;
    gateway.expect_outcomes(&[("routed(in_band)", 4)]).await;
}

#[tokio::test]
async fn a_request_counts_where_it_is_served_and_is_counted_out_there() {
    let mut workers = workers().await;
    let addresses = workers.each_ref().map(|worker| worker.address);
    // Envoy's cluster has the last alone; no cool-down, so that only counts decide.
    let filter = json!({
        "models": [{ "model": "*", "policy": "least_loaded" }],
        "decode_endpoints": [addresses[0].to_string(), addresses[2].to_string()],
        "eject_ms": 0,
    });
    let gateway = gateway(&addresses, &addresses[2..], filter).await;
    workers[2].by_hand();
    let mut connection = gateway.connect().await;
    let (answer, stream) = tokio::join!(connection.send(post("/v1/completions", BODY)), async {
        workers[2].next().await.stream(Answer::event_stream())
    });
    gateway.expect_stat(FALLBACK, 1).await;
    let in_flight = async || {
        let stats = gateway.filter_stats().await;
        let of = |address: SocketAddr| {
            let plain = format!("eldr.worker.{address}.in_flight");
            stats.get(&plain).copied()
        };
        (of(addresses[0]), of(addresses[2]))
    };
    let where_served = (Some(0), Some(1));
    eventually("counted where served", in_flight, |count| {
        *count == where_served
    })
    .await;
    stream.finish();
    drop((connection, answer));
    eventually("counted out", in_flight, |count| {
        *count == (Some(0), Some(0))
    })
    .await;
}

#[tokio::test]
async fn each_endpoint_is_asked_for_its_own_load() {
    let workers = workers().await;
    let addresses = workers.each_ref().map(|worker| worker.address);
    for (count, worker) in workers.iter().enumerate() {
        let text = format!("vllm:num_requests_running {count}\n");
        worker.answers_aside("/metrics", Answer::status(200).body(text));
    }
    let gateway = gateway(
        &addresses,
        &addresses,
        json!({ "load_report_interval_ms": 200 }),
    )
    .await;
    for (count, address) in addresses.iter().enumerate() {
        let gauge = format!("eldr.worker.{address}.elsewhere");
        gateway.expect_stat(&gauge, count as u64).await;
    }
}

#[tokio::test]
async fn the_shipped_configuration_routes_and_passes_everything_else() {
    let [w0, w1, _] = workers().await;
    let addresses = [w0.address, w1.address];
    let regions = addresses.map(|address| vec![address.to_string()]);
    let centroids = blob::inline(&blob::one_expert_per_region(&regions));
    let signature = blob::signature_of(1, 2);
    let prefill = Upstream::start(Answer::prefill(KV_TRANSFER_PARAMS, Some(&signature))).await;
    let module = wasm_module().to_str().expect("a path in UTF-8");
    let mut config = include_str!("../../../envoy/endpoint.yaml").to_owned();
    let mut change = |from: &str, to: &str| config = replace(&config, from, to);
    change("/etc/envoy/eldr_filter.wasm", module);
    change(
        "address: 0.0.0.0, port_value: 10000",
        "address: 127.0.0.1, port_value: 0",
    );
    let blob = format!(r#""policy": "band", "blob": {{"inline": "{centroids}"}}"#);
    change(r#""policy": "band""#, &blob);
    let written =
        |address: SocketAddr| format!("address: 127.0.0.1, port_value: {}", address.port());
    for (ip, address) in ["10.0.0.10", "10.0.0.11"].iter().zip(addresses) {
        change(
            &format!("address: {ip}, port_value: 8000"),
            &written(address),
        );
        change(&format!("\"{ip}:8000\""), &format!("\"{address}\""));
    }
    for name in ["prefill-0", "prefill-1"] {
        change(
            &format!("address: {name}, port_value: 8000"),
            &written(prefill.address),
        );
    }
    let envoy = Envoy::start(envoy_binary(), &config, 2).await;
    let envoy = envoy.unwrap_or_else(|e| panic!("{e}"));
    let mut connection = Connection::open(envoy.listener("llm").await.expect("a listener")).await;
    let reply = connection.call(post("/v1/completions", BODY)).await;
    assert_eq!((reply.status.as_u16(), reply.text().as_str()), (200, "w1"));
    assert_eq!(w1.only().headers.get("x-eldr-decode-cluster"), None);
    assert_eq!(connection.call(get("/v1/models")).await.status, 200);
}
