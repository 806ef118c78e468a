//! Decode workers that are endpoints of one Envoy cluster.

use std::net::SocketAddr;

use eldr_examples::envoy::Envoy;
use eldr_tests::client::{Connection, get, post};
use eldr_tests::{
    Answer, Gateway, KV_TRANSFER_PARAMS, Options, Reply, Upstream, blob, envoy_binary, eventually,
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
    let (answer, stream) = workers[2]
        .streams_to(connection.send(post("/v1/completions", BODY)))
        .await;
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

/// A request whose client leaves while prefill works on it; then prefill answers.
async fn late_answer(gateway: &mut Gateway) {
    gateway.prefill.by_hand();
    let mut connection = gateway.connect().await;
    let exchange = tokio::select! {
        _ = connection.send(post("/v1/completions", BODY)) => panic!("answered before prefill was"),
        exchange = gateway.prefill.next() => exchange,
    };
    drop(connection);
    gateway.expect_stat("eldr.outcome.client_gone", 1).await;
    exchange.answer(Answer::prefill(KV_TRANSFER_PARAMS, None));
}

#[tokio::test]
async fn blocks_that_nobody_will_fetch_are_released_by_the_least_loaded_endpoint() {
    for (form, path) in [
        ("eldr", "/v1/kv_transfer/release"),
        ("decode", "/v1/completions"),
    ] {
        let mut workers = workers().await;
        let addresses = workers.each_ref().map(|worker| worker.address);
        let mut gateway = gateway(&addresses, &addresses, json!({ "release": form })).await;
        // The first two are busy.
        let mut held = Vec::new();
        for (region, worker) in workers.iter_mut().take(2).enumerate() {
            worker.by_hand();
            gateway.prefill_says(Some(region));
            let mut connection = gateway.connect().await;
            let (answer, stream) = worker
                .streams_to(connection.send(post("/v1/completions", BODY)))
                .await;
            held.push((connection, answer, stream));
        }
        late_answer(&mut gateway).await;
        let received = async || workers[2].received();
        let received = eventually("a release", received, |all| all.len() == 1).await;
        assert_eq!(received[0].path, path);
        let params: Value = serde_json::from_str(KV_TRANSFER_PARAMS).expect("JSON");
        assert_eq!(received[0].json()["kv_transfer_params"], params);
        for worker in &workers[..2] {
            assert_eq!(worker.received().len(), 1, "its own request alone");
        }
        gateway.expect_stat("eldr.release_sent", 1).await;
        gateway.expect_stat("eldr.release_failed", 0).await;
        drop(held);
        gateway.expect_in_flight(0).await;
    }
}

#[tokio::test]
async fn blocks_of_a_request_whose_endpoint_is_not_there_are_released_by_another() {
    let workers = workers().await;
    let addresses = workers.each_ref().map(|worker| worker.address);
    let gateway = gateway(&addresses, &addresses, json!({ "release": "eldr" })).await;
    workers[0].close();
    assert_eq!(gateway.post("/v1/completions", BODY).await.status, 503);
    let received = async || {
        let others = workers[1..].iter();
        others.flat_map(Upstream::received).collect::<Vec<_>>()
    };
    let received = eventually("a release", received, |all| all.len() == 1).await;
    assert_eq!(received[0].path, "/v1/kv_transfer/release");
    gateway.expect_stat("eldr.release_sent", 1).await;
    gateway.expect_stat("eldr.release_failed", 0).await;
    gateway.expect_in_flight(0).await;
}

/// A leg of the request `id` of a coordinator, who would like it to go elsewhere.
async fn relayed(gateway: &Gateway, id: &str, wants: &str, elsewhere: SocketAddr) -> Reply {
    let body = format!(r#"{{"kv_transfer_params":{{"{wants}":true}}}}"#);
    let mut request = post("/v1/completions", body);
    let headers = request.headers_mut();
    headers.insert("x-request-id", id.parse().expect("a header value"));
    let elsewhere = elsewhere.to_string().parse().expect("a header value");
    headers.insert("x-gateway-destination-endpoint", elsewhere);
    gateway.connect().await.call(request).await
}

#[tokio::test]
async fn in_relay_mode_decode_goes_to_the_endpoint_that_its_prefill_answer_points_to() {
    let workers = workers().await;
    let addresses = workers.each_ref().map(|worker| worker.address);
    // Envoy does not have the last.
    let relay = json!({ "mode": "relay", "eject_ms": 0 });
    let gateway = gateway(&addresses, &addresses[..2], relay).await;
    for region in [1, 0, 1] {
        gateway.prefill_says(Some(region));
        let (id, elsewhere) = (format!("r-{region}"), addresses[1 - region]);
        let prefill = relayed(&gateway, &id, "do_remote_decode", elsewhere).await;
        let suggested = prefill.header("x-eldr-decode-cluster");
        assert_eq!(suggested, addresses[region].to_string());
        assert!(prefill.text().contains(KV_TRANSFER_PARAMS));
        let decode = relayed(&gateway, &id, "do_remote_prefill", elsewhere).await;
        assert_eq!(decode.text(), format!("w{region}"));
        let decision = decode.header("x-eldr-decision");
        assert!(decision.contains(";reason=in_band;"), "{decision}");
    }
    gateway.expect_stat(FALLBACK, 0).await;
    gateway.prefill_says(Some(2));
    relayed(&gateway, "gone", "do_remote_decode", addresses[0]).await;
    let decode = relayed(&gateway, "gone", "do_remote_prefill", addresses[0]).await;
    assert_eq!(decode.status, 200);
    gateway.expect_stat(FALLBACK, 1).await;
    assert!(workers[2].received().is_empty());
    let outcomes = [("prefilled", 4), ("routed(in_band)", 4)];
    gateway.expect_outcomes(&outcomes).await;
    gateway.expect_in_flight(0).await;
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
