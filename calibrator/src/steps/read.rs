//! Reads samples.

use std::path::Path;

use super::Sample;
use crate::error::Error;
use crate::trace::{Lines, Location, TraceError, shorten};

/// Policies whose batches are mixed, in our names and the published ones.
const BLIND: [&str; 6] = ["rr", "round_robin", "random", "jsq", "least_loaded", "p2c"];
/// Most samples.
const SAMPLES_MAX: usize = 1_000_000;

/// What a table of times per token does not say.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Setting<'a> {
    /// Rows of this model are taken, where there is a column `model`.
    pub model: &'a str,
    /// Decode workers among which requests are spread.
    pub workers: usize,
    /// Output tokens of each request.
    pub decode_tokens: u32,
    /// Experts per layer.
    pub experts: usize,
    /// Experts that a token activates in each layer.
    pub top_k: usize,
}

/// Columns of a file, by their place.
enum Columns {
    Steps {
        batch: usize,
        experts: usize,
        kv_tokens: Option<usize>,
        ms: usize,
    },
    PerToken {
        rate: usize,
        ms: usize,
        model: Option<usize>,
        policy: Option<usize>,
    },
}

/// Reads a CSV of either kind, plain or gzip.
///
/// # Errors
/// The file cannot be read, its header has not the columns, or a field is no number above 0.
pub fn read(path: &Path, setting: Setting<'_>) -> Result<Vec<Sample>, Error> {
    let mut lines = Lines::open(path, "the step times")?;
    let mut columns: Option<(Columns, usize)> = None;
    let mut samples = Vec::new();
    while let Some(line) = lines.next() {
        let (line, at) = line?;
        let fields: Vec<&str> = line
            .trim_start_matches('\u{feff}')
            .split(',')
            .map(str::trim)
            .collect();
        let Some((columns, width)) = &columns else {
            let found = header(&fields).ok_or_else(|| {
                let problem = format!("{}: no header that is known", shorten(line));
                failed(&at, problem)
            })?;
            columns = Some((found, fields.len()));
            continue;
        };
        if fields.len() != *width {
            let problem = format!(
                "{}: {} fields where the header has {width}",
                shorten(line),
                fields.len()
            );
            return Err(failed(&at, problem).into());
        }
        let sample = columns
            .sample(&fields, setting)
            .map_err(|problem| failed(&at, problem))?;
        samples.extend(sample);
        if samples.len() > SAMPLES_MAX {
            let problem = format!("more than {SAMPLES_MAX} samples");
            return Err(failed(&at, problem).into());
        }
    }
    if samples.is_empty() {
        return Err(Error::new(
            format!("{}: no sample in it for {}", path.display(), setting.model),
            "give a CSV with the header batch,experts,step_ms, or rows of a load balancer and of the model that --model names",
        ));
    }
    Ok(samples)
}

fn header(names: &[&str]) -> Option<Columns> {
    let place = |name: &str| names.iter().position(|other| *other == name);
    if let (Some(batch), Some(experts), Some(ms)) =
        (place("batch"), place("experts"), place("step_ms"))
    {
        let kv_tokens = place("kv_tokens");
        return Some(Columns::Steps {
            batch,
            experts,
            kv_tokens,
            ms,
        });
    }
    let (rate, ms) = (place("rate_rps")?, place("tpot_p50_ms")?);
    let (model, policy) = (place("model"), place("policy"));
    Some(Columns::PerToken {
        rate,
        ms,
        model,
        policy,
    })
}

impl Columns {
    /// None of a row that is not to be used.
    fn sample(&self, fields: &[&str], setting: Setting<'_>) -> Result<Option<Sample>, String> {
        let number = |name: &str, place: usize| {
            let text = fields[place];
            let value = text
                .parse::<f64>()
                .ok()
                .filter(|value| (0.0..=1e9).contains(value));
            value.ok_or_else(|| {
                format!("{name} {text:?}: a number from 0 to 1000000000 was expected")
            })
        };
        match *self {
            Columns::Steps {
                batch,
                experts,
                kv_tokens,
                ms,
            } => Ok(Some(Sample {
                experts: number("experts", experts)?,
                batch: number("batch", batch)?,
                kv_tokens: kv_tokens.map_or(Ok(0.0), |place| number("kv_tokens", place))?,
                ms: number("step_ms", ms)?,
            })),
            Columns::PerToken {
                rate,
                ms,
                model,
                policy,
            } => {
                let other_model =
                    model.is_some_and(|place| !fields[place].eq_ignore_ascii_case(setting.model));
                if other_model || policy.is_some_and(|place| !BLIND.contains(&fields[place])) {
                    return Ok(None);
                }
                let ms = number("tpot_p50_ms", ms)?;
                let tokens_per_ms =
                    number("rate_rps", rate)? * f64::from(setting.decode_tokens) / 1e3;
                let batch = tokens_per_ms * ms / setting.workers as f64;
                let all = setting.experts as f64;
                let experts = all * (1.0 - (1.0 - setting.top_k as f64 / all).powf(batch));
                Ok(Some(Sample {
                    experts,
                    batch,
                    kv_tokens: 0.0,
                    ms,
                }))
            }
        }
    }
}

fn failed(at: &Location, problem: String) -> TraceError {
    let hint = "the first line must name the columns batch,experts,step_ms (and kv_tokens), or rate_rps,tpot_p50_ms (and model, policy)";
    TraceError::line(at, problem, hint)
}
