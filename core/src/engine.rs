//! What one decode step costs: continuous batching and the step-time model.
//!
//! A decode step reads from GPU memory every distinct expert that any request of the batch
//! activates, so a step is as slow as its batch is diverse. [`DecodeBatch`] holds who runs together
//! on one worker and counts those experts exactly; [`StepModel`] turns the count into time. There
//! is no clock here: the mock engine sleeps for [`StepReport::duration`], a simulator adds it up.
//!
//! ```
//! use std::sync::Arc;
//! use eldr_core::engine::{DecodeBatch, ExpertIds, StepModel};
//! use eldr_core::signature::Geometry;
//!
//! // One layer of four experts, top-2, two recorded tokens per request.
//! let geometry = Geometry { layers: 1, experts: 4 };
//! let mut batch = DecodeBatch::new(StepModel::QWEN3_30B_A3B, geometry, 256);
//! batch.join("a", Arc::new(ExpertIds::new(geometry, 2, vec![0, 1, 0, 1])?), 2);
//! batch.join("b", Arc::new(ExpertIds::new(geometry, 2, vec![1, 2, 2, 3])?), 1);
//!
//! let report = batch.step();
//! assert_eq!((report.batch(), report.mean_experts), (2, 3.0)); // {0, 1, 2}
//! let report = batch.step();
//! assert_eq!((report.batch(), report.mean_experts), (1, 2.0)); // "b" left, {0, 1}
//! # Ok::<(), eldr_core::engine::ExpertIdsError>(())
//! ```

mod ids;
mod model;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use crate::signature::Geometry;

pub use ids::{ExpertIds, ExpertIdsError};
pub use model::StepModel;

/// The requests that decode together on one worker, and those queued behind them.
///
/// Continuous batching as engines do it: a request joins at the next step if the batch has room,
/// else it waits in arrival order; each step decodes one token of every member; a member leaves
/// after its last token or when it is cancelled. `K` names a request; the caller keeps keys apart.
#[derive(Clone, Debug)]
pub struct DecodeBatch<K> {
    model: StepModel,
    geometry: Geometry,
    batch_max: usize,
    running: Vec<Member<K>>,
    waiting: VecDeque<Member<K>>,
    /// One bit per expert, `words` words per layer; cleared and refilled by every step.
    active: Vec<u64>,
    report: StepReport<K>,
}

#[derive(Clone, Debug)]
struct Member<K> {
    key: K,
    ids: Arc<ExpertIds>,
    decoded: u32,
    tokens: u32,
}

/// What one step did.
#[derive(Clone, Debug, PartialEq)]
pub struct StepReport<K> {
    /// One entry per member of the batch, in the order in which they joined.
    pub decoded: Vec<Decoded<K>>,
    /// Distinct experts that the step's tokens activate, mean over layers.
    pub mean_experts: f64,
    /// How long the step takes; zero if nothing was decoded.
    pub duration: Duration,
}

/// One token that a step decoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Decoded<K> {
    /// Whose token it is.
    pub key: K,
    /// Which one, counted from 0.
    pub token: u32,
    /// Whether it was the last: the request has left the batch.
    pub last: bool,
}

impl<K> StepReport<K> {
    /// How many requests the step decoded a token of.
    pub fn batch(&self) -> usize {
        self.decoded.len()
    }

    /// The requests that this step completed.
    pub fn finished(&self) -> impl Iterator<Item = &K> {
        self.decoded
            .iter()
            .filter(|decoded| decoded.last)
            .map(|decoded| &decoded.key)
    }
}

impl<K: Clone + PartialEq> DecodeBatch<K> {
    /// An idle worker that decodes at most `batch_max` requests at a time (0 is taken as 1).
    pub fn new(model: StepModel, geometry: Geometry, batch_max: usize) -> Self {
        DecodeBatch {
            model,
            geometry,
            batch_max: batch_max.max(1),
            running: Vec::new(),
            waiting: VecDeque::new(),
            active: vec![0; geometry.layers.saturating_mul(words(geometry))],
            report: StepReport {
                decoded: Vec::new(),
                mean_experts: 0.0,
                duration: Duration::ZERO,
            },
        }
    }

    /// Queues a request that decodes `tokens` tokens (0 is taken as 1: engines emit at least one).
    ///
    /// Token `t` activates row `t` of `ids`; past the last row it starts over. Ids of a model larger
    /// than this worker's are not counted where they do not fit.
    pub fn join(&mut self, key: K, ids: Arc<ExpertIds>, tokens: u32) {
        self.waiting.push_back(Member {
            key,
            ids,
            decoded: 0,
            tokens: tokens.max(1),
        });
    }

    /// Removes a request, running or waiting; `false` if it is neither.
    pub fn cancel(&mut self, key: &K) -> bool {
        let before = self.running.len() + self.waiting.len();
        self.running.retain(|member| member.key != *key);
        self.waiting.retain(|member| member.key != *key);
        self.running.len() + self.waiting.len() < before
    }

    /// Lets waiting requests in, decodes one token of every member and lets finished ones go.
    ///
    /// Nothing is allocated once the buffers have grown to the batch size.
    pub fn step(&mut self) -> &StepReport<K> {
        while self.running.len() < self.batch_max {
            let Some(member) = self.waiting.pop_front() else {
                break;
            };
            self.running.push(member);
        }
        self.report.mean_experts = self.mean_experts();
        self.report.duration = if self.running.is_empty() {
            Duration::ZERO
        } else {
            self.model
                .duration(self.report.mean_experts, self.running.len())
        };
        let decoded = &mut self.report.decoded;
        decoded.clear();
        self.running.retain_mut(|member| {
            let token = member.decoded;
            member.decoded = token.saturating_add(1);
            let last = member.decoded >= member.tokens;
            decoded.push(Decoded {
                key: member.key.clone(),
                token,
                last,
            });
            !last
        });
        &self.report
    }

    /// What the last step did; before the first, a step that decoded nothing.
    pub fn last_step(&self) -> &StepReport<K> {
        &self.report
    }

    /// Requests in the batch.
    pub fn running(&self) -> usize {
        self.running.len()
    }

    /// Requests that wait for room, or for the next step.
    pub fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Whether a step would decode nothing.
    pub fn is_idle(&self) -> bool {
        self.running.is_empty() && self.waiting.is_empty()
    }

    /// Distinct experts over the members' current tokens, mean over the model's layers.
    fn mean_experts(&mut self) -> f64 {
        self.active.fill(0);
        let (words, experts) = (words(self.geometry), self.geometry.experts);
        for member in &self.running {
            let rows = member.ids.token(member.decoded);
            for (layer, row) in self.active.chunks_exact_mut(words).zip(rows) {
                for &expert in row.iter().filter(|&&expert| usize::from(expert) < experts) {
                    if let Some(word) = layer.get_mut(usize::from(expert) / 64) {
                        *word |= 1 << (expert % 64);
                    }
                }
            }
        }
        let distinct: u32 = self.active.iter().map(|word| word.count_ones()).sum();
        f64::from(distinct) / self.geometry.layers.max(1) as f64
    }
}

/// Words of a layer's bitset; at least 1, so that a layer is never an empty chunk.
fn words(geometry: Geometry) -> usize {
    geometry.experts.div_ceil(64).max(1)
}

#[cfg(test)]
mod tests;
