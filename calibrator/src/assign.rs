//! The assignment step of balanced K-means: every request to one region, no region over capacity,
//! least total cost, exactly.

use pathfinding::kuhn_munkres::{Weights, kuhn_munkres_min};

/// Costs are compared as integers in units of 2⁻³⁰: finer than the rounding of an `f32` near 1, and
/// a million of them still add up within an `i64`.
const UNITS: f64 = (1u64 << 30) as f64;

/// The cluster of each row that makes the sum of costs least, with at most `capacity` rows each.
///
/// `costs` is row-major `[row][cluster]`, each finite and of magnitude below 2.1; takes time
/// O(rows²·clusters·capacity).
///
/// # Panics
/// If the rows do not fit, or `costs` is no multiple of `clusters`.
pub fn assign(costs: &[f32], clusters: usize, capacity: usize) -> Vec<usize> {
    assert!(
        costs.len().is_multiple_of(clusters),
        "one cost per row and cluster"
    );
    let rows = costs.len() / clusters;
    assert!(
        rows <= clusters * capacity,
        "{rows} rows exceed {clusters} × {capacity}"
    );
    if rows == 0 {
        return Vec::new();
    }
    let units = costs
        .iter()
        .map(|&cost| (f64::from(cost) * UNITS).round() as i64)
        .collect();
    let (_, slots): (i64, _) = kuhn_munkres_min(&Slots {
        costs: units,
        clusters,
        capacity,
    });
    slots.into_iter().map(|slot| slot / capacity).collect()
}

/// The matrix with each cluster's column `capacity` times, without storing it.
struct Slots {
    costs: Vec<i64>,
    clusters: usize,
    capacity: usize,
}

impl Weights<i64> for Slots {
    fn rows(&self) -> usize {
        self.costs.len() / self.clusters
    }

    fn columns(&self) -> usize {
        self.clusters * self.capacity
    }

    fn at(&self, row: usize, slot: usize) -> i64 {
        self.costs[row * self.clusters + slot / self.capacity]
    }

    fn neg(&self) -> Self {
        Slots {
            costs: self.costs.iter().map(|&cost| -cost).collect(),
            ..*self
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn total(costs: &[f32], clusters: usize, assignment: &[usize]) -> f64 {
        assignment
            .iter()
            .enumerate()
            .map(|(row, &c)| f64::from(costs[row * clusters + c]))
            .sum()
    }

    /// Every assignment that fits, by enumeration.
    fn least(costs: &[f32], clusters: usize, free: &mut [usize]) -> f64 {
        let Some((row, rest)) = costs.split_at_checked(clusters) else {
            return 0.0;
        };
        (0..clusters)
            .filter_map(|cluster| {
                free[cluster] = free[cluster].checked_sub(1)?;
                let total = f64::from(row[cluster]) + least(rest, clusters, free);
                free[cluster] += 1;
                Some(total)
            })
            .fold(f64::INFINITY, f64::min)
    }

    #[test]
    fn a_full_cluster_turns_the_cheaper_request_away() {
        // Both want cluster 0; the first loses 0.5 by going elsewhere, the second 0.8.
        assert_eq!(assign(&[0.0, 0.5, 0.1, 0.9], 2, 1), [1, 0]);
        assert_eq!(
            assign(&[0.0, 0.5, 0.1, 0.9], 2, 2),
            [0, 0],
            "capacity is a bound, no quota"
        );
    }

    #[test]
    fn fewer_rows_than_clusters_are_fine() {
        assert_eq!(assign(&[0.9, 0.1, 0.5], 3, 1), [1]);
        assert_eq!(assign(&[], 3, 0), Vec::<usize>::new());
    }

    #[test]
    #[should_panic(expected = "5 rows exceed 2 × 2")]
    fn rows_that_do_not_fit_are_a_mistake_of_the_caller() {
        assign(&[0.0; 10], 2, 2);
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn no_assignment_that_fits_is_cheaper(
            (clusters, spare, costs) in (1usize..4, 0usize..2, 1usize..8).prop_flat_map(
                // Steps of an eighth make ties common.
                |(k, spare, n)| (
                    Just(k),
                    Just(spare),
                    prop::collection::vec((0u8..16).prop_map(|c| f32::from(c) / 8.0), n * k),
                ),
            ),
        ) {
            let rows = costs.len() / clusters;
            let capacity = rows.div_ceil(clusters) + spare;
            let assignment = assign(&costs, clusters, capacity);
            prop_assert_eq!(assignment.len(), rows);
            for cluster in 0..clusters {
                let size = assignment.iter().filter(|&&c| c == cluster).count();
                prop_assert!(size <= capacity);
            }
            let expected = least(&costs, clusters, &mut vec![capacity; clusters]);
            prop_assert!((total(&costs, clusters, &assignment) - expected).abs() < 1e-6);
        }
    }
}
