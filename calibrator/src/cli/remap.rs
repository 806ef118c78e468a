//! `eldr remap`.

use std::path::PathBuf;

use clap::Args;
use serde::Serialize;

use super::BlobFacts;
use super::fit::check_workers;
use crate::blob_file;
use crate::error::Error;
use crate::kmeans::Vectors;
use crate::regions;
use crate::table::table;

#[derive(Debug, Args)]
#[command(after_help = "Example, one worker more than the blob was fitted for:
  eldr remap task.eldr --workers decode-0,decode-1,decode-2,decode-3,decode-4 -o task.eldr

The regions stay as they were fitted. They are shared among the workers evenly, with the least change of
roles: who is named again keeps regions that it served, as far as that is even; a new worker gets what is
free. Fewer workers serve several regions each, more share a region.")]
pub(super) struct RemapArgs {
    /// Centroid blob to start from
    blob: PathBuf,
    /// Decode cluster names as Envoy knows them, all that there will be
    #[arg(long, required = true, value_delimiter = ',', value_name = "NAME,…")]
    workers: Vec<String>,
    /// Centroid blob to write; may be the same file
    #[arg(short, long, value_name = "BLOB")]
    output: PathBuf,
    /// Revision of the new blob [default: the next one]
    #[arg(long)]
    revision: Option<u64>,
    /// Print one JSON object instead of text
    #[arg(long)]
    json: bool,
}

/// What `--json` prints.
#[derive(Serialize)]
struct Report {
    #[serde(flatten)]
    file: BlobFacts,
    revision: u64,
    regions: Vec<Change>,
}

/// Who serves a region.
#[derive(Serialize)]
struct Change {
    before: Vec<String>,
    after: Vec<String>,
}

impl RemapArgs {
    /// What clap cannot check on its own; the text is for a usage error.
    pub(super) fn check(&self) -> Result<(), String> {
        check_workers(&self.workers)
    }

    pub(super) fn run(&self) -> Result<String, Error> {
        let bytes = blob_file::read(&self.blob)?;
        let mut blob = blob_file::verify(&self.blob, &bytes)?;
        let next = blob.revision.checked_add(1);
        let Some(revision) = self.revision.or(next) else {
            return Err(Error::new(
                format!(
                    "{}: its revision is the last there can be",
                    self.blob.display()
                ),
                "give the new blob a `--revision` and start the gateways anew",
            ));
        };
        if revision <= blob.revision {
            eprintln!(
                "note: {} has revision {}; gateways that have it take only a higher one, not {revision}",
                self.blob.display(),
                blob.revision
            );
        }
        let centroids = Vectors::centroids_of(&blob);
        let after = regions::reassign(centroids, &blob.regions, &self.workers);
        let before = std::mem::replace(&mut blob.regions, after);
        blob.revision = revision;
        let bytes = blob
            .to_bytes()
            .map_err(|error| Error::in_file(&self.output, &error))?;
        super::write(&self.output, "the blob", &bytes)?;

        let changes = before.into_iter().zip(blob.regions);
        let report = Report {
            file: BlobFacts::new(&self.output, &bytes),
            revision,
            regions: changes
                .map(|(before, after)| Change { before, after })
                .collect(),
        };
        Ok(if self.json {
            super::to_json(&report)
        } else {
            report.text()
        })
    }
}

impl Report {
    fn text(&self) -> String {
        let mut table = table(["region", "workers before", "now"]);
        for (index, Change { before, after }) in self.regions.iter().enumerate() {
            table.add_row([index.to_string(), before.join(" "), after.join(" ")]);
        }
        format!(
            "{}revision {}\n\n{table}\n",
            self.file.text(),
            self.revision
        )
    }
}
