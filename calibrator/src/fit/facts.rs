//! A clustering as a blob.

use eldr_core::blob::{Blob, Fit, QUANTILES};
use eldr_core::similarity::dot;
use eldr_core::transform::Transform;

use super::Options;
use crate::kmeans::{Clustering, Vectors};
use crate::regions;

/// The blob of a clustering of `vectors`.
pub(super) fn blob(
    transform: Transform,
    vectors: Vectors<'_>,
    clustering: Clustering,
    rho: Option<f64>,
    options: &Options,
) -> Blob {
    let centroids = Vectors {
        values: &clustering.centroids,
        ..vectors
    };
    let (shares, quantiles) = shares_and_quantiles(vectors, &clustering, centroids.len());
    let worker = |index: usize| options.workers[index].clone();
    let regions = regions::lay_out(centroids, options.workers.len()).into_iter();
    Blob {
        revision: options.revision,
        model: options.model.clone(),
        transform,
        tau: options.tau,
        regions: regions
            .map(|served_by| served_by.into_iter().map(worker).collect())
            .collect(),
        centroids: clustering.centroids,
        fit: Fit {
            quantiles,
            requests: vectors.len() as u64,
            rho,
            seed: options.seed,
            shares,
        },
        source: None,
    }
}

/// Per region its share of the requests, and the similarity of its own requests at [`QUANTILES`]
/// (zeros for a region that has none).
pub(crate) fn shares_and_quantiles(
    vectors: Vectors<'_>,
    clustering: &Clustering,
    regions: usize,
) -> (Vec<f64>, Vec<Vec<f64>>) {
    let centroids = Vectors {
        values: &clustering.centroids,
        ..vectors
    };
    let mut similarities = vec![Vec::new(); regions];
    for (index, &region) in clustering.assignment.iter().enumerate() {
        let similarity = dot(vectors.row(index), centroids.row(region));
        similarities[region].push(f64::from(similarity).clamp(-1.0, 1.0));
    }
    let share = |own: &Vec<f64>| own.len() as f64 / vectors.len() as f64;
    let shares = similarities.iter().map(share).collect();
    let quantiles = similarities
        .into_iter()
        .map(|mut own| {
            own.sort_unstable_by(f64::total_cmp);
            quantiles(&own).to_vec()
        })
        .collect();
    (shares, quantiles)
}

/// Where [`QUANTILES`] has the median.
pub(crate) const MEDIAN: usize = QUANTILES.len() / 2;

/// Ascending values at [`QUANTILES`]; zeros of none.
pub(crate) fn quantiles(ascending: &[f64]) -> [f64; QUANTILES.len()] {
    QUANTILES.map(|q| quantile(ascending, q))
}

/// The quantile `q` of ascending values, linear between neighbours; 0 of none.
pub(crate) fn quantile(ascending: &[f64], q: f64) -> f64 {
    let at = q * ascending.len().saturating_sub(1) as f64;
    let below = at.floor() as usize;
    let Some(&low) = ascending.get(below) else {
        return 0.0;
    };
    let high = ascending.get(below + 1).copied().unwrap_or(low);
    low + (high - low) * (at - below as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_linear_between_neighbours() {
        assert_eq!(quantile(&[1.0, 2.0, 4.0], 0.5), 2.0);
        assert_eq!(quantile(&[1.0, 2.0, 4.0], 0.75), 3.0);
        assert_eq!(quantile(&[1.0, 2.0, 4.0], 1.0), 4.0);
        assert_eq!(quantile(&[3.0], 0.95), 3.0);
        assert_eq!(quantile(&[], 0.5), 0.0);
        assert_eq!(QUANTILES[MEDIAN], 0.5);
    }
}
