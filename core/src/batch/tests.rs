use proptest::prelude::*;
use proptest::sample::select;

use super::*;
use crate::decide::{Draw, Evidence, Reason, Regions, Worker, decide};
use crate::engine::StepModel;
use crate::marginal::Objective;

const GEOMETRY: Geometry = Geometry {
    layers: 4,
    experts: 5,
};
const LAYERS: [u16; 2] = [1, 3];
const LENGTH: usize = 10;

fn batches(measure: Measure, workers: usize) -> Batches {
    Batches::new(measure, GEOMETRY, LAYERS.to_vec(), workers).unwrap()
}

/// A request as the tests write it: counts of the two layers, prompt tokens, KV tokens; `None`: no signature.
type Written = (Option<(Vec<u16>, u64)>, u32);

fn written() -> impl Strategy<Value = Written> {
    let tokens = prop_oneof![Just(1u64), 2u64..40, Just(3000)];
    let seen = tokens.prop_flat_map(|tokens| {
        let count = prop_oneof![Just(0u16), 0..=tokens as u16, Just(tokens as u16)];
        let counts = proptest::collection::vec(count, LENGTH);
        (
            counts.prop_filter("no counts", |counts| counts.iter().any(|&count| count > 0)),
            Just(tokens),
        )
    });
    (prop::option::weighted(0.8, seen), 0u32..5000)
}

fn seen(batches: &Batches, (signature, kv_tokens): &Written) -> Request {
    let mut request = Request::default();
    if let Some((counts, tokens)) = signature {
        let counts: Vec<f32> = counts.iter().map(|&count| count.into()).collect();
        assert!(batches.see(&counts, *tokens, *kv_tokens, &mut request));
    }
    request
}

fn footprint(batches: &Batches, written: &Written) -> Footprint {
    match written.0 {
        Some(_) => seen(batches, written).footprint(),
        None => Footprint::unknown(written.1),
    }
}

/// Probabilities by definition; those of `like`, spread evenly, for a request that nobody knows.
fn usage((signature, _): &Written, like: f64) -> Vec<f64> {
    signature
        .as_ref()
        .map_or(vec![like; LENGTH], |(counts, tokens)| {
            counts
                .iter()
                .map(|&count| f64::from(count) / *tokens as f64)
                .collect()
        })
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

/// What a request that runs counts as: what is known of it is clipped, what stands for the unknown is not.
fn counted(written: &Written, like: f64, cap: f64) -> Vec<f64> {
    let cap = if written.0.is_some() { cap } else { 1.0 };
    let row = usage(written, like).into_iter();
    row.map(|p| p.min(cap)).collect()
}

/// Expected distinct experts per layer: one minus the probability that nobody uses it, for each expert, by definition.
fn union(requests: &[&Written], like: f64, cap: f64) -> f64 {
    let rows: Vec<Vec<f64>> = requests
        .iter()
        .map(|written| counted(written, like, cap))
        .collect();
    let used = |at: usize| 1.0 - rows.iter().map(|row| 1.0 - row[at]).product::<f64>();
    (0..LENGTH).map(used).sum::<f64>() / LAYERS.len() as f64
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    #[test]
    fn expected_experts_are_those_of_independent_requests(
        batch in proptest::collection::vec(written(), 0..8),
        arriving in written().prop_filter("known", |(signature, _)| signature.is_some()),
    ) {
        let mut batches = batches(Measure::Usage, 1);
        for written in &batch {
            batches.join(WorkerIndex(0), &footprint(&batches, written));
        }
        let request = seen(&batches, &arriving);
        let own = usage(&arriving, 0.0);
        let cap = f64::from(fixed::MAX_PROBABILITY);
        let running: Vec<&Written> = batch.iter().collect();
        let before = union(&running, mean(&own), cap);
        let [found] = batches.workers() else { unreachable!() };
        // A cost is rounded to 2^-13 bits: each of eight requests may be off by a part in 20,000.
        let near = |found: f64, expected: f64| (found - expected).abs() < 8.0 * 5e-5 * GEOMETRY.experts as f64;
        prop_assert!(near(found.expected_experts(&request), before));
        // The newcomer itself is not clipped: a token that is certain to use an expert counts as one.
        let rows: Vec<Vec<f64>> = batch.iter().map(|written| counted(written, mean(&own), cap)).collect();
        let unused = |at: usize| rows.iter().map(|row| 1.0 - row[at]).product::<f64>();
        let extra = (0..LENGTH).map(|at| own[at] * unused(at)).sum::<f64>() / LAYERS.len() as f64;
        prop_assert!(near(found.extra_experts(&request), extra));
        prop_assert_eq!(found.requests() as usize, batch.len());
        prop_assert_eq!(found.kv_tokens(), batch.iter().map(|(_, kv)| u64::from(*kv)).sum::<u64>());
    }

    #[test]
    fn a_batch_that_everybody_left_is_as_new_in_whatever_order_they_left(
        requests in proptest::collection::vec((written(), any::<prop::sample::Index>()), 0..20),
        measure in select(vec![Measure::Usage, Measure::Direction]),
    ) {
        let new = batches(measure, 2);
        let mut now = new.clone();
        let mut there: Vec<Footprint> = Vec::new();
        for (written, leaving) in &requests {
            let footprint = footprint(&now, written);
            now.join(WorkerIndex(1), &footprint);
            there.push(footprint);
            // Some leave between arrivals.
            if leaving.index(3) == 0 {
                now.leave(WorkerIndex(1), &there.swap_remove(leaving.index(there.len())));
            }
        }
        // However it came about, it is what its requests make it.
        let mut built = new.clone();
        for footprint in &there {
            built.join(WorkerIndex(1), footprint);
        }
        prop_assert_eq!(&built, &now);
        for footprint in there.iter().rev() {
            now.leave(WorkerIndex(1), footprint);
        }
        prop_assert_eq!(now, new);
    }

    #[test]
    fn the_cosine_is_that_to_the_sum_of_unit_vectors(
        batch in proptest::collection::vec(written(), 0..8),
        arriving in written().prop_filter("known", |(signature, _)| signature.is_some()),
    ) {
        let mut batches = batches(Measure::Direction, 1);
        for written in &batch {
            batches.join(WorkerIndex(0), &footprint(&batches, written));
        }
        let unit = |written: &Written| {
            let values = usage(written, 0.0);
            let length = values.iter().map(|value| value * value).sum::<f64>().sqrt();
            values.into_iter().map(move |value| value / length).collect::<Vec<f64>>()
        };
        let known = batch.iter().filter(|(signature, _)| signature.is_some());
        let mut sum = [0.0; LENGTH];
        for written in known {
            sum.iter_mut().zip(unit(written)).for_each(|(sum, value)| *sum += value);
        }
        let length = sum.iter().map(|value| value * value).sum::<f64>().sqrt();
        let expected = sum.iter().zip(unit(&arriving)).map(|(a, b)| a * b).sum::<f64>() / length;
        let found = batches.workers()[0].cosine(&seen(&batches, &arriving));
        match found {
            Some(found) => prop_assert!((f64::from(found) - expected).abs() < 1e-4, "{found}, {expected}"),
            None => prop_assert!(expected.is_nan()),
        }
    }

    #[test]
    fn the_marginal_worker_is_the_one_where_the_objective_grows_least(
        workers in proptest::collection::vec(proptest::collection::vec(written(), 0..5), 1..7),
        arriving in written().prop_filter("known", |(signature, _)| signature.is_some()),
        (exponent, kv_ms_per_1k, cap) in (1u32..6, select(vec![0.0, 1.0]), select(vec![None, Some(1.0), Some(1.25)])),
    ) {
        let mut batches = batches(Measure::Usage, workers.len());
        for (worker, batch) in workers.iter().enumerate() {
            for written in batch {
                batches.join(WorkerIndex(worker), &footprint(&batches, written));
            }
        }
        let step = StepModel { kv_ms_per_1k, ..StepModel::QWEN3_30B_A3B };
        let objective = Objective { exponent, step };
        let rule = Rule { max_load_factor: cap, objective, ..Rule::of(Policy::Marginal) };
        let request = seen(&batches, &arriving);
        let mut growth = Vec::new();
        batches.to_each(&rule, &request, &mut growth);

        // By definition: the whole objective with the request on each worker in turn.
        let own = mean(&usage(&arriving, 0.0));
        let time = |batch: &[&Written], certain: f64| {
            let kv: u64 = batch.iter().map(|(_, kv)| u64::from(*kv)).sum();
            objective.step.step_ms(union(batch, own, certain), batch.len(), kv)
        };
        let whole = |with: Option<usize>| -> f64 {
            let each = workers.iter().enumerate().map(|(worker, batch)| {
                let mut batch: Vec<&Written> = batch.iter().collect();
                if with == Some(worker) {
                    batch.push(&arriving);
                }
                batch.len() as f64 * time(&batch, 0.98).powi(exponent as i32)
            });
            each.sum()
        };
        let before = whole(None);
        // The newcomer is not clipped, which the definition above does; that is at most 0.02 experts' difference per expert.
        let slack = |worker: usize| {
            let mut batch: Vec<&Written> = workers[worker].iter().collect();
            batch.push(&arriving);
            let most = time(&batch, 1.0);
            let experts = 0.02 * GEOMETRY.experts as f64 + 8.0 * 5e-5 * GEOMETRY.experts as f64;
            let part = objective.step.b_ms * experts / most * f64::from(exponent) * 1.1;
            batch.len() as f64 * most.powi(exponent as i32) * part * 2.0
        };
        for (worker, growth) in growth.iter().enumerate() {
            let expected = whole(Some(worker)) - before;
            prop_assert!((growth - expected).abs() <= slack(worker), "{worker}: {growth}, {expected}, {}", slack(worker));
            prop_assert_eq!(*growth, objective.growth(&batches.workers()[worker], &request));
        }
        let (mut odd, some): (Vec<f64>, Vec<_>) = (Vec::new(), (0..workers.len()).rev().step_by(2).map(WorkerIndex).collect());
        batches.to_some(&rule, &request, &some, &mut odd);
        for (worker, (growth, odd)) in growth.iter().zip(&odd).enumerate() {
            let asked = some.contains(&WorkerIndex(worker));
            prop_assert_eq!(*odd, if asked { *growth } else { f64::INFINITY });
        }

        let loads: Vec<f64> = workers.iter().map(|batch| batch.len() as f64).collect();
        let limit = cap.map_or(f64::INFINITY, |cap| cap * mean(&loads));
        let fleet: Vec<Worker> = loads.iter().map(|&load| Worker { load, available: true }).collect();
        let evidence = Evidence::Running { workers: &growth, similarities: Err(Reason::NoBlob) };
        let draw = Draw { sequence: 0, entropy: 0 };
        let decision = decide(&rule, evidence, &Regions::NONE, &fleet, draw);
        let mut best: Option<usize> = None;
        for worker in 0..workers.len() {
            let is_less = |best: usize| (growth[worker], loads[worker]) < (growth[best], loads[best]);
            if loads[worker] <= limit && best.is_none_or(is_less) {
                best = Some(worker);
            }
        }
        prop_assert_eq!((Some(decision.target.0), decision.reason), (best, Reason::Marginal));
    }
}

#[test]
fn a_batch_of_which_nothing_is_known_is_judged_by_its_size() {
    let mut batches = batches(Measure::Usage, 3);
    for (worker, requests) in [(0, 3), (1, 1), (2, 2)] {
        for _ in 0..requests {
            batches.join(WorkerIndex(worker), &Footprint::unknown(10));
        }
    }
    let request = seen(
        &batches,
        &(Some((vec![4, 4, 0, 0, 0, 0, 0, 0, 4, 4], 4)), 0),
    );
    let mut growth = Vec::new();
    batches.to_each(&Rule::of(Policy::Marginal), &request, &mut growth);
    assert!(growth[1] < growth[2] && growth[2] < growth[0], "{growth:?}");
    // Top-2 of 5, one request there: 2 × (1 − 2/5) more.
    assert!((batches.workers()[1].extra_experts(&request) - 1.2).abs() < 1e-6);
    assert!((batches.workers()[1].expected_experts(&request) - 2.0).abs() < 1e-6);
}

#[test]
fn whoever_has_no_footprint_is_unknown_by_the_totals_and_leaves_no_trace() {
    let mut batches = batches(Measure::Usage, 2);
    let empty = batches.clone();
    let written = (Some((vec![4, 4, 0, 0, 0, 0, 0, 0, 4, 4], 4)), 7);
    let known = footprint(&batches, &written);
    batches.join(WorkerIndex(0), &known);
    batches.set_totals(WorkerIndex(0), 3, 90);
    let mut joined = empty.clone();
    joined.join(WorkerIndex(0), &known);
    joined.join(WorkerIndex(0), &Footprint::unknown(80));
    joined.join(WorkerIndex(0), &Footprint::unknown(3));
    assert_eq!(batches, joined);
    // Fewer than are known to be there: those who count lag behind, or we do.
    batches.set_totals(WorkerIndex(0), 0, 0);
    assert_eq!(batches.workers()[0].requests(), 1);
    batches.leave(WorkerIndex(0), &known);
    batches.set_totals(WorkerIndex(0), 0, 0);
    batches.set_totals(WorkerIndex(9), 5, 5);
    assert_eq!(batches, empty);
}

#[test]
fn of_another_shape_is_as_good_as_unknown() {
    let mut batches = batches(Measure::Usage, 1);
    let other = Batches::new(Measure::Usage, GEOMETRY, vec![0], 1).unwrap();
    let mut request = Request::default();
    assert!(other.see(&[1.0, 0.0, 0.0, 0.0, 1.0], 1, 7, &mut request));
    let empty = batches.clone();
    batches.join(WorkerIndex(0), &request.footprint());
    let [batch] = batches.workers() else { panic!() };
    assert_eq!(
        (batch.requests(), batch.known(), batch.kv_tokens()),
        (1, 0, 7)
    );
    assert!((batch.extra_experts(&request) - 1.2).abs() < 1e-6);
    assert_eq!(batch.cosine(&request), None);
    batches.leave(WorkerIndex(0), &request.footprint());
    assert_eq!(batches, empty);
    // Nor is a worker that is not there.
    batches.join(WorkerIndex(9), &request.footprint());
    assert_eq!(batches, empty);
}

#[test]
fn what_makes_no_probabilities_is_not_seen() {
    let batches = batches(Measure::Usage, 1);
    let good = [1.0; LENGTH];
    let mut request = Request::default();
    for (counts, tokens) in [
        (&good[..], 0),
        (&good[..9], 5),
        (&[0.0; LENGTH][..], 5),
        (&[f32::NAN; LENGTH][..], 5),
        (&[], 5),
    ] {
        assert!(batches.see(&good, 5, 0, &mut request));
        assert!(
            !batches.see(counts, tokens, 3, &mut request),
            "{counts:?}, {tokens}"
        );
        assert_eq!(request.footprint(), Footprint::unknown(3));
    }
}

#[test]
fn layers_must_be_the_models() {
    for layers in [vec![], vec![4], vec![1, 1], vec![2, 0]] {
        let error = Batches::new(Measure::Usage, GEOMETRY, layers, 1).unwrap_err();
        assert!(matches!(error, TransformError::Layers { .. }));
    }
}
