//! What a policy keeps of its gain when traffic changes and its blob does not.

use serde::Serialize;

use super::ground::{Case, Ground, Trial, run_all};
use super::judge::{Changes, VALUES, best_of, changes, high};
use super::{BALANCERS, Effort, Progress};
use crate::error::Error;
use crate::simulate::compare::{Estimate, estimate};
use crate::simulate::{Outcome, PolicySpec, Spread};

/// Least part of its gain that a policy should keep, in percent.
pub const KEPT_MIN: f64 = 80.0;

/// A policy before and after an abrupt change of traffic.
#[derive(Clone, Debug, Serialize)]
pub struct Adaptation {
    /// With traffic that the blob was fitted to, against the best load balancer.
    pub before: Changes,
    /// With other traffic from then on.
    pub after: Changes,
    /// The gain after in percent of the gain before, of mean, P50 and P99; none where a split gained nothing before.
    pub kept: [Option<Estimate>; 3],
    /// Whether [`KEPT_MIN`] of mean and P50 is kept, or not missed by more than chance.
    pub holds: bool,
}

/// The policy on the evaluation requests; none where there are not two kinds of traffic.
pub(super) fn adaptation(
    grounds: &[Ground<'_>],
    policies: &[(PolicySpec, usize)],
    effort: Effort,
    progress: &dyn Progress,
) -> Result<Option<Adaptation>, Error> {
    if !grounds.iter().all(|ground| ground.has(Case::AbruptChange)) {
        return Ok(None);
    }
    let trials = Trial::of(policies, Case::AbruptChange, grounds, effort);
    progress.begin("changing", trials.len());
    let outcomes = run_all(grounds, &trials, progress)?;
    let each = outcomes.len() / policies.len();
    let of: Vec<&[Outcome]> = outcomes.chunks(each).collect();
    let balancers = &of[of.len() - BALANCERS.len().min(of.len() - 1)..];
    Ok(Some(of_runs(of[0], balancers, effort.seeds)))
}

/// Of a policy's runs, against the best of `others` on the same arrivals, `seeds` runs of a split following each other.
pub(super) fn of_runs(own: &[Outcome], others: &[&[Outcome]], seeds: usize) -> Adaptation {
    let half = |at: usize| {
        let own = phase(own, at);
        let others: Vec<Vec<Spread>> = others.iter().map(|runs| phase(runs, at)).collect();
        let others: Vec<&[Spread]> = others.iter().map(Vec::as_slice).collect();
        let best = best_of(&others).map(|index| others[index]);
        let kept = |value: usize| parts(&own, best[value], VALUES[value], seeds);
        (changes(&own, best, seeds), [0, 1, 2].map(kept))
    };
    let ((before, gains), (after, left)) = (half(0), half(1));
    let kept = [0, 1, 2].map(|value| {
        let pairs = gains[value].iter().zip(&left[value]);
        let gained = gains[value].iter().all(|&gain| gain < 0.0);
        let kept: Vec<f64> = pairs
            .map(|(before, after)| 100.0 * after / before)
            .collect();
        gained.then(|| estimate(&kept))
    });
    let keeps = |kept: Option<Estimate>| kept.is_none_or(|kept| high(kept) >= KEPT_MIN);
    Adaptation {
        before,
        after,
        holds: keeps(kept[0]) && keeps(kept[1]),
        kept,
    }
}

/// Change in percent over the runs of each split together.
fn parts(own: &[Spread], other: &[Spread], value: fn(&Spread) -> f64, seeds: usize) -> Vec<f64> {
    let sum = |runs: &[Spread]| runs.iter().map(value).sum::<f64>();
    let pairs = own.chunks(seeds.max(1)).zip(other.chunks(seeds.max(1)));
    pairs
        .map(|(own, other)| 100.0 * (sum(own) / sum(other) - 1.0))
        .collect()
}

fn phase(runs: &[Outcome], at: usize) -> Vec<Spread> {
    let phases = runs.iter().map(|run| run.phases.get(at));
    phases
        .map(|phase| phase.map_or_else(Spread::default, |phase| phase.tpot_ms))
        .collect()
}
