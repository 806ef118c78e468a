//! What to deploy: policies tuned and judged on the user's own requests, and whether to deploy any.
//!
//! Half of the requests **calibrate**, the other half **evaluates**. The first half is split several times: a blob is fitted to two
//! thirds ([`split`]), and every policy's tau, q, load cap, regions and layers are chosen on the last third ([`tune`]), among
//! [`candidates`]. A candidate is taken only if it keeps the **bound**: where signatures mislead or loads are old ([`ground::Case`]),
//! mean and P99 of the time per output token stay within [`HARM_MAX`] percent of least loaded. What is left is then judged on the
//! evaluation requests ([`judge`]), against the best of the four load balancers, with intervals over the splits, each with
//! arrivals of its own; the bound is measured there again, and what does not hold forbids to deploy.
//!
//! Nothing of the evaluation requests reaches a fit or a choice. The same trace, options and seed give the same advice, whatever
//! the number of threads.

pub mod adapt;
pub mod candidates;
pub mod ceiling;
pub mod deploy;
pub mod goodput;
pub mod ground;
pub mod judge;
pub mod split;
pub mod tune;
pub mod verdict;

use eldr_core::decide::Policy;
use serde::Serialize;

use crate::error::Error;
use crate::requests::Requests;
use crate::simulate::{Cluster, Outcome, Plan, PolicySpec, Spread, Workload};
use adapt::Adaptation;
use candidates::Grid;
use ceiling::Ceiling;
use goodput::Goodput;
use ground::{Case, Trial};
use judge::{Changes, Harm, Judged, differences, judge, spreads};
use tune::{Chosen, Tuned, tune};
use verdict::Verdict;

/// Most percent by which mean and P99 TPOT may be above least loaded's where signatures mislead.
pub const HARM_MAX: f64 = 1.0;
/// Fewest requests with a signature that advice can rest on: a fit has a third of them.
pub const REQUESTS_MIN: usize = 96;

/// The four load balancers that a policy has to beat.
pub const BALANCERS: [&str; 4] = ["least_loaded", "round_robin", "p2c", "random"];

/// What advice is asked for.
#[derive(Clone, Copy, Debug)]
pub struct Question<'a> {
    /// Signatures of the trace.
    pub requests: &'a Requests,
    /// The same trace as what is replayed.
    pub workload: &'a Workload,
    /// What serves.
    pub cluster: &'a Cluster,
    /// When requests arrive.
    pub plan: Plan<'a>,
    /// Names of the decode workers.
    pub workers: &'a [String],
    /// Policies that may be recommended, at least one, each looking at signatures.
    pub policies: &'a [Policy],
    /// Other traffic, from which and to which the trace's changes, and which the wrong calibration is made of; without, one half of
    /// the kinds stands for the other.
    pub other: Option<Traffic<'a>>,
}

/// Requests of a kind.
#[derive(Clone, Copy, Debug)]
pub struct Traffic<'a> {
    /// Their signatures, at least [`REQUESTS_MIN`].
    pub requests: &'a Requests,
    /// The same as what is replayed.
    pub workload: &'a Workload,
}

/// How thoroughly.
#[derive(Clone, Copy, Debug)]
pub struct Effort {
    /// Splits of the calibration requests, at least 2.
    pub splits: usize,
    /// Runs of each split, at least 1.
    pub seeds: usize,
    /// First seed.
    pub seed: u64,
    /// Which candidates.
    pub grid: Grid,
    /// P99 TPOT at which goodput is told, ms; without, what the best load balancer has.
    pub slo_tpot_ms: Option<f64>,
}

/// Who is told how far the work is.
pub trait Progress: Sync {
    /// `total` runs of `what` begin.
    fn begin(&self, what: &'static str, total: usize);
    /// One of them is done; from any thread.
    fn done(&self);
}

/// The advice.
#[derive(Clone, Debug, Serialize)]
pub struct Advice {
    /// Deploy or not, and why.
    pub verdict: Verdict,
    /// Requests that calibrate, and that evaluate.
    pub requests: (usize, usize),
    /// Splits and seeds of each.
    pub runs: (usize, usize),
    /// Each policy as it was tuned, those without a harmless candidate left out; the recommended one first.
    pub tuned: Vec<Tuned>,
    /// Policies no candidate of which keeps the bound.
    pub harmful: Vec<&'static str>,
    /// On the evaluation requests: the tuned policies in their order, then band as it is best without the bound, then the load balancers.
    pub judged: Vec<Judged>,
    /// The recommended policy less band without the bound, each against the best load balancer: percent points, less is better.
    pub ahead_of_band: Changes,
    /// The recommended policy when traffic changes; none where there is one kind of request.
    pub adaptation: Option<Adaptation>,
    /// The recommended policy where signatures mislead or loads are old, against least loaded.
    pub never_worse: Vec<Harm>,
    /// The recommended policy with signatures exchanged at random, against the best load balancer: what is not due to signatures.
    pub placebo: Judged,
    /// What no policy can exceed.
    pub ceiling: Ceiling,
    /// Requests per second at a P99.
    pub goodput: Goodput,
}

/// Tunes, judges and advises.
///
/// # Errors
/// Too few requests; a fit fails; the plan lacks lengths or times.
pub fn advise(
    question: Question<'_>,
    effort: Effort,
    progress: &dyn Progress,
) -> Result<Advice, Error> {
    let splits = split::splits(question.requests, effort)?;
    let others = question
        .other
        .map(|other| split::splits(other.requests, effort));
    let others = others.transpose()?;
    progress.begin("fitting", splits.len());
    let (mut tuning, mut calibration, mut evaluation) = (Vec::new(), Vec::new(), Vec::new());
    for (number, split) in splits.iter().enumerate() {
        let other = others.as_ref().and_then(|others| others.get(number));
        let grounds = split.grounds(question, other)?;
        tuning.push(grounds.tuning);
        calibration.push(grounds.calibration);
        evaluation.push(grounds.evaluation);
        progress.done();
    }
    let Chosen {
        tuned,
        harmful,
        unbounded,
    } = tune(&tuning, &calibration, question.policies, effort, progress)?;
    let balancers = BALANCERS.map(|name| spec(name).map(|spec| (spec, 0)));
    let balancers: Vec<(PolicySpec, usize)> = balancers.into_iter().collect::<Result<_, _>>()?;
    let mut policies: Vec<(PolicySpec, usize)> = tuned.iter().map(Tuned::runs).collect();
    policies.push((unbounded, 0));
    policies.extend(balancers.iter().cloned());
    progress.begin("judging", policies.len() * evaluation.len() * effort.seeds);
    let outcomes = ground::run_all(
        &evaluation,
        &Trial::of(&policies, Case::Plain, &evaluation, effort),
        progress,
    )?;
    let judged = judge(&policies, &outcomes, effort.seeds);
    let ahead_of_band = ahead_of_band(&policies, &outcomes, tuned.len(), effort.seeds);

    let best = policies[0].clone();
    let never_worse = judge::never_worse(&evaluation, &best, effort, progress)?;
    let mut against = balancers;
    against.insert(0, best.clone());
    let adaptation = adapt::adaptation(&evaluation, &against, effort, progress)?;
    progress.begin("placebo", against.len() * evaluation.len() * effort.seeds);
    let outcomes = ground::run_all(
        &evaluation,
        &Trial::of(&against, Case::Permuted, &evaluation, effort),
        progress,
    )?;
    let placebo = judge(&against, &outcomes, effort.seeds).swap_remove(0);
    let ceiling = ceiling::ceiling(question, &judged);
    let goodput = goodput::goodput(&evaluation, &best, &judged, effort, progress)?;
    let evaluated = splits[0].evaluation.len();
    Ok(Advice {
        verdict: verdict::verdict(
            &judged,
            &never_worse,
            &placebo,
            &ceiling,
            adaptation.as_ref(),
        ),
        ahead_of_band,
        adaptation,
        requests: (question.requests.len() - evaluated, evaluated),
        runs: (splits.len(), effort.seeds),
        tuned,
        harmful,
        judged,
        never_worse,
        placebo,
        ceiling,
        goodput,
    })
}

/// The first policy less that at `band`, in points of the load balancer that is best in each value.
fn ahead_of_band(
    policies: &[(PolicySpec, usize)],
    outcomes: &[Outcome],
    band: usize,
    seeds: usize,
) -> Changes {
    let each = outcomes.len() / policies.len();
    let runs: Vec<Vec<Spread>> = outcomes.chunks(each).map(spreads).collect();
    let runs: Vec<&[Spread]> = runs.iter().map(Vec::as_slice).collect();
    let balancers = &runs[policies.len() - BALANCERS.len()..];
    let best = judge::best_of(balancers).map(|index| balancers[index]);
    differences(runs[0], [runs[band]; 3], best, seeds)
}

/// A policy by its text.
pub(crate) fn spec(text: &str) -> Result<PolicySpec, Error> {
    let spec: Result<PolicySpec, String> = text.parse();
    spec.map_err(|problem| Error::new(problem, "name a policy of `eldr simulate --policies`"))
}

#[cfg(test)]
mod tests;
