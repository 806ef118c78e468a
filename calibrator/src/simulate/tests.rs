use std::sync::Arc;

use eldr_core::decide::{Decision, Policy, Reason, Rule, WorkerIndex};
use eldr_core::engine::{ExpertIds, Experts, Ranks, Speculation};
use eldr_core::signature::{Encoding, Geometry, Signature};

use super::changes::ChangeKind;
use super::policy::router;
use super::workload::Request;
use super::*;
use rand::RngExt as _;

pub(super) const GEOMETRY: Geometry = Geometry {
    layers: 1,
    experts: 8,
};

/// A request whose every token activates `experts`.
pub(super) fn request(label: &str, experts: &[u16], decode_tokens: u32) -> Request {
    let ids = ExpertIds::new(GEOMETRY, experts.len(), experts.to_vec()).unwrap();
    Request {
        record: label.into(),
        trace: 0,
        label: Some(label.into()),
        signature: None,
        ts: None,
        prompt_tokens: Some(100),
        decode_tokens: Some(decode_tokens),
        experts: Experts::Recorded(Arc::new(ids)),
    }
}

pub(super) fn workload(requests: Vec<Request>) -> Workload {
    Workload {
        geometry: GEOMETRY,
        requests,
        exact: true,
        skipped: 0,
    }
}

pub(super) fn arrival(at_ms: u64, request: usize) -> Arrival {
    Arrival {
        at: Duration::from_millis(at_ms),
        request,
        signature: request,
        prompt_tokens: 100,
        decode_tokens: 3,
        gateway: 0,
        entropy: 0,
    }
}

/// Steps of 10 ms and one more per distinct expert, prefill of 10 ms, no transfer.
pub(super) fn cluster(decode_workers: usize) -> Cluster {
    Cluster {
        prefill_workers: 1,
        prefill_ms_per_token: 0.1,
        transfer_ms: 0.0,
        decode_workers,
        step: StepModel {
            t0_ms: 10.0,
            b_ms: 1.0,
            c_ms: 0.0,
            kv_ms_per_1k: 0.0,
        },
        ..Cluster::default()
    }
}

fn round_robin(cluster: &Cluster, workload: &Workload, arrivals: &[Arrival]) -> Outcome {
    let spec: PolicySpec = "round_robin".parse().unwrap();
    let mut router = router(&spec, &Rule::default(), None, workload, cluster).unwrap();
    run(cluster, workload, arrivals, router.as_mut())
}

#[test]
fn one_request_takes_its_prefill_and_its_steps() {
    let workload = workload(vec![request("a", &[0, 1], 3)]);
    let cluster = Cluster {
        transfer_ms: 5.0,
        ..cluster(1)
    };
    let outcome = round_robin(&cluster, &workload, &[arrival(0, 0)]);
    assert_eq!(outcome.ttft_ms.p50, 10.0 + 5.0 + 12.0);
    assert_eq!(outcome.tpot_ms.p50, 12.0);
    assert_eq!((outcome.experts_per_step, outcome.batch), (2.0, 1.0));
}

#[test]
fn prefill_is_first_come_first_served() {
    let workload = workload(vec![request("a", &[0], 3)]);
    let arrivals = [arrival(0, 0), arrival(1, 0), arrival(2, 0)];
    // They end at 10, 20 and 30 ms; a worker each, so that nothing else waits.
    let outcome = round_robin(&cluster(3), &workload, &arrivals);
    let waits = [10.0 + 11.0, 20.0 - 1.0 + 11.0, 30.0 - 2.0 + 11.0];
    assert_eq!(outcome.ttft_ms.mean, waits.iter().sum::<f64>() / 3.0);
    let two = Cluster {
        prefill_workers: 2,
        ..cluster(3)
    };
    let outcome = round_robin(&two, &workload, &arrivals);
    assert_eq!(outcome.ttft_ms.mean, (21.0 + 21.0 + 29.0) / 3.0);
    let none = Cluster {
        prefill_workers: 0,
        ..cluster(3)
    };
    assert_eq!(round_robin(&none, &workload, &arrivals).ttft_ms.mean, 11.0);
}

#[test]
fn requests_that_share_experts_are_faster_together() {
    let requests = vec![request("a", &[0, 1, 2], 3), request("b", &[4, 5, 6], 3)];
    let workload = workload(requests);
    let alike = [arrival(0, 0), arrival(0, 1), arrival(0, 0), arrival(0, 1)];
    let mixed = [arrival(0, 0), arrival(0, 0), arrival(0, 1), arrival(0, 1)];
    let cluster = Cluster {
        prefill_workers: 0,
        ..cluster(2)
    };
    // The worker that is first asked for begins alone; from then on two requests are in each step.
    let alike = round_robin(&cluster, &workload, &alike);
    let mixed = round_robin(&cluster, &workload, &mixed);
    assert!(alike.tpot_ms.mean < mixed.tpot_ms.mean);
    assert_eq!(alike.experts_per_step, 3.0);
}

#[test]
fn gateways_see_each_other_when_they_are_told() {
    let mut views = views::Views::new(2, 2, false);
    let mut seen = Vec::new();
    let mut loads = |views: &views::Views, gateway| {
        views.of(gateway, &mut seen);
        seen.iter().map(|worker| worker.load).collect::<Vec<_>>()
    };
    views.enter(0, 1, 1);
    views.enter(1, 0, 1);
    assert_eq!(
        (loads(&views, 0), loads(&views, 1)),
        (vec![0.0, 1.0], vec![1.0, 0.0])
    );
    views.share();
    views.leave(0, 1, 1);
    assert_eq!(
        (loads(&views, 0), loads(&views, 1)),
        (vec![1.0, 0.0], vec![1.0, 1.0])
    );
    let mut live = views::Views::new(2, 2, true);
    live.enter(0, 1, 1);
    assert_eq!(loads(&live, 1), [0.0, 1.0]);
}

#[test]
fn requests_of_a_failed_worker_are_served_elsewhere_and_all_are_done() {
    let workload = workload(vec![request("a", &[0], 3)]);
    let arrivals: Vec<Arrival> = (0..20).map(|n| arrival(n * 7, 0)).collect();
    let change = |at_ms, kind| Change {
        at: Duration::from_millis(at_ms),
        worker: 0,
        kind,
    };
    let failing = Cluster {
        prefill_workers: 4,
        changes: vec![change(40, ChangeKind::Fail), change(90, ChangeKind::Join)],
        ..cluster(2)
    };
    let outcome = round_robin(&failing, &workload, &arrivals);
    assert_eq!(outcome.requests, 20);
    assert!(outcome.restarted > 0);
    assert_eq!(outcome.reasons["blind"], 20 + outcome.restarted);

    let draining = Cluster {
        prefill_workers: 4,
        changes: vec![change(0, ChangeKind::Drain)],
        ..cluster(2)
    };
    let outcome = round_robin(&draining, &workload, &arrivals);
    assert_eq!(
        (outcome.restarted, outcome.busiest),
        (0, 2.0),
        "the other got all"
    );
}

#[test]
fn with_expert_parallelism_steps_wait_for_the_busiest_rank() {
    let workload = workload(vec![request("a", &[0, 1, 2, 4], 3)]);
    let own = [vec![0, 1, 4, 5], vec![2, 3, 6, 7]];
    let two = [
        Arc::new(Ranks::contiguous(GEOMETRY, 2).unwrap()),
        Arc::new(Ranks::new(GEOMETRY, &[own.to_vec()]).unwrap()),
    ];
    // In turn to both workers: 0, 1 and 2 are on one rank; 0, 1 and 4 are.
    let tpot = |ranks: &[Arc<Ranks>]| {
        let cluster = Cluster {
            ranks: ranks.to_vec(),
            ..cluster(2)
        };
        let outcome = round_robin(&cluster, &workload, &[arrival(0, 0), arrival(0, 0)]);
        (outcome.tpot_ms.mean, outcome.experts_per_step)
    };
    assert_eq!(tpot(&[]), (14.0, 4.0));
    assert_eq!(tpot(&two[..1]), (13.0, 3.0));
    assert_eq!(tpot(&two), (13.0, 3.0));
    let apart = Ranks::new(GEOMETRY, &[vec![vec![0, 1, 3, 5], vec![2, 4, 6, 7]]]).unwrap();
    let mixed = [Arc::clone(&two[0]), Arc::new(apart)];
    assert_eq!(tpot(&mixed), ((13.0 + 12.0) / 2.0, 2.5));
}

#[test]
fn speculation_takes_fewer_steps_that_activate_more() {
    let ids = ExpertIds::new(GEOMETRY, 1, vec![0, 1, 2, 3, 4, 5, 6]).unwrap();
    let walking = Request {
        experts: Experts::Recorded(Arc::new(ids)),
        ..request("a", &[0], 7)
    };
    let workload = workload(vec![walking]);
    let cluster = Cluster {
        speculation: Speculation {
            verify: 3,
            accept: 2,
        },
        ..cluster(1)
    };
    let seven = Arrival {
        decode_tokens: 7,
        ..arrival(0, 0)
    };
    let outcome = round_robin(&cluster, &workload, &[seven]);
    // Four steps of 13 ms; the first ends with the first token.
    assert_eq!(
        (outcome.experts_per_step, outcome.ttft_ms.p50),
        (3.0, 10.0 + 13.0)
    );
    assert_eq!(outcome.tpot_ms.mean, 3.0 * 13.0 / 6.0);
}

#[test]
fn loads_may_be_counted_in_tokens() {
    let workload = workload(vec![request("a", &[0], 3)]);
    let prompt = |at_ms, prompt_tokens| Arrival {
        prompt_tokens,
        decode_tokens: 50,
        ..arrival(at_ms, 0)
    };
    // A long prompt on one worker, then short ones: in requests they take turns.
    let arrivals: Vec<Arrival> = (0..9)
        .map(|n| prompt(n, if n == 0 { 10_000 } else { 100 }))
        .collect();
    let sent = |load_unit| {
        let cluster = Cluster {
            prefill_workers: 0,
            load_unit,
            ..cluster(2)
        };
        let spec: PolicySpec = "least_loaded".parse().unwrap();
        let mut router = router(&spec, &Rule::default(), None, &workload, &cluster).unwrap();
        let (_, served) = run_served(&cluster, &workload, &arrivals, router.as_mut());
        served
            .iter()
            .map(|served| served.worker)
            .collect::<Vec<_>>()
    };
    assert_eq!(sent(LoadUnit::Requests), [0, 1, 0, 1, 0, 1, 0, 1, 0]);
    assert_eq!(sent(LoadUnit::KvTokens), [0, 1, 1, 1, 1, 1, 1, 1, 1]);
}

#[test]
fn gateways_that_tell_each_other_what_runs_do_as_well_as_one() {
    let signature = |experts: [u16; 3]| {
        let mut counts = vec![0; 8];
        experts
            .iter()
            .for_each(|&expert| counts[usize::from(expert)] = 100);
        let signature = Signature::dense(GEOMETRY, counts, Some(100)).unwrap();
        Some(signature.encode(Encoding::U16).into())
    };
    let two = [("a", [0, 1, 2]), ("b", [4, 5, 6])].map(|(label, experts)| Request {
        signature: signature(experts),
        ..request(label, &experts, 40)
    });
    let workload = workload(two.into());
    let mut rng = ChaCha8Rng::seed_from_u64(1);
    let arrivals: Vec<Arrival> = (0..600)
        .map(|n| Arrival {
            decode_tokens: 20,
            gateway: rng.random_range(0..4),
            ..arrival(n * 15, rng.random_range(0..2))
        })
        .collect();
    let outcome = |gateways, share_batches| {
        let cluster = Cluster {
            prefill_workers: 0,
            gateways,
            share: Some(Duration::from_millis(5)),
            share_batches,
            ..cluster(4)
        };
        let spec: PolicySpec = "marginal".parse().unwrap();
        let mut router = router(&spec, &Rule::default(), None, &workload, &cluster).unwrap();
        run(&cluster, &workload, &arrivals, router.as_mut())
    };
    let (one, told, alone) = (outcome(1, false), outcome(4, true), outcome(4, false));
    let experts = [&one, &told, &alone].map(|outcome| outcome.experts_per_step);
    assert!(experts[1] < experts[2], "{experts:?}");
    assert!(
        (experts[1] - experts[0]).abs() < (experts[2] - experts[0]) / 2.0,
        "{experts:?}"
    );
    assert_eq!((one.told_bytes_per_s, alone.told_bytes_per_s), (0.0, 0.0));
    // 200 times a second a key and four workers, of which those with requests tell eight experts.
    let (least, most) = (199.0 * (8.0 + 4.0 * 16.0), 201.0 * (8.0 + 4.0 * 24.0));
    let told = told.told_bytes_per_s;
    assert!((least..most).contains(&told), "{told}");
}

#[test]
fn answers_are_as_long_as_the_last_ones() {
    let mut answers = views::Answers::default();
    assert_eq!(answers.expected(), 256);
    answers.learn(10);
    assert_eq!(answers.expected(), 10);
    answers.learn(20);
    assert_eq!(answers.expected(), 15);
    (0..1_000).for_each(|_| answers.learn(100));
    assert_eq!(answers.expected(), 100);
}

/// Tells what the event loop tells it.
#[derive(Default)]
struct Told {
    entered: usize,
    left: usize,
    in_flight_max: usize,
    step_ms: Vec<f64>,
}

impl Router for Told {
    fn choose(&mut self, ask: Ask<'_>) -> Decision {
        assert_eq!(ask.workers[0].load, (self.entered - self.left) as f64);
        Decision {
            target: WorkerIndex(0),
            reason: Reason::Blind,
            region: None,
            similarity: None,
            top: None,
            band: 0,
        }
    }

    fn entered(&mut self, seat: Seat) {
        assert_eq!((seat.gateway, seat.worker), (0, 0));
        self.entered += 1;
        self.in_flight_max = self.in_flight_max.max(self.entered - self.left);
    }

    fn left(&mut self, _: Seat, step_ms: Option<f64>) {
        self.left += 1;
        self.step_ms.extend(step_ms);
    }
}

#[test]
fn a_policy_is_told_who_comes_and_goes() {
    let workload = workload(vec![request("a", &[0], 3)]);
    let arrivals: Vec<Arrival> = (0..9).map(|n| arrival(n, 0)).collect();
    let mut told = Told::default();
    run(&cluster(1), &workload, &arrivals, &mut told);
    assert_eq!((told.entered, told.left), (9, 9));
    assert!(told.in_flight_max > 1);
    // Of an answer of three tokens, the steps of the last two.
    assert_eq!(told.step_ms.len(), 9);
    let alone = cluster(1).step.step_ms(1.0, 1, 0);
    assert!(told.step_ms.iter().all(|&ms| ms > 0.9 * alone));
}

fn plan(rate_per_s: f64, shape: f64) -> Plan<'static> {
    Plan {
        times: Times::Drawn { rate_per_s, shape },
        duration: Duration::from_secs(200),
        lengths: None,
        decode_tokens: None,
        permute_signatures: false,
        mix: None,
    }
}

#[test]
fn arrivals_come_at_the_rate_and_as_bursty_as_asked_for() {
    let workload = workload(vec![request("a", &[0], 3), request("b", &[1], 3)]);
    for shape in [1.0, 0.25] {
        let arrivals = plan(50.0, shape).arrivals(&workload, 7).unwrap();
        assert_eq!(arrivals, plan(50.0, shape).arrivals(&workload, 7).unwrap());
        assert_ne!(arrivals, plan(50.0, shape).arrivals(&workload, 8).unwrap());
        // Within four standard deviations of 10,000.
        let allowed = 400.0 / shape.sqrt();
        let count = arrivals.len() as f64;
        assert!((count - 10_000.0).abs() < allowed, "{count}");
        let gaps: Vec<f64> = arrivals
            .windows(2)
            .map(|pair| (pair[1].at - pair[0].at).as_secs_f64())
            .collect();
        let mean = gaps.iter().sum::<f64>() / gaps.len() as f64;
        let variance = gaps.iter().map(|gap| (gap - mean).powi(2)).sum::<f64>() / gaps.len() as f64;
        let coefficient = variance.sqrt() / mean;
        assert!(
            (coefficient * shape.sqrt() - 1.0).abs() < 0.1,
            "{coefficient}"
        );
        let ones = arrivals
            .iter()
            .filter(|arrival| arrival.request == 1)
            .count();
        assert!(
            ones.abs_diff(arrivals.len() / 2) <= 1,
            "each once before any again"
        );
    }
}

#[test]
fn recorded_times_are_kept_or_stretched_to_a_rate() {
    let at = |ts| Request {
        ts: Some(ts),
        ..request("a", &[0], 3)
    };
    let workload = workload(vec![at(107.0), at(100.0), at(101.0)]);
    let times = |rate_per_s| {
        let plan = Plan {
            times: Times::Trace { rate_per_s },
            ..plan(1.0, 1.0)
        };
        let arrivals = plan.arrivals(&workload, 1).unwrap();
        let seconds = |arrival: &Arrival| (arrival.request, arrival.at.as_secs_f64());
        arrivals.iter().map(seconds).collect::<Vec<_>>()
    };
    assert_eq!(times(None), [(1, 0.0), (2, 1.0), (0, 7.0)]);
    assert_eq!(times(Some(3.0 / 14.0)), [(1, 0.0), (2, 2.0), (0, 14.0)]);
}

/// Signatures that are the same for all, and experts that are not.
#[test]
fn true_usage_sees_what_signatures_do_not_tell() {
    let uniform = Signature::dense(GEOMETRY, vec![100; 8], Some(100)).unwrap();
    let header: Arc<str> = uniform.encode(Encoding::U16).into();
    let two = [("a", [0, 1, 2]), ("b", [4, 5, 6])].map(|(label, experts)| Request {
        signature: Some(Arc::clone(&header)),
        ..request(label, &experts, 40)
    });
    let workload = workload(two.into());
    let arrivals: Vec<Arrival> = (0..40)
        .map(|n| arrival(n * 3, (n as usize / 2) % 2))
        .collect();
    let setting = cluster(2);
    let experts = |name: &str| {
        let spec: PolicySpec = name.parse().unwrap();
        let run_by = Rule {
            max_load_factor: None,
            ..Rule::default()
        };
        let mut router = router(&spec, &run_by, None, &workload, &setting).unwrap();
        run(&setting, &workload, &arrivals, router.as_mut()).experts_per_step
    };
    assert!(experts("marginal:usage=decode") < experts("marginal") - 1.0);
    assert!(experts("batch_band:usage=decode") < experts("batch_band") - 1.0);
}

#[test]
fn every_policy_of_core_is_known_by_name() {
    for policy in Policy::ALL {
        let spec: PolicySpec = policy.name().parse().unwrap();
        assert_eq!(spec.kind, policy::PolicyKind::Rule(policy));
        assert_eq!(spec.is_load_balancer(), !policy.looks());
    }
}
