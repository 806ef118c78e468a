//! What placing a request on a worker costs those who decode there.

use crate::batch::{Batch, Request};
use crate::engine::StepModel;

/// Largest [`Objective::exponent`]: step times to this power stay far from overflow.
pub const MAX_EXPONENT: u32 = 16;

/// What is to be small: the sum over all running requests of T^q, where T is the time of their worker's decode step.
///
/// T = t0 + b·U + c·B + kv·(tokens in the KV cache), with U the expected distinct experts per layer and B the requests of the batch. With q = 1 that is
/// the mean time per token, a higher q weighs slow workers more and so serves the tail. The coefficients are the
/// operator's statement about the engine: an error of a factor of two in t0 or b hurts little, c taken for 0 crowds workers.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Objective {
    /// Time of a step.
    pub step: StepModel,
    /// q, 1 to [`MAX_EXPONENT`]. A whole number, so that native code and WebAssembly agree on every bit.
    pub exponent: u32,
}

impl Default for Objective {
    fn default() -> Self {
        Self {
            step: StepModel::QWEN3_30B_A3B,
            exponent: 1,
        }
    }
}

impl Objective {
    /// By how much the request would raise the objective on a worker with this batch: (B+1)·T'^q − B·T^q, in milliseconds to the q.
    pub fn growth(&self, batch: &Batch, request: &Request) -> f64 {
        self.growth_by(batch, request, batch.extra_experts(request))
    }

    /// The same, given the expected extra experts.
    pub(crate) fn growth_by(&self, batch: &Batch, request: &Request, extra: f64) -> f64 {
        let (requests, tokens) = (batch.requests(), batch.kv_tokens());
        let experts = batch.expected_experts(request);
        let before = self.step.step_ms(experts, requests as usize, tokens);
        let after = self.step.step_ms(
            experts + extra,
            (requests as usize).saturating_add(1),
            tokens.saturating_add(request.kv_tokens().into()),
        );
        let requests = f64::from(requests);
        let exponent = self.exponent.clamp(1, MAX_EXPONENT);
        (requests + 1.0) * power(after, exponent) - requests * power(before, exponent)
    }
}

/// x to the n, by multiplications alone: the same bits everywhere.
pub(crate) fn power(mut x: f64, mut n: u32) -> f64 {
    let mut product = 1.0;
    while n > 0 {
        if n & 1 == 1 {
            product *= x;
        }
        x *= x;
        n >>= 1;
    }
    product
}
