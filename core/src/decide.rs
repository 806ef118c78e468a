//! The decision: which decode worker serves a request.
//!
//! **Band plus least loaded** (ELDR §5): among the regions whose centroid is within `tau` of the most similar one,
//! the worker with the least load. A **load cap** keeps static centroids safe when the mix of traffic changes: a worker
//! above `max_load_factor` × the mean load is no candidate, and if that empties the band, the band widens to
//! the next most similar region.
//!
//! [`decide`] cannot fail. Whatever is missing or broken becomes a [`Reason`] and the least loaded worker.

use serde::{Deserialize, Serialize};

/// How the worker is chosen. One list for filter, simulator and reports.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Policy {
    /// Least loaded among the regions within `tau` of the most similar one.
    #[default]
    Band,
    /// The most similar region, whatever the load below the cap.
    Top1,
    /// Fewest in flight.
    LeastLoaded,
    /// The less loaded of two random workers.
    P2c,
    /// One after the other.
    RoundRobin,
    /// Uniformly random.
    Random,
}

impl Policy {
    /// Every policy once.
    pub const ALL: [Self; 6] = [
        Self::Band,
        Self::Top1,
        Self::LeastLoaded,
        Self::P2c,
        Self::RoundRobin,
        Self::Random,
    ];

    /// The name in configuration, metrics and reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Band => "band",
            Self::Top1 => "top1",
            Self::LeastLoaded => "least_loaded",
            Self::P2c => "p2c",
            Self::RoundRobin => "round_robin",
            Self::Random => "random",
        }
    }

    /// Whether the signature matters to this policy.
    pub fn looks(self) -> bool {
        matches!(self, Self::Band | Self::Top1)
    }
}

/// What a decision rested on. Closed: the names are metric tags, log fields and report columns.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Reason {
    /// A worker of the band, by load.
    InBand,
    /// The most similar region.
    Top1,
    /// The policy does not look at signatures.
    Blind,
    /// No centroid blob is loaded for the model.
    NoBlob,
    /// The prefill answer had no signature.
    NoSignature,
    /// The signature could not be read.
    MalformedSignature,
    /// The signature is for another model shape, or lacks a layer that the blob selects.
    GeometryMismatch,
    /// No worker that the policy may choose is available.
    AllEjected,
}

impl Reason {
    /// Every reason once.
    pub const ALL: [Self; 8] = [
        Self::InBand,
        Self::Top1,
        Self::Blind,
        Self::NoBlob,
        Self::NoSignature,
        Self::MalformedSignature,
        Self::GeometryMismatch,
        Self::AllEjected,
    ];

    /// The name in metrics, logs and reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::InBand => "in_band",
            Self::Top1 => "top1",
            Self::Blind => "blind",
            Self::NoBlob => "no_blob",
            Self::NoSignature => "no_signature",
            Self::MalformedSignature => "malformed_signature",
            Self::GeometryMismatch => "geometry_mismatch",
            Self::AllEjected => "all_ejected",
        }
    }
}

/// Equal loads go where?
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Tie {
    /// To the more similar region, then to the lower worker index.
    #[default]
    Similar,
    /// To the lower worker index at once, as the published artifact does.
    Index,
}

/// A policy with its parameters.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rule {
    /// How to choose.
    pub policy: Policy,
    /// Band width in cosine similarity, 0 to 2. The paper's best is 0.1.
    pub tau: f32,
    /// A worker above this multiple of the mean load is no candidate; at least 1. `None`: no cap, as in the paper.
    pub max_load_factor: Option<f64>,
    /// Equal loads.
    pub tie: Tie,
    /// Widen a band of one region to the two nearest when `tau` > 0, as one version of the published artifact does.
    pub widen_single: bool,
}

impl Default for Rule {
    fn default() -> Self {
        Self {
            policy: Policy::Band,
            tau: 0.1,
            max_load_factor: Some(1.25),
            tie: Tie::Similar,
            widen_single: false,
        }
    }
}

impl Rule {
    /// The rule as published: no load cap, equal loads to the lower index.
    pub fn as_published(tau: f32) -> Self {
        Self {
            tau,
            max_load_factor: None,
            tie: Tie::Index,
            ..Self::default()
        }
    }
}

/// Index into the configured decode workers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct WorkerIndex(pub usize);

/// Index into the blob's regions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RegionIndex(pub usize);

/// Which workers serve each region.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Regions {
    served_by: Vec<Vec<WorkerIndex>>,
    /// Workers that serve any region, each once, ascending.
    serving: Vec<WorkerIndex>,
}

impl Regions {
    /// No region at all.
    pub const NONE: Self = Self {
        served_by: Vec::new(),
        serving: Vec::new(),
    };

    /// Lists the workers of each region.
    pub fn new(served_by: Vec<Vec<WorkerIndex>>) -> Self {
        let mut serving = served_by.concat();
        serving.sort_unstable();
        serving.dedup();
        Self { served_by, serving }
    }
}

/// A decode worker as the gateway sees it now.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Worker {
    /// Load in any unit that all workers share, such as requests in flight. Finite and not negative.
    pub load: f64,
    /// False while the worker is taken out.
    pub available: bool,
}

/// What is known of a request's experts.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Evidence<'a> {
    /// Cosine similarity to each region.
    Similarities(&'a [f32]),
    /// Nothing, for this reason.
    Missing(Reason),
}

/// The randomness of one decision; a policy uses the part it needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Draw {
    /// Grows by one per decision: round robin.
    pub sequence: u64,
    /// 64 random bits: random, p2c.
    pub entropy: u64,
}

/// A worker and why.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Decision {
    /// The worker to use.
    pub target: WorkerIndex,
    /// What the choice rested on.
    pub reason: Reason,
    /// Region through which the worker was chosen.
    pub region: Option<RegionIndex>,
    /// Similarity to that region.
    pub similarity: Option<f32>,
    /// Similarity to the most similar region, which may be another.
    pub top: Option<f32>,
    /// Regions within `tau` of the most similar one; 0 where nobody looked.
    pub band: usize,
}

/// Chooses a worker. The indices of `regions` point into `workers`, which must not be empty.
/// Workers in no region get fallback traffic only.
pub fn decide(
    rule: &Rule,
    evidence: Evidence<'_>,
    regions: &Regions,
    workers: &[Worker],
    draw: Draw,
) -> Decision {
    match (rule.policy, evidence) {
        (Policy::Band | Policy::Top1, Evidence::Similarities(similarities)) => {
            by_similarity(rule, similarities, regions, workers)
                .unwrap_or_else(|| fallback(Reason::AllEjected, workers))
        }
        (Policy::Band | Policy::Top1, Evidence::Missing(reason)) => fallback(reason, workers),
        (Policy::LeastLoaded, _) => fallback(Reason::Blind, workers),
        (Policy::P2c, _) => blind(two_choices(workers, draw.entropy), workers),
        (Policy::RoundRobin, _) => blind(nth_available(workers, draw.sequence), workers),
        (Policy::Random, _) => blind(nth_available(workers, draw.entropy), workers),
    }
}

/// Least loaded available worker; least loaded of all, and another reason, when none is available.
fn fallback(reason: Reason, workers: &[Worker]) -> Decision {
    let least = |only_available: bool| {
        let candidates = workers
            .iter()
            .enumerate()
            .filter(|(_, w)| w.available || !only_available);
        candidates
            .min_by(|(_, a), (_, b)| a.load.total_cmp(&b.load))
            .map(|(index, _)| index)
    };
    let (target, reason) = match least(true) {
        Some(index) => (index, reason),
        None => (least(false).unwrap_or_default(), Reason::AllEjected),
    };
    Decision {
        target: WorkerIndex(target),
        reason,
        region: None,
        similarity: None,
        top: None,
        band: 0,
    }
}

fn blind(target: Option<usize>, workers: &[Worker]) -> Decision {
    let fallback = fallback(Reason::Blind, workers);
    Decision {
        target: target.map_or(fallback.target, WorkerIndex),
        ..fallback
    }
}

fn available(workers: &[Worker]) -> impl Iterator<Item = (usize, &Worker)> + Clone {
    workers
        .iter()
        .enumerate()
        .filter(|(_, worker)| worker.available)
}

fn nth_available(workers: &[Worker], n: u64) -> Option<usize> {
    let mut available = available(workers);
    let count = available.clone().count() as u64;
    let turn = n.checked_rem(count)? as usize;
    available.nth(turn).map(|(index, _)| index)
}

fn two_choices(workers: &[Worker], entropy: u64) -> Option<usize> {
    let available = available(workers);
    let count = available.clone().count() as u64;
    let (high, low) = (entropy >> 32, entropy & 0xffff_ffff);
    let first = high.checked_rem(count)?;
    let Some(step) = low.checked_rem(count - 1) else {
        return nth_available(workers, 0);
    };
    let second = (first + 1 + step) % count;
    let (a, b) = (
        available.clone().nth(first as usize)?,
        available.clone().nth(second as usize)?,
    );
    Some(if b.1.load < a.1.load { b.0 } else { a.0 })
}

/// What a policy that looks at signatures measures regions and workers by.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Bounds {
    /// Similarity from which on a region is in the band, before the band is widened.
    pub threshold: f32,
    /// Highest load that a candidate may have; infinite without a cap.
    pub load: f64,
}

/// The bounds of a decision; `None` where no similarity is a number.
pub fn bounds(
    rule: &Rule,
    similarities: &[f32],
    regions: &Regions,
    workers: &[Worker],
) -> Option<Bounds> {
    let (_, top) = first_max(similarities, |_, _| true)?;
    let tau = match rule.policy {
        Policy::Top1 => 0.0,
        _ => rule.tau,
    };
    Some(Bounds {
        threshold: top - tau,
        load: load_limit(rule.max_load_factor, regions, workers),
    })
}

fn by_similarity(
    rule: &Rule,
    similarities: &[f32],
    regions: &Regions,
    workers: &[Worker],
) -> Option<Decision> {
    let (best, top) = first_max(similarities, |_, _| true)?;
    let Bounds {
        mut threshold,
        load: limit,
    } = bounds(rule, similarities, regions, workers)?;
    let (tau, reason) = match rule.policy {
        Policy::Top1 => (0.0, Reason::Top1),
        _ => (rule.tau, Reason::InBand),
    };
    let band = similarities
        .iter()
        .filter(|&&similarity| similarity >= threshold)
        .count();
    let second = if rule.widen_single && tau > 0.0 && band == 1 {
        first_max(similarities, |region, _| region != best).map(|(region, _)| region)
    } else {
        None
    };
    loop {
        let member =
            |region: usize, similarity: f32| similarity >= threshold || Some(region) == second;
        if let Some((target, region, similarity)) =
            least_loaded_member(rule.tie, similarities, member, regions, workers, limit)
        {
            return Some(Decision {
                target,
                reason,
                region: Some(region),
                similarity: Some(similarity),
                top: Some(top),
                band: band + usize::from(second.is_some()),
            });
        }
        // Nobody there may take the request: widen to the next most similar region.
        threshold = first_max(similarities, |_, similarity| similarity < threshold)?.1;
    }
}

/// The largest similarity that `accept`s, and the lowest region that has it.
fn first_max(similarities: &[f32], accept: impl Fn(usize, f32) -> bool) -> Option<(usize, f32)> {
    let candidates = similarities.iter().copied().enumerate();
    candidates
        .filter(|&(region, similarity)| !similarity.is_nan() && accept(region, similarity))
        .reduce(|best, next| if next.1 > best.1 { next } else { best })
}

/// Highest load that a candidate may have: a multiple of the mean over the available workers of all regions.
/// Somebody is always at or below the mean, so the cap (at least 1) never takes everybody out.
fn load_limit(factor: Option<f64>, regions: &Regions, workers: &[Worker]) -> f64 {
    let Some(factor) = factor else {
        return f64::INFINITY;
    };
    let (mut sum, mut count) = (0.0, 0u32);
    for worker in regions
        .serving
        .iter()
        .filter_map(|index| workers.get(index.0))
    {
        if worker.available {
            sum += worker.load;
            count += 1;
        }
    }
    factor.max(1.0) * sum / f64::from(count.max(1))
}

fn least_loaded_member(
    tie: Tie,
    similarities: &[f32],
    member: impl Fn(usize, f32) -> bool,
    regions: &Regions,
    workers: &[Worker],
    limit: f64,
) -> Option<(WorkerIndex, RegionIndex, f32)> {
    let mut best: Option<(f64, WorkerIndex, RegionIndex, f32)> = None;
    for (region, (&similarity, served_by)) in
        similarities.iter().zip(&regions.served_by).enumerate()
    {
        if !member(region, similarity) {
            continue;
        }
        for &index in served_by {
            let Some(worker) = workers.get(index.0) else {
                continue;
            };
            if !worker.available || worker.load > limit {
                continue;
            }
            let better = best.is_none_or(|(load, chosen, _, chosen_similarity)| {
                let by_load = worker.load.total_cmp(&load);
                let by_similarity = match tie {
                    Tie::Similar => chosen_similarity.total_cmp(&similarity),
                    Tie::Index => std::cmp::Ordering::Equal,
                };
                by_load.then(by_similarity).then(index.cmp(&chosen)).is_lt()
            });
            if better {
                best = Some((worker.load, index, RegionIndex(region), similarity));
            }
        }
    }
    best.map(|(_, worker, region, similarity)| (worker, region, similarity))
}

#[cfg(test)]
mod tests;
