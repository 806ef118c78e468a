//! Placement of all layers of a model, at the size where peers were measured.

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use eldr_calibrator::place::{Cost, Devices, Objective, baseline, place};
use rand::{RngExt, SeedableRng, seq::SliceRandom};
use rand_chacha::ChaCha8Rng;

const LAYERS: usize = 94;
const EXPERTS: usize = 128;
const TOP_K: f64 = 8.0;

/// Probabilities of experts that are used as unequally as Zipf's law has it, with noise.
fn probabilities() -> Vec<Vec<f64>> {
    let mut rng = ChaCha8Rng::seed_from_u64(1);
    let layer = |_| {
        let mut layer: Vec<f64> = (1..=EXPERTS)
            .map(|rank| (rank as f64).powf(-0.8) * rng.random_range(0.6..1.6))
            .collect();
        layer.shuffle(&mut rng);
        let sum: f64 = layer.iter().sum();
        layer
            .iter_mut()
            .for_each(|p| *p = (*p * TOP_K / sum).min(1.0));
        layer
    };
    (0..LAYERS).map(layer).collect()
}

fn benches(criterion: &mut Criterion) {
    let layers = probabilities();
    let mut group = criterion.benchmark_group(format!("place {LAYERS}x{EXPERTS} on 8 GPUs"));
    group.sample_size(10);
    for redundant in [0, 16] {
        let devices = Devices {
            experts: EXPERTS,
            gpus: 8,
            redundant,
            nodes: 1,
            groups: None,
        };
        for (name, objective) in [
            ("tokens", Objective::Tokens),
            ("distinct", Objective::Distinct),
        ] {
            let cost = Cost {
                objective,
                batch: 64,
            };
            group.bench_function(BenchmarkId::new(name, redundant), |bencher| {
                bencher.iter(|| {
                    for layer in &layers {
                        black_box(place(black_box(layer), devices, cost));
                    }
                });
            });
        }
        group.bench_function(BenchmarkId::new("eplb", redundant), |bencher| {
            bencher.iter(|| {
                for layer in &layers {
                    black_box(baseline::eplb(black_box(layer), devices));
                }
            });
        });
    }
    group.finish();
}

criterion_group!(place_benches, benches);
criterion_main!(place_benches);
