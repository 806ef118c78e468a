//! Plugin configuration: JSON, parsed into a raw type and then into a valid one.
//!
//! Every mistake is reported in one go, each with its field, the value found and what is allowed.

use std::fmt;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use eldr_core::blob::Blob;
use eldr_core::decide::{Policy, Rule};
use eldr_core::prefix_hash::{LOAD_FACTOR, PREFIX_BYTES};
use eldr_core::route::Map;
use serde::Deserialize;
use serde_json::Value;

use crate::load::Timing;
use crate::release::Form;

/// A model name that matches any.
pub const ANY_MODEL: &str = "*";

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Raw {
    models: Vec<RawModel>,
    decode_clusters: Vec<String>,
    prefill_clusters: Vec<String>,
    #[serde(default)]
    prefill_policy: PrefillPolicy,
    #[serde(default = "default_prefill_prefix_bytes")]
    prefill_prefix_bytes: u64,
    #[serde(default = "default_prefill_load_factor")]
    prefill_load_factor: f64,
    #[serde(default = "default_prefill_timeout_ms")]
    prefill_timeout_ms: u64,
    #[serde(default = "default_prefill_retry")]
    prefill_retry: bool,
    #[serde(default)]
    on_prefill_failure: OnPrefillFailure,
    #[serde(default)]
    release: Form,
    #[serde(default)]
    mode: Mode,
    #[serde(default)]
    protocol: Protocol,
    #[serde(default = "default_load_lease_ms")]
    load_lease_ms: u64,
    #[serde(default = "default_load_refresh_ms")]
    load_refresh_ms: u64,
    #[serde(default)]
    debug_headers: bool,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct RawModel {
    model: String,
    blob: Option<RawBlob>,
    #[serde(default)]
    policy: Policy,
    tau: Option<f64>,
    #[serde(default)]
    max_load_factor: Option<Value>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct RawBlob {
    inline: String,
}

fn default_prefill_prefix_bytes() -> u64 {
    PREFIX_BYTES as u64
}

fn default_prefill_load_factor() -> f64 {
    LOAD_FACTOR
}

fn default_prefill_retry() -> bool {
    true
}

fn default_prefill_timeout_ms() -> u64 {
    30_000
}

fn default_load_lease_ms() -> u64 {
    2_000
}

fn default_load_refresh_ms() -> u64 {
    1
}

/// How the prefill cluster is chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PrefillPolicy {
    /// One after the other, per thread.
    #[default]
    RoundRobin,
    /// The one with the fewest prefill legs in flight.
    LeastLoaded,
    /// The one that served the same beginning of a prompt, unless it is overloaded: prefixes stay cached.
    PrefixHash,
}

/// What becomes of a request whose prefill leg failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OnPrefillFailure {
    /// The least loaded decode worker prefills by itself.
    #[default]
    DecodeOnly,
    /// The client gets 502, or 504 after a timeout.
    Error,
}

/// Who runs the prefill leg.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Mode {
    /// The filter.
    #[default]
    Orchestrate,
}

/// How prefill hands over to decode.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Protocol {
    /// vLLM NixlConnector.
    #[default]
    Nixl,
}

/// A valid configuration.
#[derive(Debug)]
pub struct Config {
    /// Models, in the order of the configuration.
    pub models: Vec<Model>,
    /// Decode clusters that may be used; worker indices point here.
    pub decode_clusters: Vec<String>,
    /// Prefill clusters.
    pub prefill_clusters: Vec<String>,
    /// How one of them is chosen.
    pub prefill_policy: PrefillPolicy,
    /// Bytes of a prompt that `prefix_hash` looks at.
    pub prefill_prefix_bytes: usize,
    /// `prefix_hash` passes over a cluster above this multiple of the mean load.
    pub prefill_load_factor: f64,
    /// Deadline of the prefill leg, its retry included.
    pub prefill_timeout_ms: u64,
    /// Whether a leg that did not get through is sent once more, to another cluster.
    pub prefill_retry: bool,
    /// After its failure.
    pub on_prefill_failure: OnPrefillFailure,
    /// How KV blocks are released that no decode worker will fetch.
    pub release: Form,
    /// Who runs the prefill leg.
    pub mode: Mode,
    /// How it hands over.
    pub protocol: Protocol,
    /// Load sharing between threads.
    pub timing: Timing,
    /// Whether clients get `x-eldr-decision`.
    pub debug_headers: bool,
}

/// Routing of one model.
#[derive(Debug)]
pub struct Model {
    /// Value of the body's `model`, or [`ANY_MODEL`].
    pub name: String,
    /// Policy and parameters; `tau` is the blob's where the configuration has none.
    pub rule: Rule,
    /// Whether the configuration sets tau, which then outlives new blobs.
    pub tau_is_fixed: bool,
    /// The inline blob: bytes as given, and bound to the decode clusters.
    pub blob: Option<(Vec<u8>, Map)>,
}

/// One mistake.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mistake {
    /// Path of the field, such as `models[0].tau`.
    pub field: String,
    /// What is there.
    pub found: String,
    /// What may be there.
    pub allowed: String,
}

/// All mistakes of a configuration.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub struct Mistakes(pub Vec<Mistake>);

impl fmt::Display for Mistakes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "plugin configuration refused, {} mistake(s):",
            self.0.len()
        )?;
        for Mistake {
            field,
            found,
            allowed,
        } in &self.0
        {
            write!(f, "\n  {field}: found {found}, allowed: {allowed}")?;
        }
        Ok(())
    }
}

impl Config {
    /// Parses and validates.
    ///
    /// # Errors
    /// All mistakes that can be seen at once; a JSON error or an unknown field hides those behind it.
    pub fn parse(json: &[u8]) -> Result<Self, Mistakes> {
        let mut deserializer = serde_json::Deserializer::from_slice(json);
        let raw: Result<Raw, _> = serde_path_to_error::deserialize(&mut deserializer);
        let mistake = |field: String, found: String| {
            let allowed = "the fields and values listed in the README".into();
            Mistakes(vec![Mistake {
                field,
                found,
                allowed,
            }])
        };
        let raw = raw.map_err(|e| mistake(e.path().to_string(), e.inner().to_string()))?;
        deserializer
            .end()
            .map_err(|e| mistake("the end".into(), e.to_string()))?;
        let mut check = Check(Vec::new());
        check.clusters("decode_clusters", &raw.decode_clusters);
        check.clusters("prefill_clusters", &raw.prefill_clusters);
        check.range("prefill_timeout_ms", raw.prefill_timeout_ms, 1, 3_600_000);
        let prefix_bytes = raw.prefill_prefix_bytes;
        check.range("prefill_prefix_bytes", prefix_bytes, 1, 1 << 20);
        let load_factor = raw.prefill_load_factor;
        if !(1.0..=100.0).contains(&load_factor) {
            let found = load_factor.to_string();
            check.mistake("prefill_load_factor", &found, "a number from 1 to 100");
        }
        check.range("load_lease_ms", raw.load_lease_ms, 500, 60_000);
        check.range("load_refresh_ms", raw.load_refresh_ms, 0, 1_000);
        if raw.models.is_empty() {
            check.mistake("models", "[]", "at least one model; \"*\" matches any");
        }
        let mut models: Vec<Model> = Vec::new();
        for (index, model) in raw.models.into_iter().enumerate() {
            let field = format!("models[{index}]");
            if model.name_is_taken(&models) {
                let found = format!("{:?}", model.model);
                check.mistake(
                    &format!("{field}.model"),
                    &found,
                    "a name that no other entry has",
                );
            }
            models.push(check.model(&field, model, &raw.decode_clusters));
        }
        if !check.0.is_empty() {
            return Err(Mistakes(check.0));
        }
        Ok(Self {
            models,
            decode_clusters: raw.decode_clusters,
            prefill_clusters: raw.prefill_clusters,
            prefill_policy: raw.prefill_policy,
            prefill_prefix_bytes: prefix_bytes as usize,
            prefill_load_factor: load_factor,
            prefill_timeout_ms: raw.prefill_timeout_ms,
            prefill_retry: raw.prefill_retry,
            on_prefill_failure: raw.on_prefill_failure,
            release: raw.release,
            mode: raw.mode,
            protocol: raw.protocol,
            timing: Timing {
                lease_ms: raw.load_lease_ms,
                refresh_ms: raw.load_refresh_ms,
            },
            debug_headers: raw.debug_headers,
        })
    }
}

impl RawModel {
    fn name_is_taken(&self, models: &[Model]) -> bool {
        models.iter().any(|model| model.name == self.model)
    }
}

struct Check(Vec<Mistake>);

impl Check {
    fn mistake(&mut self, field: &str, found: &str, allowed: &str) {
        let (field, found, allowed) = (field.to_owned(), found.to_owned(), allowed.to_owned());
        self.0.push(Mistake {
            field,
            found,
            allowed,
        });
    }

    fn range(&mut self, field: &str, value: u64, low: u64, high: u64) {
        if !(low..=high).contains(&value) {
            self.mistake(field, &value.to_string(), &format!("{low} to {high}"));
        }
    }

    fn clusters(&mut self, field: &str, names: &[String]) {
        if names.is_empty() {
            self.mistake(field, "[]", "at least one Envoy cluster");
        }
        for (index, name) in names.iter().enumerate() {
            // The name travels in a request header to Envoy's route.
            let visible = !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_graphic());
            let first = names.iter().position(|other| other == name) == Some(index);
            if !visible || !first {
                let allowed = "visible ASCII characters, each cluster once";
                self.mistake(&format!("{field}[{index}]"), &format!("{name:?}"), allowed);
            }
        }
    }

    fn model(&mut self, field: &str, raw: RawModel, decode_clusters: &[String]) -> Model {
        if raw.model.is_empty() {
            self.mistake(
                &format!("{field}.model"),
                "\"\"",
                "a model name, or \"*\" for any",
            );
        }
        let blob = raw
            .blob
            .and_then(|blob| self.blob(field, &blob, decode_clusters));
        let mut rule = Rule {
            policy: raw.policy,
            ..Rule::default()
        };
        if let Some((_, map)) = &blob {
            rule.tau = map.tau;
        }
        if let Some(tau) = raw.tau {
            if !(0.0..=2.0).contains(&tau) {
                self.mistake(&format!("{field}.tau"), &tau.to_string(), "0 to 2");
            }
            rule.tau = tau as f32;
        }
        match raw.max_load_factor {
            None => {}
            Some(Value::String(none)) if none == "none" => rule.max_load_factor = None,
            Some(value) => match value
                .as_f64()
                .filter(|factor| (1.0..=100.0).contains(factor))
            {
                Some(factor) => rule.max_load_factor = Some(factor),
                None => {
                    let field = format!("{field}.max_load_factor");
                    self.mistake(
                        &field,
                        &value.to_string(),
                        "a number from 1 to 100, or \"none\"",
                    );
                }
            },
        }
        Model {
            name: raw.model,
            rule,
            tau_is_fixed: raw.tau.is_some(),
            blob,
        }
    }

    fn blob(
        &mut self,
        field: &str,
        raw: &RawBlob,
        decode_clusters: &[String],
    ) -> Option<(Vec<u8>, Map)> {
        let field = format!("{field}.blob.inline");
        let allowed = "base64 of a file that `eldr fit` wrote";
        let text: String = raw.inline.split_ascii_whitespace().collect();
        let bytes = match STANDARD.decode(&text) {
            Ok(bytes) => bytes,
            Err(error) => {
                self.mistake(
                    &field,
                    &format!("{} characters: {error}", text.len()),
                    allowed,
                );
                return None;
            }
        };
        let bound = Blob::from_bytes(&bytes)
            .map_err(|error| error.to_string())
            .and_then(|blob| Map::bind(blob, decode_clusters).map_err(|error| error.to_string()));
        match bound {
            Ok(map) => Some((bytes, map)),
            Err(error) => {
                self.mistake(&field, &error, allowed);
                None
            }
        }
    }
}

#[cfg(test)]
mod tests;
