//! Vectors and the distances between them: nearly all the time of a round.

use eldr_core::blob::Blob;
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
    /// The centroids of a blob, row-major `[region][dimension]`.
    pub fn centroids_of(blob: &'a Blob) -> Self {
        Vectors {
            dimension: blob.transform.dimension(),
            values: &blob.centroids,
        }
    }

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
    let length = vectors.first().map_or(0, |row| row.len());
    // All of one length, so that the loops need no bounds checks.
    let vectors = vectors.map(|row| row[..length].as_chunks::<4>());
    let centroids = centroids.map(|row| row[..length].as_chunks::<4>());
    let quads = length / 4;
    let (xs, ys) = (
        vectors.map(|(row, _)| &row[..quads]),
        centroids.map(|(row, _)| &row[..quads]),
    );
    // The sums are passed from step to step: in a variable they would be written to memory each time.
    let sums = (0..quads).fold([[f32x4::ZERO; C]; V], |sums, at| {
        let xs: [f32x4; V] = std::array::from_fn(|v| f32x4::from(xs[v][at]));
        let ys: [f32x4; C] = std::array::from_fn(|c| f32x4::from(ys[c][at]));
        std::array::from_fn(|v| std::array::from_fn(|c| sums[v][c] + xs[v] * ys[c]))
    });
    std::array::from_fn(|v| {
        std::array::from_fn(|c| {
            let rest = vectors[v].1.iter().zip(centroids[c].1).map(|(x, y)| x * y);
            sums[v][c].reduce_add() + rest.sum::<f32>()
        })
    })
}
