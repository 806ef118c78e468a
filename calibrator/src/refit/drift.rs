//! How far traffic has moved from what a blob was fitted to.

use eldr_core::blob::{Blob, QUANTILES};
use serde::Serialize;

use crate::fit::{MEDIAN, quantiles};
use crate::kmeans::Vectors;

/// Traffic compared with the fit.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Drift {
    /// Requests that were looked at.
    pub requests: usize,
    /// Per region, the share of the requests that are nearest to it.
    pub shares: Vec<f64>,
    /// How much of the traffic is in another region than when the blob was fitted: half the sum of the differences between the
    /// shares and the fitted ones, 0 to 1.
    pub moved: f64,
    /// Similarity of the requests to their nearest region at [`QUANTILES`].
    pub similarity: Vec<f64>,
    /// How much less similar the median request is than in the fit: positive where the regions describe the traffic worse.
    pub similarity_lost: f64,
}

impl Drift {
    /// Of `vectors`, unit vectors in the space of the blob's transform. All zeros if there are none.
    pub fn of(blob: &Blob, vectors: Vectors<'_>) -> Self {
        Drift::of_distances(blob, &vectors.distances(Vectors::centroids_of(blob)))
    }

    /// Of cosine distances to the blob's centroids, row-major `[request][region]`.
    pub(super) fn of_distances(blob: &Blob, distances: &[f32]) -> Self {
        let regions = blob.regions.len();
        let requests = distances.len() / regions.max(1);
        if requests == 0 {
            return Drift {
                shares: vec![0.0; regions],
                similarity: vec![0.0; QUANTILES.len()],
                ..Drift::default()
            };
        }
        let mut nearest = vec![0usize; regions];
        let mut similarities = Vec::with_capacity(requests);
        for distances in distances.chunks_exact(regions) {
            let least = |best: usize, next| {
                if distances[next] < distances[best] {
                    next
                } else {
                    best
                }
            };
            let region = (1..regions).fold(0, least);
            nearest[region] += 1;
            similarities.push(f64::from(1.0 - distances[region]).clamp(-1.0, 1.0));
        }
        similarities.sort_unstable_by(f64::total_cmp);
        let shares: Vec<f64> = nearest
            .iter()
            .map(|&own| own as f64 / requests as f64)
            .collect();
        let fitted = &blob.fit;
        let medians = fitted.quantiles.iter().map(|own| own[MEDIAN]);
        let median: f64 = medians
            .zip(&fitted.shares)
            .map(|(own, share)| own * share)
            .sum();
        let similarity = quantiles(&similarities);
        Drift {
            requests,
            moved: moved(&fitted.shares, &shares),
            similarity_lost: median - similarity[MEDIAN],
            similarity: similarity.to_vec(),
            shares,
        }
    }
}

/// How much of the traffic is in other regions than before: the total variation distance of the regions' shares, 0 to 1.
pub(crate) fn moved(before: &[f64], now: &[f64]) -> f64 {
    let differences = now.iter().zip(before).map(|(now, then)| (now - then).abs());
    differences.sum::<f64>() / 2.0
}
