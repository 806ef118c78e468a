use eldr_core::engine::StepModel;
use eldr_core::marginal::Objective;

use super::*;

#[test]
fn what_a_step_costs_may_be_said_and_has_a_default() {
    let mut config = minimal();
    config["models"][0]["policy"] = json!("marginal");
    let objective = |config: &Value| parse(config).unwrap().models[0].rule.objective;
    assert_eq!(objective(&config), Objective::default());
    for (field, value) in [
        ("step_t0_ms", json!(3)),
        ("step_b_ms", json!(0.5)),
        ("step_c_ms", json!(0)),
        ("step_kv_ms_per_1k", json!(0.019)),
        ("step_exponent", json!(3)),
    ] {
        config["models"][0][field] = value;
    }
    let step = StepModel {
        t0_ms: 3.0,
        b_ms: 0.5,
        c_ms: 0.0,
        kv_ms_per_1k: 0.019,
    };
    let said = Objective { step, exponent: 3 };
    assert_eq!(objective(&config), said);
    let learns = |config: &Value| parse(config).unwrap().models[0].learns_steps;
    assert!(learns(&config));
    config["models"][0]["learn_steps"] = json!(false);
    assert!(!learns(&config));
}

#[test]
fn every_wrong_coefficient_is_named() {
    let mut config = minimal();
    let wrong = [
        ("step_t0_ms", json!(-1), "0 to 10000"),
        ("step_b_ms", json!(0), "above 0"),
        ("step_c_ms", json!(1001), "0 to 1000"),
        ("step_kv_ms_per_1k", json!(-0.1), "0 to 1000"),
        ("step_exponent", json!(17), "1 to 16"),
    ];
    for (field, value, _) in &wrong {
        config["models"][0][*field] = value.clone();
    }
    let mistakes = parse(&config).unwrap_err().0;
    assert_eq!(mistakes.len(), wrong.len(), "{mistakes:?}");
    for (mistake, (field, _, allowed)) in mistakes.iter().zip(&wrong) {
        assert_eq!(mistake.field, format!("models[0].{field}"));
        assert!(mistake.allowed.contains(allowed), "{mistake:?}");
    }
    config["models"][0] = json!({"model": "*", "step_exponent": 0});
    let mistakes = parse(&config).unwrap_err().0;
    assert_eq!(mistakes[0].field, "models[0].step_exponent");
}

#[test]
fn of_a_models_batches_one_thing_is_kept() {
    let mut config = minimal();
    let mut of = |policy: &str, control: &str| {
        config["models"][0]["policy"] = json!(policy);
        config["models"][0]["rollout"] = json!({"kind": "shadow", "control": control});
        parse(&config).map(|config| config.models[0].measure())
    };
    use Measure::{Direction, Usage};
    for (policy, control, measure) in [
        ("band", "p2c", None),
        ("marginal", "band", Some(Usage)),
        ("band", "hybrid", Some(Usage)),
        ("marginal", "hybrid", Some(Usage)),
        ("batch_band", "least_loaded", Some(Direction)),
    ] {
        assert_eq!(of(policy, control).unwrap(), measure, "{policy}, {control}");
    }
    for (policy, control, others) in [
        (
            "marginal",
            "batch_band",
            "band, top1, hybrid, least_loaded, p2c",
        ),
        ("batch_band", "hybrid", "band, top1, least_loaded, p2c"),
    ] {
        let mistakes = of(policy, control).unwrap_err().0;
        assert_eq!(mistakes.len(), 1, "{mistakes:?}");
        assert_eq!(mistakes[0].field, "models[0].rollout.control");
        assert!(mistakes[0].allowed.starts_with(others), "{mistakes:?}");
    }
}

#[test]
fn hybrid_has_a_band_of_its_own_unless_it_is_set() {
    let inline = STANDARD.encode(blob_bytes(1, &["decode-0"]));
    let mut config = minimal();
    config["models"][0]["policy"] = json!("hybrid");
    config["models"][0]["rollout"] = json!({"kind": "shadow", "control": "band"});
    let taus = |config: &Value| {
        let config = parse(config).unwrap();
        let model = &config.models[0];
        (model.tau(Policy::Hybrid), model.tau(Policy::Band))
    };
    assert_eq!(taus(&config), (0.5, 0.1));
    config["models"][0]["blob"] = json!({"inline": inline});
    assert_eq!(taus(&config), (0.5, 0.2));
    config["models"][0]["tau"] = json!(0.05);
    assert_eq!(taus(&config), (0.05, 0.05));
}

#[test]
fn tokens_are_counted_where_a_step_costs_them() {
    let mut config = minimal();
    for (policy, kv_ms, counts) in [
        ("marginal", 0.0, false),
        ("marginal", 0.02, true),
        ("hybrid", 0.02, true),
        ("batch_band", 0.02, false),
        ("band", 0.02, false),
    ] {
        config["models"][0]["policy"] = json!(policy);
        config["models"][0]["step_kv_ms_per_1k"] = json!(kv_ms);
        let parsed = parse(&config).unwrap();
        assert_eq!(parsed.counts_tokens(), counts, "{policy}, {kv_ms}");
    }
}
