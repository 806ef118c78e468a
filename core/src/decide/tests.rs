use proptest::prelude::*;
use proptest::sample::select;

use super::*;

const DRAW: Draw = Draw {
    sequence: 0,
    entropy: 0,
};

fn idle(loads: &[f64]) -> Vec<Worker> {
    loads
        .iter()
        .map(|&load| Worker {
            load,
            available: true,
        })
        .collect()
}

fn one_worker_each(regions: usize) -> Regions {
    Regions::new((0..regions).map(|index| vec![WorkerIndex(index)]).collect())
}

fn band(tau: f32, cap: Option<f64>, similarities: &[f32], loads: &[f64]) -> usize {
    let rule = Rule {
        tau,
        max_load_factor: cap,
        ..Rule::default()
    };
    let regions = one_worker_each(loads.len());
    decide(
        &rule,
        Evidence::Similarities(similarities),
        &regions,
        &idle(loads),
        DRAW,
    )
    .target
    .0
}

#[test]
fn the_least_loaded_of_the_band_wins() {
    assert_eq!(band(0.1, None, &[0.9, 0.85, 0.2], &[3.0, 2.0, 0.0]), 1);
    assert_eq!(band(0.0, None, &[0.9, 0.85, 0.2], &[3.0, 2.0, 0.0]), 0);
}

#[test]
fn a_region_may_have_several_workers_and_a_worker_several_regions() {
    // Worker 1 serves both regions; the cap counts it once.
    let regions = [vec![0, 1], vec![1, 2]]
        .map(|workers| workers.into_iter().map(WorkerIndex).collect())
        .to_vec();
    let regions = Regions::new(regions);
    let rule = Rule {
        tau: 0.0,
        ..Rule::default()
    };
    let choose = |similarities: &[f32], loads: &[f64]| {
        let evidence = Evidence::Similarities(similarities);
        let decision = decide(&rule, evidence, &regions, &idle(loads), DRAW);
        (decision.target.0, decision.region.unwrap().0)
    };
    assert_eq!(choose(&[0.9, 0.5], &[2.0, 1.0, 0.0]), (1, 0));
    assert_eq!(choose(&[0.5, 0.9], &[0.0, 2.0, 1.0]), (2, 1));
    assert_eq!(choose(&[0.9, 0.5], &[0.0, 1.0, 0.0]), (0, 0));
    // Mean 10/3, cap 4.2: counted twice, worker 1 would lift it above its own load of 5.
    assert_eq!(choose(&[0.9, 0.5], &[5.0, 5.0, 0.0]), (2, 1));
}

#[test]
fn equal_loads_go_to_the_more_similar_then_to_the_lower_index() {
    assert_eq!(band(0.2, None, &[0.8, 0.9, 0.9], &[1.0, 1.0, 1.0]), 1);
}

#[test]
fn a_worker_above_the_cap_is_no_candidate_and_the_band_widens_to_the_next_most_similar() {
    assert_eq!(band(0.0, Some(1.25), &[0.9, 0.5, 0.6], &[4.0, 1.0, 1.0]), 2);
    assert_eq!(band(0.0, Some(1.25), &[0.9, 0.5, 0.6], &[1.0, 1.0, 1.0]), 0);
    // At the cap is not above it: mean 4, cap 5.
    assert_eq!(band(0.0, Some(1.25), &[0.9, 0.5, 0.6], &[5.0, 3.0, 4.0]), 0);
}

#[test]
fn the_mean_of_the_cap_is_over_workers_that_serve_a_region() {
    let rule = Rule {
        tau: 0.0,
        ..Rule::default()
    };
    let spare_is_idle = idle(&[4.0, 4.0, 0.0]);
    let regions = one_worker_each(2);
    let decision = decide(
        &rule,
        Evidence::Similarities(&[0.9, 0.5]),
        &regions,
        &spare_is_idle,
        DRAW,
    );
    assert_eq!(decision.target, WorkerIndex(0));
}

#[test]
fn ejected_workers_are_avoided_until_none_is_left() {
    let mut workers = idle(&[1.0, 2.0, 3.0]);
    let regions = one_worker_each(2);
    let evidence = Evidence::Similarities(&[0.9, 0.1]);
    let choose = |workers: &[Worker]| {
        let decision = decide(&Rule::default(), evidence, &regions, workers, DRAW);
        (decision.target.0, decision.reason)
    };
    assert_eq!(choose(&workers), (0, Reason::InBand));
    workers[0].available = false;
    assert_eq!(choose(&workers), (1, Reason::InBand));
    workers[1].available = false;
    assert_eq!(choose(&workers), (2, Reason::AllEjected));
    workers[2].available = false;
    assert_eq!(choose(&workers), (0, Reason::AllEjected));
}

#[test]
fn missing_evidence_goes_to_the_least_loaded_with_its_reason() {
    for reason in [
        Reason::NoBlob,
        Reason::NoSignature,
        Reason::MalformedSignature,
    ] {
        let decision = decide(
            &Rule::default(),
            Evidence::Missing(reason),
            &one_worker_each(3),
            &idle(&[2.0, 1.0, 1.0]),
            DRAW,
        );
        assert_eq!((decision.target.0, decision.reason), (1, reason));
    }
}

#[test]
fn without_running_batches_hybrid_is_band_and_the_others_are_blind() {
    let choose = |policy, evidence| {
        let rule = Rule::of(policy);
        let decision = decide(
            &rule,
            evidence,
            &one_worker_each(3),
            &idle(&[2.0, 1.0, 0.0]),
            DRAW,
        );
        (decision.target.0, decision.reason)
    };
    let seen = Evidence::Similarities(&[0.9, 0.8, 0.1]);
    assert_eq!(choose(Policy::Hybrid, seen), (1, Reason::InBand));
    assert_eq!(choose(Policy::Marginal, seen), (2, Reason::Blind));
    assert_eq!(choose(Policy::BatchBand, seen), (2, Reason::Blind));
    let only_batches = Evidence::Running {
        workers: &[0.0, 1.0, 2.0],
        similarities: Err(Reason::NoBlob),
    };
    assert_eq!(choose(Policy::Hybrid, only_batches), (2, Reason::NoBlob));
}

#[test]
fn round_robin_takes_turns_among_the_available() {
    let mut workers = idle(&[0.0; 4]);
    workers[1].available = false;
    let rule = Rule {
        policy: Policy::RoundRobin,
        ..Rule::default()
    };
    let turns: Vec<usize> = (0..6)
        .map(|sequence| {
            let draw = Draw {
                sequence,
                entropy: 7,
            };
            decide(
                &rule,
                Evidence::Missing(Reason::NoBlob),
                &Regions::NONE,
                &workers,
                draw,
            )
            .target
            .0
        })
        .collect();
    assert_eq!(turns, [0, 2, 3, 0, 2, 3]);
}

#[test]
fn names_in_configuration_are_the_names_in_metrics() {
    for policy in Policy::ALL {
        assert_eq!(serde_json::to_value(policy).unwrap(), policy.name());
    }
}

fn fleet() -> impl Strategy<Value = (Vec<Worker>, Vec<Vec<WorkerIndex>>, Vec<f32>)> {
    (1usize..7, 1usize..7).prop_flat_map(|(workers, regions)| {
        let load = prop_oneof![(0u32..6).prop_map(f64::from), Just(1e9)];
        let worker = (load, prop::bool::weighted(0.8))
            .prop_map(|(load, available)| Worker { load, available });
        let served_by = proptest::collection::vec((0..workers).prop_map(WorkerIndex), 1..4);
        let similarity = prop_oneof![select(vec![0.0f32, 0.5, 0.9, 0.95]), -1.0f32..1.0];
        (
            proptest::collection::vec(worker, workers),
            proptest::collection::vec(served_by, regions),
            proptest::collection::vec(similarity, regions),
        )
    })
}

/// The rule read aloud: sort the regions, take the band, filter, widen, sort the candidates.
fn oracle(
    rule: &Rule,
    similarities: &[f32],
    regions: &[Vec<WorkerIndex>],
    workers: &[Worker],
) -> (usize, Reason) {
    let mut order: Vec<usize> = (0..regions.len()).collect();
    order.sort_by(|&a, &b| similarities[b].total_cmp(&similarities[a]).then(a.cmp(&b)));
    let serving: Vec<f64> = (0..workers.len())
        .filter(|&w| workers[w].available && regions.iter().flatten().any(|index| index.0 == w))
        .map(|w| workers[w].load)
        .collect();
    let mean = serving.iter().sum::<f64>() / serving.len().max(1) as f64;
    let cap = rule
        .max_load_factor
        .map_or(f64::INFINITY, |factor| factor * mean);
    let may = |w: &usize| workers[*w].available && workers[*w].load <= cap;
    let top = similarities[order[0]];
    let in_band = order
        .iter()
        .filter(|&&region| similarities[region] >= top - rule.tau)
        .count();
    for size in in_band..=order.len() {
        // Regions as similar as the last one taken come along.
        let last = similarities[order[size - 1]];
        let mut candidates: Vec<(usize, f32)> = order
            .iter()
            .enumerate()
            .filter(|&(rank, &region)| rank < size || similarities[region] == last)
            .flat_map(|(_, &region)| {
                regions[region]
                    .iter()
                    .map(move |w| (w.0, similarities[region]))
            })
            .filter(|(w, _)| may(w))
            .collect();
        candidates.sort_by(|a, b| {
            let by_load = workers[a.0].load.total_cmp(&workers[b.0].load);
            by_load.then(b.1.total_cmp(&a.1)).then(a.0.cmp(&b.0))
        });
        if let Some((worker, _)) = candidates.first() {
            return (*worker, Reason::InBand);
        }
    }
    let mut fallback: Vec<usize> = (0..workers.len()).collect();
    fallback.sort_by(|&a, &b| {
        let key = |w: usize| (!workers[w].available, workers[w].load);
        key(a).partial_cmp(&key(b)).unwrap().then(a.cmp(&b))
    });
    (fallback[0], Reason::AllEjected)
}

/// The candidates below the cap, which is over `counted`; as the policies read aloud that look at batches.
fn below_cap(rule: &Rule, workers: &[Worker], counted: impl Fn(usize) -> bool) -> Vec<usize> {
    let there: Vec<usize> = (0..workers.len())
        .filter(|&w| workers[w].available && counted(w))
        .collect();
    let mean = there.iter().map(|&w| workers[w].load).sum::<f64>() / there.len().max(1) as f64;
    let cap = rule
        .max_load_factor
        .map_or(f64::INFINITY, |factor| factor * mean);
    let all = 0..workers.len();
    all.filter(|&w| workers[w].available && workers[w].load <= cap)
        .collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn hybrid_takes_the_least_growth_of_the_band(
        (workers, regions, similarities) in fleet(),
        growth in proptest::collection::vec((0u32..4).prop_map(f64::from), 7),
        tau in select(vec![0.0f32, 0.05, 0.3, 2.0]),
        cap in select(vec![None, Some(1.0), Some(1.25), Some(3.0)]),
    ) {
        let rule = Rule { tau, max_load_factor: cap, ..Rule::of(Policy::Hybrid) };
        let growth = &growth[..workers.len()];
        let evidence = Evidence::Running { workers: growth, similarities: Ok(&similarities) };
        let decision = decide(&rule, evidence, &Regions::new(regions.clone()), &workers, DRAW);

        let serves = |w: usize| regions.iter().flatten().any(|index| index.0 == w);
        let may = below_cap(&rule, &workers, serves);
        // Each similarity once, descending: bands from the configured one up to all regions.
        let top = similarities.iter().copied().fold(f32::MIN, f32::max);
        let mut thresholds: Vec<f32> = similarities.iter().copied().filter(|&s| s < top - tau).collect();
        thresholds.push(top - tau);
        thresholds.sort_by(|a, b| b.total_cmp(a));
        let expected = thresholds.into_iter().find_map(|threshold| {
            let members = (0..regions.len()).filter(|&region| similarities[region] >= threshold);
            let pairs = members.flat_map(|region| regions[region].iter().map(move |w| (w.0, region)));
            pairs.filter(|(w, _)| may.contains(w)).min_by(|(a, x), (b, y)| {
                let key = |w: usize| (growth[w], workers[w].load);
                key(*a).partial_cmp(&key(*b)).unwrap()
                    .then(similarities[*y].total_cmp(&similarities[*x])).then(a.cmp(b))
            })
        });
        match expected {
            Some((worker, region)) => {
                prop_assert_eq!((decision.target.0, decision.reason), (worker, Reason::Marginal));
                prop_assert_eq!(decision.similarity, Some(similarities[region]));
            }
            None => prop_assert_eq!(decision.reason, Reason::AllEjected),
        }
    }

    #[test]
    fn batch_band_takes_the_least_loaded_of_the_nearest_batches(
        (workers, _, _) in fleet(),
        cosines in proptest::collection::vec(prop_oneof![Just(f64::NAN), select(vec![0.0, 0.5, 0.875, 1.0])], 7),
        tau in select(vec![0.0f32, 0.125, 0.5]),
        cap in select(vec![None, Some(1.0), Some(1.25)]),
    ) {
        let rule = Rule { tau, max_load_factor: cap, ..Rule::of(Policy::BatchBand) };
        let evidence = Evidence::Running { workers: &cosines[..workers.len()], similarities: Err(Reason::NoBlob) };
        let decision = decide(&rule, evidence, &Regions::NONE, &workers, DRAW);

        let may = below_cap(&rule, &workers, |_| true);
        let there = (0..workers.len()).filter(|&w| workers[w].available && !cosines[w].is_nan());
        let top = there.map(|w| cosines[w]).reduce(f64::max).unwrap_or(0.0);
        let cosine = |w: usize| if cosines[w].is_nan() { top } else { cosines[w] };
        let mut order = may;
        order.sort_by(|&a, &b| cosine(b).total_cmp(&cosine(a)).then(a.cmp(&b)));
        let Some(&nearest) = order.first() else {
            prop_assert_eq!(decision.reason, Reason::AllEjected);
            return Ok(());
        };
        let reach = (top - f64::from(tau)).min(cosine(nearest));
        let expected = order.into_iter().filter(|&w| cosine(w) >= reach).min_by(|&a, &b| {
            workers[a].load.total_cmp(&workers[b].load).then(cosine(b).total_cmp(&cosine(a))).then(a.cmp(&b))
        });
        prop_assert_eq!((Some(decision.target.0), decision.reason), (expected, Reason::InBand));
    }

    #[test]
    fn whatever_batches_say_the_target_is_a_worker_and_available_if_any_is(
        (workers, regions, similarities) in fleet(),
        policy in select(Policy::ALL.to_vec()),
        running in proptest::collection::vec(any::<f64>(), 0..9), has_regions: bool,
    ) {
        let similarities = if has_regions { Ok(&similarities[..]) } else { Err(Reason::NoBlob) };
        let evidence = Evidence::Running { workers: &running, similarities };
        let regions = if has_regions { Regions::new(regions) } else { Regions::NONE };
        let decision = decide(&Rule::of(policy), evidence, &regions, &workers, DRAW);
        prop_assert!(decision.target.0 < workers.len());
        prop_assert_eq!(workers[decision.target.0].available, workers.iter().any(|w| w.available));
    }

    #[test]
    fn band_equals_the_rule_read_aloud(
        (workers, regions, similarities) in fleet(),
        tau in select(vec![0.0f32, 0.05, 0.1, 0.5, 2.0]),
        cap in select(vec![None, Some(1.0), Some(1.25), Some(3.0)]),
    ) {
        let rule = Rule { tau, max_load_factor: cap, ..Rule::default() };
        let decision = decide(&rule, Evidence::Similarities(&similarities), &Regions::new(regions.clone()), &workers, DRAW);
        let expected = oracle(&rule, &similarities, &regions, &workers);
        prop_assert_eq!((decision.target.0, decision.reason), expected);
    }

    #[test]
    fn whatever_the_input_the_target_is_a_worker_and_available_if_any_is(
        (workers, regions, mut similarities) in fleet(),
        policy in select(Policy::ALL.to_vec()), sequence: u64, entropy: u64, nan: bool,
    ) {
        if nan {
            similarities.fill(f32::NAN);
        }
        let rule = Rule { policy, ..Rule::default() };
        let draw = Draw { sequence, entropy };
        let decision = decide(&rule, Evidence::Similarities(&similarities), &Regions::new(regions), &workers, draw);
        prop_assert!(decision.target.0 < workers.len());
        prop_assert_eq!(workers[decision.target.0].available, workers.iter().any(|w| w.available));
        if !policy.looks() && workers.iter().any(|w| w.available) {
            prop_assert_eq!(decision.reason, Reason::Blind);
        }
    }

    #[test]
    fn p2c_reaches_every_worker_and_prefers_the_less_loaded(loads in proptest::collection::vec(0u32..3, 2..6)) {
        let workers = idle(&loads.iter().map(|&load| f64::from(load)).collect::<Vec<_>>());
        let rule = Rule { policy: Policy::P2c, ..Rule::default() };
        let n = workers.len() as u64;
        let mut wins = vec![0u32; workers.len()];
        for first in 0..n {
            for second in 0..n - 1 {
                let draw = Draw { sequence: 0, entropy: first << 32 | second };
                wins[decide(&rule, Evidence::Missing(Reason::NoBlob), &Regions::NONE, &workers, draw).target.0] += 1;
            }
        }
        // Every ordered pair once: a worker wins against each more loaded one in both orders.
        for (index, worker) in workers.iter().enumerate() {
            let above = workers.iter().filter(|other| other.load > worker.load).count() as u32;
            let equal = workers.iter().filter(|other| other.load == worker.load).count() as u32 - 1;
            prop_assert_eq!(wins[index], 2 * above + equal);
        }
    }
}

#[test]
fn decisions_equal_the_published_artifact() {
    #[derive(serde::Deserialize)]
    struct File {
        cases: Vec<Case>,
    }
    #[derive(serde::Deserialize)]
    struct Case {
        name: String,
        scores: Vec<f32>,
        loads: Vec<f64>,
        tau: f32,
        band_candidates: Vec<usize>,
        band_index: usize,
        min2_candidates: Vec<usize>,
        min2_index: usize,
    }
    let text = include_str!("../../tests/data/parity/e_routing_bands.json");
    let file: File = serde_json::from_str(text).unwrap();
    assert_eq!(file.cases.len(), 417);
    for case in file.cases {
        let workers = idle(&case.loads);
        let regions = one_worker_each(workers.len());
        for (widen_single, members, index) in [
            (false, case.band_candidates.len(), case.band_index),
            (true, case.min2_candidates.len(), case.min2_index),
        ] {
            let rule = Rule {
                widen_single,
                ..Rule::as_published(case.tau)
            };
            let evidence = Evidence::Similarities(&case.scores);
            let decision = decide(&rule, evidence, &regions, &workers, DRAW);
            assert_eq!(
                (decision.target.0, decision.band),
                (index, members),
                "{}",
                case.name
            );
        }
    }
}
