//! What runs on each decode worker is known to all threads, outlives no thread that dies, and survives new blobs and two legs.

use eldr_core::signature::{Encoding, Geometry, Signature};
use eldr_core::transform::Transform;
use eldr_tests::client::{post, raw};
use eldr_tests::{Answer, Connection, Gateway, KV_TRANSFER_PARAMS, Options, blob, eventually};
use serde_json::{Value, json};

use crate::batches::{Held, by, expect_known, hold, hold_ask, probe};
use crate::blobs::Server;
use crate::relay::{DECODE, PREFILL, SUGGESTION, leg};
use crate::trap::{TRAP, connect};

const BODY: &str = r#"{"model":"m","prompt":"hi","stream":true}"#;

/// At least so many connections to each of two threads.
async fn on_both(gateway: &Gateway, count: usize) -> [Vec<Connection>; 2] {
    let mut found = [vec![], vec![]];
    while found.iter().any(|found| found.len() < count) {
        let open = found.iter().map(Vec::len).sum();
        let (thread, connection) = connect(gateway, open).await;
        found[thread].push(connection);
    }
    found
}

/// Waits until a request of this expert on this connection is decided so.
async fn expect_decision(
    gateway: &Gateway,
    connection: &mut Connection,
    expert: usize,
    expected: &str,
) {
    let decision = async || probe(gateway, connection, expert).await;
    eventually(expected, decision, |found| found == expected).await;
}

#[tokio::test]
async fn two_threads_see_each_others_batches_after_a_tick() {
    let mut gateway = Gateway::start(Options {
        threads: 2,
        // A thread that stands still for longer than the default lease would have its part forgotten.
        ..Options::filter(json!({
            "models": by("marginal"), "load_refresh_ms": 0, "load_lease_ms": 60_000
        }))
    })
    .await;
    let [mut one, mut other] = on_both(&gateway, 3).await;
    let mut held = Vec::new();
    for expert in [0, 1, 2] {
        let connection = one.pop().unwrap();
        held.push(hold(&mut gateway, connection, expert).await);
    }
    // The gauge is set at the tick that also tells.
    expect_known(&gateway, [1, 1, 1]).await;
    let asks = &mut other[0];
    for expert in [2, 1, 0] {
        let expected = format!("decode-{expert};reason=marginal;known=1");
        expect_decision(&gateway, asks, expert, &expected).await;
    }
    // What ends is gone after a tick, and what comes is heard after one.
    let connection = held.pop().unwrap().finish().await;
    expect_decision(&gateway, asks, 0, "decode-2;reason=marginal;known=0").await;
    let more = hold(&mut gateway, connection, 2).await;
    assert_eq!(more.worker(), 2, "{}", more.decision);
    expect_decision(&gateway, asks, 2, "decode-2;reason=marginal;known=1").await;
    for held in held.into_iter().chain([more]) {
        held.leave().await;
    }
    expect_known(&gateway, [0, 0, 0]).await;
    gateway.expect_in_flight(0).await;
    gateway.assert_no_trap();
}

#[tokio::test]
async fn a_thread_that_dies_takes_its_part_along_and_learns_the_others_anew() {
    let mut gateway = Gateway::start(Options {
        threads: 2,
        traps: true,
        ..Options::filter(json!({ "models": by("marginal"), "load_refresh_ms": 0 }))
    })
    .await;
    let mut free = on_both(&gateway, 4).await;
    let mut held: Vec<Held> = Vec::new();
    for connections in &mut free {
        for expert in [0, 1, 2] {
            let connection = connections.pop().unwrap();
            held.push(hold(&mut gateway, connection, expert).await);
        }
    }
    // One of each expert on each thread, wherever they are.
    gateway.expect_in_flight(6).await;
    let _ = raw(gateway.address, TRAP).await;
    let log = async || gateway.envoy.log_tail(usize::MAX);
    let trapped = |log: &String| log.contains("Function: proxy_on_request_headers failed");
    eventually("the VM traps", log, trapped).await;
    gateway.expect_in_flight(3).await;

    // Whether it goes on or is reloaded, each thread goes by what the survivor runs.
    // Envoy leaves the dead one's connections open until something comes from their workers.
    let open = free.iter().map(Vec::len).sum::<usize>() + held.len();
    for thread in [0, 1] {
        for expert in [0, 1, 2] {
            let decision = async || {
                let (on, mut connection) = connect(&gateway, open).await;
                (on, probe(&gateway, &mut connection, expert).await)
            };
            eventually("each thread knows", decision, |(on, decision)| {
                *on == thread && decision.ends_with(";reason=marginal;known=1")
            })
            .await;
        }
    }
    let mut alive = 0;
    for request in held {
        alive += usize::from(request.goes_on().await);
    }
    assert_eq!(alive, 3, "those of the thread that went on");
    gateway.expect_in_flight(0).await;
    let open = free.iter().map(Vec::len).sum::<usize>();
    for thread in [0, 1] {
        let decision = async || {
            let (on, mut connection) = connect(&gateway, open).await;
            (on, probe(&gateway, &mut connection, 1).await)
        };
        eventually("nobody is left", decision, |(on, decision)| {
            *on == thread && decision == "decode-0;reason=marginal;known=0"
        })
        .await;
    }
}

/// Two layers of three experts, of which the blob looks at one: region `i` is about its expert `i`.
fn looking_at(layer: u16, revision: u64) -> Vec<u8> {
    let geometry = Geometry::new(2, 3).unwrap();
    let transform = Transform::new(geometry, vec![layer], vec![1.0; 3]).unwrap();
    let centroids = vec![1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0];
    let regions = ["decode-0", "decode-1", "decode-2"].map(|name| vec![name.to_owned()]);
    let mut blob = blob::new(transform, centroids, &regions);
    blob.revision = revision;
    blob.to_bytes().unwrap()
}

/// Has prefill say which expert of each layer a prompt uses.
fn uses(gateway: &Gateway, experts: [usize; 2]) {
    let mut counts = vec![0; 6];
    counts[experts[0]] = 7;
    counts[3 + experts[1]] = 7;
    let signature = Signature::dense(Geometry::new(2, 3).unwrap(), counts, Some(7)).unwrap();
    let header = signature.encode(Encoding::Varint);
    gateway
        .prefill
        .answers(Answer::prefill(KV_TRANSFER_PARAMS, Some(&header)));
}

#[tokio::test]
async fn a_new_blob_with_other_layers_begins_anew_and_who_was_there_ends_where_it_began() {
    let server = Server::start().await;
    server.publish("/blob", looking_at(0, 1));
    let http = json!({ "cluster": "blobs", "path": "/blob", "interval_ms": 200 });
    let models: Value = json!([{
        "model": "*", "policy": "hybrid", "tau": 2, "blob": { "http": http }
    }]);
    let mut gateway = Gateway::start(Options {
        clusters: vec![("blobs", server.address)],
        ..Options::filter(json!({ "models": models }))
    })
    .await;
    let mut asks = gateway.connect().await;
    let decide = async |gateway: &Gateway, asks: &mut Connection, experts| {
        uses(gateway, experts);
        for worker in &gateway.decode {
            worker.answers(Answer::json("{}"));
        }
        let reply = asks.call(post("/v1/completions", BODY)).await;
        assert_eq!(reply.status, 200);
        reply.header("x-eldr-decision")
    };
    let known = |decision: &String, worker: usize, known: u32| {
        decision.starts_with(&format!("decode-{worker};reason=marginal"))
            && decision.ends_with(&format!(";known={known}"))
    };
    let first = async || decide(&gateway, &mut asks, [0, 0]).await;
    eventually("the blob serves", first, |decision| known(decision, 0, 0)).await;
    let mut held = Vec::new();
    for expert in [0, 1, 2] {
        uses(&gateway, [expert, 0]);
        let connection = gateway.connect().await;
        held.push(hold_ask(&mut gateway, connection, post("/v1/completions", BODY)).await);
    }
    let at: Vec<usize> = held.iter().map(Held::worker).collect();
    for expert in [2, 0, 1] {
        let next = async || decide(&gateway, &mut asks, [expert, 1]).await;
        eventually("by layer 0", next, |decision| {
            known(decision, at[expert], 1)
        })
        .await;
    }

    server.publish("/blob", looking_at(1, 2));
    let next = async || decide(&gateway, &mut asks, [0, 0]).await;
    let is_new = |decision: &String| decision.ends_with(";known=0");
    eventually("the new blob serves", next, is_new).await;
    expect_known(&gateway, [1, 1, 1]).await;
    // Those that were there count by number: the new ones go to the other workers in turn.
    for expert in [0, 1, 2] {
        uses(&gateway, [0, expert]);
        let connection = gateway.connect().await;
        held.push(hold_ask(&mut gateway, connection, post("/v1/completions", BODY)).await);
    }
    expect_known(&gateway, [2, 2, 2]).await;
    let at: Vec<usize> = held.iter().skip(3).map(Held::worker).collect();
    for expert in [2, 0, 1] {
        let next = async || decide(&gateway, &mut asks, [1, expert]).await;
        eventually("by layer 1", next, |decision| {
            known(decision, at[expert], 1)
        })
        .await;
    }
    for request in held {
        request.leave().await;
    }
    expect_known(&gateway, [0, 0, 0]).await;
    gateway.expect_in_flight(0).await;
    gateway.assert_no_trap();
}

#[tokio::test]
async fn in_relay_mode_a_decode_leg_is_held_against_the_batches_by_what_its_prefill_answer_said() {
    let filter = json!({ "mode": "relay", "models": by("marginal") });
    let mut gateway = Gateway::start(Options::filter(filter)).await;
    let mut held: Vec<Held> = Vec::new();
    for (index, expert) in [0, 1, 2, 2, 0, 1, 1, 0, 2].into_iter().enumerate() {
        let id = format!("request-{index}");
        gateway.prefill_says(Some(expert));
        let prefill = gateway.connect().await.call(leg(&id, PREFILL)).await;
        assert_eq!(prefill.header(SUGGESTION), format!("decode-{expert}"));
        // Whatever prefill said meanwhile.
        gateway.prefill_says(Some((expert + 1) % 3));
        gateway.connect().await.call(leg("other", PREFILL)).await;
        let connection = gateway.connect().await;
        let request = hold_ask(&mut gateway, connection, leg(&id, DECODE)).await;
        let known = index / 3;
        let expected = format!("decode-{expert};reason=marginal;known={known}");
        assert_eq!(request.decision, expected);
        held.push(request);
    }
    // Without its prefill leg there is nothing to go by.
    let connection = gateway.connect().await;
    let stray = hold_ask(&mut gateway, connection, leg("stray", DECODE)).await;
    assert!(
        stray.decision.contains(";reason=no_signature"),
        "{}",
        stray.decision
    );
    for request in held.into_iter().chain([stray]) {
        drop(request.finish().await);
    }
    expect_known(&gateway, [0, 0, 0]).await;
    gateway.expect_in_flight(0).await;
    gateway.assert_no_trap();
}
