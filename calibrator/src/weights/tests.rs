use eldr_core::signature::{Geometry, Signature};
use proptest::prelude::*;

use super::*;
use crate::trace::Record;

const GEOMETRY: Geometry = Geometry {
    layers: 2,
    experts: 3,
};

fn requests(counts: &[[u16; 6]]) -> Requests {
    let mut set = None;
    for counts in counts {
        let prefill = Signature::dense(GEOMETRY, counts.to_vec(), None).unwrap();
        set.get_or_insert_with(|| Requests::new(&prefill))
            .push(&Record::default(), &prefill)
            .unwrap();
    }
    set.unwrap()
}

fn of(weight: Weight, counts: &[[u16; 6]]) -> Vec<f32> {
    let members: Vec<usize> = (0..counts.len()).collect();
    weight.of(&requests(counts), &members)
}

#[test]
fn presence_fades_where_every_prompt_touches_every_expert_and_no_other_weight_does() {
    let long = [[900, 50, 50, 1, 2, 3], [50, 900, 50, 3, 2, 1]];
    for weight in Weight::ALL {
        let some = of(weight, &long).iter().any(|&weight| weight > 0.0);
        assert_eq!(some, weight != Weight::PresenceIdf, "{weight:?}");
    }
}

#[test]
fn an_expert_that_everybody_uses_alike_has_no_deviation() {
    // Shares of expert 0 on layer 0 are the same however long the prompt is.
    let counts = [[5, 5, 0, 1, 0, 0], [50, 0, 50, 0, 1, 0]];
    let found = of(Weight::Deviation, &counts);
    assert_eq!(found[0], 0.0);
    assert_eq!(found[1], found[2]);
    assert!(found[3] > found[1], "1 and 0 differ by more than 0.5 and 0");
    assert_eq!(found[5], 0.0, "nobody uses it");
}

#[test]
fn dispersion_favours_rare_experts_of_the_same_deviation() {
    let counts = [[6, 3, 1, 0, 0, 0], [5, 4, 1, 0, 0, 0]];
    let deviation = of(Weight::Deviation, &counts);
    let dispersion = of(Weight::Dispersion, &counts);
    assert!((deviation[0] - deviation[1]).abs() < 1e-6);
    assert!(dispersion[0] < dispersion[1]);
}

#[test]
fn mean_idf_counts_those_above_the_mean() {
    let counts = [[8, 1, 1, 0, 0, 0], [1, 1, 8, 0, 0, 0], [1, 1, 8, 0, 0, 0]];
    let found = of(Weight::MeanIdf, &counts);
    // Above the mean share: expert 0 in one request of three, expert 1 in none, expert 2 in two.
    assert!(found[1] > found[0] && found[0] > found[2] && found[2] > 0.0);
}

#[test]
fn only_the_members_count() {
    let counts = [[9, 0, 0, 1, 0, 0], [0, 9, 0, 1, 0, 0], [0, 0, 9, 0, 0, 1]];
    for weight in Weight::ALL {
        let found = weight.of(&requests(&counts), &[0, 1]);
        assert_eq!(found, of(weight, &counts[..2]), "{weight:?}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn deviation_is_that_of_the_definition(counts in prop::collection::vec(any::<[u16; 6]>(), 1..8)) {
        let share = |request: &[u16; 6], at: usize| {
            let layer = &request[at / 3 * 3..][..3];
            f64::from(request[at]) / layer.iter().map(|&c| f64::from(c)).sum::<f64>().max(1.0)
        };
        let n = counts.len() as f64;
        let expected: Vec<f64> = (0..6)
            .map(|at| {
                let mean = counts.iter().map(|r| share(r, at)).sum::<f64>() / n;
                (counts.iter().map(|r| (share(r, at) - mean).powi(2)).sum::<f64>() / n).sqrt()
            })
            .collect();
        let sum: f64 = expected.iter().sum();
        for (found, expected) in of(Weight::Deviation, &counts).into_iter().zip(expected) {
            let expected = if sum > 0.0 { expected * 6.0 / sum } else { 0.0 };
            prop_assert!((f64::from(found) - expected).abs() < 1e-4, "{found} {expected}");
        }
    }

    #[test]
    fn every_weight_is_one_that_a_blob_may_have(counts in prop::collection::vec(any::<[u16; 6]>(), 1..8)) {
        for weight in Weight::ALL {
            let found = of(weight, &counts);
            prop_assert!(found.iter().all(|w| (0.0..=transform::MAX_WEIGHT).contains(w)), "{:?} {:?}", weight, found);
        }
    }
}
