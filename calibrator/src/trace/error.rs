//! What a malformed trace is told.

use std::io;
use std::sync::Arc;

use super::Location;

/// What is wrong with a trace, where, and what to do about it.
///
/// The text names file, line, field, the value (shortened) and what was allowed.
#[derive(Debug, thiserror::Error)]
#[error("{}{problem}", self.place())]
pub struct TraceError {
    at: Location,
    field: Option<&'static str>,
    problem: String,
    hint: String,
    source: Option<io::Error>,
}

impl TraceError {
    /// File and line.
    pub fn at(&self) -> &Location {
        &self.at
    }

    /// The key whose value is wrong; `None` when the whole line or file is.
    pub fn field(&self) -> Option<&'static str> {
        self.field
    }

    /// The next step, in one sentence.
    pub fn hint(&self) -> &str {
        &self.hint
    }

    fn place(&self) -> String {
        let mut place = String::new();
        if !self.at.file.is_empty() {
            place += &format!("{}:", self.at.file);
        }
        if self.at.line > 0 {
            place += &format!("{}:", self.at.line);
        }
        if !place.is_empty() {
            place.push(' ');
        }
        if let Some(field) = self.field {
            place += &format!("field `{field}`: ");
        }
        place
    }

    pub(crate) fn io(file: &Arc<str>, doing: &str, hint: &str, source: io::Error) -> Self {
        let at = Location {
            file: Arc::clone(file),
            line: 0,
        };
        let problem = format!("{doing} failed: {source}");
        TraceError {
            at,
            field: None,
            problem,
            hint: hint.into(),
            source: Some(source),
        }
    }

    pub(crate) fn line(at: &Location, problem: String, hint: &str) -> Self {
        TraceError {
            at: at.clone(),
            field: None,
            problem,
            hint: hint.into(),
            source: None,
        }
    }

    pub(super) fn field_at(
        at: &Location,
        field: &'static str,
        problem: String,
        hint: &str,
    ) -> Self {
        TraceError {
            at: at.clone(),
            field: Some(field),
            problem,
            hint: hint.into(),
            source: None,
        }
    }
}
