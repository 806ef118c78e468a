//! The fuzz targets' promises, without a fuzzer: on their seeds, on damaged seeds and on noise.

use proptest::prelude::*;

#[path = "../fuzz/src/inputs.rs"]
mod inputs;
#[expect(unreachable_pub, reason = "for the fuzz targets it is a crate")]
#[path = "../fuzz/src/lib.rs"]
mod properties;

const FUZZ: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/fuzz");

#[test]
fn every_seed_keeps_the_promises() {
    for seed in inputs::seeds(FUZZ, "signature_raw") {
        properties::signature_raw::check(&seed);
    }
    for seed in inputs::seeds(FUZZ, "signature_structured") {
        let input = inputs::value(&seed).expect("a seed is an input");
        properties::signature_structured::check(input);
    }
    for seed in inputs::seeds(FUZZ, "blob_raw") {
        properties::blob_raw::check(&seed);
    }
    for seed in inputs::seeds(FUZZ, "blob_structured") {
        let input = inputs::value(&seed).expect("a seed is an input");
        properties::blob_structured::check(input);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    #[test]
    fn signature_raw(bytes in inputs::bytes(inputs::seeds(FUZZ, "signature_raw"))) {
        properties::signature_raw::check(&bytes);
    }

    #[test]
    fn signature_structured(bytes in inputs::bytes(inputs::seeds(FUZZ, "signature_structured"))) {
        let Some(input) = inputs::value(&bytes) else {
            return Err(TestCaseError::reject("not an input"));
        };
        properties::signature_structured::check(input);
    }

    #[test]
    fn blob_raw(bytes in inputs::bytes(inputs::seeds(FUZZ, "blob_raw"))) {
        properties::blob_raw::check(&bytes);
    }

    #[test]
    fn blob_structured(bytes in inputs::bytes(inputs::seeds(FUZZ, "blob_structured"))) {
        let Some(input) = inputs::value(&bytes) else {
            return Err(TestCaseError::reject("not an input"));
        };
        properties::blob_structured::check(input);
    }
}
