//! A decode worker that does not answer is left out for a while; weights and drains are respected.

use eldr_tests::client::post;
use eldr_tests::{Answer, Connection, Gateway, Options, Upstream, eventually};
use serde_json::{Value, json};

const BODY: &str = r#"{"model":"m","prompt":"hi"}"#;

/// Long enough for a test that must not see a worker come back.
const LONG: u64 = 600_000;

fn eject(eject_ms: u64) -> Value {
    json!({ "eject_ms": eject_ms, "eject_max_ms": 600_000, "load_refresh_ms": 0 })
}

/// Closes a worker's port; returns where it was.
fn kill(gateway: &mut Gateway, worker: usize) -> std::net::SocketAddr {
    let address = gateway.decode[worker].address;
    drop(gateway.decode.remove(worker));
    address
}

async fn ejections(gateway: &Gateway, worker: &str) -> u64 {
    let stats = gateway.filter_stats().await;
    let name = format!("eldr.worker.{worker}.ejections");
    stats.get(&name).copied().unwrap_or_default()
}

#[tokio::test]
async fn a_dead_worker_fails_one_request_and_the_next_best_region_serves_on() {
    let mut gateway = Gateway::start(Options::filter(eject(LONG))).await;
    gateway.prefill_says(Some(1));
    assert_eq!(
        gateway.post("/v1/completions", BODY).await.text(),
        "decode-1"
    );
    kill(&mut gateway, 1);
    let failed = gateway.post("/v1/completions", BODY).await;
    assert_eq!(failed.status, 503, "{}", failed.text());
    for _ in 0..5 {
        let reply = gateway.post("/v1/completions", BODY).await;
        assert_eq!(reply.status, 200);
        let decision = reply.header("x-eldr-decision");
        assert!(decision.contains(";reason=in_band;"), "{decision}");
    }
    assert_eq!(ejections(&gateway, "decode-1").await, 1);
    let log = gateway.envoy.log_tail(usize::MAX);
    assert!(log.contains("decode-1 does not answer"), "{log}");
    gateway.expect_outcomes(&[("routed(in_band)", 7)]).await;
}

#[tokio::test]
async fn it_comes_back_by_one_trial() {
    let mut gateway = Gateway::start(Options::filter(eject(200))).await;
    gateway.prefill_says(Some(1));
    let address = kill(&mut gateway, 1);
    assert_eq!(gateway.post("/v1/completions", BODY).await.status, 503);
    let mut revived = Upstream::start_at(address, Answer::json("decode-1")).await;
    revived.by_hand();

    let (trial, exchange) = loop {
        let mut connection = gateway.connect().await;
        let mut call =
            Box::pin(async move { connection.call(post("/v1/completions", BODY)).await });
        tokio::select! {
            reply = &mut call => assert_eq!(reply.status, 200),
            exchange = revived.next() => break (call, exchange),
        }
    };
    for _ in 0..10 {
        let other = gateway.post("/v1/completions", BODY).await.text();
        assert_ne!(other, "decode-1");
    }
    assert_eq!(revived.received().len(), 1, "one trial");
    exchange.answer(Answer::json("back"));
    assert_eq!(trial.await.text(), "back");

    revived.answers(Answer::json("decode-1"));
    for _ in 0..5 {
        assert_eq!(
            gateway.post("/v1/completions", BODY).await.text(),
            "decode-1"
        );
    }
    assert_eq!(ejections(&gateway, "decode-1").await, 1);
    gateway.assert_no_trap();
}

#[tokio::test]
async fn each_failed_trial_counts_and_a_trial_whose_client_leaves_is_given_back() {
    let mut gateway = Gateway::start(Options::filter(eject(50))).await;
    gateway.prefill_says(Some(1));
    let address = kill(&mut gateway, 1);
    let failed_trials = async || {
        gateway.post("/v1/completions", BODY).await;
        ejections(&gateway, "decode-1").await
    };
    eventually("a failed trial", failed_trials, |count| *count >= 2).await;

    let mut revived = Upstream::start_at(address, Answer::json("decode-1")).await;
    revived.by_hand();
    let first = loop {
        let mut connection = gateway.connect().await;
        let mut call = Box::pin(connection.call(post("/v1/completions", BODY)));
        tokio::select! {
            reply = &mut call => assert!(reply.text() != "decode-1"),
            exchange = revived.next() => break exchange,
        }
    };
    // The loop dropped the client's connection, so the trial says nothing, and the next may come at once.
    drop(first);
    revived.answers(Answer::json("decode-1"));
    let next = async || gateway.post("/v1/completions", BODY).await.text();
    eventually("another trial", next, |text| text == "decode-1").await;
}

#[tokio::test]
async fn a_worker_that_answers_503_itself_is_not_left_out() {
    let gateway = Gateway::start(Options::filter(eject(LONG))).await;
    gateway.prefill_says(Some(1));
    gateway.decode[1].answers(Answer::status(503).body("loading"));
    for _ in 0..3 {
        let reply = gateway.post("/v1/completions", BODY).await;
        assert_eq!(
            (reply.status.as_u16(), reply.text().as_str()),
            (503, "loading")
        );
    }
    assert_eq!(ejections(&gateway, "decode-1").await, 0);
}

#[tokio::test]
async fn a_cluster_that_envoy_does_not_have_is_left_out() {
    let mut filter = eject(LONG);
    filter["models"] = json!([{ "model": "*", "policy": "round_robin" }]);
    filter["decode_clusters"] = json!(["decode-0", "nowhere"]);
    let gateway = Gateway::start(Options::filter(filter)).await;
    let mut failed = 0;
    for _ in 0..6 {
        let reply = gateway.post("/v1/completions", BODY).await;
        failed += u64::from(reply.status == 503);
    }
    assert_eq!((failed, ejections(&gateway, "nowhere").await), (1, 1));
}

#[tokio::test]
async fn with_all_out_requests_still_go_to_the_least_loaded_and_an_answer_brings_it_back() {
    let mut gateway = Gateway::start(Options::filter(eject(LONG))).await;
    let address = kill(&mut gateway, 0);
    gateway.decode.clear();
    for _ in 0..3 {
        assert_eq!(gateway.post("/v1/completions", BODY).await.status, 503);
    }
    let reply = gateway.post("/v1/completions", BODY).await;
    assert_eq!(
        (
            reply.status.as_u16(),
            reply.header("x-eldr-decision").as_str()
        ),
        (503, "decode-0;reason=all_ejected")
    );
    let _revived = Upstream::start_at(address, Answer::json("back")).await;
    for reason in ["all_ejected", "in_band"] {
        let reply = gateway.post("/v1/completions", BODY).await;
        assert_eq!(reply.text(), "back");
        let decision = reply.header("x-eldr-decision");
        assert!(decision.contains(reason), "{decision}");
    }
}

#[tokio::test]
async fn all_threads_know() {
    let mut gateway = Gateway::start(Options {
        threads: 2,
        ..Options::filter(eject(LONG))
    })
    .await;
    gateway.prefill_says(Some(1));
    kill(&mut gateway, 1);
    let mut connections = both_threads(&gateway).await;
    let mut failed = 0;
    for connection in &mut connections {
        let reply = connection.call(post("/v1/completions", BODY)).await;
        failed += u64::from(reply.status == 503);
    }
    assert_eq!((failed, ejections(&gateway, "decode-1").await), (1, 1));
}

/// Connections on both worker threads, at least two each: the kernel spreads them.
pub(crate) async fn both_threads(gateway: &Gateway) -> Vec<Connection> {
    let mut connections = Vec::new();
    let opened = async || {
        connections.push(gateway.connect().await);
        let stats = gateway.envoy.stats(r"worker_[01]\.downstream_cx_active$");
        let listener = stats.await.unwrap().values.into_iter();
        let listener = listener.filter(|(name, _)| !name.contains("admin"));
        listener.map(|(_, count)| count).collect::<Vec<_>>()
    };
    eventually("each thread has two connections", opened, |active| {
        active.len() == 2 && active.iter().all(|&count| count >= 2)
    })
    .await;
    connections
}

#[tokio::test]
async fn a_draining_worker_finishes_what_it_has_and_gets_nothing_new() {
    let mut gateway = Gateway::start(Options {
        lds: true,
        ..Options::default()
    })
    .await;
    gateway.prefill_says(Some(1));
    gateway.decode[1].by_hand();
    let mut connection = gateway.connect().await;
    let (answer, stream) = gateway.decode[1]
        .streams_to(connection.send(post("/v1/completions", BODY)))
        .await;

    let drained = json!(["decode-0", { "name": "decode-1", "drain": true }, "decode-2"]);
    gateway.update(json!({ "decode_clusters": drained }), 2);
    gateway.decode[1].answers(Answer::json("decode-1"));
    let next = async || gateway.post("/v1/completions", BODY).await.text();
    eventually("the update serves", next, |text| text != "decode-1").await;
    let before = gateway.decode[1].received().len();
    for _ in 0..10 {
        assert_eq!(gateway.post("/v1/completions", BODY).await.status, 200);
    }
    assert_eq!(gateway.decode[1].received().len(), before);

    let mut body = answer.into_body();
    stream.send("still here").await;
    let piece = eldr_tests::client::next_piece(&mut body).await;
    assert_eq!(piece.as_deref(), Some(&b"still here"[..]));
    stream.finish();
    assert_eq!(eldr_tests::client::next_piece(&mut body).await, None);
}

#[tokio::test]
async fn a_worker_of_twice_the_weight_takes_twice_the_requests() {
    let mut gateway = Gateway::start(Options {
        workers: 2,
        ..Options::filter(json!({
            "models": [{ "model": "*", "policy": "least_loaded" }],
            "decode_clusters": [{ "name": "decode-0", "weight": 2 }, "decode-1"],
        }))
    })
    .await;
    gateway.decode.iter().for_each(Upstream::by_hand);
    let mut held = Vec::new();
    for worker in [0, 1, 0, 0, 1, 0] {
        let mut connection = gateway.connect().await;
        let (answer, stream) = gateway.decode[worker]
            .streams_to(connection.send(post("/v1/completions", BODY)))
            .await;
        held.push((connection, answer, stream));
    }
}
