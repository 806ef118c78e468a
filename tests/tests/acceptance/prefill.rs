//! The prefill leg: where it goes, how it fails, and that it is sent once more, elsewhere, and no third time.

use std::time::{Duration, Instant};

use eldr_tests::client::post;
use eldr_tests::{Answer, Gateway, KV_TRANSFER_PARAMS, Options, Upstream, eventually};
use serde_json::{Value, json};

const BODY: &str = r#"{"model":"m","prompt":"hi"}"#;

async fn gateway(prefills: usize, filter: Value) -> Gateway {
    let options = Options {
        prefills,
        ..Options::filter(filter)
    };
    Gateway::start(options).await
}

fn good() -> Answer {
    Answer::prefill(KV_TRANSFER_PARAMS, None)
}

/// Requests that all prefill workers have received.
fn legs(gateway: &Gateway) -> usize {
    let others = gateway.other_prefills.iter();
    let all = others.map(|worker| worker.received().len());
    all.sum::<usize>() + gateway.prefill.received().len()
}

/// The leg reaches one of two workers, which does `fail`; the other one serves it.
async fn assert_sent_once_more(what: &str, fail: impl AsyncFn(&mut Upstream)) {
    let mut gateway = gateway(2, json!({ "prefill_policy": "prefix_hash" })).await;
    // The same prompt always goes to the same worker.
    assert_eq!(gateway.post("/v1/completions", BODY).await.status, 200);
    if gateway.prefill.received().is_empty() {
        std::mem::swap(&mut gateway.prefill, &mut gateway.other_prefills[0]);
    }
    gateway.prefill.by_hand();
    let mut connection = gateway.connect().await;
    let (reply, ()) = tokio::join!(
        connection.call(post("/v1/completions", BODY)),
        fail(&mut gateway.prefill)
    );
    assert_eq!(
        (reply.status.as_u16(), reply.text().as_str()),
        (200, "decode-0"),
        "{what}"
    );
    let (first, second) = (gateway.prefill.received(), gateway.other_prefills[0].only());
    if let Some(first) = first.get(1) {
        assert_eq!(first.body, second.body, "{what}");
        assert_eq!(
            first.headers["x-request-id"],
            second.headers["x-request-id"]
        );
    }
    gateway.expect_stat("eldr.prefill_retry", 1).await;
    gateway.expect_in_flight(0).await;
    gateway.expect_outcomes(&[("routed(in_band)", 2)]).await;
}

#[tokio::test]
async fn a_worker_that_refuses() {
    assert_sent_once_more("refuses", async |worker| worker.close()).await;
}

#[tokio::test]
async fn a_worker_that_resets() {
    assert_sent_once_more("resets", async |worker| drop(worker.next().await)).await;
}

#[tokio::test]
async fn a_worker_that_breaks_off_in_its_answer() {
    assert_sent_once_more("breaks off", async |worker| {
        let stream = worker.next().await.stream(good());
        stream.send("{\"kv_tran").await;
        stream.reset().await;
    })
    .await;
}

#[tokio::test]
async fn a_worker_that_is_unavailable() {
    for status in [502, 503, 504] {
        assert_sent_once_more(&status.to_string(), async |worker| {
            worker
                .next()
                .await
                .answer(Answer::status(status).body("no"));
        })
        .await;
    }
}

#[tokio::test]
async fn a_leg_is_sent_twice_at_most() {
    let gateway = gateway(3, json!({ "on_prefill_failure": "error" })).await;
    for worker in std::iter::once(&gateway.prefill).chain(&gateway.other_prefills) {
        worker.answers(Answer::status(503));
    }
    let reply = gateway.post("/v1/completions", BODY).await;
    assert_eq!(reply.status, 502);
    assert_eq!(legs(&gateway), 2);
    gateway.expect_in_flight(0).await;
    gateway.expect_outcomes(&[("prefill_failed", 1)]).await;
}

#[tokio::test]
async fn two_workers_that_refuse_leave_it_to_decode_alone() {
    let gateway = gateway(2, json!({})).await;
    gateway.prefill.close();
    gateway.other_prefills[0].close();
    let reply = gateway.post("/v1/completions", BODY).await;
    assert_eq!(reply.text(), "decode-0");
    assert_eq!(gateway.decode[0].only().text(), BODY);
    gateway.expect_stat("eldr.prefill_retry", 1).await;
    gateway.expect_in_flight(0).await;
    gateway.expect_outcomes(&[("prefill_failed", 1)]).await;
}

#[tokio::test]
async fn clusters_that_do_not_exist_are_tried_like_others() {
    for (clusters, outcome) in [
        (json!(["nowhere", "prefill"]), "routed(in_band)"),
        (json!(["prefill", "nowhere"]), "routed(in_band)"),
        (json!(["nowhere", "neither"]), "prefill_failed"),
    ] {
        let gateway = gateway(1, json!({ "prefill_clusters": clusters })).await;
        for _ in 0..2 {
            let reply = gateway.post("/v1/completions", BODY).await;
            assert_eq!(reply.text(), "decode-0", "{clusters}");
        }
        gateway.expect_in_flight(0).await;
        gateway.expect_outcomes(&[(outcome, 2)]).await;
    }
}

#[tokio::test]
async fn what_another_worker_would_answer_the_same_is_not_sent_again() {
    let gateway = gateway(2, json!({})).await;
    let failures = [
        (Answer::status(500), 200),
        (Answer::status(200), 200),
        (Answer::json("{\"kv_tran"), 200),
        (Answer::status(429), 429),
    ];
    for (sent, (failure, status)) in (1..).zip(failures) {
        for worker in std::iter::once(&gateway.prefill).chain(&gateway.other_prefills) {
            worker.answers(failure.clone());
        }
        let reply = gateway.post("/v1/completions", BODY).await;
        assert_eq!(
            (reply.status.as_u16(), legs(&gateway)),
            (status, sent),
            "{failure:?}"
        );
    }
    gateway
        .expect_outcomes(&[("prefill_failed", 3), ("prefill_rejected", 1)])
        .await;
}

#[tokio::test]
async fn without_retry_the_first_failure_is_final() {
    let gateway = gateway(2, json!({ "prefill_retry": false })).await;
    gateway.prefill.answers(Answer::status(503));
    gateway.other_prefills[0].answers(Answer::status(503));
    assert_eq!(
        gateway.post("/v1/completions", BODY).await.text(),
        "decode-0"
    );
    assert_eq!(legs(&gateway), 1);
    gateway.expect_outcomes(&[("prefill_failed", 1)]).await;
}

#[tokio::test]
async fn a_worker_that_hangs_to_the_deadline_has_used_up_the_time_for_both() {
    let filter = json!({ "prefill_timeout_ms": 100, "on_prefill_failure": "error" });
    let gateway = gateway(2, filter).await;
    gateway.prefill.by_hand();
    gateway.other_prefills[0].by_hand();
    let reply = gateway.post("/v1/completions", BODY).await;
    assert_eq!(reply.status, 504);
    assert_eq!(legs(&gateway), 1);
    gateway.expect_in_flight(0).await;
    gateway.expect_outcomes(&[("prefill_failed", 1)]).await;
}

#[tokio::test]
async fn a_retry_has_only_the_time_that_is_left() {
    let filter = json!({ "prefill_timeout_ms": 20_000 });
    let mut gateway = gateway(2, filter).await;
    gateway.prefill.by_hand();
    gateway.other_prefills[0].by_hand();
    let timeout_of = |leg: &eldr_tests::upstream::Exchange| {
        let value = &leg.request.headers["x-envoy-expected-rq-timeout-ms"];
        value.to_str().unwrap().parse::<u64>().unwrap()
    };
    let mut connection = gateway.connect().await;
    let client = connection.call(post("/v1/completions", BODY));
    let prefill = async {
        // The first turn is the second cluster's.
        let first = gateway.other_prefills[0].next().await;
        let start = Instant::now();
        let elapsed = async || start.elapsed();
        eventually("time passes", elapsed, |t| *t > Duration::from_millis(50)).await;
        let first_has = timeout_of(&first);
        first.answer(Answer::status(503));
        let second = gateway.prefill.next().await;
        let second_has = timeout_of(&second);
        second.answer(good());
        (first_has, second_has)
    };
    let (reply, (first_has, second_has)) = tokio::join!(client, prefill);
    assert_eq!(reply.status, 200);
    assert!(first_has <= 20_000, "{first_has}");
    assert!(
        second_has + 50 <= first_has,
        "{first_has}, then {second_has}"
    );
}

#[tokio::test]
async fn legs_in_flight_are_counted_until_they_are_answered() {
    let mut gateway = gateway(1, json!({})).await;
    gateway.prefill.by_hand();
    let mut connection = gateway.connect().await;
    let client = connection.call(post("/v1/completions", BODY));
    let prefill = async {
        let leg = gateway.prefill.next().await;
        gateway
            .expect_stat("eldr.worker.prefill.in_flight", 1)
            .await;
        leg.answer(good());
    };
    let (reply, ()) = tokio::join!(client, prefill);
    assert_eq!(reply.status, 200);
    gateway
        .expect_stat("eldr.worker.prefill.in_flight", 0)
        .await;
}

#[tokio::test]
async fn least_loaded_goes_where_fewer_legs_are_in_flight() {
    let mut gateway = gateway(2, json!({ "prefill_policy": "least_loaded" })).await;
    gateway.other_prefills[0].by_hand();
    let mut connection = gateway.connect().await;
    let client = connection.call(post("/v1/completions", BODY));
    let others = async {
        // Equal loads take turns, and the first is the second cluster's.
        let held = gateway.other_prefills[0].next().await;
        for _ in 0..5 {
            assert_eq!(gateway.post("/v1/completions", BODY).await.status, 200);
        }
        assert_eq!(gateway.prefill.received().len(), 5);
        held.answer(good());
    };
    let (reply, ()) = tokio::join!(client, others);
    assert_eq!(reply.status, 200);
    assert_eq!(gateway.other_prefills[0].received().len(), 1);
}

#[tokio::test]
async fn prefix_hash_sends_equal_beginnings_to_the_same_worker() {
    let filter = json!({ "prefill_policy": "prefix_hash", "prefill_prefix_bytes": 8 });
    let gateway = gateway(3, filter).await;
    let served = async |prompt: String| {
        let counts = || {
            let all = std::iter::once(&gateway.prefill).chain(&gateway.other_prefills);
            all.map(|worker| worker.received().len())
                .collect::<Vec<_>>()
        };
        let before = counts();
        let body = json!({ "model": "m", "prompt": prompt }).to_string();
        assert_eq!(gateway.post("/v1/completions", body).await.status, 200);
        let after = counts();
        (0..3).find(|&worker| after[worker] > before[worker])
    };
    let mut used = std::collections::BTreeSet::new();
    for conversation in 0..24 {
        let start = format!("{conversation:08}");
        let owner = served(start.clone()).await;
        assert_eq!(served(format!("{start} and its next turn")).await, owner);
        used.insert(owner);
    }
    assert_eq!(used.len(), 3, "{used:?}");
}
