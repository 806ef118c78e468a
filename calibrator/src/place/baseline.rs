//! What a placement is compared with: contiguous experts, and DeepSeek's EPLB.

use super::{Devices, Slots};

/// Slot i has expert i, redundant slots begin again at expert 0: what engines do when they are told
/// nothing (`trivial` in SGLang).
pub fn contiguous(devices: Devices) -> Slots {
    (0..devices.slots())
        .map(|slot| (slot % devices.experts) as u16)
        .collect()
}

/// DeepSeek's EPLB on token loads, after its published description (`github.com/deepseek-ai/EPLB`):
/// groups are packed to nodes, the expert with the most tokens per replica gets the next redundant slot
/// of its node, and replicas are packed to the node's GPUs; packing gives the heaviest to the lightest
/// that has room. Where groups do not divide by the nodes, it is one node with one group.
///
/// Computes in `f32`, as it does. Replicas of one expert may meet on one GPU.
pub fn eplb(loads: &[f64], devices: Devices) -> Slots {
    let (nodes, groups) = match devices.groups {
        Some(groups) if groups.is_multiple_of(devices.nodes) => (devices.nodes, groups),
        _ => (1, 1),
    };
    let loads: Vec<f32> = loads.iter().map(|&load| load as f32).collect();
    let size = devices.experts / groups;
    let sums: Vec<f32> = loads
        .chunks_exact(size)
        .map(|group| group.iter().sum())
        .collect();
    let mut slots = Vec::with_capacity(devices.slots());
    for groups in balanced_packing(&sums, nodes) {
        let experts: Vec<usize> = groups
            .iter()
            .flat_map(|&group| group * size..(group + 1) * size)
            .collect();
        let own: Vec<f32> = experts.iter().map(|&expert| loads[expert]).collect();
        let (replicas, shared) = replicate_experts(&own, devices.slots() / nodes);
        for gpu in balanced_packing(&shared, devices.gpus / nodes) {
            slots.extend(gpu.iter().map(|&replica| experts[replicas[replica]] as u16));
        }
    }
    slots
}

/// Items of each pack, equally many in each: the heaviest item first, to the lightest pack with room.
fn balanced_packing(weights: &[f32], packs: usize) -> Vec<Vec<usize>> {
    let room = weights.len() / packs;
    if room == 1 {
        return (0..packs).map(|item| vec![item]).collect();
    }
    let mut order: Vec<usize> = (0..weights.len()).collect();
    order.sort_by(|&a, &b| weights[b].total_cmp(&weights[a]));
    let mut packed = vec![(0.0f32, Vec::new()); packs];
    for item in order {
        let open = packed.iter_mut().filter(|(_, items)| items.len() < room);
        if let Some((weight, items)) = open.min_by(|a, b| a.0.total_cmp(&b.0)) {
            *weight += weights[item];
            items.push(item);
        }
    }
    packed.into_iter().map(|(_, items)| items).collect()
}

/// The expert of each of `slots` replicas, and its share of the load.
fn replicate_experts(loads: &[f32], slots: usize) -> (Vec<usize>, Vec<f32>) {
    let mut experts: Vec<usize> = (0..loads.len()).collect();
    let mut counts = vec![1.0f32; loads.len()];
    while experts.len() < slots {
        let share = |expert: usize| loads[expert] / counts[expert];
        let most = (1..loads.len()).fold(0, |most, expert| {
            if share(expert) > share(most) {
                expert
            } else {
                most
            }
        });
        counts[most] += 1.0;
        experts.push(most);
    }
    let shares = experts
        .iter()
        .map(|&expert| loads[expert] / counts[expert])
        .collect();
    (experts, shares)
}
