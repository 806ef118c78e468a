//! The assignment step of balanced K-means: every request to one region, no region over capacity,
//! least total cost, exactly.
//!
//! A transportation problem with few sinks. Rows come one by one; each takes the shortest augmenting path, which passes
//! through clusters only: a step from one cluster to another stands for the row that moves at the least extra cost. So the
//! search is on as many nodes as there are clusters, however many rows there are, and the time grows near-linearly in them.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Costs are compared as integers in units of 2⁻³⁰: finer than the rounding of an `f32` near 1, and
/// a million of them still add up within an `i64`.
const UNITS: f64 = (1u64 << 30) as f64;

/// The cluster of each row that makes the sum of costs least, with at most `capacity` rows each.
///
/// `costs` is row-major `[row][cluster]`, each finite and of magnitude below 2.1; takes time
/// O(rows·clusters·(clusters + log rows)) as long as augmenting paths are short, which they are in practice.
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
    let mut flow = Flow::new(units(costs), clusters, capacity);
    for row in 0..rows {
        flow.insert(row);
    }
    flow.cluster_of
}

fn units(costs: &[f32]) -> Vec<i64> {
    let unit = |&cost: &f32| (f64::from(cost) * UNITS).round() as i64;
    costs.iter().map(unit).collect()
}

/// No cluster yet, or none before.
const NONE: usize = usize::MAX;

/// Rows that are assigned at the least cost so far.
struct Flow {
    costs: Vec<i64>,
    clusters: usize,
    capacity: usize,
    cluster_of: Vec<usize>,
    sizes: Vec<usize>,
    /// Per pair of clusters `[from][to]`, rows of `from` by what they cost more in `to`. Rows that have left are skipped when they
    /// come up.
    moves: Vec<BinaryHeap<Reverse<(i64, usize)>>>,
    /// Length of the last row's shortest path to each cluster. With it no step is negative, so Dijkstra's algorithm applies.
    potential: Vec<i64>,
}

/// Shortest paths of one row.
struct Paths {
    length: Vec<i64>,
    before: Vec<usize>,
}

impl Flow {
    fn new(costs: Vec<i64>, clusters: usize, capacity: usize) -> Self {
        Self {
            cluster_of: vec![NONE; costs.len() / clusters],
            costs,
            clusters,
            capacity,
            sizes: vec![0; clusters],
            moves: vec![BinaryHeap::new(); clusters * clusters],
            potential: vec![0; clusters],
        }
    }

    /// Assigns one more row.
    fn insert(&mut self, row: usize) {
        let Paths { length, before } = self.shortest_paths(row);
        let free = (0..self.clusters).filter(|&cluster| self.sizes[cluster] < self.capacity);
        let Some(mut to) = free.min_by_key(|&cluster| length[cluster]) else {
            return; // the caller made sure that there is room
        };
        self.sizes[to] += 1;
        // From the free cluster back: each step moves the row that made it the shortest.
        while before[to] != NONE {
            let from = before[to];
            if let Some((_, moved)) = self.cheapest_move(from, to) {
                self.place(moved, to);
            }
            to = from;
        }
        self.place(row, to);
        self.potential = length;
    }

    fn place(&mut self, row: usize, cluster: usize) {
        self.cluster_of[row] = cluster;
        let costs = &self.costs[row * self.clusters..][..self.clusters];
        for (to, cost) in costs.iter().enumerate().filter(|(to, _)| *to != cluster) {
            self.moves[cluster * self.clusters + to].push(Reverse((cost - costs[cluster], row)));
        }
    }

    fn cheapest_move(&mut self, from: usize, to: usize) -> Option<(i64, usize)> {
        let heap = &mut self.moves[from * self.clusters + to];
        while let Some(&Reverse((extra, row))) = heap.peek() {
            if self.cluster_of[row] == from {
                return Some((extra, row));
            }
            heap.pop();
        }
        None
    }

    /// Dijkstra's algorithm on the dense graph of clusters, from a row that is in none.
    fn shortest_paths(&mut self, row: usize) -> Paths {
        let clusters = self.clusters;
        let mut length = self.costs[row * clusters..][..clusters].to_vec();
        let mut before = vec![NONE; clusters];
        let mut open: Vec<usize> = (0..clusters).collect();
        while let Some(next) =
            (0..open.len()).min_by_key(|&at| length[open[at]] - self.potential[open[at]])
        {
            let from = open.swap_remove(next);
            for &to in &open {
                let Some((extra, _)) = self.cheapest_move(from, to) else {
                    continue;
                };
                if length[from] + extra < length[to] {
                    length[to] = length[from] + extra;
                    before[to] = from;
                }
            }
        }
        Paths { length, before }
    }
}

#[cfg(test)]
mod tests {
    use pathfinding::kuhn_munkres::{Weights, kuhn_munkres_min};
    use proptest::prelude::*;

    use super::*;

    /// The matrix with each cluster's column `capacity` times: the Hungarian algorithm's form of the problem.
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

    fn hungarian(costs: &[f32], clusters: usize, capacity: usize) -> i64 {
        let costs = units(costs);
        kuhn_munkres_min(&Slots {
            costs,
            clusters,
            capacity,
        })
        .0
    }

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

        #[test]
        fn the_hungarian_algorithm_finds_no_cheaper_one(
            (clusters, spare, costs) in (1usize..9, 0usize..3, 1usize..40).prop_flat_map(
                |(k, spare, n)| {
                    // Few values make ties, many make paths that move several rows; rows may be copies of each other.
                    let cost = prop_oneof![(0u8..4).prop_map(f32::from), 0.0f32..2.0];
                    let row = prop::collection::vec(cost, k);
                    let rows = prop::collection::vec((row, 1usize..4), n).prop_map(|rows| {
                        rows.into_iter().flat_map(|(row, copies)| row.repeat(copies)).collect::<Vec<_>>()
                    });
                    (Just(k), Just(spare), rows)
                },
            ),
        ) {
            let rows = costs.len() / clusters;
            let capacity = rows.div_ceil(clusters) + spare;
            let assignment = assign(&costs, clusters, capacity);
            for cluster in 0..clusters {
                prop_assert!(assignment.iter().filter(|&&c| c == cluster).count() <= capacity);
            }
            let units = units(&costs);
            let found: i64 = assignment.iter().enumerate().map(|(row, &c)| units[row * clusters + c]).sum();
            prop_assert_eq!(found, hungarian(&costs, clusters, capacity));
        }
    }
}
