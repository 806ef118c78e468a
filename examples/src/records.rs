//! Whole traces in memory.

use std::path::Path;

use eldr_calibrator::Error;
use eldr_calibrator::trace::{self, Record};

/// Reads all records of the trace `path`.
///
/// # Errors
/// The first malformed record, with file, line, field and a hint.
pub fn read(path: impl AsRef<Path>) -> anyhow::Result<Vec<Record>> {
    trace::read(path)
        .and_then(Iterator::collect)
        .map_err(|error| with_hint(&error.into()))
}

/// The calibrator's error as one that shows its hint.
pub(crate) fn with_hint(error: &Error) -> anyhow::Error {
    anyhow::anyhow!("{error}\nhint: {}", error.hint())
}
