use eldr_core::signature::{Encoding, Geometry, Signature};
use rand::{RngExt as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;

use eldr_core::similarity::dot;
use eldr_core::transform::SignatureKind;

use super::*;
use crate::trace::Record;
use crate::weights::Weight;

const GEOMETRY: Geometry = Geometry {
    layers: 3,
    experts: 8,
};

fn names(workers: usize) -> Vec<String> {
    (0..workers)
        .map(|worker| format!("decode-{worker}"))
        .collect()
}

fn options(workers: usize) -> Options {
    Options {
        seed: 7,
        revision: 3,
        ..Options::new(names(workers))
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
            let vector = blob
                .transform
                .apply(&[&counts[..8], &counts[16..]].concat());
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
fn fewer_requests_than_regions_are_refused() {
    let set = two_kinds(3, 0);
    let fixed = Options {
        regions: Regions::Fixed(4),
        ..options(4)
    };
    let error = fit(&set, &fixed, |_| {}).unwrap_err();
    assert!(error.to_string().contains("3 for 4 regions"), "{error}");
    assert_refused(&set, 0, "3 for");
}

#[test]
fn fewer_requests_than_workers_make_fewer_regions() {
    let blob = fitted(&two_kinds(3, 0), &options(4)).blob;
    assert_eq!(blob.regions.len(), 3);
    let serving: std::collections::BTreeSet<String> = blob.regions.concat().into_iter().collect();
    assert_eq!(serving.len(), 4, "nobody is left out");
}

/// Every request touches every expert of every layer, more or less often.
fn touching_all(count: usize) -> Requests {
    let mut set = None;
    for request in 0..count {
        let counts = (0..24).map(|at| 1 + 9 * u16::from(at % 2 == request % 2));
        let signature = Signature::dense(GEOMETRY, counts.collect(), None).unwrap();
        push(&mut set, &signature, None);
    }
    set.unwrap()
}

#[test]
fn a_fit_never_fails_because_every_prompt_touches_every_expert() {
    for weight in Weight::ALL {
        let options = Options {
            weight,
            ..options(2)
        };
        let Fitted { blob, faded, .. } = fitted(&touching_all(8), &options);
        assert_eq!(faded, weight == Weight::PresenceIdf, "{weight:?}");
        assert!(blob.transform.weights().iter().any(|&weight| weight > 0.0));
        assert_eq!(blob.fit.shares, [0.5, 0.5]);
    }
}

#[test]
fn requests_that_are_all_alike_fit_as_well() {
    let mut set = None;
    for _ in 0..4 {
        let signature = Signature::dense(GEOMETRY, vec![2; 24], None).unwrap();
        push(&mut set, &signature, None);
    }
    assert!(fitted(&set.unwrap(), &options(2)).faded);
}

#[test]
fn a_request_without_weighted_counts_is_left_out() {
    let geometry = Geometry {
        layers: 1,
        experts: 3,
    };
    let mut set = None;
    // All requests touch expert 0, so its presence has no weight; r1 touches nothing else.
    for counts in [[1, 2, 0], [9, 0, 0], [1, 0, 2]] {
        push(
            &mut set,
            &Signature::dense(geometry, counts.to_vec(), None).unwrap(),
            None,
        );
    }
    let set = set.unwrap();
    let published = fitted(&set, &Options::as_published(names(2)));
    assert_eq!(
        (published.without_weight, published.blob.fit.requests),
        (vec![1], 2)
    );
    assert!(fitted(&set, &options(2)).without_weight.is_empty());
}

#[test]
fn layers_may_be_given() {
    let set = two_kinds(20, 20);
    let layers = |layers| {
        let options = Options {
            layers,
            ..options(2)
        };
        fit(&set, &options, |_| {})
    };
    for (given, expected) in [
        (Layers::All, vec![0, 1, 2]),
        (Layers::List(vec![1]), vec![1]),
    ] {
        let fitted = layers(given).unwrap();
        assert_eq!(fitted.blob.transform.layers(), expected);
        assert_eq!(fitted.selection, None);
    }
    let error = layers(Layers::List(vec![0, 3])).unwrap_err();
    assert_eq!(
        error.to_string(),
        "--layers: layer 3 is not in the signatures, which have [0, 1, 2]"
    );
}

#[test]
fn more_starts_never_end_worse() {
    let set = two_kinds(60, 0);
    let distance = |restarts| {
        let options = Options {
            restarts,
            hold_out: false,
            regions: Regions::Fixed(5),
            ..options(5)
        };
        fitted(&set, &options).total_distance
    };
    assert!(
        distance(8) < distance(1),
        "of eight starts one is better here"
    );
    assert_eq!(distance(8), distance(8));
}

#[test]
fn two_kinds_on_four_workers_spread_evenly_as_two_regions_of_two_workers() {
    // Held-out requests of more regions than kinds fall to them by chance, and unevenly.
    let fitted = fitted(&two_kinds(120, 120), &options(4));
    let quality = fitted.quality.unwrap();
    assert_eq!(quality.requests, 30);
    assert!(quality.rho.unwrap() > 0.5);
    let chosen = quality.chosen().unwrap();
    assert_eq!(chosen.regions, fitted.blob.regions.len());
    assert!(chosen.alike.has_structure());
    assert!(chosen.is_balanced(), "{quality:?}");
    assert!(quality.warnings().is_empty());
    assert_eq!(fitted.blob.fit.requests, 120, "the blob is fitted to all");
}

#[test]
fn traffic_without_structure_is_told() {
    let mut rng = ChaCha8Rng::seed_from_u64(3);
    let mut set = None;
    for _ in 0..200 {
        let mut counts = || {
            (0..24)
                .map(|_| rng.random_range(90..110))
                .collect::<Vec<u16>>()
        };
        let prefill = Signature::dense(GEOMETRY, counts(), None).unwrap();
        let decode = Signature::dense(GEOMETRY, counts(), None).unwrap();
        push(&mut set, &prefill, Some(&decode));
    }
    let warnings = fitted(&set.unwrap(), &options(2))
        .quality
        .unwrap()
        .warnings();
    let told = |text: &str| warnings.iter().any(|warning| warning.contains(text));
    assert!(told("a load balancer will do as well"), "{warnings:?}");
    assert!(told("signatures say little about decode"), "{warnings:?}");
}

#[test]
fn other_requests_may_be_held_out() {
    let (set, others) = (two_kinds(40, 40), two_kinds(32, 20));
    let against =
        |others: &Requests| fit_measured(&set, Measure::Against(others), &options(2), |_| {});
    let fitted = against(&others).unwrap();
    assert_eq!(
        fitted.quality.unwrap().requests,
        20,
        "those with decode counts"
    );
    assert_eq!(fitted.blob.fit.requests, 40);

    let mut foreign = None;
    let signature = Signature::sparse(GEOMETRY, vec![0], vec![1; 8], None).unwrap();
    push(&mut foreign, &signature, None);
    let error = against(&foreign.unwrap()).unwrap_err().to_string();
    assert!(
        error.contains("layers [0], those to fit to 3 layers × 8 experts and [0, 1, 2]"),
        "{error}"
    );
}

#[test]
fn gate_sums_are_fitted_as_they_are() {
    let kind = SignatureKind::GateProb;
    let geometry = Geometry {
        layers: 1,
        experts: 2,
    };
    let mut set = None;
    for (request, sums) in [[3.0, 4.0], [4.0, 3.0]].into_iter().enumerate() {
        let prefill = Signature::dense(geometry, vec![1, 1], None).unwrap();
        let record = Record {
            id: request.to_string(),
            gate_prob: Some(crate::trace::encode_gate(&sums)),
            ..Record::default()
        };
        set.get_or_insert_with(|| Requests::new(&prefill).with_kind(kind))
            .push(&record, &prefill)
            .unwrap();
    }
    let blob = fitted(&set.unwrap(), &options(2)).blob;
    assert_eq!(blob.transform.kind(), kind);
    assert_eq!(blob.transform.weights(), [1.0, 1.0]);
    let mut rows: Vec<&[f32]> = blob.rows().collect();
    rows.sort_by(|a, b| a[0].total_cmp(&b[0]));
    assert_eq!(rows, [[0.6, 0.8], [0.8, 0.6]]);
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
    assert_eq!(seen[..6], layers.collect::<Vec<_>>());
    let mut restarts = Vec::new();
    for progress in &seen[6..] {
        match *progress {
            Progress::Rounds {
                regions: 2,
                restart,
                done: 1,
            } => restarts.push(restart),
            Progress::Rounds {
                regions: 2,
                restart,
                ..
            } => assert_eq!(Some(&restart), restarts.last()),
            _ => panic!("{progress:?}"),
        }
    }
    assert_eq!(
        restarts,
        [0, 1, 2],
        "too few requests to hold some out: one clustering"
    );
    assert_eq!(
        fitted.choice.text(),
        "2, one worker each; too few requests to try other numbers on"
    );
}
