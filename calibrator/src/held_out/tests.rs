use super::*;

/// Requests of two kinds in turn, told apart by the first two values; profiles are the same vectors.
fn two_kinds(count: usize) -> HeldOut {
    let vectors: Vec<f32> = (0..count)
        .flat_map(|request| {
            let spread = 0.05 * (request / 2 % 7) as f32;
            let unit = [(1.0 - spread * spread).sqrt(), spread];
            if request % 2 == 0 {
                unit
            } else {
                [unit[1], unit[0]]
            }
        })
        .collect();
    HeldOut {
        dimension: 2,
        profiles: vectors.clone(),
        vectors,
        profiles_of: Phase::Decode,
        seed: 1,
    }
}

#[test]
fn signatures_that_are_the_profiles_correlate_fully() {
    assert_eq!(two_kinds(40).rho(), Some(1.0));
}

#[test]
fn without_decode_or_without_difference_there_is_no_correlation() {
    let mut held_out = two_kinds(40);
    held_out.profiles_of = Phase::Prefill;
    assert_eq!(held_out.rho(), None);
    let mut held_out = two_kinds(40);
    held_out.profiles = [1.0, 0.0].repeat(40);
    assert_eq!(held_out.rho(), None);
}

#[test]
fn regions_of_kinds_have_structure_and_drawn_ones_have_none() {
    let held_out = two_kinds(60);
    let trial = held_out.measure(
        held_out.signatures(),
        &[1.0, 0.0, 0.0, 1.0],
        &[vec![0], vec![1]],
        0.1,
    );
    assert_eq!(trial.shares, [0.5, 0.5]);
    let alike = trial.alike;
    assert!(alike.in_region > 0.9 && alike.any < 0.7, "{alike:?}");
    assert!((alike.placebo - alike.any).abs() < 0.02, "{alike:?}");
    assert!(alike.has_structure());
    assert!(trial.is_balanced() && trial.busiest < 1.1, "{trial:?}");

    let mut drawn: Vec<usize> = (0..60).map(|request| request % 2).collect();
    drawn.shuffle(&mut rng(9, Stream::Split));
    assert!(!held_out.alike(drawn, 2).has_structure());
}

#[test]
fn mean_similarity_is_that_over_all_pairs() {
    let held_out = two_kinds(9);
    let vectors = held_out.profiles();
    let groups = [0, 1, 2, 0, 1, 0, 0, 1, 1];
    let (mut sum, mut pairs) = (0.0, 0.0);
    for a in 0..9 {
        for b in (0..9).filter(|&b| b != a && groups[a] == groups[b]) {
            sum += f64::from(dot(vectors.row(a), vectors.row(b)));
            pairs += 1.0;
        }
    }
    assert!((mean_similarity(vectors, &groups, 3) - sum / pairs).abs() < 1e-6);
    assert_eq!(
        mean_similarity(vectors, &[0, 1, 2, 3, 4, 5, 6, 7, 8], 9),
        0.0,
        "no pair"
    );
}

#[test]
fn what_chance_does_to_few_requests_is_no_imbalance() {
    let trial = |requests: usize| {
        let held_out = two_kinds(requests);
        let fitted = two_kinds(400);
        let (centroids, served_by) = ([1.0, 0.0, 0.0, 1.0], [vec![0], vec![1]]);
        held_out.measure(fitted.signatures(), &centroids, &served_by, 0.1)
    };
    let (few, many) = (trial(12), trial(400));
    assert!(few.chance > many.chance, "{few:?} {many:?}");
    assert!(many.chance < 0.1);
    let uneven = |busiest| Trial {
        busiest,
        ..many.clone()
    };
    assert!(uneven(1.2).is_balanced() && !uneven(1.36).is_balanced());
}
