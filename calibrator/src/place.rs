//! Which expert lives on which GPU of a decode cluster that serves with expert parallelism.
//!
//! A decode step is as slow as its busiest GPU, and what keeps a GPU busy is above all the weights of
//! the distinct experts that it must read. A cluster that serves one region sees that region's experts,
//! so its placement is made for them ([`Usage`]), layer by layer: layers are independent, because every
//! step waits for the busiest GPU of each.
//!
//! Every GPU has equally many slots, as engines want it, and replicas of an expert are on different
//! GPUs. The number of replicas is chosen first ([`replicas`]), then replicas are packed greedily and
//! exchanged between GPUs while that helps ([`search`]). No placement can be below [`Layer::bound`]; how
//! far the one found may be from the best is known thereby.

pub mod baseline;
pub mod formats;
pub mod plan;
pub mod replicas;
pub mod search;
pub mod usage;

use serde::Serialize;

use crate::error::Error;
use search::{Item, Packing};

pub use plan::Plan;
pub use usage::{Traffic, Usage};

/// What is to be small on the busiest GPU, per layer and decode step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum Objective {
    /// Distinct experts that the step activates, whose weights must be read: Σ 1−(1−p)^B.
    #[value(help = "Distinct experts, whose weights must be read")]
    Distinct,
    /// Tokens that are routed to experts: Σ p·B.
    #[value(help = "Routed tokens")]
    Tokens,
}

/// An objective at a batch size.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Cost {
    /// What is counted.
    pub objective: Objective,
    /// Tokens of a decode step, one per running request.
    pub batch: u32,
}

impl Cost {
    /// What one of `replicas` of an expert adds to its GPU, if a token activates the expert with
    /// `probability` and takes any replica equally often.
    ///
    /// Falls with the number of replicas; the sum over all replicas grows (and not at all for tokens).
    pub fn of(self, probability: f64, replicas: usize) -> f64 {
        let (own, batch) = (probability / replicas as f64, f64::from(self.batch));
        match self.objective {
            // 1 − (1 − own)^batch, exact for small `own` too.
            Objective::Distinct => -(batch * (-own.min(1.0)).ln_1p()).exp_m1(),
            Objective::Tokens => own * batch,
        }
    }
}

/// The GPUs of one decode cluster and what they must hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Devices {
    /// Experts per layer.
    pub experts: usize,
    /// GPUs.
    pub gpus: usize,
    /// Slots beyond one per expert.
    pub redundant: usize,
    /// Nodes; each has equally many GPUs, one after the other.
    pub nodes: usize,
    /// Groups of consecutive experts that must each stay on one node, for models with group-limited
    /// routing. Without groups, replicas of an expert are spread over the nodes instead.
    pub groups: Option<usize>,
}

impl Devices {
    /// Checks that everything divides as it must.
    ///
    /// # Errors
    /// The text names the numbers and the nearest ones that would do.
    pub fn check(self) -> Result<Self, Error> {
        let Devices {
            experts,
            gpus,
            redundant,
            nodes,
            groups,
        } = self;
        let slots = experts + redundant;
        if gpus == 0 || !slots.is_multiple_of(gpus) {
            let more = slots.next_multiple_of(gpus.max(1)) - experts;
            return Err(Error::new(
                format!(
                    "{experts} experts and {redundant} redundant ones do not share {gpus} GPUs equally"
                ),
                format!(
                    "every GPU has equally many slots: --redundant {more}, or another number of GPUs"
                ),
            ));
        }
        if nodes == 0 || !gpus.is_multiple_of(nodes) {
            return Err(Error::new(
                format!("{gpus} GPUs are not equally many on each of {nodes} nodes"),
                "give --nodes a number that divides --gpus",
            ));
        }
        match groups {
            Some(groups) if groups == 0 || !experts.is_multiple_of(groups) => {
                return Err(Error::new(
                    format!("{experts} experts do not make {groups} groups of equal size"),
                    "give --groups as the model has them (`n_group` in its config.json)",
                ));
            }
            Some(groups) if !groups.is_multiple_of(nodes) => {
                return Err(Error::new(
                    format!("{groups} groups are not equally many on each of {nodes} nodes"),
                    "leave --groups out, or give --nodes a number that divides it",
                ));
            }
            _ => {}
        }
        if slots > experts * self.replicas_max() {
            let replicas = self.replicas_max();
            let most = experts * (replicas - 1);
            return Err(Error::new(
                format!(
                    "{redundant} redundant experts: {experts} experts can have {replicas} replicas each, on different GPUs"
                ),
                format!("give --redundant {most} or less"),
            ));
        }
        Ok(self)
    }

    /// Slots of the cluster, per layer.
    pub fn slots(self) -> usize {
        self.experts + self.redundant
    }

    /// Most replicas of one expert: one per GPU that it may be on.
    pub fn replicas_max(self) -> usize {
        self.gpus / self.groups.map_or(1, |_| self.nodes)
    }

    /// Slots of one GPU, per layer.
    pub fn slots_per_gpu(self) -> usize {
        self.slots() / self.gpus
    }
}

/// The placement of one layer: the expert in each slot, GPU after GPU, ascending within a GPU. This is
/// the physical-to-logical map of SGLang and EPLB.
pub type Slots = Vec<u16>;

/// One layer, placed.
#[derive(Clone, Debug, PartialEq)]
pub struct Layer {
    /// The placement.
    pub slots: Slots,
    /// Cost of the busiest GPU where the search began.
    pub start: f64,
    /// Cost of the busiest GPU.
    pub value: f64,
    /// No placement with these slots costs its busiest GPU less.
    pub bound: f64,
}

impl Layer {
    /// How far the placement may at most be from the best, relative to it.
    pub fn gap(&self) -> f64 {
        gap(self.value, self.bound)
    }
}

/// How far `value` is above `bound`, relative to it; 0 if both are 0.
pub fn gap(value: f64, bound: f64) -> f64 {
    if value > bound {
        value / bound - 1.0
    } else {
        0.0 // rounding may put the value of a perfect placement below the bound
    }
}

/// Cost of each GPU. `probabilities` has one entry per expert, `slots` equally many per GPU.
///
/// # Panics
/// If a slot has no such expert.
pub fn loads(probabilities: &[f64], slots: &[u16], gpus: usize, cost: Cost) -> Vec<f64> {
    let mut replicas = vec![0; probabilities.len()];
    for &expert in slots {
        replicas[usize::from(expert)] += 1;
    }
    let of = |&expert: &u16| {
        let expert = usize::from(expert);
        cost.of(probabilities[expert], replicas[expert])
    };
    slots
        .chunks_exact(slots.len() / gpus)
        .map(|gpu| gpu.iter().map(of).sum())
        .collect()
}

/// The largest of `loads`.
pub fn busiest(loads: &[f64]) -> f64 {
    loads.iter().copied().fold(0.0, f64::max)
}

/// Places one layer. `probabilities[expert]`: how likely a token is to activate the expert.
///
/// # Panics
/// If `probabilities` has not one entry per expert of `devices`, which must have passed
/// [`Devices::check`].
pub fn place(probabilities: &[f64], devices: Devices, cost: Cost) -> Layer {
    assert_eq!(probabilities.len(), devices.experts);
    let (start, slots) = match devices.groups {
        None => flat(probabilities, devices, cost),
        Some(groups) => grouped(probabilities, devices, groups, cost),
    };
    let value = |slots: &[u16]| busiest(&loads(probabilities, slots, devices.gpus, cost));
    Layer {
        start: value(&start),
        value: value(&slots),
        bound: replicas::bound(probabilities, devices, cost),
        slots,
    }
}

/// A start and what the search made of it, for experts that may be on any GPU.
fn flat(probabilities: &[f64], devices: Devices, cost: Cost) -> (Slots, Slots) {
    let mut best = (f64::INFINITY, Slots::new(), Slots::new());
    for replicas in replicas::candidates(probabilities, devices, cost) {
        let mut items = Vec::with_capacity(devices.slots());
        for (expert, &count) in replicas.iter().enumerate() {
            let item = Item {
                expert: expert as u16,
                cost: cost.of(probabilities[expert], count),
            };
            items.extend(std::iter::repeat_n(item, count));
        }
        let mut packing = Packing::greedy(&items, &replicas, devices.gpus, devices.nodes);
        let start = packing.slots();
        packing.improve();
        if packing.busiest() < best.0 {
            best = (packing.busiest(), start, packing.slots());
        }
    }
    (best.1, best.2)
}

/// Groups to nodes first, then each node by itself.
fn grouped(probabilities: &[f64], devices: Devices, groups: usize, cost: Cost) -> (Slots, Slots) {
    let size = devices.experts / groups;
    let sums = replicas::group_costs(probabilities, groups, cost);
    let nodes = match search::even(&sums, devices.nodes) {
        Some((_, nodes)) => nodes,
        None => {
            let item = |(group, &cost): (usize, &f64)| Item {
                expert: group as u16,
                cost,
            };
            let items: Vec<Item> = sums.iter().enumerate().map(item).collect();
            let mut packing = Packing::greedy(&items, &vec![1; groups], devices.nodes, 1);
            packing.improve();
            let slots: Vec<usize> = packing.slots().into_iter().map(usize::from).collect();
            let per_node = groups / devices.nodes;
            slots
                .chunks_exact(per_node)
                .map(<[usize]>::to_vec)
                .collect()
        }
    };
    let node = Devices {
        experts: devices.experts / devices.nodes,
        gpus: devices.gpus / devices.nodes,
        redundant: devices.redundant / devices.nodes,
        nodes: 1,
        groups: None,
    };
    let (mut start, mut slots) = (Vec::new(), Vec::new());
    for groups in nodes {
        let experts: Vec<u16> = groups
            .iter()
            .flat_map(|&group| group * size..(group + 1) * size)
            .map(|expert| expert as u16)
            .collect();
        let own: Vec<f64> = experts
            .iter()
            .map(|&e| probabilities[usize::from(e)])
            .collect();
        let (begun, ended) = flat(&own, node, cost);
        start.extend(begun.iter().map(|&at| experts[usize::from(at)]));
        slots.extend(ended.iter().map(|&at| experts[usize::from(at)]));
    }
    (start, slots)
}

#[cfg(test)]
mod tests;
