//! What the gateway promises, through a real Envoy and the freshly built filter.

mod blobs;
mod bodies;
mod bypass;
mod configuration;
mod decisions;
mod disconnects;
mod eldr_sig;
mod fallbacks;
mod faults;
mod health;
mod hygiene;
mod legs;
mod matrix;
mod observability;
mod prefill;
mod protocols;
mod reference;
mod relay;
mod release;
mod robustness;
mod storm;
mod streaming;
mod threads;
mod trap;
mod updates;
