//! Lengths and times of other people's traffic: the traces that Azure and Mooncake published.

use std::path::Path;

use jiff::civil::DateTime;
use serde::Deserialize;

use crate::error::Error;
use crate::trace::{Lines, Location, TraceError, of_line, shorten};

/// First line of Azure's LLM inference traces.
const AZURE: &str = "TIMESTAMP,ContextTokens,GeneratedTokens";

/// Prompt and answer lengths with their times, in ascending order of time.
#[derive(Clone, Debug, PartialEq)]
pub struct Lengths {
    rows: Vec<Row>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
struct Row {
    at_s: f64,
    prompt_tokens: u32,
    decode_tokens: u32,
}

/// A line of a Mooncake trace: `timestamp` in ms; other keys are of no use here.
#[derive(Deserialize)]
struct Mooncake {
    timestamp: f64,
    input_length: u32,
    output_length: u32,
}

impl Lengths {
    /// Reads `TIMESTAMP,ContextTokens,GeneratedTokens` (Azure LLM inference traces) or JSON Lines with `timestamp` (ms),
    /// `input_length` and `output_length` (Mooncake traces), plain or gzip. Lengths of 0 are taken as 1.
    ///
    /// # Errors
    /// The file cannot be read, has neither format, or has no request.
    pub fn read(path: &Path) -> Result<Self, Error> {
        let mut lines = Lines::open(path, "the lengths")?;
        let mut rows: Vec<Row> = Vec::new();
        let mut azure = false;
        while let Some(line) = lines.next() {
            let (line, at) = line?;
            if rows.is_empty() && !azure && line.trim_start_matches('\u{feff}') == AZURE {
                azure = true;
                continue;
            }
            let row = if azure {
                of_azure(line)
            } else {
                of_mooncake(line)
            };
            rows.push(row.map_err(|problem| malformed(&at, line, &problem))?);
        }
        if rows.is_empty() {
            return Err(Error::new(
                format!("{}: no request in it", path.display()),
                format!("give a file with the header {AZURE}, or JSON Lines of a Mooncake trace"),
            ));
        }
        rows.sort_by(|a, b| a.at_s.total_cmp(&b.at_s));
        Ok(Lengths { rows })
    }

    /// How many there are; at least 1.
    pub fn len(&self) -> usize {
        self.rows.len()
    }

    /// Never: a file without requests is an error.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// Prompt and decode tokens of row `index`; past the last they start over.
    pub fn get(&self, index: usize) -> (u32, u32) {
        let row = &self.rows[index % self.rows.len()];
        (row.prompt_tokens, row.decode_tokens)
    }

    /// Times in seconds, ascending.
    pub fn times(&self) -> impl Iterator<Item = f64> + '_ {
        self.rows.iter().map(|row| row.at_s)
    }
}

fn of_azure(line: &str) -> Result<Row, String> {
    let fields: Vec<&str> = line.split(',').map(str::trim).collect();
    let [time, prompt, decode] = fields[..] else {
        return Err(format!("it has {} fields, {AZURE} are 3", fields.len()));
    };
    let time: DateTime = time
        .parse()
        .map_err(|_| format!("TIMESTAMP {time:?} is no date and time"))?;
    let tokens = |name: &str, text: &str| {
        let tokens = text.parse::<u32>();
        tokens.map_err(|_| format!("{name} {text:?} is no number of tokens"))
    };
    let since = time.duration_since(DateTime::constant(1970, 1, 1, 0, 0, 0, 0));
    Ok(Row {
        at_s: since.as_secs_f64(),
        prompt_tokens: tokens("ContextTokens", prompt)?.max(1),
        decode_tokens: tokens("GeneratedTokens", decode)?.max(1),
    })
}

fn of_mooncake(line: &str) -> Result<Row, String> {
    let row: Mooncake = serde_json::from_str(line).map_err(|error| {
        let error = of_line(&error);
        format!("{error} (of a CSV the first line must be {AZURE})")
    })?;
    if !row.timestamp.is_finite() {
        return Err(format!("timestamp {} is no time", row.timestamp));
    }
    Ok(Row {
        at_s: row.timestamp / 1e3,
        prompt_tokens: row.input_length.max(1),
        decode_tokens: row.output_length.max(1),
    })
}

fn malformed(at: &Location, line: &str, problem: &str) -> TraceError {
    let problem = format!("{}: {problem}", shorten(line));
    let hint = r#"each line must be as in Azure's traces, or {"timestamp":0,"input_length":6758,"output_length":500} as in Mooncake's"#;
    TraceError::line(at, problem, hint)
}
