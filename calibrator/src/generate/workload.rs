//! What requests are about, and generated requests as traces and workloads have them.

use std::sync::Arc;

use eldr_core::engine::{Activation, Experts};
use eldr_core::signature::{Encoding, Signature};

use super::draw::{Gates, Generator};
use crate::error::Error;
use crate::requests::Requests;
use crate::simulate::Workload;
use crate::simulate::workload::Request;
use crate::trace::Record;

/// A workload of the paper.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, clap::ValueEnum, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// Code, mathematics, medicine and law, each from several sources
    Task,
    /// Chat in many languages, more than half of it in one
    Language,
}

/// Requests about one thing.
#[derive(Clone, Copy, Debug)]
pub(super) struct Domain {
    pub(super) name: &'static str,
    /// Its share of the requests, of any sum.
    pub(super) share: f64,
    /// Shares of the clusters inside it, of any sum.
    pub(super) clusters: &'static [f64],
}

const fn domain(name: &'static str, share: f64, clusters: &'static [f64]) -> Domain {
    Domain {
        name,
        share,
        clusters,
    }
}

/// Domains and sources of the paper's task mix, by how many prompts the sources have.
const TASK: [Domain; 4] = [
    domain("code", 2_804.0, &[164.0, 1_140.0, 1_000.0, 500.0]),
    domain("math", 2_747.0, &[1_319.0, 500.0, 674.0, 254.0]),
    domain("medical", 2_545.0, &[1_273.0, 1_000.0, 272.0]),
    domain("legal", 3_600.0, &[1.0]),
];

const TOPICS: [f64; 8] = [1.0; 8];

/// Languages of the paper's chat corpus by their published shares; topics inside a language are assumed, the more the larger it is.
const LANGUAGE: [Domain; 8] = [
    domain("english", 53.0, &TOPICS),
    domain("chinese", 13.0, TOPICS.split_at(3).0),
    domain("russian", 12.0, TOPICS.split_at(3).0),
    domain("french", 4.0, TOPICS.split_at(2).0),
    domain("spanish", 4.0, TOPICS.split_at(2).0),
    domain("arabic", 3.0, TOPICS.split_at(2).0),
    domain("german", 3.0, TOPICS.split_at(2).0),
    domain("other", 8.0, TOPICS.split_at(4).0),
];

impl Kind {
    /// All, in the paper's order.
    pub const ALL: [Self; 2] = [Self::Task, Self::Language];

    /// The name, as published.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Task => "task",
            Kind::Language => "language",
        }
    }

    pub(super) fn domains(self) -> &'static [Domain] {
        match self {
            Kind::Task => &TASK,
            Kind::Language => &LANGUAGE,
        }
    }

    /// By how much fewer experts a batch of one domain activates, as published: lowest and highest over the models.
    pub fn fewer_experts(self) -> (f64, f64) {
        match self {
            Kind::Task => (0.17, 0.21),
            Kind::Language => (0.03, 0.10),
        }
    }
}

/// Output tokens of every request, as in the paper.
pub const DECODE_TOKENS: u32 = 512;

/// The request as a line of a trace.
pub fn record(generator: &Generator, gates: &Gates, index: usize) -> Record {
    let geometry = generator.shape().geometry;
    let header = |counts: &[u16], tokens: u32| {
        let signature = Signature::dense(geometry, counts.to_vec(), Some(tokens.into()));
        signature.map(|signature| signature.encode(Encoding::U16))
    };
    Record {
        id: format!("{}-{index}", generator.kind().name()),
        label: Some(generator.kind().domains()[gates.domain].name.to_owned()),
        prompt_tokens: Some(gates.prompt_tokens.into()),
        decode_tokens: Some(DECODE_TOKENS.into()),
        prefill: header(&gates.prefill_counts, gates.prompt_tokens).ok(),
        decode: header(&gates.decode_counts(DECODE_TOKENS), DECODE_TOKENS).ok(),
        ..Record::default()
    }
}

/// Requests `range` as what a fit reads.
///
/// # Errors
/// None in practice: generated requests are all alike.
pub fn requests(generator: &Generator, range: std::ops::Range<usize>) -> Result<Requests, Error> {
    let mut set: Option<Requests> = None;
    for (index, gates) in range.clone().zip(generator.gates(range)) {
        let record = record(generator, &gates, index);
        if let Some(prefill) = record.prefill_signature()? {
            set.get_or_insert_with(|| Requests::new(&prefill))
                .push(&record, &prefill)?;
        }
    }
    set.ok_or_else(|| Error::new("no requests were generated", "ask for at least one"))
}

/// Requests `range` as what a simulation replays.
///
/// # Errors
/// None in practice: generated requests are all alike.
pub fn workload(generator: &Generator, range: std::ops::Range<usize>) -> Result<Workload, Error> {
    let geometry = generator.shape().geometry;
    let gates = generator.gates(range.clone());
    let requests = range.zip(&gates).map(|(index, gates)| {
        let record = record(generator, gates, index);
        let counts = gates.decode_counts(u32::from(u16::MAX));
        let activation = Activation::from_counts(geometry, &counts, u16::MAX.into());
        let activation = activation.map_err(|error| {
            Error::new(error.to_string(), "ask for a model with as many experts")
        })?;
        Ok(Request {
            record: record.id.into(),
            trace: 0,
            label: record.label.map(Arc::from),
            signature: record.prefill.map(Arc::from),
            ts: None,
            prompt_tokens: Some(gates.prompt_tokens),
            decode_tokens: Some(DECODE_TOKENS),
            experts: Experts::Expected(Arc::new(activation)),
        })
    });
    Ok(Workload {
        geometry,
        requests: requests.collect::<Result<_, Error>>()?,
        exact: false,
        skipped: 0,
    })
}
