//! Streams whose body never comes.

use proxy_wasm::hostcalls;
use proxy_wasm::types::LogLevel;

use super::attributes::received;
use super::log;
use super::onward::reply;
use super::vm::{self, Starving};

/// Answers the streams whose body has arrived in Envoy but never came here: without a flag in the plugin's
/// configuration, holding the headers holds the body too, for ever.
pub(super) fn answer_starving() {
    let starving: Vec<(u32, Starving)> = vm::with(|vm| vm.starving.drain().collect());
    for (id, stream) in starving {
        if hostcalls::set_effective_context(id).is_err() {
            continue; // gone
        }
        if received() <= stream.received {
            vm::with(|vm| vm.starving.insert(id, stream)); // its client is slow
            continue;
        }
        let what = "the gateway's wasm plugin lacks `allow_on_headers_stop_iteration: true` (Envoy 1.35 or later)";
        log(LogLevel::Error, &format!("eldr: {what}"));
        let answer = stream.waiting.request.borrow_mut().internal(what);
        reply(&stream.waiting, &answer);
    }
}
