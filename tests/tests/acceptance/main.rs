//! What the gateway promises, through a real Envoy and the freshly built filter.

mod bodies;
mod bypass;
mod configuration;
mod decisions;
mod disconnects;
mod fallbacks;
mod hygiene;
mod legs;
mod reference;
mod robustness;
mod streaming;
mod threads;
