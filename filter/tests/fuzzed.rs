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
