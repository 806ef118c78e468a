use std::sync::Arc;
use std::time::Duration;

use eldr_core::decide::Policy;
use eldr_core::engine::{Activation, Experts};
use eldr_core::signature::{Encoding, Geometry, Signature};

use super::ceiling::Ceiling;
use super::judge::{Changes, Harm, Judged};
use super::*;
use crate::simulate::compare::Estimate;
use crate::simulate::measure::Phase;
use crate::simulate::workload::Request;
use crate::simulate::{Outcome, Spread, Times};
use crate::trace::{Location, Record};

const GEOMETRY: Geometry = Geometry {
    layers: 1,
    experts: 8,
};

/// Requests of two kinds, one of each half of the experts, and the same as what is replayed.
fn trace(count: usize) -> (Requests, Workload) {
    let mut set: Option<Requests> = None;
    let mut requests = Vec::new();
    for n in 0..count {
        let mut counts = vec![0u16; 8];
        for expert in 0..4 {
            counts[(n % 2) * 4 + expert] = 10 + (n * 7 + expert * 3) as u16 % 5;
        }
        let signature = Signature::dense(GEOMETRY, counts.clone(), Some(30)).unwrap();
        let header = signature.encode(Encoding::U16);
        let record = Record {
            id: n.to_string(),
            prefill: Some(header.clone()),
            at: Location {
                file: "t".into(),
                line: n as u64 + 1,
            },
            ..Record::default()
        };
        let set = set.get_or_insert_with(|| Requests::new(&signature));
        set.push(&record, &signature).unwrap();
        let activation = Activation::from_counts(GEOMETRY, &counts, 30).unwrap();
        requests.push(Request {
            record: n.to_string().into(),
            trace: 0,
            label: Some(["x", "y"][n % 2].into()),
            signature: Some(header.into()),
            ts: None,
            prompt_tokens: Some(30),
            decode_tokens: Some(20),
            experts: Experts::Expected(Arc::new(activation)),
        });
    }
    let workload = Workload {
        geometry: GEOMETRY,
        requests,
        exact: false,
        skipped: 0,
    };
    (set.unwrap(), workload)
}

const EFFORT: Effort = Effort {
    splits: 3,
    seeds: 2,
    seed: 7,
    grid: Grid::Quick,
    slo_tpot_ms: None,
};

fn with_question<T>(count: usize, then: impl FnOnce(Question<'_>) -> T) -> T {
    let (requests, workload) = trace(count);
    let workers: Vec<String> = (0..4).map(|n| format!("decode-{n}")).collect();
    let cluster = Cluster {
        decode_workers: workers.len(),
        duration: Duration::from_secs(9),
        ..Cluster::default()
    };
    then(Question {
        requests: &requests,
        workload: &workload,
        cluster: &cluster,
        plan: Plan {
            times: Times::Drawn {
                rate_per_s: 20.0,
                shape: 1.0,
            },
            duration: cluster.duration,
            lengths: None,
            mix: None,
            decode_tokens: None,
            permute_signatures: false,
        },
        workers: &workers,
        policies: &candidates::POLICIES,
        other: None,
    })
}

#[test]
fn what_evaluates_is_the_same_in_every_split_and_calibrates_in_none() {
    with_question(120, |question| {
        let splits = split::splits(question.requests, EFFORT).unwrap();
        assert_eq!(splits.len(), 3);
        assert_ne!(splits[0].tuning, splits[1].tuning);
        for split in &splits {
            assert_eq!(split.evaluation, splits[0].evaluation);
            let parts = [&split.fitted, &split.tuning, &split.evaluation];
            assert_eq!(parts.map(Vec::len), [40, 20, 60]);
            let mut all: Vec<usize> = parts.into_iter().flatten().copied().collect();
            all.sort_unstable();
            assert!(all.into_iter().eq(0..120));
        }
        assert_eq!(splits, split::splits(question.requests, EFFORT).unwrap());
    });
}

#[test]
fn too_few_requests_are_no_ground_for_advice() {
    with_question(REQUESTS_MIN - 1, |question| {
        assert!(split::splits(question.requests, EFFORT).is_err());
    });
}

#[test]
fn a_wrong_calibration_meets_only_kinds_that_it_does_not_know() {
    with_question(120, |question| {
        let splits = split::splits(question.requests, EFFORT).unwrap();
        let grounds = splits[0].grounds(question, None).unwrap();
        let sizes = [&grounds.tuning, &grounds.calibration, &grounds.evaluation];
        assert_eq!(
            sizes.map(|ground| ground.workload.requests.len()),
            [20, 60, 60]
        );
        for ground in sizes {
            assert!(ground.has(Case::WrongCalibration) && ground.has(Case::FlashCrowd));
            let change = ground.change.as_ref().unwrap();
            for (requests, label) in change.requests.iter().zip(["x", "y"]) {
                let labels = requests
                    .iter()
                    .map(|&at| &change.workload.requests[at].label);
                assert!(labels.clone().count() > 0);
                assert!(labels.flatten().all(|found| &**found == label));
            }
        }
        let mut kinds: Vec<usize> = grounds.evaluation.kinds.concat();
        kinds.sort_unstable();
        assert!(kinds.into_iter().eq(0..60));
    });
}

#[test]
fn some_of_the_requests_are_what_was_read_of_them() {
    let (requests, _) = trace(10);
    let picked = requests.pick(&[1, 4, 9]);
    assert_eq!(picked.len(), 3);
    for (place, index) in [1, 4, 9].into_iter().enumerate() {
        assert_eq!(picked.prefill_of(place), requests.prefill_of(index));
        assert_eq!(picked.decode_of(place), None);
        assert_eq!(picked.name(place), requests.name(index));
    }
    let all: Vec<usize> = (0..10).collect();
    assert_eq!(requests.pick(&all), requests);
}

#[test]
fn every_policy_is_tried_with_caps_down_to_the_mean() {
    for grid in [Grid::Full, Grid::Quick] {
        for policy in candidates::POLICIES {
            let specs = grid.candidates(policy, 1).unwrap();
            let caps = specs.iter().map(|spec| spec.max_load_factor);
            assert!(caps.clone().any(|cap| cap == Some(Some(1.0))), "{policy:?}");
            assert!(caps.flatten().all(|cap| cap.is_some()), "{policy:?}");
            let with_q = specs.iter().all(|spec| spec.exponent.is_some());
            assert_eq!(with_q, matches!(policy, Policy::Hybrid | Policy::Marginal));
            // Among few drawn workers only where several gateways see the same old loads.
            let plain = |spec: &PolicySpec| spec.candidates.is_none() && spec.refit.is_none();
            assert!(specs.iter().all(plain));
            let several = grid.candidates(policy, 4).unwrap();
            let drawn = several.iter().any(|spec| spec.candidates == Some(2));
            assert_eq!(drawn, policy == Policy::Band);
            let follows = several.iter().any(|spec| spec.refit.is_some());
            assert_eq!(follows, matches!(policy, Policy::Band | Policy::Hybrid));
        }
    }
}

fn spread(ms: f64) -> Spread {
    Spread {
        mean: ms,
        p50: ms,
        p99: ms,
    }
}

#[test]
fn intervals_are_over_splits_and_not_over_their_runs() {
    // Runs differ, splits do not.
    let own = [9.0, 11.0, 9.0, 11.0].map(spread);
    let other = [spread(10.0); 4];
    let changes = judge::changes(&own, [&other; 3], 2);
    assert!(changes.mean.mean.abs() < 1e-9);
    assert!(changes.mean.plus_minus.unwrap() < 1e-9);
    // Each run by itself: −10, +10, −10, +10.
    let changes = judge::changes(&own, [&other; 3], 1);
    assert!(changes.mean.plus_minus.unwrap() > 10.0);
    // 9 less 10 and 11 less 10, in points of 20.
    let points = judge::differences(&own, [&other; 3], [&[spread(20.0); 4]; 3], 1);
    assert!(points.p50.mean.abs() < 1e-9);
    let points = judge::differences(&own[..1], [&other; 3], [&[spread(20.0); 4]; 3], 1);
    assert_eq!(points.p50.mean, -5.0);
}

/// A run whose phases have these times.
fn changing(before: f64, after: f64) -> Outcome {
    let phase = |ms| Phase {
        tpot_ms: spread(ms),
        ..Phase::default()
    };
    Outcome {
        phases: vec![phase(before), phase(after)],
        ..Outcome::default()
    }
}

#[test]
fn what_is_kept_is_the_gain_after_the_change_as_a_part_of_that_before() {
    // Two splits of two runs. The best load balancer is another one in each phase.
    let balancers = [vec![changing(10.0, 12.0); 4], vec![changing(11.0, 10.0); 4]];
    let balancers = balancers.each_ref().map(|runs| runs.as_slice());
    let of = |after: f64| {
        let own = [8.0, 10.0, 8.0, 10.0].map(|before| changing(before, after));
        adapt::of_runs(&own, &balancers, 2)
    };
    let found = of(9.1);
    assert!((found.before.mean.mean + 10.0).abs() < 1e-9);
    assert!((found.after.mean.mean + 9.0).abs() < 1e-9);
    let kept = found.kept[0].unwrap();
    assert!((kept.mean - 90.0).abs() < 1e-9 && found.holds, "{found:?}");
    assert!(!of(9.3).holds);
    // Where nothing was gained nothing is kept.
    let worse = vec![changing(10.5, 9.0); 4];
    assert_eq!(adapt::of_runs(&worse, &balancers, 2).kept, [None; 3]);
}

#[test]
fn who_keeps_its_gain_goes_first_unless_it_gains_little() {
    let first = |found: [(f64, bool); 3]| {
        let mut tuned = found.map(|(score, adapts)| tune::Tuned {
            spec: spec("band").unwrap(),
            fit_index: 0,
            fit: None,
            score,
            adapts,
        });
        tune::order(&mut tuned);
        tuned.map(|tuned| tuned.score)
    };
    let found = [(-8.5, true), (-10.0, false), (-9.0, false)];
    assert_eq!(first(found), [-8.5, -10.0, -9.0]);
    assert_eq!(
        first([(-7.9, true), (-10.0, false), (-9.0, false)])[0],
        -10.0
    );
    assert_eq!(
        first([(-9.0, true), (-10.0, true), (-8.0, false)])[0],
        -10.0
    );
}

#[test]
fn traffic_changes_half_way_to_what_the_blob_does_not_know() {
    with_question(120, |question| {
        let splits = split::splits(question.requests, EFFORT).unwrap();
        let other = Traffic {
            requests: question.requests,
            workload: question.workload,
        };
        let with_other = Question {
            other: Some(other),
            ..question
        };
        for (question, other) in [(question, None), (with_other, Some(&splits[1]))] {
            let ground = splits[0].grounds(question, other).unwrap().evaluation;
            let trial = Trial {
                split: 0,
                fit: 0,
                case: Case::AbruptChange,
                seed: 3,
                spec: spec("least_loaded").unwrap(),
            };
            let outcome = ground.run(&trial, None).unwrap();
            let phases: Vec<f64> = outcome.phases.iter().map(|phase| phase.from_s).collect();
            assert_eq!(phases, [0.0, 4.5]);
            assert!(outcome.phases.iter().all(|phase| phase.requests > 0));
        }
    });
}

fn estimate(mean: f64, plus_minus: f64) -> Estimate {
    Estimate {
        mean,
        plus_minus: Some(plus_minus),
    }
}

fn changes(mean: f64, p50: f64, p99: f64) -> Changes {
    let [mean, p50, p99] = [mean, p50, p99].map(|change| estimate(change, 1.0));
    Changes { mean, p50, p99 }
}

fn judged(against_best: Changes) -> Judged {
    Judged {
        policy: "hybrid".into(),
        balances: false,
        mean_ms: 1.0,
        p50_ms: 1.0,
        p99_ms: 1.0,
        batch: 8.0,
        experts: 6.0,
        against_best,
        best: ["least_loaded", "p2c", "round_robin"].map(Into::into),
    }
}

#[test]
fn it_deploys_only_what_is_better_beyond_chance_harmless_and_due_to_signatures() {
    let ceiling = Ceiling {
        experts: 8,
        top_k: 2.0,
        batch: 8.0,
        random: 7.0,
        now: 6.0,
        alike: 4.0,
        percent: 10.0,
    };
    let verdict = |own: Changes, placebo: f64, holds: bool, ceiling: &Ceiling| {
        let harm = Harm {
            case: Case::Permuted,
            against_least_loaded: Some(changes(0.0, 0.0, 0.0)),
            holds,
        };
        let placebo = judged(changes(placebo, 0.0, 0.0));
        verdict::verdict(&[judged(own)], &[harm], &placebo, ceiling, None)
    };
    let good = verdict(changes(-8.0, -9.0, -3.0), 0.1, true, &ceiling);
    assert_eq!((good.deploy, good.policy.as_str()), (true, "hybrid"));
    assert!(verdict(changes(-8.0, -9.0, 0.5), 0.1, true, &ceiling).deploy);
    assert!(good.warnings.is_empty());

    let told = |own, placebo, holds, ceiling: &Ceiling, what: &str| {
        let verdict = verdict(own, placebo, holds, ceiling);
        assert!(!verdict.deploy && verdict.policy == "least_loaded");
        let reasons = verdict.reasons.join("\n");
        assert!(reasons.contains(what), "{reasons}");
    };
    told(changes(-0.5, -9.0, -3.0), 0.1, true, &ceiling, "mean TPOT");
    told(changes(-8.0, 0.5, -3.0), 0.1, true, &ceiling, "P50 TPOT");
    told(changes(-8.0, -9.0, 1.5), 0.1, true, &ceiling, "P99 TPOT");
    told(changes(-8.0, -9.0, -3.0), 0.1, false, &ceiling, "permuted");
    told(
        changes(-8.0, -9.0, -3.0),
        -5.0,
        true,
        &ceiling,
        "not signatures",
    );
    let little = Ceiling {
        percent: 1.0,
        ..ceiling
    };
    told(changes(0.0, 0.0, 0.0), 0.0, true, &little, "little to gain");
    let idle = Ceiling {
        batch: 1.2,
        ..ceiling
    };
    told(changes(0.0, 0.0, 0.0), 0.0, true, &idle, "load is low");
}

#[test]
fn the_ceiling_is_what_batches_of_one_kind_of_request_would_gain() {
    with_question(120, |question| {
        let balancer = Judged {
            balances: true,
            experts: 7.5,
            ..judged(changes(0.0, 0.0, 0.0))
        };
        let ceiling = ceiling::ceiling(question, &[balancer]);
        // Eight requests, each of which uses four of eight experts with 1/3 to 1/2 of its tokens.
        assert!(ceiling.alike > 3.8 && ceiling.alike < 4.0, "{ceiling:?}");
        assert!(ceiling.percent > 0.0 && ceiling.percent < 100.0);
        let step = question.cluster.step;
        let at_the_same_batch = step.b_ms * (7.5 - ceiling.alike) / step.step_ms(7.5, 8, 0);
        assert!(ceiling.percent > 100.0 * at_the_same_batch, "{ceiling:?}");
    });
}
