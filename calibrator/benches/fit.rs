//! The whole fit and its steps, at the size at which the official one was measured: 1,000 requests, 48 layers of 128
//! experts, 16 regions.

use std::hint::black_box;

use criterion::{Criterion, criterion_group, criterion_main};
use eldr_calibrator::fit::{Options, fit};
use eldr_calibrator::kmeans::{Vectors, balanced};
use eldr_calibrator::layers::{self, Profiles};
use eldr_calibrator::refit::refit;
use eldr_calibrator::requests::Requests;
use eldr_calibrator::trace::Record;
use eldr_core::blob::Blob;
use eldr_core::signature::{Encoding, Geometry, Signature};
use eldr_core::transform::Transform;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

const GEOMETRY: Geometry = Geometry {
    layers: 48,
    experts: 128,
};
const REGIONS: usize = 16;

/// Prefill and decode counts of requests from ten domains of unequal size, each with its own taste in every layer.
fn traffic(requests: usize) -> Vec<[Vec<u16>; 2]> {
    const DOMAINS: usize = 10;
    let mut rng = ChaCha8Rng::seed_from_u64(1);
    let tastes: Vec<Vec<f32>> = (0..DOMAINS)
        .map(|_| {
            (0..GEOMETRY.counts())
                .map(|_| rng.random::<f32>().powi(4))
                .collect()
        })
        .collect();
    let mut counts = |taste: &[f32], tokens: f32| -> Vec<u16> {
        taste
            .iter()
            .map(|liked| (liked * rng.random::<f32>() * tokens / 4.0) as u16)
            .collect()
    };
    let mut sizes = ChaCha8Rng::seed_from_u64(2);
    (0..requests)
        .map(|_| {
            let draw: f32 = sizes.random();
            let taste = &tastes[(draw * draw * DOMAINS as f32) as usize];
            [
                counts(taste, sizes.random_range(32.0..512.0)),
                counts(taste, 256.0),
            ]
        })
        .collect()
}

fn requests(traffic: &[[Vec<u16>; 2]]) -> Requests {
    let signature =
        |counts: &[u16]| Signature::dense(GEOMETRY, counts.to_vec(), None).expect("its shape");
    let mut set = Requests::new(&signature(&traffic[0][0]));
    for (index, [prefill, decode]) in traffic.iter().enumerate() {
        let record = Record {
            id: index.to_string(),
            decode: Some(signature(decode).encode(Encoding::Varint)),
            ..Record::default()
        };
        set.push(&record, &signature(prefill)).expect("its shape");
    }
    set
}

fn floats(traffic: &[[Vec<u16>; 2]], which: usize) -> Vec<f32> {
    let values = traffic.iter().flat_map(|request| &request[which]);
    values.map(|&count| f32::from(count)).collect()
}

fn benches(criterion: &mut Criterion) {
    let traffic = traffic(1_000);
    let requests = requests(&traffic);
    let [prefill, decode] = [floats(&traffic, 0), floats(&traffic, 1)];
    let profiles = |values| Profiles {
        layers: GEOMETRY.layers,
        experts: GEOMETRY.experts,
        values,
    };
    let pairs = layers::pairs(traffic.len(), 1);
    let mut unit = prefill.clone();
    for row in unit.chunks_exact_mut(GEOMETRY.counts()) {
        let norm = row.iter().map(|v| v * v).sum::<f32>().sqrt();
        row.iter_mut().for_each(|v| *v /= norm);
    }
    let vectors = Vectors {
        dimension: GEOMETRY.counts(),
        values: &unit,
    };
    let start = unit[..REGIONS * GEOMETRY.counts()].to_vec();
    let workers: Vec<String> = (0..REGIONS).map(|i| format!("decode-{i}")).collect();
    let published = Options::as_published(workers.clone());
    let measured = Options::new(workers);

    let mut group = criterion.benchmark_group("fit");
    group.sample_size(10);
    group.bench_function("layers", |bencher| {
        bencher.iter(|| {
            layers::select(
                profiles(&prefill),
                profiles(&decode),
                black_box(&pairs),
                |_, _, _| {},
            )
        });
    });
    group.bench_function("regions", |bencher| {
        bencher.iter(|| balanced(black_box(vectors), start.clone(), |_| {}));
    });
    // As online: the window of a few minutes, from the centroids in use.
    let window = Vectors {
        values: &unit[..300 * GEOMETRY.counts()],
        ..vectors
    };
    let blob = fit(&requests, &published, |_| {})
        .expect("it can be fitted")
        .blob;
    let blob = Blob {
        transform: Transform::new(GEOMETRY, (0..48).collect(), vec![1.0; GEOMETRY.counts()])
            .expect("all layers"),
        centroids: balanced(vectors, start.clone(), |_| {}).centroids,
        ..blob
    };
    println!(
        "refit: {} rounds",
        refit(&blob, window).expect("enough").rounds
    );
    group.bench_function("refit", |bencher| {
        bencher.iter(|| refit(&blob, black_box(window)));
    });
    group.bench_function("whole", |bencher| {
        bencher.iter(|| fit(black_box(&requests), &published, |_| {}));
    });
    // With our own defaults: measured on requests that are held out, three starts, the number of regions chosen.
    group.bench_function("whole, measured", |bencher| {
        bencher.iter(|| fit(black_box(&requests), &measured, |_| {}));
    });
    group.finish();
}

criterion_group!(fit_benches, benches);
criterion_main!(fit_benches);
