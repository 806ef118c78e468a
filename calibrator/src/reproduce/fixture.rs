//! A reproduction of round numbers, for tests of what is shown of it.

use super::predict::{Compared, Prediction, Sensitivity};
use super::published::POLICIES;
use super::{Ablation, Cell, Change, Reproduction};
use crate::generate::{Kind, Shape, Strengths};

/// One model and workload of round numbers.
pub(crate) fn small() -> Reproduction {
    let cell = |p50_ms: f64| Cell {
        p50_ms,
        p99_ms: p50_ms + 5.0,
    };
    let compared =
        |(place, &(policy, published, _)): (usize, &(&'static str, Option<&str>, &str))| {
            [20, 60].map(|rate| {
                let ms = f64::from(rate) / 2.0 - place as f64 / 2.0;
                Compared {
                    policy,
                    rate,
                    simulated: cell(ms),
                    published: published.map(|_| cell(ms + 0.5)),
                }
            })
        };
    let change = |p50| Change { p50, p99: 1.0 };
    let sensitivity = [
        ("floor", 0.05, -4.0),
        ("half", 0.08, -6.0),
        ("double", 0.32, -24.0),
    ];
    let prediction = Prediction {
        workload: Kind::Task,
        model: Shape::QWEN3_30B_A3B.name,
        kv_slowdown: 6.5,
        b_ms: 0.125,
        b_in_hindsight_ms: 0.15,
        strengths: Strengths::fitted(&Shape::QWEN3_30B_A3B, Kind::Task),
        cells: POLICIES.iter().enumerate().flat_map(compared).collect(),
        simulated: change(-12.0),
        published: change(-14.0),
        transferred_p50: -9.0,
        sensitivity: sensitivity
            .map(|(what, b_ms, p50)| Sensitivity { what, b_ms, p50 })
            .into(),
    };
    let ablation = |variant, simulated, published, against_rule| Ablation {
        workload: Kind::Task,
        model: Shape::QWEN3_30B_A3B.name,
        ablation: "tau",
        variant,
        simulated: change(simulated),
        published: Some(change(published)),
        against_rule,
    };
    Reproduction {
        rates: vec![20, 60],
        seed: 1,
        seconds: 120,
        near: 1,
        error: 2.0,
        transferred_error: 5.0,
        guess_error: 4.2,
        ablations: vec![
            ablation("0", -10.0, -16.0, Some((2.0, -2.0))),
            ablation("0.1", -12.0, -14.0, None),
            ablation("0.3", -10.0, -12.5, Some((2.0, 1.5))),
        ],
        predictions: vec![prediction],
    }
}
