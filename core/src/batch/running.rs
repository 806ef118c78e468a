//! One worker's batch: sums that are exact, and what follows from them.

use wide::f32x4;

use super::exchange::Others;
use super::{Footprint, Measure, Request, fixed};
use crate::marginal::power;
use crate::similarity::{ROWS, dot, dot_each};
use crate::transform::MIN_NORM;

/// The requests that run on one worker.
#[derive(Debug, Clone, PartialEq)]
pub struct Batch {
    measure: Measure,
    experts: usize,
    /// One per selected (layer, expert), over all requests.
    pub(super) sums: Vec<u32>,
    /// [`Measure::Usage`]: probability that an expert is not used. [`Measure::Direction`]: the sums as they are.
    view: Vec<f32>,
    /// Of the view: its sum, or the square of its length.
    total: f64,
    /// Requests whose footprint is known.
    pub(super) known: u32,
    pub(super) unknown: u32,
    pub(super) kv_tokens: u64,
    /// What of all this others told us.
    pub(super) others: Others,
}

impl Batch {
    pub(super) fn new(measure: Measure, layers: usize, experts: usize) -> Self {
        let mut batch = Self {
            measure,
            experts,
            sums: vec![0; layers * experts],
            view: vec![0.0; layers * experts],
            total: 0.0,
            known: 0,
            unknown: 0,
            kv_tokens: 0,
            others: Others::default(),
        };
        batch.show();
        batch
    }

    pub(super) fn join(&mut self, footprint: &Footprint) {
        self.kv_tokens = self.kv_tokens.saturating_add(footprint.kv_tokens.into());
        if footprint.values.len() == self.sums.len() {
            self.known = self.known.saturating_add(1);
            self.change(&footprint.values, u32::wrapping_add);
        } else {
            self.unknown = self.unknown.saturating_add(1);
        }
    }

    pub(super) fn leave(&mut self, footprint: &Footprint) {
        self.kv_tokens = self.kv_tokens.saturating_sub(footprint.kv_tokens.into());
        if footprint.values.len() == self.sums.len() {
            self.known = self.known.saturating_sub(1);
            self.change(&footprint.values, u32::wrapping_sub);
        } else {
            self.unknown = self.unknown.saturating_sub(1);
        }
    }

    /// Changes the sums and what follows from them.
    ///
    /// Sums wrap around, because that can be undone whatever the order. Nobody gets there: it takes 65,537 requests
    /// that are all certain to use the same expert.
    fn change(&mut self, values: &[u16], by: impl Fn(u32, u32) -> u32) {
        for (sum, &value) in self.sums.iter_mut().zip(values) {
            *sum = by(*sum, value.into());
        }
        self.show();
    }

    /// Computes what follows from the sums, in a pass of its own, which compilers turn into vector instructions.
    pub(super) fn show(&mut self) {
        let shown = self.view.iter_mut().zip(&self.sums);
        match self.measure {
            Measure::Usage => shown.for_each(|(shown, &sum)| *shown = fixed::survival(sum)),
            Measure::Direction => shown.for_each(|(shown, &sum)| *shown = sum as f32),
        }
        self.total = match self.measure {
            Measure::Usage => sum(&self.view),
            Measure::Direction => dot(&self.view, &self.view).into(),
        };
    }

    /// Requests in the batch.
    pub fn requests(&self) -> u32 {
        self.known.saturating_add(self.unknown)
    }

    /// How many of them have a footprint.
    pub fn known(&self) -> u32 {
        self.known
    }

    /// Tokens of its requests in the KV cache.
    pub fn kv_tokens(&self) -> u64 {
        self.kv_tokens
    }

    /// Distinct experts that a step of the batch is expected to use, mean over layers. Requests without a
    /// footprint count as if they used all experts alike and as many as `like` does.
    pub fn expected_experts(&self, like: &Request) -> f64 {
        let experts = self.experts as f64;
        if !self.compares(like) || self.measure != Measure::Usage {
            return experts * (1.0 - power(1.0 - like.mean, self.requests()));
        }
        self.experts(like.mean)
    }

    /// The same where a request without a footprint uses such a share of the experts. Only of [`Measure::Usage`].
    pub(crate) fn experts(&self, usage: f64) -> f64 {
        let unused = self.total / self.view.len().max(1) as f64;
        self.experts as f64 * (1.0 - unused * power(1.0 - usage, self.unknown))
    }

    /// Distinct experts that the request is expected to add to a step, mean over layers: ⟨Π(1 − p), p_request⟩ / layers.
    pub fn extra_experts(&self, request: &Request) -> f64 {
        self.extra_by(request, self.dot(request))
    }

    /// The same, given the dot product.
    pub(super) fn extra_by(&self, request: &Request, dot: f32) -> f64 {
        let experts = self.experts as f64;
        if !self.compares(request) || self.measure != Measure::Usage {
            return experts * request.mean * power(1.0 - request.mean, self.requests());
        }
        let mean = f64::from(dot) / self.view.len().max(1) as f64;
        experts * mean * power(1.0 - request.mean, self.unknown)
    }

    /// Cosine of the request to the mean of the batch's requests; `None` where none of them is known.
    pub fn cosine(&self, request: &Request) -> Option<f32> {
        self.cosine_by(request, self.dot(request))
    }

    /// The same, given the dot product.
    pub(super) fn cosine_by(&self, request: &Request, dot: f32) -> Option<f32> {
        let may = self.known > 0 && self.compares(request) && self.measure == Measure::Direction;
        let length = self.total.sqrt() as f32;
        (may && length >= MIN_NORM).then_some(dot / length)
    }

    fn dot(&self, request: &Request) -> f32 {
        let [dot, ..] = dot_each(&request.vector, [&self.view; ROWS]);
        dot
    }

    pub(super) fn view(&self) -> &[f32] {
        &self.view
    }

    /// Whether both are of the same measure and shape.
    fn compares(&self, request: &Request) -> bool {
        self.measure == request.measure && request.vector.len() == self.view.len()
    }
}

/// Sum of the values, in an order that is fixed.
pub(super) fn sum(values: &[f32]) -> f64 {
    let (blocks, rest) = values.as_chunks::<8>();
    let mut sums = [f32x4::ZERO; 2];
    for block in blocks {
        for (sum, &quad) in sums.iter_mut().zip(block.as_chunks::<4>().0) {
            *sum += f32x4::from(quad);
        }
    }
    let [low, high] = sums;
    let lanes = (low + high).to_array();
    lanes
        .iter()
        .chain(rest)
        .map(|&value| f64::from(value))
        .sum()
}
