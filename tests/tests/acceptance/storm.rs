//! Thousands of clients that leave whenever they like: nothing stays behind.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use eldr_core::signature::Geometry;
use eldr_examples::mock::{Catalog, MockConfig, MockEngine};
use eldr_tests::upstream::Received;
use eldr_tests::{Answer, Gateway, Options, blob, eventually};
use rand::RngExt;
use rand_chacha::ChaCha8Rng;
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio::time::timeout;

use crate::busy::{outcomes, rng, up_to, while_they_work};

const SEED: u64 = 20;
/// At a time.
const CLIENTS: u64 = 64;
/// Of each, one after the other.
const VISITS: u64 = 34;
/// Longest that clients stay who leave before the end.
const STAY: Duration = Duration::from_millis(60);
const BODY: &str =
    r#"{"model":"mock","prompt":"a prompt of some length","stream":true,"max_tokens":8}"#;

/// Sends all headers and at least a byte of the body, and leaves in the body, before the answer, in it, or after it.
async fn visit(gateway: SocketAddr, rng: &mut ChaCha8Rng) {
    let request = format!(
        "POST /v1/completions HTTP/1.1\r\nhost: gateway\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{BODY}",
        BODY.len()
    );
    let all = request.len();
    let sent = match rng.random_range(0..4) {
        0 => rng.random_range(all - BODY.len() + 1..all),
        _ => all,
    };
    let mut socket = TcpStream::connect(gateway).await.expect("a connection");
    let written = socket.write_all(&request.as_bytes()[..sent]).await;
    written.expect("Envoy reads");
    if sent == all {
        let stay = match rng.random_range(0..4) {
            0 => eldr_tests::PATIENCE,
            _ => up_to(STAY, rng),
        };
        let mut answer = Vec::new();
        let _ = timeout(stay, socket.read_to_end(&mut answer)).await;
    }
}

/// Every client's visits; returns how many there were.
async fn visits(gateway: SocketAddr) -> u64 {
    let mut clients = JoinSet::new();
    for client in 0..CLIENTS {
        clients.spawn(async move {
            let mut rng = rng(SEED, client);
            for _ in 0..VISITS {
                visit(gateway, &mut rng).await;
            }
            VISITS
        });
    }
    clients.join_all().await.into_iter().sum()
}

#[tokio::test]
async fn thousands_of_clients_leave_at_any_moment_and_every_count_returns_to_zero() {
    let mut gateway = Gateway::start(Options {
        threads: 2,
        ..Options::default()
    })
    .await;
    let sign = |_: &Received, rng: &mut ChaCha8Rng| blob::signature_of(rng.random_range(0..3), 3);
    let visits = while_they_work(&mut gateway, SEED, sign, async |gateway| {
        let visits = visits(gateway.address).await;
        // Late answers and releases still come in.
        gateway.expect_in_flight(0).await;
        visits
    })
    .await;
    assert!(visits >= 2_000);

    let ended = async || outcomes(&gateway).await;
    eventually("one outcome for each", ended, |&sum| sum == visits).await;
    let seen = gateway.envoy.stat("http.gateway.downstream_rq_total").await;
    assert_eq!(seen.unwrap(), visits);
    let log = gateway.access_log(visits as usize).await;
    assert_eq!(log.len() as u64, visits);
    let left = |outcome: &str| {
        let of = |entry: &&serde_json::Value| {
            let (outcome_is, flags) = (entry["outcome"].as_str(), entry["flags"].as_str());
            outcome_is == Some(outcome) && flags.is_some_and(|flags| flags.contains("DC"))
        };
        log.iter().filter(of).count()
    };
    let phases = [left("client_gone"), left("routed(in_band)")];
    assert!(
        phases.iter().all(|&count| count > 100),
        "clients left in each phase: {phases:?}"
    );

    // As idle as at the start, everywhere.
    gateway.expect_in_flight(0).await;
    let stats = gateway.filter_stats().await;
    for cluster in ["prefill", "decode-0", "decode-1", "decode-2"] {
        let gauge = format!("eldr.worker.{cluster}.in_flight");
        assert_eq!(stats.get(&gauge), Some(&0), "{cluster}");
    }
    gateway.prefill_says(Some(2));
    gateway.decode[2].answers(Answer::json("decode-2"));
    let reply = gateway.post("/v1/completions", BODY).await;
    assert_eq!(reply.text(), "decode-2");
    gateway.assert_no_trap();
}

#[tokio::test]
async fn an_engine_holds_no_blocks_after_a_storm_and_no_lease_had_to_end() {
    let config = MockConfig {
        decode_workers: 2,
        ..MockConfig::default()
    };
    let catalog = Catalog::new(Geometry::new(1, 8).unwrap(), 2).unwrap();
    let engine = MockEngine::start(config, Arc::new(catalog)).await.unwrap();
    let (prefill, decode) = (engine.prefill(), engine.decode());
    let gateway = Gateway::start(Options {
        threads: 2,
        clusters: vec![("p", prefill[0]), ("d-0", decode[0]), ("d-1", decode[1])],
        ..Options::filter(json!({
            "models": [{ "model": "*", "policy": "least_loaded" }],
            "prefill_clusters": ["p"],
            "decode_clusters": ["d-0", "d-1"],
            "release": "eldr"
        }))
    })
    .await;
    visits(gateway.address).await;
    gateway.expect_in_flight(0).await;
    let held = async || {
        engine
            .reports()
            .iter()
            .map(|worker| worker.kv.held_requests)
            .sum::<u64>()
    };
    eventually("all blocks fetched or released", held, |&held| held == 0).await;
    let reports = engine.reports();
    let sum = |of: fn(&eldr_examples::mock::KvReport) -> u64| -> u64 {
        reports.iter().map(|worker| of(&worker.kv)).sum()
    };
    assert!(sum(|kv| kv.releases) > 0, "no client left during prefill");
    assert_eq!(sum(|kv| kv.stranded_requests), 0);
    // A worker whose client left before its answer may have had the blocks. That one is told again does no harm.
    assert_eq!(sum(|kv| kv.unknown_releases), 0);
    let stats = gateway.filter_stats().await;
    assert_eq!(stats.get("eldr.release_dropped").copied().unwrap_or(0), 0);
    gateway.assert_no_trap();
}
