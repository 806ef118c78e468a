//! Expert parallelism: a decode worker is several GPUs, and every layer waits for the one with most experts to read.

use std::sync::Arc;

use eldr_core::engine::Ranks;
use rayon::prelude::*;

use super::Ablation;
use super::bench::{Bench, Fit, nearest, signatures};
use super::predict::{Pair, specs};
use super::published::{ABLATION_RATE, Change, WORKERS};
use crate::error::Error;
use crate::generate::{Kind, Shape};
use crate::kmeans::Vectors;
use crate::place::{Cost, Devices, Objective, Plan, Usage};
use crate::simulate::placement::contiguous;

/// GPUs of a decode worker with expert parallelism, as published.
const GPUS: usize = 4;
/// Requests of a worker at the rate of the ablations, about.
const BATCH: u32 = 32;
/// What ELDR's rule and a placement per cluster were published to gain with it, on Qwen3-235B-A22B: the middle of -2.7 to -4.3 %.
const PARALLEL_P50: f64 = -3.5;

/// Expert parallelism: experts where they are unless told otherwise, and placed for the regions of the workers. The step's coefficients
/// are those without it, and centroids stay, as the placements do.
pub(super) fn ablations(pair: &Pair<'_>, b_ms: f64) -> Result<Vec<Ablation>, Error> {
    let Bench { shape, kind, .. } = *pair.bench;
    let step = pair.engine.near(ABLATION_RATE, kind, b_ms);
    let policies = specs(&["round_robin", "band"]);
    let run = |ranks: &[Arc<Ranks>]| {
        let bench = pair.bench;
        bench.run(&pair.known, step, ABLATION_RATE, WORKERS, &policies, ranks)
    };
    let in_order = run(&[contiguous(shape.geometry, GPUS)?])?;
    let placed = run(&placed(pair.bench)?)?;
    let rows = [
        ("experts in order", in_order[1], None),
        ("placed per cluster", placed[1], Some(PARALLEL_P50)),
    ];
    let rows = rows.map(|(variant, cell, published)| Ablation {
        workload: kind,
        model: shape.name,
        ablation: "4 GPUs each",
        variant,
        simulated: cell.against(in_order[0]),
        published: published.map(|p50| Change { p50, p99: f64::NAN }),
        against_rule: None,
    });
    Ok(rows.to_vec())
}

/// Whether a pair is the one with expert parallelism.
pub(super) fn applies(shape: &Shape, kind: Kind) -> bool {
    *shape == Shape::QWEN3_30B_A3B && kind == Kind::Task
}

/// Where each worker has its experts if they are placed for the calibration requests of its region.
fn placed(bench: &Bench) -> Result<Vec<Arc<Ranks>>, Error> {
    let geometry = bench.shape.geometry;
    let devices = Devices {
        experts: geometry.experts,
        gpus: GPUS,
        redundant: 0,
        nodes: 1,
        groups: None,
    }
    .check()?;
    let cost = Cost {
        objective: Objective::Distinct,
        batch: BATCH,
    };
    let (_, blob) = bench.blob(WORKERS, Fit::Published)?;
    let values = signatures(&blob, &bench.calibration);
    let vectors = Vectors {
        dimension: blob.transform.dimension(),
        values: &values,
    };
    let regions = nearest(vectors, Vectors::centroids_of(&blob));
    let layers: Vec<u16> = (0..geometry.layers as u16).collect();
    let ranks = (0..WORKERS).into_par_iter().map(|region| {
        let mut probabilities = vec![0.0; geometry.counts()];
        for (index, counts) in bench.calibration.decode() {
            if regions[index] == region {
                let own = probabilities.iter_mut().zip(counts);
                own.for_each(|(sum, &count)| *sum += f64::from(count));
            }
        }
        let per_token = probabilities.iter().sum::<f64>() / geometry.layers as f64;
        let top_k = bench.shape.top_k as f64;
        probabilities
            .iter_mut()
            .for_each(|p| *p *= top_k / per_token.max(1.0));
        let usage = Usage {
            cluster: String::new(),
            regions: vec![region],
            requests: 0,
            probabilities,
        };
        let plan = Plan::new(&usage, &layers, geometry.layers, devices, cost);
        let per_gpu = geometry.experts.div_ceil(GPUS);
        let of_layer = |slots: &Vec<u16>| slots.chunks(per_gpu).map(<[u16]>::to_vec).collect();
        let slots: Vec<Vec<Vec<u16>>> = plan.slots.iter().map(of_layer).collect();
        let ranks = Ranks::new(geometry, &slots).map(Arc::new);
        ranks.map_err(|error| Error::new(error.to_string(), "ask for GPUs that divide the experts"))
    });
    ranks.collect()
}

#[cfg(test)]
mod tests {
    use super::super::Size;
    use super::*;
    use crate::generate::CLUSTER;

    #[test]
    fn workers_have_their_experts_where_their_regions_want_them() {
        let size = Size {
            calibration: 48,
            requests: 1,
            seconds: 1,
        };
        let (bench, _) = Bench::new(Shape::QWEN3_30B_A3B, Kind::Task, CLUSTER, size, 3).unwrap();
        let placements = placed(&bench).unwrap();
        assert_eq!(placements.len(), WORKERS);
        let in_order = contiguous(bench.shape.geometry, GPUS).unwrap();
        assert!(placements.iter().all(|own| *own != in_order));
        assert!(placements[1..].iter().all(|own| *own != placements[0]));
    }
}
