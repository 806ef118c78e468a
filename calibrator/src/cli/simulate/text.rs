//! The results for people.

use std::ffi::OsString;

use comfy_table::Table;

use super::Report;
use crate::simulate::Cluster;
use crate::simulate::compare::{Against, ByMetric, Estimate, PolicyResult};
use crate::table::{right_from, table};

/// Columns of the values, and of the changes.
const VALUES: [(&str, &str, usize); 7] = [
    ("tpot_mean_ms", "TPOT mean", 2),
    ("tpot_p50_ms", "P50", 2),
    ("tpot_p99_ms", "P99", 2),
    ("ttft_p50_ms", "TTFT P50", 1),
    ("ttft_p99_ms", "P99", 1),
    ("experts_per_step", "experts", 2),
    ("busiest", "busiest", 2),
];
const CHANGES: [(&str, &str); 4] = [
    ("tpot_mean_ms", "TPOT mean"),
    ("tpot_p50_ms", "P50"),
    ("tpot_p99_ms", "P99"),
    ("experts_per_step", "experts"),
];

pub(super) fn text(report: &Report<'_>, cluster: &Cluster) -> String {
    let policies = &report.comparison.policies;
    let runs = policies.iter().flat_map(|policy| &policy.runs);
    let (least, most) = runs.fold((usize::MAX, 0), |(least, most), run| {
        (least.min(run.requests), most.max(run.requests))
    });
    let step = cluster.step;
    let kv = match step.kv_ms_per_1k {
        0.0 => String::new(),
        kv => format!(" + {kv}·KV"),
    };
    let seeds = match report.comparison.seeds[..] {
        [first, .., last] => format!("seeds {first} to {last}, ± 95 % of their mean"),
        [seed] => format!("seed {seed}"),
        [] => String::new(),
    };
    let mut text = format!(
        "replayed {} requests{}; experts {}\ncluster  {} prefill and {} decode workers, {} gateway(s)\nstep     {} + {}·U + {}·B{kv} ms\nrouting  {}\nmeasured {least} to {most} requests per run; {seeds}\n",
        report.requests,
        match report.records_skipped {
            0 => String::new(),
            skipped => format!(", {skipped} skipped"),
        },
        if report.exact {
            "counted at every step"
        } else {
            "expected from counts"
        },
        cluster.prefill_workers,
        cluster.decode_workers,
        cluster.gateways,
        step.t0_ms,
        step.b_ms,
        step.c_ms,
        match (report.regions, report.max_load_factor) {
            (None, _) => "no blob".into(),
            (Some(regions), Some(cap)) =>
                format!("{regions} regions, tau {}, load cap {cap}", report.tau),
            (Some(regions), None) => format!("{regions} regions, tau {}, no load cap", report.tau),
        },
    );
    text += &format!("\n{}\n", values(policies));
    if policies
        .iter()
        .any(|policy| !policy.against_round_robin.is_empty())
    {
        let table = changes(policies, |policy| &policy.against_round_robin);
        text += &format!("\nchange in % against round robin, less is better\n{table}\n");
    }
    if policies
        .iter()
        .any(|policy| !policy.against_best_balancer.is_empty())
    {
        let table = changes(policies, |policy| &policy.against_best_balancer);
        text += &format!(
            "\nchange in % against the best load balancer in each column: {}\n{table}\n",
            best(policies)
        );
    }
    text + &format!("\nagain    {}\n", report.command)
}

fn values(policies: &[PolicyResult]) -> Table {
    let header = VALUES.iter().map(|(_, title, _)| *title);
    let mut table = table(std::iter::once("policy").chain(header));
    for policy in policies {
        let cells = VALUES.iter().map(|(metric, _, digits)| {
            policy.values.get(metric).map_or_else(String::new, |value| {
                let mean = value.mean;
                format!("{mean:.digits$}")
            })
        });
        table.add_row(std::iter::once(policy.policy.clone()).chain(cells));
    }
    right_from(1, table)
}

fn changes(policies: &[PolicyResult], of: impl Fn(&PolicyResult) -> &ByMetric<Against>) -> Table {
    let header = CHANGES.iter().map(|(_, title)| *title);
    let mut table = table(std::iter::once("policy").chain(header));
    for policy in policies {
        let cells = CHANGES.iter().map(|(metric, _)| {
            of(policy).get(metric).map_or_else(String::new, |change| {
                if change.reference == policy.policy {
                    return "–".into();
                }
                percent(change.percent)
            })
        });
        table.add_row(std::iter::once(policy.policy.clone()).chain(cells));
    }
    right_from(1, table)
}

fn percent(Estimate { mean, plus_minus }: Estimate) -> String {
    // −0.0 is no change either.
    let mean = (mean * 10.0).round() / 10.0 + 0.0;
    match plus_minus {
        Some(plus_minus) => format!("{mean:+.1} ± {plus_minus:.1}"),
        None => format!("{mean:+.1}"),
    }
}

fn best(policies: &[PolicyResult]) -> String {
    let Some(policy) = policies.first() else {
        return String::new();
    };
    let named = CHANGES
        .iter()
        .filter_map(|(metric, _)| policy.against_best_balancer.get(metric));
    named
        .map(|change| change.reference.as_str())
        .collect::<Vec<_>>()
        .join(", ")
}

/// The command line that ran, for a shell.
pub(in crate::cli) fn command(arguments: impl Iterator<Item = OsString>) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./,:=+@%".contains(c);
    let quoted = arguments.skip(1).map(|argument| {
        let argument = argument.to_string_lossy();
        match !argument.is_empty() && argument.chars().all(plain) {
            true => argument.into_owned(),
            false => format!("'{}'", argument.replace('\'', r"'\''")),
        }
    });
    std::iter::once("eldr".to_owned())
        .chain(quoted)
        .collect::<Vec<_>>()
        .join(" ")
}
