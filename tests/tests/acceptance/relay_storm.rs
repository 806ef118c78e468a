//! Coordinators that leave whenever they like, ids that several use, and a VM that traps in the middle: in relay mode no
//! request gets what is another's, and nothing stays behind.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use eldr_tests::client::raw;
use eldr_tests::upstream::Received;
use eldr_tests::{Answer, Gateway, KV_TRANSFER_PARAMS, Options, PATIENCE, blob, eventually};
use rand::RngExt;
use rand_chacha::ChaCha8Rng;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio::time::timeout;

use crate::busy::{outcomes, rng, up_to, while_they_work};

const SEED: u64 = 21;
/// At a time.
const COORDINATORS: u64 = 32;
/// Requests of each, one after the other.
const REQUESTS: u64 = 40;
/// Ids that all coordinators use now and then.
const SHARED_IDS: u64 = 6;
/// Longest that coordinators stay who leave before the end.
const STAY: Duration = Duration::from_millis(40);
const WORKERS: usize = 3;
const TRAP: &[u8] = b"GET / HTTP/1.1\r\nhost: gateway\r\nconnection: close\r\nx-test: trap\r\nx-eldr-trap-for-tests: 1\r\n\r\n";

/// Sends one leg of a request, and perhaps leaves before its answer has ended. Whether it saw all of an answer that is good.
async fn leg(gateway: SocketAddr, id: &str, region: usize, wants: &str, stays: Duration) -> bool {
    let body =
        format!(r#"{{"prompt":"{region}","stream":true,"kv_transfer_params":{{"{wants}":true}}}}"#);
    let request = format!(
        "POST /v1/completions HTTP/1.1\r\nhost: gateway\r\nx-request-id: {id}\r\nx-test: {region}\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{body}",
        body.len()
    );
    let mut socket = TcpStream::connect(gateway).await.expect("a connection");
    // A thread whose VM has trapped may close it at once.
    let mut answer = Vec::new();
    socket.write_all(request.as_bytes()).await.is_ok()
        && matches!(
            timeout(stays, socket.read_to_end(&mut answer)).await,
            Ok(Ok(_))
        )
        && answer.starts_with(b"HTTP/1.1 200")
}

/// Both legs of a coordinator's requests, most of them under an id of their own.
async fn coordinate(gateway: SocketAddr, number: u64, done: Arc<AtomicU64>) {
    let mut rng = rng(SEED, number);
    for request in 0..REQUESTS {
        let region = rng.random_range(0..WORKERS);
        let id = match rng.random_range(0..5) {
            0 => format!("shared-{}", rng.random_range(0..SHARED_IDS)),
            _ => format!("own-{number}-{request}"),
        };
        for wants in ["do_remote_decode", "do_remote_prefill"] {
            let stays = match rng.random_range(0..4) {
                0 => up_to(STAY, &mut rng),
                _ => PATIENCE,
            };
            // Without an answer to its prefill leg a coordinator has no blocks to decode with. If it went on, it would meet what is kept
            // for another of the same id: its own place is free once it has left.
            if !leg(gateway, &id, region, wants, stays).await {
                break;
            }
        }
        done.fetch_add(1, Ordering::Relaxed);
    }
}

/// A prefill worker signs with the region that the prompt names.
fn sign(request: &Received, _: &mut ChaCha8Rng) -> String {
    let region = request.json()["prompt"].as_str().map(str::parse);
    let region = region.and_then(Result::ok).expect("a region");
    blob::signature_of(region, WORKERS)
}

/// All coordinators at once; a VM traps once a third of their requests are through.
async fn storm(gateway: &Gateway) {
    let done = Arc::<AtomicU64>::default();
    let mut coordinators = JoinSet::new();
    for number in 0..COORDINATORS {
        coordinators.spawn(coordinate(gateway.address, number, Arc::clone(&done)));
    }
    let through = async || done.load(Ordering::Relaxed);
    let third = COORDINATORS * REQUESTS / 3;
    eventually("a third is through", through, |&count| count >= third).await;
    let _ = raw(gateway.address, TRAP).await;
    assert!(
        done.load(Ordering::Relaxed) < COORDINATORS * REQUESTS,
        "it trapped too late"
    );
    coordinators.join_all().await;
}

fn text<'a>(entry: &'a Value, field: &str) -> &'a str {
    entry[field].as_str().unwrap_or_default()
}

#[tokio::test]
async fn a_relay_storm_with_a_trap_mixes_no_ids_and_leaves_nothing_behind() {
    let regions: Vec<_> = (0..WORKERS)
        .map(|worker| vec![format!("decode-{worker}")])
        .collect();
    let inline = blob::inline(&blob::one_expert_per_region(&regions));
    let mut gateway = Gateway::start(Options {
        threads: 2,
        workers: WORKERS,
        traps: true,
        ..Options::filter(json!({
            "mode": "relay",
            // Whatever the load, so that where a request goes tells what it was routed by.
            "models": [{
                "model": "*", "blob": { "inline": inline }, "max_load_factor": "none",
                "load_unit": "kv_tokens"
            }],
            "eject_ms": 0,
        }))
    })
    .await;
    while_they_work(&mut gateway, SEED, sign, async |gateway| {
        storm(gateway).await;
        // The dead VM's counts too.
        gateway.expect_in_flight(0).await;
    })
    .await;
    for worker in 0..WORKERS {
        let gauge = format!("eldr.worker.decode-{worker}.kv_tokens");
        gateway.expect_stat(&gauge, 0).await;
    }

    // Each request is logged once, with one outcome, but for those that the trap took along.
    let seen = gateway.envoy.stat("http.gateway.downstream_rq_total").await;
    let seen = seen.expect("a counter");
    let log = gateway.access_log(seen as usize).await;
    assert_eq!(log.len() as u64, seen);
    let (ended, lost): (Vec<_>, Vec<_>) = log
        .iter()
        .partition(|entry| !text(entry, "outcome").is_empty());
    let each = ended.len() as u64;
    let outcomes = async || outcomes(&gateway).await;
    eventually("one outcome for each", outcomes, |&sum| sum == each).await;
    assert!(
        lost.iter().any(|entry| text(entry, "test") == "trap"),
        "nothing trapped"
    );
    assert!(
        lost.len() < log.len() / 2,
        "{} of {} lost",
        lost.len(),
        log.len()
    );

    // What was routed by a signature went where its own points.
    let by_signature = |entry: &&&Value| text(entry, "outcome") == "routed(in_band)";
    let routed: Vec<_> = ended.iter().filter(by_signature).collect();
    assert!(
        routed.len() as u64 > COORDINATORS * REQUESTS / 3,
        "{}",
        routed.len()
    );
    for entry in routed {
        let own = format!("decode-{};", text(entry, "test"));
        assert!(text(entry, "decision").starts_with(&own), "{entry}");
    }
    let stats = gateway.filter_stats().await;
    for counter in ["eldr.relay_found", "eldr.relay_duplicate"] {
        assert!(
            stats.get(counter).is_some_and(|&count| count > 0),
            "{counter}"
        );
    }

    // And it goes on, on both threads.
    gateway.prefill_says(Some(2));
    gateway.decode[2].answers(Answer::json("decode-2"));
    for connection in crate::health::both_threads(&gateway).await.iter_mut() {
        for (body, expected) in [
            (
                r#"{"kv_transfer_params":{"do_remote_decode":true}}"#,
                KV_TRANSFER_PARAMS,
            ),
            (
                r#"{"kv_transfer_params":{"do_remote_prefill":true}}"#,
                "decode-2",
            ),
        ] {
            let mut request = eldr_tests::client::post("/v1/completions", body);
            let id = "after".parse().expect("a header value");
            request.headers_mut().insert("x-request-id", id);
            let reply = connection.call(request).await;
            assert!(reply.text().contains(expected), "{}", reply.text());
        }
    }
}
