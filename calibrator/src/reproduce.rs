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
pub mod predict;
pub mod published;

use serde::Serialize;

pub use ablations::Ablation;
pub use bench::{Bench, Size};
pub use engine::{Engine, Growth};
pub use predict::Prediction;
pub use published::{Cell, Change};

use crate::error::Error;
use crate::generate::{Kind, Shape};
use predict::{NEAR, Pair};
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
            seed,
        }
    }

    /// A first look: fewer requests, two rates, no ablations.
    pub fn quick(seed: u64) -> Self {
        Options {
            size: Size::QUICK,
            rates: vec![40, 80],
            ablations: false,
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
            let (bench, grows) = Bench::new(shape, kind, options.size, options.seed)?;
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
        let measured = predict::measured(&pair.bench.shape, pair.bench.kind, &options.rates);
        curves.push((predict::curve(pair, &options.rates)?, measured.p50));
        on_piece("learning from two models");
    }
    let (mut predictions, mut ablations) = (Vec::new(), Vec::new());
    for (place, pair) in pairs.iter().enumerate() {
        let shape = pair.bench.shape;
        let is_other = |index: &usize| pairs[*index].bench.shape != shape;
        let others = (0..pairs.len()).filter(is_other);
        let learned: Vec<_> = others.map(|index| curves[index]).collect();
        let part = predict::fit_part(&learned);
        let in_hindsight = predict::fit_part(&curves[place..=place]);
        let others: Vec<(&Shape, &Engine)> = (Shape::ALL.iter().zip(&engines))
            .filter(|(other, _)| **other != shape)
            .collect();
        let transferred = Engine::transferred(&shape, &others, part);
        let parts = (part, in_hindsight);
        predictions.push(predict::predict(pair, &options.rates, parts, transferred)?);
        on_piece("predicting the third");
        if options.ablations {
            ablations.extend(ablations::ablations(pair, part)?);
            if ablations::varies_workers(&shape, pair.bench.kind) {
                ablations.extend(ablations::workers(pair, part)?);
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
