//! Envoy's worker threads run a filter each; together they are one gateway.

use eldr_tests::client::post;
use eldr_tests::{Gateway, Options, eventually};
use serde_json::json;

const BODY: &str = r#"{"model":"m","prompt":"hi","stream":true}"#;

#[tokio::test]
async fn two_threads_share_their_counts() {
    let mut gateway = Gateway::start(Options {
        threads: 2,
        workers: 4,
        ..Options::filter(json!({
            "models": [{ "model": "*", "policy": "least_loaded" }],
            "load_refresh_ms": 0
        }))
    })
    .await;
    for worker in &gateway.decode {
        worker.by_hand();
    }

    // Connections on both threads: the kernel spreads them, so open until each thread has two.
    let mut connections = Vec::new();
    let both = async || {
        connections.push(gateway.connect().await);
        let stats = gateway
            .envoy
            .stats(r"worker_[01]\.downstream_cx_active$")
            .await
            .unwrap();
        let listener = stats
            .values
            .into_iter()
            .filter(|(name, _)| !name.contains("admin"));
        listener.map(|(_, count)| count).collect::<Vec<_>>()
    };
    eventually("each thread has two connections", both, |active| {
        active.len() == 2 && active.iter().all(|&count| count >= 2)
    })
    .await;

    // With counts of its own only, each thread would start again at the first worker.
    let mut held = Vec::new();
    for connection in &mut connections {
        let worker = held.len() % 4;
        let (answer, stream) = gateway.decode[worker]
            .streams_to(connection.send(post("/v1/completions", BODY)))
            .await;
        held.push((answer, stream));
    }
    gateway.expect_in_flight(held.len() as u64).await;
    drop((connections, held));
    gateway.expect_in_flight(0).await;
}
