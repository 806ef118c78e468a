//! How strongly requests differ, and in what: solved for from what is published.

use rayon::prelude::*;
use serde::Serialize;

use super::Shape;
use super::draw::{Drawn, Gates, Generator};
use super::measure::{fewer_experts_in_domain, phase_correlation};
use super::workload::Kind;

/// Requests that strengths are solved on.
const REQUESTS: usize = 320;
/// Batch in which fewer experts are counted: about what a worker of the paper runs at half its highest rate.
pub(super) const BATCH: usize = 32;
/// Bisections, and turns between the two.
const STEPS: usize = 9;
const TURNS: usize = 3;
/// No strength is above this: a standard deviation of logits.
const MAX: f32 = 4.0;

/// Standard deviations of what is added to an expert's logit.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Strengths {
    /// By the domain.
    pub domain: f32,
    /// By the cluster inside the domain.
    pub cluster: f32,
    /// By the request, in both phases.
    pub request: f32,
    /// By the request, in each phase anew.
    pub phase: f32,
}

/// What the requests are to be like.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Targets {
    /// By which part fewer experts a same-domain batch activates.
    pub fewer_experts: f64,
    /// Correlation of distances in prefill and decode.
    pub phase_correlation: f64,
}

/// Strengths of clusters for which the others are solved beforehand. Nothing published fixes them. The weaker is as if topics differed
/// as much as languages do; with much more than the stronger, clusters alone would make batches of a domain differ more than was
/// published, whatever domains do.
pub const CLUSTERS: [f32; 2] = [1.0, 1.5];
/// Place of what is assumed where nothing is said.
pub const CLUSTER: usize = 1;
/// What [`Strengths::solve`] finds with seed 1 for tasks, and [`Strengths::with_fewer`] then for languages: by cluster strength, for
/// the models of the paper in their order, the strength of the phase and those of the domains.
const FITTED: [[(f32, [f32; 2]); 3]; CLUSTERS.len()] = [
    [
        (0.5586, [1.6133, 0.9570]),
        (1.9336, [1.4883, 0.4180]),
        (0.4570, [1.6133, 1.0039]),
    ],
    [
        (0.6602, [1.4414, 0.8164]),
        (1.7461, [1.1836, 0.0039]),
        (0.6133, [1.4492, 0.8789]),
    ],
];
/// Strength of single requests, which nothing published fixes either.
const REQUEST: f32 = 0.5;

/// Published correlations of the paper's models, lowest and highest.
const CORRELATION: (f64, f64) = (0.70, 0.92);

impl Targets {
    /// As published. By how much fewer experts a domain activates is a range over the models; which model is where in it was not said.
    /// Here they are in the order of their correlations: experts that tell decode from prefill tell domains apart.
    pub fn published(shape: &Shape, kind: Kind) -> Self {
        let (least, most) = kind.fewer_experts();
        let (lowest, highest) = CORRELATION;
        let place = (shape.phase_correlation - lowest) / (highest - lowest);
        Targets {
            fewer_experts: least + (most - least) * place.clamp(0.0, 1.0),
            phase_correlation: shape.phase_correlation,
        }
    }
}

impl Strengths {
    /// What meets the [published targets](Targets::published), solved for beforehand, with the stronger clusters.
    pub fn fitted(shape: &Shape, kind: Kind) -> Self {
        Self::fitted_with(shape, kind, CLUSTER)
    }

    /// The same with the strength of clusters at a place of [`CLUSTERS`].
    ///
    /// How much of a request's experts each phase draws anew is the model's own, so it is the same in both workloads; it is solved for on
    /// tasks. Where requests differ less, as languages do, prefill then tells less of decode.
    ///
    /// # Panics
    /// No such place.
    pub fn fitted_with(shape: &Shape, kind: Kind, cluster: usize) -> Self {
        let model = Shape::ALL.iter().position(|other| other == shape);
        let (phase, domains) = FITTED[cluster][model.unwrap_or_default()];
        Strengths {
            domain: domains[kind as usize],
            cluster: CLUSTERS[cluster],
            request: REQUEST,
            phase,
        }
    }

    /// Domain and phase such that the targets are met, given the other two. Where a target is out of reach, as near as it gets.
    pub fn solve(
        shape: Shape,
        kind: Kind,
        cluster: f32,
        request: f32,
        targets: Targets,
        seed: u64,
    ) -> Self {
        let mut found = Strengths {
            domain: 1.0,
            cluster,
            request,
            phase: 0.5,
        };
        let draws = Draws::new(shape, kind, seed);
        for _ in 0..TURNS {
            found.domain = draws.domain(found, targets.fewer_experts);
            found.phase = bisect(|phase| {
                let rho = phase_correlation(&draws.gates(Strengths { phase, ..found }), seed);
                rho.is_some_and(|rho| rho > targets.phase_correlation)
            });
        }
        found
    }

    /// The same with domains of such a strength that a batch of one domain activates so much fewer experts, or as near as it gets.
    #[must_use]
    pub fn with_fewer(self, shape: Shape, kind: Kind, fewer_experts: f64, seed: u64) -> Self {
        let domain = Draws::new(shape, kind, seed).domain(self, fewer_experts);
        Strengths { domain, ..self }
    }
}

/// The draws that strengths are solved on.
struct Draws {
    generator: Generator,
    drawn: Vec<Drawn>,
    seed: u64,
}

impl Draws {
    fn new(shape: Shape, kind: Kind, seed: u64) -> Self {
        // What is drawn does not depend on the strengths.
        let generator = Generator::new(shape, kind, Strengths::fitted(&shape, kind), seed);
        let indices = (0..REQUESTS).into_par_iter();
        Draws {
            drawn: indices.map(|index| generator.draw(index)).collect(),
            generator,
            seed,
        }
    }

    fn gates(&self, strengths: Strengths) -> Vec<Gates> {
        let generator = self.generator.clone().with_strengths(strengths);
        let drawn = self.drawn.par_iter().cloned();
        drawn.map(|drawn| generator.finish(drawn)).collect()
    }

    fn domain(&self, others: Strengths, fewer_experts: f64) -> f32 {
        bisect(|domain| {
            let gates = self.gates(Strengths { domain, ..others });
            let fewer = fewer_experts_in_domain(&gates, BATCH, self.seed);
            fewer.is_none_or(|fewer| fewer < fewer_experts)
        })
    }
}

/// Where `more` turns from true to false.
fn bisect(more: impl Fn(f32) -> bool) -> f32 {
    let (mut low, mut high) = (0.0, MAX);
    for _ in 0..STEPS {
        let middle = (low + high) / 2.0;
        if more(middle) {
            low = middle;
        } else {
            high = middle;
        }
    }
    (low + high) / 2.0
}
