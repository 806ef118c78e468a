//! The results for people.

use std::ffi::OsString;

use comfy_table::Table;

use super::Report;
use crate::simulate::compare::{Against, ByMetric, Estimate, PolicyResult, estimate};
use crate::simulate::{Cluster, LoadUnit};
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

const PHASE_CHANGES: [(&str, &str); 3] = [
    ("tpot_mean_ms", "TPOT mean"),
    ("tpot_p50_ms", "P50"),
    ("tpot_p99_ms", "P99"),
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
    text += &special(cluster);
    text += &format!("\n{}\n", values(policies));
    for policy in policies {
        let told: Vec<f64> = policy.runs.iter().map(|run| run.told_bytes_per_s).collect();
        let told = estimate(&told).mean / 1e3;
        if told > 0.0 {
            text += &format!(
                "{} costs {told:.1} kB/s: what each gateway tells every other\n",
                policy.policy
            );
        }
    }
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
            references(policies, |policy| &policy.against_best_balancer)
        );
    }
    if policies
        .iter()
        .any(|policy| !policy.against_true_usage.is_empty())
    {
        let table = changes(policies, |policy| &policy.against_true_usage);
        text += &format!("\nchange in % against the same rule with true decode usage\n{table}\n");
    }
    if policies
        .iter()
        .any(|policy| !policy.against_hindsight.is_empty())
    {
        let table = changes(policies, |policy| &policy.against_hindsight);
        text += &format!(
            "\nchange in % against the best that was found in hindsight for each column: {}\n{table}\n",
            references(policies, |policy| &policy.against_hindsight)
        );
    }
    let phases = policies.first().map_or(&[][..], |first| &first.phases);
    for (index, phase) in phases.iter().enumerate() {
        text += &format!(
            "\nfrom {} s, change in % against the best load balancer in each column\n{}\n",
            phase.from_s,
            phase_table(policies, index)
        );
    }
    text + &format!("\nagain    {}\n", report.command)
}

/// What is not as usual.
fn special(cluster: &Cluster) -> String {
    let mut text = String::new();
    let verify = cluster.speculation.verify;
    if verify > 1 {
        let accept = cluster.speculation.accept;
        text += &format!("decoding {verify} tokens verified per step, {accept} accepted\n");
    }
    if let Some(ranks) = cluster.ranks.first().map(|first| first.ranks()) {
        let placed = match cluster.ranks.len() {
            1 => "contiguous",
            _ => "placed for each worker",
        };
        text +=
            &format!("experts  over {ranks} GPUs, {placed}; U and `experts` are on the busiest\n");
    }
    if cluster.load_unit == LoadUnit::KvTokens {
        text += "load     in tokens of KV cache\n";
    }
    text
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
    let compared = |policy: &&PolicyResult| !of(policy).is_empty();
    for policy in policies.iter().filter(compared) {
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

/// One phase, with what is left of the gain of the first.
fn phase_table(policies: &[PolicyResult], index: usize) -> Table {
    let header = PHASE_CHANGES.iter().map(|(_, title)| *title);
    let kept = ["mean gain kept"].into_iter().filter(|_| index > 0);
    let mut table = table(std::iter::once("policy").chain(header).chain(kept));
    for policy in policies {
        let Some(phase) = policy.phases.get(index) else {
            continue;
        };
        let cells = PHASE_CHANGES.iter().map(|(metric, _)| {
            let change = phase.against_best_balancer.get(metric);
            change.map_or_else(String::new, |change| {
                match change.reference == policy.policy {
                    true => "–".into(),
                    false => percent(change.percent),
                }
            })
        });
        let kept = phase.gain_kept.get("tpot_mean_ms");
        let kept = kept.map_or_else(String::new, |kept| format!("{:.0} %", kept * 100.0));
        let kept = [kept].into_iter().filter(|_| index > 0);
        table.add_row(
            std::iter::once(policy.policy.clone())
                .chain(cells)
                .chain(kept),
        );
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

/// The reference of each column.
fn references(
    policies: &[PolicyResult],
    of: impl Fn(&PolicyResult) -> &ByMetric<Against>,
) -> String {
    let Some(policy) = policies.first() else {
        return String::new();
    };
    let named = CHANGES
        .iter()
        .filter_map(|(metric, _)| of(policy).get(metric));
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
