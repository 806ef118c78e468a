//! What `eldr advise` says to configure, in a real Envoy.

use eldr_calibrator::advise::candidates::{Grid, POLICIES};
use eldr_calibrator::advise::{BALANCERS, deploy};
use eldr_calibrator::simulate::PolicySpec;
use eldr_core::engine::StepModel;
use eldr_tests::client::post;
use eldr_tests::{Answer, Gateway, Options, blob};
use serde_json::{Value, json};

const STEP: StepModel = StepModel {
    t0_ms: 5.84,
    b_ms: 0.288,
    c_ms: 0.026,
    kv_ms_per_1k: 0.043,
};

/// A gateway with the model's entry as it is printed, and with the blob that is to be fitted to it.
async fn starts(model: &Value, with_blob: bool) -> Gateway {
    let mut model = model.clone();
    if with_blob {
        let regions = [0, 1, 2].map(|worker| vec![format!("decode-{worker}")]);
        // Beside where newer ones come from, if they do.
        let inline = blob::inline(&blob::one_expert_per_region(&regions));
        model["blob"]["inline"] = json!(inline);
    }
    Gateway::start(Options::filter(json!({ "models": [model] }))).await
}

#[tokio::test]
async fn the_filter_takes_every_advised_policy_as_it_is_printed() {
    // The last candidate of each policy: the largest of each parameter.
    let candidates =
        POLICIES.map(|policy| Grid::Full.candidates(policy, 4).unwrap().pop().unwrap());
    let balancers = BALANCERS.map(|name| name.parse::<PolicySpec>().unwrap());
    for spec in candidates.iter().chain(&balancers) {
        let model = deploy::model(spec, STEP);
        let gateway = starts(&model, !spec.is_load_balancer()).await;
        gateway.prefill_says(Some(1));
        for worker in &gateway.decode {
            worker.answers(Answer::json("{}"));
        }
        let mut connection = gateway.connect().await;
        let body = r#"{"model":"m","prompt":"hi"}"#;
        let reply = connection.call(post("/v1/completions", body)).await;
        let decision = reply.header("x-eldr-decision");
        let reason = match spec.name.split(':').next().unwrap() {
            "hybrid" | "marginal" => "marginal",
            "band" | "batch_band" => "in_band",
            "top1" => "top1",
            _ => "blind",
        };
        let expected = format!("reason={reason}");
        assert!(decision.contains(&expected), "{model}: {decision}");
        gateway.assert_no_trap();
    }
}

#[tokio::test]
async fn what_needs_no_regions_is_complete_as_it_is_printed() {
    let spec: PolicySpec = "marginal:q=1:cap=1.125".parse().unwrap();
    let model = deploy::model(&spec, STEP);
    assert_eq!(
        model.to_string(),
        r#"{"max_load_factor":1.125,"model":"*","policy":"marginal","step_b_ms":0.288,"step_c_ms":0.026,"step_exponent":1,"step_kv_ms_per_1k":0.043,"step_t0_ms":5.84}"#
    );
    starts(&model, false).await.assert_no_trap();
}
