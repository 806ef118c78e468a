//! `eldr explain`.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{ArgGroup, Args};
use eldr_core::decide::{Policy, Rule};
use eldr_core::engine::StepModel;
use eldr_core::marginal::{MAX_EXPONENT, Objective};

use super::simulate::options::not_negative;
use crate::blob_file;
use crate::error::Error;
use crate::explain::{Asked, Situation, explain};
use crate::trace;

#[derive(Debug, Args)]
#[command(group(ArgGroup::new("request").required(true).args(["id", "signature"])))]
#[command(after_help = "Examples:
  eldr explain task.eldr --trace access.log --id 0e0397cf --loads decode-0=12,decode-1=3
  eldr explain task.eldr --signature ':AAABAA==:;l=1;e=2' --policy top1 --json
  eldr explain task.eldr --trace access.log --id 0e0397cf --policy hybrid \\
      --running decode-0=5f1c+77aa,decode-1=b20d

The decision is made by the code that gateways run, from the same bytes. Loads are the gateway's:
requests in flight over the worker's weight, or else those that --running names. By what these run,
marginal, hybrid and batch_band choose. Workers are taken in the order in which the blob names them;
if a gateway's `decode_clusters` has another order, equal loads of equally similar regions may go
elsewhere there.")]
pub(super) struct ExplainArgs {
    /// Centroid blob
    blob: PathBuf,
    /// Trace or access log with the request
    #[arg(long, requires = "id")]
    trace: Option<PathBuf>,
    /// Id of the request in the trace
    #[arg(long, requires = "trace")]
    id: Option<String>,
    /// Value of the request's x-eldr-signature header, in place of trace and id
    #[arg(long, value_name = "HEADER-VALUE", conflicts_with = "trace")]
    signature: Option<String>,
    /// Load of decode workers [default: the requests that run there]
    #[arg(long, value_delimiter = ',', value_name = "WORKER=LOAD,…", value_parser = load)]
    loads: Vec<(String, f64)>,
    /// Requests of the trace that run on decode workers, for policies that look at running batches
    #[arg(long, value_delimiter = ',', value_name = "WORKER=ID+ID+…,…", value_parser = running)]
    running: Vec<(String, Vec<String>)>,
    /// Decode workers that are taken out or drain
    #[arg(long, value_delimiter = ',', value_name = "WORKER,…")]
    out: Vec<String>,
    /// Policy, as in the gateway's configuration
    #[arg(long, default_value = "band", value_parser = policies())]
    policy: Policy,
    /// Band width, 0 to 2 [default: 0.5 for hybrid, else the blob's]
    #[arg(long, value_parser = super::fit::tau)]
    tau: Option<f32>,
    /// A worker above this multiple of the mean load is no candidate, 1 to 100, or none
    /// [default: 1.25]
    #[arg(long, value_parser = factor)]
    max_load_factor: Option<Factor>,
    /// Decisions before this one (round_robin), or random bits (p2c, random)
    #[arg(long, default_value_t = 0)]
    draw: u64,
    #[command(flatten)]
    step: StepOptions,
    /// Print one JSON object instead of text
    #[arg(long)]
    json: bool,
}

/// What a decode step takes, as in the gateway's configuration.
#[derive(Debug, Args)]
struct StepOptions {
    /// Time of a decode step whatever its batch, ms, for marginal and hybrid [default: 5.84]
    #[arg(long, value_name = "MS", value_parser = not_negative)]
    step_t0_ms: Option<f64>,
    /// And for each distinct expert per layer [default: 0.144]
    #[arg(long, value_name = "MS", value_parser = not_negative)]
    step_b_ms: Option<f64>,
    /// And for each request [default: 0.026]
    #[arg(long, value_name = "MS", value_parser = not_negative)]
    step_c_ms: Option<f64>,
    /// And for each 1,000 tokens in the KV cache [default: 0]
    #[arg(long, value_name = "MS", value_parser = not_negative)]
    step_kv_ms_per_1k: Option<f64>,
    /// Power of step times whose sum is to be small: 1 serves the mean, 4 the tail [default: 1]
    #[arg(long, value_name = "Q", value_parser = clap::value_parser!(u32).range(1..=i64::from(MAX_EXPONENT)))]
    step_exponent: Option<u32>,
}

impl StepOptions {
    fn objective(&self) -> Objective {
        let default = Objective::default();
        let step = default.step;
        Objective {
            step: StepModel {
                t0_ms: self.step_t0_ms.unwrap_or(step.t0_ms),
                b_ms: self.step_b_ms.unwrap_or(step.b_ms),
                c_ms: self.step_c_ms.unwrap_or(step.c_ms),
                kv_ms_per_1k: self.step_kv_ms_per_1k.unwrap_or(step.kv_ms_per_1k),
            },
            exponent: self.step_exponent.unwrap_or(default.exponent),
        }
    }
}

/// A load cap, or none. A type of its own: clap takes an `Option` for an argument that may be left out.
#[derive(Clone, Copy, Debug)]
pub(super) struct Factor(pub(super) Option<f64>);

fn load(text: &str) -> Result<(String, f64), String> {
    let expected = "WORKER=LOAD was expected, LOAD a number from 0";
    let (name, load) = text.rsplit_once('=').ok_or(expected)?;
    match load.parse::<f64>() {
        Ok(load) if load.is_finite() && load >= 0.0 && !name.is_empty() => Ok((name.into(), load)),
        _ => Err(expected.into()),
    }
}

fn running(text: &str) -> Result<(String, Vec<String>), String> {
    let (name, ids) = text.split_once('=').unwrap_or_default();
    let ids: Vec<String> = ids.split('+').map(Into::into).collect();
    match name.is_empty() || ids.iter().any(String::is_empty) {
        true => Err("WORKER=ID+ID+… was expected".into()),
        false => Ok((name.into(), ids)),
    }
}

fn policies() -> impl TypedValueParser<Value = Policy> {
    let names = PossibleValuesParser::new(Policy::ALL.map(Policy::name));
    names.map(|name| {
        let found = Policy::ALL.into_iter().find(|policy| policy.name() == name);
        found.unwrap_or_default()
    })
}

pub(super) fn factor(text: &str) -> Result<Factor, String> {
    match (text, text.parse::<f64>()) {
        ("none", _) => Ok(Factor(None)),
        (_, Ok(factor)) if (1.0..=100.0).contains(&factor) => Ok(Factor(Some(factor))),
        _ => Err("a number from 1 to 100, or none, was expected".into()),
    }
}

impl ExplainArgs {
    /// What clap cannot check on its own; the text is for a usage error.
    pub(super) fn check(&self) -> Result<(), String> {
        if self.trace.is_none() && !self.running.is_empty() {
            return Err("--running: say in which --trace the requests are".into());
        }
        once("--loads", self.loads.iter().map(|(name, _)| name))?;
        once("--running", self.running.iter().map(|(name, _)| name))
    }

    pub(super) fn run(&self) -> Result<String, Error> {
        let bytes = blob_file::read(&self.blob)?;
        let blob = blob_file::verify(&self.blob, &bytes)?;
        let (asked, running) = self.requests()?;
        let usual = Rule::of(self.policy);
        let tau = match self.policy {
            Policy::Hybrid => usual.tau,
            _ => blob.tau,
        };
        let rule = Rule {
            tau: self.tau.unwrap_or(tau),
            max_load_factor: match self.max_load_factor {
                Some(factor) => factor.0,
                None => usual.max_load_factor,
            },
            objective: self.step.objective(),
            ..usual
        };
        let situation = Situation {
            loads: self.loads.iter().cloned().collect(),
            running,
            out: self.out.clone(),
            draw: self.draw,
        };
        let explanation = explain(&blob, &asked, &rule, &situation)?;
        for spare in &explanation.spare {
            eprintln!(
                "note: {} serves no region of the blob; it gets fallback traffic only",
                spare.name
            );
        }
        Ok(if self.json {
            super::to_json(&explanation)
        } else {
            explanation.text()
        })
    }

    /// The request, and those that run on each worker.
    fn requests(&self) -> Result<(Asked, BTreeMap<String, Vec<Asked>>), Error> {
        let (Some(path), Some(id)) = (&self.trace, &self.id) else {
            let header = self.signature.clone();
            let asked = Asked {
                header,
                ..Asked::default()
            };
            return Ok((asked, BTreeMap::new()));
        };
        let ids = self.running.iter().flat_map(|(_, ids)| ids);
        let found = find(path, ids.chain([id]))?;
        let running = self.running.iter().map(|(worker, ids)| {
            let those = ids.iter().map(|id| found[id.as_str()].clone());
            (worker.clone(), those.collect())
        });
        Ok((found[id.as_str()].clone(), running.collect()))
    }
}

/// No name comes twice.
fn once<'a>(option: &str, names: impl Iterator<Item = &'a String>) -> Result<(), String> {
    let mut seen = Vec::new();
    for name in names {
        if seen.contains(&name) {
            return Err(format!("{option}: {name} is named twice"));
        }
        seen.push(name);
    }
    Ok(())
}

/// What the trace says of each of `ids`; it is read until all are found.
fn find<'a>(
    path: &Path,
    ids: impl Iterator<Item = &'a String>,
) -> Result<BTreeMap<&'a str, Asked>, Error> {
    let mut missing: Vec<&str> = ids.map(String::as_str).collect();
    let mut found = BTreeMap::new();
    let mut first = Vec::new();
    let mut records = 0u64;
    for record in trace::read(path)? {
        let record = record?;
        if let Some(&id) = missing.iter().find(|&&id| record.id == id) {
            missing.retain(|&other| other != id);
            let asked = Asked {
                header: record.prefill,
                prompt_tokens: record.prompt_tokens,
            };
            found.insert(id, asked);
            if missing.is_empty() {
                return Ok(found);
            }
        }
        records += 1;
        if first.len() < 3 && !record.id.is_empty() {
            first.push(record.id);
        }
    }
    let (file, id) = (path.display(), missing.last().copied().unwrap_or_default());
    Err(Error::new(
        format!("{file}: none of its {records} records has the id {id:?}"),
        format!("its first ids are: {}", first.join(", ")),
    ))
}
