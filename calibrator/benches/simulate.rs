//! One policy on the paper's cluster at full model size: 8 prefill and 16 decode workers, 60 requests/s for 120 s, 512 tokens each,
//! 48 layers of 128 experts. Must stay under 5 s on one core.

use std::hint::black_box;
use std::sync::Arc;
use std::time::Duration;

use criterion::{Criterion, criterion_group, criterion_main};
use eldr_calibrator::simulate::policy::router;
use eldr_calibrator::simulate::workload::Request;
use eldr_calibrator::simulate::{Cluster, Plan, PolicySpec, Times, Workload, run};
use eldr_core::decide::Rule;
use eldr_core::engine::{Activation, ExpertIds, Experts};
use eldr_core::signature::Geometry;
use rand::{RngExt as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;

const GEOMETRY: Geometry = Geometry {
    layers: 48,
    experts: 128,
};
const TOP_K: usize = 8;
const TOKENS: usize = 128;

/// Requests that each prefer a quarter of the experts.
fn workload(exact: bool) -> Workload {
    let mut rng = ChaCha8Rng::seed_from_u64(1);
    let mut request = |index: usize| {
        let mut ids = Vec::with_capacity(TOKENS * GEOMETRY.layers * TOP_K);
        let mut counts = vec![0u16; GEOMETRY.counts()];
        for layer in (0..TOKENS).flat_map(|_| 0..GEOMETRY.layers) {
            // Different ones: each k-th of the experts once.
            for slot in 0..TOP_K {
                let range = GEOMETRY.experts / TOP_K;
                let width = if rng.random_bool(0.8) {
                    range / 4
                } else {
                    range
                };
                let expert = slot * range + (index + rng.random_range(0..width)) % range;
                counts[layer * GEOMETRY.experts + expert] += 1;
                ids.push(expert as u16);
            }
        }
        let experts: Experts = if exact {
            Arc::new(ExpertIds::new(GEOMETRY, TOP_K, ids).unwrap()).into()
        } else {
            Arc::new(Activation::from_counts(GEOMETRY, &counts, TOKENS as u64).unwrap()).into()
        };
        Request {
            record: "synthetic".into(),
            trace: 0,
            label: None,
            signature: None,
            ts: None,
            prompt_tokens: Some(512),
            decode_tokens: Some(512),
            experts,
        }
    };
    Workload {
        geometry: GEOMETRY,
        requests: (0..400).map(&mut request).collect(),
        exact,
        skipped: 0,
    }
}

fn simulate(criterion: &mut Criterion) {
    let cluster = Cluster::default();
    let plan = Plan {
        times: Times::Drawn {
            rate_per_s: 60.0,
            shape: 1.0,
        },
        duration: cluster.duration,
        lengths: None,
        decode_tokens: None,
        permute_signatures: false,
        mix: None,
    };
    let spec: PolicySpec = "least_loaded".parse().unwrap();
    let mut group = criterion.benchmark_group("simulate/8P16D/120s/60rps");
    group
        .sample_size(10)
        .measurement_time(Duration::from_secs(10));
    for (name, exact) in [("counted", true), ("expected", false)] {
        let workload = workload(exact);
        let arrivals = plan.arrivals(&workload, 1).unwrap();
        group.bench_function(name, |bencher| {
            bencher.iter(|| {
                let router = router(&spec, &Rule::default(), None, &workload, &cluster);
                black_box(run(
                    &cluster,
                    &workload,
                    &arrivals,
                    router.unwrap().as_mut(),
                ))
            });
        });
    }
    group.finish();
}

criterion_group!(benches, simulate);
criterion_main!(benches);
