//! How many replicas each expert gets, and what no placement can beat.
//!
//! The two objectives want the opposite of redundant slots. Tokens are shared between replicas, so the
//! busiest experts are replicated. A distinct expert is read from memory wherever it is active, so a
//! second replica of an expert that every step activates costs a second read; then the slots, which the
//! engine fills anyway, go to experts that hardly any step activates, unless one expert alone is more
//! than its GPU's share.

use super::search::even;
use super::{Cost, Devices, Objective};

/// Promising choices of replicas per expert, each at least 1 and at most one per GPU, their sum
/// [`Devices::slots`]. Packing tells which is the best.
pub fn candidates(probabilities: &[f64], devices: Devices, cost: Cost) -> Vec<Vec<usize>> {
    let mut hot = vec![1; devices.experts];
    if cost.objective == Objective::Tokens || devices.redundant == 0 {
        // The sum is the same however slots are used; what counts is the largest replica.
        (0..devices.redundant)
            .for_each(|_| replicate_hottest(probabilities, &mut hot, devices, cost));
        return vec![hot];
    }
    // First k slots for the hottest, the rest where they cost least in all: k grows until the largest
    // replica is no obstacle to a perfect balance any more, as the sum only grows with k.
    let mut best = (f64::INFINITY, Vec::new());
    let mut balanced = false;
    for more in (0..=devices.redundant).rev() {
        if !balanced {
            let mut counts = hot.clone();
            replicate_cheapest(probabilities, &mut counts, more, devices, cost);
            let mut costs = Vec::with_capacity(devices.slots());
            for (&p, &count) in probabilities.iter().zip(&counts) {
                costs.extend(std::iter::repeat_n(cost.of(p, count), count));
            }
            let mean = costs.iter().sum::<f64>() / devices.gpus as f64;
            let value = packing_bound(&mut costs, devices.gpus);
            if value < best.0 {
                best = (value, counts);
            }
            balanced = value <= mean * (1.0 + 1e-12);
        }
        if more > 0 {
            replicate_hottest(probabilities, &mut hot, devices, cost);
        }
    }
    // All for the hottest, as replicas of one expert may not fit together as the bound hopes.
    vec![best.1, hot]
}

/// One more replica for the expert whose replicas cost most, which makes the largest as small as any
/// other choice can; of equal ones the lowest.
fn replicate_hottest(probabilities: &[f64], counts: &mut [usize], devices: Devices, cost: Cost) {
    let mut most = (f64::NEG_INFINITY, None);
    for (expert, (&p, &count)) in probabilities.iter().zip(&*counts).enumerate() {
        let own = cost.of(p, count);
        if count < devices.replicas_max() && own > most.0 {
            most = (own, Some(expert));
        }
    }
    if let (_, Some(expert)) = most {
        counts[expert] += 1;
    }
}

/// What all replicas of an expert cost together.
fn total(p: f64, count: usize, cost: Cost) -> f64 {
    count as f64 * cost.of(p, count)
}

/// `more` replicas where they add least to the sum of all costs. The sum of one expert's replicas is
/// concave in their number, so an expert that gets one is best filled up before the next gets any.
fn replicate_cheapest(
    probabilities: &[f64],
    counts: &mut [usize],
    mut more: usize,
    devices: Devices,
    cost: Cost,
) {
    let most = devices.replicas_max();
    let mut order: Vec<(f64, usize)> = Vec::with_capacity(counts.len());
    for (expert, (&p, &count)) in probabilities.iter().zip(&*counts).enumerate() {
        if count < most {
            let full = total(p, most, cost) - total(p, count, cost);
            order.push((full / (most - count) as f64, expert));
        }
    }
    order.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
    for (_, expert) in order {
        let take = more.min(most - counts[expert]);
        counts[expert] += take;
        more -= take;
    }
}

/// The least that the sum of all costs can be: the `redundant` replicas concentrated on as few experts
/// as hold them. A concave sum is least where all but one of them have none or all they may have, so
/// every such choice is tried.
fn least_sum(probabilities: &[f64], devices: Devices, cost: Cost) -> f64 {
    let base: f64 = probabilities.iter().map(|&p| cost.of(p, 1)).sum();
    if devices.redundant == 0 || cost.objective == Objective::Tokens {
        return base;
    }
    let most = devices.replicas_max();
    let room = most - 1;
    let (full, rest) = (devices.redundant / room, devices.redundant % room);
    let added = |p: f64, count| (total(p, count, cost) - cost.of(p, 1)).max(0.0);
    let mut order: Vec<(f64, usize)> = probabilities
        .iter()
        .enumerate()
        .map(|(expert, &p)| (added(p, most), expert))
        .collect();
    order.sort_by(|a, b| a.0.total_cmp(&b.0));
    let cheapest: f64 = order[..full].iter().map(|(added, _)| added).sum();
    if rest == 0 {
        return base + cheapest;
    }
    let partial = order.iter().enumerate().map(|(rank, &(own, expert))| {
        // The full ones are the cheapest that are not this one.
        let others = if rank < full {
            cheapest - own + order[full].0
        } else {
            cheapest
        };
        others + added(probabilities[expert], 1 + rest)
    });
    base + partial.fold(f64::INFINITY, f64::min)
}

/// What no placement of `costs` in equally many slots on each of `gpus` can beat: the mean; and, as of
/// the (j−1)·gpus+1 largest costs j must share a GPU, the j smallest of those together with the smallest
/// of all others that can fill that GPU's slots. Sorts `costs`.
pub fn packing_bound(costs: &mut [f64], gpus: usize) -> f64 {
    costs.sort_unstable_by(|a, b| b.total_cmp(a));
    let slots = costs.len() / gpus;
    let sum = |costs: &[f64]| costs.iter().sum::<f64>();
    let mut bound = sum(costs) / gpus as f64;
    for j in 1..=slots {
        let top = (j - 1) * gpus + 1;
        let together = sum(&costs[top - j..top]) + sum(&costs[costs.len() - (slots - j)..]);
        bound = bound.max(together);
    }
    bound
}

/// What no placement on `devices` can beat, however it replicates: `least_sum` shared equally; the
/// largest replica, as small as it can be made, beside the cheapest others; and with groups, the node
/// with most of them, its GPUs equally loaded.
pub fn bound(probabilities: &[f64], devices: Devices, cost: Cost) -> f64 {
    let mut bound = least_sum(probabilities, devices, cost) / devices.gpus as f64;
    let mut alone: Vec<f64> = probabilities.iter().map(|&p| cost.of(p, 1)).collect();
    if devices.redundant == 0 {
        bound = bound.max(packing_bound(&mut alone, devices.gpus));
    } else {
        let mut hot = vec![1; devices.experts];
        (0..devices.redundant)
            .for_each(|_| replicate_hottest(probabilities, &mut hot, devices, cost));
        let largest = probabilities
            .iter()
            .zip(&hot)
            .map(|(&p, &count)| cost.of(p, count));
        let largest = largest.fold(0.0, f64::max);
        // Replicas of one expert are on different GPUs, so the other slots hold different experts, each
        // replicated as often as it could be; the largest's own expert may be among the cheapest.
        let most = devices.replicas_max().min(devices.redundant + 1);
        let mut least: Vec<f64> = probabilities.iter().map(|&p| cost.of(p, most)).collect();
        least.sort_unstable_by(f64::total_cmp);
        bound = bound.max(largest + least[..devices.slots_per_gpu() - 1].iter().sum::<f64>());
    }
    if let Some(groups) = devices.groups {
        let mut sums = group_costs(probabilities, groups, cost);
        let node = match even(&sums, devices.nodes) {
            Some((fullest, _)) => fullest,
            None => packing_bound(&mut sums, devices.nodes),
        };
        bound = bound.max(node / (devices.gpus / devices.nodes) as f64);
    }
    bound
}

/// What each group of consecutive experts costs at least: one replica of each expert.
pub fn group_costs(probabilities: &[f64], groups: usize, cost: Cost) -> Vec<f64> {
    probabilities
        .chunks_exact(probabilities.len() / groups)
        .map(|group| group.iter().map(|&p| cost.of(p, 1)).sum())
        .collect()
}
