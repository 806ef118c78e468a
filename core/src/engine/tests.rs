use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;

use proptest::prelude::*;

use super::*;

const GEOMETRY: Geometry = Geometry {
    layers: 3,
    experts: 70,
};

fn ids(k: usize, ids: Vec<u16>) -> Arc<ExpertIds> {
    Arc::new(ExpertIds::new(GEOMETRY, k, ids).unwrap())
}

/// Something that happens to a worker between two steps, or a step.
#[derive(Clone, Debug)]
enum Event {
    Join {
        k: usize,
        ids: Vec<u16>,
        tokens: u32,
    },
    Cancel {
        request: usize,
    },
    Step,
}

fn event() -> impl Strategy<Value = Event> {
    let join =
        (1..=4usize, 0..=5usize, 1..=7u32).prop_flat_map(|(k, recorded, tokens)| {
            let len = recorded * GEOMETRY.layers * k;
            prop::collection::vec(0..GEOMETRY.experts as u16, len)
                .prop_map(move |ids| Event::Join { k, ids, tokens })
        });
    prop_oneof![
        3 => join,
        1 => (0..40usize).prop_map(|request| Event::Cancel { request }),
        6 => Just(Event::Step),
    ]
}

/// A request as the oracle sees it.
struct Shadow {
    ids: Vec<u16>,
    k: usize,
    tokens: u32,
    decoded: u32,
}

impl Shadow {
    /// The experts of the next token as (layer, expert) pairs.
    fn experts(&self) -> HashSet<(usize, u16)> {
        let row = GEOMETRY.layers * self.k;
        if self.ids.is_empty() {
            return HashSet::new();
        }
        let token = self.decoded as usize % (self.ids.len() / row);
        (0..row)
            .map(|i| (i / self.k, self.ids[token * row + i]))
            .collect()
    }
}

proptest! {
    /// Against the obvious way: an ordered list of requests, of which the first `batch_max` run once
    /// they were let in, and a hash set of experts.
    #[test]
    fn steps_agree_with_a_hash_set_oracle(
        events in prop::collection::vec(event(), 1..120),
        batch_max in 1..6usize,
    ) {
        let mut batch = DecodeBatch::new(StepModel::QWEN3_30B_A3B, GEOMETRY, batch_max);
        let mut alive: BTreeMap<usize, Shadow> = BTreeMap::new();
        let mut running: Vec<usize> = Vec::new();
        let mut next_key = 0;
        for event in events {
            match event {
                Event::Join { k, ids: recorded, tokens } => {
                    batch.join(next_key, ids(k, recorded.clone()), 0, tokens);
                    alive.insert(next_key, Shadow { ids: recorded, k, tokens, decoded: 0 });
                    next_key += 1;
                }
                Event::Cancel { request } => {
                    let known = alive.remove(&request).is_some();
                    running.retain(|&key| key != request);
                    prop_assert_eq!(batch.cancel(&request), known);
                }
                Event::Step => {
                    for &key in alive.keys() {
                        if running.len() < batch_max && !running.contains(&key) {
                            running.push(key);
                        }
                    }
                    let experts: HashSet<_> =
                        running.iter().flat_map(|key| alive[key].experts()).collect();
                    let mean = experts.len() as f64 / GEOMETRY.layers as f64;

                    let report = batch.step().clone();

                    prop_assert_eq!(report.mean_experts, mean);
                    let keys: Vec<usize> = report.decoded.iter().map(|decoded| decoded.key).collect();
                    prop_assert_eq!(&keys, &running);
                    let expected = match running.len() {
                        0 => Duration::ZERO,
                        n => StepModel::QWEN3_30B_A3B.duration(mean, n, 0),
                    };
                    prop_assert_eq!(report.duration, expected);
                    for decoded in &report.decoded {
                        let shadow = alive.get_mut(&decoded.key).unwrap();
                        prop_assert_eq!(decoded.token, shadow.decoded);
                        shadow.decoded += 1;
                        prop_assert_eq!(decoded.last, shadow.decoded == shadow.tokens);
                    }
                    for key in report.finished() {
                        alive.remove(key);
                        running.retain(|running| running != key);
                    }
                }
            }
            prop_assert_eq!(batch.running(), running.len());
            prop_assert_eq!(batch.waiting(), alive.len() - running.len());
        }
    }
}

#[test]
fn the_queue_is_first_come_first_served() {
    let mut batch = DecodeBatch::new(StepModel::QWEN3_30B_A3B, GEOMETRY, 1);
    batch.join('a', ids(1, vec![0, 0, 0]), 0, 1);
    batch.join('b', ids(1, vec![0, 0, 0]), 0, 2);
    batch.join('c', ids(1, vec![0, 0, 0]), 0, 1);
    let mut order = Vec::new();
    while !batch.is_idle() {
        order.extend(
            batch
                .step()
                .decoded
                .iter()
                .map(|decoded| (decoded.key, decoded.token)),
        );
    }
    assert_eq!(order, [('a', 0), ('b', 0), ('b', 1), ('c', 0)]);
}

#[test]
fn a_step_of_an_idle_worker_takes_no_time() {
    let mut batch = DecodeBatch::<u8>::new(StepModel::QWEN3_30B_A3B, GEOMETRY, 0);
    let report = batch.step();
    assert_eq!(
        (report.batch(), report.mean_experts, report.duration),
        (0, 0.0, Duration::ZERO)
    );
}

#[test]
fn a_request_without_recorded_ids_activates_no_expert_and_still_costs_its_share() {
    let mut batch = DecodeBatch::new(StepModel::QWEN3_30B_A3B, GEOMETRY, 8);
    batch.join('a', ids(1, Vec::new()), 0, 0);
    let report = batch.step();
    assert_eq!((report.mean_experts, report.batch()), (0.0, 1));
    assert_eq!(report.duration, Duration::from_secs_f64(0.005_866));
    assert_eq!(report.finished().collect::<Vec<_>>(), [&'a']);
}

#[test]
fn experts_that_the_model_lacks_are_not_counted() {
    let small = Geometry {
        layers: 1,
        experts: 66,
    };
    let mut batch = DecodeBatch::new(StepModel::QWEN3_30B_A3B, small, 8);
    batch.join('a', ids(2, vec![3, 67, 65, 66, 3, 64]), 0, 1);
    assert_eq!(batch.step().mean_experts, 1.0);
}

#[test]
fn the_named_models_are_those_of_the_fit() {
    // 5.84 + 0.144·40 + 0.026·8, and so on.
    for (model, ms) in [
        (StepModel::QWEN3_30B_A3B, 11.808),
        (StepModel::GPT_OSS_120B, 20.9),
        (StepModel::GEMMA_4_26B_A4B, 9.248),
    ] {
        assert!((model.step_ms(40.0, 8, 0) - ms).abs() < 1e-9, "{model:?}");
    }
    let negative = StepModel {
        t0_ms: -1.0,
        b_ms: 0.0,
        c_ms: f64::NAN,
        kv_ms_per_1k: 0.0,
    };
    assert_eq!(negative.duration(1.0, 1, 0), Duration::ZERO);
}

#[test]
fn ids_of_a_wrong_shape_are_refused_with_the_numbers() {
    let error = |k, ids| ExpertIds::new(GEOMETRY, k, ids).unwrap_err().to_string();
    assert_eq!(
        error(0, vec![]),
        "k is 0 where a token chooses 1 to 70 experts in each of 3 layers"
    );
    assert_eq!(
        error(2, vec![0; 7]),
        "7 ids are no multiple of 3 layers × 2 experts per token"
    );
    assert_eq!(error(1, vec![0, 70, 0]), "expert 70 where 0 to 69 exist");
    assert_eq!(ids(2, vec![1; 12]).tokens(), 2);
}

/// Counts of one request over ten tokens.
fn activation(counts: &[u16]) -> Arc<Activation> {
    Arc::new(Activation::from_counts(GEOMETRY, counts, 10).unwrap())
}

/// Requests of which some are recorded, some known by probability.
fn member() -> impl Strategy<Value = (Option<Vec<u16>>, Vec<u16>)> {
    let recorded = prop::collection::vec(0..GEOMETRY.experts as u16, GEOMETRY.layers * 2);
    let counts = prop::collection::vec(prop_oneof![Just(0u16), 0..12u16], GEOMETRY.counts());
    (prop::option::of(recorded), counts)
}

proptest! {
    /// Against the product of 1 − p over the members that are there, cell by cell.
    #[test]
    fn expected_experts_agree_with_the_product_however_members_come_and_go(
        members in prop::collection::vec(member(), 1..8),
        gone in prop::collection::vec(any::<bool>(), 8),
    ) {
        let mut batch = DecodeBatch::new(StepModel::QWEN3_30B_A3B, GEOMETRY, 64);
        for (key, (recorded, counts)) in members.iter().enumerate() {
            match recorded {
                Some(recorded) => batch.join(key, ids(2, recorded.clone()), 0, 9),
                None => batch.join(key, activation(counts), 0, 9),
            }
        }
        for round in 0..2 {
            let there = |key: usize| round == 0 || !gone[key];
            let mut absent = vec![1.0; GEOMETRY.counts()];
            for (key, (recorded, counts)) in members.iter().enumerate() {
                match recorded {
                    _ if !there(key) => {}
                    Some(recorded) => for (row, ids) in recorded.chunks(2).enumerate() {
                        ids.iter().for_each(|&id| absent[row * GEOMETRY.experts + usize::from(id)] = 0.0);
                    },
                    None => for (absent, &count) in absent.iter_mut().zip(counts) {
                        *absent *= 1.0 - (f64::from(count) / 10.0).min(1.0);
                    },
                }
            }
            let expected = absent.iter().map(|absent| 1.0 - absent).sum::<f64>();
            let found = batch.step().mean_experts * GEOMETRY.layers as f64;
            prop_assert!((found - expected).abs() < 1e-3, "{found} is not {expected}");
            for key in (0..members.len()).filter(|&key| round == 0 && gone[key]) {
                batch.cancel(&key);
            }
        }
    }
}

#[test]
fn a_batch_forgets_who_left_to_the_last_bit() {
    let counts: Vec<u16> = (0..GEOMETRY.counts() as u16).map(|n| n % 11).collect();
    let mut batch = DecodeBatch::new(StepModel::QWEN3_30B_A3B, GEOMETRY, 64);
    batch.join(0, activation(&counts), 0, 1_000);
    let alone = batch.step().mean_experts;
    for key in 1..40 {
        batch.join(
            key,
            activation(&counts[..].iter().map(|n| n / 2).collect::<Vec<_>>()),
            0,
            3,
        );
        batch.step();
    }
    while batch.running() > 1 {
        batch.step();
    }
    assert_eq!(batch.step().mean_experts.to_bits(), alone.to_bits());
}

#[test]
fn counts_of_a_wrong_shape_are_refused_with_the_numbers() {
    let error = Activation::from_counts(GEOMETRY, &[1, 2], 3).unwrap_err();
    assert_eq!(
        error.to_string(),
        "2 counts where 3 layers × 70 experts need 210"
    );
}

#[test]
fn who_does_not_fit_the_kv_cache_waits_and_nobody_overtakes() {
    let mut batch = DecodeBatch::new(StepModel::QWEN3_30B_A3B, GEOMETRY, 8).with_kv_tokens_max(20);
    let none = || ids(1, Vec::new());
    batch.join('a', none(), 10, 2);
    batch.join('b', none(), 9, 1); // fits once "a" has left
    batch.join('c', none(), 1, 1); // would fit at once
    let mut order = Vec::new();
    let mut held = Vec::new();
    while !batch.is_idle() {
        order.push(
            batch
                .step()
                .decoded
                .iter()
                .map(|decoded| decoded.key)
                .collect::<String>(),
        );
        held.push(batch.kv_tokens());
    }
    assert_eq!(order, ["a", "a", "bc"]);
    assert_eq!(held, [11, 0, 0]);

    batch.join('d', none(), 100, 1);
    assert_eq!(batch.step().batch(), 1, "what could never fit runs alone");
}

#[test]
fn a_step_reads_the_kv_caches_of_its_batch() {
    let model = StepModel {
        kv_ms_per_1k: 0.5,
        ..StepModel::QWEN3_30B_A3B
    };
    assert!((model.step_ms(40.0, 8, 2_000) - 12.808).abs() < 1e-9);
    let mut batch = DecodeBatch::new(model, GEOMETRY, 8);
    batch.join('a', ids(1, Vec::new()), 1_000, 2);
    assert_eq!(batch.step().duration, Duration::from_secs_f64(0.006_366));
    assert_eq!(batch.step().duration, Duration::from_secs_f64(0.006_366_5));
}

#[test]
fn usage_is_the_share_of_the_tokens() {
    let cells = |usage: Vec<f32>| {
        let used = usage.into_iter().zip(0..).filter(|(p, _)| *p > 0.0);
        used.map(|(p, cell)| ((cell / GEOMETRY.experts, cell % GEOMETRY.experts), p))
            .collect::<Vec<_>>()
    };
    let recorded = Experts::from(ids(1, vec![1, 2, 69, 1, 3, 69, 1, 2, 0, 1, 2, 69]));
    let expected = [
        ((0, 1), 1.0),
        ((1, 2), 0.75),
        ((1, 3), 0.25),
        ((2, 0), 0.25),
        ((2, 69), 0.75),
    ];
    assert_eq!(cells(recorded.usage()), expected);
    assert_eq!(cells(Experts::from(ids(1, vec![])).usage()), []);

    let mut counts = vec![0; GEOMETRY.counts()];
    (counts[1], counts[GEOMETRY.experts]) = (3, 4);
    let known = Arc::new(Activation::from_counts(GEOMETRY, &counts, 4).unwrap());
    let found = Experts::from(known).usage();
    assert!((found[1] - 0.75).abs() < 1e-6 && (found[GEOMETRY.experts] - 1.0).abs() < 2e-6);
    assert_eq!(found.iter().filter(|p| **p > 0.0).count(), 2);
}

/// A placement of every layer: where each expert is, and on which other rank it has a replica.
fn placement() -> impl Strategy<Value = Vec<Vec<Vec<u16>>>> {
    let layer = |ranks: usize| {
        let place = (0..ranks, prop::option::weighted(0.1, 0..ranks));
        prop::collection::vec(place, GEOMETRY.experts).prop_map(move |places| {
            let mut layer = vec![Vec::new(); ranks];
            for (expert, (rank, replica)) in (0u16..).zip(places) {
                layer[rank].push(expert);
                if let Some(replica) = replica.filter(|replica| *replica != rank) {
                    layer[replica].push(expert);
                }
            }
            layer
        })
    };
    (1..5usize).prop_flat_map(move |ranks| prop::collection::vec(layer(ranks), GEOMETRY.layers))
}

proptest! {
    /// Against the largest sum over ranks of 1 − Π(1 − p), cell by cell, over all tokens that are verified.
    #[test]
    fn a_step_waits_for_the_busiest_rank_of_every_layer(
        members in prop::collection::vec(member(), 1..6),
        placement in placement(),
        (verify, accept) in (1u32..4, 1u32..4),
    ) {
        let ranks = Arc::new(Ranks::new(GEOMETRY, &placement).unwrap());
        prop_assert_eq!(ranks.ranks(), placement[0].len());
        let mut batch = DecodeBatch::new(StepModel::QWEN3_30B_A3B, GEOMETRY, 64)
            .with_ranks(ranks)
            .with_speculation(Speculation { verify, accept });
        let mut absent = vec![1.0; GEOMETRY.counts()];
        for (key, (recorded, counts)) in members.iter().enumerate() {
            match recorded {
                Some(recorded) => {
                    batch.join(key, ids(2, recorded.clone()), 0, 9);
                    for (row, ids) in recorded.chunks(2).enumerate() {
                        ids.iter().for_each(|&id| absent[row * GEOMETRY.experts + usize::from(id)] = 0.0);
                    }
                }
                None => {
                    batch.join(key, activation(counts), 0, 9);
                    for (absent, &count) in absent.iter_mut().zip(counts) {
                        *absent *= (1.0 - (f64::from(count) / 10.0).min(1.0)).powi(verify as i32);
                    }
                }
            }
        }
        let of_rank = |layer: usize, slots: &Vec<u16>| -> f64 {
            let row = &absent[layer * GEOMETRY.experts..];
            slots.iter().map(|&expert| 1.0 - row[usize::from(expert)]).sum()
        };
        let busiest = placement.iter().enumerate().map(|(layer, ranks)| {
            ranks.iter().map(|slots| of_rank(layer, slots)).fold(0.0, f64::max)
        });
        let expected = busiest.sum::<f64>();
        let found = batch.step().mean_experts * GEOMETRY.layers as f64;
        prop_assert!((found - expected).abs() < 1e-3, "{found} is not {expected}");

        // Those whose tokens were recorded leave, which changes nothing for the others.
        let mut others = batch.clone();
        others.clear();
        for (key, (recorded, counts)) in members.iter().enumerate() {
            match recorded {
                Some(_) => { batch.cancel(&key); }
                None => others.join(key, activation(counts), 0, 9),
            }
        }
        prop_assert_eq!(batch.step().mean_experts.to_bits(), others.step().mean_experts.to_bits());
    }
}

#[test]
fn speculation_verifies_many_and_gets_on_by_those_accepted() {
    let model = StepModel {
        kv_ms_per_1k: 1.0,
        ..StepModel::QWEN3_30B_A3B
    };
    let speculation = Speculation {
        verify: 3,
        accept: 2,
    };
    let mut batch = DecodeBatch::new(model, GEOMETRY, 8).with_speculation(speculation);
    // Token n activates expert n of each layer.
    let recorded = (0..10).flat_map(|n| [n; GEOMETRY.layers]).collect();
    batch.join('a', ids(1, recorded), 1_000, 5);
    let mut steps = Vec::new();
    while !batch.is_idle() {
        let report = batch.step();
        assert_eq!(report.mean_experts, 3.0);
        let Decoded { token, last, .. } = report.decoded[0];
        let ms = report.duration.as_secs_f64() * 1e3 - model.step_ms(3.0, 3, 0);
        steps.push((token, last, (ms * 1e3).round() as u32, batch.kv_tokens()));
    }
    let expected = [
        (1, false, 1_000, 1_002),
        (3, false, 1_002, 1_004),
        (4, true, 1_004, 0),
    ];
    assert_eq!(steps, expected);
}

#[test]
fn contiguous_ranks_share_experts_evenly() {
    let ranks = Ranks::contiguous(GEOMETRY, 4).unwrap();
    // 18, 18, 17 and 17 of 70.
    let all = vec![u64::MAX; GEOMETRY.layers * 2];
    assert_eq!(ranks.busiest(&all, &[]), 18.0 * GEOMETRY.layers as f64);
    let told = |layers: &[Vec<Vec<u16>>]| Ranks::new(GEOMETRY, layers).unwrap_err().to_string();
    assert_eq!(
        Ranks::contiguous(GEOMETRY, 71).unwrap_err().to_string(),
        "71 ranks where 1 to 70 can share 70 experts"
    );
    let whole: Vec<u16> = (0..70).collect();
    assert_eq!(
        told(&[vec![whole.clone()]]),
        "the placement has 1 layers where 3 are expected"
    );
    let layer = vec![whole[..40].to_vec(), whole[41..].to_vec()];
    assert_eq!(
        told(&vec![layer.clone(); 3]),
        "layer 0 places expert 40 on no rank"
    );
    assert_eq!(
        told(&[layer.clone(), vec![whole.clone()], layer]),
        "layer 0 places expert 40 on no rank"
    );
    let high = vec![vec![whole.clone(), vec![70]]; 3];
    assert_eq!(told(&high), "layer 0 places expert 70 where 0 to 69 exist");
    let uneven = [
        vec![whole.clone(), whole.clone()],
        vec![whole.clone()],
        vec![whole],
    ];
    assert_eq!(
        told(&uneven),
        "the placement has 1 ranks where 2 are expected"
    );
}
