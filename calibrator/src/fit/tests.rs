use eldr_core::signature::{Encoding, Geometry, Signature};
use rand::RngExt as _;

use super::*;
use crate::trace::Record;

const GEOMETRY: Geometry = Geometry {
    layers: 3,
    experts: 8,
};

fn options(workers: usize) -> Options {
    Options {
        workers: (0..workers)
            .map(|worker| format!("decode-{worker}"))
            .collect(),
        model: "m".into(),
        tau: 0.1,
        seed: 7,
        revision: 3,
    }
}

fn push(set: &mut Option<Requests>, prefill: &Signature, decode: Option<&Signature>) {
    let record = Record {
        id: format!("r{}", set.as_ref().map_or(0, Requests::len)),
        decode: decode.map(|decode| decode.encode(Encoding::U16)),
        ..Record::default()
    };
    set.get_or_insert_with(|| Requests::new(prefill))
        .push(&record, prefill)
        .unwrap();
}

/// Requests of two kinds in turn: one prefers even experts, the other odd ones, except on layer 1,
/// which is noise in prefill.
fn two_kinds(count: usize, with_decode: usize) -> Requests {
    let mut rng = ChaCha8Rng::seed_from_u64(1);
    let mut counts = |kind: usize, noisy_layer: Option<usize>| -> Vec<u16> {
        (0..GEOMETRY.counts())
            .map(|at| {
                let (layer, expert) = (at / GEOMETRY.experts, at % GEOMETRY.experts);
                let liked = Some(layer) == noisy_layer || expert % 2 == kind;
                if liked {
                    rng.random_range(0..9)
                } else {
                    rng.random_range(0..2)
                }
            })
            .collect()
    };
    let mut set = None;
    for request in 0..count {
        let prefill = Signature::dense(GEOMETRY, counts(request % 2, Some(1)), None).unwrap();
        let decode = Signature::dense(GEOMETRY, counts(request % 2, None), None).unwrap();
        push(
            &mut set,
            &prefill,
            (request < with_decode).then_some(&decode),
        );
    }
    set.unwrap()
}

fn fitted(requests: &Requests, options: &Options) -> Fitted {
    fit(requests, options, |_| {}).unwrap()
}

#[test]
fn the_noisy_layer_is_left_out_and_the_kinds_become_the_regions() {
    let requests = two_kinds(40, 40);
    let Fitted {
        blob,
        selection,
        converged,
        ..
    } = fitted(&requests, &options(2));
    assert_eq!(selection.unwrap().order[2], 1, "the noise comes last");
    assert_eq!(blob.transform.layers(), [0, 2]);
    assert!(blob.fit.rho.unwrap() > 0.5);
    assert!(converged);
    assert_eq!(blob.fit.shares, [0.5, 0.5]);
    let centroids: Vec<_> = blob.rows().collect();
    let regions: Vec<bool> = requests
        .prefill()
        .map(|counts| {
            let vector = blob.transform.apply(&rows_of(counts, &[0, 2], 8));
            dot(&vector, centroids[1]) > dot(&vector, centroids[0])
        })
        .collect();
    assert!(
        regions
            .iter()
            .enumerate()
            .all(|(i, region)| *region == regions[i % 2])
    );
}

#[test]
fn the_same_input_gives_the_same_bytes_and_another_seed_its_own() {
    let requests = two_kinds(300, 300);
    let bytes = |seed| {
        let blob = fitted(&requests, &Options { seed, ..options(5) }).blob;
        (blob.centroids.clone(), blob.to_bytes().unwrap())
    };
    assert_eq!(bytes(7), bytes(7));
    assert_ne!(
        bytes(7).0,
        bytes(8).0,
        "the seed reaches the start of K-means"
    );
}

#[test]
fn facts_are_shares_and_ascending_similarities() {
    let blob = fitted(&two_kinds(41, 41), &options(3)).blob;
    assert_eq!(blob.fit.requests, 41);
    assert!((blob.fit.shares.iter().sum::<f64>() - 1.0).abs() < 1e-12);
    assert!(blob.fit.shares.iter().all(|&share| share <= 14.0 / 41.0));
    for quantiles in &blob.fit.quantiles {
        assert!(quantiles.is_sorted());
        assert!(quantiles[0] > 0.0 && quantiles[6] <= 1.0);
    }
    assert_eq!(Blob::from_bytes(&blob.to_bytes().unwrap()).unwrap(), blob);
}

#[test]
fn quantiles_are_linear_between_neighbours() {
    assert_eq!(quantile(&[1.0, 2.0, 4.0], 0.5), 2.0);
    assert_eq!(quantile(&[1.0, 2.0, 4.0], 0.75), 3.0);
    assert_eq!(quantile(&[1.0, 2.0, 4.0], 1.0), 4.0);
    assert_eq!(quantile(&[3.0], 0.95), 3.0);
    assert_eq!(quantile(&[], 0.5), 0.0);
}

#[test]
fn without_decode_counts_all_layers_are_used() {
    for with_decode in [0, DECODE_REQUESTS_MIN - 1] {
        let fitted = fitted(&two_kinds(10, with_decode), &options(2));
        assert_eq!(fitted.decode_requests, with_decode);
        assert_eq!(fitted.selection, None);
        assert_eq!(fitted.blob.fit.rho, None);
        assert_eq!(fitted.blob.transform.layers(), [0, 1, 2]);
    }
}

#[test]
fn requests_without_decode_counts_still_shape_the_regions() {
    let fitted = fitted(&two_kinds(40, 20), &options(2));
    assert_eq!(fitted.decode_requests, 20);
    assert!(fitted.selection.is_some());
    assert_eq!(fitted.blob.fit.requests, 40);
}

#[test]
fn layers_of_partial_signatures_keep_the_models_numbers() {
    let mut set = None;
    for counts in [[5, 0], [0, 5], [4, 1]] {
        let geometry = Geometry {
            layers: 9,
            experts: 1,
        };
        let signature = Signature::sparse(geometry, vec![3, 7], counts.to_vec(), None).unwrap();
        push(&mut set, &signature, None);
    }
    let blob = fitted(&set.unwrap(), &options(1)).blob;
    assert_eq!(blob.transform.layers(), [3, 7]);
    assert_eq!(blob.transform.geometry().layers, 9);
}

#[track_caller]
fn assert_refused(set: &Requests, workers: usize, expected: &str) {
    let error = fit(set, &options(workers), |_| {}).unwrap_err();
    assert!(error.to_string().contains(expected), "{error}");
    assert!(!error.hint().is_empty());
}

#[test]
fn fewer_requests_than_workers_are_refused() {
    assert_refused(&two_kinds(3, 0), 4, "3 for 4 workers");
    assert_refused(&two_kinds(3, 0), 0, "3 for 0 workers");
}

#[test]
fn weights_that_are_all_zero_are_refused() {
    let mut set = None;
    for count in [1, 2, 3] {
        push(
            &mut set,
            &Signature::dense(GEOMETRY, vec![count; 24], None).unwrap(),
            None,
        );
    }
    assert_refused(&set.unwrap(), 2, "each of 3 requests touches every expert");
}

#[test]
fn a_request_without_weighted_counts_is_named() {
    let geometry = Geometry {
        layers: 1,
        experts: 3,
    };
    let mut set = None;
    // All requests touch expert 0, so its weight is zero; r1 touches nothing else.
    for counts in [[1, 2, 0], [9, 0, 0], [1, 0, 2]] {
        push(
            &mut set,
            &Signature::dense(geometry, counts.to_vec(), None).unwrap(),
            None,
        );
    }
    assert_refused(&set.unwrap(), 2, "request r1 (:0) is a zero vector");
}

#[test]
fn decode_counts_that_are_all_alike_are_refused() {
    let mut set = None;
    for expert in 0..4 {
        let mut counts = vec![0; 24];
        counts[expert] = 1;
        let prefill = Signature::dense(GEOMETRY, counts, None).unwrap();
        let decode = Signature::dense(GEOMETRY, vec![1; 24], None).unwrap();
        push(&mut set, &prefill, Some(&decode));
    }
    assert_refused(
        &set.unwrap(),
        2,
        "6 pairs of requests are equally far apart",
    );
}

#[test]
fn progress_counts_every_candidate_and_round() {
    let mut seen = Vec::new();
    let requests = two_kinds(20, 20);
    let fitted = fit(&requests, &options(2), |progress| seen.push(progress)).unwrap();
    let layers = (1..=6).map(|done| Progress::Layers { done, total: 6 });
    let rounds = (1..=fitted.rounds).map(|done| Progress::Rounds { done });
    assert_eq!(seen, layers.chain(rounds).collect::<Vec<_>>());
}
