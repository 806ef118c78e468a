//! What is not a completion passes untouched.

use eldr_tests::client::{get, post};
use eldr_tests::{Gateway, Options};

#[tokio::test]
async fn other_requests_reach_the_default_upstream_as_they_are() {
    let gateway = Gateway::start(Options::default()).await;
    let mut connection = gateway.connect().await;
    let body = r#"{"input":"a word such as kv_transfer_params","seed":12345678901234567890123}"#;
    let requests = [
        get("/v1/models"),
        get("/v1/completions"),
        post("/v1/completions", ""),
        post("/v1/embeddings", body),
        post("/v1/completions/", body),
    ];
    let count = requests.len();
    for request in requests {
        let reply = connection.call(request).await;
        assert_eq!(
            (reply.status.as_u16(), reply.text().as_str()),
            (200, "default")
        );
    }
    assert!(gateway.prefill.received().is_empty());
    assert_eq!(gateway.default.received()[3].text(), body);
    gateway.expect_outcomes(&[("bypassed", count as u64)]).await;
}

#[tokio::test]
async fn transfer_params_are_refused_on_other_paths_too_wherever_they_are() {
    let gateway = Gateway::start(Options::default()).await;
    let bodies = [
        r#"{"input":"x","kv_transfer_params":{}}"#,
        r#"{"sampling_params":{"extra_args":{"kv\u005ftransfer_params":{}}}}"#,
    ];
    for path in ["/v1/messages", "/generative_scoring", "/v1/completions/"] {
        for body in bodies {
            assert_eq!(gateway.post(path, body).await.status, 400, "{path} {body}");
        }
    }
    assert!(gateway.default.received().is_empty());
    gateway.expect_outcomes(&[("refused", 6)]).await;
}

#[tokio::test]
async fn every_request_ends_in_exactly_one_outcome() {
    let gateway = Gateway::start(Options::default()).await;
    let good = r#"{"prompt":"hi"}"#;
    for _ in 0..3 {
        gateway.post("/v1/completions", good).await;
        gateway.connect().await.call(get("/v1/models")).await;
    }
    gateway
        .post("/v1/completions", r#"{"kv_transfer_params":{}}"#)
        .await;
    gateway.prefill_says(None);
    gateway.post("/v1/completions", good).await;
    gateway.prefill.answers(eldr_tests::Answer::status(404));
    gateway.post("/v1/completions", good).await;
    gateway.prefill.answers(eldr_tests::Answer::status(500));
    gateway.post("/v1/completions", good).await;

    let expected = [
        ("bypassed", 3),
        ("prefill_failed", 1),
        ("prefill_rejected", 1),
        ("refused", 1),
        ("routed(in_band)", 3),
        ("routed(no_signature)", 1),
    ];
    gateway.expect_outcomes(&expected).await;
    let total: u64 = expected.iter().map(|(_, count)| count).sum();
    let log = gateway.access_log(total as usize).await;
    for (name, count) in expected {
        let logged = log.iter().filter(|entry| entry["outcome"] == name).count();
        assert_eq!(logged as u64, count, "{name} in {log:?}");
    }
    assert_eq!(log.len() as u64, total);
}
