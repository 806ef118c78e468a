//! The one error of the calibrator: what went wrong, and what to do next.

use std::path::Path;

use eldr_core::blob::BlobError;
use eldr_core::route::BindError;

use crate::trace::TraceError;

/// A failure told to a person: the text says what was wrong, where, which value and what was
/// allowed; the hint says what to do next.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{what}")]
pub struct Error {
    what: String,
    hint: String,
}

impl Error {
    /// A failure `what` and the next step `hint`.
    pub fn new(what: impl Into<String>, hint: impl Into<String>) -> Self {
        Error {
            what: what.into(),
            hint: hint.into(),
        }
    }

    /// What is wrong with the blob in `file`; the error's text may end in a hint of its own.
    pub(crate) fn in_file(file: &Path, error: &BlobError) -> Self {
        let text = format!("{}: {error}", file.display());
        Error::with_own_hint(text, "make a new blob with `eldr fit`")
    }

    /// A failure whose text may end in a hint of its own; otherwise the hint is `hint`.
    fn with_own_hint(text: String, hint: &str) -> Self {
        match text.split_once("\nhint: ") {
            Some((what, hint)) => Error::new(what, hint),
            None => Error::new(text, hint),
        }
    }

    /// The next step, in one sentence.
    pub fn hint(&self) -> &str {
        &self.hint
    }
}

impl From<BindError> for Error {
    fn from(error: BindError) -> Self {
        Error::with_own_hint(error.to_string(), "fit the blob again")
    }
}

impl From<TraceError> for Error {
    fn from(error: TraceError) -> Self {
        Error::new(error.to_string(), error.hint())
    }
}
