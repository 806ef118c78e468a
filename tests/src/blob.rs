//! Small centroid blobs and signatures whose routing a reader can work out in the head.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use eldr_core::blob::{Blob, Fit};
use eldr_core::signature::{Encoding, Geometry, Signature};
use eldr_core::transform::Transform;

/// One layer, one expert per region: a signature with all tokens on expert `r` belongs to region `r`.
pub fn one_expert_per_region(regions: &[Vec<String>]) -> Blob {
    let experts = regions.len();
    let geometry = Geometry::new(1, experts).expect("a small geometry");
    let transform = Transform::new(geometry, vec![0], vec![1.0; experts]).expect("unit weights");
    let mut centroids = vec![0.0; experts * experts];
    for region in 0..experts {
        centroids[region * experts + region] = 1.0;
    }
    new(transform, centroids, regions)
}

/// A blob of these parts; its calibration figures are made up.
pub fn new(transform: Transform, centroids: Vec<f32>, regions: &[Vec<String>]) -> Blob {
    let count = regions.len();
    Blob {
        revision: 1,
        model: "test".into(),
        transform,
        centroids,
        tau: 0.1,
        regions: regions.to_vec(),
        fit: Fit {
            quantiles: vec![vec![0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 1.0]; count],
            requests: 100,
            rho: None,
            seed: 1,
            shares: vec![1.0 / count as f64; count],
        },
        source: None,
    }
}

/// The blob as the filter's configuration wants it inline.
pub fn inline(blob: &Blob) -> String {
    STANDARD.encode(blob.to_bytes().expect("a valid blob"))
}

/// The signature of a prompt whose tokens all went to one of `experts` experts, in a model with one layer.
pub fn signature_of(expert: usize, experts: usize) -> String {
    let mut counts = vec![0; experts];
    counts[expert] = 7;
    let geometry = Geometry::new(1, experts).expect("a small geometry");
    let signature = Signature::dense(geometry, counts, Some(7)).expect("counts of that geometry");
    signature.encode(Encoding::U16)
}
