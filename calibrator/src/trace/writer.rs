//! Writing: the same records give the same bytes.

use std::io::{self, BufWriter, Write};
use std::path::Path;
use std::sync::Arc;

use flate2::{Compression, write::GzEncoder};

use super::{Location, Record, TraceError};
use crate::output::OutputFile;

/// Writes records as JSON Lines, plain or gzip.
#[derive(Debug)]
pub struct Writer {
    output: Output,
    at: Location,
}

#[derive(Debug)]
enum Output {
    Plain(BufWriter<OutputFile>),
    // Neither time nor file name goes into the header, so that equal records give equal files.
    Gzip(GzEncoder<BufWriter<OutputFile>>),
}

impl Writer {
    /// Begins the file `path`, compressed if its name ends in `.gz`; [`finish`](Self::finish) puts it
    /// in its place.
    pub fn create(path: impl AsRef<Path>) -> Result<Self, TraceError> {
        let path = path.as_ref();
        let name: Arc<str> = path.display().to_string().into();
        let file = OutputFile::create(path).map_err(|error| {
            let hint = "check that the folder exists and may be written to";
            TraceError::io(&name, "creating the trace", hint, error)
        })?;
        let file = BufWriter::new(file);
        let output = if path.extension().is_some_and(|end| end == "gz") {
            Output::Gzip(GzEncoder::new(file, Compression::best()))
        } else {
            Output::Plain(file)
        };
        let at = Location {
            file: name,
            line: 0,
        };
        Ok(Writer { output, at })
    }

    /// Appends one record as one line.
    pub fn write(&mut self, record: &Record) -> Result<(), TraceError> {
        self.at.line += 1;
        let mut line = serde_json::to_string(record).map_err(|error| self.failed(error.into()))?;
        line.push('\n');
        let output: &mut dyn Write = match &mut self.output {
            Output::Plain(output) => output,
            Output::Gzip(output) => output,
        };
        output
            .write_all(line.as_bytes())
            .map_err(|error| self.failed(error))
    }

    /// Completes the file. A writer that is dropped without this leaves none behind.
    pub fn finish(self) -> Result<(), TraceError> {
        let Writer { output, at } = self;
        let file = match output {
            Output::Plain(file) => Ok(file),
            Output::Gzip(gzip) => gzip.finish(),
        };
        file.and_then(|file| Ok(file.into_inner()?))
            .and_then(OutputFile::commit)
            .map_err(|error| failed(&at, error))
    }

    fn failed(&self, error: io::Error) -> TraceError {
        failed(&self.at, error)
    }
}

fn failed(at: &Location, error: io::Error) -> TraceError {
    TraceError::io(
        &at.file,
        "writing the trace",
        "check the free space of the disk",
        error,
    )
}
