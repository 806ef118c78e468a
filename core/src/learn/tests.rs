use proptest::prelude::*;

use super::*;
use crate::batch::{Footprint, Measure};
use crate::signature::Geometry;

const PRIOR: StepModel = StepModel {
    t0_ms: 5.0,
    b_ms: 0.2,
    c_ms: 0.05,
    kv_ms_per_1k: 0.0,
};

fn met(experts: f64, requests: f64) -> Met {
    Met {
        experts,
        requests,
        kv_tokens: 0.0,
    }
}

/// Experts grow with requests, as they do, and differ among batches of one size.
fn load(n: usize) -> Met {
    let requests = (n % 23) as f64;
    let spread = [0.0, 3.0, -3.0, 1.5][n % 4];
    met(
        (40.0 * (1.0 - 0.9f64.powf(requests)) + spread).max(0.0),
        requests,
    )
}

fn learned(prior: StepModel, requests: usize, step_ms: impl Fn(usize, Met) -> f64) -> StepModel {
    let mut learner = Learner::new(prior, 0);
    for n in 0..requests {
        learner.learn(load(n), step_ms(n, load(n)));
    }
    learner.model()
}

#[test]
fn what_was_stated_stands_until_there_is_reason_to_doubt_it() {
    assert_eq!(Learner::new(PRIOR, 3).model(), PRIOR);
    // Always the same load tells the level and nothing else.
    let mut learner = Learner::new(PRIOR, 0);
    for _ in 0..1_000 {
        learner.learn(met(30.0, 10.0), 14.0);
    }
    let StepModel {
        t0_ms, b_ms, c_ms, ..
    } = learner.model();
    assert_eq!((b_ms, c_ms), (PRIOR.b_ms, PRIOR.c_ms));
    assert!((t0_ms - (14.0 - 6.0 - 0.5)).abs() < 1e-9, "{t0_ms}");
}

#[test]
fn signatures_that_say_nothing_make_experts_cost_nothing() {
    // Steps cost by size; the experts that are expected beyond that are noise.
    let model = learned(PRIOR, 1_000, |_, met| 8.0 + 0.4 * met.requests);
    assert!(model.b_ms < 0.02, "{model:?}");
    let model = learned(PRIOR, 1_000, |n, met| {
        PRIOR.step_ms(load(n).experts, met.requests as usize, 0)
    });
    assert!((model.b_ms - PRIOR.b_ms).abs() < 0.01, "{model:?}");
}

#[test]
fn a_stall_is_no_lesson() {
    let steady = |_: usize, met: Met| PRIOR.step_ms(met.experts, met.requests as usize, 0);
    let stalls = |n: usize, met: Met| match n % 50 {
        49 => 1_000.0,
        _ => steady(n, met),
    };
    let (steady, stalls) = (learned(PRIOR, 1_000, steady), learned(PRIOR, 1_000, stalls));
    assert!(
        (steady.b_ms - stalls.b_ms).abs() < 0.3 * PRIOR.b_ms,
        "{stalls:?}"
    );
    assert!((steady.t0_ms - stalls.t0_ms).abs() < 2.0, "{stalls:?}");
}

#[test]
fn kv_caches_cost_what_is_stated() {
    let prior = StepModel {
        kv_ms_per_1k: 0.5,
        ..PRIOR
    };
    let mut learner = Learner::new(prior, 0);
    for n in 0..1_000 {
        let met = Met {
            kv_tokens: 1_000.0 * (n % 7) as f64,
            ..load(n)
        };
        learner.learn(
            met,
            prior.step_ms(met.experts, met.requests as usize, met.kv_tokens as u64),
        );
    }
    let model = learner.model();
    assert!(
        (model.t0_ms - 5.0).abs() < 0.1 && model.kv_ms_per_1k == 0.5,
        "{model:?}"
    );
}

#[test]
fn a_request_is_held_against_what_it_met() {
    let geometry = Geometry {
        layers: 1,
        experts: 4,
    };
    let mut batches = Batches::new(Measure::Usage, geometry, vec![0], 2).unwrap();
    let mut request = Request::default();
    batches.see(&[10.0, 10.0, 0.0, 0.0], 10, 0, &mut request);
    let (worker, footprint) = (WorkerIndex(1), request.footprint());
    let mut learner = Learner::new(
        StepModel {
            b_ms: 1.0,
            c_ms: 1.0,
            ..PRIOR
        },
        2,
    );
    // The first alone for 100 ms, with the second for 300 more: 1.75 requests in the mean, and two experts.
    let first = learner.begin(worker, Some(&request), 1_000.0);
    batches.join(worker, &footprint);
    learner.runs(worker, &batches, 1_000.0);
    let _second = learner.begin(worker, None, 1_100.0);
    batches.join(worker, &Footprint::unknown(0));
    learner.runs(worker, &batches, 1_100.0);
    learner.end(worker, first, 20.0, 1_400.0);
    let model = learner.model();
    let experts = batches.workers()[1].expected_experts(&request);
    let expected = 20.0 - 1.75 - (0.25 * 4.0 * 0.49 + 0.75 * experts);
    assert!(
        (model.t0_ms - expected).abs() < 0.05,
        "{model:?} {expected}"
    );
    // Workers that are not there teach nothing.
    learner.end(WorkerIndex(2), first, 90.0, 1_500.0);
    learner.runs(WorkerIndex(2), &batches, 1_500.0);
    assert_eq!(learner.model(), model);
}

proptest! {
    #[test]
    fn what_steps_cost_is_found(
        t0 in 1.0..20.0, b in 0.02..1.0, c in 0.0..1.0, off in [0.3..3.0, 0.3..3.0],
    ) {
        let truth = StepModel { t0_ms: t0, b_ms: b, c_ms: c, kv_ms_per_1k: 0.0 };
        let prior = StepModel { t0_ms: 9.0, b_ms: b * off[0], c_ms: c * off[1], kv_ms_per_1k: 0.0 };
        let model = learned(prior, 2_000, |_, met| truth.step_ms(met.experts, met.requests as usize, 0));
        for n in 0..23 {
            let Met { experts, requests, .. } = load(n);
            let (found, expected) = (model.step_ms(experts, requests as usize, 0), truth.step_ms(experts, requests as usize, 0));
            prop_assert!((found / expected - 1.0).abs() < 0.03, "{found} {expected} {model:?} {truth:?}");
        }
    }

    #[test]
    fn whatever_is_told_the_model_stays_one(
        told in proptest::collection::vec((any::<f64>(), any::<f64>(), any::<f64>()), 0..40),
        bounded in proptest::collection::vec((0.0..1e3, 0.0..1e3, 1e-3..1e5), 0..40),
    ) {
        let mut learner = Learner::new(PRIOR, 1);
        let mut batches = Batches::new(Measure::Usage, Geometry { layers: 1, experts: 2 }, vec![0], 1).unwrap();
        let worker = WorkerIndex(0);
        for (now, step, later) in told {
            let stay = learner.begin(worker, None, now);
            batches.join(worker, &Footprint::unknown(u32::MAX));
            learner.runs(worker, &batches, now);
            learner.end(worker, stay, step, later);
        }
        for (experts, requests, step) in bounded {
            learner.learn(met(experts, requests), step);
        }
        let StepModel { t0_ms, b_ms, c_ms, .. } = learner.model();
        for ms in [t0_ms, b_ms, c_ms] {
            prop_assert!(ms.is_finite() && ms >= 0.0, "{:?}", learner.model());
        }
    }
}
