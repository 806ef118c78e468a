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

mod blind;
mod candidates;
mod regions;
mod rule;
mod running;

pub use candidates::candidates;
pub use regions::{Bounds, bounds};
pub use rule::{MAX_CANDIDATES, Policy, Rule, Tie};

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
        Policy::P2c => return blind::two_choices(workers, draw.entropy),
        Policy::RoundRobin => return blind::nth(workers, draw.sequence),
        Policy::Random => return blind::nth(workers, draw.entropy),
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

fn available(workers: &[Worker]) -> impl Iterator<Item = (usize, &Worker)> + Clone {
    workers
        .iter()
        .enumerate()
        .filter(|(_, worker)| worker.available)
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
