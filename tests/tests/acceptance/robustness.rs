//! Odd peers: the gateway answers, counts right, and its VM survives.

use std::io::Write;

use eldr_core::signature::{Encoding, Geometry, Signature};
use eldr_core::transform::Transform;
use eldr_tests::client::{post, raw};
use eldr_tests::{Answer, Gateway, KV_TRANSFER_PARAMS, Options, blob, eventually};
use serde_json::json;

const BODY: &str = r#"{"model":"m","prompt":"hi"}"#;

#[tokio::test]
async fn odd_prefill_answers_are_served_all_the_same() {
    let gateway = Gateway::start(Options::default()).await;
    let good = blob::signature_of(1, 3);
    let answers = [
        ("empty", Answer::status(200)),
        ("no content", Answer::status(204)),
        ("not modified", Answer::status(304)),
        ("a redirect", Answer::status(302).header("location", "/")),
        (
            "a long answer",
            Answer::json(format!("{{\"x\":\"{}\"}}", "y".repeat(4 << 20))),
        ),
        ("deep nesting", Answer::json("[".repeat(1 << 16))),
        (
            "deep params",
            Answer::prefill(&"[".repeat(1 << 16), Some(&good)),
        ),
        (
            "params of another kind",
            Answer::prefill("[1]", Some(&good)),
        ),
        ("a string", Answer::prefill("\"x\"", Some(&good))),
        (
            "two signatures",
            Answer::prefill("{}", Some(&good)).header("x-eldr-signature", &good),
        ),
        (
            "a long signature",
            Answer::prefill("{}", Some(&format!(":{}:;l=1;e=3", "A".repeat(1 << 19)))),
        ),
        (
            "no UTF-8",
            Answer::prefill("{}", Some(&good)).header("x-y", [0xff; 64]),
        ),
        ("bytes", Answer::json(vec![0xff; 1000])),
    ];
    let count = answers.len() as u64;
    for (name, answer) in answers {
        gateway.prefill.answers(answer);
        let reply = gateway.post("/v1/completions", BODY).await;
        assert_eq!(reply.status, 200, "{name}");
        gateway.assert_no_trap();
    }
    let ended = async || {
        let stats = gateway.filter_stats().await.into_iter();
        stats
            .filter(|(name, _)| name.contains("outcome"))
            .map(|(_, count)| count)
            .sum::<u64>()
    };
    eventually("each request has one outcome", ended, |sum| *sum == count).await;
    gateway.expect_in_flight(0).await;
}

#[tokio::test]
async fn odd_requests_are_refused_or_served_and_do_no_harm() {
    let gateway = Gateway::start(Options::default()).await;
    let head = "POST /v1/completions HTTP/1.1\r\nhost: g\r\nconnection: close\r\n";
    let long = "x".repeat(60_000);
    let requests = [
        format!("{head}content-length: 2\r\n\r\n{{}}"),
        format!("{head}content-length: 2\r\nx-long: {long}\r\n\r\n{{}}"),
        format!("{head}content-length: 2\r\nexpect: 100-continue\r\n\r\n{{}}"),
        format!("{head}transfer-encoding: chunked\r\n\r\n0\r\n\r\n"),
        format!("{head}transfer-encoding: chunked\r\n\r\n0\r\nx-trailer: 1\r\n\r\n"),
        format!("{head}content-length: 4\r\n\r\n[[[["),
        format!("{head}content-length: x\r\n\r\n"),
        "CONNECT g:80 HTTP/1.1\r\nhost: g:80\r\nconnection: close\r\n\r\n".to_owned(),
        format!("{head}upgrade: websocket\r\n\r\n"),
        "no HTTP at all\r\n\r\n".to_owned(),
    ];
    for request in requests {
        let answer = raw(gateway.address, request.as_bytes()).await;
        assert!(
            answer.starts_with(b"HTTP/1.1 "),
            "{request:.200}: {answer:?}"
        );
        gateway.assert_no_trap();
    }
    gateway.expect_in_flight(0).await;
    assert_eq!(
        gateway.post("/v1/completions", BODY).await.text(),
        "decode-0"
    );
}

#[tokio::test]
async fn a_body_over_the_limit_gets_413() {
    let gateway = Gateway::start(Options {
        buffer_limit: 64 << 10,
        ..Options::default()
    })
    .await;
    let body = format!(r#"{{"prompt":"{}"}}"#, "x".repeat(1 << 20));
    assert_eq!(gateway.post("/v1/completions", body).await.status, 413);
    gateway.expect_outcomes(&[("refused", 1)]).await;
}

#[tokio::test]
async fn a_decode_worker_that_is_down_is_an_error_and_does_not_count_for_ever() {
    let mut gateway = Gateway::start(Options::default()).await;
    drop(gateway.decode.remove(0));
    assert_eq!(gateway.post("/v1/completions", BODY).await.status, 503);
    gateway.expect_in_flight(0).await;
    gateway.expect_outcomes(&[("routed(in_band)", 1)]).await;
}

/// Also the report of what a decision costs inside Envoy's VM; `cargo bench -p eldr-core` has the native figure.
#[tokio::test]
async fn a_decision_on_a_large_model_is_a_matter_of_microseconds() {
    let (layers, experts, regions) = (48, 128, 16);
    let geometry = Geometry::new(layers, experts).unwrap();
    let weights = (0..geometry.counts())
        .map(|i| 0.1 + (i % 7) as f32)
        .collect();
    let transform = Transform::new(geometry, (0..48).collect(), weights).unwrap();
    let mut centroids = Vec::new();
    for region in 0..regions {
        // Every sixteenth expert, so that regions do not overlap; unit length.
        let member = |i: usize| f32::from(u8::from(i % regions == region));
        let norm = (geometry.counts() as f32 / regions as f32).sqrt();
        centroids.extend((0..geometry.counts()).map(|i| member(i) / norm));
    }
    let names: Vec<_> = (0..regions)
        .map(|region| vec![format!("decode-{region}")])
        .collect();
    let inline = blob::inline(&blob::new(transform, centroids, &names));
    let models = json!([{ "model": "*", "blob": { "inline": inline } }]);
    let options = Options {
        workers: regions,
        ..Options::filter(json!({ "models": models }))
    };
    let gateway = Gateway::start(options).await;

    // Mostly experts of region 3, as a prompt of 512 tokens with 8 experts per token might have.
    let count = |i: usize| {
        if i % regions == 3 {
            200
        } else {
            (i * 31 % 17) as u16
        }
    };
    let counts = (0..geometry.counts()).map(count).collect();
    let signature = Signature::dense(geometry, counts, Some(512))
        .unwrap()
        .encode(Encoding::U16);
    gateway
        .prefill
        .answers(Answer::prefill(KV_TRANSFER_PARAMS, Some(&signature)));
    let mut connection = gateway.connect().await;
    for _ in 0..500 {
        assert_eq!(
            connection.call(post("/v1/completions", BODY)).await.text(),
            "decode-3"
        );
    }
    // A query shows what the one before it merged.
    let percentile = async |percentile: f64| {
        let stats = gateway.envoy.stats("eldr.decision_ns$").await.unwrap();
        let all = stats.histograms.into_values().flatten();
        all.filter(|(q, _)| *q == percentile)
            .map(|(_, ns)| ns / 1_000.0)
            .next()
    };
    let merged = async || percentile(50.0).await;
    let median = eventually("decisions are timed", merged, Option::is_some)
        .await
        .unwrap();
    let slow = percentile(99.0).await.unwrap();
    let _ = writeln!(
        std::io::stderr(),
        "one decision inside Envoy's VM ({layers}×{experts}, {regions} regions): P50 {median:.0} µs, \
         P99 {slow:.0} µs"
    );
    assert!((1.0..2_000.0).contains(&median), "{median} µs");
}
