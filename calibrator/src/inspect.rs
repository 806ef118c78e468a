//! What a blob says about itself, for people and machines.

use comfy_table::Table;
use eldr_core::blob::{Blob, QUANTILES};
use eldr_core::similarity::dot;
use eldr_core::transform::{SignatureKind, Transform};
use serde::Serialize;

use crate::table::{right_from, table};

/// The facts of a verified blob.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Summary {
    /// Revision of the blob.
    pub revision: u64,
    /// Model that the signatures come from.
    pub model: String,
    /// MoE layers of the model.
    pub layers_total: usize,
    /// Experts per layer.
    pub experts: usize,
    /// What of a request's routing is compared.
    pub signature: SignatureKind,
    /// Layers that are compared, ascending.
    pub layers: Vec<u16>,
    /// Length of a vector: compared layers × experts.
    pub dimension: usize,
    /// Weights that are zero, of experts that do not tell calibration requests apart.
    pub zero_weights: usize,
    /// Width of the band that the blob proposes.
    pub tau: f32,
    /// Calibration requests.
    pub requests: u64,
    /// Rank correlation of signature and decode distance; none without decode counts.
    pub rho: Option<f64>,
    /// Seed of the fit.
    pub seed: u64,
    /// Where the similarities of [`Region::similarity`] are taken.
    pub quantiles: [f64; QUANTILES.len()],
    /// The regions in order.
    pub regions: Vec<Region>,
}

/// One region.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Region {
    /// Decode clusters that serve it.
    pub workers: Vec<String>,
    /// Its share of the calibration requests.
    pub share: f64,
    /// Similarity of its own calibration requests at the quantiles.
    pub similarity: Vec<f64>,
    /// The other region whose centroid is nearest.
    pub nearest: Option<Nearest>,
}

/// A region that another is compared with.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Nearest {
    /// Its index.
    pub region: usize,
    /// Cosine similarity of the two centroids.
    pub similarity: f32,
}

impl From<&Blob> for Summary {
    fn from(blob: &Blob) -> Self {
        let transform: &Transform = &blob.transform;
        let centroids: Vec<&[f32]> = blob.rows().collect();
        let nearest = |region: usize| {
            let similarity = |other: usize| dot(centroids[region], centroids[other]);
            (0..centroids.len())
                .filter(|&other| other != region)
                .map(|other| Nearest {
                    region: other,
                    similarity: similarity(other),
                })
                .max_by(|a, b| a.similarity.total_cmp(&b.similarity))
        };
        let facts = blob.fit.shares.iter().zip(&blob.fit.quantiles);
        let regions = blob.regions.iter().zip(facts).enumerate();
        Summary {
            revision: blob.revision,
            model: blob.model.clone(),
            layers_total: transform.geometry().layers,
            experts: transform.geometry().experts,
            signature: transform.kind(),
            layers: transform.layers().to_vec(),
            dimension: transform.dimension(),
            zero_weights: transform
                .weights()
                .iter()
                .filter(|&&weight| weight == 0.0)
                .count(),
            tau: blob.tau,
            requests: blob.fit.requests,
            rho: blob.fit.rho,
            seed: blob.fit.seed,
            quantiles: QUANTILES,
            regions: regions
                .map(|(region, (workers, (&share, similarity)))| Region {
                    workers: workers.clone(),
                    share,
                    similarity: similarity.clone(),
                    nearest: nearest(region),
                })
                .collect(),
        }
    }
}

impl Summary {
    /// The facts as lines and a table of the regions.
    pub fn text(&self) -> String {
        let layers: Vec<String> = self.layers.iter().map(u16::to_string).collect();
        let rho = self
            .rho
            .map_or("unknown: the traces had no decode counts".into(), |rho| {
                format!("{rho:.3}, rank correlation of signature and decode distances")
            });
        let zero = 100.0 * self.zero_weights as f64 / self.dimension as f64;
        format!(
            "model    {}, revision {}\n\
             layers   {} of {}: {}\n\
             vector   {}, {} layers × {} experts, {zero:.1} % of the weights are zero\n\
             band     tau {}\n\
             fit      {} requests, seed {}\n\
             rho      {rho}\n\n\
             {}\n\
             min to p95: similarity of a region's own requests to its centroid\n\
             nearest: the other region that is most similar\n",
            self.model,
            self.revision,
            self.layers.len(),
            self.layers_total,
            layers.join(" "),
            self.signature.name(),
            self.layers.len(),
            self.experts,
            self.tau,
            self.requests,
            self.seed,
            self.table(),
        )
    }

    /// One line per region. Similarities are those of its own calibration requests.
    fn table(&self) -> Table {
        let mut table = table([
            "region", "workers", "share", "min", "p5", "median", "p95", "nearest",
        ]);
        for (index, region) in self.regions.iter().enumerate() {
            // Positions in QUANTILES: 0, 0.05, 0.5 and 0.95.
            let shown = [0, 1, 3, 5].map(|at| match region.similarity.get(at) {
                Some(similarity) if region.share > 0.0 => format!("{similarity:.3}"),
                _ => "none".into(),
            });
            let mut row = vec![
                index.to_string(),
                region.workers.join(" "),
                format!("{:.1} %", 100.0 * region.share),
            ];
            row.extend(shown);
            row.push(match region.nearest {
                Some(Nearest { region, similarity }) => format!("{region} ({similarity:.3})"),
                None => "none".into(),
            });
            table.add_row(row);
        }
        right_from(2, table)
    }
}

#[cfg(test)]
mod tests {
    use eldr_core::blob::Fit;
    use eldr_core::signature::Geometry;

    use super::*;

    #[test]
    fn the_nearest_region_and_a_region_without_requests_show() {
        let geometry = Geometry {
            layers: 1,
            experts: 2,
        };
        let transform = Transform::new(geometry, vec![0], vec![0.0, 1.0]).unwrap();
        let blob = Blob {
            revision: 1,
            model: "m".into(),
            transform,
            centroids: vec![1.0, 0.0, 0.6, 0.8, 0.0, 1.0],
            tau: 0.1,
            regions: ["a", "b", "c"].map(|worker| vec![worker.into()]).to_vec(),
            fit: Fit {
                quantiles: vec![vec![0.5; 7]; 3],
                requests: 2,
                rho: None,
                seed: 1,
                shares: vec![0.5, 0.5, 0.0],
            },
            source: None,
        };
        let summary = Summary::from(&blob);
        assert_eq!(summary.zero_weights, 1);
        let nearest: Vec<_> = summary.regions.iter().map(|r| r.nearest.unwrap()).collect();
        assert_eq!(
            nearest.iter().map(|n| n.region).collect::<Vec<_>>(),
            [1, 2, 1]
        );
        assert_eq!(nearest[0].similarity, 0.6);
        let text = summary.text();
        assert!(text.contains("50.0 % of the weights are zero"), "{text}");
        assert!(
            text.contains("rho      unknown: the traces had no decode counts\n"),
            "{text}"
        );
        assert_eq!(
            text.matches("none").count(),
            4,
            "similarities of no request: {text}"
        );
    }
}
