//! How long a decode step takes.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Linear model of a decode step: t = t0 + b·U + c·B + d·KV milliseconds.
///
/// U is the number of distinct experts that the step activates per layer (mean over layers), on the busiest rank with expert
/// parallelism; B the number of requests in the batch, or of the tokens that speculative decoding verifies; KV the tokens in their
/// KV caches.
///
/// The named coefficients are least-squares fits of ours to the decode times that the ELDR paper
/// (arXiv 2607.00466) publishes for one MI300X per worker, with U = E·(1−(1−k/E)^B) and B by
/// Little's law. **They are an assumption, not a measurement**: that table does not tell b from c,
/// and a lower b shrinks what locality gains in proportion (at the memory-bandwidth floor of 0.085
/// ms per expert the gain is about half). Compare policies under several b before believing one.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StepModel {
    /// Cost of a step whatever its batch: dense weights, kernel launches.
    pub t0_ms: f64,
    /// Cost of each distinct expert per layer.
    pub b_ms: f64,
    /// Cost of each request in the batch.
    pub c_ms: f64,
    /// Cost of a thousand tokens in the batch's KV caches, which every step reads. 0 in the named coefficients: they were
    /// fitted to requests of at most 1,536 tokens, whose KV reads are in `c_ms`. At the bandwidth of one MI300X it is 0.019
    /// (Qwen3-30B-A3B), 0.014 (GPT-OSS-120B) and 0.043 (Gemma-4-26B-A4B).
    #[serde(default)]
    pub kv_ms_per_1k: f64,
}

impl StepModel {
    /// Qwen3-30B-A3B: 48 layers, 128 experts, top-8 (fit R² 0.92).
    pub const QWEN3_30B_A3B: Self = StepModel {
        t0_ms: 5.84,
        b_ms: 0.144,
        c_ms: 0.026,
        kv_ms_per_1k: 0.0,
    };
    /// GPT-OSS-120B: 36 layers, 128 experts, top-4 (fit R² 0.99).
    pub const GPT_OSS_120B: Self = StepModel {
        t0_ms: 11.9,
        b_ms: 0.207,
        c_ms: 0.090,
        kv_ms_per_1k: 0.0,
    };
    /// Gemma-4-26B-A4B: 30 layers, 128 experts, top-8 (fit R² 0.95).
    pub const GEMMA_4_26B_A4B: Self = StepModel {
        t0_ms: 2.80,
        b_ms: 0.157,
        c_ms: 0.021,
        kv_ms_per_1k: 0.0,
    };

    /// Milliseconds of a step with `mean_experts` distinct experts per layer and `batch` requests that have `kv_tokens` tokens in
    /// their KV caches together.
    pub fn step_ms(&self, mean_experts: f64, batch: usize, kv_tokens: u64) -> f64 {
        self.t0_ms
            + self.b_ms * mean_experts
            + self.c_ms * batch as f64
            + self.kv_ms_per_1k * kv_tokens as f64 / 1e3
    }

    /// The same as a duration; a negative or unrepresentable time is zero.
    pub fn duration(&self, mean_experts: f64, batch: usize, kv_tokens: u64) -> Duration {
        let ms = self.step_ms(mean_experts, batch, kv_tokens);
        Duration::try_from_secs_f64(ms / 1e3).unwrap_or_default()
    }
}
