//! The section about what regions are told apart by.

use super::page::Page;
use super::{Report, drawn, plot};
use crate::error::Error;

/// (layer, expert) pairs that the heat map of regions shows.
const EXPERTS_SHOWN: usize = 40;

impl Report<'_> {
    pub(super) fn experts(&self, page: &mut Page) -> Result<(), Error> {
        page.heading("Experts");
        let transform = &self.blob.transform;
        let experts = transform.geometry().experts;
        let weights: Vec<f64> = transform
            .weights()
            .iter()
            .map(|&weight| f64::from(weight))
            .collect();
        let most = weights.iter().copied().fold(0.0, f64::max);
        let rows: Vec<(String, Vec<f64>)> = transform
            .layers()
            .iter()
            .zip(weights.chunks_exact(experts))
            .map(|(layer, row)| {
                (
                    format!("layer {layer}"),
                    row.iter().map(|weight| weight / most).collect(),
                )
            })
            .collect();
        let svg = drawn(plot::heat_map(&rows, &[], ["expert", ""]))?;
        page.figure(&svg, &[], &format!("Weight of each expert in the comparison, from 0 to {most:.2}: what few requests touch tells them apart."));

        let centroids: Vec<&[f32]> = self.blob.rows().collect();
        let spread = |at: usize| {
            let values = centroids.iter().map(|row| f64::from(row[at]));
            let mean = values.clone().sum::<f64>() / centroids.len() as f64;
            values.map(|value| (value - mean).powi(2)).sum::<f64>()
        };
        let mut order: Vec<(f64, usize)> = (0..transform.dimension())
            .map(|at| (spread(at), at))
            .collect();
        order.sort_by(|a, b| b.0.total_cmp(&a.0));
        order.truncate(EXPERTS_SHOWN);
        let mut shown: Vec<usize> = order.into_iter().map(|(_, at)| at).collect();
        shown.sort_unstable();
        let name = |&at: &usize| format!("{}·{}", transform.layers()[at / experts], at % experts);
        let names: Vec<String> = shown.iter().map(name).collect();
        let greatest: Vec<f64> = shown
            .iter()
            .map(|&at| {
                centroids
                    .iter()
                    .map(|row| f64::from(row[at]))
                    .fold(1e-9, f64::max)
            })
            .collect();
        let rows: Vec<(String, Vec<f64>)> = centroids
            .iter()
            .enumerate()
            .map(|(region, row)| {
                let cells = shown.iter().zip(&greatest);
                let cells = cells.map(|(&at, most)| f64::from(row[at]) / most).collect();
                (format!("region {region}"), cells)
            })
            .collect();
        let svg = drawn(plot::heat_map(&rows, &names, ["layer·expert", ""]))?;
        page.figure(&svg, &[], &format!("The {} experts by which regions differ most: how much of it each region uses, relative to the region that uses it most.", shown.len()));
        Ok(())
    }
}
