use proptest::prelude::*;

use super::*;
use crate::rank::average_ranks;

/// Cosine distances from whole vectors, multiplied out for every set of layers.
fn distances(profiles: Profiles<'_>, layers: &[usize], pairs: &[(usize, usize)]) -> Vec<f32> {
    let Profiles {
        layers: total,
        experts,
        values,
    } = profiles;
    let vector = |request: usize| -> Vec<f64> {
        let row = |&layer: &usize| &values[(request * total + layer) * experts..][..experts];
        layers
            .iter()
            .flat_map(row)
            .map(|&value| f64::from(value))
            .collect()
    };
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    let cosine = |(i, j): (usize, usize)| {
        let (a, b) = (vector(i), vector(j));
        dot(&a, &b) / (dot(&a, &a).sqrt().max(1e-9) * dot(&b, &b).sqrt().max(1e-9))
    };
    pairs
        .iter()
        .map(|&pair| 1.0 - cosine(pair) as f32)
        .collect()
}

/// Spearman's correlation as Pearson's of the ranks, by its definition.
fn spearman(a: &[f32], b: &[f32]) -> f64 {
    let (a, b) = (average_ranks(a), average_ranks(b));
    let mean = |ranks: &[f64]| ranks.iter().sum::<f64>() / ranks.len() as f64;
    let (mean_a, mean_b) = (mean(&a), mean(&b));
    let sum = |f: &dyn Fn(f64, f64) -> f64| {
        a.iter()
            .zip(&b)
            .map(|(a, b)| f(a - mean_a, b - mean_b))
            .sum::<f64>()
    };
    let (squares_a, squares_b) = (sum(&|a, _| a * a), sum(&|_, b| b * b));
    if squares_a == 0.0 {
        0.0
    } else {
        sum(&|a, b| a * b) / (squares_a * squares_b).sqrt()
    }
}

#[test]
fn few_requests_are_compared_in_all_pairs() {
    assert_eq!(pairs(0, 1), []);
    assert_eq!(pairs(1, 1), []);
    assert_eq!(
        pairs(4, 1),
        [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]
    );
    assert_eq!(
        pairs(245, 1).len(),
        245 * 244 / 2,
        "just below the most that are compared"
    );
}

#[test]
fn many_requests_are_compared_in_random_pairs_of_different_ones() {
    let drawn = pairs(400, 1);
    assert_eq!(drawn.len(), PAIRS_MAX);
    assert_eq!(drawn, pairs(400, 1));
    assert_ne!(drawn, pairs(400, 2));
    let mut seen = [0u32; 400];
    for (i, j) in drawn {
        assert_ne!(i, j);
        seen[i] += 1;
        seen[j] += 1;
    }
    // 150 on average, with a standard deviation of 12.
    assert!(
        seen.iter().all(|count| (75..225).contains(count)),
        "no request is left out"
    );
}

#[test]
fn of_equal_correlations_the_lowest_layer_and_the_shortest_prefix_win() {
    // Layers 0 and 2 are alike and perfect, layer 1 is empty.
    let layer = |request: usize| [1.0, request as f32, 0.0];
    let signal: Vec<f32> = (0..6)
        .flat_map(|r| [layer(r), [0.0; 3], layer(r)])
        .flatten()
        .collect();
    let decode: Vec<f32> = (0..6).flat_map(layer).collect();
    let selection = select(
        Profiles {
            layers: 3,
            experts: 3,
            values: &signal,
        },
        Profiles {
            layers: 1,
            experts: 3,
            values: &decode,
        },
        &pairs(6, 1),
        |_, _, _| {},
    )
    .unwrap();
    assert_eq!(selection.order, [0, 1, 2]);
    assert_eq!(selection.rho, [1.0; 3]);
    assert_eq!(selection.layers(), [0]);
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_candidate_is_what_whole_vectors_give(
        counts in prop::collection::vec(0u8..6, 5 * (3 + 2) * 4),
    ) {
        let values: Vec<f32> = counts.into_iter().map(f32::from).collect();
        let (signal, decode) = values.split_at(5 * 3 * 4);
        let signal = Profiles { layers: 3, experts: 4, values: signal };
        let decode = Profiles { layers: 2, experts: 4, values: decode };
        let pairs = pairs(5, 1);
        let target = distances(decode, &[0, 1], &pairs);

        let mut tried = Vec::new();
        let selection = select(signal, decode, &pairs, |step, layer, rho| {
            tried.push((step, layer, rho));
        });
        let varies = target.iter().any(|value| value != &target[0]);
        prop_assert_eq!(selection.is_ok(), varies);
        let Ok(selection) = selection else { return Ok(()) };
        for (step, layer, rho) in tried {
            let mut chosen = selection.order[..step].to_vec();
            chosen.push(layer);
            chosen.sort_unstable();
            let expected = spearman(&distances(signal, &chosen, &pairs), &target);
            // Sums of small integers are exact in any order, so ties are the same ones too.
            prop_assert!((rho - expected).abs() < 1e-12, "{rho} is not {expected}");
            prop_assert!(rho <= selection.rho[step]);
        }
    }
}
