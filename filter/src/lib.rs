//! The proxy-wasm filter that routes decode requests by expert signature inside Envoy.
