//! `eldr fit`.

use std::collections::BTreeSet;
use std::io::Write as _;
use std::path::PathBuf;

use clap::Args;
use eldr_core::blob::Blob;
use indicatif::ProgressBar;
use serde::Serialize;

use super::BlobFacts;
use crate::blob_file;
use crate::error::Error;
use crate::fit::{self, DECODE_REQUESTS_MIN, Fitted, Options, Progress};
use crate::inspect::Summary;
use crate::kmeans::ROUNDS_MAX;
use crate::layers::Selection;
use crate::output::OutputFile;
use crate::requests::Requests;

#[derive(Debug, Args)]
#[command(after_help = "Example:
  eldr fit examples/data/small-moe/task_calibration.jsonl.gz -o task.eldr \\
      --workers decode-0,decode-1,decode-2,decode-3

A trace is JSON Lines, plain or gzip, with at least {\"id\":…,\"prefill\":…} per request, where
`prefill` is the value of the x-eldr-signature header of the prefill response. An access log of Envoy
in JSON that captures it is a trace: other keys and lines without a signature are skipped. With
`decode`, the same counts over the generated tokens, the layers that predict decode best are chosen;
without it all layers are used. The same traces, options and seed give the same bytes.")]
pub(super) struct FitArgs {
    /// Traces to calibrate on
    #[arg(required = true, value_name = "TRACE")]
    traces: Vec<PathBuf>,
    /// Centroid blob to write
    #[arg(short, long, value_name = "BLOB")]
    output: PathBuf,
    /// Decode cluster names as Envoy knows them, one region each
    #[arg(long, required = true, value_delimiter = ',', value_name = "NAME,…")]
    workers: Vec<String>,
    /// Model that the signatures come from, for people and checks
    #[arg(long, default_value = "*")]
    model: String,
    /// Similarity below the best within which a less loaded worker is preferred, 0 to 2
    #[arg(long, default_value_t = 0.1, value_parser = tau)]
    tau: f32,
    /// Seed of everything random
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Revision of the blob; a gateway takes only a higher one than it has
    #[arg(long, default_value_t = 1)]
    revision: u64,
    /// Print one JSON object instead of text
    #[arg(long)]
    json: bool,
}

pub(super) fn tau(text: &str) -> Result<f32, String> {
    let tau: f32 = text
        .parse()
        .map_err(|_| "a number from 0 to 2 was expected".to_owned())?;
    if (0.0..=2.0).contains(&tau) {
        Ok(tau)
    } else {
        Err("0 to 2 is allowed".into())
    }
}

/// Whether these are names of decode clusters, each once; the text is for a usage error.
pub(super) fn check_workers(workers: &[String]) -> Result<(), String> {
    let mut seen = BTreeSet::new();
    for worker in workers {
        if worker.trim() != worker || worker.is_empty() {
            return Err(format!(
                "--workers: {worker:?} is no cluster name\nhint: separate names by commas alone: decode-0,decode-1"
            ));
        }
        if !seen.insert(worker) {
            return Err(format!(
                "--workers: {worker} is named twice\nhint: a worker has one region; name each once"
            ));
        }
    }
    Ok(())
}

/// What `--json` prints: how the fit went, and the blob's facts.
#[derive(Serialize)]
struct Report<'a> {
    #[serde(flatten)]
    file: BlobFacts,
    records_skipped: usize,
    requests_with_decode: usize,
    layer_selection: &'static str,
    selection: Option<&'a Selection>,
    rounds: usize,
    converged: bool,
    mean_distance: f64,
    #[serde(flatten)]
    summary: &'a Summary,
}

impl FitArgs {
    /// What clap cannot check on its own; the text is for a usage error.
    pub(super) fn check(&self) -> Result<(), String> {
        check_workers(&self.workers)
    }

    pub(super) fn run(&self) -> Result<String, Error> {
        // First, so that a folder that is missing is told before the work and not after it.
        let mut output = OutputFile::create(&self.output).map_err(|error| {
            let hint = "check that the folder exists and may be written to";
            self.failed("creating", &error, hint)
        })?;
        let requests = self.read()?;
        let fitted = self.fit(&requests)?;
        let bytes = fitted
            .blob
            .to_bytes()
            .map_err(|error| Error::in_file(&self.output, &error))?;
        self.note_on_revision(&bytes);
        output
            .write_all(&bytes)
            .and_then(|()| output.commit())
            .map_err(|error| self.failed("writing", &error, "check the free space of the disk"))?;
        let summary = Summary::from(&fitted.blob);
        notes(&requests, &fitted, &summary);
        let file = BlobFacts::new(&self.output, &bytes);
        let mean_distance = fitted.total_distance / requests.len() as f64;
        if self.json {
            let report = Report {
                file,
                records_skipped: requests.skipped(),
                requests_with_decode: fitted.decode_requests,
                layer_selection: if fitted.selection.is_some() {
                    "forward_greedy"
                } else {
                    "all"
                },
                selection: fitted.selection.as_ref(),
                rounds: fitted.rounds,
                converged: fitted.converged,
                mean_distance,
                summary: &summary,
            };
            return Ok(super::to_json(&report));
        }
        let skipped = match requests.skipped() {
            0 => String::new(),
            lines => format!("; skipped without `prefill`: {lines}"),
        };
        Ok(format!(
            "{}trace    {} requests, {} with decode counts{skipped}\n\
             K-means  {} rounds, mean cosine distance {mean_distance:.4}\n{}",
            file.text(),
            requests.len(),
            fitted.decode_requests,
            fitted.rounds,
            summary.text(),
        ))
    }

    /// A gateway keeps what it has until the revision grows, which a second fit easily forgets.
    fn note_on_revision(&self, new: &[u8]) {
        if !self.output.is_file() {
            return; // nothing there, or a pipe that would block
        }
        let Ok(old) = blob_file::read(&self.output) else {
            return;
        };
        match Blob::from_bytes(&old) {
            Ok(blob) if blob.revision >= self.revision && old != new => eprintln!(
                "note: {} had revision {}; gateways that have it take only a higher one: --revision {}",
                self.output.display(),
                blob.revision,
                blob.revision.saturating_add(1),
            ),
            _ => {}
        }
    }

    fn failed(&self, doing: &str, error: &std::io::Error, hint: &str) -> Error {
        let file = self.output.display();
        Error::new(format!("{file}: {doing} the blob failed: {error}"), hint)
    }

    fn read(&self) -> Result<Requests, Error> {
        let bar = ProgressBar::new_spinner().with_message("reading");
        bar.set_style(super::style("{spinner} {msg}: {pos} requests"));
        let requests = Requests::read(&self.traces, || bar.inc(1));
        bar.finish_and_clear();
        requests
    }

    fn fit(&self, requests: &Requests) -> Result<Fitted, Error> {
        let options = Options {
            workers: self.workers.clone(),
            model: self.model.clone(),
            tau: self.tau,
            seed: self.seed,
            revision: self.revision,
        };
        let bar = ProgressBar::new(0);
        bar.set_style(super::style("{msg:>16} {wide_bar} {pos}/{len} {elapsed}"));
        let fitted = fit::fit(requests, &options, |progress| {
            let (message, done, total) = match progress {
                Progress::Layers { done, total } => ("choosing layers", done, total),
                Progress::Rounds { done } => ("clustering", done, ROUNDS_MAX),
            };
            bar.set_message(message);
            bar.set_length(total as u64);
            bar.set_position(done as u64);
        });
        bar.finish_and_clear();
        fitted
    }
}

/// What a person should know before using the blob.
fn notes(requests: &Requests, fitted: &Fitted, summary: &Summary) {
    if fitted.selection.is_none() {
        eprintln!(
            "note: all {} layers are used: {} of {} requests have `decode` counts, {DECODE_REQUESTS_MIN} are needed to choose layers",
            summary.layers.len(),
            fitted.decode_requests,
            requests.len(),
        );
    }
    if !fitted.converged {
        eprintln!(
            "note: K-means was stopped after {} rounds, still moving",
            fitted.rounds
        );
    }
    if 2 * summary.zero_weights > summary.dimension {
        eprintln!(
            "note: {} of {} weights are zero, for experts that every request touches; shorter prompts or more varied ones keep more",
            summary.zero_weights, summary.dimension,
        );
    }
}
