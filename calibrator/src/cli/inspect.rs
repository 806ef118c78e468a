//! `eldr inspect`.

use std::fs::File;
use std::io::Read as _;
use std::path::{Path, PathBuf};

use clap::Args;
use indicatif::ProgressBar;
use serde::Serialize;

use super::BlobFacts;
use crate::blob_file;
use crate::error::Error;
use crate::inspect::Summary;
use crate::trace::Facts;

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  eldr inspect task.eldr
  eldr inspect trace.jsonl.gz

Everything in a blob is verified: format, tensor shapes, unit centroids, ranges and the hash; what
is shown is a valid blob. Regions that are as similar to each other (column nearest) as their own
requests are to them (median) cannot tell traffic apart.

Of a trace, every record is verified: its values, its signatures, the experts of its decode
steps, and that all are of one model. It is read once, and may be larger than memory.")]
pub(super) struct InspectArgs {
    /// Centroid blob or trace to verify and show
    file: PathBuf,
    /// Print one JSON object instead of text
    #[arg(long)]
    json: bool,
}

/// What `--json` prints of a blob.
#[derive(Serialize)]
struct BlobReport<'a> {
    #[serde(flatten)]
    file: BlobFacts,
    #[serde(flatten)]
    summary: &'a Summary,
}

/// What `--json` prints of a trace.
#[derive(Serialize)]
struct TraceReport<'a> {
    trace: String,
    #[serde(flatten)]
    facts: &'a Facts,
}

impl InspectArgs {
    pub(super) fn run(&self) -> Result<String, Error> {
        if is_trace(&self.file) {
            return self.trace();
        }
        let bytes = blob_file::read(&self.file)?;
        let blob = blob_file::verify(&self.file, &bytes)?;
        let (file, summary) = (BlobFacts::new(&self.file, &bytes), &Summary::from(&blob));
        Ok(if self.json {
            super::to_json(&BlobReport { file, summary })
        } else {
            file.text() + &summary.text()
        })
    }

    fn trace(&self) -> Result<String, Error> {
        let bar = ProgressBar::new_spinner().with_message("reading");
        bar.set_style(super::style("{spinner} {msg}: {pos} records"));
        let facts = Facts::read(&self.file, || bar.inc(1));
        bar.finish_and_clear();
        let facts = &facts?;
        let trace = self.file.display().to_string();
        Ok(if self.json {
            super::to_json(&TraceReport { trace, facts })
        } else {
            format!("trace    {trace}\n{}", facts.text())
        })
    }
}

/// Whether the file begins as a trace does: with gzip, or with an object after blanks at most. A blob begins
/// with a length of eight bytes, whose last ones are zero.
fn is_trace(path: &Path) -> bool {
    let mut start = Vec::new();
    let read = File::open(path).and_then(|file| file.take(64).read_to_end(&mut start));
    let object = start.trim_ascii_start().starts_with(b"{") && !start.contains(&0);
    read.is_ok() && (object || start.starts_with(&[0x1f, 0x8b]))
}
