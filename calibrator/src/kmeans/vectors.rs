//! Vectors and the distances between them: nearly all the time of a round.

use eldr_core::blob::Blob;
use multiversion::multiversion;
use rayon::prelude::*;

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
            for four in moved.chunks(4) {
                // The last ones are not always four: centroids beyond them are the first one again.
                let row = |at: usize| centroids.row(*four.get(at).unwrap_or(&four[0]));
                let [to_a, to_b] = dots([a, b], [row(0), row(1), row(2), row(3)]);
                let found = to_a.into_iter().zip(to_b);
                for (&cluster, (to_a, to_b)) in four.iter().zip(found) {
                    first[cluster] = 1.0 - to_a;
                    if let Some(second) = second.get_mut(cluster) {
                        *second = 1.0 - to_b;
                    }
                }
            }
        });
    }
}

/// Values that are multiplied at a time: one AVX register.
type Lanes = [f32; 8];

/// Dot products of two vectors with four centroids, all of one length. Side by side, each value that is loaded is used several times.
fn dots(vectors: [&[f32]; 2], centroids: [&[f32]; 4]) -> [[f32; 4]; 2] {
    let sums = sums(
        vectors.map(|row| row.as_chunks().0),
        centroids.map(|row| row.as_chunks().0),
    );
    std::array::from_fn(|v| {
        std::array::from_fn(|c| {
            let [i, j, k, l, m, n, o, p] = sums[v][c];
            let rest = [vectors[v], centroids[c]].map(|row| row.as_chunks::<8>().1);
            let rest: f32 = rest[0].iter().zip(rest[1]).map(|(x, y)| x * y).sum();
            ((i + m) + (k + o)) + ((j + n) + (l + p)) + rest
        })
    })
}

/// The lanes of the dot products, not yet added up: with that in the same function, compilers take the lanes apart.
///
/// Compiled with and without AVX. FMA would be faster still and round otherwise.
#[multiversion(targets("x86_64+avx"))]
fn sums(vectors: [&[Lanes]; 2], centroids: [&[Lanes]; 4]) -> [[Lanes; 4]; 2] {
    let ([a, b], [p, q, r, s]) = (vectors, centroids);
    // Each sum a variable of its own: in an array they would be written to memory each time.
    let [mut ap, mut aq, mut ar, mut as_] = [Lanes::default(); 4];
    let [mut bp, mut bq, mut br, mut bs] = [Lanes::default(); 4];
    for (((((a, b), p), q), r), s) in a.iter().zip(b).zip(p).zip(q).zip(r).zip(s) {
        (ap, aq, ar, as_) = (add(ap, a, p), add(aq, a, q), add(ar, a, r), add(as_, a, s));
        (bp, bq, br, bs) = (add(bp, b, p), add(bq, b, q), add(br, b, r), add(bs, b, s));
    }
    [[ap, aq, ar, as_], [bp, bq, br, bs]]
}

#[inline(always)]
fn add(mut sums: Lanes, a: &Lanes, b: &Lanes) -> Lanes {
    for lane in 0..8 {
        sums[lane] += a[lane] * b[lane];
    }
    sums
}
