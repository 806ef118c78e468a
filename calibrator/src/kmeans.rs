//! Spherical balanced K-means (ELDR §4): unit vectors, cosine distance, regions of bounded size.

use rand::RngExt as _;
use rand_chacha::ChaCha8Rng;
use rayon::prelude::*;
use wide::f32x4;

use crate::assign::assign;

/// Rounds after which the iteration stops, converged or not.
pub const ROUNDS_MAX: usize = 50;

/// Unit vectors, row-major `[request][dimension]`.
#[derive(Clone, Copy, Debug)]
pub struct Vectors<'a> {
    /// Values per vector, at least 1.
    pub dimension: usize,
    /// The values.
    pub values: &'a [f32],
}

impl<'a> Vectors<'a> {
    /// How many vectors there are.
    pub fn len(&self) -> usize {
        self.values.len() / self.dimension
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.values.is_empty()
    }

    /// Vector `index`.
    ///
    /// # Panics
    /// If there is no such vector.
    pub fn row(&self, index: usize) -> &'a [f32] {
        &self.values[index * self.dimension..][..self.dimension]
    }

    /// Cosine distance of every vector to every centroid, row-major `[vector][centroid]`.
    pub fn distances(&self, centroids: Vectors<'_>) -> Vec<f32> {
        let mut distances = vec![0.0; self.len() * centroids.len()];
        let all: Vec<usize> = (0..centroids.len()).collect();
        self.update_distances(&mut distances, centroids.values, &all);
        distances
    }

    /// Writes the `distances` to those of the `centroids` that are `moved`.
    ///
    /// Additions have one fixed order: a fit has the same bytes on all processors, however many threads.
    fn update_distances(&self, distances: &mut [f32], centroids: &[f32], moved: &[usize]) {
        let centroids = Vectors {
            values: centroids,
            ..*self
        };
        let clusters = centroids.len();
        let pairs = distances.par_chunks_mut(2 * clusters);
        pairs.enumerate().for_each(|(pair, out)| {
            let (first, second) = out.split_at_mut(clusters);
            let a = self.row(2 * pair);
            // Where the vectors are odd in number, the last one is its own partner, and nobody sees the second result.
            let b = if second.is_empty() {
                a
            } else {
                self.row(2 * pair + 1)
            };
            let mut set = |cluster: usize, [to_a, to_b]: [f32; 2]| {
                first[cluster] = 1.0 - to_a;
                if let Some(second) = second.get_mut(cluster) {
                    *second = 1.0 - to_b;
                }
            };
            let (fours, rest) = moved.as_chunks::<4>();
            for &four in fours {
                let [to_a, to_b] = dots([a, b], four.map(|cluster| centroids.row(cluster)));
                (0..4).for_each(|at| set(four[at], [to_a[at], to_b[at]]));
            }
            for &cluster in rest {
                let [[to_a], [to_b]] = dots([a, b], [centroids.row(cluster)]);
                set(cluster, [to_a, to_b]);
            }
        });
    }
}

/// Dot products of `V` vectors with `C` centroids. Side by side, each value that is loaded is used several times.
fn dots<const V: usize, const C: usize>(
    vectors: [&[f32]; V],
    centroids: [&[f32]; C],
) -> [[f32; C]; V] {
    let vectors = vectors.map(|row| row.as_chunks::<4>());
    let centroids = centroids.map(|row| row.as_chunks::<4>());
    let mut sums = [[f32x4::ZERO; C]; V];
    let quads = vectors[0].0.len();
    let (xs, ys) = (
        vectors.map(|(quads, _)| quads),
        centroids.map(|(quads, _)| quads),
    );
    for at in 0..quads {
        let ys = ys.map(|row| f32x4::from(row[at]));
        for (sums, row) in sums.iter_mut().zip(&xs) {
            let x = f32x4::from(row[at]);
            for (sum, y) in sums.iter_mut().zip(&ys) {
                *sum += x * *y;
            }
        }
    }
    std::array::from_fn(|v| {
        std::array::from_fn(|c| {
            let rest = vectors[v].1.iter().zip(centroids[c].1).map(|(x, y)| x * y);
            sums[v][c].reduce_add() + rest.sum::<f32>()
        })
    })
}

/// One round: an assignment and what it costs.
#[derive(Clone, Copy, Debug)]
pub struct Round<'a> {
    /// Rounds before this one.
    pub index: usize,
    /// The cluster of each vector.
    pub assignment: &'a [usize],
    /// Total cosine distance to the centroids that the round began with.
    pub total_distance: f64,
}

/// The outcome.
#[derive(Clone, Debug, PartialEq)]
pub struct Clustering {
    /// Unit centroids, row-major `[cluster][dimension]`.
    pub centroids: Vec<f32>,
    /// The cluster of each vector.
    pub assignment: Vec<usize>,
    /// Rounds done.
    pub rounds: usize,
    /// Whether the last round left the centroids where they were.
    pub converged: bool,
    /// Total cosine distance of the last round.
    pub total_distance: f64,
}

/// K-means++: indices of `clusters` different vectors, each drawn with a probability proportional to
/// its cosine distance from the nearest one drawn before it.
///
/// (Between unit vectors the cosine distance is half the squared Euclidean one.)
///
/// # Panics
/// If there are fewer vectors than clusters.
pub fn plus_plus(vectors: Vectors<'_>, clusters: usize, rng: &mut ChaCha8Rng) -> Vec<usize> {
    assert!(
        clusters <= vectors.len(),
        "{clusters} clusters of {} vectors",
        vectors.len()
    );
    let mut nearest = vec![1.0f64; vectors.len()];
    let mut drawn = Vec::with_capacity(clusters);
    while drawn.len() < clusters {
        let next = draw(&nearest, &drawn, rng);
        drawn.push(next);
        let centre = Vectors {
            values: vectors.row(next),
            ..vectors
        };
        for (nearest, distance) in nearest.iter_mut().zip(vectors.distances(centre)) {
            *nearest = nearest.min(f64::from(distance).max(0.0));
        }
        // Rounding must not let a vector be drawn twice.
        nearest[next] = 0.0;
    }
    drawn
}

/// An index drawn with probability proportional to `weights`; the first one not yet drawn when all
/// weights are zero, which happens when fewer vectors are distinct than are to be drawn.
fn draw(weights: &[f64], drawn: &[usize], rng: &mut ChaCha8Rng) -> usize {
    let total: f64 = weights.iter().sum();
    let mut left = rng.random::<f64>() * total;
    let mut chosen = None;
    for (index, &weight) in weights
        .iter()
        .enumerate()
        .filter(|&(_, &weight)| weight > 0.0)
    {
        chosen = Some(index);
        left -= weight;
        if left < 0.0 {
            break;
        }
    }
    let unused = || (0..weights.len()).find(|index| !drawn.contains(index));
    chosen.or_else(unused).unwrap_or_default()
}

/// Iterates from the centroids `start`: assign with at most ⌈vectors / clusters⌉ per cluster, then
/// move each centroid to the direction of its members' mean; a cluster without members keeps its
/// centroid. Ends when no coordinate moves by more than 1e-8 + 1e-5 of its value, or after
/// [`ROUNDS_MAX`] rounds.
pub fn balanced(
    vectors: Vectors<'_>,
    start: Vec<f32>,
    mut on_round: impl FnMut(Round<'_>),
) -> Clustering {
    let dimension = vectors.dimension;
    let clusters = start.len() / dimension;
    let capacity = vectors.len().div_ceil(clusters);
    let mut result = Clustering {
        centroids: start,
        assignment: Vec::new(),
        rounds: 0,
        converged: false,
        total_distance: 0.0,
    };
    let mut sums = Sums::new(clusters, dimension);
    let mut prices = vec![0; clusters];
    let mut costs = vec![0.0; vectors.len() * clusters];
    let mut moved: Vec<usize> = (0..clusters).collect();
    while result.rounds < ROUNDS_MAX && !result.converged {
        vectors.update_distances(&mut costs, &result.centroids, &moved);
        let assignment = assign(&costs, capacity, &mut prices);
        let rows = costs.chunks_exact(clusters).zip(&assignment);
        result.total_distance = rows.map(|(row, &cluster)| f64::from(row[cluster])).sum();
        on_round(Round {
            index: result.rounds,
            assignment: &assignment,
            total_distance: result.total_distance,
        });
        moved = sums.follow(vectors, &result.assignment, &assignment);
        result.assignment = assignment;
        result.converged = true;
        for &cluster in &moved {
            let centroid = &mut result.centroids[cluster * dimension..][..dimension];
            for (old, new) in centroid.iter_mut().zip(sums.direction(cluster)) {
                result.converged &= (new - *old).abs() <= 1e-8 + 1e-5 * old.abs();
                *old = new;
            }
        }
        result.rounds += 1;
    }
    result
}

/// Sum of each cluster's members. From round to round few vectors move, so the sums follow them instead of beginning anew.
struct Sums {
    sums: Vec<f64>,
    members: Vec<usize>,
    dimension: usize,
}

impl Sums {
    fn new(clusters: usize, dimension: usize) -> Self {
        Sums {
            sums: vec![0.0; clusters * dimension],
            members: vec![0; clusters],
            dimension,
        }
    }

    /// Takes the vectors from where they were (nowhere, where `before` ends) to where they are; returns the clusters of which
    /// the members changed, ascending, less those whose mean has no direction: they have none left, or cancel out.
    fn follow(&mut self, vectors: Vectors<'_>, before: &[usize], now: &[usize]) -> Vec<usize> {
        let mut changed = vec![false; self.members.len()];
        for (index, &to) in now.iter().enumerate() {
            let from = before.get(index).copied();
            if from == Some(to) {
                continue;
            }
            let row = vectors.row(index);
            if let Some(from) = from {
                self.members[from] -= 1;
                changed[from] = true;
                let sum = self.sum(from);
                sum.iter_mut()
                    .zip(row)
                    .for_each(|(sum, &v)| *sum -= f64::from(v));
            }
            self.members[to] += 1;
            changed[to] = true;
            let sum = self.sum(to);
            sum.iter_mut()
                .zip(row)
                .for_each(|(sum, &v)| *sum += f64::from(v));
        }
        (0..changed.len())
            .filter(|&c| changed[c] && self.members[c] > 0 && self.norm(c) > 0.0)
            .collect()
    }

    fn sum(&mut self, cluster: usize) -> &mut [f64] {
        &mut self.sums[cluster * self.dimension..][..self.dimension]
    }

    fn norm(&self, cluster: usize) -> f64 {
        let sum = &self.sums[cluster * self.dimension..][..self.dimension];
        sum.iter().map(|v| v * v).sum::<f64>().sqrt()
    }

    /// The direction of a cluster's mean.
    fn direction(&self, cluster: usize) -> impl Iterator<Item = f32> {
        let norm = self.norm(cluster);
        let sum = &self.sums[cluster * self.dimension..][..self.dimension];
        sum.iter().map(move |v| (v / norm) as f32)
    }
}

#[cfg(test)]
mod tests {
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
}
