//! `eldr place`.

mod text;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use clap::Args;
use eldr_core::blob::Blob;
use serde::Serialize;

use crate::blob_file;
use crate::error::Error;
use crate::output;
use crate::place::formats::{Format, Map};
use crate::place::{Cost, Devices, Objective, Plan, Traffic};
use crate::trace::Phase;

#[derive(Debug, Args)]
#[command(after_help = "Example:
  eldr place task.eldr trace.jsonl.gz --gpus 8 -o placement --format sglang

Each decode cluster serves one region, so its experts are placed for that region's requests:
those of the trace that are most similar to its centroid. `decode` counts are used where at least
half of the requests have them, else `prefill` counts. Every GPU has equally many slots, replicas
of an expert are on different GPUs, and no such placement costs the busiest GPU less than the one
found, but for the gap that is shown.

distinct: experts that a decode step of --batch requests activates on a GPU, whose weights it must
read. Replicas only help where one expert alone is more than a GPU's share, as every replica in
use is read.
tokens: tokens routed to a GPU's experts, which bound large batches; replicas share them.

The table shows means over layers: `distinct` on the busiest GPU, and `balance`, mean over maximum
of the GPUs' tokens, for contiguous experts, for DeepSeek's EPLB on the same loads, and as placed.")]
pub(super) struct PlaceArgs {
    /// Centroid blob whose decode clusters are placed
    blob: PathBuf,
    /// Traces that show what experts are used for
    #[arg(required = true, value_name = "TRACE")]
    traces: Vec<PathBuf>,
    /// GPUs of each decode cluster
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    gpus: u16,
    /// Slots per layer beyond one per expert
    #[arg(long, default_value_t = 0, value_name = "R")]
    redundant: u16,
    /// Nodes of each decode cluster; replicas are spread over them
    #[arg(long, default_value_t = 1, value_name = "M", value_parser = clap::value_parser!(u16).range(1..))]
    nodes: u16,
    /// Groups of consecutive experts that stay on one node each, replicas included
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..))]
    groups: Option<u16>,
    /// What is to be small on the busiest GPU
    #[arg(long, value_enum, default_value_t = Objective::Distinct)]
    objective: Objective,
    /// Requests that a decode cluster runs at a time
    #[arg(long, default_value_t = 32, value_name = "B", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    batch: u32,
    /// Experts that each token activates, where the trace does not say how many tokens it counts
    #[arg(long, value_name = "K", value_parser = clap::value_parser!(u32).range(1..))]
    top_k: Option<u32>,
    /// Hidden layers before the first MoE layer (`first_k_dense_replace`), which SGLang and
    /// TensorRT-LLM count
    #[arg(long, default_value_t = 0, value_name = "N")]
    dense_layers: u16,
    /// Folder to write placements to; without it they are only compared
    #[arg(short, long, value_name = "DIR")]
    output: Option<PathBuf>,
    /// Formats to write; `eldr` is one file for all clusters, of others each cluster has its own
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = [Format::Eldr], requires = "output", value_name = "FORMAT,…")]
    format: Vec<Format>,
    /// Print one JSON object instead of text, every layer included
    #[arg(long)]
    json: bool,
}

/// What `--json` prints.
#[derive(Serialize)]
struct Report<'a> {
    #[serde(flatten)]
    basis: Basis<'a>,
    requests: usize,
    requests_counted: usize,
    records_skipped: usize,
    clusters: Vec<ClusterReport<'a>>,
    files: Vec<String>,
}

/// What placements were made for; begins both the report and our own format.
#[derive(Clone, Copy, Serialize)]
struct Basis<'a> {
    blob_sha256: &'a str,
    model: &'a str,
    counts: Phase,
    objective: Objective,
    batch: u32,
    #[serde(flatten)]
    devices: Devices,
}

#[derive(Serialize)]
struct ClusterReport<'a> {
    cluster: &'a str,
    regions: &'a [usize],
    requests: usize,
    #[serde(flatten)]
    plan: &'a Plan,
}

/// Our own format.
#[derive(Serialize)]
struct Placement<'a> {
    format: &'static str,
    #[serde(flatten)]
    basis: Basis<'a>,
    clusters: Vec<ClusterPlacement<'a>>,
}

/// Experts of each GPU, `[layer][gpu][slot]`.
#[derive(Serialize)]
struct ClusterPlacement<'a> {
    cluster: &'a str,
    layers: Vec<Vec<&'a [u16]>>,
}

impl PlaceArgs {
    pub(super) fn run(&self) -> Result<String, Error> {
        let bytes = blob_file::read(&self.blob)?;
        let blob = blob_file::verify(&self.blob, &bytes)?;
        let devices = Devices {
            experts: blob.transform.geometry().experts,
            gpus: self.gpus.into(),
            redundant: self.redundant.into(),
            nodes: self.nodes.into(),
            groups: self.groups.map(usize::from),
        }
        .check()?;
        let cost = Cost {
            objective: self.objective,
            batch: self.batch,
        };
        let traffic = self.read(&blob)?;
        let plans = plan(&traffic, devices, cost);
        let sha256 = blob_file::sha256(&bytes);
        let basis = Basis {
            blob_sha256: &sha256,
            model: &blob.model,
            counts: traffic.counts,
            objective: cost.objective,
            batch: cost.batch,
            devices,
        };
        let files = self.write(&traffic, &plans, basis)?;
        text::notes(&traffic);
        if self.json {
            let clusters = traffic.clusters.iter().zip(&plans);
            return Ok(super::to_json(&Report {
                basis,
                requests: traffic.requests,
                requests_counted: traffic.counted,
                records_skipped: traffic.skipped,
                clusters: clusters
                    .map(|(usage, plan)| ClusterReport {
                        cluster: &usage.cluster,
                        regions: &usage.regions,
                        requests: usage.requests,
                        plan,
                    })
                    .collect(),
                files,
            }));
        }
        Ok(text::text(&traffic, &plans, devices, cost, &files))
    }

    fn read(&self, blob: &Blob) -> Result<Traffic, Error> {
        let bar = super::reading();
        let traffic = Traffic::read(&self.traces, blob, self.top_k, || bar.inc(1));
        bar.finish_and_clear();
        traffic
    }

    /// Writes the placements and says where.
    fn write(
        &self,
        traffic: &Traffic,
        plans: &[Plan],
        basis: Basis<'_>,
    ) -> Result<Vec<String>, Error> {
        let Some(folder) = &self.output else {
            return Ok(Vec::new());
        };
        std::fs::create_dir_all(folder).map_err(|error| {
            let what = format!("{}: creating the folder failed: {error}", folder.display());
            Error::new(what, "give a folder that may be written to")
        })?;
        let mut files = Vec::new();
        let formats: BTreeSet<Format> = self.format.iter().copied().collect();
        for format in formats {
            if format == Format::Eldr {
                let path = folder.join("placement.json");
                files.push(write_file(&path, &own(traffic, plans, basis))?);
                continue;
            }
            for (usage, plan) in traffic.clusters.iter().zip(plans) {
                let name = format!("{}.{}", file_name(&usage.cluster), format.extension());
                let map = Map {
                    devices: basis.devices,
                    dense_layers: self.dense_layers.into(),
                    layers: &plan.slots,
                };
                let text = match format {
                    Format::Sglang => map.sglang(),
                    Format::TensorrtLlm => map.tensorrt_llm(),
                    _ => map.eplb(),
                };
                files.push(write_file(&folder.join(name), &text)?);
            }
        }
        Ok(files)
    }
}

fn plan(traffic: &Traffic, devices: Devices, cost: Cost) -> Vec<Plan> {
    let bar = super::working(traffic.clusters.len() as u64).with_message("placing");
    let plans = traffic.clusters.iter().map(|usage| {
        let layers_total = traffic.geometry.layers;
        let plan = Plan::new(usage, &traffic.layers, layers_total, devices, cost);
        bar.inc(1);
        plan
    });
    let plans = plans.collect();
    bar.finish_and_clear();
    plans
}

fn own(traffic: &Traffic, plans: &[Plan], basis: Basis<'_>) -> String {
    let size = basis.devices.slots_per_gpu();
    let clusters = traffic.clusters.iter().zip(plans);
    let placement = Placement {
        format: "eldr-placement-1",
        basis,
        clusters: clusters
            .map(|(usage, plan)| ClusterPlacement {
                cluster: &usage.cluster,
                layers: plan
                    .slots
                    .iter()
                    .map(|layer| layer.chunks_exact(size).collect())
                    .collect(),
            })
            .collect(),
    };
    let json = serde_json::to_string(&placement);
    json.expect("numbers, strings and lists have a JSON form") + "\n"
}

/// The cluster's name as part of a file name: other bytes than these are written as %XX.
fn file_name(cluster: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
    cluster
        .bytes()
        .map(|byte| match plain(byte) {
            true => char::from(byte).to_string(),
            false => format!("%{byte:02X}"),
        })
        .collect()
}

fn write_file(path: &Path, text: &str) -> Result<String, Error> {
    let name = path.display().to_string();
    output::write(path, text.as_bytes())
        .map(|()| name.clone())
        .map_err(|error| {
            let hint = "check that the folder may be written to and has space";
            Error::new(
                format!("{name}: writing the placement failed: {error}"),
                hint,
            )
        })
}
