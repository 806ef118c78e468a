//! Gateways that share decode workers learn of each other's requests from what the workers report.

use std::net::SocketAddr;
use std::sync::Arc;

use eldr_core::signature::Geometry;
use eldr_examples::mock::{Catalog, MockConfig, MockEngine};
use eldr_tests::client::{next_piece, post};
use eldr_tests::{Answer, Gateway, Options, Upstream, eventually};
use serde_json::{Value, json};

const BODY: &str = r#"{"model":"mock","prompt":"hi","stream":true,"max_tokens":100000}"#;
const NAMES: [&str; 4] = ["shared-0", "shared-1", "shared-2", "shared-3"];

fn reporting() -> Value {
    json!({
        "models": [{ "model": "*", "policy": "least_loaded" }],
        "load_refresh_ms": 0,
        // On a busy machine a thread may stand still for longer than the default; its counts would be forgotten.
        "load_lease_ms": 60_000,
        "load_report_interval_ms": 200,
        "load_report_stale_ms": 600_000,
        "release": "none",
    })
}

fn with(changes: Value) -> Value {
    let mut filter = reporting();
    for (key, value) in changes.as_object().expect("an object") {
        filter[key] = value.clone();
    }
    filter
}

fn vllm(running: u32, waiting: u32, kv_usage: f64) -> Answer {
    Answer::status(200).body(format!(
        "# TYPE vllm:num_requests_running gauge\n\
         vllm:num_requests_running{{engine=\"0\",model_name=\"m\"}} {running}.0\n\
         vllm:num_requests_waiting{{engine=\"0\",model_name=\"m\"}} {waiting}.0\n\
         vllm:kv_cache_usage_perc{{engine=\"0\",model_name=\"m\"}} {kv_usage}\n"
    ))
}

fn all_report(gateway: &Gateway, answer: &Answer) {
    for worker in &gateway.decode {
        worker.answers_aside("/metrics", answer.clone());
    }
}

/// A gateway in front of decode workers that are not its own.
async fn in_front_of(workers: &[SocketAddr], names: &[&'static str]) -> Gateway {
    let clusters = NAMES.iter().copied().zip(workers.iter().copied());
    Gateway::start(Options {
        workers: 1,
        threads: 2,
        clusters: clusters.collect(),
        ..Options::filter(with(json!({ "decode_clusters": names })))
    })
    .await
}

/// Has a decode worker report `own` requests of the gateway and `others`, and waits until the gateway knows. First others
/// that are more, so that what it knows in the end was asked for after its own requests were.
async fn report(gateway: &Gateway, worker: usize, own: u32, others: u32) {
    for others in [others + 7, others] {
        gateway.decode[worker].answers_aside("/metrics", vllm(own, others, 0.0));
        let gauge = format!("eldr.worker.decode-{worker}.elsewhere");
        gateway.expect_stat(&gauge, others.into()).await;
    }
}

#[tokio::test]
async fn two_gateways_in_front_of_the_same_workers_stay_balanced() {
    let geometry = Geometry::new(1, 4).expect("a geometry");
    let catalog = Arc::new(Catalog::new(geometry, 1).expect("a catalog"));
    let config = MockConfig {
        prefill_workers: 0,
        ..MockConfig::default()
    };
    let engine = MockEngine::start(config, catalog).await.expect("an engine");
    // The first gateway uses half of the workers, so that the second, if it did not know, would add to all alike.
    let first = in_front_of(&engine.decode(), &NAMES[..2]).await;
    let second = in_front_of(&engine.decode(), &NAMES).await;
    for gateway in [&first, &second] {
        gateway.prefill.answers(Answer::json("{}"));
    }
    let mut held = Vec::new();
    for (gateway, busy) in [(&first, [4, 4, 0, 0]), (&second, [4, 4, 4, 4])] {
        for _ in 0..8 {
            let mut connection = gateway.connect().await;
            let mut answer = connection.send(post("/v1/completions", BODY)).await;
            assert_eq!(answer.status(), 200);
            next_piece(answer.body_mut()).await;
            held.push((connection, answer));
        }
        let running = async || {
            let reports = engine.decode_reports().into_iter();
            reports.map(|report| report.running).collect::<Vec<_>>()
        };
        eventually("requests per worker", running, |running| *running == busy).await;
        // Nothing of its own is taken for another's: what the second knows of is what the first has.
        for (name, count) in NAMES.iter().zip([4, 4, 0, 0]) {
            let elsewhere = format!("eldr.worker.{name}.elsewhere");
            second.expect_stat(&elsewhere, count).await;
        }
    }
    first.assert_no_trap();
    second.assert_no_trap();
}

#[tokio::test]
async fn reported_load_counts_beside_our_own_which_is_taken_off() {
    let mut gateway = Gateway::start(Options {
        workers: 2,
        ..Options::filter(reporting())
    })
    .await;
    all_report(&gateway, &vllm(0, 0, 0.0));
    gateway.decode[0].answers_aside("/metrics", vllm(1, 1, 0.0));
    gateway
        .expect_stat("eldr.worker.decode-0.elsewhere", 2)
        .await;
    gateway.decode.iter().for_each(Upstream::by_hand);
    let mut held = Vec::new();
    for worker in [1, 1, 0, 1, 0, 1] {
        let mut connection = gateway.connect().await;
        let (answer, stream) = gateway.decode[worker]
            .streams_to(connection.send(post("/v1/completions", BODY)))
            .await;
        held.push((connection, answer, stream));
        // Reports that know of our own requests leave what others have as it was.
        let own = held.len() as u32;
        let at_0 = u32::from(own > 2) + u32::from(own > 4);
        report(&gateway, 0, at_0, 2).await;
        report(&gateway, 1, own - at_0, 0).await;
    }
}

#[tokio::test]
async fn a_full_kv_cache_is_passed_over_while_another_has_room() {
    let gateway = Gateway::start(Options {
        workers: 2,
        ..Options::filter(with(json!({ "kv_usage_limit": 0.9 })))
    })
    .await;
    all_report(&gateway, &vllm(0, 0, 0.9));
    gateway.decode[0].answers_aside("/metrics", vllm(0, 0, 0.91));
    let served_by = async || gateway.post("/v1/completions", BODY).await.text();
    eventually("passed over", served_by, |name| name == "decode-1").await;
    assert_eq!(served_by().await, "decode-1");
    // Where all are full, load decides again.
    all_report(&gateway, &vllm(0, 0, 1.0));
    eventually("all are full", served_by, |name| name == "decode-0").await;
}

#[tokio::test]
async fn what_cannot_be_read_is_counted_and_the_last_report_serves_until_it_is_stale() {
    let gateway = Gateway::start(Options {
        workers: 1,
        ..Options::filter(with(json!({ "load_report_stale_ms": 3_000 })))
    })
    .await;
    let elsewhere = "eldr.worker.decode-0.elsewhere";
    let failures = async || {
        let stats = gateway.filter_stats().await;
        stats.get("eldr.load_report_failed").copied().unwrap_or(0)
    };
    for (bad, word) in [
        (Answer::status(500), "500"),
        (Answer::status(200).body("<html>"), "no gauge"),
        (
            Answer::status(200).body("vllm:num_requests_running NaN"),
            "line 1",
        ),
        (
            Answer::status(200).body(vec![b'\n'; 5 << 20]),
            "bytes of metrics",
        ),
    ] {
        all_report(&gateway, &vllm(7, 0, 0.0));
        gateway.expect_stat(elsewhere, 7).await;
        let before = failures().await;
        all_report(&gateway, &bad);
        eventually("failures", failures, |count| *count > before).await;
        let log = gateway.envoy.log_tail(usize::MAX);
        assert!(
            log.contains("its load is not known") && log.contains(word),
            "{log}"
        );
        assert_eq!(gateway.post("/v1/completions", BODY).await.status, 200);
    }
    gateway.expect_stat(elsewhere, 0).await;
    gateway.assert_no_trap();
}

#[tokio::test]
async fn nobody_is_asked_by_default() {
    let gateway = Gateway::start(Options::default()).await;
    for _ in 0..3 {
        gateway.post("/v1/completions", BODY).await;
    }
    // The gauges of in-flight requests are set at the tick that would also ask.
    let ticked = async || gateway.filter_stats().await;
    let gauge = "eldr.worker.decode-0.in_flight";
    eventually("a tick", ticked, |stats| stats.contains_key(gauge)).await;
    for worker in &gateway.decode {
        assert!(
            worker
                .received()
                .iter()
                .all(|request| request.path != "/metrics")
        );
    }
}
