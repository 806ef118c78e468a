//! The section about what placing experts for each region would gain.

use super::page::Page;
use super::{drawn, percent, plot};
use crate::error::Error;
use crate::place::plan::{Figures, LayerReport};
use crate::place::{Cost, Devices, Plan, Traffic};

/// Places the experts and shows before and after; or why they are not placed.
pub(super) fn show(
    page: &mut Page,
    placement: &Result<(&Traffic, Devices, Cost), String>,
) -> Result<(), Error> {
    page.heading("Placement");
    let (traffic, devices, cost) = match placement {
        Ok(placement) => *placement,
        Err(why) => {
            page.note(why);
            return Ok(());
        }
    };
    let plans: Vec<Plan> = traffic
        .clusters
        .iter()
        .map(|usage| {
            Plan::new(
                usage,
                &traffic.layers,
                traffic.geometry.layers,
                devices,
                cost,
            )
        })
        .collect();
    page.text(&format!(
        "Experts of each decode cluster on {} GPUs, {} slots each, placed for the {} counts of its requests at batch {}: distinct experts that a decode step activates on the busiest GPU, which is how much it must read.",
        devices.gpus,
        devices.slots_per_gpu(),
        traffic.counts.name(),
        cost.batch,
    ));
    let rows: Vec<Vec<String>> = traffic
        .clusters
        .iter()
        .zip(&plans)
        .map(|(usage, Plan { summary, .. })| {
            let figures = [summary.contiguous, summary.eplb, summary.placed];
            let mut row = vec![usage.cluster.clone(), usage.requests.to_string()];
            row.extend(figures.map(|figures| format!("{:.2}", figures.distinct_max)));
            let less = 1.0 - summary.placed.distinct_max / summary.contiguous.distinct_max;
            row.push(percent(less));
            row.push(format!("{:.2} %", 100.0 * summary.gap));
            row
        })
        .collect();
    page.table(
        &[
            "cluster",
            "requests",
            "contiguous",
            "EPLB",
            "placed",
            "less than contiguous",
            "worst gap to the bound",
        ],
        &[0],
        &rows,
    );
    let mean = |of: fn(&LayerReport) -> Figures| -> Vec<(f64, f64)> {
        let layers = traffic.layers.iter().enumerate();
        let mean = |(at, &layer): (usize, &u16)| {
            let sum: f64 = plans
                .iter()
                .map(|plan| of(&plan.layers[at]).distinct_max)
                .sum();
            (f64::from(layer), sum / plans.len() as f64)
        };
        layers.map(mean).collect()
    };
    let series = [
        mean(|layer| layer.contiguous),
        mean(|layer| layer.eplb),
        mean(|layer| layer.placed),
    ];
    let svg = drawn(plot::lines(
        &series,
        ["layer", "distinct experts, busiest GPU"],
        None,
    ))?;
    page.figure(&svg, &["contiguous", "EPLB", "placed"], "Distinct experts on the busiest GPU per layer, mean over the clusters. The axis does not begin at 0.");
    Ok(())
}
