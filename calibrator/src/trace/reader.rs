//! Reading: one line at a time, plain or gzip.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::Path;
use std::sync::Arc;

use flate2::bufread::MultiGzDecoder;

use super::{Location, Record, TraceError};

/// Longest line that is read, in bytes after decompression: about fifty times what a request of
/// 1,000 decode steps on 60 layers with top-8 needs.
pub const LINE_BYTES_MAX: usize = 64 << 20;

/// Opens a trace; gzip is recognised by its first bytes, whatever the file is called.
///
/// Fails only if the file cannot be opened or its first bytes cannot be read.
pub fn read(path: impl AsRef<Path>) -> Result<Reader, TraceError> {
    Ok(Reader {
        lines: Lines::open(path.as_ref(), "the trace")?,
    })
}

/// Reads the records of one trace in order.
///
/// A malformed line is an error, and the next call goes on with the line after it; a line that is
/// too long or an input that cannot be read ends the iteration.
#[derive(Debug)]
pub struct Reader {
    lines: Lines,
}

impl Reader {
    /// Reads from `input`, plain or gzip; errors call it `name`.
    pub fn new(name: &str, input: impl BufRead + Send + 'static) -> Result<Self, TraceError> {
        let lines = Lines::new(name, input, "the trace")?;
        Ok(Reader { lines })
    }
}

impl Iterator for Reader {
    type Item = Result<Record, TraceError>;

    fn next(&mut self) -> Option<Self::Item> {
        let line = self.lines.next()?;
        Some(line.and_then(|(line, at)| Record::parse(line, at)))
    }
}

/// The lines of a file, plain or gzip, that are not blank: one of them is in memory at a time.
pub(crate) struct Lines {
    input: Box<dyn BufRead + Send>,
    at: Location,
    /// What is read, for errors.
    what: &'static str,
    buffer: Vec<u8>,
    done: bool,
}

impl std::fmt::Debug for Lines {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Lines")
            .field("at", &self.at)
            .field("done", &self.done)
            .finish_non_exhaustive()
    }
}

impl Lines {
    pub(crate) fn open(path: &Path, what: &'static str) -> Result<Self, TraceError> {
        let name: Arc<str> = path.display().to_string().into();
        let file = File::open(path).map_err(|error| {
            TraceError::io(
                &name,
                &format!("opening {what}"),
                "check the path and its permissions",
                error,
            )
        })?;
        Lines::new(&name, BufReader::with_capacity(1 << 18, file), what)
    }

    pub(crate) fn new(
        name: &str,
        input: impl BufRead + Send + 'static,
        what: &'static str,
    ) -> Result<Self, TraceError> {
        let file: Arc<str> = name.into();
        let input = decompressed(input).map_err(|error| {
            TraceError::io(
                &file,
                &format!("reading {what}"),
                "give the path of a file of JSON Lines, plain or gzip",
                error,
            )
        })?;
        Ok(Lines {
            input,
            at: Location { file, line: 0 },
            what,
            buffer: Vec::new(),
            done: false,
        })
    }

    /// The next line and where it stands. What is no text is an error and does not end the lines.
    pub(crate) fn next(&mut self) -> Option<Result<(&str, Location), TraceError>> {
        if self.done {
            return None;
        }
        match self.advance() {
            Ok(true) => {}
            Ok(false) => {
                self.done = true;
                return None;
            }
            Err(error) => {
                self.done = true;
                return Some(Err(error));
            }
        }
        let line = str::from_utf8(self.buffer.trim_ascii()).map_err(|error| {
            let problem = format!("byte {} of the line is not UTF-8", error.valid_up_to() + 1);
            let hint = "a trace is JSON Lines in UTF-8, plain or gzip";
            TraceError::line(&self.at, problem, hint)
        });
        Some(line.map(|line| (line, self.at.clone())))
    }

    /// Puts the next line that is not blank into the buffer; `false` at the end of the input.
    fn advance(&mut self) -> Result<bool, TraceError> {
        loop {
            self.buffer.clear();
            self.at.line += 1;
            let mut bounded = self.input.by_ref().take(LINE_BYTES_MAX as u64 + 1);
            if let Err(error) = bounded.read_until(b'\n', &mut self.buffer) {
                let hint = "the file may be cut off or damaged: fetch or record it again";
                return Err(TraceError::io(
                    &self.at.file,
                    &format!("reading {}", self.what),
                    hint,
                    error,
                ));
            }
            if self.buffer.len() > LINE_BYTES_MAX {
                let problem = format!("the line is longer than {LINE_BYTES_MAX} bytes");
                let hint = "a trace has one request per line, each ended by a newline";
                return Err(TraceError::line(&self.at, problem, hint));
            }
            if self.buffer.is_empty() {
                return Ok(false);
            }
            if !self.buffer.trim_ascii().is_empty() {
                return Ok(true);
            }
        }
    }
}

/// What `input` holds, without the gzip around it, if there is one.
pub(crate) fn decompressed(
    mut input: impl BufRead + Send + 'static,
) -> io::Result<Box<dyn BufRead + Send>> {
    // A pipe may give one byte at a time, so `fill_buf` alone would not do.
    let mut magic = Vec::new();
    input.by_ref().take(2).read_to_end(&mut magic)?;
    let gzip = magic == [0x1f, 0x8b];
    let input = io::Cursor::new(magic).chain(input);
    Ok(if gzip {
        let input = MultiGzDecoder::new(input);
        Box::new(BufReader::with_capacity(1 << 18, input))
    } else {
        Box::new(input)
    })
}
