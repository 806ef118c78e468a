//! Prediction of one model out of the two others.
//!
//! Open is one number, how slowly KV caches are read ([`super::engine`]). It is fitted to what ELDR gained on two models and used on the
//! third, of which its load balancers' times are known and nothing that looked at experts. Beside it stands the stricter question, in
//! which the third model's step times too come from the other two and its size.

use eldr_core::engine::StepModel;
use rayon::prelude::*;
use serde::Serialize;

use super::bench::{Bench, Fit};
use super::engine::Engine;
use super::published::{self, BAND, Cell, Change, GUESS, POLICIES, WORKERS};
use crate::error::Error;
use crate::generate::{Kind, Shape, Strengths};
use crate::simulate::{Known, PolicySpec};

/// Costs of an expert that are simulated, as parts of what it costs if experts are all that makes steps grow; between them is
/// interpolated, beyond them extended.
const PARTS: [f64; 3] = [0.3, 0.6, 0.9];
/// The slowest reading of KV caches that is searched for, as a multiple of the fastest, and the steps of the search.
const SLOWDOWN_MAX: f64 = 20.0;
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
    /// How many times more slowly than the memory can KV caches are read, from the other two models.
    pub kv_slowdown: f64,
    /// The cost of an expert that follows, ms.
    pub b_ms: f64,
    /// The cost that this model's own figures ask for; of no use to a prediction.
    pub b_in_hindsight_ms: f64,
    /// How much requests differ, and in what.
    pub strengths: Strengths,
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
    let policies = specs(&["round_robin", BAND]);
    let changes = rates.par_iter().map(|&rate| {
        let cells = pair
            .bench
            .run(&pair.known, step(rate), rate, WORKERS, &policies, &[])?;
        Ok(cells[1].against(cells[0]))
    });
    Ok(Change::mean(changes.collect::<Result<Vec<_>, Error>>()?))
}

/// Simulated changes in the median under ELDR's rule, by the cost of an expert.
#[derive(Clone, Debug)]
pub(super) struct Curve {
    /// Ascending: cost in ms, change in %.
    points: Vec<(f64, f64)>,
}

impl Curve {
    pub(super) fn simulate(pair: &Pair<'_>, rates: &[u32]) -> Result<Self, Error> {
        let points = PARTS.map(|part| {
            let b_ms = part * pair.engine.line().b_ms;
            let change = band_change(pair, rates, |rate| {
                pair.engine.near(rate, pair.bench.kind, b_ms)
            })?;
            Ok((b_ms, change.p50))
        });
        let points = points.into_iter().collect::<Result<_, Error>>()?;
        Ok(Curve { points })
    }

    /// So much change per ms.
    #[cfg(test)]
    pub(super) fn line(slope: f64) -> Self {
        let points = [0.0, 1.0].map(|b_ms| (b_ms, slope * b_ms));
        Curve {
            points: points.into(),
        }
    }

    /// The change at a cost.
    fn at(&self, b_ms: f64) -> f64 {
        let after = self.points.iter().position(|(cost, _)| *cost >= b_ms);
        let after = after.unwrap_or(self.points.len() - 1).max(1);
        let ((low, from), (high, to)) = (self.points[after - 1], self.points[after]);
        from + (to - from) * (b_ms - low) / (high - low)
    }

    /// The cost up to `most_ms` at which the change comes nearest to a measured one.
    fn cost_of(&self, measured: f64, most_ms: f64) -> f64 {
        nearest(most_ms, |b_ms| (self.at(b_ms) - measured).powi(2))
    }
}

/// One model and workload that is learned from.
#[derive(Clone, Copy, Debug)]
pub(super) struct Lesson<'a> {
    pub(super) engine: &'a Engine,
    pub(super) curve: &'a Curve,
    /// Measured change in the median, %.
    pub(super) measured: f64,
}

/// How slowly KV caches are read if simulated changes are to come nearest to measured ones, by squared error.
pub(super) fn learn(lessons: &[Lesson<'_>]) -> f64 {
    nearest(SLOWDOWN_MAX, |kv_slowdown| {
        let errors = lessons.iter().map(|lesson| {
            let b_ms = lesson.engine.expert_ms(kv_slowdown);
            lesson.curve.at(b_ms) - lesson.measured
        });
        errors.map(|error| error * error).sum()
    })
}

/// Where from 0 to `most` the error is least; the lowest such place.
fn nearest(most: f64, error: impl Fn(f64) -> f64) -> f64 {
    let places = (0..=STEPS).map(|step| most * step as f64 / STEPS as f64);
    // What cannot be simulated fits nothing: the sign of a NaN would decide otherwise.
    let errors = places.map(|place| (place, error(place)));
    let numbers = errors.filter(|(_, error)| !error.is_nan());
    numbers
        .min_by(|(_, a), (_, b)| a.total_cmp(b))
        .map_or(0.0, |(place, _)| place)
}

/// Measured change of ELDR in the mean over rates.
pub(super) fn measured(shape: &Shape, kind: Kind, rates: &[u32]) -> Change {
    Change::mean(
        rates
            .iter()
            .filter_map(|&rate| published::change(shape, kind, "eldr", rate)),
    )
}

/// Runs everything of one model and workload, given how slowly KV caches are read.
pub(super) fn predict(
    pair: &Pair<'_>,
    rates: &[u32],
    curve: &Curve,
    kv_slowdown: f64,
    transferred: StepModel,
) -> Result<Prediction, Error> {
    let Bench { shape, kind, .. } = *pair.bench;
    let b_ms = pair.engine.expert_ms(kv_slowdown);
    let published = measured(&shape, kind, rates);
    let policies = specs(&POLICIES.map(|(.., spec)| spec));
    let runs = rates.par_iter().map(|&rate| {
        let step = pair.engine.near(rate, kind, b_ms);
        let cells = pair
            .bench
            .run(&pair.known, step, rate, WORKERS, &policies, &[])?;
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
    let with_b = |what, b_ms: f64| Sensitivity {
        what,
        b_ms,
        p50: curve.at(b_ms),
    };
    let sensitivity = vec![
        with_b("floor", pair.engine.floor_ms()),
        with_b("half", b_ms / 2.0),
        with_b("double", b_ms * 2.0),
    ];
    let mut prediction = Prediction {
        workload: kind,
        model: shape.name,
        kv_slowdown,
        b_ms,
        b_in_hindsight_ms: curve.cost_of(published.p50, pair.engine.line().b_ms),
        strengths: pair.bench.strengths,
        cells,
        simulated: Change::mean([]),
        published,
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
    fn a_cost_is_found_where_the_simulation_meets_the_measurement() {
        let line = Curve {
            points: vec![(0.1, -4.0), (0.2, -8.0), (0.3, -12.0)],
        };
        assert!((line.at(0.15) + 6.0).abs() < 1e-9);
        // Beyond what was simulated as there.
        assert!(line.at(0.0).abs() < 1e-9 && (line.at(0.4) + 16.0).abs() < 1e-9);
        assert!((line.cost_of(-10.0, 1.0) - 0.25).abs() < 0.01);
        assert_eq!(line.cost_of(-50.0, 0.5), 0.5);
        assert_eq!(line.cost_of(5.0, 0.5), 0.0);
        let broken = Curve {
            points: vec![(0.1, -4.0), (0.2, f64::NAN)],
        };
        assert_eq!(broken.cost_of(-10.0, 0.5), 0.0);
    }
}
