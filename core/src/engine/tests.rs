use std::collections::{BTreeMap, HashSet};

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
                    batch.join(next_key, ids(k, recorded.clone()), tokens);
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
                        n => StepModel::QWEN3_30B_A3B.duration(mean, n),
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
    batch.join('a', ids(1, vec![0, 0, 0]), 1);
    batch.join('b', ids(1, vec![0, 0, 0]), 2);
    batch.join('c', ids(1, vec![0, 0, 0]), 1);
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
    batch.join('a', ids(1, Vec::new()), 0);
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
    batch.join('a', ids(2, vec![3, 67, 65, 66, 3, 64]), 1);
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
        assert!((model.step_ms(40.0, 8) - ms).abs() < 1e-9, "{model:?}");
    }
    let negative = StepModel {
        t0_ms: -1.0,
        b_ms: 0.0,
        c_ms: f64::NAN,
    };
    assert_eq!(negative.duration(1.0, 1), Duration::ZERO);
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
    assert_eq!(ids(2, vec![1; 12]).token(1).count(), 3);
}
