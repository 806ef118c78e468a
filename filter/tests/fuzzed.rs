//! The fuzz targets' promises, without a fuzzer: on their seeds, on damaged seeds and on noise.

use proptest::prelude::*;

#[path = "../../core/fuzz/src/inputs.rs"]
mod inputs;
#[expect(unreachable_pub, reason = "for the fuzz targets it is a crate")]
#[path = "../fuzz/src/lib.rs"]
mod properties;

const FUZZ: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/fuzz");

#[test]
fn every_seed_keeps_the_promises() {
    for seed in inputs::seeds(FUZZ, "config_raw") {
        properties::config_raw::check(&seed);
    }
    for seed in inputs::seeds(FUZZ, "config_structured") {
        let input = inputs::value(&seed).expect("a seed is an input");
        properties::config_structured::check(input);
    }
    for seed in inputs::seeds(FUZZ, "body_raw") {
        properties::body_raw::check(&seed);
    }
    for seed in inputs::seeds(FUZZ, "body_structured") {
        let input = inputs::value(&seed).expect("a seed is an input");
        properties::body_structured::check(input);
    }
    for seed in inputs::seeds(FUZZ, "prefill_raw") {
        properties::prefill_raw::check(&seed);
    }
    for seed in inputs::seeds(FUZZ, "prefill_structured") {
        let input = inputs::value(&seed).expect("a seed is an input");
        properties::prefill_structured::check(input);
    }
}

/// What is accepted can go wrong in more ways than what is refused, so there has to be some of it to begin with. The bytes
/// of a seed mean something else whenever a setting is added.
#[test]
fn every_setting_is_in_a_seed_that_is_accepted() {
    let seeds = inputs::seeds(FUZZ, "config_structured");
    let accepted: Vec<_> = seeds
        .iter()
        .filter_map(|seed| properties::config_structured::accepted(inputs::value(seed)?))
        .collect();
    for setting in [
        r#""mode":"relay""#,
        r#""relay_body_signature":true"#,
        r#""relay_ttl_ms""#,
        r#""destination":"endpoint""#,
        r#""kind":"shadow""#,
        r#""kind":"percentage""#,
        r#""kind":"switchback""#,
        r#""load_unit":"kv_tokens""#,
        r#""load_report_interval_ms""#,
        r#""load_report_stale_ms""#,
        r#""kv_usage_limit""#,
        r#""protocol":"mooncake","#,
        r#""protocol":"shared_storage""#,
        r#""report_cached_tokens":true"#,
        r#""weight""#,
        r#""http""#,
        r#""signature_sample":0.1"#,
        r#""policy":"marginal""#,
        r#""policy":"hybrid""#,
        r#""policy":"batch_band""#,
        r#""step_c_ms""#,
        r#""step_exponent""#,
        r#""candidates""#,
        r#""learn_steps":false"#,
    ] {
        assert!(
            accepted.iter().any(|json| json.contains(setting)),
            "{setting} in none of {accepted:#?}"
        );
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    #[test]
    fn config_raw(bytes in inputs::bytes(inputs::seeds(FUZZ, "config_raw"))) {
        properties::config_raw::check(&bytes);
    }

    #[test]
    fn config_structured(bytes in inputs::bytes(inputs::seeds(FUZZ, "config_structured"))) {
        let Some(input) = inputs::value(&bytes) else {
            return Err(TestCaseError::reject("not an input"));
        };
        properties::config_structured::check(input);
    }

    #[test]
    fn body_raw(bytes in inputs::bytes(inputs::seeds(FUZZ, "body_raw"))) {
        properties::body_raw::check(&bytes);
    }

    #[test]
    fn body_structured(bytes in inputs::bytes(inputs::seeds(FUZZ, "body_structured"))) {
        let Some(input) = inputs::value(&bytes) else {
            return Err(TestCaseError::reject("not an input"));
        };
        properties::body_structured::check(input);
    }

    #[test]
    fn prefill_raw(bytes in inputs::bytes(inputs::seeds(FUZZ, "prefill_raw"))) {
        properties::prefill_raw::check(&bytes);
    }

    #[test]
    fn prefill_structured(bytes in inputs::bytes(inputs::seeds(FUZZ, "prefill_structured"))) {
        let Some(input) = inputs::value(&bytes) else {
            return Err(TestCaseError::reject("not an input"));
        };
        properties::prefill_structured::check(input);
    }
}
