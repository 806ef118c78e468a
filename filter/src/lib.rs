//! The gateway filter: runs the prefill leg, reads the expert signature of its answer, chooses the decode cluster
//! and sends the original request there.
//!
//! | module | one idea |
//! |---|---|
//! | [`config`] | plugin configuration: raw → valid, all mistakes at once |
//! | [`worker`] | a decode cluster with its weight |
//! | [`destination`] | decode by cluster, or by endpoint of one cluster |
//! | [`headers`] | what clients may not send and never see; what goes along to prefill |
//! | [`api`] | which of an engine's APIs a request speaks |
//! | [`body`] | edits of a JSON object that leave every other byte as it was |
//! | [`handover`] | how prefill hands KV blocks over to decode, engine by engine |
//! | [`prefill`] | where a prefill leg goes, and whether it is sent once more |
//! | [`release`] | KV blocks that no decode worker will fetch |
//! | [`request`] | life of one request: headers → body → prefill answer → decode leg |
//! | [`load`] | requests in flight, shared between threads, forgotten when a thread dies |
//! | [`running`] | the experts of requests in flight, shared between threads |
//! | [`tokens`] | how many tokens a request will have in a worker's KV cache |
//! | [`reports`], [`exposition`] | load that workers report, other gateways' included |
//! | [`health`] | decode workers that do not answer are left out for a while |
//! | [`blobs`] | centroid blobs in shared data |
//! | [`poll`] | who fetches blobs, when, and what an answer means |
//! | [`samples`] | signatures that are sampled for whoever refits the blob |
//! | [`ring`] | relay mode: what prefill answers said, until the decode request comes |
//! | [`plugin`] | a configuration with its blobs: chooses clusters |
//! | [`metrics`] | names of what is counted |
//! | `host` | the only module that knows `proxy_wasm` |
//!
//! Everything but `host` is tested natively. Nothing here may panic: a trap takes every stream of its thread along.
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

pub mod api;
pub mod blobs;
pub mod body;
pub mod config;
pub mod destination;
pub mod exposition;
pub mod handover;
pub mod headers;
pub mod health;
#[cfg(target_arch = "wasm32")]
mod host;
pub mod load;
pub mod meter;
pub mod metrics;
pub mod plugin;
pub mod poll;
pub mod prefill;
pub mod release;
pub mod reports;
pub mod request;
pub mod ring;
pub mod running;
pub mod samples;
pub mod shared;
pub mod tokens;
pub mod worker;
