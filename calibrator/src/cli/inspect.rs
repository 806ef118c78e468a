//! `eldr inspect`.

use std::path::PathBuf;

use clap::Args;
use serde::Serialize;

use super::BlobFacts;
use crate::blob_file;
use crate::error::Error;
use crate::inspect::Summary;

#[derive(Debug, Args)]
#[command(after_help = "Example:
  eldr inspect task.eldr

Everything in the file is verified: format, tensor shapes, unit centroids, ranges and the hash; what
is shown is a valid blob. Regions that are as similar to each other (column nearest) as their own
requests are to them (median) cannot tell traffic apart.")]
pub(super) struct InspectArgs {
    /// Centroid blob to verify and show
    blob: PathBuf,
    /// Print one JSON object instead of text
    #[arg(long)]
    json: bool,
}

/// What `--json` prints.
#[derive(Serialize)]
struct Report<'a> {
    #[serde(flatten)]
    file: BlobFacts,
    #[serde(flatten)]
    summary: &'a Summary,
}

impl InspectArgs {
    pub(super) fn run(&self) -> Result<String, Error> {
        let bytes = blob_file::read(&self.blob)?;
        let blob = blob_file::verify(&self.blob, &bytes)?;
        let (file, summary) = (BlobFacts::new(&self.blob, &bytes), &Summary::from(&blob));
        Ok(if self.json {
            super::to_json(&Report { file, summary })
        } else {
            file.text() + &summary.text()
        })
    }
}
