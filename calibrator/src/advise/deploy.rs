//! A policy as the filter's configuration has it.

use eldr_core::batch::Measure;
use eldr_core::engine::StepModel;
use serde_json::{Map, Value, json};

use crate::simulate::policy::PolicyKind;
use crate::simulate::{PolicySpec, Refit, Steps};

/// The model's entry in the filter's configuration, but for a blob that nobody refits: the policy with its parameters and, where it knows step times,
/// those of `step`, from which it learns. What the policy leaves out the filter's defaults say as the simulator's do.
pub fn model(spec: &PolicySpec, step: StepModel) -> Value {
    let mut model = Map::new();
    model.insert("model".into(), "*".into());
    let policy = spec.name.split(':').next().unwrap_or_default();
    model.insert("policy".into(), policy.into());
    if let Some(tau) = spec.tau {
        // As it was written, not as the nearest double of a float.
        let tau = tau.to_string().parse::<f64>();
        model.insert("tau".into(), json!(tau.unwrap_or_default()));
    }
    if let Some(cap) = spec.max_load_factor {
        let cap = cap.map_or_else(|| json!("none"), |cap| json!(cap));
        model.insert("max_load_factor".into(), cap);
    }
    if spec.refit.is_some() {
        // Blobs come from the server that refits them, to what gateways post.
        let http = json!({"cluster": "eldr-serve", "path": "/v1/blob", "interval_ms": 1_000});
        model.insert("blob".into(), json!({ "http": http }));
        model.insert("signature_sample".into(), json!(1));
    }
    if let Some(drawn) = spec.candidates {
        model.insert("candidates".into(), json!(drawn));
    }
    if let PolicyKind::Rule(policy) = spec.kind
        && policy.measure() == Some(Measure::Usage)
    {
        if let Some(q) = spec.exponent {
            model.insert("step_exponent".into(), json!(q));
        }
        model.insert("step_t0_ms".into(), json!(step.t0_ms));
        model.insert("step_b_ms".into(), json!(step.b_ms));
        model.insert("step_c_ms".into(), json!(step.c_ms));
        if spec.steps == Steps::Stated {
            model.insert("learn_steps".into(), json!(false));
        }
        if step.kv_ms_per_1k > 0.0 {
            model.insert("step_kv_ms_per_1k".into(), json!(step.kv_ms_per_1k));
        }
    }
    model.into()
}

/// The server that has the blob `file` follow the traffic as it does in the simulation, where the policy wants that.
pub fn serve(spec: &PolicySpec, file: &str) -> Option<String> {
    let Refit { every_s, window_s } = spec.refit?;
    Some(format!(
        "eldr serve --blob {file} --online --refit-every-s {every_s:.0} --window-s {window_s:.0} --requests-per-region 1"
    ))
}
