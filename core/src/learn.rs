//! What a decode step costs, learned from how fast requests decoded.
//!
//! Policies that look at running batches go by a [`StepModel`], which is an operator's statement about engines. A [`Learner`] begins
//! with it and corrects it: of every request that ends it is told the time per step, and it knows what ran on the worker meanwhile
//! ([`Occupancy`]). Least squares over the last requests then tell what an expert and what a request cost, and the prior decides
//! where times do not: a load on which experts and requests only grow together says nothing of the one without the other.
//!
//! That keeps two things harmless. A cost per request that was stated too low would crowd workers: their times say so. And signatures
//! that say nothing of the experts that requests use predict no time: an expert is then learned to cost nothing, and what is left of
//! the policy is balance of load.
//!
//! ```
//! use eldr_core::batch::{Batches, Footprint, Measure};
//! use eldr_core::decide::WorkerIndex;
//! use eldr_core::engine::StepModel;
//! use eldr_core::learn::Learner;
//! use eldr_core::signature::Geometry;
//!
//! let geometry = Geometry { layers: 1, experts: 64 };
//! let mut batches = Batches::new(Measure::Usage, geometry, vec![0], 1)?;
//! let (worker, request) = (WorkerIndex(0), Footprint::unknown(0));
//! let mut learner = Learner::new(StepModel::QWEN3_30B_A3B, 1);
//!
//! // A request joins at 0 ms and leaves at 500 ms, when its steps took 12 ms.
//! let stay = learner.begin(worker, None, 0.0);
//! batches.join(worker, &request);
//! learner.runs(worker, &batches, 0.0);
//! learner.end(worker, stay, 12.0, 500.0);
//! batches.leave(worker, &request);
//! learner.runs(worker, &batches, 500.0);
//! assert_eq!(learner.model().step_ms(0.0, 1, 0), 12.0);
//! # Ok::<(), eldr_core::transform::TransformError>(())
//! ```

mod moments;
mod occupancy;

use crate::batch::{Batches, Request};
use crate::decide::WorkerIndex;
use crate::engine::StepModel;
use moments::Moments;

pub use occupancy::{Met, Occupancy};

/// Times are believed to be off by so much of their mean, at least.
const NOISE: f64 = 0.02;
/// A cost per request that is stated as nothing is believed to within so much of the cost of an expert.
const OF_AN_EXPERT: f64 = 0.1;
/// A time over so many times the mean counts as just that: a stall says nothing of experts.
const STALL: f64 = 3.0;
/// A step that is said to have taken longer than this, milliseconds, is no step.
const LONGEST_MS: f64 = 600_000.0;
/// Requests after which there is a mean to go by.
const FEW: f64 = 8.0;

/// Learns the [`StepModel`] of the workers of a model, which are taken to be alike.
///
/// Learned are t0, b and c, none of them below 0; the cost of tokens in KV caches stays as stated.
#[derive(Debug, Clone, PartialEq)]
pub struct Learner {
    prior: StepModel,
    model: StepModel,
    moments: Moments,
    workers: Vec<Occupancy>,
    /// Share of the experts that a request uses, of those that it is not known of.
    usage: f64,
}

/// When a request came to its worker.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Stay {
    begun: Occupancy,
}

impl Learner {
    /// Begins with what is stated, on so many idle workers.
    pub fn new(prior: StepModel, workers: usize) -> Self {
        Self {
            prior,
            model: prior,
            moments: Moments::default(),
            workers: vec![Occupancy::default(); workers],
            usage: 0.0,
        }
    }

    /// The step model as far as it is known.
    pub fn model(&self) -> StepModel {
        self.model
    }

    /// A request is about to join the worker's batch, at `now_ms`.
    pub fn begin(&mut self, worker: WorkerIndex, request: Option<&Request>, now_ms: f64) -> Stay {
        if let Some(request) = request {
            self.usage = request.usage();
        }
        let begun = self.workers.get(worker.0).copied();
        Stay {
            begun: begun.unwrap_or_default().at(now_ms),
        }
    }

    /// From `now_ms` on the worker runs what `batches` says: to be told whenever a request has joined or left.
    pub fn runs(&mut self, worker: WorkerIndex, batches: &Batches, now_ms: f64) {
        let batch = batches.workers().get(worker.0);
        if let (Some(occupancy), Some(batch)) = (self.workers.get_mut(worker.0), batch) {
            let met = Met {
                experts: batch.experts(self.usage),
                requests: batch.requests().into(),
                kv_tokens: batch.kv_tokens() as f64,
            };
            occupancy.set(met, now_ms);
        }
    }

    /// A request ends at `now_ms`, whose decode steps took `step_ms` in the mean: to be told before it leaves the batch.
    pub fn end(&mut self, worker: WorkerIndex, stay: Stay, step_ms: f64, now_ms: f64) {
        let met = self.workers.get(worker.0);
        if let Some(met) = met.and_then(|now| now.mean_since(&stay.begun, now_ms)) {
            self.learn(met, step_ms);
        }
    }

    /// A request met so much, and its steps took so long.
    fn learn(&mut self, met: Met, step_ms: f64) {
        if !(step_ms > 0.0 && step_ms <= LONGEST_MS) {
            return;
        }
        let kv_ms = self.prior.kv_ms_per_1k * met.kv_tokens / 1e3;
        let mut rest = step_ms - kv_ms;
        if self.moments.weight() >= FEW {
            rest = rest.min(STALL * self.moments.mean_ms().max(0.0));
        }
        self.moments.add([met.experts, met.requests], rest);
        self.model = self.fitted();
    }

    /// Least squares with the prior as one more witness.
    fn fitted(&self) -> StepModel {
        let StepModel { b_ms, c_ms, .. } = self.prior;
        let noise = (NOISE * self.moments.mean_ms())
            .powi(2)
            .max(self.moments.residual([self.model.b_ms, self.model.c_ms]))
            .max(f64::MIN_POSITIVE);
        // Either cost is believed to within itself.
        let believed = [b_ms, c_ms.max(OF_AN_EXPERT * b_ms)].map(|ms| noise / (ms * ms).max(1e-12));
        let [b_ms, c_ms] = self.moments.costs([b_ms, c_ms], believed);
        let t0_ms = self.moments.rest_ms([b_ms, c_ms]).max(0.0);
        StepModel {
            t0_ms,
            b_ms,
            c_ms,
            ..self.prior
        }
    }
}

#[cfg(test)]
mod tests;
