//! Placements as engines read them.

use std::fmt::Write as _;

use clap::ValueEnum;
use serde::Serialize;
use serde_json::json;

use super::{Devices, Slots};

/// A format of placement files.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub enum Format {
    /// One JSON file of all clusters, with what they were placed for
    Eldr,
    /// SGLang, `--init-expert-location FILE`
    Sglang,
    /// TensorRT-LLM, `moe_config.load_balancer: FILE`
    TensorrtLlm,
    /// The three maps that DeepSeek's EPLB returns, as JSON
    Eplb,
}

/// The placement of every MoE layer of one cluster.
#[derive(Clone, Copy, Debug)]
pub struct Map<'a> {
    /// The cluster's GPUs.
    pub devices: Devices,
    /// Hidden layers before the first MoE layer, which have no experts.
    pub dense_layers: usize,
    /// One entry per MoE layer of the model.
    pub layers: &'a [Slots],
}

impl Format {
    /// Ending of a file's name.
    pub fn extension(self) -> &'static str {
        match self {
            Format::Eldr => "json",
            Format::Sglang => "sglang.json",
            Format::TensorrtLlm => "tensorrt-llm.yaml",
            Format::Eplb => "eplb.json",
        }
    }
}

impl Map<'_> {
    /// `{"physical_to_logical_map": [[expert per slot] per hidden layer]}`, this one key (SGLang's
    /// `compute_initial_expert_location_metadata`). SGLang counts all hidden layers; those without
    /// experts get the contiguous map, which nothing reads.
    pub fn sglang(&self) -> String {
        let dense = super::baseline::contiguous(self.devices);
        let dense = std::iter::repeat_n(&dense, self.dense_layers);
        let rows: Vec<&Slots> = dense.chain(self.layers).collect();
        json!({ "physical_to_logical_map": rows }).to_string() + "\n"
    }

    /// The YAML of TensorRT-LLM's `MoeLoadBalancerConfig` for a placement that stays as it is:
    /// `initial_global_assignments` by index of the hidden layer, `num_slots`, and no layer updates.
    pub fn tensorrt_llm(&self) -> String {
        let mut yaml = "initial_global_assignments:\n".to_owned();
        for (layer, slots) in self.layers.iter().enumerate() {
            let ids: Vec<String> = slots.iter().map(u16::to_string).collect();
            let layer = self.dense_layers + layer;
            // Writing into a String cannot fail.
            let _ = writeln!(yaml, "  {layer}: [{}]", ids.join(", "));
        }
        let slots = self.devices.slots();
        let _ = write!(yaml, "num_slots: {slots}\nlayer_updates_per_iter: 0\n");
        yaml
    }

    /// What EPLB's `rebalance_experts` returns, by the names of its documentation:
    /// `physical_to_logical_map` `[layers][slots]`, `logical_to_physical_map` `[layers][experts][X]`
    /// with -1 where an expert has fewer than X replicas, `expert_count` `[layers][experts]`.
    pub fn eplb(&self) -> String {
        #[derive(Serialize)]
        struct Maps<'a> {
            physical_to_logical_map: &'a [Slots],
            logical_to_physical_map: Vec<Vec<Vec<i64>>>,
            expert_count: Vec<Vec<usize>>,
        }
        let mut replicas: Vec<Vec<Vec<i64>>> = Vec::with_capacity(self.layers.len());
        for slots in self.layers {
            let mut own = vec![Vec::new(); self.devices.experts];
            for (slot, &expert) in slots.iter().enumerate() {
                own[usize::from(expert)].push(slot as i64);
            }
            replicas.push(own);
        }
        let expert_count: Vec<Vec<usize>> = replicas
            .iter()
            .map(|layer| layer.iter().map(Vec::len).collect())
            .collect();
        let most = expert_count.iter().flatten().copied().max().unwrap_or(0);
        for own in replicas.iter_mut().flatten() {
            own.resize(most, -1);
        }
        let maps = Maps {
            physical_to_logical_map: self.layers,
            logical_to_physical_map: replicas,
            expert_count,
        };
        let json = serde_json::to_string(&maps);
        json.expect("lists of numbers have a JSON form") + "\n"
    }
}

#[cfg(test)]
mod tests;
