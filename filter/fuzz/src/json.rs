//! What the fuzz targets share: JSON in any spelling, and oracles that parse it whole.

use std::fmt;

use arbitrary::Arbitrary;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use eldr_filter::config::Config;
use eldr_filter::plugin::Plugin;
use serde::Deserializer as _;
use serde::de::{MapAccess, Visitor};
use serde_json::Value;
use serde_json::value::RawValue;

/// A JSON value, duplicates of keys included.
#[derive(Arbitrary, Debug, Clone)]
pub enum Json {
    Null,
    Bool(bool),
    Integer(i64),
    Float(f64),
    /// Numbers that do not survive parsing and printing.
    Odd(Odd),
    Text(Text),
    List(Vec<Json>),
    Object(Vec<(Text, Json)>),
}

#[derive(Arbitrary, Debug, Clone, Copy)]
pub enum Odd {
    Big,
    Huge,
    MinusZero,
    TrailingZero,
    Exponent,
}

/// A string; keys are often those that the filter edits.
#[derive(Arbitrary, Debug, Clone)]
pub enum Text {
    Known(u8),
    Any(String),
}

const KNOWN: [&str; 14] = [
    "kv_transfer_params",
    "eldr_sig",
    "stream",
    "stream_options",
    "max_tokens",
    "max_completion_tokens",
    "best_of",
    "min_tokens",
    "n",
    "prompt",
    "model",
    "messages",
    "}{\":\\",
    "é\u{1f600}",
];

impl Text {
    pub fn get(&self) -> &str {
        match self {
            Self::Known(which) => KNOWN[usize::from(*which) % KNOWN.len()],
            Self::Any(text) => text,
        }
    }
}

/// Spells JSON: white space and escapes as `style` says, byte by byte, round and round.
pub struct Printer<'s> {
    pub out: String,
    style: &'s [u8],
    at: usize,
}

impl<'s> Printer<'s> {
    pub fn new(style: &'s [u8]) -> Self {
        Self {
            out: String::new(),
            style,
            at: 0,
        }
    }

    fn style(&mut self) -> u8 {
        self.at += 1;
        let style = self.style.get((self.at - 1) % self.style.len().max(1));
        style.copied().unwrap_or_default()
    }

    pub fn space(&mut self) {
        match self.style() {
            200..220 => self.out.push(' '),
            220..240 => self.out.push_str("\r\n\t"),
            _ => {}
        }
    }

    pub fn text(&mut self, text: &str) {
        self.out.push('"');
        for character in text.chars() {
            match (character, self.style()) {
                ('"' | '\\', _) => self.out.extend(['\\', character]),
                ('/', 128..) => self.out.push_str("\\/"),
                ('\n', 128..) => self.out.push_str("\\n"),
                (character, 240..) | (character @ ..'\u{20}', _) => {
                    for unit in character.encode_utf16(&mut [0; 2]) {
                        self.out.push_str(&format!("\\u{unit:04X}"));
                    }
                }
                _ => self.out.push(character),
            }
        }
        self.out.push('"');
    }

    /// An object; returns the raw text of each value as it was spelled.
    pub fn object(&mut self, members: &[(Text, Json)]) -> Vec<(String, String)> {
        let mut pairs = Vec::new();
        self.out.push('{');
        for (index, (key, value)) in members.iter().enumerate() {
            if index > 0 {
                self.out.push(',');
            }
            self.space();
            self.text(key.get());
            self.space();
            self.out.push(':');
            self.space();
            let start = self.out.len();
            self.json(value);
            pairs.push((key.get().to_owned(), self.out[start..].to_owned()));
            self.space();
        }
        self.space();
        self.out.push('}');
        pairs
    }

    pub fn json(&mut self, json: &Json) {
        match json {
            Json::Null => self.out.push_str("null"),
            Json::Bool(value) => self.out.push_str(if *value { "true" } else { "false" }),
            Json::Integer(value) => self.out.push_str(&value.to_string()),
            Json::Float(value) if value.is_finite() => self.out.push_str(&format!("{value:?}")),
            Json::Float(_) => self.out.push_str("0.5"),
            Json::Odd(odd) => self.out.push_str(match odd {
                Odd::Big => "123456789012345678901234567890",
                Odd::Huge => "1e400",
                Odd::MinusZero => "-0",
                Odd::TrailingZero => "0.10",
                Odd::Exponent => "1E+2",
            }),
            Json::Text(text) => self.text(text.get()),
            Json::List(values) => {
                self.out.push('[');
                for (index, value) in values.iter().enumerate() {
                    if index > 0 {
                        self.out.push(',');
                    }
                    self.space();
                    self.json(value);
                    self.space();
                }
                self.out.push(']');
            }
            Json::Object(members) => drop(self.object(members)),
        }
    }
}

impl Json {
    /// Whether any object in it has the key.
    pub fn has(&self, key: &str) -> bool {
        match self {
            Self::List(values) => values.iter().any(|value| value.has(key)),
            Self::Object(members) => members.iter().any(|(k, v)| k.get() == key || v.has(key)),
            _ => false,
        }
    }
}

/// Members of a JSON object: keys unescaped, values as they are spelled; `None` for anything else.
pub fn pairs(text: &str) -> Option<Vec<(String, String)>> {
    struct Pairs;
    impl<'de> Visitor<'de> for Pairs {
        type Value = Vec<(String, String)>;
        fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
            formatter.write_str("an object")
        }
        fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
            let mut pairs = Vec::new();
            while let Some((key, value)) = map.next_entry::<String, &RawValue>()? {
                pairs.push((key, value.get().to_owned()));
            }
            Ok(pairs)
        }
    }
    let mut deserializer = serde_json::Deserializer::from_str(text);
    let pairs = deserializer.deserialize_map(Pairs).ok()?;
    deserializer.end().ok()?;
    Some(pairs)
}

/// Parsed whole; `Err(true)` where the text may be JSON that a [`Value`] cannot hold.
pub fn value(bytes: &[u8]) -> Result<Value, bool> {
    serde_json::from_slice(bytes).map_err(|error| {
        let text = error.to_string();
        [
            "recursion limit",
            "number out of range",
            "surrogate",
            "unicode code point",
            "escape",
        ]
        .iter()
        .any(|kind| text.contains(kind))
    })
}

/// A filter with one model of 3 layers × 2 experts that has a blob, one decode and one prefill cluster.
pub fn plugin(on_prefill_failure: &str) -> Plugin {
    let blob = include_bytes!("../../../core/fuzz/seeds/blob_raw/one_region.safetensors");
    let config = serde_json::json!({
        "models": [{"model": "*", "blob": {"inline": STANDARD.encode(blob)}}],
        "decode_clusters": ["decode-0"],
        "prefill_clusters": ["prefill"],
        "on_prefill_failure": on_prefill_failure,
    });
    Plugin::new(Config::parse(config.to_string().as_bytes()).expect("valid"))
}
