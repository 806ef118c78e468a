//! Expert-locality routing for mixture-of-experts serving, without I/O.
//!
//! A request's *expert signature* says how many of its prompt tokens the gating network sent to each
//! (layer, expert). This crate turns the bytes of a signature header into the decode worker that
//! should serve the request:
//!
//! | step | module |
//! |---|---|
//! | header bytes → counts of the selected layers | [`signature`] |
//! | counts → weighted unit vector → cosine similarity to every region | [`transform`], [`similarity`] |
//! | similarities and worker loads → worker, with a [`Reason`] | [`decide`] |
//! | requests that run on each worker → what one more costs there | [`batch`], [`marginal`] |
//! | times of requests that ended → what a decode step costs | [`learn`] |
//! | all of it in one call | [`route`] |
//!
//! [`blob`] is the file in which a calibration travels, [`prefix_hash`] chooses the prefill worker by the prompt's
//! beginning, [`rollout`] divides requests between two policies, [`engine`] models decode steps, [`prefix_cache`] keeps
//! the signatures of cached prompt prefixes. The same code runs natively and as WebAssembly and gives the same bits on
//! both.
//!
//! The crate knows no clock, no randomness and no global state: time and entropy are arguments.
//! Nothing here panics on any input; a decision cannot fail, it carries the [`Reason`] it was made for.
#![cfg_attr(
    not(test),
    deny(
        clippy::panic,
        clippy::unwrap_used,
        clippy::expect_used,
        clippy::indexing_slicing,
        clippy::unreachable,
    )
)]

pub mod batch;
pub mod blob;
pub mod decide;
pub mod engine;
pub mod learn;
pub mod marginal;
pub mod outcome;
pub mod prefix_cache;
pub mod prefix_hash;
pub mod rollout;
pub mod route;
pub mod signature;
pub mod similarity;
pub mod transform;

pub use decide::{Decision, Policy, Reason};
pub use outcome::Outcome;
pub use signature::{Geometry, Signature};
