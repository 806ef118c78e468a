//! `eldr fit`.

use std::collections::BTreeSet;
use std::io::Write as _;
use std::path::PathBuf;

use clap::Args;
use clap::builder::{PossibleValuesParser, TypedValueParser as _};
use eldr_core::blob::Blob;
use eldr_core::transform::SignatureKind;
use serde::Serialize;

use super::BlobFacts;
use crate::blob_file;
use crate::error::Error;
use crate::fit::{
    self, Choice, DECODE_REQUESTS_MIN, Fitted, Layers, Measure, Options, Progress, Quality,
    RESTARTS, Regions,
};
use crate::held_out;
use crate::inspect::Summary;
use crate::kmeans::ROUNDS_MAX;
use crate::layers::Selection;
use crate::output::OutputFile;
use crate::requests::Requests;
use crate::weights::Weight;

#[derive(Debug, Args)]
#[command(after_help = "Example:
  eldr fit examples/data/small-moe/task_calibration.jsonl.gz -o task.eldr \\
      --workers decode-0,decode-1,decode-2,decode-3

A trace is JSON Lines, plain or gzip, with at least {\"id\":…,\"prefill\":…} per request, where
`prefill` is the value of the x-eldr-signature header of the prefill response. An access log of Envoy
in JSON that captures it is a trace: other keys and lines without a signature are skipped. With
`decode`, the same counts over the generated tokens, the layers that predict decode best are chosen;
without it all layers are used. The same traces, options and seed give the same bytes.

A quarter of the requests is held out first, or other traces are given with --held-out, and layers and
regions are measured on it: how well signatures predict decode (rho), whether requests of one region
are more alike than any two, and how evenly a gateway would load the workers. With --regions auto the
fit takes as many regions as spread evenly. Warnings say when a blob will not do what it should.

The fit of the paper: --weight presence-idf --regions N --restarts 1, N the number of workers.")]
pub(super) struct FitArgs {
    /// Traces to calibrate on
    #[arg(required = true, value_name = "TRACE")]
    traces: Vec<PathBuf>,
    /// Centroid blob to write
    #[arg(short, long, value_name = "BLOB")]
    output: PathBuf,
    /// Decode cluster names as Envoy knows them
    #[arg(long, required = true, value_delimiter = ',', value_name = "NAME,…")]
    workers: Vec<String>,
    /// Number of regions: auto, or a number; with fewer than workers a region has several, with more a
    /// worker serves several
    #[arg(long, default_value = "auto", value_parser = regions, value_name = "auto|N")]
    regions: Regions,
    /// Layers to compare: auto (those that predict decode best), all, or a list such as 0-3,7
    #[arg(long, default_value = "auto", value_parser = layers, value_name = "auto|all|LIST")]
    layers: Layers,
    /// What of a request's routing is compared; gateways know the kinds that expert counts give, the
    /// gate kinds need traces with gate sums
    #[arg(long, default_value = "count-idf", value_parser = signatures())]
    signature: SignatureKind,
    /// How experts are weighted, with count-idf [default: deviation]
    #[arg(long, value_enum)]
    weight: Option<Weight>,
    /// K-means starts, of which the best is kept
    #[arg(long, default_value_t = RESTARTS as u16, value_parser = clap::value_parser!(u16).range(1..=1000))]
    restarts: u16,
    /// Measure the fit on these traces instead of a part of the others
    #[arg(long, value_name = "TRACE")]
    held_out: Vec<PathBuf>,
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

/// What is wrong with the names after `--workers`, for a usage error.
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
                "--workers: {worker} is named twice\nhint: name each worker once; how many regions it serves follows from `--regions`"
            ));
        }
    }
    Ok(())
}

pub(super) fn regions(text: &str) -> Result<Regions, String> {
    match text.parse() {
        _ if text == "auto" => Ok(Regions::Auto),
        Ok(regions @ 1..=REGIONS_MAX) => Ok(Regions::Fixed(regions)),
        _ => Err(format!(
            "auto or a number from 1 to {REGIONS_MAX} was expected"
        )),
    }
}

/// More regions than that are a mistake, and would take memory for nothing.
const REGIONS_MAX: usize = 4096;

fn layers(text: &str) -> Result<Layers, String> {
    match text {
        "auto" => return Ok(Layers::Auto),
        "all" => return Ok(Layers::All),
        _ => {}
    }
    let mut layers: Vec<u16> = Vec::new();
    for part in text.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let range = first.parse().ok().zip(last.parse().ok());
        match range.filter(|(first, last)| {
            first <= last && layers.last().is_none_or(|before| before < first)
        }) {
            Some((first, last)) => layers.extend(first..=last),
            None => return Err("auto, all, or ascending layers such as 0-3,7 were expected".into()),
        }
    }
    Ok(Layers::List(layers))
}

fn signatures() -> impl clap::builder::TypedValueParser<Value = SignatureKind> {
    let names = [
        "count-idf",
        "count",
        "sqrt",
        "binary",
        "gate-prob",
        "gate-score",
    ];
    PossibleValuesParser::new(names).map(|given| {
        let name = given.replace('-', "_");
        let mut kinds = SignatureKind::ALL.into_iter();
        kinds.find(|kind| kind.name() == name).unwrap_or_default()
    })
}

/// What `--json` prints: how the fit went, and the blob's facts.
#[derive(Serialize)]
struct Report<'a> {
    #[serde(flatten)]
    file: BlobFacts,
    records_skipped: usize,
    requests_with_decode: usize,
    requests_without_weight: usize,
    weight: Option<Weight>,
    layer_selection: &'static str,
    selection: Option<&'a Selection>,
    regions_chosen: &'a Choice,
    held_out: Option<&'a Quality>,
    warnings: &'a [String],
    rounds: usize,
    converged: bool,
    mean_distance: f64,
    #[serde(flatten)]
    summary: &'a Summary,
}

impl FitArgs {
    /// What clap cannot check on its own; the text is for a usage error.
    pub(super) fn check(&self) -> Result<(), String> {
        if self.weight.is_some() && self.signature != SignatureKind::CountIdf {
            return Err(
                "--weight: only the signature count-idf is weighted\nhint: leave out --weight or --signature".into(),
            );
        }
        check_workers(&self.workers)
    }

    pub(super) fn run(&self) -> Result<String, Error> {
        // First, so that a folder that is missing is told before the work and not after it.
        let mut output = OutputFile::create(&self.output).map_err(|error| {
            let hint = "check that the folder exists and may be written to";
            self.failed("creating", &error, hint)
        })?;
        let requests = self.read(&self.traces)?;
        let held_out = match &self.held_out[..] {
            [] => None,
            traces => Some(self.read(traces)?),
        };
        let fitted = self.fit(&requests, held_out.as_ref())?;
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
        self.notes(&requests, &fitted, &summary);
        let quality = fitted.quality.as_ref();
        let warnings = quality.map(Quality::warnings).unwrap_or_default();
        for warning in &warnings {
            eprintln!("warning: {warning}");
        }
        let file = BlobFacts::new(&self.output, &bytes);
        let mean_distance = fitted.total_distance / requests.len() as f64;
        if self.json {
            let report = Report {
                file,
                records_skipped: requests.skipped(),
                requests_with_decode: fitted.decode_requests,
                requests_without_weight: fitted.without_weight.len(),
                weight: (self.signature == SignatureKind::CountIdf).then(|| self.weight()),
                layer_selection: match (&self.layers, &fitted.selection) {
                    (Layers::List(_), _) => "list",
                    (_, Some(_)) => "forward_greedy",
                    _ => "all",
                },
                selection: fitted.selection.as_ref(),
                regions_chosen: &fitted.choice,
                held_out: fitted.quality.as_ref(),
                warnings: &warnings,
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
             K-means  {} rounds, mean cosine distance {mean_distance:.4}\n\
             regions  {}\n{}{}",
            file.text(),
            requests.len(),
            fitted.decode_requests,
            fitted.rounds,
            fitted.choice.text(),
            quality.map_or(
                format!(
                    "held out none: a quarter of the requests must be at least {}\n",
                    held_out::REQUESTS_MIN
                ),
                Quality::text,
            ),
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

    fn weight(&self) -> Weight {
        self.weight.unwrap_or_default()
    }

    fn read(&self, traces: &[PathBuf]) -> Result<Requests, Error> {
        let bar = super::reading();
        let requests = Requests::read_for(self.signature, traces, || bar.inc(1));
        bar.finish_and_clear();
        requests
    }

    fn fit(&self, requests: &Requests, held_out: Option<&Requests>) -> Result<Fitted, Error> {
        let options = Options {
            model: self.model.clone(),
            tau: self.tau,
            seed: self.seed,
            revision: self.revision,
            weight: self.weight(),
            layers: self.layers.clone(),
            regions: self.regions,
            restarts: self.restarts.into(),
            ..Options::new(self.workers.clone())
        };
        let measure = held_out.map_or(Measure::Part, Measure::Against);
        let bar = super::working(0);
        let fitted = fit::fit_measured(requests, measure, &options, |progress| {
            let (message, done, total) = match progress {
                Progress::Layers { done, total } => ("choosing layers".into(), done, total),
                Progress::Rounds {
                    regions,
                    restart,
                    done,
                } => {
                    let start = restart + 1;
                    (
                        format!("{regions} regions, start {start}"),
                        done,
                        ROUNDS_MAX,
                    )
                }
            };
            bar.set_message(message);
            bar.set_length(total as u64);
            bar.set_position(done as u64);
        });
        bar.finish_and_clear();
        fitted
    }

    /// What a person should know before using the blob.
    fn notes(&self, requests: &Requests, fitted: &Fitted, summary: &Summary) {
        let all = requests.len();
        if fitted.selection.is_none() && self.layers == Layers::Auto {
            eprintln!(
                "note: all {} layers are used: {} of {all} requests have `decode` counts, {DECODE_REQUESTS_MIN} are needed to choose layers",
                summary.layers.len(),
                fitted.decode_requests,
            );
        }
        if fitted.faded {
            eprintln!(
                "note: all weights are zero, so plain counts are compared: requests do not differ in what --weight {} looks at, another may tell them apart",
                clap::ValueEnum::to_possible_value(&self.weight())
                    .map_or(String::new(), |value| value.get_name().to_owned()),
            );
        }
        if let Some(&first) = fitted.without_weight.first() {
            eprintln!(
                "note: {} of {all} requests are left out: they have no count with a weight on layers {:?}; the first is {}",
                fitted.without_weight.len(),
                summary.layers,
                requests.name(first),
            );
        }
        if !self.signature.is_of_counts() {
            eprintln!(
                "note: gateways refuse this blob: the signature header carries expert counts, not gate sums; use it to compare, and fit with --signature count-idf"
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
                "note: {} of {} weights are zero, for experts that do not tell requests apart",
                summary.zero_weights, summary.dimension,
            );
        }
    }
}
