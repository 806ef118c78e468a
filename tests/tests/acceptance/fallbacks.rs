//! A request without a usable signature is served all the same, by the documented fallback.

use eldr_tests::{Answer, Gateway, KV_TRANSFER_PARAMS, Options, blob};
use serde_json::json;

const BODY: &str = r#"{"model":"m","prompt":"hi"}"#;

/// The request is served with the hand-over, and its outcome has this reason.
async fn assert_served(options: Options, signature: Option<&str>, reason: &str) {
    let gateway = Gateway::start(options).await;
    gateway
        .prefill
        .answers(Answer::prefill(KV_TRANSFER_PARAMS, signature));
    let reply = gateway.post("/v1/completions", BODY).await;
    assert_eq!(
        (reply.status.as_u16(), reply.text().as_str()),
        (200, "decode-0"),
        "{reason}"
    );
    let decision = reply.header("x-eldr-decision");
    assert!(
        decision.starts_with(&format!("decode-0;reason={reason}")),
        "{decision}"
    );
    let params = gateway.decode[0].only().json()["kv_transfer_params"].clone();
    assert_eq!(
        params,
        serde_json::from_str::<serde_json::Value>(KV_TRANSFER_PARAMS).unwrap()
    );
    gateway
        .expect_outcomes(&[(&format!("routed({reason})"), 1)])
        .await;
}

#[tokio::test]
async fn no_signature() {
    assert_served(Options::default(), None, "no_signature").await;
}

#[tokio::test]
async fn a_malformed_signature() {
    for signature in [
        "",
        "nonsense",
        ":AAAA:;l=1",
        ":!!!!:;l=1;e=3",
        ":AAA=:;l=1;e=3",
    ] {
        assert_served(Options::default(), Some(signature), "malformed_signature").await;
    }
}

#[tokio::test]
async fn a_signature_of_another_model() {
    assert_served(
        Options::default(),
        Some(&blob::signature_of(2, 4)),
        "geometry_mismatch",
    )
    .await;
}

#[tokio::test]
async fn no_blob() {
    let options = Options::filter(json!({ "models": [{ "model": "*", "policy": "band" }] }));
    assert_served(options, Some(&blob::signature_of(2, 3)), "no_blob").await;
}

#[tokio::test]
async fn a_policy_that_does_not_look() {
    let options =
        Options::filter(json!({ "models": [{ "model": "*", "policy": "least_loaded" }] }));
    assert_served(options, Some(&blob::signature_of(2, 3)), "blind").await;
}

/// Answers of a prefill worker that failed.
fn failures() -> [Answer; 4] {
    [
        Answer::status(500).body("broken"),
        Answer::status(503),
        Answer::json("this is not JSON"),
        Answer::json("[]"),
    ]
}

#[tokio::test]
async fn a_failed_prefill_is_served_by_decode_alone() {
    let gateway = Gateway::start(Options::default()).await;
    for failure in failures() {
        gateway.prefill.answers(failure.clone());
        let reply = gateway.post("/v1/completions", BODY).await;
        assert_eq!(
            (reply.status.as_u16(), reply.text().as_str()),
            (200, "decode-0"),
            "{failure:?}"
        );
    }
    for received in gateway.decode[0].received() {
        assert_eq!(received.text(), BODY, "decode prefills by itself");
    }
    gateway.expect_outcomes(&[("prefill_failed", 4)]).await;
}

#[tokio::test]
async fn a_failed_prefill_is_an_error_where_that_is_configured() {
    let gateway = Gateway::start(Options::filter(json!({ "on_prefill_failure": "error" }))).await;
    for failure in failures() {
        gateway.prefill.answers(failure.clone());
        let reply = gateway.post("/v1/completions", BODY).await;
        assert!(
            reply.status.is_server_error(),
            "{failure:?}: {}",
            reply.status
        );
        assert!(reply.text().contains("prefill"), "{}", reply.text());
    }
    assert!(
        gateway
            .decode
            .iter()
            .all(|worker| worker.received().is_empty())
    );
    gateway.expect_outcomes(&[("prefill_failed", 4)]).await;
}

#[tokio::test]
async fn a_prefill_worker_that_hangs_up_has_failed() {
    let mut gateway = Gateway::start(Options::default()).await;
    gateway.prefill.by_hand();
    let mut connection = gateway.connect().await;
    let client = connection.call(eldr_tests::client::post("/v1/completions", BODY));
    // Dropping the exchange resets the connection.
    let prefill = async { drop(gateway.prefill.next().await) };
    let (reply, ()) = tokio::join!(client, prefill);
    assert_eq!(reply.text(), "decode-0");
    gateway.expect_outcomes(&[("prefill_failed", 1)]).await;
}

#[tokio::test]
async fn a_prefill_that_takes_too_long_has_failed() {
    let mut gateway = Gateway::start(Options::filter(json!({ "prefill_timeout_ms": 50 }))).await;
    gateway.prefill.by_hand();
    let mut connection = gateway.connect().await;
    let client = connection.call(eldr_tests::client::post("/v1/completions", BODY));
    let prefill = gateway.prefill.next();
    let (reply, held) = tokio::join!(client, prefill);
    assert_eq!(reply.text(), "decode-0");
    drop(held);
    gateway.expect_outcomes(&[("prefill_failed", 1)]).await;
}

#[tokio::test]
async fn an_unknown_prefill_cluster_has_failed() {
    let options = Options::filter(json!({ "prefill_clusters": ["nowhere"] }));
    let gateway = Gateway::start(options).await;
    assert_eq!(
        gateway.post("/v1/completions", BODY).await.text(),
        "decode-0"
    );
    gateway.expect_outcomes(&[("prefill_failed", 1)]).await;
}

#[tokio::test]
async fn a_prefill_rejection_goes_back_verbatim() {
    let gateway = Gateway::start(Options::default()).await;
    let body = "{\"error\": {\"message\":\"prompt too long\", \"code\":400}}\n";
    let rejection = Answer::status(400)
        .header("content-type", "application/json; charset=utf-8")
        .header("x-engine", b"caf\xe9")
        .header("retry-after", "7")
        .body(body);
    gateway.prefill.answers(rejection);
    let reply = gateway.post("/v1/completions", BODY).await;
    assert_eq!((reply.status.as_u16(), reply.text().as_str()), (400, body));
    assert_eq!(
        reply.header("content-type"),
        "application/json; charset=utf-8"
    );
    assert_eq!(reply.headers["x-engine"].as_bytes(), b"caf\xe9");
    assert_eq!(reply.header("retry-after"), "7");
    assert_eq!(reply.headers.get_all("content-type").iter().count(), 1);
    assert!(
        gateway
            .decode
            .iter()
            .all(|worker| worker.received().is_empty())
    );
    gateway.expect_outcomes(&[("prefill_rejected", 1)]).await;
}
