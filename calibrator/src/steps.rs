//! Step coefficients by least squares: from measured steps, or from times per token under a load balancer.
//!
//! Two kinds of CSV are read, by their header; other columns are ignored.
//!
//! - Measured steps: `batch,experts,step_ms`, and `kv_tokens` if the KV caches were counted. `experts` is the mean over layers of the
//!   distinct experts that the step activated.
//! - Times per token: `rate_rps,tpot_p50_ms`, and `model` and `policy` if there are several. Rows of policies that look at experts are
//!   left out; the batch is found by Little's law, and experts as if all were equally likely, E·(1 − (1 − k/E)^B): an assumption, as such
//!   a table does not tell b from c.

mod read;

use eldr_core::engine::StepModel;
use nalgebra::{DMatrix, DVector};
use serde::Serialize;

pub use read::{Setting, read};

use crate::error::Error;

/// Above this correlation between experts and batch size, b and c cannot be told apart.
pub const COLLINEAR: f64 = 0.95;
/// Singular values below this part of the largest are taken as 0.
const EPSILON: f64 = 1e-10;

/// One decode step, or many that are alike.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sample {
    /// Distinct experts per layer.
    pub experts: f64,
    /// Requests in the batch.
    pub batch: f64,
    /// Tokens in their KV caches.
    pub kv_tokens: f64,
    /// Time of the step, ms.
    pub ms: f64,
}

/// Coefficients, and how far to trust them.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct StepFit {
    /// The coefficients; none is negative.
    pub step: StepModel,
    /// Samples that were fitted to.
    pub samples: usize,
    /// Part of the variance of the times that they explain.
    pub r2: f64,
    /// Correlation between experts and batch size over the samples.
    pub correlation: f64,
}

impl StepFit {
    /// Whether the samples tell b from c.
    pub fn is_identified(&self) -> bool {
        self.correlation.abs() < COLLINEAR
    }
}

/// Least squares of t = t0 + b·U + c·B + d·KV without negative coefficients: what would be negative is left out, worst first.
///
/// # Errors
/// Fewer samples than coefficients and one, or all of the same batch.
pub fn fit(samples: &[Sample]) -> Result<StepFit, Error> {
    let with_kv = samples.iter().any(|sample| sample.kv_tokens > 0.0);
    let columns: [fn(&Sample) -> f64; 4] = [
        |_| 1.0,
        |sample| sample.experts,
        |sample| sample.batch,
        |sample| sample.kv_tokens / 1e3,
    ];
    let mut used: Vec<usize> = (0..if with_kv { 4 } else { 3 }).collect();
    let first = samples.first().map(|sample| sample.batch);
    if samples.len() <= used.len() || samples.iter().all(|other| Some(other.batch) == first) {
        return Err(Error::new(
            format!(
                "{} samples cannot tell {} coefficients: {} of different batches are needed",
                samples.len(),
                used.len(),
                used.len() + 1
            ),
            "measure steps with few and with many requests, and batches of like requests beside mixed ones",
        ));
    }
    let found = loop {
        let chosen: Vec<fn(&Sample) -> f64> = used.iter().map(|&column| columns[column]).collect();
        let found = least_squares(samples, &chosen);
        let worst = (0..used.len()).min_by(|&a, &b| found[a].total_cmp(&found[b]));
        match worst.filter(|&worst| found[worst] < 0.0) {
            Some(worst) => used.remove(worst),
            None => break found,
        };
    };
    let of = |column| {
        let place = used.iter().position(|&other| other == column);
        place.map_or(0.0, |place| found[place])
    };
    let step = StepModel {
        t0_ms: of(0),
        b_ms: of(1),
        c_ms: of(2),
        kv_ms_per_1k: of(3),
    };
    let predicted = |sample: &Sample| {
        step.t0_ms
            + step.b_ms * sample.experts
            + step.c_ms * sample.batch
            + step.kv_ms_per_1k * sample.kv_tokens / 1e3
    };
    let left = |value: &dyn Fn(&Sample) -> f64| -> f64 {
        let errors = samples.iter().map(|sample| sample.ms - value(sample));
        errors.map(|error| error * error).sum()
    };
    let mean = samples.iter().map(|sample| sample.ms).sum::<f64>() / samples.len() as f64;
    Ok(StepFit {
        step,
        samples: samples.len(),
        r2: 1.0 - left(&predicted) / left(&|_| mean).max(f64::MIN_POSITIVE),
        correlation: correlation(samples),
    })
}

/// Coefficients of `columns`; where these do not determine them, the smallest.
pub(crate) fn least_squares(samples: &[Sample], columns: &[fn(&Sample) -> f64]) -> Vec<f64> {
    let a = DMatrix::from_fn(samples.len(), columns.len(), |row, column| {
        columns[column](&samples[row])
    });
    let b = DVector::from_iterator(samples.len(), samples.iter().map(|sample| sample.ms));
    let svd = a.svd(true, true);
    let epsilon = EPSILON * svd.singular_values.max();
    let solved = svd.solve(&b, epsilon);
    let solved = solved.expect("both sides of the decomposition were asked for");
    solved.iter().copied().collect()
}

/// Between experts and batch size.
fn correlation(samples: &[Sample]) -> f64 {
    let count = samples.len() as f64;
    let mean = |value: fn(&Sample) -> f64| samples.iter().map(value).sum::<f64>() / count;
    let (experts, batch) = (mean(|s| s.experts), mean(|s| s.batch));
    let (mut both, mut of_experts, mut of_batch) = (0.0, 0.0, 0.0);
    for sample in samples {
        let (x, y) = (sample.experts - experts, sample.batch - batch);
        both += x * y;
        of_experts += x * x;
        of_batch += y * y;
    }
    both / (of_experts * of_batch).sqrt().max(f64::MIN_POSITIVE)
}

#[cfg(test)]
mod tests;
