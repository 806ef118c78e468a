//! Writing: the same records give the same bytes.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::Path;
use std::sync::Arc;

use flate2::{Compression, write::GzEncoder};

use super::{Location, Record, TraceError};

/// Writes records as JSON Lines, plain or gzip.
pub struct Writer {
    output: Output,
    at: Location,
}

enum Output {
    Plain(Box<dyn Write + Send>),
    // Neither time nor file name goes into the header, so that equal records give equal files.
    Gzip(GzEncoder<Box<dyn Write + Send>>),
}

impl std::fmt::Debug for Writer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Writer")
            .field("at", &self.at)
            .finish_non_exhaustive()
    }
}

impl Writer {
    /// Creates or replaces the file `path`; it is compressed if its name ends in `.gz`.
    pub fn create(path: impl AsRef<Path>) -> Result<Self, TraceError> {
        let path = path.as_ref();
        let name: Arc<str> = path.display().to_string().into();
        let file = File::create(path).map_err(|error| {
            let hint = "check that the folder exists and may be written to";
            TraceError::io(&name, "creating the trace", hint, error)
        })?;
        let gzip = path.extension().is_some_and(|end| end == "gz");
        Ok(Self::new(&name, BufWriter::new(file), gzip))
    }

    /// Writes to `output`, compressed if `gzip`; errors call it `name`.
    pub fn new(name: &str, output: impl Write + Send + 'static, gzip: bool) -> Self {
        let output: Box<dyn Write + Send> = Box::new(output);
        let output = if gzip {
            Output::Gzip(GzEncoder::new(output, Compression::best()))
        } else {
            Output::Plain(output)
        };
        Writer {
            output,
            at: Location {
                file: name.into(),
                line: 0,
            },
        }
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

    /// Writes what is buffered. A trace whose writer is dropped without this may lack its end.
    pub fn finish(self) -> Result<(), TraceError> {
        let Writer { output, at } = self;
        let finished = match output {
            Output::Plain(mut output) => output.flush(),
            Output::Gzip(output) => output.finish().and_then(|mut output| output.flush()),
        };
        finished.map_err(|error| failed(&at, error))
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
