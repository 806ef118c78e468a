//! What was measured: the ELDR paper's artifact, results of October 2026, single measurements. Differences under about 2 % are noise.

use serde::Serialize;

use crate::generate::{Kind, Shape};

/// Columns: workload, model, policy, rate_rps, tpot_p50_ms, tpot_p99_ms.
const MAIN: &str = include_str!("../../data/eldr-published.csv");
/// Columns: workload, model, ablation, variant, p50_change_percent, p99_change_percent; against round robin at 60 requests/s.
const ABLATIONS: &str = include_str!("../../data/eldr-published-ablations.csv");

/// Request rates of the main figures, per second.
pub const RATES: [u32; 5] = [20, 40, 60, 80, 100];
/// Rate of the ablations.
pub const ABLATION_RATE: u32 = 60;
/// Decode workers of the main figures.
pub const WORKERS: usize = 16;
/// The mean of the change in the median over all cells: what one would guess without any model.
pub const GUESS: f64 = -9.8;

/// ELDR's rule as it was measured: centroids refitted every second to the last five.
pub const BAND: &str = "band:refit=1/5";
/// What runs: name here, name as published where it was measured, and the simulator's policy. Published rules have no load cap.
pub const POLICIES: [(&str, Option<&str>, &str); 8] = [
    ("round robin", Some("rr"), "round_robin"),
    ("random", Some("random"), "random"),
    ("least loaded", Some("jsq"), "least_loaded"),
    ("p2c", Some("p2c"), "p2c"),
    ("label", Some("domain"), "label"),
    ("band", Some("eldr"), BAND),
    ("marginal", None, "marginal"),
    ("hybrid", None, "hybrid"),
];

/// Time per output token of one cell, ms.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Cell {
    /// Median over requests.
    pub p50_ms: f64,
    /// 99th percentile.
    pub p99_ms: f64,
}

/// Change against round robin, %.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Change {
    /// Of the median.
    pub p50: f64,
    /// Of the 99th percentile.
    pub p99: f64,
}

impl Cell {
    /// From `reference` to this.
    pub fn against(self, reference: Cell) -> Change {
        let percent = |own: f64, other: f64| (own / other - 1.0) * 100.0;
        Change {
            p50: percent(self.p50_ms, reference.p50_ms),
            p99: percent(self.p99_ms, reference.p99_ms),
        }
    }
}

impl Change {
    /// Mean of several; 0 of none.
    pub fn mean(of: impl IntoIterator<Item = Change>) -> Change {
        let (mut p50, mut p99, mut count) = (0.0, 0.0, 0.0f64);
        for change in of {
            p50 += change.p50;
            p99 += change.p99;
            count += 1.0;
        }
        let count = count.max(1.0);
        Change {
            p50: p50 / count,
            p99: p99 / count,
        }
    }
}

/// One cell of the main figures; policies by their published names.
pub fn cell(shape: &Shape, kind: Kind, policy: &str, rate: u32) -> Option<Cell> {
    let key = format!("{},{},{policy},{rate},", kind.name(), shape.name);
    let (p50_ms, p99_ms) = numbers(MAIN, &key)?;
    Some(Cell { p50_ms, p99_ms })
}

/// Change of a policy against round robin at one rate.
pub fn change(shape: &Shape, kind: Kind, policy: &str, rate: u32) -> Option<Change> {
    let own = cell(shape, kind, policy, rate)?;
    Some(own.against(cell(shape, kind, "rr", rate)?))
}

/// One measurement of an ablation, against round robin.
pub fn ablation(shape: &Shape, kind: Kind, ablation: &str, variant: &str) -> Option<Change> {
    let key = format!("{},{},{ablation},{variant},", kind.name(), shape.name);
    let (p50, p99) = numbers(ABLATIONS, &key)?;
    Some(Change { p50, p99 })
}

/// The two numbers of the line that begins with `key`.
fn numbers(table: &str, key: &str) -> Option<(f64, f64)> {
    let rest = table.lines().find_map(|line| line.strip_prefix(key))?;
    let (first, second) = rest.split_once(',')?;
    Some((first.parse().ok()?, second.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_measured_cell_is_there() {
        for shape in Shape::ALL {
            for kind in Kind::ALL {
                for policy in POLICIES.iter().filter_map(|(_, published, _)| *published) {
                    for rate in RATES {
                        let found = cell(&shape, kind, policy, rate).unwrap();
                        assert!(found.p50_ms > 5.0 && found.p99_ms > found.p50_ms);
                    }
                }
                for (name, variants) in [
                    ("tau", &["0", "0.1", "0.2", "0.3"][..]),
                    ("kmeans", &["balanced", "plain"]),
                    ("signature", &["count_idf", "gate_prob_all"]),
                ] {
                    for variant in variants {
                        assert!(ablation(&shape, kind, name, variant).is_some());
                    }
                }
            }
        }
        assert_eq!(cell(&Shape::QWEN3_30B_A3B, Kind::Task, "rr", 61), None);
    }

    #[test]
    fn the_guess_is_the_mean_over_all_cells() {
        let changes = Shape::ALL.iter().flat_map(|shape| {
            let of = move |kind| RATES.map(|rate| change(shape, kind, "eldr", rate).unwrap());
            Kind::ALL.into_iter().flat_map(of)
        });
        assert!((Change::mean(changes).p50 - GUESS).abs() < 0.05);
    }
}
