//! What every input has to keep, whoever makes it: the fuzzer, or the property tests of `cargo test`.

pub mod body_raw;
pub mod body_structured;
pub mod config_raw;
pub mod config_structured;
pub mod prefill_raw;
pub mod prefill_structured;

mod json;
