//! The only module that knows `proxy_wasm`: carries bytes between Envoy and the modules that decide.
//!
//! One VM per thread, one root context per listener in it, one stream context per request.
//!
//! The prefill call is dispatched by the **root** context. Envoy does not cancel a call when its stream dies, and the
//! SDK hands the answer to the context that dispatched, so a stream's late answer would be lost. The stream puts its
//! id on a list of this VM and wakes the root through a shared queue; the root dispatches, gets the answer, and
//! acts on the stream if it is still there.

mod attributes;
mod calls;
mod decision;
mod decode;
mod fetch;
mod held;
mod metrics;
mod onward;
mod post;
mod question;
mod relay;
mod root;
mod scrape;
mod stages;
mod starving;
mod stream;
mod vm;

use proxy_wasm::hostcalls;
use proxy_wasm::types::{LogLevel, MapType, Status};

use crate::headers::Header;
use crate::shared::Shared;

proxy_wasm::main! {{
    proxy_wasm::set_log_level(LogLevel::Info);
    proxy_wasm::set_root_context(|id| Box::new(root::Root::new(id)));
}}

/// Envoy's shared data.
struct EnvoyShared;

impl Shared for EnvoyShared {
    fn get(&self, key: &str) -> (Option<Vec<u8>>, Option<u32>) {
        hostcalls::get_shared_data(key).unwrap_or_default()
    }

    fn set(&self, key: &str, value: &[u8], version: Option<u32>) -> bool {
        hostcalls::set_shared_data(key, Some(value), version).is_ok()
    }
}

fn log(level: LogLevel, message: &str) {
    // Nothing can be done about a log line that cannot be written.
    let _ = hostcalls::log(level, message);
}

/// Wall clock in nanoseconds.
fn now_ns() -> u64 {
    let since_epoch = hostcalls::get_current_time()
        .ok()
        .and_then(|now| now.duration_since(std::time::UNIX_EPOCH).ok());
    since_epoch
        .map(|elapsed| elapsed.as_nanos() as u64)
        .unwrap_or_default()
}

fn now_ms() -> u64 {
    now_ns() / 1_000_000
}

/// All headers of a map; values as bytes, since the text forms of the SDK panic on what is not UTF-8.
fn headers(map: MapType) -> Vec<Header> {
    hostcalls::get_map_bytes(map).unwrap_or_default()
}

fn set_header(map: MapType, name: &str, value: &[u8]) -> Result<(), Status> {
    hostcalls::set_map_value_bytes(map, name, Some(value))
}

fn remove_header(map: MapType, name: &str) {
    let _ = hostcalls::remove_map_value(map, name);
}
