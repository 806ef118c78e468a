//! Sections about a trace: how it falls into the regions, and which layers a fit to it would choose.

use super::observe::{Observed, quantiles};
use super::page::Page;
use super::{Report, drawn, percent, plot};
use crate::error::Error;
use crate::fit::MEDIAN;
use crate::refit::moved;

impl Report<'_> {
    pub(super) fn balance(&self, page: &mut Page, observed: &Observed) -> Result<(), Error> {
        page.heading("Balance and drift");
        let (fitted, found) = (&self.blob.fit.shares, observed.shares());
        let regions = found.len() as f64;
        let svg = drawn(plot::bars(&[fitted.clone(), found.clone()], 1.0 / regions))?;
        page.figure(&svg, &["in the fit", "in the trace"], "Share of the requests whose most similar centroid is the region's; the line is an even share. A gateway evens out what is left by load.");
        let distance = moved(fitted, &found);
        let requests = observed.requests as f64;
        // Mean absolute deviation of a share, of the normal approximation.
        let chance =
            |share: &f64| (2.0 * share * (1.0 - share) / (std::f64::consts::PI * requests)).sqrt();
        let chance = fitted.iter().map(chance).sum::<f64>() / 2.0;
        page.text(&format!(
            "Of {} requests, {} are in other regions than the fit expects (total variation distance); chance alone would move {}. The busiest region has {:.2} times its even share.",
            observed.requests,
            percent(distance),
            percent(chance),
            found.iter().copied().fold(0.0, f64::max) * regions,
        ));
        let rows: Vec<Vec<String>> = (0..found.len())
            .map(|index| {
                let median = quantiles(&observed.regions[index].own).map(|values| values[MEDIAN]);
                let before = self.blob.fit.quantiles[index][MEDIAN];
                vec![
                    index.to_string(),
                    percent(fitted[index]),
                    percent(found[index]),
                    format!("{before:.3}"),
                    median.map_or("none".into(), |median| format!("{median:.3}")),
                    median.map_or("none".into(), |median| {
                        format!("{:+.3}", rounded(median - before))
                    }),
                ]
            })
            .collect();
        page.table(
            &[
                "region",
                "share in fit",
                "in trace",
                "median similarity in fit",
                "in trace",
                "change",
            ],
            &[],
            &rows,
        );
        if observed.skipped > 0 {
            page.note(&format!(
                "{} records have no signature with a weight and are in no region.",
                observed.skipped
            ));
        }
        Ok(())
    }

    pub(super) fn layers(&self, page: &mut Page, observed: &Observed) -> Result<(), Error> {
        page.heading("Layer selection");
        let (layers, selection) = match observed.selection(self.seed) {
            Ok(selected) => selected,
            Err(error) => {
                page.note(&format!("No selection of layers by this trace: {error}."));
                return Ok(());
            }
        };
        let points: Vec<(f64, f64)> = selection
            .rho
            .iter()
            .enumerate()
            .map(|(index, &rho)| ((index + 1) as f64, rho))
            .collect();
        let best = points[selection.kept - 1];
        let svg = drawn(plot::lines(
            &[points],
            ["layers", "rank correlation"],
            Some(best),
        ))?;
        page.figure(
            &svg,
            &[],
            "Rank correlation between the distance of prefill signatures and the distance of decode counts, as layers are added, the best first; the ring is the choice that a fit to this trace would make.",
        );
        let named = |layers: &mut dyn Iterator<Item = u16>| {
            layers
                .map(|layer| layer.to_string())
                .collect::<Vec<_>>()
                .join(" ")
        };
        let chosen = &selection.order[..selection.kept];
        page.text(&format!(
            "This trace would choose layers {} in this order; the blob compares {}.",
            named(&mut chosen.iter().map(|&row| layers[row])),
            named(&mut self.blob.transform.layers().iter().copied()),
        ));
        Ok(())
    }
}

/// To three digits, and never -0.
fn rounded(value: f64) -> f64 {
    (1000.0 * value).round() / 1000.0 + 0.0
}
