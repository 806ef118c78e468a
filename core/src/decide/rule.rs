//! How to choose: a policy and its parameters.

use serde::{Deserialize, Serialize};

use crate::batch::Measure;
use crate::marginal::Objective;

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
