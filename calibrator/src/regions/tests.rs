use proptest::prelude::*;

use super::*;

/// Regions on a circle, each like its neighbours.
fn circle(regions: usize) -> Vec<f32> {
    (0..regions)
        .flat_map(|region| {
            let angle = region as f32 / regions.max(1) as f32;
            [angle.cos(), angle.sin()]
        })
        .collect()
}

fn of(values: &[f32]) -> Vectors<'_> {
    Vectors {
        dimension: 2,
        values,
    }
}

fn laid_out(regions: usize, workers: usize) -> Vec<Vec<usize>> {
    lay_out(of(&circle(regions)), workers)
}

fn names(workers: &[&str]) -> Vec<String> {
    workers.iter().map(|&worker| worker.into()).collect()
}

#[test]
fn one_several_or_a_part_of_a_worker_each() {
    assert_eq!(laid_out(3, 3), [[0], [1], [2]]);
    assert_eq!(laid_out(2, 4), [[0, 1], [2, 3]]);
    assert_eq!(laid_out(4, 2), [[0], [0], [1], [1]]);
    assert_eq!(
        laid_out(2, 3),
        [[0, 1], [1, 2]],
        "the second worker serves both"
    );
    assert_eq!(laid_out(3, 2), [vec![0], vec![0, 1], vec![1]]);
    assert_eq!(laid_out(1, 3), [[0, 1, 2]]);
}

#[test]
fn a_worker_with_several_regions_has_similar_ones() {
    // 0 and 2 are alike, and so are 1 and 3.
    let values = [1.0, 0.0, 0.0, 1.0, 0.995, 0.1, 0.1, 0.995];
    assert_eq!(lay_out(of(&values), 2), [[0], [1], [0], [1]]);
}

#[test]
fn every_number_of_regions_is_tried_once_from_one_per_worker_down() {
    assert_eq!(candidates(16, 1000), [16, 12, 8, 5, 4, 2]);
    assert_eq!(candidates(4, 1000), [4, 3, 2]);
    assert_eq!(candidates(2, 1000), [2]);
    assert_eq!(candidates(1, 1000), [1]);
    assert_eq!(candidates(16, 7), [7, 5, 4, 2]);
    assert_eq!(candidates(16, 1), [1]);
}

#[test]
fn the_same_workers_keep_their_regions_in_whatever_order_they_are_named() {
    let before = [names(&["c"]), names(&["a"]), names(&["b"])];
    let after = reassign(of(&circle(3)), &before, &names(&["a", "b", "c"]));
    assert_eq!(after, before);
}

#[test]
fn one_worker_replaced_takes_the_role_that_is_free() {
    let before = [names(&["a"]), names(&["b"]), names(&["c"])];
    let after = reassign(of(&circle(3)), &before, &names(&["new", "c", "a"]));
    assert_eq!(after, [["a"], ["new"], ["c"]]);
}

#[test]
fn twice_the_workers_are_added_to_those_that_are_there() {
    let before = [names(&["a"]), names(&["b"])];
    let after = reassign(of(&circle(2)), &before, &names(&["a", "b", "c", "d"]));
    assert!(
        after[0].contains(&"a".into()) && after[1].contains(&"b".into()),
        "{after:?}"
    );
}

#[test]
fn a_worker_less_and_everybody_left_keeps_its_region() {
    let before = [names(&["a"]), names(&["b"]), names(&["c"]), names(&["d"])];
    let after = reassign(of(&circle(4)), &before, &names(&["a", "c", "d"]));
    for (worker, region) in [("a", 0), ("c", 2), ("d", 3)] {
        assert!(after[region].contains(&worker.to_owned()), "{after:?}");
    }
    assert!(after.iter().all(|workers| !workers.is_empty()));
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    /// With equal shares per region, every worker can be given an equal share of the requests: Hall's condition, for every set of
    /// regions.
    #[test]
    fn load_can_be_equal(regions in 1usize..9, workers in 1usize..20) {
        let served_by = laid_out(regions, workers);
        for set in 1u32..1 << regions {
            let members = (0..regions).filter(|region| set >> region & 1 == 1);
            let mut reached: Vec<usize> = members.flat_map(|region| served_by[region].clone()).collect();
            reached.sort_unstable();
            reached.dedup();
            prop_assert!(
                set.count_ones() as usize * workers <= reached.len() * regions,
                "{served_by:?}, set {set:b}"
            );
        }
        let used: std::collections::BTreeSet<usize> = served_by.concat().into_iter().collect();
        prop_assert_eq!(used.len(), workers, "nobody is left out");
    }

    #[test]
    fn whoever_is_named_serves_and_nobody_else(
        regions in 1usize..7,
        before in prop::collection::vec(prop::collection::vec("[a-e]", 1..3), 7),
        after in prop::collection::btree_set("[c-j]", 1..8),
    ) {
        let workers: Vec<String> = after.iter().cloned().collect();
        let found = reassign(of(&circle(regions)), &before[..regions], &workers);
        let serving: std::collections::BTreeSet<String> = found.concat().into_iter().collect();
        prop_assert_eq!(serving, after);
        prop_assert!(found.iter().all(|workers| !workers.is_empty()));
    }
}
