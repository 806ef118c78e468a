use serde_json::Value;

use super::*;

fn parity(text: &str) -> Vec<Value> {
    let file: Value = serde_json::from_str(text).unwrap();
    file["cases"].as_array().unwrap().clone()
}

/// All numbers in nested arrays, row-major.
fn flat(value: &Value) -> Vec<f32> {
    match value {
        Value::Array(values) => values.iter().flat_map(flat).collect(),
        number => vec![number.as_f64().unwrap() as f32],
    }
}

fn near(found: &[f32], expected: &[f32], tolerance: f32, name: &str) {
    assert_eq!(found.len(), expected.len(), "{name}");
    for (index, (found, expected)) in found.iter().zip(expected).enumerate() {
        assert!(
            (found - expected).abs() <= tolerance,
            "{name}[{index}]: {found} not {expected}"
        );
    }
}

#[test]
fn idf_equals_the_published_artifact() {
    for case in parity(include_str!("../../tests/data/parity/b_idf_tiny.json")) {
        let df: Vec<u32> = flat(&case["document_frequency"])
            .iter()
            .map(|&df| df as u32)
            .collect();
        let requests = case["n"].as_u64().unwrap() as u32;
        near(&idf(&df, requests), &flat(&case["idf"]), 1e-6, "idf");
    }
}

#[test]
fn vectors_equal_the_published_artifact() {
    let cases = parity(include_str!(
        "../../tests/data/parity/a_signature_tiny.json"
    ));
    assert_eq!(cases.len(), 11);
    for case in cases {
        let name = case["name"].as_str().unwrap();
        let transform = &case["transform"];
        let size = |key: &str| transform[key].as_u64().unwrap() as usize;
        let geometry = Geometry::new(size("L"), size("e")).unwrap();
        let layers: Vec<u16> = match &transform["layer_mask"] {
            Value::Null => (0..geometry.layers as u16).collect(),
            mask => flat(mask).iter().map(|&layer| layer as u16).collect(),
        };
        let weights = match &transform["sig_idf"] {
            Value::Null => vec![1.0; layers.len() * geometry.experts],
            idf => flat(idf),
        };
        let counts = flat(&case["counts"]);
        let expected = flat(&case["vector"]);
        let transform = match Transform::new(geometry, layers.clone(), weights) {
            Ok(transform) => transform,
            Err(error) => {
                assert_eq!(
                    (name, error),
                    ("idf_zero_on_mask", TransformError::NoWeight)
                );
                assert!(expected.iter().all(|&value| value == 0.0));
                continue;
            }
        };
        let requests = counts
            .chunks(geometry.counts())
            .zip(expected.chunks(transform.dimension()));
        for (request, expected) in requests {
            let rows = layers.iter().flat_map(|&layer| {
                let start = usize::from(layer) * geometry.experts;
                request[start..start + geometry.experts].iter().copied()
            });
            near(
                &transform.apply(&rows.collect::<Vec<f32>>()),
                expected,
                2e-6,
                name,
            );
        }
    }
}

#[test]
fn vectors_are_unit_or_zero() {
    let geometry = Geometry::new(2, 3).unwrap();
    let transform = Transform::new(geometry, vec![1], vec![0.0, 0.5, 2.0]).unwrap();
    near(
        &transform.apply(&[9u16, 8, 0]),
        &[0.0, 1.0, 0.0],
        0.0,
        "one expert",
    );
    near(
        &transform.apply(&[9u16, 0, 0]),
        &[0.0, 0.0, 0.0],
        0.0,
        "no weight",
    );
    let largest = transform.apply(&[u16::MAX; 3]);
    assert!((crate::similarity::dot(&largest, &largest) - 1.0).abs() < 1e-6);
}

#[test]
fn kinds_shape_counts_before_they_are_weighted() {
    let geometry = Geometry::new(1, 3).unwrap();
    let transform = Transform::new(geometry, vec![0], vec![1.0, 2.0, 1.0]).unwrap();
    let expected = |kind| match kind {
        SignatureKind::Sqrt => [2.0, 4.0, 0.0],
        SignatureKind::Binary => [1.0, 2.0, 0.0],
        _ => [4.0, 8.0, 0.0f32],
    };
    for kind in SignatureKind::ALL {
        let [a, b, c] = expected(kind);
        let norm = a.hypot(b);
        let found = transform.clone().with_kind(kind).apply(&[4u16, 4, 0]);
        near(&found, &[a / norm, b / norm, c], 1e-7, kind.name());
    }
}

#[test]
fn errors_name_what_is_wrong() {
    let geometry = Geometry::new(2, 2).unwrap();
    let cases = [
        (
            vec![],
            vec![],
            "selected layers must be 1 to 2 ascending numbers below 2, not []",
        ),
        (
            vec![1, 1],
            vec![1.0; 4],
            "selected layers must be 1 to 2 ascending numbers below 2, not [1, 1]",
        ),
        (
            vec![2],
            vec![1.0; 2],
            "selected layers must be 1 to 2 ascending numbers below 2, not [2]",
        ),
        (
            vec![0],
            vec![1.0; 3],
            "3 weights for 2 selected (layer, expert) pairs",
        ),
        (
            vec![0],
            vec![1.0, f32::NAN],
            "weight 1 is NaN, allowed are 0 to 1000000",
        ),
        (
            vec![0],
            vec![-1.0, 1.0],
            "weight 0 is -1, allowed are 0 to 1000000",
        ),
        (
            vec![0],
            vec![0.0, 0.0],
            "all weights are zero, so that every signature would become the zero vector",
        ),
    ];
    for (layers, weights, message) in cases {
        assert_eq!(
            Transform::new(geometry, layers, weights)
                .unwrap_err()
                .to_string(),
            message
        );
    }
}
