//! All layers of a decode cluster placed, and compared with how else they could be.

use serde::Serialize;

use super::usage::Usage;
use super::{Cost, Devices, Objective, Slots, baseline, busiest, loads, place};

/// A placement of every layer of one cluster.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Plan {
    /// Means over the layers, the worst gap.
    pub summary: LayerReport,
    /// One entry per layer of the trace.
    pub layers: Vec<LayerReport>,
    /// One entry per MoE layer of the model; contiguous where the trace has no counts.
    #[serde(skip)]
    pub slots: Vec<Slots>,
}

/// One layer, or the mean of several.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LayerReport {
    /// The layer; none for the mean of all.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub layer: Option<u16>,
    /// The figures if nothing is done.
    pub contiguous: Figures,
    /// The figures of EPLB's greedy placement on the same token loads.
    pub eplb: Figures,
    /// The figures of our placement.
    pub placed: Figures,
    /// What the busiest GPU has at least, in units of the objective.
    pub bound: f64,
    /// How far the placement may be above the best, relative to the bound.
    pub gap: f64,
}

/// What a step costs the GPUs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Figures {
    /// Expected distinct experts on the busiest GPU.
    pub distinct_max: f64,
    /// Expected distinct experts on a GPU, mean.
    pub distinct_mean: f64,
    /// Expected tokens of the busiest GPU's experts.
    pub tokens_max: f64,
    /// Mean over maximum of the GPUs' tokens; 1 is balanced.
    pub token_balance: f64,
}

impl Figures {
    /// The figures of a placement in `slots`.
    pub fn of(probabilities: &[f64], slots: &[u16], gpus: usize, batch: u32) -> Self {
        let loads = |objective| loads(probabilities, slots, gpus, Cost { objective, batch });
        let mean = |loads: &[f64]| loads.iter().sum::<f64>() / loads.len() as f64;
        let (distinct, tokens) = (loads(Objective::Distinct), loads(Objective::Tokens));
        let tokens_max = busiest(&tokens);
        Figures {
            distinct_max: busiest(&distinct),
            distinct_mean: mean(&distinct),
            tokens_max,
            token_balance: if tokens_max > 0.0 {
                mean(&tokens) / tokens_max
            } else {
                1.0 // nothing to balance
            },
        }
    }

    fn mean(all: &[Figures]) -> Self {
        let mean = |of: fn(&Figures) -> f64| all.iter().map(of).sum::<f64>() / all.len() as f64;
        Figures {
            distinct_max: mean(|figures| figures.distinct_max),
            distinct_mean: mean(|figures| figures.distinct_mean),
            tokens_max: mean(|figures| figures.tokens_max),
            token_balance: mean(|figures| figures.token_balance),
        }
    }
}

impl LayerReport {
    fn mean(layers: &[LayerReport]) -> Self {
        let figures = |of: fn(&LayerReport) -> Figures| {
            Figures::mean(&layers.iter().map(of).collect::<Vec<_>>())
        };
        LayerReport {
            layer: None,
            contiguous: figures(|layer| layer.contiguous),
            eplb: figures(|layer| layer.eplb),
            placed: figures(|layer| layer.placed),
            bound: layers.iter().map(|layer| layer.bound).sum::<f64>() / layers.len() as f64,
            gap: layers.iter().map(|layer| layer.gap).fold(0.0, f64::max),
        }
    }
}

impl Plan {
    /// Places the `layers` of a trace, for which `usage` has probabilities, in a model of `layers_total`.
    pub fn new(
        usage: &Usage,
        layers: &[u16],
        layers_total: usize,
        devices: Devices,
        cost: Cost,
    ) -> Self {
        let contiguous = baseline::contiguous(devices);
        let mut slots = vec![contiguous.clone(); layers_total];
        let rows = usage.probabilities.chunks_exact(devices.experts);
        let reports = layers.iter().zip(rows).map(|(&layer, probabilities)| {
            let placed = place(probabilities, devices, cost);
            let eplb = baseline::eplb(probabilities, devices);
            let of = |slots: &[u16]| Figures::of(probabilities, slots, devices.gpus, cost.batch);
            let report = LayerReport {
                layer: Some(layer),
                contiguous: of(&contiguous),
                eplb: of(&eplb),
                placed: of(&placed.slots),
                bound: placed.bound,
                gap: placed.gap(),
            };
            slots[usize::from(layer)] = placed.slots;
            report
        });
        let reports: Vec<LayerReport> = reports.collect();
        Plan {
            summary: LayerReport::mean(&reports),
            layers: reports,
            slots,
        }
    }
}
