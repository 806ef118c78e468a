//! The best candidate of each policy that does no harm.
//!
//! By score first: the mean of the changes of mean, P50 and P99 TPOT against least loaded, on the tuning requests. Then from the best
//! score on, until one keeps the bound in every misleading case. That is measured on all requests that calibrate, the fitted ones
//! included: harm of a percent is seen on many requests only, and comes of what signatures do not say. Last, for policies that compare
//! signatures with regions, other fits.

use eldr_core::decide::Policy;
use serde::Serialize;

use super::adapt::{self, KEPT_MIN};
use super::candidates::Grid;
use super::ground::{Case, Ground, Trial, run_all};
use super::judge::{Changes, changes, spreads};
use super::split::{FITS, Fit};
use super::{Effort, HARM_MAX, Progress, spec};
use crate::error::Error;
use crate::simulate::policy::PolicyKind;
use crate::simulate::{Outcome, PolicySpec, Spread};

/// Another fit is taken only if it is better by so many percent points: less is chance.
const FIT_GAIN_MIN: f64 = 0.2;
/// Runs of each split in which the policies that are left are compared once more, and in which harm is looked for: more tell no more,
/// as all meet the same few requests.
const RUNS_MAX: usize = 4;

/// A policy with the parameters that were best on the tuning requests.
#[derive(Clone, Debug, Serialize)]
pub struct Tuned {
    /// With its parameters.
    #[serde(serialize_with = "name")]
    pub spec: PolicySpec,
    /// Which of [`FITS`].
    #[serde(skip)]
    pub fit_index: usize,
    /// Options of the fit; none where the policy needs no regions.
    pub fit: Option<Fit>,
    /// On the tuning requests, less is better.
    pub score: f64,
    /// Whether it keeps [`KEPT_MIN`] percent of its gain in the mean when traffic changes, on the calibration requests.
    pub adapts: bool,
}

fn name<S: serde::Serializer>(spec: &PolicySpec, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(&spec.name)
}

impl Tuned {
    /// What runs.
    pub(super) fn runs(&self) -> (PolicySpec, usize) {
        (self.spec.clone(), self.fit_index)
    }
}

/// What tuning found.
#[derive(Debug)]
pub(super) struct Chosen {
    /// Best first, at least one.
    pub(super) tuned: Vec<Tuned>,
    /// Policies that cannot keep the bound.
    pub(super) harmful: Vec<&'static str>,
    /// Band with the best score, harm or not.
    pub(super) unbounded: PolicySpec,
}

/// Tunes every policy on the same arrivals.
pub(super) fn tune(
    tuning: &[Ground<'_>],
    calibration: &[Ground<'_>],
    policies: &[Policy],
    effort: Effort,
    progress: &dyn Progress,
) -> Result<Chosen, Error> {
    let effort = Effort {
        seeds: effort.seeds.min(RUNS_MAX),
        ..effort
    };
    let table = Scores {
        tuning,
        calibration,
        least_loaded: least_loaded(calibration, effort, progress)?,
        effort,
        progress,
    };
    let (mut tuned, mut harmful) = (Vec::new(), Vec::new());
    let gateways = tuning.first().map_or(1, |ground| ground.cluster.gateways);
    let mut least_bad: Option<(f64, Tuned)> = None;
    for &policy in policies {
        let candidates = effort.grid.candidates(policy, gateways)?;
        let candidates = candidates.into_iter().map(|spec| (spec, 0)).collect();
        let mut scored = table.scored(candidates, 1)?;
        scored.sort_by(|a, b| a.score.total_cmp(&b.score));
        let mut kept = None;
        let mut tried = Vec::new();
        for candidate in scored {
            // Harm is the load cap's to bound, or that of few candidates or of regions that follow: of those alike in that, one is tried.
            let spec = &candidate.spec;
            let bounds = (spec.max_load_factor, spec.candidates, spec.refit);
            if tried.contains(&bounds) {
                continue;
            }
            tried.push(bounds);
            let worst = table.worst(&candidate)?;
            if worst <= HARM_MAX {
                kept = Some(candidate);
                break;
            }
            if least_bad.as_ref().is_none_or(|(least, _)| worst < *least) {
                least_bad = Some((worst, candidate));
            }
        }
        match kept {
            Some(kept) if policy.compares_regions() => tuned.push(table.refitted(kept)?),
            Some(kept) => tuned.push(kept),
            None => harmful.push(policy.name()),
        }
    }
    // One run per split tells parameters of a policy apart on like batches; policies are told apart by more.
    let policies = tuned.iter().map(Tuned::runs).collect();
    let scored = table.scored(policies, effort.seeds)?;
    for (tuned, scored) in tuned.iter_mut().zip(scored) {
        tuned.score = scored.score;
        tuned.adapts = table.adapts(tuned)?;
    }
    order(&mut tuned);
    // With nothing that keeps the bound there is still something to judge, and to advise against.
    tuned.extend(
        least_bad
            .filter(|_| tuned.is_empty())
            .map(|(_, least)| least),
    );
    let unbounded = effort.grid.unbounded()?;
    let unbounded = table.scored(unbounded.into_iter().map(|spec| (spec, 0)).collect(), 1)?;
    let unbounded = unbounded
        .into_iter()
        .min_by(|a, b| a.score.total_cmp(&b.score));
    let unbounded = unbounded.map_or_else(|| spec("band"), |best| Ok(best.spec))?;
    Ok(Chosen {
        tuned,
        harmful,
        unbounded,
    })
}

/// The best score first. One that keeps its gain when traffic changes goes before the best if that costs no more than the part of a gain
/// that may be lost: a policy that gains nothing has nothing to lose.
pub(super) fn order(tuned: &mut [Tuned]) {
    tuned.sort_by(|a, b| a.score.total_cmp(&b.score));
    let enough = tuned.first().map_or(0.0, |best| best.score) * KEPT_MIN / 100.0;
    let adapts = |tuned: &Tuned| tuned.adapts && tuned.score <= enough;
    if let Some(first) = tuned.iter().position(adapts) {
        tuned[..=first].rotate_right(1);
    }
}

struct Scores<'a> {
    tuning: &'a [Ground<'a>],
    calibration: &'a [Ground<'a>],
    /// What least loaded does on the calibration requests in each misleading case that they have.
    least_loaded: Vec<(Case, Vec<Outcome>)>,
    effort: Effort,
    progress: &'a dyn Progress,
}

fn least_loaded(
    grounds: &[Ground<'_>],
    effort: Effort,
    progress: &dyn Progress,
) -> Result<Vec<(Case, Vec<Outcome>)>, Error> {
    let policy = [(spec("least_loaded")?, 0)];
    let cases = Case::MISLEADING.into_iter();
    let cases = cases.filter(|&case| grounds.iter().all(|ground| ground.has(case)));
    let cases: Vec<Case> = cases.collect();
    progress.begin("bounding", cases.len() * grounds.len() * effort.seeds);
    let outcomes = cases.into_iter().map(|case| {
        let trials = Trial::of(&policy, case, grounds, effort);
        Ok((case, run_all(grounds, &trials, progress)?))
    });
    outcomes.collect()
}

impl Scores<'_> {
    /// On the same arrivals: `seeds` runs per split.
    fn scored(
        &self,
        mut policies: Vec<(PolicySpec, usize)>,
        seeds: usize,
    ) -> Result<Vec<Tuned>, Error> {
        policies.push((spec("least_loaded")?, 0));
        let effort = Effort {
            seeds,
            ..self.effort
        };
        let trials = Trial::of(&policies, Case::Plain, self.tuning, effort);
        self.progress.begin("tuning", trials.len());
        let outcomes = run_all(self.tuning, &trials, self.progress)?;
        let runs = outcomes.chunks(self.tuning.len() * seeds).map(spreads);
        let runs: Vec<Vec<Spread>> = runs.collect();
        let reference = &runs[policies.len() - 1];
        policies.pop();
        let scored = policies
            .into_iter()
            .zip(&runs)
            .map(|((spec, fit_index), own)| {
                let compares =
                    matches!(spec.kind, PolicyKind::Rule(policy) if policy.compares_regions());
                Tuned {
                    score: score(&changes(own, [reference; 3], seeds)),
                    fit: compares.then_some(FITS[fit_index]),
                    spec,
                    fit_index,
                    adapts: true,
                }
            });
        Ok(scored.collect())
    }

    /// The largest change of mean or P99 against least loaded in the misleading cases, or the first above the bound.
    fn worst(&self, candidate: &Tuned) -> Result<f64, Error> {
        let policy = [candidate.runs()];
        let mut worst = f64::NEG_INFINITY;
        let each = self.calibration.len() * self.effort.seeds;
        self.progress
            .begin("bounding", self.least_loaded.len() * each);
        for (case, reference) in &self.least_loaded {
            let trials = Trial::of(&policy, *case, self.calibration, self.effort);
            let outcomes = run_all(self.calibration, &trials, self.progress)?;
            let reference = spreads(reference);
            let changes = changes(&spreads(&outcomes), [&reference; 3], self.effort.seeds);
            worst = worst.max(changes.mean.mean).max(changes.p99.mean);
            if worst > HARM_MAX {
                break;
            }
        }
        Ok(worst)
    }

    /// Whether it keeps enough of its gain over least loaded.
    fn adapts(&self, tuned: &Tuned) -> Result<bool, Error> {
        let policies = [tuned.runs(), (spec("least_loaded")?, 0)];
        let grounds = self.calibration;
        let found = adapt::adaptation(grounds, &policies, self.effort, self.progress)?;
        let kept = found.and_then(|found| found.kept[0]);
        Ok(kept.is_none_or(|kept| kept.mean >= KEPT_MIN))
    }

    /// With the fit that is best for it and does no harm either.
    fn refitted(&self, kept: Tuned) -> Result<Tuned, Error> {
        if self.effort.grid == Grid::Quick {
            return Ok(kept);
        }
        let others = (1..FITS.len())
            .map(|fit| (kept.spec.clone(), fit))
            .collect();
        let mut others = self.scored(others, 1)?;
        others.sort_by(|a, b| a.score.total_cmp(&b.score));
        for other in others {
            if other.score > kept.score - FIT_GAIN_MIN {
                break;
            }
            if self.worst(&other)? <= HARM_MAX {
                return Ok(other);
            }
        }
        Ok(kept)
    }
}

/// Mean of the changes; less is better.
fn score(changes: &Changes) -> f64 {
    (changes.mean.mean + changes.p50.mean + changes.p99.mean) / 3.0
}
