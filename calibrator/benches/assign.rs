//! The assignment step, at sizes where peers were measured.

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use eldr_calibrator::assign::assign;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// Negated similarities of requests from unequal domains: crowded regions turn many away.
fn costs(rows: usize, clusters: usize) -> Vec<f32> {
    let mut rng = ChaCha8Rng::seed_from_u64(1);
    let mut costs = Vec::with_capacity(rows * clusters);
    for _ in 0..rows {
        let draw: f32 = rng.random_range(0.0..1.0);
        let home = (draw * draw * clusters as f32) as usize;
        for cluster in 0..clusters {
            let near = if cluster == home { 0.3 } else { 0.0 };
            costs.push(-(near + rng.random_range(0.3f32..0.6)));
        }
    }
    costs
}

fn benches(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("assign");
    group.sample_size(10);
    for (rows, clusters) in [
        (1_000, 16),
        (4_000, 64),
        (16_000, 16),
        (100_000, 16),
        (16_000, 256),
    ] {
        let costs = costs(rows, clusters);
        let capacity = rows.div_ceil(clusters);
        let name = format!("{rows}x{clusters}");
        // As between rounds of K-means: nearly the same costs, and the prices of the round before.
        let mut prices = vec![0; clusters];
        assign(&costs, capacity, &mut prices);
        let moved: Vec<f32> = costs
            .iter()
            .enumerate()
            .map(|(at, cost)| cost + 0.002 * (at % 7) as f32)
            .collect();
        group.bench_function(BenchmarkId::new("warm", &name), |bencher| {
            bencher.iter(|| assign(black_box(&moved), capacity, &mut prices.clone()));
        });
        group.bench_function(BenchmarkId::new("cold", &name), |bencher| {
            bencher.iter(|| assign(black_box(&costs), capacity, &mut vec![0; clusters]));
        });
    }
    group.finish();
}

criterion_group!(assign_benches, benches);
criterion_main!(assign_benches);
