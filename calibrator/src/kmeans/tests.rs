use rand::SeedableRng as _;

use super::*;

fn unit(values: &[f32]) -> Vec<f32> {
    let norm = values.iter().map(|v| v * v).sum::<f32>().sqrt();
    values.iter().map(|v| v / norm).collect()
}

fn distances_by_definition(vectors: Vectors<'_>, centroids: Vectors<'_>) -> Vec<f32> {
    (0..vectors.len())
        .flat_map(|v| (0..centroids.len()).map(move |c| (v, c)))
        .map(|(v, c)| {
            1.0 - eldr_core::similarity::dot_scalar(vectors.row(v), centroids.row(c)) as f32
        })
        .collect()
}

#[test]
fn distances_are_vector_by_centroid() {
    let values: Vec<f32> = (1..16).map(|i| (i * i % 7) as f32).collect();
    let values: Vec<f32> = values.chunks(3).flat_map(unit).collect();
    let vectors = Vectors {
        dimension: 3,
        values: &values,
    };
    let centroids = Vectors {
        dimension: 3,
        values: &values[3..9],
    };
    let found = vectors.distances(centroids);
    assert_eq!(found.len(), 10);
    for (found, expected) in found
        .iter()
        .zip(distances_by_definition(vectors, centroids))
    {
        assert!((found - expected).abs() < 1e-6);
    }
}

#[test]
fn starting_vectors_differ_even_among_duplicates() {
    let values: Vec<f32> = [1.0, 0.0].repeat(5);
    let vectors = Vectors {
        dimension: 2,
        values: &values,
    };
    let mut drawn = plus_plus(vectors, 5, &mut ChaCha8Rng::seed_from_u64(1));
    drawn.sort_unstable();
    assert_eq!(drawn, [0, 1, 2, 3, 4]);
}

#[test]
fn a_far_vector_is_drawn_before_a_duplicate() {
    let values = [[1.0, 0.0]; 9]
        .concat()
        .into_iter()
        .chain([0.0, 1.0])
        .collect::<Vec<f32>>();
    let vectors = Vectors {
        dimension: 2,
        values: &values,
    };
    for seed in 0..20 {
        let drawn = plus_plus(vectors, 2, &mut ChaCha8Rng::seed_from_u64(seed));
        assert!(drawn.contains(&9), "seed {seed} drew {drawn:?}");
    }
}

#[test]
fn a_crowd_is_split_so_that_no_cluster_exceeds_its_share() {
    let crowd = [[1.0, 0.05], [1.0, 0.0], [1.0, 0.1], [0.0, 1.0]];
    let values: Vec<f32> = crowd.iter().flat_map(|v| unit(v)).collect();
    let vectors = Vectors {
        dimension: 2,
        values: &values,
    };
    let mut rounds = 0;
    let result = balanced(vectors, vec![1.0, 0.0, 0.0, 1.0], |_| rounds += 1);
    assert_eq!(
        result.assignment,
        [0, 0, 1, 1],
        "the one nearest the other side goes there"
    );
    assert!(result.converged);
    assert_eq!(result.rounds, rounds);
    for centroid in result.centroids.chunks(2) {
        assert!((centroid[0].hypot(centroid[1]) - 1.0).abs() < 1e-6);
    }
}

#[test]
fn a_cluster_without_members_keeps_its_centroid() {
    let vectors = Vectors {
        dimension: 2,
        values: &[1.0, 0.0],
    };
    let result = balanced(vectors, vec![0.8, 0.6, 0.0, 1.0], |_| {});
    assert_eq!(result.centroids, [1.0, 0.0, 0.0, 1.0]);
}
