//! What Envoy knows of the current stream, and what its access log is told.

use eldr_core::signature::Encoded;
use proxy_wasm::hostcalls;

use crate::release::reached_worker;

/// Bytes of the current stream's request that Envoy has received so far.
pub(super) fn received() -> u64 {
    number("request", "total_size")
}

/// Whether the current stream's decode leg reached a worker, as far as Envoy knows by now.
pub(super) fn reached_a_worker() -> bool {
    let address = hostcalls::get_property(vec!["upstream", "address"]);
    let has_upstream = address.ok().flatten().is_some_and(|text| !text.is_empty());
    reached_worker(number("response", "flags"), has_upstream)
}

/// An attribute of the current stream that is a number; 0 where it is absent.
fn number(of: &str, name: &str) -> u64 {
    let value = hostcalls::get_property(vec![of, name]);
    let value = value.ok().flatten().and_then(|bytes| bytes.try_into().ok());
    value.map(u64::from_le_bytes).unwrap_or_default()
}

/// Filter state that makes the access log a trace.
pub(super) fn log_signature(signature: Option<&[u8]>) {
    let Some(signature) = signature.and_then(|value| std::str::from_utf8(value).ok()) else {
        return;
    };
    // One that cannot be read would make the line an error of the whole trace.
    if let Ok(encoded) = Encoded::parse(signature.as_bytes()) {
        set_property("eldr_signature", signature);
        if let Some(tokens) = encoded.prompt_tokens() {
            set_property("eldr_prompt_tokens", &tokens.to_string());
        }
    }
}

/// Filter state for the access log: `%FILTER_STATE(wasm.eldr_outcome:PLAIN)%`.
pub(super) fn set_property(name: &str, value: &str) {
    let _ = hostcalls::set_property(vec![name], Some(value.as_bytes()));
}
