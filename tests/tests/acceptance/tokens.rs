//! Load in KV tokens: a worker with one long prompt is busier than one with several short ones.

use eldr_tests::client::{next_piece, post};
use eldr_tests::upstream::Stream;
use eldr_tests::{
    Answer, Connection, Gateway, KV_TRANSFER_PARAMS, Options, blob, eventually, soon,
};
use hyper::body::Incoming;
use serde_json::{Value, json};

use crate::health::both_threads;

const WORKERS: usize = 2;
/// At most 16 tokens of output: what engines take where nothing is said.
const BODY: &str = r#"{"model":"m","prompt":"hi","stream":true}"#;
const CHAT: &str = r#"{"model":"m","messages":[],"stream":true}"#;
const LIMIT: u64 = 16;

fn filter(more: Value) -> Value {
    let mut filter = json!({
        "models": [{ "model": "*", "policy": "least_loaded", "load_unit": "kv_tokens" }],
        "load_refresh_ms": 0,
        // A thread that stands still for longer would have its counts forgotten.
        "load_lease_ms": 60_000,
    });
    for (key, value) in more.as_object().expect("an object") {
        filter[key] = value.clone();
    }
    filter
}

async fn gateway(more: Value, threads: usize) -> Gateway {
    let gateway = Gateway::start(Options {
        workers: WORKERS,
        threads,
        ..Options::filter(filter(more))
    })
    .await;
    for worker in &gateway.decode {
        worker.by_hand();
    }
    gateway
}

/// The signature of a prompt of region `region` with so many tokens.
fn signature(region: usize, tokens: u64) -> String {
    let signature = blob::signature_of(region, WORKERS);
    assert!(signature.contains(";n=7"), "{signature}");
    signature.replace(";n=7", &format!(";n={tokens}"))
}

/// A prefill answer whose signature says how long the prompt is; its `usage` says something else.
fn signed(region: usize, tokens: u64) -> Answer {
    Answer::prefill(KV_TRANSFER_PARAMS, Some(&signature(region, tokens)))
}

/// A prefill answer that says it in `usage` alone.
fn unsigned(tokens: u64) -> Answer {
    Answer::json(format!(
        r#"{{"usage":{{"prompt_tokens":{tokens}}},"kv_transfer_params":{KV_TRANSFER_PARAMS}}}"#
    ))
}

type Ask = hyper::Request<http_body_util::Full<bytes::Bytes>>;

/// A request whose answer has begun and does not end yet.
struct Held {
    worker: usize,
    stream: Stream,
    body: Incoming,
    _connection: Connection,
}

impl Held {
    async fn finish(mut self) {
        self.stream.finish();
        while next_piece(&mut self.body).await.is_some() {}
    }
}

async fn hold(gateway: &mut Gateway, mut connection: Connection, ask: Ask) -> Held {
    let decode = &mut gateway.decode;
    let [first, second] = &mut decode[..] else {
        panic!("two decode workers");
    };
    let (answer, (worker, stream)) = tokio::join!(connection.send(ask), async {
        let (worker, exchange) = tokio::select! {
            exchange = first.next() => (0, exchange),
            exchange = second.next() => (1, exchange),
        };
        (worker, exchange.stream(Answer::event_stream()))
    });
    assert_eq!(answer.status(), 200);
    Held {
        worker,
        stream,
        body: answer.into_body(),
        _connection: connection,
    }
}

/// Holds one request more, which prefill answers so.
async fn one_more(gateway: &mut Gateway, prefill: Answer) -> Held {
    gateway.prefill.answers(prefill);
    let connection = gateway.connect().await;
    hold(gateway, connection, post("/v1/completions", BODY)).await
}

async fn expect_tokens(gateway: &Gateway, expected: [u64; WORKERS]) {
    for (worker, tokens) in expected.into_iter().enumerate() {
        let gauge = format!("eldr.worker.decode-{worker}.kv_tokens");
        gateway.expect_stat(&gauge, tokens).await;
    }
}

/// All answers end, and nothing is left.
async fn finish(gateway: &Gateway, held: Vec<Held>) {
    for held in held {
        soon("an answer ends", held.finish()).await;
    }
    gateway.expect_in_flight(0).await;
    expect_tokens(gateway, [0, 0]).await;
    gateway.assert_no_trap();
}

#[tokio::test]
async fn a_long_prompt_steers_the_next_requests_away_though_request_counts_say_otherwise() {
    let mut gateway = gateway(json!({}), 1).await;
    let mut held = vec![one_more(&mut gateway, signed(0, 10_000)).await];
    // Then short ones, of which the other worker gets all. One says its length in the answer alone.
    held.push(one_more(&mut gateway, signed(0, 20)).await);
    held.push(one_more(&mut gateway, unsigned(30)).await);
    held.push(one_more(&mut gateway, signed(0, 40)).await);
    let at: Vec<usize> = held.iter().map(|held| held.worker).collect();
    assert_eq!(at, [0, 1, 1, 1]);
    expect_tokens(&gateway, [10_000 + LIMIT, 20 + 30 + 40 + 3 * LIMIT]).await;
    for (worker, requests) in [1, 3].into_iter().enumerate() {
        let gauge = format!("eldr.worker.decode-{worker}.in_flight");
        gateway.expect_stat(&gauge, requests).await;
    }
    // What ends takes off what it added, whatever the means have become.
    soon("an answer ends", held.remove(0).finish()).await;
    expect_tokens(&gateway, [0, 20 + 30 + 40 + 3 * LIMIT]).await;
    held.push(one_more(&mut gateway, signed(0, 50)).await);
    assert_eq!(held.last().map(|held| held.worker), Some(0));
    finish(&gateway, held).await;
}

#[tokio::test]
async fn the_load_cap_of_the_band_is_in_tokens_too() {
    let regions = [0, 1].map(|worker| vec![format!("decode-{worker}")]);
    let blob = blob::inline(&blob::one_expert_per_region(&regions));
    let model = json!({ "model": "*", "blob": { "inline": blob }, "load_unit": "kv_tokens" });
    let mut gateway = gateway(json!({ "models": [model] }), 1).await;
    let mut held = vec![one_more(&mut gateway, signed(0, 10_000)).await];
    // By requests the second worker would be above the cap from its second one on.
    for _ in 0..3 {
        held.push(one_more(&mut gateway, signed(1, 20)).await);
    }
    // By tokens the first is, for requests of its own region.
    held.push(one_more(&mut gateway, signed(0, 20)).await);
    let at: Vec<usize> = held.iter().map(|held| held.worker).collect();
    assert_eq!(at, [0, 1, 1, 1, 1]);
    finish(&gateway, held).await;
}

#[tokio::test]
async fn threads_see_each_others_tokens() {
    let mut gateway = gateway(json!({}), 2).await;
    let connections = both_threads(&gateway).await;
    let mut held = Vec::new();
    for (index, connection) in connections.into_iter().enumerate() {
        let tokens = if index == 0 { 10_000 } else { 20 };
        gateway.prefill.answers(signed(0, tokens));
        held.push(hold(&mut gateway, connection, post("/v1/completions", BODY)).await);
    }
    let at: Vec<usize> = held.iter().map(|held| held.worker).collect();
    assert_eq!(at[0], 0);
    assert!(at[1..].iter().all(|&worker| worker == 1), "{at:?}");
    finish(&gateway, held).await;
}

#[tokio::test]
async fn how_long_answers_get_is_learned_from_streams_that_end() {
    let mut gateway = gateway(json!({}), 1).await;
    gateway.prefill.answers(signed(0, 100));
    let chat = || post("/v1/chat/completions", CHAT);
    let connection = gateway.connect().await;
    let first = hold(&mut gateway, connection, chat()).await;
    // Nothing is known of this model's answers yet.
    expect_tokens(&gateway, [100 + 256, 0]).await;
    for _ in 0..40 {
        first.stream.send("data: {}\n\n").await;
    }
    first.stream.send("data: [DONE]\n\n").await;
    soon("the answer ends", first.finish()).await;
    expect_tokens(&gateway, [0, 0]).await;
    // One that breaks off says nothing.
    let connection = gateway.connect().await;
    let broken = hold(&mut gateway, connection, chat()).await;
    expect_tokens(&gateway, [100 + 40, 0]).await;
    broken.stream.send("data: {}\n\n").await;
    broken.stream.reset().await;
    expect_tokens(&gateway, [0, 0]).await;
    let mut held = Vec::new();
    for body in [
        CHAT.to_owned(),
        CHAT.replace('{', r#"{"n":3,"#),
        CHAT.replace('{', r#"{"max_completion_tokens":5,"#),
    ] {
        let connection = gateway.connect().await;
        let ask = post("/v1/chat/completions", body);
        held.push(hold(&mut gateway, connection, ask).await);
    }
    expect_tokens(&gateway, [100 + 40 + 100 + 5, 100 + 3 * 40]).await;
    finish(&gateway, held).await;
}

#[tokio::test]
async fn a_prompt_of_unknown_length_is_taken_for_the_mean_of_the_others() {
    let mut gateway = gateway(json!({ "prefill_retry": false }), 1).await;
    let mut held = vec![
        one_more(&mut gateway, signed(0, 100)).await,
        one_more(&mut gateway, signed(0, 300)).await,
    ];
    held.push(one_more(&mut gateway, Answer::status(500)).await);
    let at: Vec<usize> = held.iter().map(|held| held.worker).collect();
    assert_eq!(at, [0, 1, 0]);
    expect_tokens(&gateway, [100 + 200 + 2 * LIMIT, 300 + LIMIT]).await;
    finish(&gateway, held).await;
}

#[tokio::test]
async fn requests_of_other_gateways_count_as_many_tokens_as_ours_on_average() {
    let reports = json!({
        "load_report_interval_ms": 200,
        "load_report_stale_ms": 600_000,
        "log_decisions_per_mille": 1_000,
    });
    let mut gateway = gateway(reports, 1).await;
    let report = |count: u64| {
        let text = format!("vllm:num_requests_running {count}\n");
        Answer::status(200).body(text)
    };
    gateway.decode[0].answers_aside("/metrics", report(2));
    gateway.decode[1].answers_aside("/metrics", report(0));
    let elsewhere = "eldr.worker.decode-0.elsewhere";
    gateway.expect_stat(elsewhere, 2).await;
    let first = one_more(&mut gateway, signed(0, 1_000 - LIMIT)).await;
    let second = one_more(&mut gateway, signed(0, 1_000 - LIMIT)).await;
    let third = one_more(&mut gateway, signed(0, 10)).await;
    // Two at a thousand each are as much as what is there.
    let at = [first.worker, second.worker, third.worker];
    assert_eq!(at, [1, 1, 0]);
    let log = async || gateway.envoy.log_tail(usize::MAX);
    for loads in [
        "loads=decode-0:1536,decode-1:0",
        "loads=decode-0:2000,decode-1:1000",
        "loads=decode-0:2000,decode-1:2000",
    ] {
        eventually(loads, log, |log| log.contains(loads)).await;
    }
    finish(&gateway, vec![first, second, third]).await;
}

/// A leg of the request `id` of a coordinator.
fn leg(id: &str, wants: &str) -> Ask {
    let body =
        format!(r#"{{"prompt":"hi","stream":true,"kv_transfer_params":{{"{wants}":true}}}}"#);
    let mut request = post("/v1/completions", body);
    let id = id.parse().expect("a header value");
    request.headers_mut().insert("x-request-id", id);
    request
}

/// Both legs of a request: the second one's answer does not end yet.
async fn relayed(gateway: &mut Gateway, id: &str, prefill: Answer) -> Held {
    gateway.prefill.answers(prefill);
    let prefill = leg(id, "do_remote_decode");
    assert_eq!(gateway.connect().await.call(prefill).await.status, 200);
    let connection = gateway.connect().await;
    hold(gateway, connection, leg(id, "do_remote_prefill")).await
}

#[tokio::test]
async fn in_relay_mode_the_length_of_a_prompt_is_kept_between_its_legs() {
    let regions = [0, 1].map(|worker| vec![format!("decode-{worker}")]);
    let blob = blob::inline(&blob::one_expert_per_region(&regions));
    // With centroids and without, for which there is nothing else to keep.
    for blob in [Some(json!({ "inline": blob })), None] {
        let model = json!({
            "model": "*", "blob": blob, "policy": "least_loaded", "load_unit": "kv_tokens"
        });
        let relay = json!({ "mode": "relay", "models": [model], "relay_body_signature": true });
        let mut gateway = gateway(relay, 2).await;
        let mut held = vec![relayed(&mut gateway, "long", signed(0, 10_000)).await];
        held.push(relayed(&mut gateway, "short", signed(0, 20)).await);
        held.push(relayed(&mut gateway, "usage", unsigned(30)).await);
        // One that carries its signature itself.
        let mut own = leg("own", "do_remote_prefill");
        let carried = signature(0, 40).parse().expect("a header value");
        own.headers_mut().insert("x-eldr-signature", carried);
        let connection = gateway.connect().await;
        held.push(hold(&mut gateway, connection, own).await);
        let at: Vec<usize> = held.iter().map(|held| held.worker).collect();
        assert_eq!(at, [0, 1, 1, 1]);
        expect_tokens(&gateway, [10_000 + LIMIT, 20 + 30 + 40 + 3 * LIMIT]).await;
        gateway.expect_stat("eldr.relay_found", 3).await;
        finish(&gateway, held).await;
    }
}

#[tokio::test]
async fn by_endpoint_the_tokens_count_where_the_request_is_served() {
    let idle = eldr_tests::Upstream::start(Answer::status(500)).await;
    let mut served = eldr_tests::Upstream::start(Answer::status(500)).await;
    let (named, known) = (idle.address, served.address);
    let gateway = Gateway::start(Options {
        pool: vec![known],
        ..Options::filter(filter(json!({
            "destination": "endpoint",
            "decode_clusters": ["pool"],
            "decode_endpoints": [named.to_string(), known.to_string()],
            "eject_ms": 0,
        })))
    })
    .await;
    gateway.prefill.answers(signed(0, 500));
    served.by_hand();
    let mut connection = gateway.connect().await;
    let (answer, stream) = served
        .streams_to(connection.send(post("/v1/completions", BODY)))
        .await;
    let gauge = |address| format!("eldr.worker.{address}.kv_tokens");
    gateway.expect_stat(&gauge(known), 500 + LIMIT).await;
    gateway.expect_stat(&gauge(named), 0).await;
    stream.finish();
    drop((connection, answer));
    gateway.expect_stat(&gauge(known), 0).await;
    gateway.expect_stat("eldr.endpoint_fallback", 1).await;
}

#[tokio::test]
async fn nobody_counts_tokens_by_default() {
    let gateway = Gateway::start(Options::default()).await;
    gateway.post("/v1/completions", BODY).await;
    let gauge = "eldr.worker.decode-0.in_flight";
    let ticked = async || gateway.filter_stats().await;
    let stats = eventually("a tick", ticked, |stats| stats.contains_key(gauge)).await;
    assert!(!stats.keys().any(|name| name.ends_with(".kv_tokens")));
}
