//! `eldr explain`.

use std::collections::BTreeMap;
use std::path::PathBuf;

use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{ArgGroup, Args};
use eldr_core::decide::{Policy, Rule};

use crate::blob_file;
use crate::error::Error;
use crate::explain::{Situation, explain};
use crate::trace;

#[derive(Debug, Args)]
#[command(group(ArgGroup::new("request").required(true).args(["id", "signature"])))]
#[command(after_help = "Examples:
  eldr explain task.eldr --trace access.log --id 0e0397cf --loads decode-0=12,decode-1=3
  eldr explain task.eldr --signature ':AAABAA==:;l=1;e=2' --policy top1 --json

The decision is made by the code that gateways run, from the same bytes. Loads are the gateway's:
requests in flight over the worker's weight. Workers are taken in the order in which the blob
names them; if a gateway's `decode_clusters` has another order, equal loads of equally similar
regions may go elsewhere there.")]
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
    /// Load of decode workers; 0 for those not named
    #[arg(long, value_delimiter = ',', value_name = "WORKER=LOAD,…", value_parser = load)]
    loads: Vec<(String, f64)>,
    /// Decode workers that are taken out or drain
    #[arg(long, value_delimiter = ',', value_name = "WORKER,…")]
    out: Vec<String>,
    /// Policy, as in the gateway's configuration
    #[arg(long, default_value = "band", value_parser = policies())]
    policy: Policy,
    /// Band width, 0 to 2 [default: the blob's]
    #[arg(long, value_parser = super::fit::tau)]
    tau: Option<f32>,
    /// A worker above this multiple of the mean load is no candidate, 1 to 100, or none
    #[arg(long, default_value = "1.25", value_parser = factor)]
    max_load_factor: Factor,
    /// Decisions before this one (round_robin), or random bits (p2c, random)
    #[arg(long, default_value_t = 0)]
    draw: u64,
    /// Print one JSON object instead of text
    #[arg(long)]
    json: bool,
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

fn policies() -> impl TypedValueParser<Value = Policy> {
    // A blob and a header say nothing about running batches.
    let names = PossibleValuesParser::new(Policy::without_batches().map(Policy::name));
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
        let mut seen = BTreeMap::new();
        for (name, load) in &self.loads {
            if seen.insert(name, load).is_some() {
                return Err(format!("--loads: {name} is named twice"));
            }
        }
        Ok(())
    }

    pub(super) fn run(&self) -> Result<String, Error> {
        let bytes = blob_file::read(&self.blob)?;
        let blob = blob_file::verify(&self.blob, &bytes)?;
        let header = self.header()?;
        let rule = Rule {
            policy: self.policy,
            tau: self.tau.unwrap_or(blob.tau),
            max_load_factor: self.max_load_factor.0,
            ..Rule::default()
        };
        let situation = Situation {
            loads: self.loads.iter().cloned().collect(),
            out: self.out.clone(),
            draw: self.draw,
        };
        let explanation = explain(
            &blob,
            header.as_deref().map(str::as_bytes),
            &rule,
            &situation,
        )?;
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

    /// The request's signature, as it would arrive; it may have none.
    fn header(&self) -> Result<Option<String>, Error> {
        let (Some(path), Some(id)) = (&self.trace, &self.id) else {
            return Ok(self.signature.clone());
        };
        let mut first = Vec::new();
        let mut records = 0u64;
        for record in trace::read(path)? {
            let record = record?;
            if record.id == *id {
                return Ok(record.prefill);
            }
            records += 1;
            if first.len() < 3 && !record.id.is_empty() {
                first.push(record.id);
            }
        }
        let file = path.display();
        Err(Error::new(
            format!("{file}: none of its {records} records has the id {id:?}"),
            format!("its first ids are: {}", first.join(", ")),
        ))
    }
}
