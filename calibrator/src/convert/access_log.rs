//! Access logs of Envoy become traces.

use std::collections::HashMap;
use std::path::Path;

use serde_json::value::{RawValue, to_raw_value};

use crate::error::Error;
use crate::trace::{Lines, Location, Raw, Record, TraceError, Writer, of_line, shorten};

/// What can be taken from a log, and the key it is taken from where nothing else is said: those that
/// `envoy/envoy.yaml` logs.
pub const FIELDS: [(&str, &str); 7] = [
    ("id", "id"),
    ("label", "label"),
    ("ts", "time"),
    ("prompt_tokens", "prompt_tokens"),
    ("decode_tokens", "decode_tokens"),
    ("prefill", "prefill"),
    ("decode", "decode"),
];

/// Which key of the log holds which field of a trace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mapping {
    /// Key by field, in the order of [`FIELDS`]; a key that begins with `/` is a JSON Pointer (RFC 6901).
    keys: [String; FIELDS.len()],
    /// Whether somebody asked for that key, who would then miss it.
    given: [bool; FIELDS.len()],
}

impl Default for Mapping {
    fn default() -> Self {
        Mapping {
            keys: FIELDS.map(|(_, key)| key.to_owned()),
            given: [false; FIELDS.len()],
        }
    }
}

impl Mapping {
    /// Takes the field before `=` from the key behind it. The error says what is wrong with `text`.
    pub fn set(&mut self, text: &str) -> Result<(), String> {
        let allowed = || FIELDS.map(|(field, _)| field).join(", ");
        let Some((field, key)) = text.split_once('=').filter(|(_, key)| !key.is_empty()) else {
            return Err(format!(
                "FIELD=KEY was expected, FIELD one of: {}",
                allowed()
            ));
        };
        let Some(at) = FIELDS.iter().position(|(name, _)| *name == field) else {
            return Err(format!("{field:?} is no field; they are: {}", allowed()));
        };
        if self.given[at] {
            return Err(format!("{field} is mapped twice"));
        }
        self.keys[at] = key.to_owned();
        self.given[at] = true;
        Ok(())
    }
}

/// An access log of Envoy with `json_format`, one object per line, plain or gzip.
///
/// Lines that are no objects are left out, since Envoy's own log often has the same destination, and so are
/// requests without a signature. `ts` may be a number of seconds or a time as `%START_TIME%` gives it
/// (RFC 3339), which becomes seconds since 1970.
#[derive(Clone, Copy, Debug)]
pub struct AccessLog<'a> {
    /// The logs, one after the other.
    pub logs: &'a [std::path::PathBuf],
    /// Where the fields are.
    pub mapping: &'a Mapping,
}

/// How many lines became what.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Converted {
    /// Requests of the trace.
    pub requests: u64,
    /// Objects without a signature, left out.
    pub without_signature: u64,
    /// Lines that are no objects, left out.
    pub other_lines: u64,
}

impl AccessLog<'_> {
    /// Writes the requests to `output`.
    ///
    /// # Errors
    /// A line is malformed, a key that was asked for is nowhere, or no request has a signature.
    pub fn convert(&self, output: &mut Writer) -> Result<Converted, Error> {
        let mut converted = Converted::default();
        let mut found = [false; FIELDS.len()];
        let mut keys = Vec::new();
        for log in self.logs {
            self.read(log, output, &mut converted, &mut found, &mut keys)?;
        }
        self.check(converted, found, &keys)?;
        Ok(converted)
    }

    fn read(
        &self,
        log: &Path,
        output: &mut Writer,
        converted: &mut Converted,
        found: &mut [bool; FIELDS.len()],
        keys: &mut Vec<String>,
    ) -> Result<(), Error> {
        let mut lines = Lines::open(log, "the log")?;
        while let Some(line) = lines.next() {
            let (line, at) = line?;
            if !line.starts_with('{') {
                converted.other_lines += 1;
                continue;
            }
            let object = object(line, &at)?;
            let mut values = [None; FIELDS.len()];
            for (at, value) in values.iter_mut().enumerate() {
                *value = lookup(&object, &self.mapping.keys[at]);
                found[at] |= value.is_some();
                *value = value.filter(|value| value.get() != "null");
            }
            if keys.is_empty() {
                keys.extend(object.into_keys());
                keys.sort_unstable();
            }
            let record = record(values, at)?;
            if record.prefill_signature()?.is_none() && record.decode_signature()?.is_none() {
                converted.without_signature += 1;
                continue;
            }
            output.write(&record)?;
            converted.requests += 1;
        }
        Ok(())
    }

    fn check(
        &self,
        converted: Converted,
        found: [bool; FIELDS.len()],
        keys: &[String],
    ) -> Result<(), Error> {
        let logs: Vec<_> = self
            .logs
            .iter()
            .map(|log| log.display().to_string())
            .collect();
        let logs = logs.join(", ");
        let missing = (0..FIELDS.len()).find(|&at| self.mapping.given[at] && !found[at]);
        if let Some(at) = missing
            && !keys.is_empty()
        {
            let (field, key) = (FIELDS[at].0, &self.mapping.keys[at]);
            return Err(Error::new(
                format!("{logs}: no line has the key {key:?}, which {field} was to be taken from"),
                format!("the keys are: {}", shorten_list(keys)),
            ));
        }
        if converted.requests == 0 {
            let Converted {
                without_signature,
                other_lines,
                ..
            } = converted;
            return Err(Error::new(
                format!(
                    "{logs}: no signatures: {without_signature} JSON lines without one, {other_lines} other lines"
                ),
                format!(
                    "log them with `log_signatures: true` as envoy/envoy.yaml does; if another key has them, say --map prefill=KEY{}",
                    if keys.is_empty() {
                        String::new()
                    } else {
                        format!(" (the keys are: {})", shorten_list(keys))
                    }
                ),
            ));
        }
        Ok(())
    }
}

type Object<'a> = HashMap<String, &'a RawValue>;

fn object<'a>(line: &'a str, at: &Location) -> Result<Object<'a>, TraceError> {
    serde_json::from_str(line).map_err(|error| {
        let problem = format!(
            "{} is not a JSON object: {}",
            shorten(line),
            of_line(&error)
        );
        let hint = "the line may be cut off: copy the log again, or remove the line";
        TraceError::line(at, problem, hint)
    })
}

/// The value at `key`, or at the JSON Pointer `key`.
fn lookup<'a>(object: &Object<'a>, key: &str) -> Option<&'a RawValue> {
    let Some(pointer) = key.strip_prefix('/') else {
        return object.get(key).copied();
    };
    let mut steps = pointer
        .split('/')
        .map(|step| step.replace("~1", "/").replace("~0", "~"));
    let mut value = *object.get(&steps.next()?)?;
    for step in steps {
        let inner: Object<'a> = serde_json::from_str(value.get()).ok()?;
        value = *inner.get(&step)?;
    }
    Some(value)
}

fn record(values: [Option<&RawValue>; FIELDS.len()], at: Location) -> Result<Record, TraceError> {
    let [id, label, ts, prompt_tokens, decode_tokens, prefill, decode] = values;
    let seconds = ts.and_then(|ts| {
        let text: &str = serde_json::from_str(ts.get()).ok()?;
        let time: jiff::Timestamp = text.parse().ok()?;
        to_raw_value(&(time.as_microsecond() as f64 / 1e6)).ok()
    });
    let raw = Raw {
        id,
        label,
        ts: seconds.as_deref().or(ts),
        prompt_tokens,
        decode_tokens,
        prefill,
        decode,
        ..Raw::default()
    };
    Record::from_raw(&raw, at)
}

/// At most 24 keys: a log may have hundreds.
fn shorten_list(keys: &[String]) -> String {
    let mut text = keys.iter().take(24).cloned().collect::<Vec<_>>().join(", ");
    if keys.len() > 24 {
        text += ", …";
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace;

    /// The trace of a log, or what is told.
    fn convert(log: &str, maps: &[&str]) -> Result<(Vec<Record>, Converted), Error> {
        let dir = tempfile::tempdir().unwrap();
        let (path, out) = (dir.path().join("log"), dir.path().join("out"));
        std::fs::write(&path, log).unwrap();
        let mut mapping = Mapping::default();
        maps.iter().for_each(|map| mapping.set(map).unwrap());
        let mut writer = Writer::create(&out)?;
        let converted = AccessLog {
            logs: &[path],
            mapping: &mapping,
        }
        .convert(&mut writer)?;
        writer.finish()?;
        let records = trace::read(&out)?.collect::<Result<Vec<_>, _>>()?;
        Ok((records, converted))
    }

    #[test]
    fn foreign_keys_are_mapped_and_nested_ones_found() {
        let log = r#"
[2026-11-30 02:34:31.497][7][info][main] starting
{"request":{"id":"a","a/b~c":"code"},"sig":":AQACAA==:;l=1;e=2","start":"2026-11-30T02:42:49.642Z","in":"12"}
{"request":{"id":"-"},"sig":null}
{"request":{"id":"b"},"sig":":AQACAA==:;l=1;e=2","start":"-","in":null}
"#;
        let maps = [
            "id=/request/id",
            "prefill=sig",
            "ts=start",
            "prompt_tokens=/in",
            "label=/request/a~1b~0c",
        ];
        let (records, converted) = convert(log, &maps).unwrap();
        let expected = Converted {
            requests: 2,
            without_signature: 1,
            other_lines: 1,
        };
        assert_eq!(converted, expected);
        let [a, b] = &records[..] else {
            panic!("{records:?}")
        };
        assert_eq!((a.id.as_str(), a.label.as_deref()), ("a", Some("code")));
        assert_eq!((a.ts, a.prompt_tokens), (Some(1_796_006_569.642), Some(12)));
        assert_eq!(a.prefill.as_deref(), Some(":AQACAA==:;l=1;e=2"));
        assert_eq!((b.id.as_str(), b.ts, b.prompt_tokens), ("b", None, None));
    }

    #[test]
    fn what_is_missing_is_told_with_the_keys_that_are_there() {
        let log = r#"{"id":"a","sig":":AQACAA==:;l=1;e=2"}"#;
        let error = convert(log, &["prefill=signature"]).unwrap_err();
        assert!(
            error
                .to_string()
                .contains("no line has the key \"signature\"")
        );
        assert_eq!(error.hint(), "the keys are: id, sig");
        let error = convert(log, &[]).unwrap_err().to_string();
        assert!(error.ends_with("no signatures: 1 JSON lines without one, 0 other lines"));
    }

    #[test]
    fn mappings_that_are_none() {
        let set = |text: &str| Mapping::default().set(text).unwrap_err();
        let fields = "id, label, ts, prompt_tokens, decode_tokens, prefill, decode";
        assert_eq!(
            set("id"),
            format!("FIELD=KEY was expected, FIELD one of: {fields}")
        );
        assert_eq!(set("id="), set("id"));
        assert_eq!(
            set("sig=x"),
            format!("\"sig\" is no field; they are: {fields}")
        );
        let mut mapping = Mapping::default();
        mapping.set("id=a").unwrap();
        assert_eq!(mapping.set("id=b").unwrap_err(), "id is mapped twice");
    }
}
