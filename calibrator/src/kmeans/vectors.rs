//! Vectors and the distances between them: nearly all the time of a round.

use rayon::prelude::*;
use wide::f32x4;

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
    pub(super) fn update_distances(
        &self,
        distances: &mut [f32],
        centroids: &[f32],
        moved: &[usize],
    ) {
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
