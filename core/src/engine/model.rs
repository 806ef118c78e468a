//! How long a decode step takes.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Linear model of a decode step: t = t0 + b·U + c·B milliseconds.
///
/// U is the number of distinct experts that the step activates per layer (mean over layers), B the
/// number of requests in the batch.
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
}

impl StepModel {
    /// Qwen3-30B-A3B: 48 layers, 128 experts, top-8 (fit R² 0.92).
    pub const QWEN3_30B_A3B: Self = StepModel {
        t0_ms: 5.84,
        b_ms: 0.144,
        c_ms: 0.026,
    };
    /// GPT-OSS-120B: 36 layers, 128 experts, top-4 (fit R² 0.99).
    pub const GPT_OSS_120B: Self = StepModel {
        t0_ms: 11.9,
        b_ms: 0.207,
        c_ms: 0.090,
    };
    /// Gemma-4-26B-A4B: 30 layers, 128 experts, top-8 (fit R² 0.95).
    pub const GEMMA_4_26B_A4B: Self = StepModel {
        t0_ms: 2.80,
        b_ms: 0.157,
        c_ms: 0.021,
    };

    /// Milliseconds of a step with `mean_experts` distinct experts per layer and `batch` requests.
    pub fn step_ms(&self, mean_experts: f64, batch: usize) -> f64 {
        self.t0_ms + self.b_ms * mean_experts + self.c_ms * batch as f64
    }

    /// The same as a duration; a negative or unrepresentable time is zero.
    pub fn duration(&self, mean_experts: f64, batch: usize) -> Duration {
        Duration::try_from_secs_f64(self.step_ms(mean_experts, batch) / 1e3).unwrap_or_default()
    }
}
