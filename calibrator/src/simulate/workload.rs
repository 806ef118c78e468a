//! The requests that a simulation replays: what a trace says of their experts and lengths.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use eldr_core::engine::{Activation, ExpertIds, Experts};
use eldr_core::signature::{Geometry, Signature};

use crate::error::Error;
use crate::trace::{self, Record};

/// How distinct experts of a decode step are found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Replay {
    /// Counted where every request has `decode_topk`, else expected
    #[default]
    Auto,
    /// Counted; every request must have `decode_topk`.
    #[value(help = "Counted")]
    Exact,
    /// Expected from each request's decode counts, or its prefill counts where it has none.
    #[value(help = "Expected from each request's counts")]
    Expected,
}

/// One request of the trace.
#[derive(Clone, Debug)]
pub struct Request {
    /// Where it was read, for messages.
    pub record: Arc<str>,
    /// Which of the traces it is of, counted from 0.
    pub trace: usize,
    /// Its kind, where the trace says so.
    pub label: Option<Arc<str>>,
    /// Value of its signature header, which gateways route by.
    pub signature: Option<Arc<str>>,
    /// Arrival in the trace, seconds.
    pub ts: Option<f64>,
    /// Tokens of the prompt, where the trace says so.
    pub prompt_tokens: Option<u32>,
    /// Tokens that it decodes, where the trace says so.
    pub decode_tokens: Option<u32>,
    /// What its tokens activate.
    pub experts: Experts,
}

/// The requests of a trace.
#[derive(Clone, Debug)]
pub struct Workload {
    /// The model's shape.
    pub geometry: Geometry,
    /// In the order of the trace.
    pub requests: Vec<Request>,
    /// Whether distinct experts are counted, not expected.
    pub exact: bool,
    /// Records without `prefill` and `decode_topk`, which cannot be replayed.
    pub skipped: usize,
}

impl Workload {
    /// Reads whole traces; `on_record` is told of every record.
    ///
    /// # Errors
    /// A trace cannot be read or is malformed; nothing can be replayed; requests of several models; a length is out of range.
    pub fn read<P: AsRef<Path>>(
        paths: &[P],
        replay: Replay,
        mut on_record: impl FnMut(),
    ) -> Result<Self, Error> {
        let mut records = Vec::new();
        let mut skipped = 0;
        for (trace, path) in paths.iter().enumerate() {
            for record in trace::read(path)? {
                on_record();
                let record = record?;
                if record.prefill.is_none() && record.decode.is_none() {
                    skipped += 1;
                } else {
                    records.push((trace, record));
                }
            }
        }
        let (_, first) = records.first().ok_or_else(|| {
            Error::new(
                format!("nothing to replay: records with `prefill` or `decode`: 0 of {skipped}"),
                "record the x-eldr-signature header of prefill responses, one trace line per request",
            )
        })?;
        let mut each = records.iter().map(|(_, record)| record);
        let missing = each.find(|record| record.decode_topk.is_none());
        let exact = match (replay, missing) {
            (Replay::Exact, Some(record)) => {
                let hint =
                    "leave out --replay exact: distinct experts are then expected from counts";
                let problem = "it is missing, so that its steps cannot be replayed exactly".into();
                return Err(record.invalid("decode_topk", problem, hint).into());
            }
            (Replay::Expected, _) | (Replay::Auto, Some(_)) => false,
            (_, None) => true,
        };
        let geometry = shape(first)?;
        let requests = records
            .iter()
            .map(|(trace, record)| request(*trace, record, geometry, exact));
        let requests = requests.collect::<Result<_, _>>()?;
        Ok(Workload {
            geometry,
            requests,
            exact,
            skipped,
        })
    }

    /// How many requests have each label.
    pub fn labels(&self) -> BTreeMap<Arc<str>, usize> {
        let mut labels = BTreeMap::new();
        for label in self
            .requests
            .iter()
            .filter_map(|request| request.label.as_ref())
        {
            *labels.entry(Arc::clone(label)).or_default() += 1;
        }
        labels
    }
}

/// Layers and experts that a record's signatures have.
fn shape(record: &Record) -> Result<Geometry, Error> {
    record.geometry()?.ok_or_else(|| {
        let hint = "record the prefill signature of the request as well";
        record
            .invalid("prefill", "it is missing".into(), hint)
            .into()
    })
}

fn request(
    trace: usize,
    record: &Record,
    geometry: Geometry,
    exact: bool,
) -> Result<Request, Error> {
    let found = shape(record)?;
    if found != geometry {
        let problem = format!("it has {found}, the requests before it have {geometry}");
        let hint = "simulate one model at a time";
        return Err(record.invalid("prefill", problem, hint).into());
    }
    let prefill = record.prefill_signature()?;
    let told = prefill.as_ref().and_then(Signature::prompt_tokens);
    let prompt_tokens = length(record, "prompt_tokens", record.prompt_tokens.or(told))?;
    let decode_tokens = length(record, "decode_tokens", record.decode_tokens)?;
    let experts = match record.topk()?.filter(|_| exact) {
        Some(topk) => {
            let steps = (0..topk.tokens()).flat_map(|token| topk.step(token).iter().copied());
            let ids = ExpertIds::new(geometry, topk.k(), steps.collect());
            let ids = ids.map_err(|error| {
                let hint = "record the expert ids again";
                record.invalid("decode_topk", error.to_string(), hint)
            })?;
            Experts::Recorded(Arc::new(ids))
        }
        None => {
            let activation = activation(record, prefill, geometry, prompt_tokens, decode_tokens)?;
            Experts::Expected(Arc::new(activation))
        }
    };
    Ok(Request {
        record: format!("{} ({}:{})", record.id, record.at.file, record.at.line).into(),
        trace,
        label: record.label.as_deref().map(Arc::from),
        signature: record.prefill.as_deref().map(Arc::from),
        ts: record.ts,
        prompt_tokens,
        decode_tokens,
        experts,
    })
}

/// Probabilities by the decode counts, which are what runs, or else by the prefill counts, which predict them.
fn activation(
    record: &Record,
    prefill: Option<Signature>,
    geometry: Geometry,
    prompt_tokens: Option<u32>,
    decode_tokens: Option<u32>,
) -> Result<Activation, Error> {
    let (field, signature, tokens) = match (record.decode_signature()?, prefill) {
        (Some(decode), None) => ("decode", decode, decode_tokens),
        (Some(decode), _) if decode_tokens.is_some() => ("decode", decode, decode_tokens),
        (_, Some(prefill)) => ("prefill", prefill, prompt_tokens),
        (None, None) => unreachable!("a record without either has no shape"),
    };
    let invalid = |problem: String, hint: &str| record.invalid(field, problem, hint);
    if signature.layers().len() != geometry.layers {
        let problem = format!(
            "it has {} of {} layers, so that distinct experts per step are not known",
            signature.layers().len(),
            geometry.layers
        );
        return Err(invalid(problem, "record the signature with every layer").into());
    }
    let Some(tokens) = tokens else {
        let problem = "nothing says how many tokens it counts".to_owned();
        let hint =
            "record `prompt_tokens` and `decode_tokens`, or the parameter n of the signature";
        return Err(invalid(problem, hint).into());
    };
    Activation::from_counts(geometry, signature.counts(), tokens.into())
        .map_err(|error| invalid(error.to_string(), "record the signature again").into())
}

/// A length. Longer ones than 2³² − 1 are no request of any model.
fn length(record: &Record, field: &'static str, tokens: Option<u64>) -> Result<Option<u32>, Error> {
    let Some(tokens) = tokens else {
        return Ok(None);
    };
    match u32::try_from(tokens) {
        Ok(tokens @ 1..) => Ok(Some(tokens)),
        _ => {
            let problem = format!("{tokens} where 1 to {} are allowed", u32::MAX);
            let hint = "correct the value, or leave the key out";
            Err(record.invalid(field, problem, hint).into())
        }
    }
}
