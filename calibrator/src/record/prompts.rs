//! The prompts, read line by line.

use std::path::Path;

use serde::Deserialize;
use serde_json::Value;

use crate::error::Error;
use crate::trace::{Lines, TraceError, of_line, shorten};

/// A prompt to record.
#[derive(Clone, Debug, PartialEq)]
pub struct Prompt {
    /// Id of its record.
    pub id: String,
    /// Label of its record.
    pub label: Option<String>,
    /// What the engine gets.
    pub content: Content,
}

/// What the engine gets.
#[derive(Clone, Debug, PartialEq)]
pub enum Content {
    /// A text or token ids, for `/v1/completions`.
    Prompt(Value),
    /// Messages, for `/v1/chat/completions`.
    Messages(Value),
}

/// Reads prompts: JSON Lines, plain or gzip, one object each.
///
/// ```json
/// {"id":"p1","prompt":"def f(","label":"code"}
/// {"messages":[{"role":"user","content":"What is a tort?"}],"domain":"legal"}
/// ```
///
/// `text` may stand for `prompt`, `domain` for `label`; a prompt may be a list of token ids. The default of `id` is
/// the number of the line.
#[derive(Debug)]
pub struct Prompts {
    lines: Lines,
}

#[derive(Deserialize)]
struct Raw {
    id: Option<Value>,
    #[serde(alias = "domain")]
    label: Option<String>,
    #[serde(alias = "text")]
    prompt: Option<Value>,
    messages: Option<Value>,
}

const HINT: &str = r#"each line must be an object such as {"id":"p1","prompt":"…","label":"code"} or {"messages":[{"role":"user","content":"…"}]}"#;

impl Prompts {
    /// Opens the file at `path`.
    ///
    /// # Errors
    /// It cannot be opened.
    pub fn open(path: &Path) -> Result<Self, Error> {
        let lines = Lines::open(path, "the prompts")
            .map_err(|error| Error::new(error.to_string(), HINT))?;
        Ok(Prompts { lines })
    }
}

impl Iterator for Prompts {
    type Item = Result<Prompt, Error>;

    fn next(&mut self) -> Option<Self::Item> {
        let (line, at) = match self.lines.next()? {
            Ok(line) => line,
            Err(error) => return Some(Err(error.into())),
        };
        let failed = |what: &str| {
            let problem = format!("{}: {what}", shorten(line));
            Some(Err(TraceError::line(&at, problem, HINT).into()))
        };
        let raw: Raw = match serde_json::from_str(line) {
            Ok(raw) => raw,
            Err(error) => return failed(&of_line(&error)),
        };
        let ids = |prompt: &Value| {
            prompt
                .as_array()
                .is_some_and(|ids| !ids.is_empty() && ids.iter().all(Value::is_u64))
        };
        let content = match (raw.prompt, raw.messages) {
            (Some(prompt), None) if prompt.is_string() || ids(&prompt) => Content::Prompt(prompt),
            (None, Some(messages)) if messages.is_array() => Content::Messages(messages),
            (Some(_), Some(_)) => return failed("it has both `prompt` and `messages`"),
            (None, None) => return failed("it has neither `prompt` nor `messages`"),
            _ => return failed("`prompt` must be a text or token ids, `messages` a list"),
        };
        let id = match raw.id {
            None => at.line.to_string(),
            Some(Value::String(id)) if !id.is_empty() => id,
            Some(Value::Number(id)) => id.to_string(),
            Some(_) => return failed("`id` must be a text or a number"),
        };
        Some(Ok(Prompt {
            id,
            label: raw.label,
            content,
        }))
    }
}
