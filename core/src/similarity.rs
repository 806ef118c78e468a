//! Cosine similarity of unit vectors: a dot product.

/// Independent sums: enough for two 4-lane accumulators of wasm's simd128 or one AVX register.
const LANES: usize = 16;

/// Dot product over the shorter length.
///
/// Sixteen partial sums, added pairwise at the end: compilers turn this into simd128 and SSE/AVX code, and since
/// the order of additions is fixed here, the bits are the same natively and in WebAssembly.
pub fn dot(a: &[f32], b: &[f32]) -> f32 {
    let (a_blocks, a_rest) = a.as_chunks::<LANES>();
    let (b_blocks, b_rest) = b.as_chunks::<LANES>();
    let mut sums = [0.0f32; LANES];
    for (a, b) in a_blocks.iter().zip(b_blocks) {
        for ((sum, a), b) in sums.iter_mut().zip(a).zip(b) {
            *sum += a * b;
        }
    }
    // Where the lengths differ, the shorter one's rest meets a block of the longer one.
    let blocks = a_blocks.len().min(b_blocks.len()) * LANES;
    let a_rest = if a.len() <= b.len() {
        a_rest
    } else {
        a.get(blocks..).unwrap_or_default()
    };
    let b_rest = if b.len() <= a.len() {
        b_rest
    } else {
        b.get(blocks..).unwrap_or_default()
    };
    for ((sum, a), b) in sums.iter_mut().zip(a_rest).zip(b_rest) {
        *sum += a * b;
    }
    let mut width = LANES / 2;
    while width > 0 {
        let (low, high) = sums.split_at_mut(width);
        for (low, high) in low.iter_mut().zip(high) {
            *low += *high;
        }
        width /= 2;
    }
    let [total, ..] = sums;
    total
}

/// Dot product, one term after the other, in `f64`: the oracle for [`dot`].
pub fn dot_scalar(a: &[f32], b: &[f32]) -> f64 {
    a.iter()
        .zip(b)
        .map(|(&a, &b)| f64::from(a) * f64::from(b))
        .sum()
}

/// Similarity of `vector` to each row of `centroids` (`[regions][dimension]`), into `out`.
pub fn to_each(vector: &[f32], centroids: &[f32], out: &mut Vec<f32>) {
    out.clear();
    if !vector.is_empty() {
        out.extend(
            centroids
                .chunks_exact(vector.len())
                .map(|centroid| dot(vector, centroid)),
        );
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

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

    #[test]
    fn every_centroid_gets_its_similarity() {
        let mut out = vec![9.0];
        to_each(&[0.6, 0.8], &[1.0, 0.0, 0.0, 1.0, 0.6, 0.8], &mut out);
        assert_eq!(out, [0.6, 0.8, 1.0]);
        to_each(&[], &[1.0], &mut out);
        assert!(out.is_empty());
    }
}
