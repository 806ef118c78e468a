//! Plugin configuration: JSON, parsed into a raw type and then into a valid one.
//!
//! Every mistake is reported in one go, each with its field, the value found and what is allowed.

mod check;
mod objective;
mod raw;

use std::fmt;

use check::Check;
use eldr_core::batch::Measure;
use eldr_core::decide::{Policy, Rule};
use eldr_core::rollout::Rollout;
use eldr_core::route::Map;
use raw::{Raw, RawModel};
use serde::Deserialize;

use crate::destination::Destination;
use crate::health::CoolDown;
use crate::load::{LoadUnit, Timing};
use crate::poll::Source;
use crate::release::Form;
use crate::reports::Reporting;
use crate::worker::{DecodeCluster, Share};

/// A model name that matches any.
pub const ANY_MODEL: &str = "*";

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
    /// A coordinator, whose two requests both pass here. Nobody else may reach the listener: he is trusted.
    Relay,
}

/// How prefill hands over to decode.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Protocol {
    /// vLLM NixlConnector.
    #[default]
    Nixl,
    /// vLLM MooncakeConnector.
    Mooncake,
    /// Engines that find KV blocks in a storage of theirs, such as vLLM's SharedStorageConnector or LMCache.
    SharedStorage,
}

/// A prefill worker as MooncakeConnector's decode side finds it.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Mooncake {
    /// URL of its bootstrap server, `http://host:port`.
    pub bootstrap_addr: String,
    /// Its `engine_id`.
    pub engine_id: String,
}

/// A valid configuration.
#[derive(Debug)]
pub struct Config {
    /// Models, in the order of the configuration.
    pub models: Vec<Model>,
    /// Decode workers that may be used, by cluster or by endpoint; worker indices point here.
    pub decode_clusters: Vec<String>,
    /// Which of the two they are.
    pub destination: Destination,
    /// What each of them may take, in the same order.
    pub shares: Vec<Share>,
    /// How long a decode cluster that does not answer is left out.
    pub cool_down: CoolDown,
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
    /// Relay mode: what a prefill answer said is forgotten after this long, milliseconds.
    pub relay_ttl_ms: u64,
    /// Relay mode: whether prefill answers without a signature header are held until their body is read.
    pub relay_body_signature: bool,
    /// How it hands over.
    pub protocol: Protocol,
    /// Mooncake: the engine behind each prefill cluster, in the same order.
    pub engines: Vec<Option<Mooncake>>,
    /// Whether a whole JSON answer is held to say how many prompt tokens prefill had cached.
    pub report_cached_tokens: bool,
    /// Load sharing between threads.
    pub timing: Timing,
    /// Load that decode workers report.
    pub reporting: Reporting,
    /// A worker that reports more of its KV cache in use is no candidate while another has room; 0 to 1.
    pub kv_usage_limit: f64,
    /// Whether clients get `x-eldr-decision`.
    pub debug_headers: bool,
    /// Whether TTFT and TPOT are taken of all models' streams, not only under a rollout.
    pub measure_streams: bool,
    /// Whether the access log may have signatures, which describe prompts.
    pub log_signatures: bool,
    /// So many of a thousand decisions are logged.
    pub log_decisions_per_mille: u64,
}

/// Routing of one model.
#[derive(Debug)]
pub struct Model {
    /// Value of the body's `model`, or [`ANY_MODEL`].
    pub name: String,
    /// What the loads of workers are compared in.
    pub load_unit: LoadUnit,
    /// Policy and parameters; `tau` is the blob's where the configuration has none. `hybrid` has a tau of its own
    /// unless it is set.
    pub rule: Rule,
    /// Whether the step times of the rule are where learning begins, or how it is.
    pub learns_steps: bool,
    /// Whether the configuration sets tau, which then outlives new blobs.
    pub tau_is_fixed: bool,
    /// The inline blob, bound to the decode clusters.
    pub blob: Option<Map>,
    /// Where newer blobs come from.
    pub source: Option<Source>,
    /// How the policy is being introduced, and the one that was there before.
    pub rollout: Option<(Rollout, Policy)>,
    /// Share of the requests whose signature goes to where newer blobs come from, 0 to 1; above 0 only with a source.
    pub signature_sample: f64,
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

impl Model {
    /// What is kept of the requests that run: what its policy looks at, or the one that it is compared with.
    pub fn measure(&self) -> Option<Measure> {
        let control = self.rollout.and_then(|(_, control)| control.measure());
        self.rule.policy.measure().or(control)
    }

    /// Band width for this policy: as configured, else the blob's, but `hybrid`, which chooses by batches within a band, wants its own.
    pub fn tau(&self, policy: Policy) -> f32 {
        match policy {
            Policy::Hybrid if !self.tau_is_fixed => Rule::of(policy).tau,
            _ => self.rule.tau,
        }
    }

    /// Whether its loads or its step times are made of tokens.
    fn counts_tokens(&self) -> bool {
        let has_kv = self.rule.objective.step.kv_ms_per_1k > 0.0;
        self.load_unit == LoadUnit::KvTokens || has_kv && self.measure() == Some(Measure::Usage)
    }
}

impl Config {
    /// Whether tokens are counted: of all requests, since models share workers.
    pub fn counts_tokens(&self) -> bool {
        self.models.iter().any(Model::counts_tokens)
    }

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
        let names = |all: &[DecodeCluster]| all.iter().map(|c| c.name.clone()).collect();
        let clusters: Vec<String> = names(&raw.decode_clusters);
        check.clusters("decode_clusters", &clusters);
        check.shares("decode_clusters", &raw.decode_clusters);
        let destination = check.destination(raw.destination, &clusters, &raw.decode_endpoints);
        let workers = match destination {
            Destination::Cluster => raw.decode_clusters,
            Destination::Endpoint(_) => raw.decode_endpoints,
        };
        let decode_clusters: Vec<String> = names(&workers);
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
        let reporting = Reporting {
            interval_ms: raw.load_report_interval_ms,
            path: raw.load_report_path,
            stale_ms: raw.load_report_stale_ms,
        };
        check.reporting(&reporting);
        if !(0.0..=1.0).contains(&raw.kv_usage_limit) {
            let found = raw.kv_usage_limit.to_string();
            check.mistake("kv_usage_limit", &found, "a number from 0 to 1");
        }
        check.range("eject_ms", raw.eject_ms, 0, 600_000);
        check.range("eject_max_ms", raw.eject_max_ms, raw.eject_ms, 3_600_000);
        check.range("relay_ttl_ms", raw.relay_ttl_ms, 1_000, 3_600_000);
        check.protocol(raw.mode, raw.protocol, &raw.prefill_clusters, &raw.mooncake);
        if raw.report_cached_tokens && raw.mode == Mode::Relay {
            let allowed = "false: in relay mode nobody here sees both answers of a request";
            check.mistake("report_cached_tokens", "true", allowed);
        }
        if raw.relay_body_signature && raw.mode != Mode::Relay {
            let allowed = "false, or \"mode\": \"relay\"";
            check.mistake("relay_body_signature", "true", allowed);
        }
        let sampled = raw.log_decisions_per_mille;
        check.range("log_decisions_per_mille", sampled, 0, 1_000);
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
            models.push(check.model(&field, model, &decode_clusters));
        }
        if !check.0.is_empty() {
            return Err(Mistakes(check.0));
        }
        let engine = |name| raw.mooncake.get(name).cloned();
        let engines = raw.prefill_clusters.iter().map(engine).collect();
        Ok(Self {
            models,
            decode_clusters,
            destination,
            shares: workers.iter().map(|c| c.share).collect(),
            cool_down: CoolDown {
                first_ms: raw.eject_ms,
                max_ms: raw.eject_max_ms,
            },
            prefill_clusters: raw.prefill_clusters,
            prefill_policy: raw.prefill_policy,
            prefill_prefix_bytes: prefix_bytes as usize,
            prefill_load_factor: load_factor,
            prefill_timeout_ms: raw.prefill_timeout_ms,
            prefill_retry: raw.prefill_retry,
            on_prefill_failure: raw.on_prefill_failure,
            release: raw.release,
            mode: raw.mode,
            relay_ttl_ms: raw.relay_ttl_ms,
            relay_body_signature: raw.relay_body_signature,
            protocol: raw.protocol,
            engines,
            report_cached_tokens: raw.report_cached_tokens,
            timing: Timing {
                lease_ms: raw.load_lease_ms,
                refresh_ms: raw.load_refresh_ms,
            },
            reporting,
            kv_usage_limit: raw.kv_usage_limit,
            debug_headers: raw.debug_headers,
            measure_streams: raw.measure_streams,
            log_signatures: raw.log_signatures,
            log_decisions_per_mille: raw.log_decisions_per_mille,
        })
    }
}

impl RawModel {
    fn name_is_taken(&self, models: &[Model]) -> bool {
        models.iter().any(|model| model.name == self.model)
    }
}

#[cfg(test)]
mod tests;
