//! How much any policy could gain: what batches of B requests activate at most and at least.
//!
//! A batch whose members use an expert with probabilities p leaves it alone with Π(1 − p), which is at most the mean of (1 − p)^B over
//! its members. So no mix of requests activates fewer experts than, in the mean, batches of copies of each would: that is the
//! ceiling, whoever assigns. Shorter steps also mean that fewer requests run at a time (Little's law), which is taken into account.

use serde::Serialize;

use super::Question;
use super::judge::Judged;

/// Most requests that are looked at; more change the mean by less than what the step coefficients are unsure of.
const REQUESTS_MAX: usize = 256;
/// Rounds until batch size and step time agree: errors shrink by more than half in each.
const ROUNDS: usize = 16;

/// Distinct experts per layer of a decode step, and what they cost.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Ceiling {
    /// Experts per layer, E.
    pub experts: usize,
    /// Experts per token, k, as the trace has them.
    pub top_k: f64,
    /// Requests per decode step, B, under the best load balancer.
    pub batch: f64,
    /// If every token chose its experts at random: E·(1 − (1 − k/E)^B).
    pub random: f64,
    /// Simulated, under the best load balancer.
    pub now: f64,
    /// If every batch was of B copies of one request.
    pub alike: f64,
    /// By how many percent a step would be shorter then, at the same requests per second.
    pub percent: f64,
}

/// Of the evaluation's best load balancer.
pub(super) fn ceiling(question: Question<'_>, judged: &[Judged]) -> Ceiling {
    let balancers = judged.iter().filter(|judged| judged.balances);
    let best = balancers.min_by(|a, b| a.mean_ms.total_cmp(&b.mean_ms));
    let (batch, now) = best.map_or((0.0, 0.0), |best| (best.batch, best.experts));
    let usage = Usage::new(question);
    let experts = question.requests.geometry().experts;
    let step = question.cluster.step;
    let time = |batch: f64, used: f64| step.t0_ms + step.b_ms * used + step.c_ms * batch;
    let before = time(batch, now);
    let mut after = before;
    for _ in 0..ROUNDS {
        let batch = batch * after / before;
        after = time(batch, usage.alike(batch));
    }
    let random = 1.0 - (1.0 - usage.top_k / experts as f64).powf(batch);
    Ceiling {
        experts,
        top_k: usage.top_k,
        batch,
        random: experts as f64 * random,
        now,
        alike: usage.alike(batch),
        percent: (100.0 * (1.0 - after / before)).max(0.0),
    }
}

/// Which share of their tokens activates each expert.
struct Usage {
    /// By request, over all layers.
    shares: Vec<Vec<f64>>,
    layers: f64,
    top_k: f64,
}

impl Usage {
    fn new(question: Question<'_>) -> Self {
        let replayed = question.workload.requests.iter();
        let replayed = replayed.filter(|request| request.signature.is_some());
        let every = question.requests.len().div_ceil(REQUESTS_MAX);
        let mut shares = Vec::new();
        for (index, request) in replayed.enumerate().step_by(every.max(1)) {
            let decode = question
                .requests
                .decode_of(index)
                .zip(request.decode_tokens);
            let prefill = request.prompt_tokens;
            let prefill = prefill.map(|tokens| (question.requests.prefill_of(index), tokens));
            let Some((counts, tokens @ 1..)) = decode.or(prefill) else {
                continue;
            };
            let share = |&count: &u16| (f64::from(count) / f64::from(tokens)).min(1.0);
            shares.push(counts.iter().map(share).collect());
        }
        let first: Option<&Vec<f64>> = shares.first();
        let layers = first.map_or(1, |first| {
            first.len() / question.requests.geometry().experts
        });
        let layers = layers.max(1) as f64;
        let total: f64 = shares.iter().flatten().sum();
        Usage {
            top_k: total / layers / shares.len().max(1) as f64,
            shares,
            layers,
        }
    }

    /// Distinct experts per layer of batches of copies of one request.
    fn alike(&self, batch: f64) -> f64 {
        let used = self.shares.iter().flatten();
        let used: f64 = used.map(|share| 1.0 - (1.0 - share).powf(batch)).sum();
        used / self.layers / self.shares.len().max(1) as f64
    }
}
