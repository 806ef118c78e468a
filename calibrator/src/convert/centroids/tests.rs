use std::path::PathBuf;

use serde_json::{Value, json};

use super::*;

/// The official files: those that the core's tests have as well, and others.
const OFFICIAL: [&str; 5] = [
    "../core/tests/data/parity/h_fit_full_centroids.json",
    "../core/tests/data/parity/h_fit_tiny_centroids.json",
    "../core/tests/data/parity/h_fit_tiny_count_kmbal.json",
    "tests/data/parity/h_fit_tiny_count_km.json",
    "tests/data/parity/h_fit_tiny_idf_km_frozen.json",
];

fn path(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(name)
}

fn workers(count: usize) -> Vec<String> {
    (0..count)
        .map(|worker| format!("decode-{worker}"))
        .collect()
}

/// Imports `text`, which has `regions` regions.
fn imported(text: &str, regions: usize) -> Result<Imported, Error> {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("c.json");
    std::fs::write(&file, text).unwrap();
    let missing = Missing {
        workers: Some(&workers(regions)),
        ..Missing::default()
    };
    import(&file, missing)
}

#[test]
fn official_files_come_back_byte_for_byte() {
    for name in OFFICIAL {
        let text = std::fs::read_to_string(path(name)).unwrap();
        let k = serde_json::from_str::<Value>(&text).unwrap()["k"]
            .as_u64()
            .unwrap();
        let Imported { blob, exact } = imported(&text, k as usize).unwrap();
        // Through the file that a gateway gets.
        let blob = Blob::from_bytes(&blob.to_bytes().unwrap()).unwrap();
        assert!(exact && export(&blob).unwrap() == text, "{name}");
        assert_eq!(blob.regions[1], ["decode-1"]);
        assert_eq!((blob.tau, blob.revision), (0.1, 1));
    }
}

#[test]
fn a_blob_of_ours_comes_back_byte_for_byte() {
    let geometry = Geometry::new(3, 2).unwrap();
    let blob = Blob {
        revision: 7,
        model: "modèle".into(),
        transform: Transform::new(geometry, vec![0, 2], vec![1.0, 0.0, 0.1, 2.0]).unwrap(),
        centroids: vec![1.0, 0.0, 0.0, 0.0, 0.0, 0.6, 0.0, 0.8],
        tau: 0.15,
        regions: vec![vec!["a".into()], vec!["b".into(), "a".into()]],
        fit: Fit {
            quantiles: vec![vec![0.1; 7], vec![0.7; 7]],
            requests: 12,
            rho: Some(0.83),
            seed: 3,
            shares: vec![0.25, 0.75],
        },
        source: None,
    };
    let text = export(&blob).unwrap();
    let file: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(
        (&file["k"], &file["m"], &file["layer_mask"]),
        (&json!(2), &json!(2), &json!([0, 2]))
    );
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("c.json");
    std::fs::write(&path, &text).unwrap();
    let back = import(&path, Missing::default()).unwrap();
    assert!(back.exact);
    assert_eq!(back.blob, blob);
    // What is said at the import counts more.
    let (names, tau, revision) = (&workers(2)[..], Some(0.3), Some(9));
    let missing = Missing {
        workers: Some(names),
        tau,
        revision,
    };
    let other = import(&path, missing).unwrap().blob;
    assert_eq!(
        (other.tau, other.revision, &other.regions[1][..]),
        (0.3, 9, &names[1..])
    );
}

#[test]
fn what_the_artifact_loads_is_imported_and_what_it_refuses_is_refused() {
    let text =
        std::fs::read_to_string(path("../core/tests/data/parity/a_signature_tiny.json")).unwrap();
    let cases: Value = serde_json::from_str(&text).unwrap();
    let base = &cases["metadata"]["base"];
    for change in cases["metadata"]["changes"].as_array().unwrap() {
        let mut file = base.clone();
        for (key, value) in change["change"].as_object().unwrap() {
            file[key] = value.clone();
        }
        let found = imported(&file.to_string(), 2);
        // A signature of counts says nothing about gate probabilities.
        let routable = file["variant"] != "gate_prob_all";
        let expected = change["accepted"] == true && routable;
        assert_eq!(found.is_ok(), expected, "{}: {found:?}", change["change"]);
    }
}

#[test]
fn another_layout_is_imported_and_said_to_come_back_otherwise() {
    let text = std::fs::read_to_string(path(OFFICIAL[1])).unwrap();
    let compact = serde_json::from_str::<Value>(&text).unwrap().to_string();
    let [a, b] = [&text, &compact].map(|text| imported(text, 4).unwrap());
    assert!(a.exact && !b.exact);
    assert_eq!(a.blob.centroids, b.blob.centroids);
}

#[test]
fn a_source_of_other_regions_is_not_exported() {
    let text = std::fs::read_to_string(path(OFFICIAL[1])).unwrap();
    let mut blob = imported(&text, 4).unwrap().blob;
    blob.source = blob
        .source
        .map(|source| source.replace("\"k\":4", "\"k\":5"));
    let error = export(&blob).unwrap_err().to_string();
    assert!(
        error.contains("4 regions of 6 × 16, its `source` is of others"),
        "{error}"
    );
}

#[test]
fn gate_probabilities_are_no_counts() {
    let text = std::fs::read_to_string(path("tests/data/parity/h_fit_tiny_gate_prob_all.json"));
    let error = imported(&text.unwrap(), 4).unwrap_err();
    let what = "key `variant`: \"gate_prob_all\" where count_idf or count was expected";
    assert!(error.to_string().ends_with(what), "{error}");
}
