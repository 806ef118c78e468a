//! Acceptance tests: the compiled filter in a real Envoy.
