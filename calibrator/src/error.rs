//! The one error of the calibrator: what went wrong, and what to do next.

use crate::trace::TraceError;

/// A failure told to a person: the text says what was wrong, where, which value and what was
/// allowed; the hint says what to do next.
#[derive(Debug, thiserror::Error)]
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

    /// The next step, in one sentence.
    pub fn hint(&self) -> &str {
        &self.hint
    }
}

impl From<TraceError> for Error {
    fn from(error: TraceError) -> Self {
        Error::new(error.to_string(), error.hint())
    }
}
