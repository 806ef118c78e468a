//! Prediction of one model out of the two others.
//!
//! Open is one number, the part of a step's growth that is the experts' own ([`super::engine`]). It is fitted to what ELDR gained on two
//! models and used on the third, of which its load balancers' times are known and nothing that looked at experts. Beside it stands the
//! stricter question, in which the third model's step times too come from the other two and its size.

use eldr_core::engine::StepModel;
use rayon::prelude::*;
use serde::Serialize;

use super::bench::{Bench, Fit};
use super::engine::{Engine, Line};
use super::published::{self, Cell, Change, GUESS, POLICIES, WORKERS};
use crate::error::Error;
use crate::generate::{Kind, Shape, Strengths};
use crate::simulate::{Known, PolicySpec};

/// Parts that are simulated; between them is interpolated.
pub const PARTS: [f64; 4] = [0.2, 0.5, 0.8, 1.0];
/// Steps in which the part is searched.
const STEPS: usize = 400;
/// How near a prediction of the change in the median is to come, in points.
pub const NEAR: f64 = 3.0;

/// One model and workload with all that is needed to run it.
pub(super) struct Pair<'a> {
    pub(super) bench: &'a Bench,
    pub(super) known: Known,
    pub(super) engine: &'a Engine,
}

/// One simulated cell beside the measured one.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Compared {
    /// Policy by the name of its rule.
    pub policy: &'static str,
    /// Requests per second.
    pub rate: u32,
    /// What the simulation says.
    pub simulated: Cell,
    /// What was measured, where it was.
    pub published: Option<Cell>,
}

/// What is predicted of one model and workload.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Prediction {
    /// Workload.
    pub workload: Kind,
    /// Model.
    pub model: &'static str,
    /// Part of the growth that is the experts' own, from the other two models.
    pub part: f64,
    /// The part that this model's own figures ask for; of no use to a prediction.
    pub part_in_hindsight: f64,
    /// How much requests differ, and in what.
    pub strengths: Strengths,
    /// The line whose b is multiplied by the part.
    pub line: Line,
    /// Every cell.
    pub cells: Vec<Compared>,
    /// Change of ELDR's rule against round robin in the mean over rates: simulated.
    pub simulated: Change,
    /// As measured.
    pub published: Change,
    /// Simulated with step times out of the other two models alone, median.
    pub transferred_p50: f64,
    /// The change in the median by what an expert costs: least cost, half and double of the prediction's.
    pub sensitivity: Vec<Sensitivity>,
}

/// A prediction with another cost of an expert.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Sensitivity {
    /// What it is.
    pub what: &'static str,
    /// Cost of an expert, ms.
    pub b_ms: f64,
    /// Change of the median against round robin, mean over rates.
    pub p50: f64,
}

impl Prediction {
    /// Simulated minus measured change in the median.
    pub fn error(&self) -> f64 {
        self.simulated.p50 - self.published.p50
    }

    /// The guess minus the measured change.
    pub fn guess_error(&self) -> f64 {
        GUESS - self.published.p50
    }

    /// Change of a policy against round robin at one rate: simulated and, where it was measured, published.
    pub fn change(&self, policy: &str, rate: u32) -> Option<(Change, Option<Change>)> {
        let of = |name: &str| {
            let mut cells = self.cells.iter();
            cells.find(|cell| cell.policy == name && cell.rate == rate)
        };
        let (own, reference) = (of(policy)?, of(POLICIES[0].0)?);
        let published = own.published.zip(reference.published);
        Some((
            own.simulated.against(reference.simulated),
            published.map(|(own, reference)| own.against(reference)),
        ))
    }
}

/// Policies of a list of specifications.
pub(super) fn specs(names: &[&str]) -> Vec<PolicySpec> {
    names.iter().filter_map(|name| name.parse().ok()).collect()
}

/// Change of ELDR's rule against round robin in the mean over rates, under the step times that `step` gives.
pub(super) fn band_change(
    pair: &Pair<'_>,
    rates: &[u32],
    step: impl Fn(u32) -> StepModel + Sync,
) -> Result<Change, Error> {
    let policies = specs(&["round_robin", "band:cap=none"]);
    let changes = rates.par_iter().map(|&rate| {
        let cells = pair
            .bench
            .run(&pair.known, step(rate), rate, WORKERS, &policies)?;
        Ok(cells[1].against(cells[0]))
    });
    Ok(Change::mean(changes.collect::<Result<Vec<_>, Error>>()?))
}

/// By part, the simulated change in the median.
pub(super) fn curve(pair: &Pair<'_>, rates: &[u32]) -> Result<[f64; PARTS.len()], Error> {
    let mut curve = [0.0; PARTS.len()];
    for (part, change) in PARTS.into_iter().zip(&mut curve) {
        let b_ms = part * pair.engine.line().b_ms;
        let kind = pair.bench.kind;
        *change = band_change(pair, rates, |rate| pair.engine.near(rate, kind, b_ms))?.p50;
    }
    Ok(curve)
}

/// The part at which simulated changes come nearest to measured ones, by squared error.
pub(super) fn fit_part(curves: &[([f64; PARTS.len()], f64)]) -> f64 {
    let first = PARTS[0];
    let last = PARTS[PARTS.len() - 1];
    let error = |part: f64| -> f64 {
        let errors = curves
            .iter()
            .map(|(curve, measured)| interpolate(curve, part) - measured);
        let sum: f64 = errors.map(|error| error * error).sum();
        // What cannot be simulated fits nothing: the sign of a NaN would decide otherwise.
        if sum.is_nan() { f64::INFINITY } else { sum }
    };
    let parts = (0..=STEPS).map(|step| first + (last - first) * step as f64 / STEPS as f64);
    parts
        .min_by(|&a, &b| error(a).total_cmp(&error(b)))
        .unwrap_or(last)
}

fn interpolate(curve: &[f64; PARTS.len()], part: f64) -> f64 {
    let after = PARTS
        .iter()
        .position(|&other| other >= part)
        .unwrap_or(PARTS.len() - 1)
        .max(1);
    let (low, high) = (PARTS[after - 1], PARTS[after]);
    curve[after - 1] + (curve[after] - curve[after - 1]) * (part - low) / (high - low)
}

/// Measured change of ELDR in the mean over rates.
pub(super) fn measured(shape: &Shape, kind: Kind, rates: &[u32]) -> Change {
    Change::mean(
        rates
            .iter()
            .filter_map(|&rate| published::change(shape, kind, "eldr", rate)),
    )
}

/// Runs everything of one model and workload with a part that is given.
pub(super) fn predict(
    pair: &Pair<'_>,
    rates: &[u32],
    parts: (f64, f64),
    transferred: StepModel,
) -> Result<Prediction, Error> {
    let Bench { shape, kind, .. } = *pair.bench;
    let (part, part_in_hindsight) = parts;
    let b_ms = part * pair.engine.line().b_ms;
    let policies = specs(&POLICIES.map(|(.., spec)| spec));
    let runs = rates.par_iter().map(|&rate| {
        let step = pair.engine.near(rate, kind, b_ms);
        let cells = pair
            .bench
            .run(&pair.known, step, rate, WORKERS, &policies)?;
        let compared = POLICIES
            .iter()
            .zip(cells)
            .map(|(&(policy, name, _), simulated)| Compared {
                policy,
                rate,
                simulated,
                published: name.and_then(|name| published::cell(&shape, kind, name, rate)),
            });
        Ok(compared.collect::<Vec<_>>())
    });
    let cells = runs.collect::<Result<Vec<_>, Error>>()?.concat();
    let with_b = |what, b_ms: f64| -> Result<Sensitivity, Error> {
        let change = band_change(pair, rates, |rate| pair.engine.near(rate, kind, b_ms))?;
        Ok(Sensitivity {
            what,
            b_ms,
            p50: change.p50,
        })
    };
    let sensitivity = vec![
        with_b("floor", pair.engine.floor_ms())?,
        with_b("half", b_ms / 2.0)?,
        with_b("double", b_ms * 2.0)?,
    ];
    let mut prediction = Prediction {
        workload: kind,
        model: shape.name,
        part,
        part_in_hindsight,
        strengths: Strengths::fitted(&shape, kind),
        line: pair.engine.line(),
        cells,
        simulated: Change::mean([]),
        published: measured(&shape, kind, rates),
        transferred_p50: band_change(pair, rates, |_| transferred)?.p50,
        sensitivity,
    };
    let simulated = rates
        .iter()
        .filter_map(|&rate| prediction.change("band", rate));
    prediction.simulated = Change::mean(simulated.map(|(simulated, _)| simulated));
    Ok(prediction)
}

/// Builds what [`Pair`] needs beside the engine.
pub(super) fn known(bench: &Bench) -> Result<Known, Error> {
    bench.known(WORKERS, Fit::Published)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_part_is_found_where_the_simulation_meets_the_measurement() {
        let line = |slope: f64| PARTS.map(|part| slope * part);
        assert!((fit_part(&[(line(-20.0), -10.0)]) - 0.5).abs() < 0.01);
        // Between two that disagree, and no further than what was simulated.
        let both = fit_part(&[(line(-20.0), -8.0), (line(-20.0), -12.0)]);
        assert!((both - 0.5).abs() < 0.01, "{both}");
        assert_eq!(fit_part(&[(line(-20.0), -50.0)]), 1.0);
        assert_eq!(fit_part(&[(line(-20.0), 5.0)]), PARTS[0]);
        let mut broken = line(-20.0);
        broken[3] = -f64::NAN;
        assert!((fit_part(&[(broken, -10.0)]) - 0.5).abs() < 0.01);
    }
}
