//! Running batches: what a request costs when it arrives, when it is placed and when it ends.

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use eldr_core::batch::{Batches, Request};
use eldr_core::decide::{Draw, Evidence, Policy, Regions, Rule, Worker, WorkerIndex, decide};
use eldr_core::signature::Geometry;
use std::hint::black_box;

/// Deterministic counts of prompts of 512 tokens.
fn counts(seed: u64, length: usize) -> Vec<f32> {
    let mut state = seed;
    let next = std::iter::repeat_with(|| {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        ((state >> 40) % 64) as f32
    });
    next.take(length).collect()
}

fn benches(criterion: &mut Criterion) {
    let geometry = Geometry::new(48, 128).expect("valid");
    for (name, layers) in [
        ("48x128", (0..48).collect::<Vec<u16>>()),
        ("12x128", (0..48).step_by(4).collect()),
    ] {
        let mut group = criterion.benchmark_group(format!("running batches, {name}"));
        let length = layers.len() * geometry.experts;
        for policy in [Policy::Marginal, Policy::BatchBand] {
            let measure = policy.measure().expect("looks at batches");
            let rule = Rule::of(policy);
            for workers in [16, 128] {
                let batches = Batches::new(measure, geometry, layers.clone(), workers);
                let mut batches = batches.expect("valid");
                let mut request = Request::default();
                for arrival in 0..8 * workers {
                    batches.see(&counts(arrival as u64, length), 512, 600, &mut request);
                    batches.join(WorkerIndex(arrival % workers), &request.footprint());
                }
                let loads = vec![
                    Worker {
                        load: 8.0,
                        available: true
                    };
                    workers
                ];
                let draw = Draw {
                    sequence: 0,
                    entropy: 0,
                };
                let arriving = counts(1 << 40, length);
                let mut running = Vec::new();
                let id =
                    |what: &str| BenchmarkId::new(what, format!("{}, K={workers}", policy.name()));
                group.bench_function(id("decision"), |bencher| {
                    bencher.iter(|| {
                        batches.see(black_box(&arriving), 512, 600, &mut request);
                        batches.to_each(&rule, &request, &mut running);
                        let evidence = Evidence::Running {
                            workers: &running,
                            similarities: Ok(&[]),
                        };
                        decide(&rule, evidence, &Regions::NONE, &loads, draw)
                    });
                });
                if workers == 16 {
                    group.bench_function(id("footprint"), |bencher| {
                        bencher.iter(|| black_box(&request).footprint());
                    });
                    if policy == Policy::Marginal {
                        let mut message = Vec::new();
                        group.bench_function(id("share"), |bencher| {
                            bencher.iter(|| batches.share(1, &mut message));
                        });
                        group.bench_function(id("hear one"), |bencher| {
                            let mut hearer = batches.clone();
                            bencher.iter(|| {
                                hearer.hear(1, []);
                                hearer.hear(1, [black_box(message.as_slice())])
                            });
                        });
                    }
                    let footprint = request.footprint();
                    group.bench_function(id("arrival and departure"), |bencher| {
                        bencher.iter(|| {
                            batches.join(WorkerIndex(3), black_box(&footprint));
                            batches.leave(WorkerIndex(3), black_box(&footprint));
                        });
                    });
                }
            }
        }
        group.finish();
    }
}

criterion_group!(batch_benches, benches);
criterion_main!(batch_benches);
