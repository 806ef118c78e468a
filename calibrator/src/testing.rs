//! What unit tests share.

use eldr_core::blob::{Blob, Fit, QUANTILES};
use eldr_core::signature::Geometry;
use eldr_core::transform::Transform;

/// A blob that compares one layer of a model, all experts alike, with a region for each of `regions`, which are lists of workers.
pub(crate) fn blob(
    geometry: Geometry,
    layer: u16,
    centroids: Vec<f32>,
    regions: &[&[&str]],
) -> Blob {
    let names = |names: &&[&str]| names.iter().map(|&name| name.into()).collect();
    let weights = vec![1.0; geometry.experts];
    Blob {
        revision: 1,
        model: "m".into(),
        transform: Transform::new(geometry, vec![layer], weights).unwrap(),
        centroids,
        tau: 0.1,
        regions: regions.iter().map(names).collect(),
        fit: Fit {
            quantiles: vec![vec![0.5; QUANTILES.len()]; regions.len()],
            requests: 2,
            rho: None,
            seed: 1,
            shares: vec![1.0 / regions.len() as f64; regions.len()],
        },
        source: None,
    }
}
