//! What a run is judged by.

use std::collections::BTreeMap;
use std::time::Duration;

use eldr_core::decide::Reason;
use serde::Serialize;

use crate::fit::quantile;

/// Mean, median and tail of a time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Spread {
    /// Mean.
    pub mean: f64,
    /// Median.
    pub p50: f64,
    /// 99th percentile.
    pub p99: f64,
}

impl Spread {
    fn of(mut values: Vec<f64>) -> Self {
        values.sort_by(f64::total_cmp);
        Spread {
            mean: values.iter().sum::<f64>() / values.len().max(1) as f64,
            p50: quantile(&values, 0.5),
            p99: quantile(&values, 0.99),
        }
    }
}

/// How one policy did in one run.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Outcome {
    /// Requests measured.
    pub requests: usize,
    /// Time per output token after the first, ms: of each request its mean.
    pub tpot_ms: Spread,
    /// Time from arrival to first token, ms.
    pub ttft_ms: Spread,
    /// Distinct experts per layer that a decode step activates, mean over steps.
    pub experts_per_step: f64,
    /// Requests per decode step, mean over steps.
    pub batch: f64,
    /// Requests that the busiest worker got, as a multiple of the mean.
    pub busiest: f64,
    /// Requests that lost their worker.
    pub restarted: usize,
    /// Bytes per second with which each gateway tells the others what it runs: it receives as many of each of them.
    pub told_bytes_per_s: f64,
    /// Decisions by what they rested on.
    pub reasons: BTreeMap<&'static str, usize>,
    /// The run by [phases](super::Cluster::phases).
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub phases: Vec<Phase>,
}

/// The requests that arrived in one phase.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Phase {
    /// When it began, seconds since the start.
    pub from_s: f64,
    /// Requests measured.
    pub requests: usize,
    /// Time per output token after the first, ms: of each request its mean.
    pub tpot_ms: Spread,
}

/// Collects what happens during a run.
#[derive(Debug, Default)]
pub(super) struct Measures {
    tpot_ms: Vec<f64>,
    ttft_ms: Vec<f64>,
    experts: f64,
    batch: usize,
    steps: usize,
    sent: Vec<usize>,
    restarted: usize,
    told: f64,
    reasons: BTreeMap<&'static str, usize>,
    /// Beginnings of phases, and the times per token of their requests.
    phases: Vec<(Duration, Vec<f64>)>,
}

impl Measures {
    pub(super) fn new(workers: usize, phases: &[Duration]) -> Self {
        Measures {
            sent: vec![0; workers],
            phases: phases.iter().map(|&from| (from, Vec::new())).collect(),
            ..Self::default()
        }
    }

    pub(super) fn decided(&mut self, worker: usize, reason: Reason) {
        self.sent[worker] += 1;
        *self.reasons.entry(reason.name()).or_default() += 1;
    }

    pub(super) fn stepped(&mut self, batch: usize, experts: f64) {
        self.steps += 1;
        self.batch += batch;
        self.experts += experts;
    }

    pub(super) fn restarted(&mut self) {
        self.restarted += 1;
    }

    /// So many bytes per gateway.
    pub(super) fn told(&mut self, bytes: f64) {
        self.told += bytes;
    }

    /// A request of one token has no time per output token.
    pub(super) fn done(&mut self, arrived: Duration, ttft_ms: f64, tpot_ms: Option<f64>) {
        self.ttft_ms.push(ttft_ms);
        self.tpot_ms.extend(tpot_ms);
        let began = |(from, _): &&mut (Duration, Vec<f64>)| *from <= arrived;
        if let Some((_, own)) = self.phases.iter_mut().rev().find(began) {
            own.extend(tpot_ms);
        }
    }

    /// At the end of the run.
    pub(super) fn outcome(self, end: Duration) -> Outcome {
        let steps = self.steps.max(1) as f64;
        let (sent, most) = (self.sent.iter().sum::<usize>(), self.sent.iter().max());
        Outcome {
            requests: self.ttft_ms.len(),
            tpot_ms: Spread::of(self.tpot_ms),
            ttft_ms: Spread::of(self.ttft_ms),
            experts_per_step: self.experts / steps,
            batch: self.batch as f64 / steps,
            busiest: (most.copied().unwrap_or_default() * self.sent.len()) as f64
                / sent.max(1) as f64,
            restarted: self.restarted,
            told_bytes_per_s: self.told / end.as_secs_f64().max(1e-3),
            reasons: self.reasons,
            phases: self.phases.into_iter().map(phase).collect(),
        }
    }
}

fn phase((from, tpot_ms): (Duration, Vec<f64>)) -> Phase {
    Phase {
        from_s: from.as_secs_f64(),
        requests: tpot_ms.len(),
        tpot_ms: Spread::of(tpot_ms),
    }
}
