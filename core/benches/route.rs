//! One decision, from the bytes of the signature header to the target worker.

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use eldr_core::blob::{Blob, Fit};
use eldr_core::decide::{Draw, Rule, Worker};
use eldr_core::route::{Map, Scratch, route};
use eldr_core::signature::{Encoding, Geometry, Signature};
use eldr_core::transform::Transform;
use std::hint::black_box;

/// Deterministic numbers that are neither sorted nor equal.
fn noise(seed: u64) -> impl Iterator<Item = u64> {
    let mut state = seed;
    std::iter::repeat_with(move || {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        state >> 40
    })
}

fn map(geometry: Geometry, layers: &[u16], regions: usize) -> Map {
    let dimension = layers.len() * geometry.experts;
    let weights = noise(1)
        .take(dimension)
        .map(|x| (x % 100) as f32 / 50.0 + 0.01)
        .collect();
    let mut centroids: Vec<f32> = noise(2)
        .take(dimension * regions)
        .map(|x| (x % 1000) as f32)
        .collect();
    for row in centroids.chunks_mut(dimension) {
        let norm = row.iter().map(|x| x * x).sum::<f32>().sqrt();
        row.iter_mut().for_each(|x| *x /= norm);
    }
    let names: Vec<String> = (0..regions)
        .map(|region| format!("decode-{region}"))
        .collect();
    let blob = Blob {
        revision: 1,
        model: "bench".into(),
        transform: Transform::new(geometry, layers.to_vec(), weights).expect("valid"),
        centroids,
        tau: 0.1,
        regions: names.iter().map(|name| vec![name.clone()]).collect(),
        fit: Fit {
            quantiles: vec![vec![0.5; 7]; regions],
            requests: 1000,
            rho: None,
            seed: 1,
            shares: vec![1.0 / regions as f64; regions],
        },
        source: None,
    };
    Map::bind(blob, &names).expect("bound")
}

fn benches(criterion: &mut Criterion) {
    let geometry = Geometry::new(48, 128).expect("valid");
    let counts = noise(3)
        .take(geometry.counts())
        .map(|x| (x % 64) as u16)
        .collect();
    let signature = Signature::dense(geometry, counts, Some(512)).expect("valid");
    let all: Vec<u16> = (0..48).collect();
    let twelve: Vec<u16> = (0..48).step_by(4).collect();
    let mut group = criterion.benchmark_group("header to target, 48x128");
    for (name, layers, regions) in [
        ("48 layers, K=16", &all, 16),
        ("12 layers, K=16", &twelve, 16),
        ("48 layers, K=128", &all, 128),
    ] {
        let map = map(geometry, layers, regions);
        let workers: Vec<Worker> = (0..regions)
            .map(|w| Worker {
                load: (w % 7) as f64,
                available: true,
            })
            .collect();
        let draw = Draw {
            sequence: 0,
            entropy: 0,
        };
        for encoding in [Encoding::U16, Encoding::Varint] {
            let header = signature.encode(encoding);
            let mut scratch = Scratch::default();
            group.bench_function(BenchmarkId::new(name, format!("{encoding:?}")), |bencher| {
                bencher.iter(|| {
                    let header = Some(black_box(header.as_bytes()));
                    route(
                        &Rule::default(),
                        Some(&map),
                        header,
                        &workers,
                        draw,
                        &mut scratch,
                    )
                });
            });
        }
    }
    group.finish();
}

criterion_group!(route_benches, benches);
criterion_main!(route_benches);
