//! What an operator sees: metrics with tags, an access log that is a trace, sampled decisions.

use std::io::Cursor;

use eldr_calibrator::fit::{self, fit};
use eldr_calibrator::requests::Requests;
use eldr_calibrator::trace;
use eldr_tests::client::{Connection, get, post};
use eldr_tests::{Answer, Gateway, KV_TRANSFER_PARAMS, Options, blob, eventually};
use serde_json::json;

use crate::reference::{self, Reference, replace};

const BODY: &str = r#"{"model":"m","prompt":"hi"}"#;

/// Lines of the reference configuration's access log, which goes where Envoy's own lines go.
async fn access_log(reference: &Reference, count: usize) -> String {
    let lines = async || {
        let log = reference.envoy.log_tail(usize::MAX);
        let lines: Vec<_> = log.lines().filter(|line| line.starts_with('{')).collect();
        lines.iter().map(|line| format!("{line}\n")).collect()
    };
    eventually("access log lines", lines, |text: &String| {
        text.lines().count() >= count
    })
    .await
}

#[tokio::test]
async fn the_access_log_is_a_trace_that_can_be_fitted() {
    let reference = reference::start(|config| {
        replace(
            config,
            "\"log_signatures\": false",
            "\"log_signatures\": true",
        )
    })
    .await;
    let mut connection = Connection::open(reference.address).await;
    assert_eq!(connection.call(get("/v1/models")).await.status, 200);
    let answers = [
        Some(blob::signature_of(0, 2)),
        Some(blob::signature_of(1, 2)),
        Some(blob::signature_of(1, 2)),
        Some("nonsense".to_owned()),
        None,
    ];
    for signature in &answers {
        let answer = Answer::prefill(KV_TRANSFER_PARAMS, signature.as_deref());
        reference.prefill.answers(answer);
        let reply = connection.call(post("/v1/completions", BODY)).await;
        assert_eq!(reply.status, 200);
    }
    let log = access_log(&reference, 1 + answers.len()).await;
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("access.log");
    std::fs::write(&file, &log).unwrap();

    let records = trace::Reader::new("access.log", Cursor::new(log.clone())).unwrap();
    let records = records.collect::<Result<Vec<_>, _>>().unwrap();
    let logged: Vec<_> = records.iter().map(|r| r.prefill.clone()).collect();
    let expected = [&[None], &answers[..3], &[None, None]].concat();
    assert_eq!(logged, expected, "{log}");
    assert_eq!(records[1].prompt_tokens, Some(7));
    assert!(records.iter().all(|record| !record.id.is_empty()));

    let requests = Requests::read(&[file], || {}).unwrap();
    let options = fit::Options {
        revision: 2,
        ..fit::Options::new(vec!["decode-0".into(), "decode-1".into()])
    };
    let fitted = fit(&requests, &options, |_| {}).unwrap();
    assert_eq!(fitted.blob.fit.requests, 3);
}

#[tokio::test]
async fn signatures_stay_out_of_the_log_unless_asked_for() {
    let reference = reference::start(str::to_owned).await;
    let mut connection = Connection::open(reference.address).await;
    connection.call(post("/v1/completions", BODY)).await;
    let log = access_log(&reference, 1).await;
    let line: serde_json::Value = serde_json::from_str(log.trim()).unwrap();
    assert_eq!(line["outcome"], "routed(in_band)", "{log}");
    for field in ["prefill", "prompt_tokens"] {
        assert!(line[field].is_null() || line[field] == "-", "{log}");
    }
}

#[tokio::test]
async fn prometheus_has_outcome_reason_and_worker_as_labels_and_the_histograms() {
    let reference = reference::start(str::to_owned).await;
    let mut connection = Connection::open(reference.address).await;
    let reply = connection.call(post("/v1/completions", BODY)).await;
    assert_eq!(reply.text(), "decode-1");
    let Reference { envoy, decode, .. } = reference;
    drop(decode);
    // The one that answers is gone, then the other: both are left out.
    for _ in 0..2 {
        let reply = connection.call(post("/v1/completions", BODY)).await;
        assert_eq!(reply.status, 503);
    }
    let scrape = async || {
        let page = envoy.admin_get("/stats/prometheus?filter=eldr").await;
        page.unwrap_or_else(|e| panic!("{e}"))
    };
    for expected in [
        r#"eldr_outcome{eldr_outcome="routed"} 3"#,
        r#"eldr_reason{eldr_reason="in_band"} 3"#,
        r#"eldr_worker_routed{eldr_worker="decode-1"} 2"#,
        r#"eldr_worker_in_flight{eldr_worker="decode-1"} 0"#,
        r#"eldr_worker_ejections{eldr_worker="decode-0"} 1"#,
        r#"eldr_worker_ejections{eldr_worker="decode-1"} 1"#,
        "eldr_decision_ns_count{} 3",
        "eldr_prefill_ms_count{} 3",
        r#"eldr_band_bucket{le="1.5"} 3"#,
        r#"eldr_top_similarity_permille_bucket{le="1100"} 3"#,
        r#"eldr_similarity_permille_bucket{le="100"} 1"#,
    ] {
        eventually(expected, scrape, |stats| stats.contains(expected)).await;
    }
}

#[tokio::test]
async fn sampled_decisions_are_logged_with_similarities_and_loads() {
    let mut gateway = Gateway::start(Options::filter(json!({
        "log_decisions_per_mille": 1000,
        "decode_clusters": ["decode-0", "decode-1", { "name": "decode-2", "drain": true }],
    })))
    .await;
    gateway.prefill_says(Some(1));
    gateway.decode[1].by_hand();
    let mut first = gateway.connect().await;
    let mut second = gateway.connect().await;
    let (call, next) = (
        first.send(post("/v1/completions", BODY)),
        gateway.decode[1].next(),
    );
    let (_answer, _stream) =
        tokio::join!(call, async { next.await.stream(Answer::event_stream()) });
    second.call(post("/v1/completions", BODY)).await;
    // The cap sends the second to a region that is not the most similar.
    let expected = [
        "eldr: decision decode-1;reason=in_band;region=1;band=1;similarity=1.000;top=1.000 \
         loads=decode-0:0,decode-1:0,decode-2:out",
        "eldr: decision decode-0;reason=in_band;region=0;band=1;similarity=0.000;top=1.000 \
         loads=decode-0:0,decode-1:1,decode-2:out",
    ];
    let log = async || gateway.envoy.log_tail(usize::MAX);
    for line in expected {
        eventually(line, log, |log| log.contains(line)).await;
    }
    let quiet = Gateway::start(Options::default()).await;
    quiet.post("/v1/completions", BODY).await;
    quiet.expect_outcomes(&[("routed(in_band)", 1)]).await;
    assert!(!quiet.envoy.log_tail(usize::MAX).contains("eldr: decision"));
}
