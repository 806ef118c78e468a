//! What a decode step costs is learned from the answers that pass.

use std::sync::Arc;

use eldr_core::engine::StepModel;
use eldr_core::signature::Geometry;
use eldr_examples::mock::{Catalog, MockConfig, MockEngine};
use eldr_tests::client::post;
use eldr_tests::{Answer, Gateway, Options, blob, eventually};
use serde_json::{Value, json};

const BODY: &str = r#"{"model":"mock","prompt":"hi","stream":true,"max_tokens":8}"#;
/// Far from what is stated where nothing is: 5.84 ms.
const STEP_MS: f64 = 40.0;

async fn engine() -> MockEngine {
    let geometry = Geometry::new(1, 4).expect("a geometry");
    let catalog = Arc::new(Catalog::new(geometry, 1).expect("a catalog"));
    let config = MockConfig {
        prefill_workers: 0,
        decode_workers: 1,
        step: StepModel {
            t0_ms: STEP_MS,
            b_ms: 0.0,
            c_ms: 0.0,
            kv_ms_per_1k: 0.0,
        },
        ..MockConfig::default()
    };
    MockEngine::start(config, catalog).await.expect("an engine")
}

/// A gateway before a slow engine, and what it has logged of two requests, one after the other.
async fn decisions(model: Value) -> Vec<String> {
    let engine = engine().await;
    let gateway = Gateway::start(Options {
        workers: 1,
        clusters: vec![("slow", engine.decode()[0])],
        ..Options::filter(json!({
            "models": [model],
            "decode_clusters": ["slow"],
            "log_decisions_per_mille": 1000,
        }))
    })
    .await;
    // Without KV blocks, which the engine would have to have handed out itself.
    let signature = blob::signature_of(0, 4);
    gateway
        .prefill
        .answers(Answer::json("{}").header("x-eldr-signature", signature));
    for sent in 1..=2 {
        let mut connection = gateway.connect().await;
        let answer = connection.call(post("/v1/completions", BODY)).await;
        assert!(answer.text().contains("[DONE]"), "{}", answer.text());
        gateway.expect_outcomes(&[("routed(marginal)", sent)]).await;
    }
    let lines = async || {
        let log = gateway.envoy.log_tail(usize::MAX);
        let lines = log.lines().filter(|line| line.contains("eldr: decision"));
        lines.map(str::to_owned).collect::<Vec<_>>()
    };
    eventually("two decisions", lines, |lines| lines.len() == 2).await;
    lines().await
}

#[tokio::test]
async fn after_the_first_answer_a_step_costs_what_it_took() {
    let lines = decisions(json!({ "model": "*", "policy": "marginal" })).await;
    assert!(lines[0].contains(" steps=5.84+0.144U+0.026B "), "{lines:?}");
    let (_, steps) = lines[1].split_once(" steps=").expect("step times");
    let (t0_ms, costs) = steps.split_once('+').expect("a sum");
    // One load says nothing of what experts cost.
    assert!(costs.starts_with("0.144U+0.026B "), "{lines:?}");
    let t0_ms: f64 = t0_ms.parse().expect("a number");
    // A busy machine makes steps longer, never shorter.
    assert!(t0_ms > 0.9 * STEP_MS, "{lines:?}");
}

#[tokio::test]
async fn what_is_stated_stands_where_nothing_is_to_be_learned() {
    let model = json!({ "model": "*", "policy": "marginal", "learn_steps": false });
    let lines = decisions(model).await;
    assert!(
        lines.iter().all(|line| !line.contains("steps=")),
        "{lines:?}"
    );
}
