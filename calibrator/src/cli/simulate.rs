//! `eldr simulate`.

pub(super) mod options;
pub(super) mod text;

pub(super) use text::command;

use std::path::PathBuf;

use clap::Args;
use eldr_core::blob::Blob;
use eldr_core::decide::Rule;
use indicatif::ProgressBar;
use serde::Serialize;

use self::options::{ArrivalOptions, ClusterOptions};
use super::explain::{Factor, factor};
use crate::blob_file;
use crate::error::Error;
use crate::fit;
use crate::regions;
use crate::requests::Requests;
use crate::simulate::compare::{Comparison, Setting, compare};
use crate::simulate::policy::{Known, PolicyKind, PolicySpec};
use crate::simulate::{Lengths, Replay, Workload};

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  eldr simulate examples/data/small-moe/task_evaluation.jsonl.gz \\
      --calibrate examples/data/small-moe/task_calibration.jsonl.gz --rate 20 --decode-tokens 512
  eldr simulate trace.jsonl --blob task.eldr --policies round_robin,least_loaded,band,band:tau=0.3:cap=none
  eldr simulate trace.jsonl --blob task.eldr --lengths AzureLLMInferenceTrace_conv.csv --arrivals lengths
  eldr simulate chat.jsonl code.jsonl --blob chat.eldr --mix 0:@1,60:@2 --policies least_loaded,band,band:refit=2.5/5

Replays the requests of a trace on a simulated cluster: prefill workers first come first served, gateways
that decide by the code that real ones run, decode workers that batch continuously. Every policy meets the
same arrivals. A decode step takes t0 + b·U + c·B + d·KV ms: U distinct experts per layer, B requests,
KV thousands of tokens in their KV caches. U is counted where every request of the trace has `decode_topk`,
else expected from its counts.

The step coefficients are fits to published figures that do not tell b from c: an assumption. Half of b
about halves what signatures gain; try both before believing one. A gain that stays with
--permute-signatures does not come from signatures.

Exit code 0 says that it ran, not that any policy is better.")]
pub(super) struct SimulateArgs {
    /// Traces to replay; with --calibrate, of other requests than those
    #[arg(required = true, value_name = "TRACE")]
    traces: Vec<PathBuf>,
    /// Policies, each with a tau, a load cap and (marginal, hybrid) an exponent q of its own if need be:
    /// band:tau=0.2:cap=none,marginal:q=1; candidates=2 chooses among two drawn workers,
    /// usage=decode knows what requests really activate, refit=2.5/5 refits centroids every 2.5 s to the last 5 s
    /// [default: all that can run]
    #[arg(long, value_delimiter = ',', value_name = "POLICY,…")]
    policies: Vec<PolicySpec>,
    /// Compare with what no gateway can do as well: each rule with true decode usage in place of the
    /// signature (band:usage=decode), and the best assignments that a search finds which knows the
    /// whole run (hindsight, hindsight:for=p99)
    #[arg(long)]
    limit: bool,
    /// Centroid blob that policies compare signatures with; its workers are the decode workers
    #[arg(long, conflicts_with = "calibrate")]
    blob: Option<PathBuf>,
    /// Traces to fit such a blob to, as `eldr fit` does by default
    #[arg(long, value_name = "TRACE")]
    calibrate: Vec<PathBuf>,
    /// Regions of that fit: auto, or a number
    #[arg(long, default_value = "auto", value_parser = super::fit::regions, value_name = "auto|N", requires = "calibrate")]
    regions: fit::Regions,
    /// Band width, 0 to 2 [default: the blob's]
    #[arg(long, value_parser = super::fit::tau)]
    tau: Option<f32>,
    /// A worker above this multiple of the mean load is no candidate, 1 to 100, or none
    /// [default: 1.25]
    #[arg(long, value_parser = factor)]
    max_load_factor: Option<Factor>,
    #[command(flatten)]
    cluster: ClusterOptions,
    #[command(flatten)]
    arrivals: ArrivalOptions,
    /// How distinct experts are found
    #[arg(long, value_enum, default_value_t = Replay::Auto)]
    replay: Replay,
    /// Placebo: exchange signatures between requests at random
    #[arg(long)]
    permute_signatures: bool,
    /// First seed of arrivals, and of the fit
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Runs of each policy, with seeds that follow each other
    #[arg(long, default_value_t = 5, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1000))]
    seeds: u16,
    /// Print one JSON object instead of text, every run included
    #[arg(long)]
    json: bool,
}

/// What was compared, beside the results.
#[derive(Serialize)]
struct Report<'a> {
    command: String,
    requests: usize,
    records_skipped: usize,
    exact: bool,
    step_model: eldr_core::engine::StepModel,
    #[serde(skip_serializing_if = "Option::is_none")]
    step_fit: Option<crate::steps::StepFit>,
    #[serde(skip_serializing_if = "Option::is_none")]
    assumed: Option<eldr_core::engine::StepModel>,
    regions: Option<usize>,
    tau: f32,
    max_load_factor: Option<f64>,
    #[serde(flatten)]
    comparison: &'a Comparison,
}

impl SimulateArgs {
    /// What clap cannot check on its own; the text is for a usage error.
    pub(super) fn check(&self) -> Result<(), String> {
        for (index, spec) in self.policies.iter().enumerate() {
            if self.policies[..index]
                .iter()
                .any(|other| other.name == spec.name)
            {
                return Err(format!("--policies: {} is named twice", spec.name));
            }
        }
        self.cluster.check()?;
        self.arrivals.check()
    }

    pub(super) fn run(&self) -> Result<String, Error> {
        let workload = self.read()?;
        let lengths = self
            .arrivals
            .lengths
            .as_deref()
            .map(Lengths::read)
            .transpose()?;
        let mix = self.arrivals.mix();
        let blob = self.blob()?;
        let workers = self.workers(blob.as_ref())?;
        let step_fit = self
            .cluster
            .step_fit(workers.len(), self.arrivals.decode_tokens)?;
        let geometry = workload.geometry;
        let cluster = self.cluster.cluster(&workers, geometry, &self.arrivals)?;
        self.cluster.check_changes(workers.len())?;
        self.cluster.note_on_experts(workload.geometry.experts);
        let rule = Rule {
            tau: self
                .tau
                .or(blob.as_ref().map(|blob| blob.tau))
                .unwrap_or(Rule::default().tau),
            max_load_factor: match self.max_load_factor {
                Some(factor) => factor.0,
                None => Rule::default().max_load_factor,
            },
            ..Rule::default()
        };
        let regions = blob.as_ref().map(|blob| blob.regions.len());
        let known = blob
            .map(|blob| self.known(blob, &workers, &workload))
            .transpose()?;
        let policies = self.policies(&workload, known.is_some());
        let seeds: Vec<u64> = (0..u64::from(self.seeds))
            .map(|n| self.seed.wrapping_add(n))
            .collect();
        let setting = Setting {
            cluster: &cluster,
            workload: &workload,
            plan: self
                .arrivals
                .plan(lengths.as_ref(), mix.as_ref(), self.permute_signatures),
            rule,
            known: known.as_ref(),
        };
        let bar = super::working((policies.len() * seeds.len()) as u64).with_message("simulating");
        let comparison = compare(setting, &policies, &seeds, || bar.inc(1));
        bar.finish_and_clear();
        let comparison = comparison?;
        let report = Report {
            command: text::command(std::env::args_os()),
            requests: workload.requests.len(),
            records_skipped: workload.skipped,
            exact: workload.exact,
            step_model: cluster.step,
            step_fit,
            assumed: cluster.assumed,
            regions,
            tau: rule.tau,
            max_load_factor: rule.max_load_factor,
            comparison: &comparison,
        };
        Ok(if self.json {
            super::to_json(&report)
        } else {
            text::text(&report, &cluster)
        })
    }

    fn read(&self) -> Result<Workload, Error> {
        let bar = super::reading();
        let workload = Workload::read(&self.traces, self.replay, || bar.inc(1));
        bar.finish_and_clear();
        workload
    }

    fn blob(&self) -> Result<Option<Blob>, Error> {
        if let Some(path) = &self.blob {
            return blob_file::verify(path, &blob_file::read(path)?).map(Some);
        }
        if self.calibrate.is_empty() {
            return Ok(None);
        }
        for trace in self
            .calibrate
            .iter()
            .filter(|trace| self.traces.contains(trace))
        {
            eprintln!(
                "note: {} is calibrated on and replayed: what signatures gain on requests of their own fit says little",
                trace.display()
            );
        }
        let bar = ProgressBar::new_spinner().with_message("fitting");
        bar.set_style(super::style("{spinner} {msg} {elapsed}"));
        let options = fit::Options {
            seed: self.seed,
            regions: self.regions,
            ..fit::Options::new(names(self.cluster.decode_workers()))
        };
        let requests = Requests::read(&self.calibrate, || bar.tick())?;
        let fitted = fit::fit(&requests, &options, |_| bar.tick());
        bar.finish_and_clear();
        fitted.map(|fitted| Some(fitted.blob))
    }

    /// Names of the decode workers: those of a given blob first.
    fn workers(&self, blob: Option<&Blob>) -> Result<Vec<String>, Error> {
        let (Some(blob), Some(path)) = (blob, &self.blob) else {
            return Ok(names(self.cluster.decode_workers()));
        };
        let mut workers = regions::workers(&blob.regions);
        let asked = self.cluster.decode.map_or(workers.len(), usize::from);
        if asked < workers.len() {
            return Err(Error::new(
                format!(
                    "--decode {asked}: {} names {} decode workers",
                    path.display(),
                    workers.len()
                ),
                "leave --decode out, or give the blob fewer workers with `eldr remap`",
            ));
        }
        // Beyond those of the blob are spares, which serve no region.
        workers.extend((workers.len()..asked).map(|index| format!("spare-{index}")));
        Ok(workers)
    }

    fn known(&self, blob: Blob, workers: &[String], workload: &Workload) -> Result<Known, Error> {
        let found = blob.transform.geometry();
        if found != workload.geometry {
            return Err(Error::new(
                format!(
                    "the blob is for {found}, the trace has {}",
                    workload.geometry
                ),
                "simulate with a blob of the model whose requests the trace has",
            ));
        }
        Ok(Known::of_blob(blob, workers, workload)?)
    }

    /// Those that are asked for, or all that the input allows.
    fn policies(&self, workload: &Workload, has_blob: bool) -> Vec<PolicySpec> {
        let mut policies = match self.policies.is_empty() {
            true => all_policies(workload, has_blob),
            false => self.policies.clone(),
        };
        if self.limit {
            let with_truth = policies.iter().filter_map(PolicySpec::with_true_usage);
            let hindsight = ["hindsight", "hindsight:for=p99"];
            let hindsight = hindsight.into_iter().filter_map(|name| name.parse().ok());
            let limits: Vec<PolicySpec> = with_truth.chain(hindsight).collect();
            for limit in limits {
                if policies.iter().all(|spec| spec.name != limit.name) {
                    policies.push(limit);
                }
            }
        }
        policies
    }
}

/// All policies that the input allows and gateways could run, and `label`.
fn all_policies(workload: &Workload, has_blob: bool) -> Vec<PolicySpec> {
    let labels = workload
        .requests
        .iter()
        .any(|request| request.label.is_some());
    let named = PolicySpec::names()
        .into_iter()
        .filter_map(|name| name.parse().ok());
    let mut policies: Vec<PolicySpec> = named
        .filter(|spec: &PolicySpec| match spec.kind {
            PolicyKind::Label => labels,
            PolicyKind::Rule(policy) => has_blob || !policy.compares_regions(),
            // On demand: it takes as long as many of the others.
            PolicyKind::Hindsight(_) => false,
        })
        .collect();
    // References first.
    policies.sort_by_key(|spec| !spec.is_load_balancer());
    policies
}

fn names(workers: usize) -> Vec<String> {
    (0..workers)
        .map(|index| format!("decode-{index}"))
        .collect()
}
