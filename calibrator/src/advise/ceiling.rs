//! How much any policy could gain: what batches of B requests activate at most and at least.

use serde::Serialize;

use super::Question;
use super::judge::Judged;

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
    /// If every batch was of copies of one request: nobody can go below.
    pub alike: f64,
    /// By how many percent a step would be shorter then.
    pub percent: f64,
}

/// Of the evaluation's best load balancer.
pub(super) fn ceiling(question: Question<'_>, judged: &[Judged]) -> Ceiling {
    let balancers = judged.iter().filter(|judged| judged.balances);
    let best = balancers.min_by(|a, b| a.mean_ms.total_cmp(&b.mean_ms));
    let (batch, now) = best.map_or((0.0, 0.0), |best| (best.batch, best.experts));
    let geometry = question.requests.geometry();
    let experts = geometry.experts as f64;
    let (mut alike, mut top_k, mut seen) = (0.0, 0.0, 0u32);
    let replayed = question.workload.requests.iter();
    for (index, request) in replayed
        .filter(|request| request.signature.is_some())
        .enumerate()
    {
        let prefill = question.requests.prefill_of(index);
        let Some(tokens) = request.prompt_tokens.filter(|&tokens| tokens > 0) else {
            continue;
        };
        let rows = question.requests.layers().len() as f64;
        let sum: f64 = prefill.iter().map(|&count| f64::from(count)).sum();
        top_k += sum / f64::from(tokens) / rows;
        let decode = question
            .requests
            .decode_of(index)
            .zip(request.decode_tokens);
        let (counts, tokens) = decode.unwrap_or((prefill, tokens));
        let uses = |&count: &u16| {
            let p = (f64::from(count) / f64::from(tokens.max(1))).min(1.0);
            1.0 - (1.0 - p).powf(batch)
        };
        let layers = counts.len() as f64 / experts;
        alike += counts.iter().map(uses).sum::<f64>() / layers;
        seen += 1;
    }
    let seen = f64::from(seen.max(1));
    let (alike, top_k) = (alike / seen, top_k / seen);
    let step = question.cluster.step;
    let time = step.step_ms(now, batch.round() as usize, 0);
    Ceiling {
        experts: geometry.experts,
        top_k,
        batch,
        random: experts * (1.0 - (1.0 - top_k / experts).powf(batch)),
        now,
        alike,
        percent: 100.0 * step.b_ms * (now - alike).max(0.0) / time,
    }
}
