//! The figures of a demo: as a table for people, as JSON for machines.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use comfy_table::{CellAlignment, Table, presets};
use eldr_core::engine::StepModel;
use eldr_core::{Policy, Reason};
use serde::Serialize;

use super::{Settings, Workload};
use crate::load::Summary;
use crate::mock::WorkerReport;

/// How many failed requests a row quotes.
pub(super) const FAILURES_SHOWN: usize = 3;
/// Half of all steps this late means that the step loops wait for the processor.
const LATENESS_P50_MAX_MS: f64 = 1.0;
/// One step in a hundred this late moves a few requests' time per token (over a hundred tokens) by a
/// millisecond, more than policies differ by.
const LATENESS_P99_MAX_MS: f64 = 100.0;
/// And this late by a tenth of that, which the median over requests does not feel and P99 does.
const LATENESS_P99_FELT_MS: f64 = 10.0;

/// All figures of one demo.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// Seed of arrivals, order and fit.
    pub seed: u64,
    /// Decode workers.
    pub workers: usize,
    /// Arrivals per second.
    pub rate_per_s: f64,
    /// Seconds before measuring began.
    pub warm_up_s: f64,
    /// Seconds measured.
    pub measured_s: f64,
    /// Time of a decode step.
    pub step_model: StepModel,
    /// Whether the steps ended too late for the figures to mean anything.
    pub machine_too_slow: bool,
    /// One per workload and policy.
    pub results: Vec<Row>,
}

/// One policy under one workload.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// Name of the workload.
    pub workload: String,
    /// Who decided.
    pub policy: Policy,
    /// Requests sent, those before measuring began included.
    pub requests: usize,
    /// Those of them that failed.
    pub failures: usize,
    /// What became of the first of those.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub failures_shown: Vec<String>,
    /// Times of the measured requests.
    #[serde(flatten, serialize_with = "times")]
    pub summary: Summary,
    /// The decode steps of the measured time.
    #[serde(flatten)]
    pub steps: Steps,
    /// Requests per decode worker in the measured time.
    pub requests_per_worker: Vec<u64>,
    /// How many decisions rested on which reason.
    pub reasons: BTreeMap<String, u64>,
}

/// Decode steps of all workers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Steps {
    /// Distinct experts per layer, mean over layers and steps.
    pub mean_experts_per_step: f64,
    /// Requests per batch, mean over steps.
    pub mean_batch: f64,
    /// How late a step ended, median, of the worker where that was worst, milliseconds.
    pub lateness_p50_ms: f64,
    /// The same, 99th percentile.
    pub lateness_p99_ms: f64,
}

impl Steps {
    /// Sums up the workers: means over all steps, the worst lateness.
    pub fn new(workers: &[WorkerReport]) -> Self {
        let steps: u64 = workers.iter().map(|worker| worker.steps).sum();
        let mean = |of: fn(&WorkerReport) -> f64| {
            let sum: f64 = workers
                .iter()
                .map(|worker| of(worker) * worker.steps as f64)
                .sum();
            sum / steps.max(1) as f64
        };
        let worst = |of: fn(&WorkerReport) -> f64| workers.iter().map(of).fold(0.0, f64::max);
        Steps {
            mean_experts_per_step: mean(|worker| worker.mean_experts),
            mean_batch: mean(|worker| worker.mean_batch),
            lateness_p50_ms: worst(|worker| worker.lateness_p50_ms),
            lateness_p99_ms: worst(|worker| worker.lateness_p99_ms),
        }
    }
}

/// Requests and failures of a row are those of all requests, not of the measured ones.
fn times<S: serde::Serializer>(summary: &Summary, serializer: S) -> Result<S::Ok, S::Error> {
    #[derive(Serialize)]
    struct Times {
        tpot_p50_ms: Option<f64>,
        tpot_p99_ms: Option<f64>,
        ttft_p50_ms: Option<f64>,
    }
    let &Summary {
        tpot_p50_ms,
        tpot_p99_ms,
        ttft_p50_ms,
        ..
    } = summary;
    Times {
        tpot_p50_ms,
        tpot_p99_ms,
        ttft_p50_ms,
    }
    .serialize(serializer)
}

impl Report {
    /// An empty report of what `settings` ask for.
    pub fn new(settings: &Settings) -> Self {
        Report {
            seed: settings.seed,
            workers: settings.workers,
            rate_per_s: settings.rate_per_s,
            warm_up_s: settings.warm_up.as_secs_f64(),
            measured_s: settings.measured.as_secs_f64(),
            step_model: StepModel::QWEN3_30B_A3B,
            machine_too_slow: false,
            results: Vec::new(),
        }
    }

    /// Adds a row.
    pub fn push(&mut self, row: Row) {
        let Steps {
            lateness_p50_ms,
            lateness_p99_ms,
            ..
        } = row.steps;
        self.machine_too_slow |=
            lateness_p50_ms > LATENESS_P50_MAX_MS || lateness_p99_ms > LATENESS_P99_MAX_MS;
        self.results.push(row);
    }

    /// Failed requests of all rows.
    pub fn failures(&self) -> usize {
        self.results.iter().map(|row| row.failures).sum()
    }

    /// The table of one workload, its first row the baseline of the changes in percent.
    pub fn table(&self, workload: &Workload) -> String {
        let rows = self
            .results
            .iter()
            .filter(|row| row.workload == workload.name);
        render(&rows.collect::<Vec<_>>())
    }

    /// What a reader must know before believing the figures; empty if nothing.
    pub fn warnings(&self) -> String {
        let mut text = String::new();
        for row in self.results.iter().filter(|row| row.failures > 0) {
            let (workload, policy) = (&row.workload, row.policy.name());
            let _ = writeln!(
                text,
                "{workload}, {policy}: {} requests failed, such as",
                row.failures
            );
            for failure in &row.failures_shown {
                let _ = writeln!(text, "    {failure}");
            }
        }
        for row in self.results.iter().filter(|row| row.policy.looks()) {
            let looked = [Reason::InBand, Reason::Marginal].map(Reason::name);
            let blind = |(reason, &count): (&String, &u64)| {
                (!looked.contains(&reason.as_str())).then(|| format!("{count} {reason}"))
            };
            let blind: Vec<_> = row.reasons.iter().filter_map(blind).collect();
            if !blind.is_empty() {
                let (workload, policy) = (&row.workload, row.policy.name());
                let _ = writeln!(
                    text,
                    "{workload}, {policy}: decisions without a look at the signature: {}",
                    blind.join(", "),
                );
            }
        }
        let worst = |of: fn(&Steps) -> f64| {
            self.results
                .iter()
                .map(|row| of(&row.steps))
                .fold(0.0, f64::max)
        };
        let p50 = worst(|steps| steps.lateness_p50_ms);
        let p99 = worst(|steps| steps.lateness_p99_ms);
        if self.machine_too_slow {
            let _ = writeln!(
                text,
                "The machine was too slow or too busy for these figures to mean anything: decode steps ended up to \
                 {p50:.1} ms late in the median and {p99:.1} ms at P99 ({LATENESS_P50_MAX_MS} and \
                 {LATENESS_P99_MAX_MS} would do).\n\
                 hint: close other programs, or lower --rate and --workers together",
            );
        } else if p99 > LATENESS_P99_FELT_MS {
            let _ = writeln!(
                text,
                "The machine was busy: one decode step in a hundred ended {p99:.1} ms late or more, so TPOT P99 is \
                 uncertain. The medians stand.",
            );
        }
        text
    }
}

fn render(rows: &[&Row]) -> String {
    let mut table = Table::new();
    table.load_style(presets::UTF8_BORDERS_ONLY);
    table.set_header([
        "policy",
        "TPOT P50 ms",
        "TPOT P99 ms",
        "TTFT P50 ms",
        "experts/step",
        "batch",
        "requests/worker",
        "failures",
    ]);
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    for row in rows {
        let cell = |of: fn(&Row) -> Option<f64>| match (of(row), rows.first()) {
            (None, _) => "–".to_owned(),
            (Some(value), Some(base)) if !std::ptr::eq(*base, *row) => match of(base) {
                Some(base) if base > 0.0 => {
                    format!("{value:.2} ({:+.1} %)", 100.0 * (value / base - 1.0))
                }
                _ => format!("{value:.2}"),
            },
            (Some(value), _) => format!("{value:.2}"),
        };
        let per_worker = &row.requests_per_worker;
        table.add_row([
            row.policy.name().to_owned(),
            cell(|row| row.summary.tpot_p50_ms),
            cell(|row| row.summary.tpot_p99_ms),
            cell(|row| row.summary.ttft_p50_ms),
            cell(|row| Some(row.steps.mean_experts_per_step)),
            format!("{:.1}", row.steps.mean_batch),
            format!(
                "{}–{}",
                per_worker.iter().min().unwrap_or(&0),
                per_worker.iter().max().unwrap_or(&0)
            ),
            row.failures.to_string(),
        ]);
    }
    table.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mock::KvReport;

    fn row(policy: Policy, tpot_p50_ms: f64, lateness_p99_ms: f64) -> Row {
        Row {
            workload: "task".into(),
            policy,
            requests: 300,
            failures: usize::from(policy == Policy::P2c),
            failures_shown: match policy {
                Policy::P2c => vec!["t1: status 503".into()],
                _ => Vec::new(),
            },
            summary: Summary {
                requests: 200,
                failures: 0,
                tpot_p50_ms: Some(tpot_p50_ms),
                tpot_p99_ms: Some(14.0),
                ttft_p50_ms: None,
            },
            steps: Steps {
                mean_experts_per_step: 40.0,
                mean_batch: 8.0,
                lateness_p50_ms: 0.1,
                lateness_p99_ms,
            },
            requests_per_worker: vec![60, 40],
            reasons: BTreeMap::from([("in_band".into(), 299), ("blind".into(), 1)]),
        }
    }

    fn report(rows: Vec<Row>) -> Report {
        let settings = Settings {
            workers: 2,
            prefill_workers: 1,
            rate_per_s: 20.0,
            warm_up: std::time::Duration::from_secs(1),
            measured: std::time::Duration::from_secs(5),
            seed: 1,
        };
        let mut report = Report::new(&settings);
        rows.into_iter().for_each(|row| report.push(row));
        report
    }

    #[test]
    fn changes_are_against_the_first_row() {
        let rows = [
            row(Policy::RoundRobin, 12.0, 0.0),
            row(Policy::Band, 11.4, 0.0),
        ];
        let table = render(&rows.iter().collect::<Vec<_>>());
        let line = |name| table.lines().find(|line| line.contains(name)).unwrap();
        assert!(line("round_robin").contains(" 12.00 "), "{table}");
        assert!(line("band").contains("11.40 (-5.0 %)"), "{table}");
        assert!(
            line("band").contains("40–60") && line("band").contains('–'),
            "{table}"
        );
    }

    #[test]
    fn machines_read_flat_rows() {
        let report = report(vec![row(Policy::RoundRobin, 12.0, 0.0)]);
        let json = serde_json::to_value(&report).unwrap();
        let row = &json["results"][0];
        assert_eq!(row["policy"], "round_robin");
        assert_eq!(
            (&row["requests"], &row["failures"]),
            (&300.into(), &0.into())
        );
        assert_eq!(row["tpot_p50_ms"], 12.0);
        assert_eq!(row["mean_experts_per_step"], 40.0);
        assert_eq!(json["machine_too_slow"], false);
    }

    #[test]
    fn failures_and_a_slow_machine_are_said() {
        assert_eq!(
            report(vec![row(Policy::RoundRobin, 12.0, 9.9)]).warnings(),
            ""
        );
        let busy = report(vec![row(Policy::RoundRobin, 12.0, 10.1)]);
        assert!(busy.warnings().contains("TPOT P99 is uncertain") && !busy.machine_too_slow);
        let blind = report(vec![row(Policy::Band, 12.0, 0.0)]).warnings();
        assert_eq!(
            blind,
            "task, band: decisions without a look at the signature: 1 blind\n"
        );
        let report = report(vec![row(Policy::P2c, 12.0, 110.0)]);
        let warnings = report.warnings();
        assert_eq!(report.failures(), 1);
        assert!(
            warnings.contains("task, p2c: 1 requests failed")
                && warnings.contains("t1: status 503")
        );
        assert!(
            warnings.contains("too slow") && warnings.contains("110.0 ms at P99"),
            "{warnings}"
        );
    }

    #[test]
    fn steps_are_weighed_by_worker() {
        let worker = |steps, mean_experts, lateness_p99_ms| WorkerReport {
            name: "decode-0".into(),
            address: ([127, 0, 0, 1], 1).into(),
            requests: 1,
            prefill_tokens: 0,
            tokens: steps,
            steps,
            mean_experts,
            mean_batch: 1.0,
            lateness_p50_ms: 0.0,
            lateness_p99_ms,
            disconnects: 0,
            mixed_up: 0,
            kv: KvReport::default(),
            running: 0,
            waiting: 0,
        };
        let steps = Steps::new(&[worker(30, 40.0, 0.5), worker(10, 20.0, 2.0)]);
        assert_eq!(
            (steps.mean_experts_per_step, steps.lateness_p99_ms),
            (35.0, 2.0)
        );
        assert_eq!(Steps::new(&[]), Steps::default());
    }
}
