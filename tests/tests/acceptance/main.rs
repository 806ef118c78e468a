//! What the gateway promises, through a real Envoy and the freshly built filter.

mod bodies;
mod bypass;
mod configuration;
mod decisions;
mod disconnects;
mod eldr_sig;
mod fallbacks;
mod hygiene;
mod legs;
mod prefill;
mod reference;
mod release;
mod robustness;
mod streaming;
mod threads;
