//! KV blocks that no decode worker will fetch are released, once, the way the engine understands; others are not.

use eldr_tests::client::{get, post};
use eldr_tests::upstream::{Exchange, Received};
use eldr_tests::{Answer, Connection, Gateway, KV_TRANSFER_PARAMS, Options, eventually};
use serde_json::{Value, json};

const BODY: &str =
    r#"{"model":"m","prompt":"hi","max_tokens":64,"stream":true,"seed":123456789012345678901}"#;
/// With the artifact's signature, which is nobody's business.
const SIGNED: &str = r#"{"remote_block_ids":[[7]],"eldr_sig":"AAAHAAAA","x":1.50}"#;
const UNSIGNED: &str = r#"{"remote_block_ids":[[7]],"x":1.50}"#;

async fn gateway(release: &str) -> Gateway {
    // Nobody is left out, so that each request goes where the test expects it, whatever became of the one before.
    Gateway::start(Options::filter(
        json!({ "release": release, "eject_ms": 0 }),
    ))
    .await
}

/// A request whose client leaves while prefill works on it.
async fn abandoned(gateway: &mut Gateway) -> Exchange {
    gateway.prefill.by_hand();
    let (connection, exchange) = prefilling(gateway).await;
    drop(connection);
    exchange
}

async fn prefilling(gateway: &mut Gateway) -> (Connection, Exchange) {
    let mut connection = gateway.connect().await;
    let mut request = post("/v1/completions?x=1", BODY);
    request
        .headers_mut()
        .insert("authorization", "Bearer t".parse().unwrap());
    let exchange = tokio::select! {
        _ = connection.send(request) => panic!("answered before prefill was"),
        exchange = gateway.prefill.next() => exchange,
    };
    (connection, exchange)
}

/// A client leaves, then prefill answers.
async fn late_answer(gateway: &mut Gateway, answer: Answer) -> Received {
    let exchange = abandoned(gateway).await;
    gateway.expect_stat("eldr.outcome.client_gone", 1).await;
    let leg = exchange.request.clone();
    exchange.answer(answer);
    gateway.expect_stat("eldr.late_prefill", 1).await;
    leg
}

fn received(gateway: &Gateway) -> Vec<Received> {
    let workers = gateway.decode.iter();
    workers.flat_map(|worker| worker.received()).collect()
}

/// The one request that decode workers get.
async fn only_request(gateway: &Gateway) -> Received {
    let all = async || received(gateway);
    let mut all = eventually("a release", all, |all| all.len() == 1).await;
    all.remove(0)
}

/// So many were sent, failed and were not sent; and nothing is left in flight.
async fn expect_counts(gateway: &Gateway, sent: u64, failed: u64, dropped: u64) {
    gateway.expect_in_flight(0).await;
    gateway.expect_stat("eldr.release_sent", sent).await;
    gateway.expect_stat("eldr.release_failed", failed).await;
    gateway.expect_stat("eldr.release_dropped", dropped).await;
    gateway.assert_no_trap();
}

#[tokio::test]
async fn a_late_answer_in_the_way_of_stock_vllm() {
    let mut gateway = gateway("decode").await;
    let leg = late_answer(&mut gateway, Answer::prefill(SIGNED, None)).await;
    let release = only_request(&gateway).await;
    assert_eq!(
        release.text(),
        format!(
            r#"{{"model":"m","prompt":"hi","max_tokens":1,"stream":false,"seed":123456789012345678901,"kv_transfer_params":{UNSIGNED}}}"#
        )
    );
    assert_eq!(release.path, "/v1/completions?x=1");
    for same in ["x-request-id", "authorization"] {
        assert_eq!(release.headers[same], leg.headers[same]);
    }
    expect_counts(&gateway, 1, 0, 0).await;
}

#[tokio::test]
async fn a_late_answer_in_the_way_of_the_official_fork() {
    let mut gateway = gateway("eldr").await;
    late_answer(&mut gateway, Answer::prefill(SIGNED, None)).await;
    let release = only_request(&gateway).await;
    assert_eq!(
        release.text(),
        format!(r#"{{"kv_transfer_params":{UNSIGNED}}}"#)
    );
    assert_eq!(
        (release.method.as_str(), release.path.as_str()),
        ("POST", "/v1/kv_transfer/release")
    );
    expect_counts(&gateway, 1, 0, 0).await;
}

#[tokio::test]
async fn nothing_is_sent_where_that_is_configured() {
    let mut gateway = gateway("none").await;
    late_answer(&mut gateway, Answer::prefill(SIGNED, None)).await;
    expect_counts(&gateway, 0, 0, 0).await;
    assert!(received(&gateway).is_empty());
}

#[tokio::test]
async fn a_late_answer_without_blocks_has_nothing_to_release() {
    let answers = [
        Answer::prefill("null", None),
        Answer::status(500).body(r#"{"kv_transfer_params":{"x":1}}"#),
        Answer::status(503),
        Answer::json("{"),
    ];
    for answer in answers {
        let mut gateway = gateway("decode").await;
        late_answer(&mut gateway, answer).await;
        expect_counts(&gateway, 0, 0, 0).await;
        assert!(received(&gateway).is_empty());
        assert_eq!(gateway.prefill.received().len(), 1, "no retry for nobody");
    }
}

#[tokio::test]
async fn a_release_that_fails_is_counted_and_not_repeated() {
    let mut gateway = gateway("decode").await;
    for worker in &gateway.decode {
        worker.answers(Answer::status(500));
    }
    late_answer(&mut gateway, Answer::prefill(SIGNED, None)).await;
    only_request(&gateway).await;
    expect_counts(&gateway, 1, 1, 0).await;
    only_request(&gateway).await;
}

#[tokio::test]
async fn in_the_way_of_the_official_fork_it_is_sent_once_more_by_another_worker() {
    for (good, failed) in [(1, 1), (0, 2)] {
        let mut gateway = gateway("eldr").await;
        // By load the first is asked, then the second.
        let second = if good == 1 { 200 } else { 500 };
        for (worker, status) in gateway.decode.iter().zip([500, second, 200]) {
            worker.answers(Answer::status(status));
        }
        late_answer(&mut gateway, Answer::prefill(SIGNED, None)).await;
        expect_counts(&gateway, 2, failed, 0).await;
        assert_eq!(received(&gateway).len(), 2);
    }
}

/// The root that waits for the answer belongs to a listener that is gone by then.
#[tokio::test]
async fn a_late_answer_to_a_configuration_that_was_replaced() {
    let options = Options {
        lds: true,
        drain_time_s: 1,
        ..Options::filter(json!({ "release": "eldr" }))
    };
    let mut gateway = Gateway::start(options).await;
    let exchange = abandoned(&mut gateway).await;
    gateway.expect_stat("eldr.outcome.client_gone", 1).await;
    gateway
        .expect_stat("eldr.worker.prefill.in_flight", 1)
        .await;
    gateway.update(json!({ "release": "eldr", "debug_headers": false }), 2);
    for (stat, expected) in [
        ("listener_manager.listener_in_place_updated", 1),
        ("listener_manager.total_filter_chains_draining", 0),
    ] {
        let value = async || gateway.envoy.stat(stat).await.unwrap();
        eventually(stat, value, |found| *found == expected).await;
    }
    // The new configuration serves, on the same threads.
    let reply = gateway.connect().await.call(get("/")).await;
    assert_eq!(reply.text(), "default");
    exchange.answer(Answer::prefill(SIGNED, None));
    let release = only_request(&gateway).await;
    assert_eq!(release.path, "/v1/kv_transfer/release");
    expect_counts(&gateway, 1, 0, 0).await;
    gateway
        .expect_stat("eldr.worker.prefill.in_flight", 0)
        .await;
}

#[tokio::test]
async fn releases_are_bounded() {
    let mut gateway = gateway("eldr").await;
    for worker in &gateway.decode {
        worker.by_hand();
    }
    gateway.prefill.by_hand();
    let mut legs = Vec::new();
    for _ in 0..66 {
        legs.push(abandoned(&mut gateway).await);
    }
    gateway.expect_stat("eldr.outcome.client_gone", 66).await;
    for leg in legs {
        leg.answer(Answer::prefill(SIGNED, None));
    }
    gateway.expect_stat("eldr.late_prefill", 66).await;
    // Under way they are load like any other.
    gateway.expect_in_flight(64).await;
    for worker in &mut gateway.decode {
        // Spread evenly: 64 over three workers.
        for _ in 0..21 {
            worker.next().await.answer(Answer::json("{}"));
        }
    }
    gateway.expect_in_flight(1).await;
    for worker in &gateway.decode {
        worker.close();
    }
    // It is tried once more, in vain.
    expect_counts(&gateway, 65, 2, 2).await;
}

#[tokio::test]
async fn a_decode_leg_that_never_reached_a_worker() {
    for release in ["decode", "eldr"] {
        let gateway = gateway(release).await;
        gateway.decode[0].close();
        let reply = gateway.post("/v1/completions", BODY).await;
        assert_eq!(reply.status, 503);
        let release = only_request(&gateway).await;
        let expected: Value = serde_json::from_str(KV_TRANSFER_PARAMS).unwrap();
        assert_eq!(release.json()["kv_transfer_params"], expected);
        expect_counts(&gateway, 1, 0, 0).await;
        gateway.expect_outcomes(&[("routed(in_band)", 1)]).await;
        only_request(&gateway).await;
    }
}

#[tokio::test]
async fn a_decode_leg_for_a_cluster_that_does_not_exist() {
    let filter = json!({
        "models": [{ "model": "*", "policy": "round_robin" }],
        "decode_clusters": ["nowhere", "decode-1"],
    });
    let gateway = Gateway::start(Options::filter(filter)).await;
    let mut served = 0;
    for _ in 0..2 {
        served += u64::from(gateway.post("/v1/completions", BODY).await.status == 200);
    }
    assert_eq!(served, 1);
    expect_counts(&gateway, 1, 0, 0).await;
    // A release counts as sent when it leaves, not when it arrives.
    let received = async || gateway.decode[1].received();
    eventually("one request, one release", received, |all| all.len() == 2).await;
}

#[tokio::test]
async fn never_what_a_worker_has_got() {
    let mut gateway = gateway("decode").await;
    // It answers well, and with an error.
    assert_eq!(gateway.post("/v1/completions", BODY).await.status, 200);
    gateway.decode[0].answers(Answer::status(503));
    assert_eq!(gateway.post("/v1/completions", BODY).await.status, 503);
    gateway.decode[0].by_hand();
    // The client leaves before it answers.
    let mut connection = gateway.connect().await;
    let mut held = tokio::select! {
        _ = connection.send(post("/v1/completions", BODY)) => panic!("nobody answered"),
        held = gateway.decode[0].next() => held,
    };
    drop(connection);
    held.abandoned().await;
    // The reset is the last one, for it takes the worker out of the choice.
    let mut connection = gateway.connect().await;
    let (reply, ()) = tokio::join!(connection.call(post("/v1/completions", BODY)), async {
        drop(gateway.decode[0].next().await);
    });
    assert_eq!(reply.status, 503);
    gateway.expect_outcomes(&[("routed(in_band)", 4)]).await;
    expect_counts(&gateway, 0, 0, 0).await;
    assert_eq!(received(&gateway).len(), 4);
}

#[tokio::test]
async fn what_a_worker_may_never_have_read_is_released_in_the_way_of_the_official_fork() {
    let mut gateway = gateway("eldr").await;
    assert_eq!(gateway.post("/v1/completions", BODY).await.status, 200);
    expect_counts(&gateway, 0, 0, 0).await;
    gateway.decode[0].by_hand();
    let mut connection = gateway.connect().await;
    let mut held = tokio::select! {
        _ = connection.send(post("/v1/completions", BODY)) => panic!("nobody answered"),
        held = gateway.decode[0].next() => held,
    };
    gateway.decode[0].answers(Answer::status(200));
    drop(connection);
    held.abandoned().await;
    expect_counts(&gateway, 1, 0, 0).await;
    let released = received(&gateway)
        .into_iter()
        .filter(|request| request.path == "/v1/kv_transfer/release");
    assert_eq!(released.count(), 1);
}

#[tokio::test]
async fn nothing_to_release_without_blocks() {
    let gateway = gateway("decode").await;
    gateway.prefill.answers(Answer::prefill("null", None));
    for worker in &gateway.decode {
        worker.close();
    }
    assert_eq!(gateway.post("/v1/completions", BODY).await.status, 503);
    expect_counts(&gateway, 0, 0, 0).await;
}
