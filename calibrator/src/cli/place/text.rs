//! What a person reads of placements.

use comfy_table::Table;

use crate::place::{Cost, Devices, Objective, Plan, Traffic, Usage};
use crate::table;
use crate::trace::Phase;

/// Fewer requests than this per cluster say little about its experts.
const REQUESTS_FEW: usize = 30;

/// What a person should know before using the placements.
pub(super) fn notes(traffic: &Traffic) {
    let Traffic {
        requests, counted, ..
    } = *traffic;
    match traffic.counts {
        Phase::Prefill => eprintln!(
            "note: placed by `prefill` counts, as fewer than half of the {requests} requests have `decode` counts"
        ),
        Phase::Decode if counted < requests => {
            eprintln!(
                "note: {} of {requests} requests have no `decode` counts and are left out",
                requests - counted
            );
        }
        Phase::Decode => {}
    }
    if traffic.layers.len() < traffic.geometry.layers {
        eprintln!(
            "note: the trace has counts of {} of {} layers; the others stay contiguous",
            traffic.layers.len(),
            traffic.geometry.layers
        );
    }
    let few = |usage: &&Usage| usage.requests < REQUESTS_FEW;
    for Usage {
        cluster, requests, ..
    } in traffic.clusters.iter().filter(few)
    {
        let instead = if *requests == 0 {
            "; it is placed for all requests"
        } else {
            ", which say little about its experts"
        };
        eprintln!("note: {cluster} has {requests} requests in the trace{instead}");
    }
}

/// What was placed, in lines and a table with one line per cluster.
pub(super) fn text(
    traffic: &Traffic,
    plans: &[Plan],
    devices: Devices,
    cost: Cost,
    files: &[String],
) -> String {
    let objective = match cost.objective {
        Objective::Distinct => "distinct experts",
        Objective::Tokens => "tokens",
    };
    let skipped = match traffic.skipped {
        0 => String::new(),
        records => format!("; skipped, in no region: {records}"),
    };
    let mut text = format!(
        "trace      {} requests, by {} counts{skipped}\n\
         GPUs       {}, each {} slots for {} experts\n\
         objective  {objective} on the busiest GPU, batch {}\n\n{}\n",
        traffic.requests,
        traffic.counts.name(),
        devices.gpus,
        devices.slots_per_gpu(),
        devices.experts,
        cost.batch,
        table(traffic, plans),
    );
    for file in files {
        text += &format!("wrote      {file}\n");
    }
    text
}

fn table(traffic: &Traffic, plans: &[Plan]) -> Table {
    let mut table = table::table([
        "cluster",
        "requests",
        "distinct\ncontiguous",
        "EPLB",
        "placed",
        "balance\ncontiguous",
        "EPLB",
        "placed",
        "worst\ngap",
    ]);
    for (usage, Plan { summary, .. }) in traffic.clusters.iter().zip(plans) {
        let figures = [summary.contiguous, summary.eplb, summary.placed];
        let mut row = vec![usage.cluster.clone(), usage.requests.to_string()];
        row.extend(figures.map(|figures| format!("{:.2}", figures.distinct_max)));
        row.extend(figures.map(|figures| format!("{:.3}", figures.token_balance)));
        row.push(format!("{:.2} %", 100.0 * summary.gap));
        table.add_row(row);
    }
    table::right_from(1, table)
}
