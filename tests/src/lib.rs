//! Harness of the acceptance tests: the freshly built filter in a real Envoy, between a client and upstreams that a
//! test scripts.
//!
//! A test arranges a [`Gateway`], acts through it as a client would, and asserts on what the client got, on what
//! each [`Upstream`] received, and on how Envoy counted and logged it. Nothing here sleeps for a fixed time:
//! [`eventually`] waits for a condition, bounded.

pub mod blob;
pub mod client;
pub mod config;
mod gateway;
pub mod upstream;

use std::fmt::Debug;
use std::time::Duration;

pub use client::{Connection, Reply};
pub use gateway::{Gateway, KV_TRANSFER_PARAMS, Options, envoy_binary, wasm_module};
pub use upstream::{Answer, Upstream};

/// Bound of every wait: far above what a busy two-core machine needs, so that only a defect reaches it.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// Waits until `probe` gives a value that `accepts`, and returns it. Panics with the last value after [`PATIENCE`].
pub async fn eventually<T: Debug>(
    what: &str,
    mut probe: impl AsyncFnMut() -> T,
    accepts: impl Fn(&T) -> bool,
) -> T {
    let deadline = tokio::time::Instant::now() + PATIENCE;
    loop {
        let value = probe().await;
        if accepts(&value) {
            return value;
        }
        assert!(
            tokio::time::Instant::now() < deadline,
            "not within {PATIENCE:?}: {what}; last seen: {value:?}"
        );
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Waits for a future that must end by itself, bounded by [`PATIENCE`].
pub async fn soon<T>(what: &str, future: impl Future<Output = T>) -> T {
    match tokio::time::timeout(PATIENCE, future).await {
        Ok(value) => value,
        Err(_) => panic!("not within {PATIENCE:?}: {what}"),
    }
}
