//! Spherical balanced K-means (ELDR §4): unit vectors, cosine distance, regions of bounded size.

mod vectors;

use multiversion::multiversion;
use rand::RngExt as _;
use rand_chacha::ChaCha8Rng;

use crate::assign::assign;
pub use vectors::Vectors;

/// Rounds after which the iteration stops, converged or not.
pub const ROUNDS_MAX: usize = 50;

/// One round: an assignment and what it costs.
#[derive(Clone, Copy, Debug)]
pub struct Round<'a> {
    /// Rounds before this one.
    pub index: usize,
    /// The cluster of each vector.
    pub assignment: &'a [usize],
    /// Cosine distance of every vector to every centroid that the round began with, row-major `[vector][centroid]`.
    pub distances: &'a [f32],
    /// Their sum over the assignment.
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
            distances: &costs,
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
                add_scaled(self.sum(from), row, -1.0);
            }
            self.members[to] += 1;
            changed[to] = true;
            add_scaled(self.sum(to), row, 1.0);
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

/// Adds `factor` × `row`.
#[multiversion(targets("x86_64+avx"))]
fn add_scaled(sum: &mut [f64], row: &[f32], factor: f64) {
    for (sum, &value) in sum.iter_mut().zip(row) {
        *sum += factor * f64::from(value);
    }
}

#[cfg(test)]
mod tests;
