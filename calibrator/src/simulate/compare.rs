//! Several policies on the same arrivals, over several seeds.

use std::collections::BTreeMap;

use eldr_core::decide::{Policy, Rule};
use rayon::prelude::*;
use serde::Serialize;

use super::Cluster;
use super::arrivals::{Arrival, Plan};
use super::events::{Served, run_served};
use super::hindsight::{Goal, ROUNDS, Search};
use super::measure::{Outcome, Phase};
use super::policy::{Known, PolicyKind, PolicySpec, router};
use super::workload::Workload;
use crate::error::Error;

/// A name, and where the value is.
pub type Metric = (&'static str, fn(&Outcome) -> f64);

/// What policies are compared by; less is better for all of them.
pub const METRICS: [Metric; 7] = [
    ("tpot_mean_ms", |outcome| outcome.tpot_ms.mean),
    ("tpot_p50_ms", |outcome| outcome.tpot_ms.p50),
    ("tpot_p99_ms", |outcome| outcome.tpot_ms.p99),
    ("ttft_p50_ms", |outcome| outcome.ttft_ms.p50),
    ("ttft_p99_ms", |outcome| outcome.ttft_ms.p99),
    ("experts_per_step", |outcome| outcome.experts_per_step),
    ("busiest", |outcome| outcome.busiest),
];

/// Values by the names of [`METRICS`].
pub type ByMetric<T> = BTreeMap<&'static str, T>;

/// A mean over seeds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Estimate {
    /// The mean.
    pub mean: f64,
    /// Half of its 95 % interval (Student's t over seeds); none of one seed.
    pub plus_minus: Option<f64>,
}

/// A change in percent, seed by seed, of the same arrivals.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Against {
    /// The policy that is the reference.
    pub reference: String,
    /// By how many percent the value is above the reference's; less is better.
    #[serde(flatten)]
    pub percent: Estimate,
}

/// How one policy did.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PolicyResult {
    /// As the user named it.
    pub policy: String,
    /// Values over seeds.
    pub values: ByMetric<Estimate>,
    /// Against round robin, where that is in the run.
    pub against_round_robin: ByMetric<Against>,
    /// Of each metric, against the load balancer that is best in it.
    pub against_best_balancer: ByMetric<Against>,
    /// Against the same rule with true usage, where that is in the run.
    pub against_true_usage: ByMetric<Against>,
    /// Of each metric, against the search in hindsight that is best in it, where there is one in the run.
    pub against_hindsight: ByMetric<Against>,
    /// Phases of the run, where there are several.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub phases: Vec<PhaseResult>,
    /// Every run, in the order of the seeds.
    pub runs: Vec<Outcome>,
}

/// How one policy did in one phase.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PhaseResult {
    /// When it began, seconds since the start.
    pub from_s: f64,
    /// Of each time per token, against the load balancer that is best in it in this phase.
    pub against_best_balancer: ByMetric<Against>,
    /// What the policy gains in this phase, as a share of what it gains in the first one; of those that it gained in.
    pub gain_kept: ByMetric<f64>,
}

type PhaseMetric = (&'static str, fn(&Phase) -> f64);

/// What phases are compared by.
const PHASE_METRICS: [PhaseMetric; 3] = [
    ("tpot_mean_ms", |phase| phase.tpot_ms.mean),
    ("tpot_p50_ms", |phase| phase.tpot_ms.p50),
    ("tpot_p99_ms", |phase| phase.tpot_ms.p99),
];

/// All policies, in the order in which they were named.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Comparison {
    /// Seeds of the arrivals.
    pub seeds: Vec<u64>,
    /// What the policies did.
    pub policies: Vec<PolicyResult>,
}

/// What is compared on what.
#[derive(Clone, Copy, Debug)]
pub struct Setting<'a> {
    /// What serves.
    pub cluster: &'a Cluster,
    /// What is asked for.
    pub workload: &'a Workload,
    /// When.
    pub plan: Plan<'a>,
    /// Tau and load cap of policies without their own.
    pub rule: Rule,
    /// The blob, where there is one.
    pub known: Option<&'a Known>,
}

/// Runs every policy on the arrivals of every seed; `on_run` is told when a run ends, from any thread.
///
/// # Errors
/// A policy lacks what it decides from, or there are no arrivals.
pub fn compare(
    setting: Setting<'_>,
    policies: &[PolicySpec],
    seeds: &[u64],
    on_run: impl Fn() + Sync,
) -> Result<Comparison, Error> {
    let Setting {
        cluster,
        workload,
        plan,
        rule,
        known,
    } = setting;
    let mut rule = rule;
    // Policies that know the step model know the true one, unless told otherwise.
    rule.objective.step = cluster.assumed.unwrap_or(cluster.step);
    let arrivals = seeds.iter().map(|&seed| plan.arrivals(workload, seed));
    let arrivals: Vec<Vec<Arrival>> = arrivals.collect::<Result<_, _>>()?;
    let online = policies.iter().filter(|spec| spec.is_online());
    let runs: Vec<(&PolicySpec, &Vec<Arrival>)> = online
        .flat_map(|spec| arrivals.iter().map(move |arrivals| (spec, arrivals)))
        .collect();
    let done: Vec<(Outcome, Vec<Served>)> = runs
        .into_par_iter()
        .map(|(spec, arrivals)| {
            let mut router = router(spec, &rule, known, workload, cluster)?;
            let run = run_served(cluster, workload, arrivals, router.as_mut());
            on_run();
            Ok(run)
        })
        .collect::<Result<_, Error>>()?;
    // Those who know a whole run begin where the others ended.
    let searches = policies.iter().filter_map(|spec| match spec.kind {
        PolicyKind::Hindsight(goal) => Some(goal),
        _ => None,
    });
    let searches: Vec<(Goal, usize)> = searches
        .flat_map(|goal| (0..seeds.len()).map(move |seed| (goal, seed)))
        .collect();
    let searched: Vec<Outcome> = searches
        .into_par_iter()
        .map(|(goal, seed)| {
            let search = Search {
                cluster,
                workload,
                arrivals: &arrivals[seed],
                goal,
                seed: seeds[seed],
                rounds: ROUNDS,
            };
            let value = |run: &&(Outcome, Vec<Served>)| goal.of(&run.0);
            let runs = done.iter().skip(seed).step_by(seeds.len());
            let start = match runs.min_by(|a, b| value(a).total_cmp(&value(b))) {
                Some(best) => best.clone(),
                None => search.least_loaded(),
            };
            let outcome = search.improve(start);
            on_run();
            outcome
        })
        .collect();
    let (mut done, mut searched) = (done.into_iter().map(|run| run.0), searched.into_iter());
    let outcomes = policies.iter().map(|spec| -> Vec<Outcome> {
        match spec.is_online() {
            true => done.by_ref().take(seeds.len()).collect(),
            false => searched.by_ref().take(seeds.len()).collect(),
        }
    });
    let outcomes: Vec<Vec<Outcome>> = outcomes.collect();
    Ok(Comparison {
        seeds: seeds.to_vec(),
        policies: judge(policies, &outcomes),
    })
}

/// Estimates and changes; `outcomes` are by policy and seed.
fn judge(policies: &[PolicySpec], outcomes: &[Vec<Outcome>]) -> Vec<PolicyResult> {
    let of = |policy: usize, value: fn(&Outcome) -> f64| -> Vec<f64> {
        outcomes[policy].iter().map(value).collect()
    };
    let change = |policy: usize, reference: usize, value| {
        let pairs = of(policy, value).into_iter().zip(of(reference, value));
        let percent: Vec<f64> = pairs
            .map(|(own, other)| (own / other - 1.0) * 100.0)
            .collect();
        Against {
            reference: policies[reference].name.clone(),
            percent: estimate(&percent),
        }
    };
    let round_robin = policies
        .iter()
        .position(|spec| spec.kind == PolicyKind::Rule(Policy::RoundRobin));
    let best = |value, among: fn(&PolicySpec) -> bool| {
        let those = (0..policies.len()).filter(|&index| among(&policies[index]));
        let mean = |&policy: &usize| estimate(&of(policy, value)).mean;
        those.min_by(|a, b| mean(a).total_cmp(&mean(b)))
    };
    let with_truth = |policy: usize| {
        let spec = policies[policy].with_true_usage()?;
        policies.iter().position(|other| other.is_same(&spec))
    };
    let results = (0..policies.len()).map(|policy| PolicyResult {
        policy: policies[policy].name.clone(),
        values: METRICS
            .map(|(name, value)| (name, estimate(&of(policy, value))))
            .into(),
        against_round_robin: METRICS
            .iter()
            .filter_map(|&(name, value)| Some((name, change(policy, round_robin?, value))))
            .collect(),
        against_best_balancer: METRICS
            .iter()
            .filter_map(|&(name, value)| {
                let best = best(value, PolicySpec::is_load_balancer)?;
                Some((name, change(policy, best, value)))
            })
            .collect(),
        against_true_usage: METRICS
            .iter()
            .filter_map(|&(name, value)| Some((name, change(policy, with_truth(policy)?, value))))
            .collect(),
        against_hindsight: METRICS
            .iter()
            .filter_map(|&(name, value)| {
                let best = best(value, |spec| !spec.is_online())?;
                Some((name, change(policy, best, value)))
            })
            .collect(),
        phases: phases(policies, outcomes, policy),
        runs: outcomes[policy].to_vec(),
    });
    results.collect()
}

/// The phases of a policy, if there are several.
fn phases(policies: &[PolicySpec], outcomes: &[Vec<Outcome>], policy: usize) -> Vec<PhaseResult> {
    let run = outcomes[policy].first();
    let of_run = run.map_or(&[][..], |run| &run.phases);
    if of_run.len() < 2 {
        return Vec::new();
    }
    let mut results: Vec<PhaseResult> = Vec::new();
    for (index, phase) in of_run.iter().enumerate() {
        let of = |policy: usize, value: fn(&Phase) -> f64| {
            let runs = outcomes[policy].iter();
            runs.map(move |run| value(&run.phases[index]))
        };
        let against = |(name, value)| {
            let mean = |&policy: &usize| of(policy, value).sum::<f64>();
            let balancers = (0..policies.len()).filter(|&index| policies[index].is_load_balancer());
            let best = balancers.min_by(|a, b| mean(a).total_cmp(&mean(b)))?;
            let pairs = of(policy, value).zip(of(best, value));
            let percent: Vec<f64> = pairs.map(|(own, o)| (own / o - 1.0) * 100.0).collect();
            let against = Against {
                reference: policies[best].name.clone(),
                percent: estimate(&percent),
            };
            Some((name, against))
        };
        let against: ByMetric<Against> = PHASE_METRICS.into_iter().filter_map(against).collect();
        let first = results.first().map(|first| &first.against_best_balancer);
        let kept = |(name, now): (&&'static str, &Against)| {
            let before = first?.get(name)?.percent.mean;
            (before < 0.0).then_some((*name, now.percent.mean / before))
        };
        results.push(PhaseResult {
            from_s: phase.from_s,
            gain_kept: against.iter().filter_map(kept).collect(),
            against_best_balancer: against,
        });
    }
    results
}

/// Mean and 95 % interval.
pub fn estimate(values: &[f64]) -> Estimate {
    let count = values.len() as f64;
    let mean = values.iter().sum::<f64>() / count;
    let squares: f64 = values.iter().map(|value| (value - mean).powi(2)).sum();
    let plus_minus = (values.len() > 1)
        .then(|| student_t(values.len() - 1) * (squares / (count - 1.0) / count).sqrt());
    Estimate { mean, plus_minus }
}

/// 97.5 % quantile of Student's t.
fn student_t(degrees: usize) -> f64 {
    const T: [f64; 20] = [
        12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160,
        2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
    ];
    // Within 0.003 of the quantile beyond the table.
    T.get(degrees - 1)
        .copied()
        .unwrap_or(1.96 + 2.45 / degrees as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn intervals_are_those_of_students_t() {
        let found = estimate(&[1.0, 2.0, 3.0]);
        assert_eq!(found.mean, 2.0);
        assert!((found.plus_minus.unwrap() - 4.303 / 3f64.sqrt()).abs() < 1e-9);
        assert_eq!(estimate(&[5.0]).plus_minus, None);
        assert!((student_t(30) - 2.042).abs() < 0.003, "{}", student_t(30));
        assert!((student_t(120) - 1.980).abs() < 0.003, "{}", student_t(120));
    }
}
