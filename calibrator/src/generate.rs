//! Gate statistics of full-size models: requests that nobody recorded, with the structure that was published.
//!
//! Which experts a request uses is drawn by layer. An expert's logit is a sum: how popular it is at all (`popularity.rs`, from real
//! counts of Qwen3-30B-A3B), what the request's domain prefers, what the cluster of requests inside the domain prefers, what the request
//! prefers by itself, and what only one of its phases does. The logits of a layer are shifted so that the probabilities sum to top-k.
//! Prefill counts are drawn from the prefill's probabilities, one binomial per expert; the decode's probabilities are what a batch
//! activates.
//!
//! How strong domain and phase are is not chosen but [solved for](Strengths::solve): same-domain batches must activate as many fewer
//! experts, and distances between signatures must correlate with distances between decodes as much, as the ELDR paper (arXiv 2607.00466)
//! says. The strength of clusters is free.
//!
//! What this leaves out: one token's experts are independent of the next one's, and popularity is that of one model for all.

mod draw;
mod measure;
mod popularity;
mod strengths;
mod workload;

use eldr_core::signature::Geometry;

pub use draw::{Gates, Generator, PROMPT_TOKENS_MEAN};
pub use measure::{fewer_experts_in_domain, phase_correlation};
pub use strengths::{CLUSTER, CLUSTERS, Strengths, Targets};
pub use workload::{DECODE_TOKENS, Kind, record, requests, workload};

/// A mixture-of-experts model as far as its gates matter.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Shape {
    /// Name, as published.
    pub name: &'static str,
    /// MoE layers and experts per layer.
    pub geometry: Geometry,
    /// Experts per token and layer.
    pub top_k: usize,
    /// Published correlation between prefill and decode.
    pub phase_correlation: f64,
    /// Bytes of one expert of one layer, MB.
    pub expert_mb: f64,
    /// Keys and values of one token, KiB.
    pub kv_kib: f64,
}

impl Shape {
    /// Qwen3-30B-A3B.
    pub const QWEN3_30B_A3B: Self = Shape {
        name: "Qwen3-30B-A3B",
        geometry: Geometry {
            layers: 48,
            experts: 128,
        },
        top_k: 8,
        phase_correlation: 0.90,
        expert_mb: 9.44,
        kv_kib: 96.0,
    };
    /// GPT-OSS-120B.
    pub const GPT_OSS_120B: Self = Shape {
        name: "GPT-OSS-120B",
        geometry: Geometry {
            layers: 36,
            experts: 128,
        },
        top_k: 4,
        phase_correlation: 0.70,
        expert_mb: 13.24,
        kv_kib: 72.0,
    };
    /// Gemma-4-26B-A4B.
    pub const GEMMA_4_26B_A4B: Self = Shape {
        name: "Gemma-4-26B-A4B",
        geometry: Geometry {
            layers: 30,
            experts: 128,
        },
        top_k: 8,
        phase_correlation: 0.92,
        expert_mb: 11.89,
        kv_kib: 220.0,
    };
    /// The models of the paper's main figures.
    pub const ALL: [Self; 3] = [
        Self::QWEN3_30B_A3B,
        Self::GPT_OSS_120B,
        Self::GEMMA_4_26B_A4B,
    ];
}

#[cfg(test)]
mod tests;
