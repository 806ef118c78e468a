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

/// What [`Strengths::solve`] finds with seed 1, for the models and workloads of the paper in their orders: domain and phase.
const FITTED: [[(f32, f32); 2]; 3] = [
    [(1.4727, 0.5117), (0.6836, 0.3320)],
    [(1.7070, 2.0742), (0.6758, 1.0273)],
    [(1.4492, 0.4414), (0.6836, 0.2539)],
];
/// Strength of clusters, which nothing published fixes: as if topics differed as much as languages do.
const CLUSTER: f32 = 1.0;
/// Strength of single requests, likewise.
const REQUEST: f32 = 0.5;

impl Targets {
    /// As published; of a range over models the middle.
    pub fn published(shape: &Shape, kind: Kind) -> Self {
        let (least, most) = kind.fewer_experts();
        Targets {
            fewer_experts: f64::midpoint(least, most),
            phase_correlation: shape.phase_correlation,
        }
    }
}

impl Strengths {
    /// What meets the [published targets](Targets::published), solved for beforehand.
    pub fn fitted(shape: &Shape, kind: Kind) -> Self {
        let model = Shape::ALL.iter().position(|other| other == shape);
        let (domain, phase) = FITTED[model.unwrap_or_default()][kind as usize];
        Strengths {
            domain,
            cluster: CLUSTER,
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
        let generator = Generator::new(shape, kind, found, seed);
        let drawn: Vec<Drawn> = (0..REQUESTS)
            .into_par_iter()
            .map(|index| generator.draw(index))
            .collect();
        let gates = |strengths: Strengths| -> Vec<Gates> {
            let generator = generator.clone().with_strengths(strengths);
            let drawn = drawn.par_iter().cloned();
            drawn.map(|drawn| generator.finish(drawn)).collect()
        };
        for _ in 0..TURNS {
            found.domain = bisect(|domain| {
                let fewer =
                    fewer_experts_in_domain(&gates(Strengths { domain, ..found }), BATCH, seed);
                fewer.is_none_or(|fewer| fewer < targets.fewer_experts)
            });
            found.phase = bisect(|phase| {
                let rho = phase_correlation(&gates(Strengths { phase, ..found }), seed);
                rho.is_some_and(|rho| rho > targets.phase_correlation)
            });
        }
        found
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
