//! A page about a blob, and about a trace as the blob sees it: one HTML file without scripts that asks
//! for nothing outside itself. The same input gives the same bytes.

mod experts;
pub mod observe;
pub mod page;
pub mod pca;
mod placement;
pub mod plot;
mod reproduction;
pub mod theme;
mod traffic;

use eldr_core::blob::{Blob, QUANTILES};
use eldr_core::similarity::dot;

use crate::error::Error;
use crate::fit::MEDIAN;
use crate::inspect::Summary;
use crate::place::{Cost, Devices, Traffic};
use observe::{Observed, quantiles};
use page::Page;
use pca::Pca;
use plot::{Drawn, Point, Quantiles};
pub use reproduction::reproduction;

/// Requests that the map shows at most: the principal components take the cube of their number.
const MAP_MAX: usize = 500;

/// What a report is about.
pub struct Report<'a> {
    /// The blob.
    pub blob: &'a Blob,
    /// Names of blob and traces, as the user gave them, with the blob's sha256.
    pub sources: &'a [(String, String)],
    /// The trace as the blob sees it.
    pub observed: Option<&'a Observed>,
    /// Expert usage of the trace, the GPUs to place on, and for what; or why there is none.
    pub placement: Option<Result<(&'a Traffic, Devices, Cost), String>>,
    /// Seed of the pairs of the layer selection.
    pub seed: u64,
}

impl Report<'_> {
    /// The page.
    ///
    /// # Errors
    /// A plot cannot be drawn.
    pub fn html(&self) -> Result<String, Error> {
        let mut page = Page::default();
        let summary = Summary::from(self.blob);
        self.facts(&mut page, &summary);
        self.regions(&mut page, &summary)?;
        self.map(&mut page)?;
        if let Some(observed) = self.observed {
            self.balance(&mut page, observed)?;
            self.layers(&mut page, observed)?;
        }
        self.experts(&mut page)?;
        if let Some(placement) = &self.placement {
            placement::show(&mut page, placement)?;
        }
        let title = match self.blob.model.as_str() {
            "*" => "Regions".to_owned(),
            model => format!("Regions of {model}"),
        };
        Ok(page.html(&title))
    }

    fn facts(&self, page: &mut Page, summary: &Summary) {
        let layers: Vec<String> = summary.layers.iter().map(u16::to_string).collect();
        let mut rows: Vec<Vec<String>> = self
            .sources
            .iter()
            .map(|(name, value)| vec![name.clone(), value.clone()])
            .collect();
        let mut row = |name: &str, value: String| rows.push(vec![name.into(), value]);
        row(
            "model",
            format!("{}, revision {}", summary.model, summary.revision),
        );
        row(
            "compared layers",
            format!(
                "{} of {}: {}",
                layers.len(),
                summary.layers_total,
                layers.join(" ")
            ),
        );
        row("experts per layer", summary.experts.to_string());
        row("band", format!("tau {}", summary.tau));
        row(
            "fit",
            format!("{} requests, seed {}", summary.requests, summary.seed),
        );
        let rho = summary.rho.map(|rho| format!("{rho:.3}"));
        row(
            "rank correlation with decode",
            rho.unwrap_or_else(|| "unknown".into()),
        );
        page.table(&["", ""], &[0, 1], &rows);
    }

    fn regions(&self, page: &mut Page, summary: &Summary) -> Result<(), Error> {
        page.heading("Regions");
        page.text(
            "A request is compared with the centroid of every region. Regions tell traffic apart where \
             requests are clearly more similar to their own centroid than to the next.",
        );
        let mut header = vec![
            "region",
            "workers",
            "share in fit",
            "median in fit",
            "nearest centroid",
        ];
        let mut text = vec![1];
        if self.observed.is_some() {
            header.extend(["requests in trace", "labels"]);
            text.push(6);
        }
        let rows: Vec<Vec<String>> = summary
            .regions
            .iter()
            .enumerate()
            .map(|(index, region)| {
                let nearest = region
                    .nearest
                    .map(|nearest| format!("{} ({:.3})", nearest.region, nearest.similarity));
                let mut row = vec![
                    index.to_string(),
                    region.workers.join(" "),
                    percent(region.share),
                    format!("{:.3}", region.similarity[MEDIAN]),
                    nearest.unwrap_or_else(|| "none".into()),
                ];
                if let Some(observed) = self.observed {
                    let region = &observed.regions[index];
                    let labels = region.top_labels(3);
                    let labels = labels
                        .iter()
                        .map(|(label, share)| format!("{label} {:.0} %", 100.0 * share));
                    row.push(region.own.len().to_string());
                    row.push(labels.collect::<Vec<_>>().join(", "));
                }
                row
            })
            .collect();
        page.table(&header, &text, &rows);

        let mut boxes = Vec::new();
        for index in 0..self.blob.regions.len() {
            let mut add = |name: String, category, values: Option<[f64; QUANTILES.len()]>| {
                if let Some(values) = values {
                    boxes.push(Quantiles {
                        name,
                        category,
                        values,
                    });
                }
            };
            let fitted = self.blob.fit.quantiles[index].clone().try_into().ok();
            let some = self.blob.fit.shares[index] > 0.0;
            add(format!("region {index}"), 0, fitted.filter(|_| some));
            if let Some(observed) = self.observed {
                add(String::new(), 1, quantiles(&observed.regions[index].own));
                add(String::new(), 2, quantiles(&observed.regions[index].next));
            }
        }
        let keys = [
            "own centroid, in the fit",
            "own centroid, in the trace",
            "next centroid, in the trace",
        ];
        let keys = if self.observed.is_some() {
            &keys[..]
        } else {
            &keys[..1]
        };
        let svg = drawn(plot::quantiles(&boxes, "cosine similarity"))?;
        page.figure(
            &svg,
            keys,
            "Similarity of a region's requests to centroids: boxes hold the middle half, whiskers nine tenths, strokes the median.",
        );

        let rows: Vec<&[f32]> = self.blob.rows().collect();
        let similarity = |a: &[f32]| rows.iter().map(|b| f64::from(dot(a, b)).max(0.0)).collect();
        let cells: Vec<(String, Vec<f64>)> = rows
            .iter()
            .enumerate()
            .map(|(index, row)| (index.to_string(), similarity(row)))
            .collect();
        let svg = drawn(plot::heat_map(&cells, &[], ["region", "region"]))?;
        page.figure(&svg, &[], "Similarity of centroids to each other: the stronger the shade, the more alike; 1 on the diagonal.");
        Ok(())
    }

    fn map(&self, page: &mut Page) -> Result<(), Error> {
        page.heading("Map");
        let centroids: Vec<&[f32]> = self.blob.rows().collect();
        let sample = self
            .observed
            .map_or(&[][..], |observed| &observed.sample[..]);
        let step = sample.len().div_ceil(MAP_MAX).max(1);
        let shown: Vec<_> = sample.iter().step_by(step).collect();
        let pca = if shown.is_empty() {
            Pca::new(centroids.clone())
        } else {
            Pca::new(shown.iter().map(|request| &request.vector[..]).collect())
        };
        let requests: Vec<Point> = shown
            .iter()
            .map(|request| Point {
                region: request.region,
                at: pca.project(&request.vector),
            })
            .collect();
        let discs: Vec<Point> = centroids
            .iter()
            .enumerate()
            .map(|(region, centroid)| Point {
                region,
                at: pca.project(centroid),
            })
            .collect();
        let svg = drawn(plot::map(&requests, &discs, pca.explained))?;
        let caption = match shown.len() {
            0 => "The centroids, in the plane in which they differ most.".to_owned(),
            count => format!(
                "{count} requests in the colour of their region, in the plane in which they differ most, and the centroids with their numbers. What the plane does not show may still tell regions apart."
            ),
        };
        page.figure(&svg, &[], &caption);
        Ok(())
    }
}

fn percent(share: f64) -> String {
    format!("{:.1} %", 100.0 * share)
}

fn drawn(plot: Drawn) -> Result<String, Error> {
    plot.map_err(|error| {
        Error::new(
            format!("drawing a plot of the report failed: {error}"),
            "check that blob and trace are of the same model; without a page the same is told by `eldr inspect` and `eldr reproduce`",
        )
    })
}
