//! The published figures again, from a simulation: what it predicts, what was measured, and how far apart the two are.
//!
//! Gate statistics are generated at full model size ([`crate::generate`]), regions are fitted to a part of them as the ELDR paper
//! (arXiv 2607.00466) does, and the other requests are served by the simulator at the published rates under every policy. Decode
//! workers take the times that were published for load balancers ([`engine`]); what signatures gain is predicted, each model's from
//! the two others ([`predict`]).

pub mod ablations;
pub mod bench;
pub mod engine;
#[cfg(test)]
pub(crate) mod fixture;
mod parallel;
pub mod predict;
pub mod published;

use serde::Serialize;

pub use ablations::Ablation;
pub use bench::{Bench, Size};
pub use engine::{Engine, Growth};
pub use predict::Prediction;
pub use published::{Cell, Change};

use crate::error::Error;
use crate::generate::{CLUSTER, Kind, Shape};
use predict::{Curve, Lesson, NEAR, Pair};
use published::RATES;

/// What is reproduced.
#[derive(Clone, Debug, PartialEq)]
pub struct Options {
    /// How much is simulated.
    pub size: Size,
    /// Rates, of [`RATES`].
    pub rates: Vec<u32>,
    /// Whether ablations are run.
    pub ablations: bool,
    /// How much the clusters inside domains differ, which nothing published fixes: a place of [`CLUSTERS`](crate::generate::CLUSTERS).
    pub cluster: usize,
    /// Seed of requests, fits and arrivals.
    pub seed: u64,
}

impl Options {
    /// All of it.
    pub fn full(seed: u64) -> Self {
        Options {
            size: Size::FULL,
            rates: RATES.to_vec(),
            ablations: true,
            cluster: CLUSTER,
            seed,
        }
    }

    /// A first look: fewer requests, two rates, no ablations.
    pub fn quick(seed: u64) -> Self {
        Options {
            size: Size::QUICK,
            rates: vec![40, 80],
            ablations: false,
            cluster: CLUSTER,
            seed,
        }
    }
}

/// Simulated against published.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Reproduction {
    /// Rates, requests per second.
    pub rates: Vec<u32>,
    /// Seed.
    pub seed: u64,
    /// Seconds in which requests arrive.
    pub seconds: u64,
    /// By model and workload.
    pub predictions: Vec<Prediction>,
    /// Ablations.
    pub ablations: Vec<Ablation>,
    /// Predictions within [`NEAR`] points.
    pub near: usize,
    /// Mean absolute error of the predictions, points.
    pub error: f64,
    /// The same with step times out of the other models alone.
    pub transferred_error: f64,
    /// The same of the constant guess.
    pub guess_error: f64,
}

/// Pieces of work, for a progress bar.
pub fn work(options: &Options) -> u64 {
    let pairs = (Shape::ALL.len() * Kind::ALL.len()) as u64;
    pairs * if options.ablations { 4 } else { 3 }
}

/// Does it all; `on_piece` is told what is done, [`work`] times.
///
/// # Errors
/// None in practice: all inputs are shipped.
pub fn reproduce(options: &Options, on_piece: impl Fn(&str)) -> Result<Reproduction, Error> {
    let (mut benches, mut knowns, mut engines) = (Vec::new(), Vec::new(), Vec::new());
    for shape in Shape::ALL {
        let mut growth = Vec::new();
        for kind in Kind::ALL {
            let (bench, grows) =
                Bench::new(shape, kind, options.cluster, options.size, options.seed)?;
            let known = predict::known(&bench)?;
            growth.push(grows);
            benches.push(bench);
            knowns.push(known);
            on_piece("requests and regions");
        }
        let growth: Result<[Growth; 2], _> = growth.try_into();
        engines.extend(growth.map(|growth| Engine::new(&shape, growth)));
    }
    let model = |shape: &Shape| {
        Shape::ALL
            .iter()
            .position(|other| other == shape)
            .unwrap_or(0)
    };
    let pairs: Vec<Pair<'_>> = benches
        .iter()
        .zip(knowns)
        .map(|(bench, known)| Pair {
            engine: &engines[model(&bench.shape)],
            bench,
            known,
        })
        .collect();
    let mut curves = Vec::new();
    for pair in &pairs {
        curves.push(Curve::simulate(pair, &options.rates)?);
        on_piece("learning from two models");
    }
    let lesson = |place: usize| {
        let Pair { bench, engine, .. } = pairs[place];
        let measured = predict::measured(&bench.shape, bench.kind, &options.rates).p50;
        let curve = &curves[place];
        Lesson {
            engine,
            curve,
            measured,
        }
    };
    let (mut predictions, mut ablations) = (Vec::new(), Vec::new());
    for (place, pair) in pairs.iter().enumerate() {
        let shape = pair.bench.shape;
        let is_other = |index: &usize| pairs[*index].bench.shape != shape;
        let others: Vec<Lesson<'_>> = (0..pairs.len()).filter(is_other).map(lesson).collect();
        let kv_slowdown = predict::learn(&others);
        let b_ms = pair.engine.expert_ms(kv_slowdown);
        let others: Vec<&Engine> = (Shape::ALL.iter().zip(&engines))
            .filter_map(|(other, engine)| (*other != shape).then_some(engine))
            .collect();
        let transferred = Engine::transferred(&shape, &others, kv_slowdown);
        let rates = &options.rates;
        let curve = &curves[place];
        let prediction = predict::predict(pair, rates, curve, kv_slowdown, transferred)?;
        predictions.push(prediction);
        on_piece("predicting the third");
        if options.ablations {
            ablations.extend(ablations::ablations(pair, b_ms)?);
            if parallel::applies(&shape, pair.bench.kind) {
                ablations.extend(parallel::ablations(pair, b_ms)?);
            }
            if ablations::varies_workers(&shape, pair.bench.kind) {
                ablations.extend(ablations::workers(pair, b_ms)?);
            }
            on_piece("ablations");
        }
    }
    let mean = |error: &dyn Fn(&Prediction) -> f64| {
        let errors = predictions.iter().map(|prediction| error(prediction).abs());
        errors.sum::<f64>() / predictions.len() as f64
    };
    Ok(Reproduction {
        rates: options.rates.clone(),
        seed: options.seed,
        seconds: options.size.seconds,
        near: predictions
            .iter()
            .filter(|of| of.error().abs() <= NEAR)
            .count(),
        error: mean(&Prediction::error),
        transferred_error: mean(&|of| of.transferred_p50 - of.published.p50),
        guess_error: mean(&Prediction::guess_error),
        predictions,
        ablations,
    })
}

#[cfg(test)]
mod tests;
