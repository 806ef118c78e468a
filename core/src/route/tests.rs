use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::Value;

use super::*;
use crate::blob::Fit;
use crate::signature::{Encoding, Signature};
use crate::transform::Transform;

const DRAW: Draw = Draw {
    sequence: 0,
    entropy: 0,
};

fn floats(value: &Value) -> Vec<f32> {
    match value {
        Value::Array(values) => values.iter().flat_map(floats).collect(),
        number => vec![number.as_f64().unwrap() as f32],
    }
}

/// A blob in which each worker serves a region of its own.
fn blob(transform: Transform, centroids: Vec<f32>, workers: &[&str]) -> Blob {
    Blob {
        revision: 1,
        model: "m".into(),
        transform,
        centroids,
        tau: 0.1,
        regions: workers.iter().map(|&name| vec![name.into()]).collect(),
        fit: Fit {
            quantiles: vec![vec![0.0; 7]; workers.len()],
            requests: 1,
            rho: None,
            seed: 1,
            shares: vec![1.0 / workers.len() as f64; workers.len()],
        },
        source: None,
    }
}

/// A blob with the numbers of the artifact's centroid file.
fn published(file: &str) -> Blob {
    let file: Value = serde_json::from_str(file).unwrap();
    let size = |key: &str| file[key].as_u64().unwrap() as usize;
    let geometry = Geometry::new(size("L"), size("e")).unwrap();
    let layers: Vec<u16> = match &file["layer_mask"] {
        Value::Null => (0..geometry.layers as u16).collect(),
        mask => floats(mask).iter().map(|&layer| layer as u16).collect(),
    };
    let weights = match &file["sig_idf"] {
        Value::Null => vec![1.0; layers.len() * geometry.experts],
        idf => floats(idf),
    };
    let transform = Transform::new(geometry, layers, weights).unwrap();
    let workers: Vec<String> = (0..size("k"))
        .map(|region| format!("decode-{region}"))
        .collect();
    let workers: Vec<&str> = workers.iter().map(String::as_str).collect();
    blob(transform, floats(&file["centroids"]), &workers)
}

#[test]
fn similarities_and_decisions_equal_the_published_artifact() {
    let files = [
        (
            include_str!("../../tests/data/parity/e_routing_e2e_tiny.json"),
            include_str!("../../tests/data/parity/h_fit_tiny_centroids.json"),
        ),
        (
            include_str!("../../tests/data/parity/e_routing_e2e_tiny_count.json"),
            include_str!("../../tests/data/parity/h_fit_tiny_count_kmbal.json"),
        ),
        (
            include_str!("../../tests/data/parity/e_routing_e2e_full.json"),
            include_str!("../../tests/data/parity/h_fit_full_centroids.json"),
        ),
    ];
    let mut scratch = Scratch::default();
    for (cases, centroids) in files {
        let blob = published(centroids);
        let geometry = blob.transform.geometry();
        // The file form keeps every bit of the numbers.
        let blob = Blob::from_bytes(&blob.to_bytes().unwrap()).unwrap();
        let names: Vec<String> = blob.regions.concat();
        let map = Map::bind(blob, &names).unwrap();
        let cases: Value = serde_json::from_str(cases).unwrap();
        for case in cases["cases"].as_array().unwrap() {
            let bytes = STANDARD
                .decode(case["signature_b64"].as_str().unwrap())
                .unwrap();
            let counts = bytes
                .chunks(2)
                .map(|pair| u16::from_le_bytes([pair[0], pair[1]]))
                .collect();
            let header = Signature::dense(geometry, counts, None).unwrap();
            let expected = floats(&case["similarities"]);
            for encoding in [Encoding::U16, Encoding::Varint] {
                let header = header.encode(encoding);
                let found = map
                    .similarities(header.as_bytes(), &mut scratch, |_| ())
                    .unwrap();
                for (found, expected) in found.iter().zip(&expected) {
                    assert!(
                        (found - expected).abs() <= 2e-6,
                        "{found} is not {expected}"
                    );
                }
                let workers: Vec<Worker> = floats(&case["loads"])
                    .iter()
                    .map(|&load| Worker {
                        load: f64::from(load),
                        available: true,
                    })
                    .collect();
                for (widen_single, index) in [(false, "band_index"), (true, "min2_index")] {
                    let tau = case["tau"].as_f64().unwrap() as f32;
                    let rule = Rule {
                        widen_single,
                        ..Rule::as_published(tau)
                    };
                    let decision = route(
                        &rule,
                        Some(&map),
                        Some(header.as_bytes()),
                        &workers,
                        DRAW,
                        &mut scratch,
                    );
                    assert_eq!(decision.target.0 as u64, case[index].as_u64().unwrap());
                }
            }
        }
    }
}

#[test]
fn what_is_missing_or_broken_becomes_a_reason() {
    let tiny = published(include_str!(
        "../../tests/data/parity/h_fit_tiny_centroids.json"
    ));
    let names: Vec<String> = tiny.regions.concat();
    let map = Map::bind(tiny, &names).unwrap();
    let workers = [Worker {
        load: 0.0,
        available: true,
    }; 4];
    let mut scratch = Scratch::default();
    let mut reason = |policy: Policy, map: Option<&Map>, header: Option<&str>| {
        let rule = Rule {
            policy,
            ..Rule::default()
        };
        route(
            &rule,
            map,
            header.map(str::as_bytes),
            &workers,
            DRAW,
            &mut scratch,
        )
        .reason
    };
    let signature = |layers: Vec<u16>, l: usize| {
        let geometry = Geometry::new(l, 16).unwrap();
        let counts = vec![1; layers.len() * 16];
        Signature::sparse(geometry, layers, counts, None)
            .unwrap()
            .encode(Encoding::U16)
    };
    let good = signature((0..6).collect(), 6);
    let selected_only = signature(vec![4, 5], 6);
    let lacks_a_layer = signature(vec![0, 5], 6);
    let other_model = signature((0..7).collect(), 7);
    let broken = good.replace(":;", "!:;");
    use crate::Policy;
    assert_eq!(
        reason(Policy::Band, Some(&map), Some(&good)),
        Reason::InBand
    );
    assert_eq!(
        reason(Policy::Band, Some(&map), Some(&selected_only)),
        Reason::InBand
    );
    assert_eq!(reason(Policy::Top1, Some(&map), Some(&good)), Reason::Top1);
    assert_eq!(
        reason(Policy::Random, Some(&map), Some(&good)),
        Reason::Blind
    );
    assert_eq!(reason(Policy::Band, None, Some(&good)), Reason::NoBlob);
    assert_eq!(reason(Policy::Band, Some(&map), None), Reason::NoSignature);
    assert_eq!(
        reason(Policy::Band, Some(&map), Some(&broken)),
        Reason::MalformedSignature
    );
    assert_eq!(
        reason(Policy::Band, Some(&map), Some(&other_model)),
        Reason::GeometryMismatch
    );
    assert_eq!(
        reason(Policy::Band, Some(&map), Some(&lacks_a_layer)),
        Reason::GeometryMismatch
    );
}

#[test]
fn a_blob_that_names_an_unknown_cluster_is_refused() {
    let tiny = published(include_str!(
        "../../tests/data/parity/h_fit_tiny_centroids.json"
    ));
    let workers = ["decode-0", "decode-1", "decode-3"].map(str::to_owned);
    let error = Map::bind(tiny, &workers).unwrap_err();
    assert_eq!(
        error,
        BindError::UnknownCluster {
            region: 2,
            cluster: "decode-2".into()
        }
    );
}

#[test]
fn a_blob_of_gate_sums_is_refused_because_the_header_carries_counts() {
    let mut tiny = published(include_str!(
        "../../tests/data/parity/h_fit_tiny_centroids.json"
    ));
    let names: Vec<String> = tiny.regions.concat();
    tiny.transform = tiny.transform.with_kind(SignatureKind::GateProb);
    let error = Map::bind(tiny, &names).unwrap_err();
    assert_eq!(
        error.to_string(),
        "the centroid blob compares signatures of kind gate_prob, but the signature header carries expert counts only\n\
         hint: fit with `--signature count-idf`"
    );
}

#[test]
fn every_kind_of_counts_is_compared_as_it_was_fitted() {
    let geometry = Geometry::new(1, 3).unwrap();
    let counts = vec![9, 1, 0];
    let header = Signature::dense(geometry, counts.clone(), None)
        .unwrap()
        .encode(Encoding::U16);
    let mut similarities = Vec::new();
    let mut fingerprints = Vec::new();
    for kind in SignatureKind::ALL
        .into_iter()
        .filter(|kind| kind.is_of_counts())
    {
        let transform = Transform::new(geometry, vec![0], vec![1.0, 2.0, 1.0]).unwrap();
        let transform = transform.with_kind(kind);
        let expected = transform.apply(&counts)[0];
        let blob = blob(transform, vec![1.0, 0.0, 0.0], &["a"]);
        let map = Map::bind(blob, &["a".into()]).unwrap();
        let mut scratch = Scratch::default();
        let found = map
            .similarities(header.as_bytes(), &mut scratch, |_| ())
            .unwrap()[0];
        assert!(
            (found - expected).abs() < 1e-6,
            "{kind:?}: {found} {expected}"
        );
        similarities.push(found);
        fingerprints.push(map.fingerprint);
    }
    let [idf, count, sqrt, binary] = similarities[..] else {
        panic!("{similarities:?}");
    };
    assert!(idf == count && count > sqrt && sqrt > binary);
    fingerprints.dedup();
    assert_eq!(fingerprints.len(), 4, "maps of another kind are other maps");
}

#[test]
fn a_header_fits_where_every_part_of_it_is_good_and_every_selected_layer_there() {
    let geometry = Geometry::new(3, 4).unwrap();
    let transform = Transform::new(geometry, vec![1], vec![1.0; 4]).unwrap();
    let blob = blob(transform, vec![1.0, 0.0, 0.0, 0.0], &["a"]);
    let map = Map::bind(blob, &["a".into()]).unwrap();
    let mut scratch = Scratch::default();
    let signature = |geometry: Geometry, layers: Vec<u16>| {
        let counts = vec![300; layers.len() * geometry.experts];
        Signature::sparse(geometry, layers, counts, None).unwrap()
    };
    for encoding in [Encoding::U16, Encoding::Varint] {
        let header = |layers| signature(geometry, layers).encode(encoding);
        for (layers, fits) in [(vec![0, 1, 2], true), (vec![1], true), (vec![0, 2], false)] {
            assert_eq!(map.fits(header(layers).as_bytes(), &mut scratch), fits);
        }
        // Nobody who looks at layer 1 alone sees all of these.
        let good = header(vec![0, 1, 2]).into_bytes();
        for at in 0..good.len() {
            let mut broken = good.clone();
            broken[at] = b'\n';
            assert!(
                !map.fits(&broken, &mut scratch),
                "a line break at byte {at}"
            );
        }
        let other = Geometry::new(4, 4).unwrap();
        let other = signature(other, vec![0, 1, 2, 3]).encode(encoding);
        assert!(!map.fits(other.as_bytes(), &mut scratch));
    }
    assert!(!map.fits(b"", &mut scratch));
}

/// Two layers of four experts; region 0 is about expert 0, region 1 about expert 1; six layers in the model.
fn small_map(layers: Vec<u16>) -> Map {
    let geometry = Geometry::new(6, 4).unwrap();
    let dimension = layers.len() * 4;
    let mut centroids = vec![0.0; 2 * dimension];
    centroids[0] = 1.0;
    centroids[dimension + 1] = 1.0;
    let transform = Transform::new(geometry, layers, vec![1.0; dimension]).unwrap();
    let blob = blob(transform, centroids, &["a", "b"]);
    Map::bind(blob, &["a".into(), "b".into(), "c".into()]).unwrap()
}

/// Ten tokens, all of which use this expert of each layer.
fn of_expert(expert: usize, tokens: Option<u64>) -> String {
    let geometry = Geometry::new(6, 4).unwrap();
    let counts = (0..24)
        .map(|at| if at % 4 == expert { 10 } else { 0 })
        .collect();
    let signature = Signature::dense(geometry, counts, tokens).unwrap();
    signature.encode(Encoding::U16)
}

fn running(
    policy: crate::Policy,
    map: Option<&Map>,
    prompt: Prompt<'_>,
    batches: &Batches,
    scratch: &mut Scratch,
) -> (usize, Reason) {
    let workers = [Worker {
        load: 1.0,
        available: true,
    }; 3];
    let fleet = Fleet {
        workers: &workers,
        batches,
    };
    let decision = route_running(&Rule::of(policy), map, prompt, fleet, DRAW, scratch);
    (decision.target.0, decision.reason)
}

#[test]
fn a_request_goes_where_requests_like_it_run_whatever_layers_the_blob_compares() {
    use crate::Policy;
    let map = small_map(vec![1, 4]);
    let mut scratch = Scratch::default();
    for layers in [vec![1, 4], vec![0, 2, 5]] {
        for policy in [Policy::Marginal, Policy::BatchBand, Policy::Hybrid] {
            let measure = policy.measure().unwrap();
            let mut batches = Batches::new(measure, map.geometry(), layers.clone(), 3).unwrap();
            // Worker 0 runs a request of expert 1, worker 1 one of expert 2, worker 2 one of expert 0.
            for (worker, expert) in [(0, 1), (1, 2), (2, 0)] {
                let header = of_expert(expert, Some(10));
                let prompt = Prompt {
                    header: Some(header.as_bytes()),
                    ..Prompt::default()
                };
                running(policy, Some(&map), prompt, &batches, &mut scratch);
                batches.join(WorkerIndex(worker), &scratch.request().unwrap().footprint());
            }
            let mut choose = |expert| {
                let header = of_expert(expert, None);
                let prompt = Prompt {
                    header: Some(header.as_bytes()),
                    tokens: Some(10),
                    kv_tokens: 0,
                };
                running(policy, Some(&map), prompt, &batches, &mut scratch)
            };
            match policy {
                // Regions 0 and 1 are about experts 0 and 1; their workers run others.
                Policy::Hybrid => {
                    assert_eq!(choose(0), (0, Reason::Marginal));
                    assert_eq!(choose(1), (1, Reason::Marginal));
                    // As like to both: the batch tells.
                    assert_eq!(choose(2), (1, Reason::Marginal));
                }
                _ => {
                    let reason = match policy {
                        Policy::Marginal => Reason::Marginal,
                        _ => Reason::InBand,
                    };
                    assert_eq!(choose(0), (2, reason));
                    assert_eq!(choose(1), (0, reason));
                    assert_eq!(choose(2), (1, reason));
                }
            }
        }
    }
}

#[test]
fn what_batches_cannot_be_held_against_becomes_a_reason() {
    use crate::Policy;
    let map = small_map(vec![1, 4]);
    let mut scratch = Scratch::default();
    let usage = map.batches(Measure::Usage, 3);
    let header = of_expert(0, None);
    let broken = header.replace(":;", "!:;");
    let geometry = Geometry::new(6, 4).unwrap();
    let lacks_a_layer = Signature::sparse(geometry, vec![1], vec![1; 4], Some(1)).unwrap();
    let lacks_a_layer = lacks_a_layer.encode(Encoding::U16);
    let prompt = |header: &'static str, tokens| Prompt {
        header: Some(header.as_bytes()),
        tokens,
        kv_tokens: 0,
    };
    let [header, broken, lacks_a_layer] =
        [header, broken, lacks_a_layer].map(|text| &*Box::leak(text.into_boxed_str()));
    for (policy, map, prompt, reason) in [
        (
            Policy::Marginal,
            None,
            prompt(header, Some(10)),
            Reason::Marginal,
        ),
        (
            Policy::Hybrid,
            None,
            prompt(header, Some(10)),
            Reason::NoBlob,
        ),
        (
            Policy::Marginal,
            Some(&map),
            Prompt::default(),
            Reason::NoSignature,
        ),
        (
            Policy::Marginal,
            None,
            prompt(header, None),
            Reason::MalformedSignature,
        ),
        (
            Policy::Hybrid,
            Some(&map),
            prompt(broken, Some(10)),
            Reason::MalformedSignature,
        ),
        (
            Policy::Marginal,
            None,
            prompt(lacks_a_layer, None),
            Reason::GeometryMismatch,
        ),
        (
            Policy::Hybrid,
            Some(&map),
            prompt(header, Some(10)),
            Reason::Marginal,
        ),
        // Batches of another measure.
        (
            Policy::BatchBand,
            Some(&map),
            prompt(header, Some(10)),
            Reason::Blind,
        ),
        // Policies that do not look at batches are as ever.
        (
            Policy::Band,
            Some(&map),
            prompt(header, None),
            Reason::InBand,
        ),
        (
            Policy::LeastLoaded,
            Some(&map),
            prompt(header, None),
            Reason::Blind,
        ),
    ] {
        let found = running(policy, map, prompt, &usage, &mut scratch).1;
        assert_eq!(found, reason, "{policy:?}, {prompt:?}");
        let is_seen = reason == Reason::Marginal || reason == Reason::NoBlob;
        assert_eq!(
            scratch.request().is_some(),
            is_seen,
            "{policy:?}, {prompt:?}"
        );
        if policy.measure() == Some(Measure::Usage) {
            let unseen = see(prompt, &usage, &mut scratch).err();
            assert_eq!(unseen, (!is_seen).then_some(reason), "{prompt:?}");
        }
    }
}
