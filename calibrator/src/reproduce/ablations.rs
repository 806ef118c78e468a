//! The published ablations again, compared in sign.

use rayon::prelude::*;
use serde::Serialize;

use super::bench::{Bench, Fit};
use super::predict::{Pair, specs};
use super::published::{ABLATION_RATE, BAND, Change, WORKERS, ablation};
use crate::error::Error;
use crate::generate::{Kind, Shape};

/// Differences in the median below this are noise, in the published figures and here, in points.
pub const NOISE: f64 = 1.0;

/// One variant of ELDR's rule.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Ablation {
    /// Workload.
    pub workload: Kind,
    /// Model.
    pub model: &'static str,
    /// What is varied.
    pub ablation: &'static str,
    /// How.
    pub variant: &'static str,
    /// Change against round robin, simulated.
    pub simulated: Change,
    /// As measured.
    pub published: Option<Change>,
    /// Change of the variant's median against the unvaried rule, in points: simulated and measured.
    pub against_rule: Option<(f64, f64)>,
}

impl Ablation {
    /// Whether both say the same of the variant: better, worse or about as good. None where nothing is compared.
    pub fn agrees(&self) -> Option<bool> {
        let sign = |points: f64| match points {
            x if x <= -NOISE => -1,
            x if x >= NOISE => 1,
            _ => 0,
        };
        let (simulated, published) = self.against_rule?;
        // One of them within the noise contradicts nothing.
        Some(sign(simulated) * sign(published) >= 0)
    }
}

/// Tau, K-means and layers, at the rate at which they were measured, and with centroids that stay, as there.
pub(super) fn ablations(pair: &Pair<'_>, b_ms: f64) -> Result<Vec<Ablation>, Error> {
    let Bench { shape, kind, .. } = *pair.bench;
    let step = pair.engine.near(ABLATION_RATE, kind, b_ms);
    let names = [
        "round_robin",
        "band:tau=0",
        "band:tau=0.1",
        "band:tau=0.2",
        "band:tau=0.3",
    ];
    let run = |known: &_, names: &[&str]| {
        pair.bench
            .run(known, step, ABLATION_RATE, WORKERS, &specs(names), &[])
    };
    let cells = run(&pair.known, &names)?;
    let against = |cell: super::Cell| cell.against(cells[0]);
    let rule = against(cells[2]);
    let fits = [Fit::Plain, Fit::AllLayers].into_par_iter().map(|how| {
        let known = pair.bench.known(WORKERS, how)?;
        Ok(against(run(&known, &names[2..3])?[0]))
    });
    let fits = fits.collect::<Result<Vec<Change>, Error>>()?;
    let variants = [
        ("tau", "0", "0", against(cells[1])),
        ("tau", "0.1", "0.1", rule),
        ("tau", "0.2", "0.2", against(cells[3])),
        ("tau", "0.3", "0.3", against(cells[4])),
        ("kmeans", "balanced", "balanced", rule),
        ("kmeans", "plain", "plain", fits[0]),
        ("signature", "chosen layers", "count_idf", rule),
        ("signature", "all layers", "gate_prob_all", fits[1]),
    ];
    let of = |name, variant| ablation(&shape, kind, name, variant);
    let rows = variants.map(|(name, variant, published, simulated)| {
        let base = match name {
            "tau" => "0.1",
            "kmeans" => "balanced",
            _ => "count_idf",
        };
        let published_change = of(name, published);
        let compared = published_change.zip(of(name, base));
        Ablation {
            workload: kind,
            model: shape.name,
            ablation: name,
            variant,
            simulated,
            published: published_change,
            against_rule: compared
                .filter(|_| published != base)
                .map(|(own, base)| (simulated.p50 - rule.p50, own.p50 - base.p50)),
        }
    });
    Ok(rows.to_vec())
}

/// Published change in the median by decode workers; which cell it is was not said.
const BY_WORKERS: [(usize, &str, f64); 3] = [(8, "8", -8.0), (16, "16", -9.8), (24, "24", -10.2)];

/// 8, 16 and 24 decode workers at the same load per worker, of Qwen3-30B-A3B's language mix, whose mean is the published one.
pub(super) fn workers(pair: &Pair<'_>, b_ms: f64) -> Result<Vec<Ablation>, Error> {
    let Bench { shape, kind, .. } = *pair.bench;
    let step = pair.engine.near(ABLATION_RATE, kind, b_ms);
    let policies = specs(&["round_robin", BAND]);
    let mut changes = Vec::new();
    for (workers, ..) in BY_WORKERS {
        let known = pair.bench.known(workers, Fit::Published)?;
        let rate = ABLATION_RATE * workers as u32 / WORKERS as u32;
        let cells = pair
            .bench
            .run(&known, step, rate, workers, &policies, &[])?;
        changes.push(cells[1].against(cells[0]));
    }
    let rows =
        BY_WORKERS
            .iter()
            .zip(&changes)
            .map(|(&(workers, variant, published), &simulated)| Ablation {
                workload: kind,
                model: shape.name,
                ablation: "decode workers",
                variant,
                simulated,
                published: Some(Change {
                    p50: published,
                    p99: f64::NAN,
                }),
                against_rule: (workers != WORKERS)
                    .then_some((simulated.p50 - changes[1].p50, published - BY_WORKERS[1].2)),
            });
    Ok(rows.collect())
}

/// Whether a pair is the one whose decode workers are varied.
pub(super) fn varies_workers(shape: &Shape, kind: Kind) -> bool {
    *shape == Shape::QWEN3_30B_A3B && kind == Kind::Language
}
