//! `eldr convert`.

use std::path::{Path, PathBuf};

use clap::{Args, Subcommand};
use eldr_core::signature::Geometry;

use super::BlobFacts;
use crate::blob_file;
use crate::convert::centroids::{self, Imported, Missing};
use crate::convert::{AccessLog, Calibration, Converted, GptOss, Mapping, SmallMoe};
use crate::error::Error;
use crate::trace::Writer;

#[derive(Debug, Subcommand)]
pub(super) enum Convert {
    /// Takes the requests with a signature out of access logs of Envoy (JSON)
    AccessLog(AccessLogArgs),
    /// Makes a blob of a centroid file of the official ELDR artifact (JSON)
    ImportCentroids(ImportArgs),
    /// Makes a centroid file of the official ELDR artifact (JSON) of a blob
    ExportCentroids(ExportArgs),
    /// Converts a calibration archive of the official ELDR artifact (NumPy .npz)
    Calibration(CalibrationArgs),
    /// Converts decode recordings of GPT-OSS (JSON Lines and files of expert ids)
    GptOss(GptOssArgs),
    /// Converts gate recordings of the small Qwen3-MoE model (NumPy .npz)
    SmallMoe(SmallMoeArgs),
}

#[derive(Debug, Args)]
#[command(after_help = "Example, of a log with keys of its own:
  eldr convert access-log gateway.log -o trace.jsonl.gz \\
      --map id=request_id --map prefill=/eldr/signature --map label=tenant

FIELD is one of id, label, ts, prompt_tokens, decode_tokens, prefill and decode, of which a
request needs id and prefill. KEY is a key of the log, or a JSON Pointer such as /request/id to
one further inside. Without --map, the keys are those that envoy/envoy.yaml logs: the fields'
names, and time for ts, which may be a number of seconds or an RFC 3339 time as %START_TIME% gives
it. Lines that are no JSON objects and requests without a signature are left out and counted.")]
pub(super) struct AccessLogArgs {
    /// Access logs, plain or gzip, one JSON object per line
    #[arg(required = true, value_name = "LOG")]
    logs: Vec<PathBuf>,
    /// Take a field from this key of the log; may be given several times
    #[arg(long = "map", value_name = "FIELD=KEY")]
    maps: Vec<String>,
    /// Trace to write; compressed if the name ends in .gz
    #[arg(short, long, value_name = "TRACE")]
    output: PathBuf,
}

#[derive(Debug, Args)]
#[command(after_help = "Example:
  eldr convert import-centroids centroids.json -o task.eldr --workers decode-0,decode-1

Variants count_idf and count can be imported. The artifact's file does not say how similar a
region's requests are to it, so `eldr inspect` shows none. What else it says is kept in the blob,
and `eldr convert export-centroids` writes the same file again, byte for byte.")]
pub(super) struct ImportArgs {
    /// Centroid file
    centroids: PathBuf,
    /// Centroid blob to write
    #[arg(short, long, value_name = "BLOB")]
    output: PathBuf,
    /// Decode cluster names as Envoy knows them, one for each region in their order
    #[arg(long, value_delimiter = ',', value_name = "NAME,…")]
    workers: Option<Vec<String>>,
    /// Similarity below the best within which a less loaded worker is preferred, 0 to 2 [default: 0.1]
    #[arg(long, value_parser = super::fit::tau)]
    tau: Option<f32>,
    /// Revision of the blob; a gateway takes only a higher one than it has [default: 1]
    #[arg(long)]
    revision: Option<u64>,
}

#[derive(Debug, Args)]
#[command(after_help = "Example:
  eldr convert export-centroids task.eldr -o centroids.json

A blob that was imported becomes the file that it was. Of one that was fitted, the key `eldr` has
what the artifact has no place for; its loader skips that key.")]
pub(super) struct ExportArgs {
    /// Centroid blob
    blob: PathBuf,
    /// Centroid file to write
    #[arg(short, long, value_name = "JSON")]
    output: PathBuf,
}

#[derive(Debug, Args)]
#[command(after_help = "Example:
  eldr convert calibration calibration.npz -o trace.jsonl.gz

The archive says that its format is eldr-calibration-v1. Counts of prefill and decode become
signatures, and with --gate gate probabilities become the gate sums that eldr fit --signature gate-prob
compares.")]
pub(super) struct CalibrationArgs {
    /// Archive with metadata, request_ids, prefill_counts, decode_counts, prompt_tokens and
    /// decode_tokens
    archive: PathBuf,
    /// Write the gate sums of gate_probabilities too
    #[arg(long)]
    gate: bool,
    /// Trace to write; compressed if the name ends in .gz
    #[arg(short, long, value_name = "TRACE")]
    output: PathBuf,
}

#[derive(Debug, Args)]
#[command(after_help = "Example:
  eldr convert gpt-oss requests.jsonl.gz -o gptoss.jsonl.gz --prefill-share 0.4

Each line says of one request id, file, token_offset, n_decode and, where known, prompt_tokens
and domain; file is beside the requests and has [tokens][layers][top-k] expert ids of one byte,
plain or gzip. Prefill was not recorded: with --prefill-share the beginning of each answer stands
for it.")]
pub(super) struct GptOssArgs {
    /// Requests, JSON Lines, plain or gzip
    requests: PathBuf,
    /// Layers of the model
    #[arg(long, default_value_t = 24)]
    layers: usize,
    /// Experts per layer, at most 256
    #[arg(long, default_value_t = 32)]
    experts: usize,
    /// Experts per token and layer
    #[arg(long, default_value_t = 4)]
    top_k: usize,
    /// Share of each answer's steps whose counts become the prefill signature, above 0 and below 1
    #[arg(long, value_name = "SHARE", value_parser = share)]
    prefill_share: Option<f64>,
    /// Trace to write; compressed if the name ends in .gz
    #[arg(short, long, value_name = "TRACE")]
    output: PathBuf,
}

#[derive(Debug, Args)]
#[command(after_help = "Example:
  eldr convert small-moe task_evaluation.npz --decode-topk decode_topk_task_evaluation.npz \\
      --mix-only -o task_evaluation.jsonl.gz")]
pub(super) struct SmallMoeArgs {
    /// Archive with id, domain, in_mix, n_prompt, n_decode, prefill_counts, decode_counts,
    /// prefix_group and prefix_len
    requests: PathBuf,
    /// Archive with the experts of every decode step of the same requests, for exact replay
    #[arg(long, value_name = "NPZ")]
    decode_topk: Option<PathBuf>,
    /// Keep only the requests of the unequal mix of domains (in_mix)
    #[arg(long)]
    mix_only: bool,
    /// Write gate sums too, from gate_prefill: eldr fit --signature gate-prob compares them
    #[arg(long)]
    gate: bool,
    /// Trace to write; compressed if the name ends in .gz
    #[arg(short, long, value_name = "TRACE")]
    output: PathBuf,
}

fn share(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(share) if share > 0.0 && share < 1.0 => Ok(share),
        _ => Err("a number above 0 and below 1 was expected".into()),
    }
}

impl Convert {
    /// What clap cannot check on its own: the subcommand, and a text for a usage error.
    pub(super) fn check(&self) -> Result<(), (&'static str, String)> {
        match self {
            Convert::AccessLog(args) => {
                let checked = args.mapping().map(drop);
                checked.map_err(|problem| ("access-log", format!("--map: {problem}")))
            }
            Convert::ImportCentroids(args) => {
                let workers = args.workers.as_deref().unwrap_or_default();
                super::fit::check_workers(workers).map_err(|problem| ("import-centroids", problem))
            }
            _ => Ok(()),
        }
    }

    pub(super) fn run(&self) -> Result<String, Error> {
        match self {
            Convert::AccessLog(args) => args.run(),
            Convert::ImportCentroids(args) => args.run(),
            Convert::ExportCentroids(args) => args.run(),
            Convert::Calibration(args) => trace(&args.output, |output| {
                Calibration {
                    archive: &args.archive,
                    gate: args.gate,
                }
                .convert(output)
            }),
            Convert::GptOss(args) => args.run(),
            Convert::SmallMoe(args) => trace(&args.output, |output| {
                SmallMoe {
                    requests: &args.requests,
                    decode_topk: args.decode_topk.as_deref(),
                    mix_only: args.mix_only,
                    gate: args.gate,
                }
                .convert(output)
            }),
        }
    }
}

/// Writes the trace at `path`, which appears when all of it is there.
fn trace(
    path: &Path,
    convert: impl FnOnce(&mut Writer) -> Result<usize, Error>,
) -> Result<String, Error> {
    let mut writer = Writer::create(path)?;
    let requests = convert(&mut writer)?;
    writer.finish()?;
    Ok(format!("{}: {requests} requests\n", path.display()))
}

impl AccessLogArgs {
    fn mapping(&self) -> Result<Mapping, String> {
        let mut mapping = Mapping::default();
        self.maps.iter().try_for_each(|map| mapping.set(map))?;
        Ok(mapping)
    }

    fn run(&self) -> Result<String, Error> {
        let mapping = self.mapping().unwrap_or_default();
        let mut writer = Writer::create(&self.output)?;
        let Converted {
            requests,
            without_signature,
            other_lines,
        } = AccessLog {
            logs: &self.logs,
            mapping: &mapping,
        }
        .convert(&mut writer)?;
        writer.finish()?;
        Ok(format!(
            "{}: {requests} requests; left out: {without_signature} without a signature, {other_lines} lines that are no JSON objects\n",
            self.output.display()
        ))
    }
}

impl GptOssArgs {
    fn run(&self) -> Result<String, Error> {
        let geometry = Geometry::new(self.layers, self.experts)
            .ok()
            .filter(|geometry| {
                geometry.experts <= 256 && (1..=geometry.experts).contains(&self.top_k)
            });
        let Some(geometry) = geometry else {
            let (layers, experts, k) = (self.layers, self.experts, self.top_k);
            return Err(Error::new(
                format!(
                    "{layers} layers × {experts} experts, {k} of them per token, is no model that can be read"
                ),
                "1 to 256 experts per layer, at most 65536 in all layers, 1 to all of them per token",
            ));
        };
        trace(&self.output, |output| {
            GptOss {
                requests: &self.requests,
                geometry,
                k: self.top_k,
                prefill_share: self.prefill_share,
            }
            .convert(output)
        })
    }
}

impl ImportArgs {
    fn run(&self) -> Result<String, Error> {
        let missing = Missing {
            workers: self.workers.as_deref(),
            tau: self.tau,
            revision: self.revision,
        };
        let Imported { blob, exact } = centroids::import(&self.centroids, missing)?;
        let bytes = blob
            .to_bytes()
            .map_err(|error| Error::in_file(&self.output, &error))?;
        super::write(&self.output, "the blob", &bytes)?;
        if !exact {
            eprintln!(
                "note: {} is not laid out as the artifact writes it; exported again, it will say the same in other bytes",
                self.centroids.display()
            );
        }
        Ok(BlobFacts::new(&self.output, &bytes).text())
    }
}

impl ExportArgs {
    fn run(&self) -> Result<String, Error> {
        let bytes = blob_file::read(&self.blob)?;
        let blob = blob_file::verify(&self.blob, &bytes)?;
        let text = centroids::export(&blob)?;
        super::write(&self.output, "the centroids", text.as_bytes())?;
        let (file, regions) = (self.output.display(), blob.regions.len());
        Ok(format!("{file}: {regions} regions, {} bytes\n", text.len()))
    }
}
