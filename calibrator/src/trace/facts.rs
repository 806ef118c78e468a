//! What a trace says, read in one pass with bounded memory.

use std::collections::BTreeMap;
use std::path::Path;

use comfy_table::Table;
use eldr_core::signature::{Geometry, Signature};
use serde::Serialize;

use super::{Record, TraceError};
use crate::table::{right_from, table};

/// Most labels that are counted one by one.
pub const LABELS_MAX: usize = 1000;
/// Labels in the table for people.
const LABELS_SHOWN: usize = 20;

/// The facts of a trace all of whose records are well-formed and of one model.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Facts {
    /// Lines with a record.
    pub records: u64,
    /// Records with a prefill signature: what a fit reads.
    pub with_prefill: u64,
    /// Records with a decode signature.
    pub with_decode: u64,
    /// Records with the experts of every decode step.
    pub with_decode_topk: u64,
    /// Layers of the model; none without signatures.
    pub layers: Option<usize>,
    /// Experts per layer; none without signatures.
    pub experts: Option<usize>,
    /// Layers that the prefill signatures have, ascending.
    pub prefill_layers: Vec<u16>,
    /// Tokens of the prompts, where records say so.
    pub prompt_tokens: Option<Spread>,
    /// Decode steps, where records say so.
    pub decode_tokens: Option<Spread>,
    /// Seconds between the earliest and the latest arrival, where records say so.
    pub span_s: Option<f64>,
    /// Records by label, for the first [`LABELS_MAX`] labels.
    pub labels: BTreeMap<String, u64>,
    /// Records with a label that is not among [`labels`](Self::labels).
    pub other_labels: u64,
    #[serde(skip)]
    arrivals: Option<(f64, f64)>,
}

/// How a number is spread over records.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Spread {
    /// Records that have it.
    pub records: u64,
    /// The least.
    pub min: u64,
    /// The mean.
    pub mean: f64,
    /// The greatest.
    pub max: u64,
}

impl Facts {
    /// Reads the trace at `path`; `on_record` is told of every record.
    ///
    /// # Errors
    /// A record is malformed, or of another model or other layers than those before it.
    pub fn read(path: &Path, mut on_record: impl FnMut()) -> Result<Self, TraceError> {
        let mut facts = Facts::default();
        for record in super::read(path)? {
            facts.add(&record?)?;
            on_record();
        }
        Ok(facts)
    }

    fn add(&mut self, record: &Record) -> Result<(), TraceError> {
        self.records += 1;
        let prefill = record.prefill_signature()?;
        if let Some(prefill) = &prefill {
            self.check(record, "prefill", prefill)?;
            if self.with_prefill == 0 {
                self.prefill_layers = prefill.layers().to_vec();
            } else if self.prefill_layers != prefill.layers() {
                let (found, before) = (prefill.layers(), &self.prefill_layers);
                let problem = format!("it has layers {found:?}, the requests before it {before:?}");
                return Err(record.invalid("prefill", problem, ONE_MODEL));
            }
            self.with_prefill += 1;
        }
        if let Some(decode) = record.decode_signature()? {
            self.check(record, "decode", &decode)?;
            self.with_decode += 1;
        }
        self.with_decode_topk += u64::from(record.topk()?.is_some());
        let signed = prefill.and_then(|prefill| prefill.prompt_tokens());
        Spread::add(&mut self.prompt_tokens, record.prompt_tokens.or(signed));
        Spread::add(&mut self.decode_tokens, record.decode_tokens);
        if let Some(ts) = record.ts {
            let (first, last) = self.arrivals.unwrap_or((ts, ts));
            self.arrivals = Some((first.min(ts), last.max(ts)));
            self.span_s = Some(last.max(ts) - first.min(ts));
        }
        if let Some(label) = &record.label {
            let known = self.labels.len();
            match self.labels.get_mut(label) {
                Some(count) => *count += 1,
                None if known < LABELS_MAX => {
                    self.labels.insert(label.clone(), 1);
                }
                None => self.other_labels += 1,
            }
        }
        Ok(())
    }

    fn check(
        &mut self,
        record: &Record,
        field: &'static str,
        signature: &Signature,
    ) -> Result<(), TraceError> {
        let found = signature.geometry();
        match self.layers.zip(self.experts) {
            None => (self.layers, self.experts) = (Some(found.layers), Some(found.experts)),
            Some((layers, experts)) => {
                let before = Geometry { layers, experts };
                if found != before {
                    let problem = format!("it has {found}, the requests before it have {before}");
                    return Err(record.invalid(field, problem, ONE_MODEL));
                }
            }
        }
        Ok(())
    }

    /// The facts as lines, and a table of the most frequent labels.
    pub fn text(&self) -> String {
        let mut text = format!(
            "records  {}: {} with prefill, {} with decode, {} with decode_topk\n",
            self.records, self.with_prefill, self.with_decode, self.with_decode_topk
        );
        if let Some((layers, experts)) = self.layers.zip(self.experts) {
            let geometry = Geometry { layers, experts };
            text += &format!("model    {geometry}\n");
            if (1..layers).contains(&self.prefill_layers.len()) {
                let rows = self.prefill_layers.iter().map(u16::to_string);
                text += &format!("prefill  layers {}\n", rows.collect::<Vec<_>>().join(" "));
            }
        }
        for (name, spread) in [
            ("prompt", self.prompt_tokens),
            ("decode", self.decode_tokens),
        ] {
            if let Some(Spread {
                records,
                min,
                mean,
                max,
            }) = spread
            {
                text += &format!(
                    "{name}   {min} to {max} tokens, mean {mean:.1}, of {records} records\n"
                );
            }
        }
        if let Some(span) = self.span_s {
            text += &format!("arrivals within {span:.1} s\n");
        }
        if !self.labels.is_empty() {
            text += &format!("\n{}\n", self.table());
        }
        text
    }

    fn table(&self) -> Table {
        let mut labels: Vec<_> = self.labels.iter().collect();
        labels.sort_by_key(|&(label, &count)| (std::cmp::Reverse(count), label));
        let hidden: u64 = labels
            .iter()
            .skip(LABELS_SHOWN)
            .map(|(_, count)| **count)
            .sum();
        let mut table = table(["label", "records", "share"]);
        let mut row = |label: &str, count: u64| {
            let share = 100.0 * count as f64 / self.records as f64;
            table.add_row([label, &count.to_string(), &format!("{share:.1} %")]);
        };
        labels
            .iter()
            .take(LABELS_SHOWN)
            .for_each(|(label, count)| row(label, **count));
        if hidden + self.other_labels > 0 {
            row("others", hidden + self.other_labels);
        }
        right_from(1, table)
    }
}

const ONE_MODEL: &str = "keep the requests of each model in a trace of their own";

impl Spread {
    fn add(spread: &mut Option<Spread>, value: Option<u64>) {
        let Some(value) = value else { return };
        let spread = spread.get_or_insert(Spread {
            records: 0,
            min: value,
            mean: 0.0,
            max: value,
        });
        spread.records += 1;
        spread.min = spread.min.min(value);
        spread.max = spread.max.max(value);
        spread.mean += (value as f64 - spread.mean) / spread.records as f64;
    }
}
