//! `eldr refit` and `eldr rollback`.

use std::path::PathBuf;

use clap::Args;
use eldr_core::blob::Blob;
use serde::Serialize;

use super::BlobFacts;
use crate::blob_file;
use crate::error::Error;
use crate::history;
use crate::kmeans::Vectors;
use crate::refit::{Drift, Refitted, next_revision, refit};
use crate::signatures::Space;
use crate::trace;

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  eldr refit task.eldr access.log
  eldr refit task.eldr access.log --last 2000 --if-moved 0.2

The blob is replaced by its next revision: weights and layers stay, regions follow the requests of the traces,
and each new region goes to the workers of the old one that it is most like. The blob before is kept as
task.eldr.rREVISION; `eldr rollback task.eldr` brings it back. `eldr serve` takes the new file over by itself,
and with --online does all this from the gateways' samples.")]
pub(super) struct RefitArgs {
    /// Centroid blob, which is replaced
    blob: PathBuf,
    /// Traces or access logs with recent requests, plain or gzip
    #[arg(required = true)]
    traces: Vec<PathBuf>,
    /// Use only the last N requests
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    last: Option<u64>,
    /// Refit only if this share of the traffic has moved to other regions, 0 to 1
    #[arg(long, value_name = "SHARE", value_parser = share)]
    if_moved: Option<f64>,
    /// Old revisions to keep beside the blob
    #[arg(long, default_value_t = 5, value_name = "N")]
    keep: usize,
    /// Print one JSON object instead of text
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
#[command(after_help = "Example:
  eldr rollback task.eldr --to 6

Gateways take only a higher revision than they have, so the old regions come back under the next revision.")]
pub(super) struct RollbackArgs {
    /// Centroid blob, which is replaced
    blob: PathBuf,
    /// Kept revision to bring back [default: the latest]
    #[arg(long, value_name = "REVISION")]
    to: Option<u64>,
    /// Old revisions to keep beside the blob
    #[arg(long, default_value_t = 5, value_name = "N")]
    keep: usize,
    /// Print one JSON object instead of text
    #[arg(long)]
    json: bool,
}

pub(super) fn share(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(share) if (0.0..=1.0).contains(&share) => Ok(share),
        _ => Err("a number from 0 to 1 was expected".into()),
    }
}

/// What `eldr refit --json` prints.
#[derive(Serialize)]
struct Report {
    /// Whether the blob was replaced.
    refitted: bool,
    #[serde(flatten)]
    file: BlobFacts,
    revision: u64,
    drift: Drift,
    /// Per region, how similar it is to what it was.
    kept: Vec<f32>,
    rounds: usize,
    converged: bool,
}

impl RefitArgs {
    pub(super) fn run(&self) -> Result<String, Error> {
        let blob = blob_file::verify(&self.blob, &blob_file::read(&self.blob)?)?;
        let values = self.read(&blob)?;
        let vectors = Vectors {
            dimension: blob.transform.dimension(),
            values: &values,
        };
        let Refitted {
            blob: next,
            drift,
            kept,
            rounds,
            converged,
        } = refit(&blob, vectors)?;
        let refitted = self.if_moved.is_none_or(|limit| drift.moved >= limit);
        if refitted {
            history::replace(&self.blob, &next, self.keep)?;
        }
        let report = Report {
            refitted,
            file: BlobFacts::new(&self.blob, &blob_file::read(&self.blob)?),
            revision: if refitted {
                next.revision
            } else {
                blob.revision
            },
            drift,
            kept,
            rounds,
            converged,
        };
        Ok(if self.json {
            super::to_json(&report)
        } else {
            report.text(&blob)
        })
    }

    fn read(&self, blob: &Blob) -> Result<Vec<f32>, Error> {
        let mut space = Space::of(blob)?;
        let mut values = Vec::new();
        let mut vector = Vec::new();
        let bar = super::reading();
        let row = blob.transform.dimension();
        let most = self.last.map_or(usize::MAX, |last| last as usize);
        for path in &self.traces {
            for record in trace::read(path)? {
                bar.inc(1);
                let record = record?;
                let Some(header) = &record.prefill else {
                    continue;
                };
                let hint = "give traces of the model that the blob was fitted to";
                space
                    .vector(header.as_bytes(), &mut vector)
                    .map_err(|problem| record.invalid("prefill", problem, hint))?;
                if vector.iter().any(|&value| value != 0.0) {
                    values.extend_from_slice(&vector);
                }
                // Twice as many as asked for, so that the older half goes at once and not one by one.
                if values.len() / row >= most.saturating_mul(2) {
                    values.drain(..values.len() - most * row);
                }
            }
        }
        bar.finish_and_clear();
        let extra = values.len().saturating_sub(most.saturating_mul(row));
        values.drain(..extra);
        Ok(values)
    }
}

impl Report {
    fn text(&self, before: &Blob) -> String {
        let Drift {
            requests,
            moved,
            similarity_lost,
            ref shares,
            ..
        } = self.drift;
        let outcome = match self.refitted {
            true => format!("revision {} follows {}", self.revision, before.revision),
            false => format!(
                "revision {} stays: fewer requests moved than --if-moved asks for",
                self.revision
            ),
        };
        let mut text = format!(
            "{}refit    {requests} requests, {} rounds; {outcome}\n\
             drift    {:.1} % of the requests in other regions than fitted, median similarity {:+.3}\n",
            self.file.text(),
            self.rounds,
            100.0 * moved,
            -similarity_lost,
        );
        for (region, workers) in before.regions.iter().enumerate() {
            text += &format!(
                "region {region}: {}, share {:.3} (fitted {:.3}), similarity to itself before {:.3}\n",
                workers.join(" "),
                shares[region],
                before.fit.shares[region],
                self.kept[region],
            );
        }
        text
    }
}

impl RollbackArgs {
    pub(super) fn run(&self) -> Result<String, Error> {
        let current = blob_file::verify(&self.blob, &blob_file::read(&self.blob)?)?;
        let kept = history::revisions(&self.blob)?;
        let listed: Vec<String> = kept
            .iter()
            .map(|(revision, _)| revision.to_string())
            .collect();
        let wanted = match self.to {
            Some(to) => kept.into_iter().find(|&(revision, _)| revision == to),
            None => kept.into_iter().next_back(),
        };
        let (revision, path) = wanted.ok_or_else(|| {
            let file = self.blob.display();
            let asked = match self.to {
                Some(to) => format!("revision {to} is not"),
                None => "no old revision is".into(),
            };
            let listed = match listed.is_empty() {
                true => "none".into(),
                false => listed.join(" "),
            };
            Error::new(
                format!("{file}: {asked} kept; kept: {listed}"),
                "kept revisions are the files NAME.rREVISION beside the blob",
            )
        })?;
        let mut old = blob_file::verify(&path, &blob_file::read(&path)?)?;
        old.revision = next_revision(&current)?;
        history::replace(&self.blob, &old, self.keep)?;
        let file = BlobFacts::new(&self.blob, &blob_file::read(&self.blob)?);
        Ok(if self.json {
            #[derive(Serialize)]
            struct Report {
                #[serde(flatten)]
                file: BlobFacts,
                revision: u64,
                restored: u64,
            }
            super::to_json(&Report {
                file,
                revision: old.revision,
                restored: revision,
            })
        } else {
            format!(
                "{}rollback revision {revision} is back as revision {}\n",
                file.text(),
                old.revision
            )
        })
    }
}
