//! Where policies are tried: requests, blobs, and the cases in which signatures mislead.

use std::ops::Range;
use std::time::Duration;

use eldr_core::decide::Rule;
use rand::SeedableRng as _;
use rand::seq::SliceRandom as _;
use rand_chacha::ChaCha8Rng;
use rayon::prelude::*;
use serde::Serialize;

use super::{Effort, Progress};
use crate::error::Error;
use crate::simulate::policy::{Known, router};
use crate::simulate::{Arrival, Cluster, Outcome, Plan, PolicySpec, Workload, run};

/// How old loads of other gateways become.
const OLD: Duration = Duration::from_secs(1);

/// What a policy meets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Case {
    /// The traffic that the blob was fitted for.
    Plain,
    /// Signatures are exchanged between requests at random: they say nothing.
    Permuted,
    /// In the middle third of the run all requests are of one kind, in each run another.
    FlashCrowd,
    /// The blob was fitted to other traffic.
    WrongCalibration,
    /// Four gateways that learn each other's load once in a second.
    FourGateways,
    /// Sixteen.
    SixteenGateways,
    /// Half way through the run all requests are of the other kind than the blob was fitted to, in every second run the other way
    /// round. Not among the misleading ones: it says how much of a gain is kept.
    AbruptChange,
}

impl Case {
    /// The cases in which no harm may be done.
    pub const MISLEADING: [Case; 5] = [
        Case::Permuted,
        Case::WrongCalibration,
        Case::FlashCrowd,
        Case::FourGateways,
        Case::SixteenGateways,
    ];

    /// For people.
    pub fn name(self) -> &'static str {
        match self {
            Case::Plain => "as calibrated",
            Case::Permuted => "permuted signatures",
            Case::FlashCrowd => "flash crowd of one kind",
            Case::WrongCalibration => "wrong calibration",
            Case::FourGateways => "4 gateways, load 1 s old",
            Case::SixteenGateways => "16 gateways, load 1 s old",
            Case::AbruptChange => "abrupt change of traffic",
        }
    }
}

/// The requests of one split that are replayed, with what was fitted.
#[derive(Debug)]
pub struct Ground<'a> {
    pub(super) workload: Workload,
    /// By [`FITS`](super::split::FITS).
    pub(super) known: Vec<Known>,
    /// Two kinds of traffic, where there are two.
    pub(super) change: Option<Change>,
    /// Requests of each kind.
    pub(super) kinds: Vec<Vec<usize>>,
    pub(super) cluster: Cluster,
    pub(super) plan: Plan<'a>,
}

/// Two kinds of traffic.
#[derive(Debug)]
pub(super) struct Change {
    /// The requests of both.
    pub(super) workload: Workload,
    /// A blob of each, which knows nothing of the other.
    pub(super) known: [Known; 2],
    /// Which requests are of each. The second kind is what meets the wrong calibration, the blob of the first.
    pub(super) requests: [Vec<usize>; 2],
}

/// One run.
#[derive(Clone, Debug)]
pub struct Trial {
    /// Which ground.
    pub split: usize,
    /// Which of its blobs.
    pub fit: usize,
    /// What happens.
    pub case: Case,
    /// Seed of the arrivals.
    pub seed: u64,
    /// Who decides.
    pub spec: PolicySpec,
}

impl Trial {
    /// Every policy in every split with every seed: in this order, those of a policy together. Splits have seeds of their own.
    pub fn of(
        policies: &[(PolicySpec, usize)],
        case: Case,
        grounds: &[Ground<'_>],
        effort: Effort,
    ) -> Vec<Trial> {
        let trials = policies.iter().flat_map(|(spec, fit)| {
            (0..grounds.len()).flat_map(move |split| {
                (0..effort.seeds).map(move |run| Trial {
                    split,
                    fit: *fit,
                    case,
                    seed: effort
                        .seed
                        .wrapping_add((split * effort.seeds + run) as u64),
                    spec: spec.clone(),
                })
            })
        });
        trials.collect()
    }
}

/// Runs all trials, and gives the outcomes in their order.
///
/// # Errors
/// There are no arrivals, or a length or time that the plan needs is missing.
pub fn run_all(
    grounds: &[Ground<'_>],
    trials: &[Trial],
    progress: &dyn Progress,
) -> Result<Vec<Outcome>, Error> {
    let outcomes = trials.par_iter().map(|trial| {
        let outcome = grounds[trial.split].run(trial, None);
        progress.done();
        outcome
    });
    outcomes.collect()
}

impl Ground<'_> {
    /// Whether the case can happen here: a wrong calibration needs other traffic.
    pub fn has(&self, case: Case) -> bool {
        match case {
            Case::WrongCalibration | Case::AbruptChange => self.change.is_some(),
            Case::FlashCrowd => self.kinds.len() > 1,
            _ => true,
        }
    }

    /// One run, at the plan's rate or another. A case that cannot happen here is run as calibrated.
    pub(super) fn run(&self, trial: &Trial, rate_per_s: Option<f64>) -> Result<Outcome, Error> {
        let (mut workload, mut known) = (&self.workload, &self.known[trial.fit]);
        let (mut cluster, mut plan) = (self.cluster.clone(), self.plan);
        match trial.case {
            Case::Permuted => plan.permute_signatures = true,
            Case::FourGateways => (cluster.gateways, cluster.share) = (4, Some(OLD)),
            Case::SixteenGateways => (cluster.gateways, cluster.share) = (16, Some(OLD)),
            _ => {}
        }
        if let Some(rate) = rate_per_s {
            plan.times = plan.times.at_rate(rate);
        }
        let mut arrivals = plan.arrivals(workload, trial.seed)?;
        let (end, half) = (Duration::MAX, plan.duration / 2);
        match (trial.case, &self.change) {
            (Case::FlashCrowd, _) if !self.kinds.is_empty() => {
                let kind = &self.kinds[trial.seed as usize % self.kinds.len()];
                let middle = plan.duration / 3..plan.duration * 2 / 3;
                replace(&mut arrivals, kind, middle);
            }
            (Case::WrongCalibration, Some(change)) => {
                (workload, known) = (&change.workload, &change.known[0]);
                let those = change.shuffled(1, trial.seed);
                replace(&mut arrivals, &those, Duration::ZERO..end);
            }
            (Case::AbruptChange, Some(change)) => {
                let first = (trial.seed % 2) as usize;
                (workload, known) = (&change.workload, &change.known[first]);
                let sides = [first, 1 - first].map(|side| change.shuffled(side, trial.seed));
                replace(&mut arrivals, &sides[0], Duration::ZERO..half);
                replace(&mut arrivals, &sides[1], half..end);
                cluster.phases = vec![Duration::ZERO, half];
            }
            _ => {}
        }
        let mut rule = Rule::default();
        rule.objective.step = cluster.assumed.unwrap_or(cluster.step);
        let mut router = router(&trial.spec, &rule, Some(known), workload, &cluster)?;
        Ok(run(&cluster, workload, &arrivals, router.as_mut()))
    }
}

impl Change {
    /// The requests of one kind in random order: traces have them kind by kind.
    fn shuffled(&self, side: usize, seed: u64) -> Vec<usize> {
        let mut requests = self.requests[side].clone();
        requests.shuffle(&mut ChaCha8Rng::seed_from_u64(seed));
        requests
    }
}

/// Has the requests `those` arrive, one after the other, at what times there are in between; lengths and times stay.
fn replace(arrivals: &mut [Arrival], those: &[usize], between: Range<Duration>) {
    let theirs = arrivals
        .iter_mut()
        .filter(|arrival| between.contains(&arrival.at));
    for (arrival, &request) in theirs.zip(those.iter().cycle()) {
        (arrival.request, arrival.signature) = (request, request);
    }
}
