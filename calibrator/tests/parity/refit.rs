use eldr_calibrator::kmeans::{Vectors, balanced};
use eldr_calibrator::refit::{self, Limits, Window};
use serde::Deserialize;

use super::{assert_close, json, npz};

#[derive(Deserialize)]
struct File {
    align: Vec<Align>,
    refit: Vec<Refit>,
    online: Online,
}

#[derive(Deserialize)]
struct Align {
    name: String,
    permutation: Vec<usize>,
    total_similarity: f64,
    compare: String,
}

#[derive(Deserialize)]
struct Refit {
    name: String,
    iterations: usize,
    converged: bool,
    permutation: Vec<usize>,
    sizes: Vec<usize>,
}

#[derive(Deserialize)]
struct Online {
    window_seconds: f64,
    refit_seconds: f64,
    steps: Vec<Step>,
}

#[derive(Deserialize)]
struct Step {
    t: f64,
    window_size: usize,
    refits_started: usize,
}

fn vectors(dimension: usize, values: &[f32]) -> Vectors<'_> {
    Vectors { dimension, values }
}

fn file() -> File {
    json("f_align_refit_online.json")
}

fn rows(name: &str, npz: &mut eldr_calibrator::npz::Npz) -> (usize, Vec<f32>) {
    let array = npz.array::<f32>(name).unwrap();
    (array.shape[1], array.data)
}

#[test]
fn new_regions_succeed_the_most_similar_old_ones() {
    let mut npz = npz("f_align.npz");
    let cases = file().align;
    assert_eq!(cases.len(), 7);
    for case in cases {
        let mut rows = |what: &str| rows(&format!("{}_{what}", case.name), &mut npz);
        let ((dimension, current), (_, fitted), (_, aligned)) =
            (rows("current"), rows("fitted"), rows("aligned"));
        let order = refit::align(vectors(dimension, &current), vectors(dimension, &fitted));
        let dot = |(row, &to): (usize, &usize)| {
            let pairs = vectors(dimension, &current)
                .row(row)
                .iter()
                .zip(vectors(dimension, &fitted).row(to));
            pairs.map(|(a, b)| f64::from(a * b)).sum::<f64>()
        };
        let total: f64 = order.iter().enumerate().map(dot).sum();
        assert!(
            (total - case.total_similarity).abs() < 1e-5,
            "{}: {total}",
            case.name
        );
        if case.compare == "aligned" {
            assert_eq!(order, case.permutation, "{}", case.name);
            let found: Vec<f32> = order
                .iter()
                .flat_map(|&to| vectors(dimension, &fitted).row(to))
                .copied()
                .collect();
            assert_close(&found, &aligned, 2e-6);
        }
    }
}

#[test]
fn a_refit_is_the_official_one() {
    let mut npz = npz("f_refit.npz");
    let cases = file().refit;
    assert_eq!(cases.len(), 4);
    for case in cases {
        let name = &case.name;
        let assignments = npz.array::<i32>(&format!("{name}_assign")).unwrap();
        let mut rows = |what: &str| rows(&format!("{name}_{what}"), &mut npz);
        let ((dimension, window), (_, current), (_, fitted)) =
            (rows("rows"), rows("current"), rows("fitted"));
        let found = balanced(vectors(dimension, &window), current.clone(), |round| {
            let found: Vec<i32> = round
                .assignment
                .iter()
                .map(|&cluster| cluster as i32)
                .collect();
            assert_eq!(
                found,
                assignments.row(round.index),
                "{name}, round {}",
                round.index
            );
        });
        assert_eq!(
            (found.rounds, found.converged),
            (case.iterations, case.converged),
            "{name}"
        );
        assert_close(&found.centroids, &fitted, 2e-6);
        let order = refit::align(
            vectors(dimension, &current),
            vectors(dimension, &found.centroids),
        );
        assert_eq!(order, case.permutation, "{name}");
        let mut sizes = vec![0; case.sizes.len()];
        found
            .assignment
            .iter()
            .for_each(|&cluster| sizes[cluster] += 1);
        assert_eq!(sizes, case.sizes, "{name}");
    }
}

#[test]
fn refits_are_due_when_the_official_ones_are_and_install_the_same_centroids() {
    let mut npz = npz("f_online.npz");
    let online = file().online;
    let (dimension, mut centroids) = rows("seed_centroids", &mut npz);
    let (_, signatures) = rows("signatures", &mut npz);
    let used = npz.array::<f32>("centroids_used").unwrap().data;
    let regions = vectors(dimension, &centroids).len();
    let mut window = Window::new(
        dimension,
        Limits {
            age: online.window_seconds,
            requests: usize::MAX,
            requests_per_region: 1,
            interval: online.refit_seconds,
        },
    );
    let mut started = 0;
    assert_eq!(online.steps.len(), 120);
    for (step, expected) in online.steps.iter().enumerate() {
        assert_close(
            &centroids,
            &used[step * centroids.len()..][..centroids.len()],
            2e-6,
        );
        window.push(expected.t, vectors(dimension, &signatures).row(step));
        if window.due(expected.t, regions) {
            started += 1;
            let fitted = balanced(
                vectors(dimension, window.vectors()),
                centroids.clone(),
                |_| {},
            )
            .centroids;
            let order = refit::align(vectors(dimension, &centroids), vectors(dimension, &fitted));
            centroids = order
                .iter()
                .flat_map(|&to| vectors(dimension, &fitted).row(to))
                .copied()
                .collect();
        }
        assert_eq!(
            (window.len(), started),
            (expected.window_size, expected.refits_started),
            "step {step}"
        );
    }
    assert_eq!(started, 4);
}
