//! Relay mode: a coordinator runs both legs through the gateway, which reads what prefill says and routes decode by it.

use eldr_tests::client::{next_piece, post};
use eldr_tests::{
    Answer, Connection, Gateway, KV_TRANSFER_PARAMS, Options, Reply, blob, eventually,
};
use hyper::Request;
use serde_json::{Value, json};

use crate::health::both_threads;
use crate::reference;

pub(crate) const PREFILL: &str = r#"{"model":"m", "prompt":"hi","kv_transfer_params":{"do_remote_decode":true,"do_remote_prefill":false}}"#;
pub(crate) const DECODE: &str = r#"{"model":"m", "prompt":"hi","n":2,"kv_transfer_params":{"do_remote_prefill":true, "x":1.50}}"#;
pub(crate) const SUGGESTION: &str = "x-eldr-decode-cluster";

fn relay(more: Value) -> Options {
    let mut filter = json!({ "mode": "relay" });
    for (key, value) in more.as_object().unwrap() {
        filter[key] = value.clone();
    }
    Options::filter(filter)
}

pub(crate) type Ask = Request<http_body_util::Full<bytes::Bytes>>;

/// A leg of the request `id`.
pub(crate) fn leg(id: &str, body: &str) -> Ask {
    let mut request = post("/v1/completions", body.to_owned());
    let id = id.parse().unwrap();
    request.headers_mut().insert("x-request-id", id);
    request
}

async fn send(gateway: &Gateway, id: &str, body: &str) -> Reply {
    gateway.connect().await.call(leg(id, body)).await
}

async fn counter(gateway: &Gateway, name: &str) -> u64 {
    let stats = gateway.filter_stats().await;
    stats.get(name).copied().unwrap_or_default()
}

#[tokio::test]
async fn decode_goes_where_the_prefill_answer_of_its_id_points() {
    let gateway = Gateway::start(relay(json!({}))).await;
    for region in [2, 1] {
        gateway.prefill_says(Some(region));
        let id = format!("request-{region}");
        let prefill = send(&gateway, &id, PREFILL).await;
        let expected = format!("decode-{region}");
        assert_eq!(prefill.header(SUGGESTION), expected);
        // The coordinator is trusted, and may want to send it along.
        assert_eq!(
            prefill.header("x-eldr-signature"),
            blob::signature_of(region, 3)
        );
        assert!(prefill.text().contains(KV_TRANSFER_PARAMS));
        let decode = send(&gateway, &id, DECODE).await;
        assert_eq!(decode.text(), expected);
        let debug = decode.header("x-eldr-decision");
        assert!(
            debug.starts_with(&format!("decode-{region};reason=in_band;")),
            "{debug}"
        );
        let received = gateway.decode[region].only();
        assert_eq!(received.text(), DECODE, "not a byte is changed");
        assert_eq!(received.headers["x-request-id"], id.as_str());
    }
    let prefills = gateway.prefill.received();
    assert_eq!(prefills.len(), 2, "the gateway sends no leg of its own");
    assert!(prefills.iter().all(|leg| leg.text() == PREFILL));
    let outcomes = [("prefilled", 2), ("routed(in_band)", 2)];
    gateway.expect_outcomes(&outcomes).await;
    assert_eq!(counter(&gateway, "eldr.relay_found").await, 2);
    gateway.expect_in_flight(0).await;
}

#[tokio::test]
async fn it_does_so_on_whichever_thread_decode_comes() {
    let options = Options {
        threads: 2,
        ..relay(json!({ "models": models(1, [0, 1, 2]) }))
    };
    let gateway = Gateway::start(options).await;
    let mut connections = both_threads(&gateway).await;
    for prefill in 0..connections.len() {
        for decode in 0..connections.len() {
            let region = (prefill + decode) % 3;
            gateway.prefill_says(Some(region));
            let id = format!("{prefill}-{decode}");
            assert_eq!(
                connections[prefill].call(leg(&id, PREFILL)).await.status,
                200
            );
            let reply = connections[decode].call(leg(&id, DECODE)).await;
            assert_eq!(reply.text(), format!("decode-{region}"), "{id}");
        }
    }
}

/// Models with a blob that sends expert `i` of three to `decode-{workers[i]}`, whatever the load.
fn models(revision: u64, workers: [usize; 3]) -> Value {
    let regions = workers.map(|worker| vec![format!("decode-{worker}")]);
    let mut blob = blob::one_expert_per_region(&regions);
    blob.revision = revision;
    json!([{ "model": "*", "blob": { "inline": blob::inline(&blob) }, "max_load_factor": "none" }])
}

#[tokio::test]
async fn a_hundred_requests_between_their_legs_each_find_their_own() {
    let options = Options {
        threads: 2,
        ..relay(json!({ "models": models(1, [0, 1, 2]) }))
    };
    let gateway = Gateway::start(options).await;
    let mut connections = both_threads(&gateway).await;
    let count = connections.len();
    let region = |index: usize| index * 7 / 3 % 3;
    for index in 0..100 {
        gateway.prefill_says(Some(region(index)));
        let prefill = leg(&format!("r-{index}"), PREFILL);
        assert_eq!(connections[index % count].call(prefill).await.status, 200);
    }
    for index in (0..100).rev() {
        let reply = connections[index * 3 % count]
            .call(leg(&format!("r-{index}"), DECODE))
            .await;
        assert_eq!(reply.text(), format!("decode-{}", region(index)), "{index}");
    }
}

#[tokio::test]
async fn two_requests_with_one_id_are_both_routed_without_a_signature() {
    let gateway = Gateway::start(relay(json!({}))).await;
    for region in [1, 2] {
        gateway.prefill_says(Some(region));
        assert_eq!(send(&gateway, "same", PREFILL).await.status, 200);
    }
    for _ in 0..2 {
        let decode = send(&gateway, "same", DECODE).await;
        assert_eq!(
            decode.header("x-eldr-decision"),
            "decode-0;reason=no_signature"
        );
    }
    // Others are none of their business.
    send(&gateway, "other", PREFILL).await;
    assert_eq!(send(&gateway, "other", DECODE).await.text(), "decode-2");
    let outcomes = [
        ("prefilled", 3),
        ("routed(no_signature)", 2),
        ("routed(in_band)", 1),
    ];
    gateway.expect_outcomes(&outcomes).await;
    assert!(counter(&gateway, "eldr.relay_duplicate").await >= 3);
}

#[tokio::test]
async fn an_id_may_come_again_after_its_request_or_after_a_failed_leg() {
    let gateway = Gateway::start(relay(json!({}))).await;
    for region in [1, 2, 0] {
        gateway.prefill.answers(Answer::status(503).body("busy"));
        let failed = send(&gateway, "again", PREFILL).await;
        assert_eq!(
            (failed.status.as_u16(), failed.text().as_str()),
            (503, "busy")
        );
        assert_eq!(failed.header(SUGGESTION), "");
        gateway
            .prefill
            .answers(Answer::status(422).body("too long"));
        assert_eq!(send(&gateway, "again", PREFILL).await.text(), "too long");
        gateway.prefill_says(Some(region));
        send(&gateway, "again", PREFILL).await;
        let decode = send(&gateway, "again", DECODE).await;
        assert_eq!(decode.text(), format!("decode-{region}"));
    }
    let outcomes = [
        ("prefill_failed", 3),
        ("prefill_rejected", 3),
        ("prefilled", 3),
        ("routed(in_band)", 3),
    ];
    gateway.expect_outcomes(&outcomes).await;
    assert_eq!(counter(&gateway, "eldr.relay_duplicate").await, 0);
}

#[tokio::test]
async fn a_coordinator_that_leaves_in_prefill_is_gone_and_its_id_is_free() {
    let mut gateway = Gateway::start(relay(json!({}))).await;
    gateway.prefill.by_hand();
    let mut connection = gateway.connect().await;
    let mut held = {
        let mut call = Box::pin(connection.call(leg("left", PREFILL)));
        tokio::select! {
            _ = &mut call => panic!("nobody answered"),
            held = gateway.prefill.next() => held,
        }
    };
    drop(connection);
    held.abandoned().await;
    gateway.expect_outcomes(&[("client_gone", 1)]).await;
    gateway.expect_in_flight(0).await;
    gateway.prefill_says(Some(2));
    send(&gateway, "left", PREFILL).await;
    assert_eq!(send(&gateway, "left", DECODE).await.text(), "decode-2");
}

#[tokio::test]
async fn a_decode_request_that_brings_its_signature_is_routed_by_it_and_goes_on_without() {
    let gateway = Gateway::start(relay(json!({}))).await;
    gateway.prefill_says(Some(1));
    send(&gateway, "both", PREFILL).await;
    for id in ["both", "alone"] {
        let mut decode = leg(id, DECODE);
        let signature = blob::signature_of(2, 3).parse().unwrap();
        decode.headers_mut().insert("x-eldr-signature", signature);
        let reply = gateway.connect().await.call(decode).await;
        assert_eq!(reply.text(), "decode-2", "{id}");
    }
    for received in gateway.decode[2].received() {
        assert_eq!(received.headers.get("x-eldr-signature"), None);
        assert_eq!(received.text(), DECODE);
    }
}

/// What a prefill worker of the official fork answers, for region 2, and what is left of it for decode.
const FORK: &str =
    r#"{"do_remote_prefill":true, "eldr_sig":"AAAAAAcA","x":[ 18446744073709551617 ]}"#;
const FORK_LEFT: &str = r#"{"do_remote_prefill":true,"x":[ 18446744073709551617 ]}"#;

#[tokio::test]
async fn the_forks_signature_routes_decode_and_stays_out_of_it() {
    let gateway = Gateway::start(relay(json!({}))).await;
    gateway.prefill.answers(Answer::prefill(FORK, None));
    let prefill = send(&gateway, "fork", PREFILL).await;
    assert!(
        prefill.text().contains(FORK),
        "the coordinator gets the answer as it is"
    );
    let decode = DECODE.replace(r#"{"do_remote_prefill":true, "x":1.50}"#, FORK);
    assert_eq!(send(&gateway, "fork", &decode).await.text(), "decode-2");
    let received = gateway.decode[2].only();
    assert_eq!(received.text(), decode.replace(FORK, FORK_LEFT));
    assert_eq!(
        received.headers["content-length"],
        received.body.len().to_string().as_str()
    );
}

#[tokio::test]
async fn it_is_read_from_the_answers_body_where_that_is_configured() {
    let gateway = Gateway::start(relay(json!({ "relay_body_signature": true }))).await;
    let fork = Answer::prefill(FORK, None);
    // Held in pieces, with and without a length, and passed on as it came.
    gateway.prefill.answers(fork.clone());
    let prefill = send(&gateway, "a", PREFILL).await;
    assert_eq!(prefill.header(SUGGESTION), "decode-2");
    assert!(prefill.text().contains(FORK));
    assert_eq!(send(&gateway, "a", DECODE).await.text(), "decode-2");
    // What is too long to hold passes unread, and so does what is no JSON or streamed.
    let long = Answer::json(format!(
        r#"{{"kv_transfer_params":{FORK},"x":"{}"}}"#,
        "y".repeat(600 << 10)
    ));
    for (id, answer) in [
        ("long", long),
        ("broken", Answer::json(r#"{"kv_transfer_pa"#)),
        ("stream", Answer::event_stream().body("data: x\n\n")),
        ("empty", Answer::json("")),
    ] {
        gateway.prefill.answers(answer);
        let prefill = send(&gateway, id, PREFILL).await;
        assert_eq!(prefill.status, 200, "{id}");
        let decode = send(&gateway, id, DECODE).await;
        assert_eq!(
            decode.header("x-eldr-decision"),
            "decode-0;reason=no_signature",
            "{id}"
        );
    }
}

#[tokio::test]
async fn a_long_answer_of_no_known_length_is_let_go_and_a_short_one_read_at_its_end() {
    let mut gateway = Gateway::start(relay(json!({ "relay_body_signature": true }))).await;
    gateway.prefill.by_hand();
    let json = || Answer::status(200).header("content-type", "application/json");
    let ask = |id: &'static str| {
        let address = gateway.address;
        tokio::spawn(async move { Connection::open(address).await.call(leg(id, PREFILL)).await })
    };
    let short = ask("short");
    let stream = gateway.prefill.next().await.stream(json());
    for piece in [r#"{"kv_transfer_"#, r#"params":"#, FORK, "}"] {
        stream.send(piece).await;
    }
    stream.finish();
    let short = short.await.unwrap();
    assert_eq!(short.header(SUGGESTION), "decode-2");
    assert_eq!(short.text(), format!(r#"{{"kv_transfer_params":{FORK}}}"#));

    let long = ask("long");
    let stream = gateway.prefill.next().await.stream(json());
    let piece = "x".repeat(64 << 10);
    for _ in 0..40 {
        stream.send(piece.clone()).await;
    }
    stream.finish();
    let long = long.await.unwrap();
    assert_eq!(
        (long.status.as_u16(), long.body.len()),
        (200, 40 * piece.len())
    );
    gateway.expect_outcomes(&[("prefilled", 2)]).await;
}

#[tokio::test]
async fn prefill_answers_are_not_held_where_that_is_not_configured() {
    let mut gateway = Gateway::start(relay(json!({}))).await;
    gateway.prefill.by_hand();
    let mut connection = gateway.connect().await;
    let json = Answer::status(200).header("content-type", "application/json");
    let (answer, stream) = tokio::join!(connection.send(leg("r", PREFILL)), async {
        let stream = gateway.prefill.next().await.stream(json);
        stream.send("first").await;
        stream
    });
    let mut body = answer.into_body();
    assert_eq!(next_piece(&mut body).await.as_deref(), Some(&b"first"[..]));
    stream.finish();
    assert_eq!(next_piece(&mut body).await, None);
}

#[tokio::test]
async fn what_centroids_of_an_older_revision_said_is_not_used() {
    let options = Options {
        lds: true,
        ..relay(json!({ "models": models(1, [0, 1, 2]) }))
    };
    let gateway = Gateway::start(options).await;
    gateway.prefill_says(Some(1));
    send(&gateway, "old", PREFILL).await;
    let mut new = relay(json!({ "models": models(2, [2, 0, 1]) })).filter;
    new["relay_ttl_ms"] = json!(59_000);
    gateway.update(new, 2);
    let mut number = 0;
    let serves = async || {
        number += 1;
        let id = format!("probe-{number}");
        send(&gateway, &id, PREFILL).await.header(SUGGESTION)
    };
    eventually("the new revision serves", serves, |cluster| {
        cluster == "decode-0"
    })
    .await;
    let decode = send(&gateway, "old", DECODE).await;
    assert_eq!(
        decode.header("x-eldr-decision"),
        "decode-0;reason=no_signature"
    );
    gateway.expect_stat("eldr.relay_outdated", 1).await;
    assert_eq!(send(&gateway, "probe-1", "{}").await.status, 200);
}

#[tokio::test]
async fn legs_are_counted_where_they_are_and_prefill_goes_to_the_least_loaded() {
    let mut gateway = Gateway::start(Options {
        prefills: 2,
        ..relay(json!({ "prefill_policy": "least_loaded", "load_refresh_ms": 0 }))
    })
    .await;
    gateway.prefill.by_hand();
    gateway.other_prefills[0].by_hand();
    let ask = |id: &'static str| {
        let address = gateway.address;
        tokio::spawn(async move { Connection::open(address).await.call(leg(id, PREFILL)).await })
    };
    let first = ask("a");
    let (held, free) = tokio::select! {
        held = gateway.prefill.next() => (held, 1),
        held = gateway.other_prefills[0].next() => (held, 0),
    };
    gateway.expect_in_flight(1).await;
    let busy = if free == 1 { "prefill" } else { "prefill-1" };
    gateway
        .expect_stat(&format!("eldr.worker.{busy}.in_flight"), 1)
        .await;
    let other = if free == 1 {
        &gateway.other_prefills[0]
    } else {
        &gateway.prefill
    };
    other.answers(Answer::prefill(KV_TRANSFER_PARAMS, None));
    for id in ["b", "c", "d"] {
        assert_eq!(send(&gateway, id, PREFILL).await.status, 200);
    }
    held.answer(Answer::prefill(KV_TRANSFER_PARAMS, None));
    assert_eq!(first.await.unwrap().status, 200);
    gateway.expect_in_flight(0).await;
}

#[tokio::test]
async fn a_suggestion_leaves_no_trace() {
    let models = json!([{ "model": "*", "policy": "round_robin" }]);
    let gateway = Gateway::start(relay(json!({ "models": models }))).await;
    let mut served = Vec::new();
    for index in 0..6 {
        let id = format!("r-{index}");
        assert_ne!(send(&gateway, &id, PREFILL).await.header(SUGGESTION), "");
        served.push(send(&gateway, &id, DECODE).await.text());
    }
    let first: usize = served[0].strip_prefix("decode-").unwrap().parse().unwrap();
    let turns = (0..6).map(|step| format!("decode-{}", (first + step) % 3));
    assert_eq!(served, turns.collect::<Vec<_>>());
}

#[tokio::test]
async fn what_is_neither_leg_is_served_as_ever() {
    let gateway = Gateway::start(relay(json!({}))).await;
    let alone = r#"{"prompt":"hi"}"#;
    assert_eq!(send(&gateway, "alone", alone).await.text(), "decode-0");
    assert_eq!(gateway.decode[0].only().text(), alone);
    let inside = r#"{"input":"x","kv_transfer_params":{}}"#;
    let reply = gateway.post("/v1/embeddings", inside).await;
    assert_eq!(
        (reply.status.as_u16(), reply.text().as_str()),
        (200, "default")
    );
    assert_eq!(gateway.post("/v1/completions", "rubbish").await.status, 400);
    let outcomes = [("routed(no_signature)", 1), ("bypassed", 1), ("refused", 1)];
    gateway.expect_outcomes(&outcomes).await;
}

const REFERENCE: &str = include_str!("../../../envoy/relay.yaml");

#[tokio::test]
async fn the_configuration_that_is_shipped_relays() {
    let gateway = reference::start_from(REFERENCE, str::to_owned).await;
    // The version digit of this id is where Envoy would write why the request is traced.
    let id = "01234567-89ab-4def-8123-456789abcdef";
    let mut connection = Connection::open(gateway.address).await;
    let prefill = connection.call(leg(id, PREFILL)).await;
    assert_eq!(prefill.header(SUGGESTION), "decode-1");
    assert_eq!(connection.call(leg(id, DECODE)).await.text(), "decode-1");
    let (prefill, decode) = (gateway.prefill.only(), gateway.decode[1].only());
    for received in [prefill, decode] {
        assert_eq!(received.headers["x-request-id"], id);
        let ours = received
            .headers
            .keys()
            .filter(|name| name.as_str().contains("eldr"));
        assert_eq!(ours.count(), 0, "{:?}", received.headers);
    }
    drop(gateway.envoy);
}
