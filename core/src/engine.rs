//! What one decode step costs: continuous batching and the step-time model.
//!
//! A decode step reads from GPU memory every distinct expert that any request of the batch
//! activates, so a step is as slow as its batch is diverse. [`DecodeBatch`] holds who runs together
//! on one worker and counts those experts, exactly where tokens were recorded and by expectation where
//! only probabilities are known; [`StepModel`] turns the count into time. There is no clock here: the
//! mock engine sleeps for [`StepReport::duration`], a simulator adds it up.
//!
//! ```
//! use std::sync::Arc;
//! use eldr_core::engine::{DecodeBatch, ExpertIds, StepModel};
//! use eldr_core::signature::Geometry;
//!
//! // One layer of four experts, top-2, two recorded tokens per request.
//! let geometry = Geometry { layers: 1, experts: 4 };
//! let mut batch = DecodeBatch::new(StepModel::QWEN3_30B_A3B, geometry, 256);
//! batch.join("a", Arc::new(ExpertIds::new(geometry, 2, vec![0, 1, 0, 1])?), 0, 2);
//! batch.join("b", Arc::new(ExpertIds::new(geometry, 2, vec![1, 2, 2, 3])?), 0, 1);
//!
//! let report = batch.step();
//! assert_eq!((report.batch(), report.mean_experts), (2, 3.0)); // {0, 1, 2}
//! let report = batch.step();
//! assert_eq!((report.batch(), report.mean_experts), (1, 2.0)); // "b" left, {0, 1}
//! # Ok::<(), eldr_core::engine::ExpertIdsError>(())
//! ```

mod activation;
mod ids;
mod model;
mod ranks;
mod union;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use crate::signature::Geometry;
use union::Union;

pub use activation::{Activation, ActivationError};
pub use ids::{ExpertIds, ExpertIdsError};
pub use model::StepModel;
pub use ranks::{Ranks, RanksError};
pub use union::Experts;

/// Speculative decoding: a step verifies several drafted tokens of each request, which activate their experts together, and the
/// request gets on by those that are accepted. What drafting costs is in t0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Speculation {
    /// Tokens of each request that a step verifies, at least 1.
    pub verify: u32,
    /// How many of them are accepted, 1 to `verify`: the same in every step, as if drafts were equally good throughout.
    pub accept: u32,
}

impl Speculation {
    /// No speculation: one token per step.
    pub const NONE: Self = Speculation {
        verify: 1,
        accept: 1,
    };
}

/// The requests that decode together on one worker, and those queued behind them.
///
/// Continuous batching as engines do it: a request joins at the next step if the batch has room,
/// else it waits in arrival order; each step decodes one token of every member; a member leaves
/// after its last token or when it is cancelled. `K` names a request; the caller keeps keys apart.
///
/// A KV cache of limited size holds back who would not fit: a member takes room for its prompt and its whole answer when it joins,
/// so that nobody is ever preempted. Engines take room as they go, and preempt; they run fuller, and stall when they err.
#[derive(Clone, Debug)]
pub struct DecodeBatch<K> {
    model: StepModel,
    speculation: Speculation,
    batch_max: usize,
    kv_tokens_max: u64,
    running: Vec<Member<K>>,
    waiting: VecDeque<Member<K>>,
    union: Union,
    /// Tokens in the KV caches of the running members.
    kv_tokens: u64,
    /// What they will have at their ends.
    kv_reserved: u64,
    report: StepReport<K>,
}

#[derive(Clone, Debug)]
struct Member<K> {
    key: K,
    experts: Experts,
    context: u32,
    decoded: u32,
    tokens: u32,
}

impl<K> Member<K> {
    fn kv_tokens(&self) -> u64 {
        u64::from(self.context) + u64::from(self.decoded)
    }

    fn kv_tokens_at_end(&self) -> u64 {
        u64::from(self.context) + u64::from(self.tokens)
    }
}

/// What one step did.
#[derive(Clone, Debug, PartialEq)]
pub struct StepReport<K> {
    /// One entry per member of the batch, in the order in which they joined.
    pub decoded: Vec<Decoded<K>>,
    /// Distinct experts that the step's tokens activate, mean over layers; with [ranks](DecodeBatch::with_ranks) those on the busiest.
    pub mean_experts: f64,
    /// How long the step takes; zero if nothing was decoded.
    pub duration: Duration,
}

/// One token that a step decoded, the last one of those that it accepted.
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
            speculation: Speculation::NONE,
            batch_max: batch_max.max(1),
            kv_tokens_max: u64::MAX,
            running: Vec::new(),
            waiting: VecDeque::new(),
            union: Union::new(geometry),
            kv_tokens: 0,
            kv_reserved: 0,
            report: StepReport {
                decoded: Vec::new(),
                mean_experts: 0.0,
                duration: Duration::ZERO,
            },
        }
    }

    /// Gives the worker a KV cache of `tokens` tokens. A request that it could never hold runs alone.
    #[must_use]
    pub fn with_kv_tokens_max(mut self, tokens: u64) -> Self {
        self.kv_tokens_max = tokens;
        self
    }

    /// Spreads the worker's experts over ranks: U is then the experts on the busiest rank of each layer.
    #[must_use]
    pub fn with_ranks(mut self, ranks: Arc<Ranks>) -> Self {
        self.union.set_ranks(ranks);
        self
    }

    /// Verifies several tokens per step, of which `accept` count; both are taken as at least 1. To be called while the worker is idle.
    #[must_use]
    pub fn with_speculation(mut self, speculation: Speculation) -> Self {
        let verify = speculation.verify.max(1);
        self.speculation = Speculation {
            verify,
            accept: speculation.accept.clamp(1, verify),
        };
        self.union.set_tokens(verify);
        self
    }

    /// Queues a request that decodes `tokens` tokens (0 is taken as 1: engines emit at least one) after the `context` tokens of
    /// its prompt.
    ///
    /// Token `t` of a record activates its row `t`; past the last row it starts over. Experts of a model larger
    /// than this worker's are not counted where they do not fit.
    pub fn join(&mut self, key: K, experts: impl Into<Experts>, context: u32, tokens: u32) {
        self.waiting.push_back(Member {
            key,
            experts: experts.into(),
            context,
            decoded: 0,
            tokens: tokens.max(1),
        });
    }

    /// Removes a request, running or waiting; `false` if it is neither.
    pub fn cancel(&mut self, key: &K) -> bool {
        let before = self.running.len() + self.waiting.len();
        let Self {
            union,
            kv_tokens,
            kv_reserved,
            ..
        } = self;
        self.running.retain(|member| {
            let stays = member.key != *key;
            if !stays {
                union.leave(&member.experts);
                *kv_tokens -= member.kv_tokens();
                *kv_reserved -= member.kv_tokens_at_end();
            }
            stays
        });
        self.waiting.retain(|member| member.key != *key);
        self.running.len() + self.waiting.len() < before
    }

    /// Removes every request, running and waiting, as when the worker fails.
    pub fn clear(&mut self) {
        self.running
            .drain(..)
            .for_each(|member| self.union.leave(&member.experts));
        self.waiting.clear();
        self.kv_tokens = 0;
        self.kv_reserved = 0;
    }

    /// Lets waiting requests in, decodes one token of every member (or those accepted) and lets finished ones go.
    ///
    /// Nothing is allocated once the buffers have grown to the batch size.
    pub fn step(&mut self) -> &StepReport<K> {
        self.admit();
        let Speculation { verify, accept } = self.speculation;
        let recorded = self.running.iter().filter_map(|member| {
            let Experts::Recorded(ids) = &member.experts else {
                return None;
            };
            Some((ids.as_ref(), member.decoded))
        });
        let recorded = recorded
            .flat_map(|(ids, first)| (0..verify).map(move |n| (ids, first.saturating_add(n))));
        self.report.mean_experts = self.union.mean(recorded);
        self.report.duration = if self.running.is_empty() {
            Duration::ZERO
        } else {
            let tokens = self.running.len().saturating_mul(verify as usize);
            let (experts, batch) = (self.report.mean_experts, tokens);
            self.model.duration(experts, batch, self.kv_tokens)
        };
        let Self {
            union,
            kv_tokens,
            kv_reserved,
            report,
            ..
        } = self;
        report.decoded.clear();
        self.running.retain_mut(|member| {
            let before = member.decoded;
            member.decoded = before.saturating_add(accept).min(member.tokens);
            let token = member.decoded.saturating_sub(1);
            *kv_tokens += u64::from(member.decoded - before);
            let last = member.decoded >= member.tokens;
            if last {
                union.leave(&member.experts);
                *kv_tokens -= member.kv_tokens();
                *kv_reserved -= member.kv_tokens_at_end();
            }
            report.decoded.push(Decoded {
                key: member.key.clone(),
                token,
                last,
            });
            !last
        });
        &self.report
    }

    /// Who waits joins in order while the batch and the KV cache have room; nobody overtakes.
    fn admit(&mut self) {
        while self.running.len() < self.batch_max {
            let Some(next) = self.waiting.front() else {
                return;
            };
            let reserved = self.kv_reserved.saturating_add(next.kv_tokens_at_end());
            if reserved > self.kv_tokens_max && !self.running.is_empty() {
                return;
            }
            let Some(member) = self.waiting.pop_front() else {
                return;
            };
            self.union.enter(&member.experts);
            self.kv_tokens = self.kv_tokens.saturating_add(member.kv_tokens());
            self.kv_reserved = reserved;
            self.running.push(member);
        }
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

    /// Tokens in the KV caches of the requests in the batch.
    pub fn kv_tokens(&self) -> u64 {
        self.kv_tokens
    }

    /// Whether a step would decode nothing.
    pub fn is_idle(&self) -> bool {
        self.running.is_empty() && self.waiting.is_empty()
    }
}

#[cfg(test)]
mod tests;
