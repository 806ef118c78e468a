//! Cosine similarity of unit vectors: a dot product.

use wide::f32x4;

use crate::transform::{MIN_NORM, Transform};

/// Independent sums: enough for two 4-lane accumulators of wasm's simd128 or one AVX register.
const LANES: usize = 16;

/// Dot product over the shorter length.
///
/// Sixteen partial sums in four vectors of four, added pairwise at the end. The order of additions is fixed here, so the bits
/// are the same natively and in WebAssembly.
pub fn dot(a: &[f32], b: &[f32]) -> f32 {
    let length = a.len().min(b.len());
    let (a, b) = (
        a.get(..length).unwrap_or_default(),
        b.get(..length).unwrap_or_default(),
    );
    let (a_blocks, a_rest) = a.as_chunks::<LANES>();
    let (b_blocks, b_rest) = b.as_chunks::<LANES>();
    let mut sums = [f32x4::ZERO; LANES / 4];
    for (a, b) in a_blocks.iter().zip(b_blocks) {
        let (a, b) = (a.as_chunks::<4>().0, b.as_chunks::<4>().0);
        for ((sum, &a), &b) in sums.iter_mut().zip(a).zip(b) {
            *sum += f32x4::from(a) * f32x4::from(b);
        }
    }
    let mut rest = [[0.0; LANES]; 2];
    for (padded, values) in rest.iter_mut().zip([a_rest, b_rest]) {
        for (padded, value) in padded.iter_mut().zip(values) {
            *padded = *value;
        }
    }
    let [a, b] = &rest;
    let (a, b) = (a.as_chunks::<4>().0, b.as_chunks::<4>().0);
    for ((sum, &a), &b) in sums.iter_mut().zip(a).zip(b) {
        *sum += f32x4::from(a) * f32x4::from(b);
    }
    let [p, q, r, s] = sums;
    let [w, x, y, z] = ((p + r) + (q + s)).to_array();
    (w + y) + (x + z)
}

/// Rows that [`dot_each`] takes side by side.
pub(crate) const ROWS: usize = 4;

/// Dot products of `a` with several rows, for which it is loaded once. All are as long as it; of others the
/// result says nothing. Each result depends on its own row alone.
pub(crate) fn dot_each(a: &[f32], rows: [&[f32]; ROWS]) -> [f32; ROWS] {
    let (blocks, rest) = a.as_chunks::<8>();
    let blocks_of = rows.map(|row| row.as_chunks::<8>());
    let [p, q, r, s] = blocks_of.map(|(blocks, _)| blocks);
    let mut sums = [[f32x4::ZERO; 2]; ROWS];
    let mut add = |a: &[f32; 8], rows: [&[f32; 8]; ROWS]| {
        let halves = a.as_chunks::<4>().0;
        for (sums, row) in sums.iter_mut().zip(rows) {
            let row = row.as_chunks::<4>().0;
            for ((sum, &a), &b) in sums.iter_mut().zip(halves).zip(row) {
                *sum += f32x4::from(a) * f32x4::from(b);
            }
        }
    };
    for ((((a, p), q), r), s) in blocks.iter().zip(p).zip(q).zip(r).zip(s) {
        add(a, [p, q, r, s]);
    }
    let rests = blocks_of.map(|(_, rest)| padded(rest));
    add(&padded(rest), rests.each_ref());
    sums.map(|[low, high]| total_of(low + high))
}

/// Fills up with zeros.
fn padded(values: &[f32]) -> [f32; 8] {
    let mut padded = [0.0; 8];
    for (padded, value) in padded.iter_mut().zip(values) {
        *padded = *value;
    }
    padded
}

/// Dot product, one term after the other, in `f64`: the oracle for [`dot`].
pub fn dot_scalar(a: &[f32], b: &[f32]) -> f64 {
    a.iter()
        .zip(b)
        .map(|(&a, &b)| f64::from(a) * f64::from(b))
        .sum()
}

/// Regions that are summed side by side: each count is loaded once for all of them, and eight sums hide the latency
/// of an addition.
const GROUP: usize = 8;
/// Dimensions are padded with zeros to a multiple of this.
const PAD: usize = 16;
/// Quads of counts after which the sums are added to the totals, so that rounding errors stay small in long vectors.
const RUN: usize = 32;

/// Centroids with a [`Transform`]'s weights folded in, which gives similarities straight from counts.
///
/// The cosine is Σ (count·weight)·centroid / ‖count·weight‖. The product weight·centroid is the same for every request,
/// so it is computed once, and a request's vector is neither stored nor divided. The order of all additions is fixed:
/// native code and WebAssembly give the same bits.
#[derive(Debug, Clone, PartialEq)]
pub struct Folded {
    /// Padded.
    weights: Vec<f32>,
    /// `[group][quad of dimensions][region of the group][dimension of the quad]`; regions that only fill a group are zero.
    products: Vec<[f32x4; GROUP]>,
    regions: usize,
}

impl Folded {
    /// Folds the transform into `centroids`, `[regions][dimension]`.
    pub fn new(transform: &Transform, centroids: &[f32]) -> Self {
        let mut weights = transform.weights().to_vec();
        weights.resize(weights.len().next_multiple_of(PAD), 0.0);
        let (quads, _) = weights.as_chunks::<4>();
        let rows: Vec<&[f32]> = centroids.chunks_exact(transform.dimension()).collect();
        let product = |row: Option<&&[f32]>, quad: usize, weights: [f32; 4]| {
            let row = row.and_then(|row| row.get(4 * quad..)).unwrap_or_default();
            let mut product = [0.0; 4];
            for ((product, weight), value) in product.iter_mut().zip(weights).zip(row) {
                *product = weight * value;
            }
            f32x4::from(product)
        };
        let mut products = Vec::with_capacity(rows.len().div_ceil(GROUP) * quads.len());
        for group in rows.chunks(GROUP) {
            for (quad, &weights) in quads.iter().enumerate() {
                products.push(std::array::from_fn(|region| {
                    product(group.get(region), quad, weights)
                }));
            }
        }
        Self {
            regions: rows.len(),
            weights,
            products,
        }
    }

    /// Similarity of a signature to each region, in place of what is in `out`. `counts` are those of the selected
    /// layers; they get padded.
    pub fn to_each(&self, counts: &mut Vec<f32>, out: &mut Vec<f32>) {
        counts.resize(self.weights.len(), 0.0);
        out.clear();
        let norm = self.norm(counts);
        let (quads, _) = counts.as_chunks::<4>();
        for group in self.products.chunks_exact(quads.len()) {
            let mut totals = [f32x4::ZERO; GROUP];
            for (quads, products) in quads.chunks(RUN).zip(group.chunks(RUN)) {
                let mut sums = [f32x4::ZERO; GROUP];
                for (&quad, products) in quads.iter().zip(products) {
                    let counts = f32x4::from(quad);
                    for (sum, &product) in sums.iter_mut().zip(products) {
                        *sum += counts * product;
                    }
                }
                add(&mut totals, sums);
            }
            out.extend(totals.map(|total| total_of(total) / norm));
        }
        out.truncate(self.regions);
    }

    /// Length of the weighted vector, clipped below.
    fn norm(&self, counts: &[f32]) -> f32 {
        let (counts, _) = counts.as_chunks::<4>();
        let (weights, _) = self.weights.as_chunks::<4>();
        let (counts, _) = counts.as_chunks::<4>();
        let (weights, _) = weights.as_chunks::<4>();
        let mut totals = [f32x4::ZERO; 4];
        for (counts, weights) in counts.chunks(RUN / 4).zip(weights.chunks(RUN / 4)) {
            let mut sums = [f32x4::ZERO; 4];
            for (counts, weights) in counts.iter().zip(weights) {
                for ((sum, &count), &weight) in sums.iter_mut().zip(counts).zip(weights) {
                    let value = f32x4::from(count) * f32x4::from(weight);
                    *sum += value * value;
                }
            }
            add(&mut totals, sums);
        }
        let [a, b, c, d] = totals;
        total_of((a + b) + (c + d)).sqrt().max(MIN_NORM)
    }
}

fn add<const N: usize>(totals: &mut [f32x4; N], sums: [f32x4; N]) {
    for (total, sum) in totals.iter_mut().zip(sums) {
        *total += sum;
    }
}

/// Sum of the four lanes, in an order of our own.
fn total_of(quad: f32x4) -> f32 {
    let [a, b, c, d] = quad.to_array();
    (a + b) + (c + d)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::signature::Geometry;

    fn vector() -> impl Strategy<Value = Vec<f32>> {
        proptest::collection::vec(-1.0f32..1.0, 0..200)
    }

    proptest! {
        #[test]
        fn dot_equals_the_scalar_oracle(a in vector(), b in vector()) {
            let size: f64 = a.iter().zip(&b).map(|(a, b)| f64::from((a * b).abs())).sum();
            let difference = (f64::from(dot(&a, &b)) - dot_scalar(&a, &b)).abs();
            prop_assert!(difference <= 1e-6 * size, "{difference} of {size}");
            prop_assert_eq!(dot(&a, &b).to_bits(), dot(&b, &a).to_bits());
        }
    }

    /// [`dot`] number by number.
    fn sixteen_sums(a: &[f32], b: &[f32]) -> f32 {
        let mut sums = [0.0f32; LANES];
        for (at, (a, b)) in a.iter().zip(b).enumerate() {
            sums[at % LANES] += a * b;
        }
        for width in [8, 4, 2, 1] {
            for lane in 0..width {
                sums[lane] += sums[lane + width];
            }
        }
        sums[0]
    }

    proptest! {
        #[test]
        fn dot_is_sixteen_sums_added_pairwise(a in vector(), b in vector()) {
            prop_assert_eq!(dot(&a, &b), sixteen_sums(&a, &b));
        }

        #[test]
        fn each_of_several_dot_products_is_its_own_rows(
            rows in (0usize..200).prop_flat_map(|length| {
                proptest::collection::vec(proptest::collection::vec(-1.0f32..1.0, length), ROWS + 1)
            }),
        ) {
            let [a, p, q, r, s] = rows.as_slice() else { unreachable!() };
            let found = dot_each(a, [p, q, r, s]);
            for (found, row) in found.into_iter().zip([p, q, r, s]) {
                let size: f64 = a.iter().zip(row).map(|(a, b)| f64::from((a * b).abs())).sum();
                let difference = (f64::from(found) - dot_scalar(a, row)).abs();
                prop_assert!(difference <= 1e-6 * size, "{difference} of {size}");
                let [alone, ..] = dot_each(a, [row, s, r, q]);
                prop_assert_eq!(found.to_bits(), alone.to_bits());
            }
        }
    }

    /// Region counts, layers, experts and counts around every boundary of groups, padding and runs.
    fn case() -> impl Strategy<Value = (Transform, Vec<f32>, Vec<u16>)> {
        (1usize..20, 1usize..5, 1usize..200).prop_flat_map(|(regions, layers, experts)| {
            let dimension = layers * experts;
            let weight = prop_oneof![Just(0.0f32), 0.01f32..8.0];
            let count = prop_oneof![Just(0u16), 0u16..200, any::<u16>()];
            (
                proptest::collection::vec(weight, dimension),
                proptest::collection::vec(0.0f32..1.0, regions * dimension),
                proptest::collection::vec(count, dimension),
            )
                .prop_map(move |(mut weights, mut centroids, counts)| {
                    weights[0] = 1.0;
                    for row in centroids.chunks_mut(dimension) {
                        let norm = dot(row, row).sqrt().max(MIN_NORM);
                        row.iter_mut().for_each(|value| *value /= norm);
                    }
                    let geometry = Geometry::new(layers, experts).unwrap();
                    let all = (0..layers as u16).collect();
                    (
                        Transform::new(geometry, all, weights).unwrap(),
                        centroids,
                        counts,
                    )
                })
        })
    }

    proptest! {
        #[test]
        fn folded_similarities_equal_the_dot_product_with_the_unit_vector(
            (transform, centroids, counts) in case(),
        ) {
            let mut found = vec![9.0];
            let mut padded = counts.iter().map(|&count| f32::from(count)).collect();
            Folded::new(&transform, &centroids).to_each(&mut padded, &mut found);
            let vector = transform.apply(&counts);
            let rows = centroids.chunks(transform.dimension());
            prop_assert_eq!(found.len(), rows.len());
            for (found, row) in found.into_iter().zip(rows) {
                let expected = dot_scalar(&vector, row);
                prop_assert!((f64::from(found) - expected).abs() <= 2e-6, "{found} is not {expected}");
            }
        }
    }

    #[test]
    fn a_signature_without_weight_is_like_no_region() {
        let geometry = Geometry::new(1, 2).unwrap();
        let transform = Transform::new(geometry, vec![0], vec![0.0, 1.0]).unwrap();
        let mut out = Vec::new();
        Folded::new(&transform, &[0.6, 0.8, 1.0, 0.0]).to_each(&mut vec![5.0, 0.0], &mut out);
        assert_eq!(out, [0.0, 0.0]);
    }
}
