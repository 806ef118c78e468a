//! What runs say of policies.

use serde::Serialize;

use super::ground::{Case, Ground, Trial, run_all};
use super::{BALANCERS, Effort, HARM_MAX, Progress, spec};
use crate::error::Error;
use crate::simulate::compare::{Estimate, estimate};
use crate::simulate::{Outcome, PolicySpec, Spread};

/// Mean, median and tail of the time per output token: changes in percent, less is better.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Changes {
    /// Of the mean.
    pub mean: Estimate,
    /// Of the median.
    pub p50: Estimate,
    /// Of the 99th percentile.
    pub p99: Estimate,
}

/// How a policy did.
#[derive(Clone, Debug, Serialize)]
pub struct Judged {
    /// With its parameters.
    pub policy: String,
    /// Whether it is a load balancer.
    pub balances: bool,
    /// Mean over all runs, ms.
    pub mean_ms: f64,
    /// Median of a run, mean over all, ms.
    pub p50_ms: f64,
    /// 99th percentile of a run, mean over all, ms.
    pub p99_ms: f64,
    /// Requests per decode step.
    pub batch: f64,
    /// Distinct experts per layer and decode step.
    pub experts: f64,
    /// Against the load balancer that is best in each.
    pub against_best: Changes,
    /// Those load balancers, in the order of the changes.
    pub best: [String; 3],
}

/// What a policy does where it is misled, against least loaded.
#[derive(Clone, Debug, Serialize)]
pub struct Harm {
    /// What misleads it.
    pub case: Case,
    /// Changes in percent; none where the trace does not have what the case needs.
    pub against_least_loaded: Option<Changes>,
    /// Whether mean and P99 are within [`HARM_MAX`] percent of least loaded's, or not beyond it by more than chance.
    pub holds: bool,
}

/// What changes are taken of: mean, P50, P99.
pub(super) const VALUES: [fn(&Spread) -> f64; 3] = [
    |tpot_ms| tpot_ms.mean,
    |tpot_ms| tpot_ms.p50,
    |tpot_ms| tpot_ms.p99,
];

/// Judges policies by outcomes in the order of [`Trial::of`]; the last four are the load balancers.
pub(super) fn judge(
    policies: &[(PolicySpec, usize)],
    outcomes: &[Outcome],
    seeds: usize,
) -> Vec<Judged> {
    let each = outcomes.len() / policies.len();
    let of: Vec<Vec<Spread>> = outcomes.chunks(each).map(spreads).collect();
    let of: Vec<&[Spread]> = of.iter().map(Vec::as_slice).collect();
    let first = policies.len() - BALANCERS.len();
    let best = best_of(&of[first..]).map(|index| first + index);
    let runs = outcomes.chunks(each);
    let judged = policies.iter().zip(&of).zip(runs);
    let judged = judged.map(|(((spec, _), own), runs)| Judged {
        policy: spec.name.clone(),
        balances: spec.is_load_balancer(),
        mean_ms: mean(own, VALUES[0]),
        p50_ms: mean(own, VALUES[1]),
        p99_ms: mean(own, VALUES[2]),
        batch: mean(runs, |outcome| outcome.batch),
        experts: mean(runs, |outcome| outcome.experts_per_step),
        against_best: changes(own, best.map(|index| of[index]), seeds),
        best: best.map(|index| policies[index].0.name.clone()),
    });
    judged.collect()
}

/// What the policy does on the evaluation requests in each of the misleading cases.
pub(super) fn never_worse(
    grounds: &[Ground<'_>],
    policy: &(PolicySpec, usize),
    effort: Effort,
    progress: &dyn Progress,
) -> Result<Vec<Harm>, Error> {
    let pair = [policy.clone(), (spec("least_loaded")?, 0)];
    let cases = Case::MISLEADING;
    progress.begin("misleading", 2 * cases.len() * grounds.len() * effort.seeds);
    let harms = cases.map(|case| {
        let has = grounds.iter().all(|ground| ground.has(case));
        let against_least_loaded = match has {
            true => {
                let trials = Trial::of(&pair, case, grounds, effort);
                let outcomes = run_all(grounds, &trials, progress)?;
                let all = spreads(&outcomes);
                let (own, other) = all.split_at(all.len() / 2);
                Some(changes(own, [other; 3], effort.seeds))
            }
            false => None,
        };
        let holds = against_least_loaded.as_ref().is_none_or(|changes| {
            [changes.mean, changes.p99]
                .iter()
                .all(|change| low(*change) <= HARM_MAX)
        });
        Ok(Harm {
            case,
            against_least_loaded,
            holds,
        })
    });
    harms.into_iter().collect()
}

/// Changes against a reference for each value, run by run; `seeds` runs of a split follow each other.
pub(super) fn changes(own: &[Spread], others: [&[Spread]; 3], seeds: usize) -> Changes {
    differences(own, others, others, seeds)
}

/// By how many points one is ahead of or behind the other, if each is compared with the reference.
pub(super) fn differences(
    own: &[Spread],
    others: [&[Spread]; 3],
    references: [&[Spread]; 3],
    seeds: usize,
) -> Changes {
    let change = |at: usize| {
        let value = VALUES[at];
        let runs = own.iter().zip(others[at]).zip(references[at]);
        let percent: Vec<f64> = runs
            .map(|((own, other), reference)| (value(own) - value(other)) / value(reference) * 100.0)
            .collect();
        over_splits(&percent, seeds)
    };
    Changes {
        mean: change(0),
        p50: change(1),
        p99: change(2),
    }
}

/// Which of them is best in each value.
pub(super) fn best_of(policies: &[&[Spread]]) -> [usize; 3] {
    VALUES.map(|value| {
        let of = |index: &usize| mean(policies[*index], value);
        let all = 0..policies.len();
        let best = all.min_by(|a, b| of(a).total_cmp(&of(b)));
        best.unwrap_or_default()
    })
}

/// Times per output token of each run.
pub(super) fn spreads(outcomes: &[Outcome]) -> Vec<Spread> {
    outcomes.iter().map(|outcome| outcome.tpot_ms).collect()
}

/// Runs of a split share a blob, so that only the means of splits are independent of each other: the interval is theirs.
fn over_splits(runs: &[f64], seeds: usize) -> Estimate {
    let splits = runs.chunks(seeds.max(1));
    let means: Vec<f64> = splits
        .map(|runs| runs.iter().sum::<f64>() / runs.len() as f64)
        .collect();
    estimate(&means)
}

/// Lower end of the interval.
pub(super) fn low(change: Estimate) -> f64 {
    change.mean - change.plus_minus.unwrap_or_default()
}

/// Upper end of the interval.
pub(super) fn high(change: Estimate) -> f64 {
    change.mean + change.plus_minus.unwrap_or_default()
}

fn mean<T>(runs: &[T], value: fn(&T) -> f64) -> f64 {
    runs.iter().map(value).sum::<f64>() / runs.len().max(1) as f64
}
