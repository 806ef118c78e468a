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
