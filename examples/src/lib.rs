//! Mock engine (prefill and decode workers), load generator, set-up of Envoy and the wasm target, demo.

pub mod bench;
pub mod demo;
pub mod envoy;
pub mod gateway;
pub mod instant;
pub mod load;
pub mod mock;
pub mod records;
pub mod setup;
pub mod soak;

use std::process::{ExitCode, Termination};

/// What a command of this crate ends with: an error goes to stderr with all its causes.
pub fn exit(done: anyhow::Result<impl Termination>) -> ExitCode {
    match done {
        Ok(done) => done.report(),
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
