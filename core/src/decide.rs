//! The decision: which decode worker serves a request.
//!
//! **Band plus least loaded** (ELDR §5): among the regions whose centroid is within `tau` of the most similar one,
//! the worker with the least load. A **load cap** keeps static centroids safe when the mix of traffic changes: a worker
//! above `max_load_factor` × the mean load is no candidate, and if that empties the band, the band widens to
//! the next most similar region.
//!
//! **Beyond the paper** ([`batch`](crate::batch), [`marginal`](crate::marginal)): [`Policy::Marginal`] chooses by what the request would
//! cost those who run on each worker now, [`Policy::Hybrid`] does so among the regions of a wide band, and [`Policy::BatchBand`] holds the
//! request against running batches as `band` does against centroids. The cap holds for each.
//!
//! [`decide`] cannot fail. Whatever is missing or broken becomes a [`Reason`] and the least loaded worker.

mod candidates;
mod regions;
mod running;

use serde::{Deserialize, Serialize};

use crate::batch::Measure;
use crate::marginal::Objective;

pub use candidates::candidates;
pub use regions::{Bounds, bounds};

/// Most [`Rule::candidates`].
pub const MAX_CANDIDATES: u32 = 4096;

/// How the worker is chosen. One list for filter, simulator and reports.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Policy {
    /// Least loaded among the regions within `tau` of the most similar one.
    #[default]
    Band,
    /// The most similar region, whatever the load below the cap.
    Top1,
    /// The worker on which the request adds least to the cost of what runs there. Needs no centroids.
    Marginal,
    /// As marginal, among the regions within a wide `tau` of the most similar one.
    Hybrid,
    /// As band, with the mean request of each running batch in place of a centroid: the simplest policy that looks at batches.
    BatchBand,
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
    pub const ALL: [Self; 9] = [
        Self::Band,
        Self::Top1,
        Self::Marginal,
        Self::Hybrid,
        Self::BatchBand,
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
            Self::Marginal => "marginal",
            Self::Hybrid => "hybrid",
            Self::BatchBand => "batch_band",
            Self::LeastLoaded => "least_loaded",
            Self::P2c => "p2c",
            Self::RoundRobin => "round_robin",
            Self::Random => "random",
        }
    }

    /// Whether the signature matters to this policy.
    pub fn looks(self) -> bool {
        self.compares_regions() || self.measure().is_some()
    }

    /// Whether it compares signatures with centroids.
    pub fn compares_regions(self) -> bool {
        matches!(self, Self::Band | Self::Top1 | Self::Hybrid)
    }

    /// Whether it chooses among few workers where [`Rule::candidates`] says so.
    pub fn draws(self) -> bool {
        self.compares_regions() || self == Self::Marginal
    }

    /// What it needs to know of the running batches; `None` where that is nothing.
    pub fn measure(self) -> Option<Measure> {
        match self {
            Self::Marginal | Self::Hybrid => Some(Measure::Usage),
            Self::BatchBand => Some(Measure::Direction),
            _ => None,
        }
    }
}

/// What a decision rested on. Closed: the names are metric tags, log fields and report columns.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Reason {
    /// A worker of the band, by load.
    InBand,
    /// The most similar region.
    Top1,
    /// The worker on which the request costs least.
    Marginal,
    /// The policy does not look at signatures, or is to hold them against running batches and nobody keeps those.
    Blind,
    /// No centroid blob is loaded for the model.
    NoBlob,
    /// The prefill answer had no signature.
    NoSignature,
    /// The signature could not be read, or lacks what the policy needs: prompt tokens, any count.
    MalformedSignature,
    /// The signature is for another model shape, or lacks a layer that the blob selects.
    GeometryMismatch,
    /// No worker that the policy may choose is available.
    AllEjected,
}

impl Reason {
    /// Every reason once.
    pub const ALL: [Self; 9] = [
        Self::InBand,
        Self::Top1,
        Self::Marginal,
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
            Self::Marginal => "marginal",
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
    /// Band width in cosine similarity, 0 to 2. The paper's best is 0.1; `hybrid` wants a wider one: see [`Rule::of`].
    pub tau: f32,
    /// A worker above this multiple of the mean load is no candidate; at least 1. `None`: no cap, as in the paper.
    pub max_load_factor: Option<f64>,
    /// Equal loads.
    pub tie: Tie,
    /// Widen a band of one region to the two nearest when `tau` > 0, as one version of the published artifact does.
    pub widen_single: bool,
    /// What `marginal` and `hybrid` keep small.
    pub objective: Objective,
    /// `band`, `top1`, `marginal` and `hybrid` choose among at most so many workers, drawn by lot from those that they may choose; 1 to
    /// [`MAX_CANDIDATES`]. `None`: among all. A few keep the cost of a decision where it is as workers grow, and gateways that know
    /// old loads only from all choosing the same worker.
    pub candidates: Option<u32>,
}

impl Default for Rule {
    fn default() -> Self {
        Self {
            policy: Policy::Band,
            tau: 0.1,
            max_load_factor: Some(1.25),
            tie: Tie::Similar,
            widen_single: false,
            objective: Objective::default(),
            candidates: None,
        }
    }
}

impl Rule {
    /// A policy with the parameters that it is best known with: in `hybrid`, running batches choose within a wide band.
    pub fn of(policy: Policy) -> Self {
        let tau = match policy {
            Policy::Hybrid => 0.5,
            _ => 0.1,
        };
        Self {
            policy,
            tau,
            ..Self::default()
        }
    }

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
    /// Whether some serve several.
    overlap: bool,
}

impl Regions {
    /// No region at all.
    pub const NONE: Self = Self {
        served_by: Vec::new(),
        serving: Vec::new(),
        overlap: false,
    };

    /// Lists the workers of each region.
    pub fn new(served_by: Vec<Vec<WorkerIndex>>) -> Self {
        let mut serving = served_by.concat();
        let seats = serving.len();
        serving.sort_unstable();
        serving.dedup();
        Self {
            served_by,
            overlap: serving.len() < seats,
            serving,
        }
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
    /// What the running batches say, as [`Batches::to_each`](crate::batch::Batches::to_each) computes it for the same rule.
    Running {
        /// One number per worker. `marginal`, `hybrid`: by how much the request raises the cost there, infinity of a worker that is no
        /// [candidate](candidates()). `batch_band`: its cosine to the batch, or NaN where there is nothing to compare it with.
        workers: &'a [f64],
        /// Cosine similarity to each region, or why there is none.
        similarities: Result<&'a [f32], Reason>,
    },
    /// Nothing, for this reason.
    Missing(Reason),
}

impl<'a> Evidence<'a> {
    fn similarities(self) -> Result<&'a [f32], Reason> {
        match self {
            Self::Similarities(similarities) => Ok(similarities),
            Self::Running { similarities, .. } => similarities,
            Self::Missing(reason) => Err(reason),
        }
    }

    fn running(self) -> Result<&'a [f64], Reason> {
        match self {
            Self::Running { workers, .. } => Ok(workers),
            Self::Similarities(_) => Err(Reason::Blind),
            Self::Missing(reason) => Err(reason),
        }
    }
}

/// The randomness of one decision; a policy uses the part it needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Draw {
    /// Grows by one per decision: round robin.
    pub sequence: u64,
    /// 64 random bits: random, p2c, candidates by lot.
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
    let found = match rule.policy {
        Policy::Band | Policy::Top1 | Policy::Hybrid => {
            evidence.similarities().map(|similarities| {
                let growth = evidence.running().ok();
                regions::choose(rule, similarities, growth, regions, workers, draw)
            })
        }
        Policy::Marginal => evidence
            .running()
            .map(|growth| running::least_growth(rule, growth, workers)),
        Policy::BatchBand => evidence
            .running()
            .map(|cosines| running::band(rule, cosines, workers)),
        Policy::LeastLoaded => Err(Reason::Blind),
        Policy::P2c => return blind(two_choices(workers, draw.entropy), workers),
        Policy::RoundRobin => return blind(nth_available(workers, draw.sequence), workers),
        Policy::Random => return blind(nth_available(workers, draw.entropy), workers),
    };
    match found {
        Ok(Some(decision)) => decision,
        Ok(None) => fallback(Reason::AllEjected, workers),
        Err(reason) => fallback(reason, workers),
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

/// Highest load that a candidate may have: a multiple of the mean over those that are available.
/// Somebody is always at or below the mean, so the cap (at least 1) never takes everybody out.
fn load_limit<'a>(factor: Option<f64>, workers: impl Iterator<Item = &'a Worker>) -> f64 {
    let Some(factor) = factor else {
        return f64::INFINITY;
    };
    let (mut sum, mut count) = (0.0, 0u32);
    for worker in workers.filter(|worker| worker.available) {
        sum += worker.load;
        count += 1;
    }
    factor.max(1.0) * sum / f64::from(count.max(1))
}

/// What is known of a worker; of one of which nothing is known, the worst.
fn at(growth: &[f64], worker: usize) -> f64 {
    growth.get(worker).copied().unwrap_or(f64::INFINITY)
}

#[cfg(test)]
mod tests;
