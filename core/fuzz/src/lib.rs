//! What every input has to keep, whoever makes it: the fuzzer, or the property tests of `cargo test`.

pub mod blob_raw;
pub mod blob_structured;
pub mod signature_raw;
pub mod signature_structured;

use eldr_core::signature::{Geometry, Signature};

#[path = "../../src/signature/tests/oracle.rs"]
mod oracle;
