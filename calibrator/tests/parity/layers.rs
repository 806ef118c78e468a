use std::collections::BTreeMap;

use eldr_calibrator::layers::{Profiles, Selection, pairs as all_pairs, select};
use serde::Deserialize;

use super::{json, npz, pairs};

#[derive(Deserialize)]
struct Case {
    name: String,
    #[serde(flatten)]
    sets: BTreeMap<String, serde_json::Value>,
}

#[derive(Deserialize)]
struct Expected {
    n_pairs: usize,
    order: Vec<usize>,
    rho: Vec<f64>,
    mask: Vec<usize>,
    peak_step: usize,
    peak_rho: f64,
}

struct Inputs {
    layers: usize,
    experts: usize,
    signal: Vec<f32>,
    decode: Vec<f32>,
}

impl Inputs {
    fn read(name: &str, signal: &str) -> Self {
        let mut npz = npz("c_greedy.npz");
        let signal = npz.array::<f32>(&format!("{name}_{signal}")).unwrap();
        let decode = npz.array::<i16>(&format!("{name}_decode")).unwrap();
        Inputs {
            layers: signal.shape[1],
            experts: signal.shape[2],
            signal: signal.data,
            decode: decode.data.into_iter().map(f32::from).collect(),
        }
    }

    fn requests(&self) -> usize {
        self.signal.len() / (self.layers * self.experts)
    }

    /// Selects, and returns the correlation of each candidate per step, NaN for those chosen before.
    fn select(&self, pairs: &[(usize, usize)]) -> (Selection, Vec<f64>) {
        let Inputs {
            layers, experts, ..
        } = *self;
        let mut table = vec![f64::NAN; layers * layers];
        let profiles = |values| Profiles {
            layers,
            experts,
            values,
        };
        let on_candidate = |step, layer, rho| table[step * layers + layer] = rho;
        let selection = select(
            profiles(&self.signal),
            profiles(&self.decode),
            pairs,
            on_candidate,
        )
        .unwrap();
        (selection, table)
    }
}

fn check(name: &str, signal: &str, pairs: &[(usize, usize)], set: &str, table: &str) {
    let cases: BTreeMap<String, Vec<Case>> = json("c_greedy.json");
    let case = cases["cases"]
        .iter()
        .find(|case| case.name == name)
        .unwrap();
    let expected: Expected = serde_json::from_value(case.sets[set].clone()).unwrap();
    assert_eq!(pairs.len(), expected.n_pairs);

    let (selection, found) = Inputs::read(name, signal).select(pairs);
    assert_eq!(selection.order, expected.order, "{name}, {set}");
    assert_eq!(selection.layers(), expected.mask);
    assert_eq!(selection.kept, expected.peak_step + 1);
    let close = |a: f64, b: f64| (a - b).abs() < 2e-5 || (a.is_nan() && b.is_nan());
    assert!(close(selection.peak(), expected.peak_rho));
    assert!(
        selection
            .rho
            .iter()
            .zip(&expected.rho)
            .all(|(&a, &b)| close(a, b))
    );
    let table = npz("c_greedy.npz")
        .array::<f64>(&format!("{name}_{table}"))
        .unwrap()
        .data;
    assert!(
        found.iter().zip(&table).all(|(&a, &b)| close(a, b)),
        "{name}, {set}"
    );
}

#[test]
fn with_the_official_random_pairs() {
    for name in ["main", "clean", "headless"] {
        let pairs = pairs(&mut npz("c_greedy.npz"), &format!("{name}_"));
        check(
            name,
            "signal",
            &pairs,
            "official_pairs_seed1",
            "rho_table_official",
        );
    }
}

#[test]
fn with_all_pairs_drawn_here() {
    for name in ["main", "clean", "headless", "ties"] {
        let pairs = all_pairs(Inputs::read(name, "signal").requests(), 1);
        check(name, "signal", &pairs, "all_pairs", "rho_table_all");
    }
}

#[test]
fn with_gate_probabilities_for_the_signal() {
    for name in ["main", "clean", "headless"] {
        let pairs = all_pairs(Inputs::read(name, "signal").requests(), 1);
        check(
            name,
            "gate",
            &pairs,
            "gate_prob_all_pairs",
            "rho_table_gate_all",
        );
    }
}

#[test]
fn decode_counts_without_variation_are_refused() {
    let mut case = Inputs::read("main", "signal");
    case.decode.fill(1.0);
    let Inputs {
        layers,
        experts,
        ref signal,
        ref decode,
    } = case;
    let profiles = |values| Profiles {
        layers,
        experts,
        values,
    };
    let pairs = all_pairs(case.requests(), 1);
    let error = select(profiles(signal), profiles(decode), &pairs, |_, _, _| {}).unwrap_err();
    assert!(error.to_string().contains("equally far apart"), "{error}");
}
