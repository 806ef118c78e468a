//! What generated requests promise.

use proptest::prelude::*;

use super::*;

/// A small model, so that a test needs few draws.
const SMALL: Shape = Shape {
    name: "small",
    geometry: Geometry {
        layers: 6,
        experts: 128,
    },
    ..Shape::QWEN3_30B_A3B
};

fn generator(kind: Kind, seed: u64) -> Generator {
    let strengths = Strengths::fitted(&Shape::QWEN3_30B_A3B, kind);
    Generator::new(SMALL, kind, strengths, seed)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// Every token activates top-k experts, in both phases, whatever the strengths.
    #[test]
    fn layers_sum_to_top_k(
        top_k in 1usize..=16,
        domain in 0.0f32..3.0,
        cluster in 0.0f32..3.0,
        phase in 0.0f32..3.0,
        seed in any::<u64>(),
    ) {
        let strengths = Strengths { domain, cluster, request: 0.5, phase };
        let generator = Generator::new(Shape { top_k, ..SMALL }, Kind::Task, strengths, seed);
        for gates in generator.gates(0..3) {
            prop_assert!((4..=1024).contains(&gates.prompt_tokens));
            for layer in gates.decode.chunks(128) {
                prop_assert!(layer.iter().all(|p| (0.0..=1.0).contains(p)));
                prop_assert!((layer.iter().sum::<f32>() - top_k as f32).abs() < 0.01 * top_k as f32);
            }
            // Drawn one by one: right in the mean only.
            let tokens = u32::from(gates.prefill_counts.iter().fold(0u16, |sum, n| sum.max(*n)));
            prop_assert!(tokens <= gates.prompt_tokens);
        }
    }

    /// A request does not depend on which others are asked for.
    #[test]
    fn requests_are_the_same_by_number(seed in any::<u64>(), first in 0usize..1_000) {
        let generator = generator(Kind::Language, seed);
        let all = generator.gates(first..first + 4);
        prop_assert_eq!(&all[2..], &generator.gates(first + 2..first + 4)[..]);
        prop_assert_ne!(&all[0], &all[1]);
    }
}

/// Every strength that is shipped meets what was published, on requests that it was not solved on.
#[test]
fn the_published_structure_is_met() {
    for (shape, cluster) in Shape::ALL
        .into_iter()
        .flat_map(|shape| (0..CLUSTERS.len()).map(move |cluster| (shape, cluster)))
    {
        for kind in Kind::ALL {
            let strengths = Strengths::fitted_with(&shape, kind, cluster);
            let requests = Generator::new(shape, kind, strengths, 1).gates(2_000..2_400);
            let targets = Targets::published(&shape, kind);
            let fewer = fewer_experts_in_domain(&requests, strengths::BATCH, 7).unwrap();
            let name = format!("{} {} {cluster}", shape.name, kind.name());
            let off = fewer - targets.fewer_experts;
            // Where domains need not differ any more, clusters make their batches differ as it is.
            let reached = if strengths.domain < 0.01 {
                0.025
            } else {
                0.015
            };
            assert!((-0.015..reached).contains(&off), "{name}: {fewer}");
            let rho = phase_correlation(&requests, 7).unwrap();
            match kind {
                Kind::Task => assert!(
                    (rho - shape.phase_correlation).abs() < 0.05,
                    "{name}: {rho}"
                ),
                // Of its own noise a model has as much there, of differences less.
                Kind::Language => assert!(rho < shape.phase_correlation + 0.05, "{name}: {rho}"),
            }
        }
    }
}

#[test]
fn strengths_are_solved_for() {
    let targets = Targets {
        fewer_experts: 0.15,
        phase_correlation: 0.8,
    };
    let found = Strengths::solve(SMALL, Kind::Task, 0.5, 0.5, targets, 3);
    let requests = Generator::new(SMALL, Kind::Task, found, 3).gates(0..320);
    let fewer = fewer_experts_in_domain(&requests, strengths::BATCH, 3).unwrap();
    assert!((fewer - 0.15).abs() < 0.01, "{fewer}");
    let rho = phase_correlation(&requests, 3).unwrap();
    assert!((rho - 0.8).abs() < 0.02, "{rho}");
}

#[test]
fn stronger_domains_share_more_experts_and_stronger_phases_less_of_each_other() {
    let with = |domain, phase| {
        let strengths = Strengths {
            domain,
            cluster: 0.5,
            request: 0.5,
            phase,
        };
        Generator::new(SMALL, Kind::Task, strengths, 1).gates(0..200)
    };
    let fewer = |requests: &[Gates]| fewer_experts_in_domain(requests, 16, 1).unwrap();
    assert!(fewer(&with(0.2, 0.5)) < fewer(&with(1.0, 0.5)));
    assert!(fewer(&with(1.0, 0.5)) < fewer(&with(2.0, 0.5)));
    let rho = |requests: &[Gates]| phase_correlation(requests, 1).unwrap();
    assert!(rho(&with(1.0, 0.1)) > rho(&with(1.0, 3.0)));
}

/// Popularity is that of the real counts: half of Qwen3's experts take about 87 % of the tokens of a layer.
#[test]
fn few_experts_take_most_tokens() {
    let requests = generator(Kind::Language, 1).gates(0..300);
    let mut taken = vec![0.0f64; 128];
    for gates in &requests {
        let layer = gates.decode[2 * 128..3 * 128].iter();
        taken
            .iter_mut()
            .zip(layer)
            .for_each(|(sum, p)| *sum += f64::from(*p));
    }
    taken.sort_by(|a, b| b.total_cmp(a));
    let share = taken[..64].iter().sum::<f64>() / taken.iter().sum::<f64>();
    assert!((0.75..0.97).contains(&share), "{share}");
}

#[test]
fn a_trace_of_generated_requests_is_one_that_simulations_read() {
    let generator = generator(Kind::Task, 5);
    let replayed = workload(&generator, 10..14).unwrap();
    let set = requests(&generator, 10..14).unwrap();
    assert_eq!((replayed.requests.len(), set.len()), (4, 4));
    let gates = generator.gates(10..11).remove(0);
    let record = record(&generator, &gates, 10);
    assert_eq!(record.id, "task-10");
    let prefill = record.prefill_signature().unwrap().unwrap();
    assert_eq!(prefill.counts(), gates.prefill_counts);
    assert_eq!(prefill.prompt_tokens(), Some(gates.prompt_tokens.into()));
    assert_eq!(set.prefill_of(0), gates.prefill_counts);
    let decode = record.decode_signature().unwrap().unwrap();
    let sum: u64 = decode.counts().iter().map(|&n| u64::from(n)).sum();
    let expected = u64::from(DECODE_TOKENS) * 8 * 6;
    assert!(sum.abs_diff(expected) < expected / 20, "{sum}");
}

#[test]
fn a_domain_without_a_whole_batch_is_left_out() {
    let requests = generator(Kind::Task, 1).gates(0..3);
    assert_eq!(fewer_experts_in_domain(&requests, 4, 1), None);
    assert_eq!(fewer_experts_in_domain(&[], 4, 1), None);
}

#[test]
fn prompts_are_as_long_in_the_mean_as_is_said() {
    let requests = generator(Kind::Task, 2).gates(0..4_000);
    let tokens: u32 = requests.iter().map(|gates| gates.prompt_tokens).sum();
    let mean = f64::from(tokens) / requests.len() as f64;
    assert!((mean / PROMPT_TOKENS_MEAN - 1.0).abs() < 0.05, "{mean}");
}
