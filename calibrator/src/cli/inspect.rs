//! `eldr inspect`.

use std::path::PathBuf;

use clap::Args;
use eldr_core::blob::Blob;

use crate::error::Error;
use crate::inspect::Summary;

#[derive(Debug, Args)]
#[command(after_help = "Example:
  eldr inspect task.eldr

Everything in the file is verified: format, tensor shapes, unit centroids, ranges and the hash.
The columns min to p95 are the cosine similarity of a region's own calibration requests to its
centroid; `nearest` is the other region that is most alike. Regions that are as similar to each
other as their own requests are to them cannot tell traffic apart.")]
pub(super) struct InspectArgs {
    /// Centroid blob to verify and show
    blob: PathBuf,
    /// Print one JSON object instead of text
    #[arg(long)]
    json: bool,
}

impl InspectArgs {
    pub(super) fn run(&self) -> Result<String, Error> {
        let file = self.blob.display();
        let bytes = std::fs::read(&self.blob).map_err(|error| {
            Error::new(
                format!("{file}: reading the blob failed: {error}"),
                "give the path of a blob that `eldr fit` wrote",
            )
        })?;
        let blob = Blob::from_bytes(&bytes).map_err(|error| Error::in_file(&self.blob, &error))?;
        let summary = Summary::from(&blob);
        Ok(if self.json {
            super::to_json(&summary)
        } else {
            format!(
                "blob     {file}, {} bytes, verified\n{}",
                bytes.len(),
                summary.text()
            )
        })
    }
}
