//! Among whom a policy chooses, and whom it draws of them.
//!
//! What a policy must know of each worker costs time, and only workers that it may choose need be looked at. Where even these are
//! many, some are drawn by lot: with S of n workers, the best of the drawn is as a rule among the n/S best of all. Gateways that
//! know each other's requests late then do not all see the same worker as the best either (M. Mitzenmacher, *How useful is old
//! information?*, IEEE TPDS 2000).

use super::regions::{self, Member};
use super::{Draw, Policy, Regions, Rule, Worker, WorkerIndex, available, load_limit};

/// The workers whose batches `rule` compares, in place of what is in `out`: those that it may choose, or as many of them as the rule
/// draws. For `hybrid` by the similarities to the regions; without, and for any other policy but `marginal`, all workers.
/// Nobody, where the policy may choose nobody.
pub fn candidates(
    rule: &Rule,
    similarities: Option<&[f32]>,
    regions: &Regions,
    workers: &[Worker],
    draw: Draw,
    out: &mut Vec<WorkerIndex>,
) {
    out.clear();
    match (rule.policy, similarities) {
        (Policy::Marginal, _) => {
            let limit = load_limit(rule.max_load_factor, workers.iter());
            let below = available(workers).filter(|(_, worker)| worker.load <= limit);
            out.extend(below.map(|(index, _)| WorkerIndex(index)));
        }
        (Policy::Hybrid, Some(similarities)) => {
            let each = |member: Member| out.push(member.worker);
            regions::members(rule, similarities, regions, workers, each);
            if regions.overlap {
                out.sort_unstable();
                out.dedup();
            }
        }
        _ => {
            out.extend((0..workers.len()).map(WorkerIndex));
            return;
        }
    }
    if let Some(wanted) = rule.candidates {
        lots(out, wanted as usize, draw);
    }
}

/// Keeps so many, each set of them equally likely, in any order: the first steps of a Fisher-Yates shuffle.
pub(super) fn lots<T>(all: &mut Vec<T>, wanted: usize, draw: Draw) {
    if all.len() <= wanted {
        return;
    }
    let mut state = draw.entropy;
    for place in 0..wanted {
        let left = (all.len() - place) as u64;
        let taken = place + next(&mut state).checked_rem(left).unwrap_or_default() as usize;
        all.swap(place, taken);
    }
    all.truncate(wanted);
}

/// SplitMix64 (G. Steele, D. Lea, C. Flood, OOPSLA 2014): 64 random bits become as many as are needed.
fn next(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mixed = (*state ^ (*state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use proptest::sample::select;

    use super::*;
    use crate::decide::{Evidence, Reason, decide};

    fn draw(entropy: u64) -> Draw {
        Draw {
            sequence: 0,
            entropy,
        }
    }

    /// Loads, regions that may share workers, and similarities.
    fn fleet() -> impl Strategy<Value = (Vec<Worker>, Regions, Vec<f32>)> {
        (1usize..9, 1usize..5).prop_flat_map(|(workers, regions)| {
            let worker = (0u32..5, prop::bool::weighted(0.9));
            let worker = worker.prop_map(|(load, available)| Worker {
                load: load.into(),
                available,
            });
            let region = proptest::collection::vec((0..workers).prop_map(WorkerIndex), 1..4);
            let similarity = (0u8..=10).prop_map(|tenths| f32::from(tenths) / 10.0);
            (
                proptest::collection::vec(worker, workers),
                proptest::collection::vec(region, regions).prop_map(Regions::new),
                proptest::collection::vec(similarity, regions),
            )
        })
    }

    proptest! {
        #[test]
        fn nobody_but_a_candidate_could_have_been_chosen(
            (workers, regions, similarities) in fleet(),
            growth in proptest::collection::vec(0u8..4, 9),
            policy in select(vec![Policy::Marginal, Policy::Hybrid]),
            (tau, cap) in (select(vec![0.0, 0.3]), select(vec![None, Some(1.0), Some(1.25)])),
        ) {
            let rule = Rule { tau, max_load_factor: cap, ..Rule::of(policy) };
            let growth: Vec<f64> = growth.iter().take(workers.len()).map(|&growth| growth.into()).collect();
            let mut among = vec![WorkerIndex(99)];
            candidates(&rule, Some(&similarities), &regions, &workers, draw(1), &mut among);
            let mut some = vec![f64::INFINITY; workers.len()];
            among.iter().for_each(|index| some[index.0] = growth[index.0]);
            let by = |growth: &[f64]| {
                let evidence = Evidence::Running { workers: growth, similarities: Ok(&similarities) };
                decide(&rule, evidence, &regions, &workers, draw(1))
            };
            prop_assert_eq!(by(&some), by(&growth));
            prop_assert_eq!(among.is_empty(), by(&growth).reason == Reason::AllEjected);
            let mut each_once = among.clone();
            each_once.sort();
            each_once.dedup();
            prop_assert_eq!(each_once.len(), among.len());
        }

        #[test]
        fn as_many_as_there_are_is_all_and_fewer_are_some_of_them(
            (workers, regions, similarities) in fleet(), policy in select(Policy::ALL.to_vec()), wanted in 1u32..4, entropy: u64,
        ) {
            let all = Rule::of(policy);
            let few = Rule { candidates: Some(wanted), ..all };
            let many = Rule { candidates: Some(64), ..all };
            let among = |rule: &Rule| {
                let mut among = Vec::new();
                candidates(rule, Some(&similarities), &regions, &workers, draw(entropy), &mut among);
                among
            };
            prop_assert_eq!(among(&many), among(&all));
            let scores = matches!(policy, Policy::Marginal | Policy::Hybrid);
            if scores {
                prop_assert_eq!(among(&few).len(), among(&all).len().min(wanted as usize));
            }
            prop_assert!(among(&few).iter().all(|index| among(&all).contains(index)));
            // Without batches: nobody but the chosen one's equals or betters are left out.
            let evidence = Evidence::Similarities(&similarities);
            let by = |rule: &Rule| decide(rule, evidence, &regions, &workers, draw(entropy));
            prop_assert_eq!(by(&many), by(&all));
            let (few, all) = (by(&few), by(&all));
            prop_assert_eq!((few.reason, few.band), (all.reason, all.band));
            if policy.compares_regions() {
                prop_assert!(workers[few.target.0].load >= workers[all.target.0].load);
            }
        }
    }

    #[test]
    fn lots_fall_on_all_alike() {
        let mut taken = [0; 10];
        for entropy in 0..10_000 {
            let mut all: Vec<usize> = (0..10).collect();
            lots(&mut all, 3, draw(entropy));
            all.iter().for_each(|&index| taken[index] += 1);
        }
        // 3,000 expected, standard deviation 46.
        assert!(
            taken.iter().all(|count| (2_800..=3_200).contains(count)),
            "{taken:?}"
        );
    }

    #[test]
    fn one_candidate_of_the_band_is_any_of_them() {
        let workers = [Worker {
            load: 1.0,
            available: true,
        }; 3];
        let regions = Regions::new(vec![
            vec![WorkerIndex(0), WorkerIndex(2)],
            vec![WorkerIndex(1)],
        ]);
        let rule = Rule {
            candidates: Some(1),
            ..Rule::default()
        };
        let similarities = [0.9, 0.1];
        let target = |entropy| {
            let evidence = Evidence::Similarities(&similarities);
            decide(&rule, evidence, &regions, &workers, draw(entropy))
                .target
                .0
        };
        let mut chosen: Vec<usize> = (0..40).map(target).collect();
        chosen.sort();
        chosen.dedup();
        assert_eq!(chosen, [0, 2]);
    }
}
