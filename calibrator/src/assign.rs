//! The assignment step of balanced K-means: every request to one region, no region over capacity,
//! least total cost, exactly.
//!
//! A transportation problem with few sinks, solved as the Hungarian algorithm does it, but on the clusters instead of
//! their slots. Each cluster has a price; a row belongs where cost plus price is least. Rows take such clusters while
//! there is room; each row that finds its cluster full takes the shortest augmenting path, which passes through
//! clusters only: a step from one cluster to another stands for the row that moves at the least extra cost. So a search
//! is on as many nodes as there are clusters at most, however many rows there are, and the time grows near-linearly in them.
//! Good prices, such as those of the round before, leave few rows to search for.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Costs are compared as integers in units of 2⁻³⁰: finer than the rounding of an `f32` near 1, and
/// a million of them still add up within an `i64`.
const UNITS: f64 = (1u64 << 30) as f64;

/// The cluster of each row that makes the sum of costs least, with at most `capacity` rows each.
///
/// `costs` is row-major `[row][cluster]`, each finite and of magnitude below 2.1. There are as many clusters as `prices`,
/// which are where the search begins and then those of this assignment: zeros, or what a similar problem left there. They
/// change how long it takes, not what the assignment costs.
///
/// # Panics
/// If the rows do not fit, or `costs` is no multiple of the number of clusters.
pub fn assign(costs: &[f32], capacity: usize, prices: &mut [i64]) -> Vec<usize> {
    let clusters = prices.len();
    assert!(
        costs.len().is_multiple_of(clusters),
        "one cost per row and cluster"
    );
    let rows = costs.len() / clusters;
    let slots = clusters * capacity;
    assert!(rows <= slots, "{rows} rows exceed {clusters} × {capacity}");
    // Rows that cost nothing anywhere fill the spare slots: where all are taken, prices of any height are optimal.
    // There are fewer than clusters in K-means, where the capacity is ⌈rows/clusters⌉.
    let unit = |&cost: &f32| (f64::from(cost) * UNITS).round() as i64;
    let mut units: Vec<i64> = costs.iter().map(unit).collect();
    units.resize(slots * clusters, 0);

    let mut flow = Flow::new(units, capacity, prices.to_vec());
    let crowded: Vec<usize> = (0..slots).filter(|&row| !flow.settle(row)).collect();
    for row in crowded {
        flow.insert(row);
    }
    // Only differences count; this keeps them from drifting over many rounds.
    let least = flow.prices.iter().copied().min().unwrap_or_default();
    prices
        .iter_mut()
        .zip(flow.prices)
        .for_each(|(out, price)| *out = price - least);
    flow.cluster_of.truncate(rows);
    flow.cluster_of
}

/// No cluster yet, or none before.
const NONE: usize = usize::MAX;

/// Rows by what they cost more elsewhere, the cheapest move on top.
type Moves = BinaryHeap<Reverse<(i64, u32)>>;

/// Rows of which each is in a cluster where cost plus price is least.
struct Flow {
    costs: Vec<i64>,
    capacity: usize,
    prices: Vec<i64>,
    cluster_of: Vec<usize>,
    sizes: Vec<usize>,
    /// Per pair of clusters `[from][to]`, rows of `from` by what they cost more in `to`. Rows that have left are skipped when they
    /// come up. Empty until a path first leaves `from`.
    moves: Vec<Vec<Moves>>,
}

impl Flow {
    fn new(costs: Vec<i64>, capacity: usize, prices: Vec<i64>) -> Self {
        let clusters = prices.len();
        Self {
            cluster_of: vec![NONE; costs.len() / clusters],
            costs,
            capacity,
            prices,
            sizes: vec![0; clusters],
            moves: vec![Vec::new(); clusters],
        }
    }

    fn costs_of(&self, row: usize) -> &[i64] {
        let clusters = self.prices.len();
        &self.costs[row * clusters..][..clusters]
    }

    /// Puts a row where cost plus price is least, if there is room.
    fn settle(&mut self, row: usize) -> bool {
        let priced = self
            .costs_of(row)
            .iter()
            .zip(&self.prices)
            .map(|(cost, price)| cost + price);
        let Some((_, cluster)) = priced.zip(0..).min() else {
            return true; // no clusters, so no rows
        };
        let free = self.sizes[cluster] < self.capacity;
        if free {
            self.sizes[cluster] += 1;
            self.cluster_of[row] = cluster;
        }
        free
    }

    /// Assigns one more row by the shortest path to a cluster that has room: Dijkstra's algorithm on the dense graph of
    /// clusters. With prices no step is negative.
    fn insert(&mut self, row: usize) {
        let clusters = self.prices.len();
        let mut length: Vec<i64> = self
            .costs_of(row)
            .iter()
            .zip(&self.prices)
            .map(|(cost, price)| cost + price)
            .collect();
        let mut before = vec![NONE; clusters];
        let mut open: Vec<usize> = (0..clusters).collect();
        let mut passed = Vec::new();
        let mut to = loop {
            let Some(next) = (0..open.len()).min_by_key(|&at| length[open[at]]) else {
                return; // the caller made sure that there is room
            };
            let from = open.swap_remove(next);
            if self.sizes[from] < self.capacity {
                break from;
            }
            passed.push(from);
            for &to in &open {
                let Some((extra, _)) = self.cheapest_move(from, to) else {
                    continue;
                };
                let through = length[from] + extra + self.prices[to] - self.prices[from];
                if through < length[to] {
                    length[to] = through;
                    before[to] = from;
                }
            }
        };
        // What the path passed becomes dearer by as much as it was nearer, so that all its steps end up equally good.
        for &cluster in &passed {
            self.prices[cluster] += length[to] - length[cluster];
        }
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
    }

    fn place(&mut self, row: usize, cluster: usize) {
        self.cluster_of[row] = cluster;
        if self.moves[cluster].is_empty() {
            return; // not yet needed: made from all rows of the cluster when it is
        }
        let clusters = self.prices.len();
        let costs = &self.costs[row * clusters..][..clusters];
        for (heap, cost) in self.moves[cluster].iter_mut().zip(costs) {
            heap.push(Reverse((cost - costs[cluster], row as u32)));
        }
    }

    fn cheapest_move(&mut self, from: usize, to: usize) -> Option<(i64, usize)> {
        if self.moves[from].is_empty() {
            self.moves[from] = self.moves_from(from);
        }
        let heap = &mut self.moves[from][to];
        while let Some(&Reverse((extra, row))) = heap.peek() {
            if self.cluster_of[row as usize] == from {
                return Some((extra, row as usize));
            }
            heap.pop();
        }
        None
    }

    fn moves_from(&self, from: usize) -> Vec<Moves> {
        let rows: Vec<usize> = (0..self.cluster_of.len())
            .filter(|&row| self.cluster_of[row] == from)
            .collect();
        let extra = |to: usize| {
            let extra = |&row: &usize| {
                let costs = self.costs_of(row);
                Reverse((costs[to] - costs[from], row as u32))
            };
            rows.iter().map(extra).collect()
        };
        (0..self.prices.len()).map(extra).collect()
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

    /// From no prices.
    fn cold(costs: &[f32], clusters: usize, capacity: usize) -> Vec<usize> {
        assign(costs, capacity, &mut vec![0; clusters])
    }

    fn units(costs: &[f32]) -> Vec<i64> {
        costs
            .iter()
            .map(|&cost| (f64::from(cost) * UNITS).round() as i64)
            .collect()
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
        assert_eq!(cold(&[0.0, 0.5, 0.1, 0.9], 2, 1), [1, 0]);
        assert_eq!(
            cold(&[0.0, 0.5, 0.1, 0.9], 2, 2),
            [0, 0],
            "capacity is a bound, no quota"
        );
    }

    #[test]
    fn fewer_rows_than_clusters_are_fine() {
        assert_eq!(cold(&[0.9, 0.1, 0.5], 3, 1), [1]);
        assert_eq!(cold(&[], 3, 0), Vec::<usize>::new());
    }

    #[test]
    #[should_panic(expected = "5 rows exceed 2 × 2")]
    fn rows_that_do_not_fit_are_a_mistake_of_the_caller() {
        cold(&[0.0; 10], 2, 2);
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
            let assignment = cold(&costs, clusters, capacity);
            prop_assert_eq!(assignment.len(), rows);
            for cluster in 0..clusters {
                let size = assignment.iter().filter(|&&c| c == cluster).count();
                prop_assert!(size <= capacity);
            }
            let expected = least(&costs, clusters, &mut vec![capacity; clusters]);
            prop_assert!((total(&costs, clusters, &assignment) - expected).abs() < 1e-6);
        }

        #[test]
        fn the_hungarian_algorithm_finds_no_cheaper_one_whatever_the_prices_at_first(
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
            prices in prop_oneof![Just([0.0; 8]), prop::array::uniform8(-4.0f64..4.0)],
        ) {
            let rows = costs.len() / clusters;
            let capacity = rows.div_ceil(clusters) + spare;
            let mut prices: Vec<i64> = prices.iter().map(|&price| (price * UNITS) as i64).collect();
            let prices = &mut prices[..clusters];
            let assignment = assign(&costs, capacity, prices);
            for cluster in 0..clusters {
                prop_assert!(assignment.iter().filter(|&&c| c == cluster).count() <= capacity);
            }
            let units = units(&costs);
            let found: i64 = assignment.iter().enumerate().map(|(row, &c)| units[row * clusters + c]).sum();
            prop_assert_eq!(found, hungarian(&costs, clusters, capacity));
            // The proof of it: no row has a cheaper place at these prices.
            for (row, &cluster) in assignment.iter().enumerate() {
                let priced = |c: usize| units[row * clusters + c] + prices[c];
                prop_assert!((0..clusters).all(|c| priced(c) >= priced(cluster)));
            }
        }
    }
}
