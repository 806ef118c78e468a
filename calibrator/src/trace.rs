//! The trace: one JSON object per line, plain or gzip, one line per request.
//!
//! ```json
//! {"id":"t00170","label":"code","ts":1.25,"prompt_tokens":309,"decode_tokens":104,
//!  "prefill":":AAAB…=:;l=6;e=64;n=309","decode":":AAIA…=:;l=6;e=64",
//!  "decode_topk":"Bx8g…","prefix":{"group":"3","tokens":128}}
//! ```
//!
//! Only `id` is required. `prefill` and `decode` are values of the `x-eldr-signature` header, byte
//! for byte, and keys that the format does not know are skipped, so an access log of Envoy that
//! captures the header is a trace already. Therefore `null` and `"-"`, which Envoy logs where it has
//! no value, mean absent; a number may be quoted, as Envoy quotes what it takes from headers and
//! filter state; and a line that says nothing of a request's experts needs no id, as the request may
//! have ended before it had one.
//!
//! `gate_prob` and `gate_score` are for fits that compare other signatures than counts, which no gateway can use: over the
//! prompt's tokens, the sums of the full softmax of the gate, and of the gate weights of the selected experts. Each is base64 of
//! little-endian `f32`, `[layer][expert]` with the layers of `prefill`.
//!
//! `decode_topk` is described at [`TopK`]. Reading streams: one line is in memory at a time, and a
//! line may have at most [`LINE_BYTES_MAX`] bytes.

mod error;
mod facts;
mod gate;
mod reader;
mod topk;
mod writer;

use std::sync::Arc;

use eldr_core::signature::{Geometry, Signature};
use eldr_core::transform::SignatureKind;
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use serde_json::value::RawValue;

pub use error::TraceError;
pub use facts::{Facts, LABELS_MAX, Spread};
pub use gate::encode_gate;
pub use reader::{LINE_BYTES_MAX, Reader, read};
pub(crate) use reader::{Lines, decompressed};
pub use topk::TopK;
pub use writer::Writer;

/// One request of a trace.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Record {
    /// Identifies the request; the only required key. Empty at most where neither `prefill` nor
    /// `decode` nor `decode_topk` is there.
    pub id: String,
    /// What kind of request it was, where someone knows (a domain, a tenant); never used to fit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub label: Option<String>,
    /// Arrival, in seconds since a start of the trace's choosing.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ts: Option<f64>,
    /// Tokens of the prompt, cached ones included.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_tokens: Option<u64>,
    /// Decode steps: generated tokens that were fed back to the model, each with a row of expert ids.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub decode_tokens: Option<u64>,
    /// Expert counts over the prompt, as a signature header value.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prefill: Option<String>,
    /// Expert counts over the decode steps, as a signature header value.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub decode: Option<String>,
    /// Expert ids of every decode step in base64; see [`TopK`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub decode_topk: Option<String>,
    /// Sums over the prompt of the full softmax of the gate; see the module's documentation.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gate_prob: Option<String>,
    /// Sums over the prompt of the gate weights of the selected experts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gate_score: Option<String>,
    /// The prefix that this prompt shares with others.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prefix: Option<Prefix>,
    /// Where the record was read, for errors; not part of the format.
    #[serde(skip)]
    pub at: Location,
}

/// A prompt prefix shared by all requests of one group.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Prefix {
    /// Requests with equal groups begin with the same tokens.
    pub group: String,
    /// How many tokens they share.
    pub tokens: u64,
}

/// Over which tokens of a request experts were counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// Over the prompt, which predicts decode: where most requests have nothing better.
    Prefill,
    /// Over the generated tokens: what decode workers see.
    Decode,
}

impl Phase {
    /// The name, which is also the field of a trace.
    pub fn name(self) -> &'static str {
        match self {
            Self::Prefill => "prefill",
            Self::Decode => "decode",
        }
    }
}

/// File and line of a record; the default stands for a record that was not read from a file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Location {
    /// File name as the user gave it.
    pub file: Arc<str>,
    /// Line, counted from 1; 0 where there is none.
    pub line: u64,
}

impl Record {
    /// The prefill signature, decoded.
    pub fn prefill_signature(&self) -> Result<Option<Signature>, TraceError> {
        self.signature("prefill", self.prefill.as_deref())
    }

    /// The decode signature, decoded.
    pub fn decode_signature(&self) -> Result<Option<Signature>, TraceError> {
        self.signature("decode", self.decode.as_deref())
    }

    /// Layers and experts of the model, as its signatures say them; none without signatures.
    pub fn geometry(&self) -> Result<Option<Geometry>, TraceError> {
        let signature = match self.prefill_signature()? {
            Some(prefill) => Some(prefill),
            None => self.decode_signature()?,
        };
        Ok(signature.map(|signature| signature.geometry()))
    }

    /// The gate sums that a gate `kind` of signature is made of, as many as `prefill` has counts; `None` for kinds of counts.
    ///
    /// # Errors
    /// The field is missing or malformed.
    pub fn gate_sums(
        &self,
        kind: SignatureKind,
        prefill: &Signature,
    ) -> Result<Option<Vec<f32>>, TraceError> {
        let (field, text) = match kind {
            SignatureKind::GateProb => ("gate_prob", &self.gate_prob),
            SignatureKind::GateScore => ("gate_score", &self.gate_score),
            _ => return Ok(None),
        };
        let hint = "record the gate sums of every request, base64 of little-endian f32 [layer][expert], or fit with `--signature count-idf`";
        match text {
            Some(text) => gate::decode(text, prefill.counts().len())
                .map(Some)
                .map_err(|problem| self.invalid(field, problem, hint)),
            None => Err(self.invalid(field, "it is missing".into(), hint)),
        }
    }

    /// The expert ids of every decode step, verified against `decode_tokens` and, where it is given,
    /// the decode signature.
    pub fn topk(&self) -> Result<Option<TopK>, TraceError> {
        let Some(text) = self.decode_topk.as_deref() else {
            return Ok(None);
        };
        let decode = self.decode_signature()?;
        let geometry = match &decode {
            Some(decode) => decode.geometry(),
            None => match self.prefill_signature()? {
                Some(prefill) => prefill.geometry(),
                None => {
                    return Err(self.invalid(
                        "decode_topk",
                        "neither `prefill` nor `decode` says how many layers and experts it has"
                            .into(),
                        "record the prefill signature of the request as well",
                    ));
                }
            },
        };
        let Some(tokens) = self.decode_tokens else {
            return Err(self.invalid(
                "decode_topk",
                "`decode_tokens` does not say how many steps it has".into(),
                "record the number of decode steps as well",
            ));
        };
        let topk = TopK::decode(text, geometry, tokens)
            .and_then(|topk| topk.agrees_with(decode.as_ref()).map(|()| topk))
            .map_err(|problem| {
                self.invalid(
                    "decode_topk",
                    problem,
                    "it must be base64 of [decode_tokens, layers, k] expert ids, u8 up to 256 experts, else little-endian u16",
                )
            })?;
        Ok(Some(topk))
    }

    /// An error about this record's `field`, with the place where the record was read.
    pub fn invalid(&self, field: &'static str, problem: String, hint: &str) -> TraceError {
        TraceError::field_at(&self.at, field, problem, hint)
    }

    fn signature(
        &self,
        field: &'static str,
        header: Option<&str>,
    ) -> Result<Option<Signature>, TraceError> {
        header
            .map(|header| {
                Signature::decode(header.as_bytes()).map_err(|error| {
                    self.invalid(
                        field,
                        format!("{} is no signature: {error}", shorten(header)),
                        "it must be a value of the x-eldr-signature header, such as :AAABAAMA…=:;l=48;e=128;n=512",
                    )
                })
            })
            .transpose()
    }

    pub(crate) fn parse(line: &str, at: Location) -> Result<Self, TraceError> {
        let empty = Record {
            at,
            ..Record::default()
        };
        let raw: Raw = serde_json::from_str(line).map_err(|error| {
            let problem = format!("{} is not a trace record: {}", shorten(line), of_line(&error));
            let hint = r#"each line must be one JSON object, such as {"id":"r1","prefill":"…"}; of a log with other lines in it, keep those with: grep '^{'"#;
            TraceError::line(&empty.at, problem, hint)
        })?;
        Record::from_raw(&raw, empty.at)
    }

    /// The record with these values.
    pub(crate) fn from_raw(raw: &Raw<'_>, at: Location) -> Result<Self, TraceError> {
        const COUNT: &str = "an integer from 0 to 18446744073709551615";
        const TEXT: &str = "a string";
        const HEADER: &str = "a string with a signature header value";

        let empty = Record {
            at,
            ..Record::default()
        };
        let mut record = Record {
            id: field(&empty, "id", raw.id, TEXT)?.unwrap_or_default(),
            label: field(&empty, "label", raw.label, TEXT)?,
            ts: field(&empty, "ts", raw.ts, "a number of seconds")?,
            prompt_tokens: field(&empty, "prompt_tokens", raw.prompt_tokens, COUNT)?,
            decode_tokens: field(&empty, "decode_tokens", raw.decode_tokens, COUNT)?,
            prefill: field(&empty, "prefill", raw.prefill, HEADER)?,
            decode: field(&empty, "decode", raw.decode, HEADER)?,
            decode_topk: field(&empty, "decode_topk", raw.decode_topk, "a base64 string")?,
            gate_prob: field(&empty, "gate_prob", raw.gate_prob, "a base64 string")?,
            gate_score: field(&empty, "gate_score", raw.gate_score, "a base64 string")?,
            prefix: field(
                &empty,
                "prefix",
                raw.prefix,
                r#"an object {"group":string,"tokens":integer}"#,
            )?,
            at: Location::default(),
        };
        let experts = [&record.prefill, &record.decode, &record.decode_topk];
        if record.id.is_empty() && experts.iter().any(|field| field.is_some()) {
            let problem = "it is missing or empty where a string was expected".into();
            return Err(empty.invalid("id", problem, "give every request an id of its own"));
        }
        record.at = empty.at;
        Ok(record)
    }
}

/// A line's values as they stand there: so an error can show them, and unknown keys cost nothing.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Raw<'a> {
    #[serde(borrow)]
    pub(crate) id: Option<&'a RawValue>,
    #[serde(borrow)]
    pub(crate) label: Option<&'a RawValue>,
    #[serde(borrow)]
    pub(crate) ts: Option<&'a RawValue>,
    #[serde(borrow)]
    pub(crate) prompt_tokens: Option<&'a RawValue>,
    #[serde(borrow)]
    pub(crate) decode_tokens: Option<&'a RawValue>,
    #[serde(borrow)]
    pub(crate) prefill: Option<&'a RawValue>,
    #[serde(borrow)]
    pub(crate) decode: Option<&'a RawValue>,
    #[serde(borrow)]
    pub(crate) decode_topk: Option<&'a RawValue>,
    #[serde(borrow)]
    pub(crate) gate_prob: Option<&'a RawValue>,
    #[serde(borrow)]
    pub(crate) gate_score: Option<&'a RawValue>,
    #[serde(borrow)]
    pub(crate) prefix: Option<&'a RawValue>,
}

fn field<T: DeserializeOwned>(
    record: &Record,
    name: &'static str,
    raw: Option<&RawValue>,
    allowed: &str,
) -> Result<Option<T>, TraceError> {
    let given = raw.map(RawValue::get).filter(|&text| text != r#""-""#);
    given
        .map(|text| {
            let quoted = text
                .strip_prefix('"')
                .and_then(|text| text.strip_suffix('"'));
            serde_json::from_str(text)
                .or_else(|error| quoted.map_or(Err(error), serde_json::from_str))
                .map_err(|_| {
                    record.invalid(
                        name,
                        format!("{} where {allowed} was expected", shorten(text)),
                        "correct the value, or leave the key out",
                    )
                })
        })
        .transpose()
}

/// What is wrong with the JSON of a line. The parser was given one line, and calls it line 1.
pub(crate) fn of_line(error: &serde_json::Error) -> String {
    let error = error.to_string();
    error.replace(" at line 1 column ", " at column ")
}

/// A value as an error shows it: at most 48 characters.
pub(crate) fn shorten(value: &str) -> String {
    match value.char_indices().nth(48) {
        Some((end, _)) => format!("{}… ({} bytes)", &value[..end], value.len()),
        None => value.to_owned(),
    }
}

#[cfg(test)]
mod tests;
