//! The decode worker of one model, from its published times under load balancers.
//!
//! These hardly tell what an expert costs from what a request costs: both grow together. Two bounds help: an expert costs its bytes at
//! the memory's bandwidth at least, and a request the bytes of its KV cache, which are read more slowly. How much more slowly is the one
//! number that is open. Given it, an expert's cost follows by least squares, and the coefficients at each rate from the times near it,
//! so that a change of kernels, which a linear model over all rates cannot have, does little harm.

use eldr_core::engine::StepModel;
use serde::Serialize;

use super::published::{RATES, WORKERS, cell};
use crate::generate::{DECODE_TOKENS, Gates, Kind, PROMPT_TOKENS_MEAN, Shape};
use crate::steps::{Sample, least_squares};

/// Policies whose batches are mixed and of like size.
const BALANCERS: [&str; 3] = ["rr", "jsq", "p2c"];
/// Memory bandwidth of one MI300X, GB/s: nothing reads an expert faster.
const BANDWIDTH: f64 = 5_300.0;
/// Largest batch of which experts are counted.
const BATCH_MAX: usize = 250;

/// How distinct experts grow with the size of a mixed batch.
#[derive(Clone, Debug)]
pub struct Growth {
    /// Mean over layers, by batch size from 0.
    experts: Vec<f64>,
}

impl Growth {
    /// Of batches of consecutive requests.
    ///
    /// # Panics
    /// Without requests.
    pub fn of(requests: &[Gates], layers: usize) -> Self {
        let most = BATCH_MAX.min(requests.len());
        let mut experts = vec![0.0; most + 1];
        let batches = requests.len() / most;
        for batch in requests.chunks_exact(most) {
            let mut alone = vec![1.0f32; batch[0].decode.len()];
            for (size, gates) in batch.iter().enumerate() {
                let mut sum = 0.0;
                for (alone, p) in alone.iter_mut().zip(&gates.decode) {
                    *alone *= 1.0 - p;
                    sum += 1.0 - f64::from(*alone);
                }
                experts[size + 1] += sum / (layers * batches) as f64;
            }
        }
        Growth { experts }
    }

    /// Between sizes by interpolation; beyond the largest as there.
    pub fn experts(&self, batch: f64) -> f64 {
        let low = batch.max(0.0).floor();
        let at = |size: usize| self.experts[size.min(self.experts.len() - 1)];
        let (a, b) = (at(low as usize), at(low as usize + 1));
        a + (b - a) * (batch - low)
    }
}

/// What is known of one model's decode workers.
#[derive(Clone, Debug)]
pub struct Engine {
    /// By rate and workload, under load balancers; the batch by Little's law, experts by the generator.
    samples: Vec<(u32, Kind, Sample)>,
    growth: [Growth; 2],
    layers: f64,
    /// Least squares over all rates as if experts were all that grows.
    line: Line,
    /// Least cost of an expert: its bytes over the bandwidth.
    floor_ms: f64,
    /// Least cost of a request: the bytes of its KV cache over the bandwidth, half of the answer written.
    kv_ms: f64,
}

/// t = t0 + b·U.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Line {
    /// Cost of a step whatever its batch, ms.
    pub t0_ms: f64,
    /// Cost of an expert if it bears all of the growth, ms.
    pub b_ms: f64,
    /// Part of the variance that it explains.
    pub r2: f64,
}

impl Engine {
    /// Of `shape`, given how experts grow in the workloads of [`Kind::ALL`].
    pub fn new(shape: &Shape, growth: [Growth; 2]) -> Self {
        let mut samples = Vec::new();
        for (kind, growth) in Kind::ALL.into_iter().zip(&growth) {
            for (policy, rate) in BALANCERS
                .iter()
                .flat_map(|policy| RATES.map(|rate| (policy, rate)))
            {
                let Some(cell) = cell(shape, kind, policy, rate) else {
                    continue;
                };
                let per_ms = f64::from(rate) * f64::from(DECODE_TOKENS) / 1e3;
                let batch = per_ms * cell.p50_ms / WORKERS as f64;
                let sample = Sample {
                    experts: growth.experts(batch),
                    batch,
                    kv_tokens: 0.0,
                    ms: cell.p50_ms,
                };
                samples.push((rate, kind, sample));
            }
        }
        let all: Vec<Sample> = samples.iter().map(|(_, _, sample)| *sample).collect();
        let found = least_squares(&all, &[|_| 1.0, |sample| sample.experts]);
        let (t0_ms, b_ms) = (found[0], found[1]);
        let mean = all.iter().map(|sample| sample.ms).sum::<f64>() / all.len() as f64;
        let squares = |value: &dyn Fn(&Sample) -> f64| -> f64 {
            all.iter()
                .map(|sample| (sample.ms - value(sample)).powi(2))
                .sum()
        };
        let r2 = 1.0 - squares(&|sample| t0_ms + b_ms * sample.experts) / squares(&|_| mean);
        Engine {
            samples,
            growth,
            layers: shape.geometry.layers as f64,
            line: Line { t0_ms, b_ms, r2 },
            floor_ms: floor_ms(shape),
            kv_ms: kv_ms(shape),
        }
    }

    /// Cost of an expert if KV caches are read so many times more slowly than the memory can: least squares over all rates in which a
    /// request costs what its cache does at least, and an expert what its bytes do.
    pub fn expert_ms(&self, kv_slowdown: f64) -> f64 {
        let samples: Vec<Sample> = self.samples.iter().map(|(.., sample)| *sample).collect();
        let free = least_squares(
            &samples,
            &[|_| 1.0, |sample| sample.experts, |sample| sample.batch],
        );
        let request_ms = kv_slowdown * self.kv_ms;
        let b_ms = if free[2] >= request_ms {
            free[1]
        } else {
            let left = samples.iter().map(|sample| Sample {
                ms: sample.ms - request_ms * sample.batch,
                ..*sample
            });
            let left: Vec<Sample> = left.collect();
            least_squares(&left, &[|_| 1.0, |sample| sample.experts])[1]
        };
        b_ms.max(self.floor_ms)
    }

    /// The line over all rates.
    pub fn line(&self) -> Line {
        self.line
    }

    /// Least cost of an expert, ms.
    pub fn floor_ms(&self) -> f64 {
        self.floor_ms
    }

    /// Coefficients near one rate if an expert costs `b_ms`, or as much less as keeps a step from taking no time. The batch's share may
    /// be negative where kernels get better as it grows.
    pub fn near(&self, rate: u32, kind: Kind, b_ms: f64) -> StepModel {
        let place = RATES.iter().position(|&other| other == rate).unwrap_or(0);
        let place = place.clamp(1, RATES.len() - 2);
        let near = &RATES[place - 1..=place + 1];
        let around = self.samples.iter().filter(|(rate, ..)| near.contains(rate));
        let around: Vec<Sample> = around.map(|(.., sample)| *sample).collect();
        let slope = least_squares(&around, &[|_| 1.0, |sample| sample.batch])[1];
        let here = self.samples.iter().filter(|(other, ..)| *other == rate);
        let here: Vec<&Sample> = here.map(|(.., sample)| sample).collect();
        let count = here.len() as f64;
        let batch = here.iter().map(|sample| sample.batch).sum::<f64>() / count;
        let ms = here.iter().map(|sample| sample.ms).sum::<f64>() / count;
        let growth = &self.growth[kind as usize];
        let experts = growth.experts(batch);
        let b_ms = b_ms.min(ms / experts);
        let rise = (growth.experts(batch * 1.1) - growth.experts(batch * 0.9)) / (0.2 * batch);
        let rest = ms - b_ms * experts;
        // A small batch takes its time, too: what the slope would take off t0 below 0, the batch does not cost.
        let c_ms = (slope - b_ms * rise).min(rest / batch);
        StepModel {
            t0_ms: rest - c_ms * batch,
            b_ms,
            c_ms,
            kv_ms_per_1k: 0.0,
        }
    }

    /// One linear model for all rates, out of other models' times alone: an expert costs the same multiple of its least cost, the
    /// rest as much per layer. `kv_slowdown` as ever.
    pub fn transferred(shape: &Shape, others: &[&Engine], kv_slowdown: f64) -> StepModel {
        let count = others.len() as f64;
        let mean = |value: &dyn Fn(&Engine) -> f64| -> f64 {
            others.iter().map(|engine| value(engine)).sum::<f64>() / count
        };
        let rest = |engine: &Engine, coefficient: usize| -> f64 {
            let b_ms = engine.expert_ms(kv_slowdown);
            let left = engine.samples.iter().map(|(.., sample)| Sample {
                ms: sample.ms - b_ms * sample.experts,
                ..*sample
            });
            let left: Vec<Sample> = left.collect();
            let found = least_squares(&left, &[|_| 1.0, |sample| sample.batch]);
            found[coefficient] / engine.layers
        };
        let layers = shape.geometry.layers as f64;
        StepModel {
            t0_ms: layers * mean(&|engine| rest(engine, 0)),
            b_ms: floor_ms(shape) * mean(&|engine| engine.expert_ms(kv_slowdown) / engine.floor_ms),
            c_ms: layers * mean(&|engine| rest(engine, 1)),
            kv_ms_per_1k: 0.0,
        }
    }
}

/// One expert in every layer.
fn floor_ms(shape: &Shape) -> f64 {
    shape.geometry.layers as f64 * shape.expert_mb / BANDWIDTH
}

/// The mean KV cache of a request.
fn kv_ms(shape: &Shape) -> f64 {
    let tokens = PROMPT_TOKENS_MEAN + f64::from(DECODE_TOKENS) / 2.0;
    tokens * shape.kv_kib * 1024.0 / 1e6 / BANDWIDTH
}
