use std::collections::BTreeMap;

use eldr_calibrator::kmeans::{Vectors, balanced};
use serde::Deserialize;

use super::{assert_close, json, npz};

#[derive(Deserialize)]
struct Case {
    name: String,
    #[serde(rename = "K")]
    clusters: usize,
    cap: usize,
    iterations: usize,
    converged: bool,
    compare: String,
    total_cosine_distance: Vec<f64>,
    sizes: Vec<Vec<usize>>,
}

fn sizes(assignment: &[usize], clusters: usize) -> Vec<usize> {
    let mut sizes = vec![0; clusters];
    assignment.iter().for_each(|&cluster| sizes[cluster] += 1);
    sizes
}

#[test]
fn every_round_of_every_case() {
    let mut npz = npz("d_kmeans.npz");
    let cases: BTreeMap<String, Vec<Case>> = json("d_kmeans.json");
    assert_eq!(cases["cases"].len(), 15);
    for case in &cases["cases"] {
        let name = &case.name;
        let vectors = npz.array::<f32>(&format!("{name}_X")).unwrap();
        let start = npz.array::<f32>(&format!("{name}_C0")).unwrap().data;
        let assignments = npz.array::<i32>(&format!("{name}_assign")).unwrap();
        let expected = npz.array::<f32>(&format!("{name}_C")).unwrap().data;
        let (requests, dimension) = (vectors.shape[0], vectors.shape[1]);
        // Where duplicates make equally good assignments, only what they have in common is defined.
        let exact = case.compare == "assignments";

        let mut rounds = 0;
        let vectors = Vectors {
            dimension,
            values: &vectors.data,
        };
        let result = balanced(vectors, start, |round| {
            let found: Vec<i32> = round.assignment.iter().map(|&c| c as i32).collect();
            let found_sizes = sizes(round.assignment, case.clusters);
            if exact {
                assert_eq!(
                    found,
                    assignments.row(round.index),
                    "{name}, round {}",
                    round.index
                );
                assert_eq!(found_sizes, case.sizes[round.index], "{name}");
            }
            assert!(found_sizes.iter().all(|&size| size <= case.cap), "{name}");
            let tolerance = 5e-8 * requests as f64 + 1e-5;
            let off = round.total_distance - case.total_cosine_distance[round.index];
            assert!(
                off.abs() < tolerance,
                "{name}, round {}: off by {off}",
                round.index
            );
            rounds += 1;
        });
        assert_eq!(rounds, case.iterations, "{name}");
        assert_eq!(
            (result.rounds, result.converged),
            (case.iterations, case.converged),
            "{name}"
        );
        assert_close(&result.centroids, &expected, 2e-6);
    }
}
