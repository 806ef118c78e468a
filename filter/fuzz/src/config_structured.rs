//! Configurations of the right shape with any values: accepted exactly when each value is allowed, and every field that
//! is not is named.

mod model;
mod values;
mod workers;

use std::collections::BTreeMap;

use arbitrary::Arbitrary;
use eldr_filter::config::{Config, Mode, Protocol};
use eldr_filter::destination::Destination;
use serde_json::{Value, json};

use model::Model;
use values::{Name, Number, Small, Word, visible};
use workers::{Endpoint, Worker};

const MODES: [&str; 2] = ["orchestrate", "relay"];
const PROTOCOLS: [&str; 3] = ["nixl", "mooncake", "shared_storage"];
const DESTINATIONS: [&str; 2] = ["cluster", "endpoint"];

/// What the bytes stand for.
#[derive(Arbitrary, Debug)]
pub struct Input {
    models: Vec<Model>,
    decode: Vec<Worker<Name>>,
    destination: Option<Word>,
    endpoints: Option<Vec<Worker<Endpoint>>>,
    prefill: Vec<Name>,
    mode: Option<Word>,
    relay_ttl: Option<Number>,
    relay_body_signature: Option<bool>,
    protocol: Option<Word>,
    engines: Vec<(Name, Engine)>,
    report_cached_tokens: Option<bool>,
    prefix_bytes: Option<Number>,
    load_factor: Option<Small>,
    timeout: Option<Number>,
    lease: Option<Number>,
    refresh: Option<Number>,
    report_interval: Option<Option<Number>>,
    report_path: Option<(bool, String)>,
    report_stale: Option<Number>,
    kv_usage_limit: Option<Small>,
    eject: Option<Number>,
    eject_max: Option<Number>,
    sampled: Option<Number>,
    unknown: Option<String>,
}

/// Behind a prefill cluster, with mooncake.
#[derive(Arbitrary, Debug)]
struct Engine {
    scheme: Option<bool>,
    has_id: bool,
}

impl Engine {
    fn address(&self) -> &'static str {
        match self.scheme {
            Some(true) => "http://10.0.0.1:8998",
            Some(false) => "https://10.0.0.1:8998",
            None => "10.0.0.1:8998",
        }
    }
}

/// A field with a number, its default, the least and the most.
struct Field(&'static str, Option<u64>, u64, u64, u64);

impl Field {
    fn is_allowed(&self) -> bool {
        let &Self(_, value, default, least, most) = self;
        let value = value.unwrap_or(default);
        value >= least && value <= most
    }
}

impl Input {
    fn numbers(&self) -> [Field; 9] {
        let field = |name, value: Option<Number>, default, least, most| {
            let value = value.map(|value| value.of(least, most));
            Field(name, value, default, least, most)
        };
        let eject = field("eject_ms", self.eject, 1_000, 0, 600_000);
        let most_often = self.report_interval();
        let most_often = if (200..=60_000).contains(&most_often) {
            most_often
        } else {
            200
        };
        let first_ms = eject.1.unwrap_or(1_000);
        [
            field("prefill_prefix_bytes", self.prefix_bytes, 1_024, 1, 1 << 20),
            field("prefill_timeout_ms", self.timeout, 30_000, 1, 3_600_000),
            field("load_lease_ms", self.lease, 2_000, 500, 60_000),
            field("load_refresh_ms", self.refresh, 1, 0, 1_000),
            field("relay_ttl_ms", self.relay_ttl, 60_000, 1_000, 3_600_000),
            field(
                "load_report_stale_ms",
                self.report_stale,
                5_000,
                most_often,
                600_000,
            ),
            eject,
            field("eject_max_ms", self.eject_max, 30_000, first_ms, 3_600_000),
            field("log_decisions_per_mille", self.sampled, 0, 0, 1_000),
        ]
    }

    fn report_interval(&self) -> u64 {
        let interval = self.report_interval.flatten();
        interval.map_or(0, |interval| interval.of(200, 60_000))
    }

    fn report_path(&self) -> String {
        let said = self.report_path.as_ref();
        said.map_or("/metrics".into(), |(absolute, path)| {
            let slash = if *absolute { "/" } else { "" };
            format!("{slash}{path}")
        })
    }

    fn word(word: Option<Word>, words: &[&'static str]) -> &'static str {
        word.map_or(words[0], |word| word.of(words))
    }

    fn is_relay(&self) -> bool {
        Self::word(self.mode, &MODES) == "relay"
    }

    fn is_by_endpoint(&self) -> bool {
        Self::word(self.destination, &DESTINATIONS) == "endpoint"
    }

    fn endpoints(&self) -> &[Worker<Endpoint>] {
        self.endpoints.as_deref().unwrap_or_default()
    }

    fn engines(&self) -> BTreeMap<String, &Engine> {
        let engines = self.engines.iter();
        engines.map(|(name, it)| (name.get(), it)).collect()
    }

    /// Whether the parser refuses it, which hides the other mistakes.
    fn is_unreadable(&self) -> bool {
        let words = [self.destination, self.mode, self.protocol];
        self.unknown.is_some()
            || words.into_iter().flatten().any(Word::is_wrong)
            || self.models.iter().any(Model::is_unreadable)
    }

    fn json(&self) -> Value {
        let models: Vec<Value> = self.models.iter().map(Model::json).collect();
        let mut config = json!({
            "models": models,
            "decode_clusters": workers::json(&self.decode),
            "prefill_clusters": names(&self.prefill),
        });
        for Field(field, value, ..) in self.numbers() {
            if let Some(value) = value {
                config[field] = value.into();
            }
        }
        let engines = self.engines();
        let engine = |engine: &Engine| {
            let id = if engine.has_id { "e" } else { "" };
            json!({ "bootstrap_addr": engine.address(), "engine_id": id })
        };
        let engines = (!engines.is_empty()).then(|| {
            let entries = engines.iter().map(|(name, it)| (name.clone(), engine(it)));
            entries.collect::<Value>()
        });
        let word = |word: Option<Word>, words| word.map(|word| json!(word.of(words)));
        let endpoints = self.endpoints.as_ref();
        let unknown = self.unknown.as_ref().map(|name| format!("x{name}"));
        for (field, value) in [
            ("destination", word(self.destination, &DESTINATIONS)),
            ("decode_endpoints", endpoints.map(|all| workers::json(all))),
            ("mode", word(self.mode, &MODES)),
            ("protocol", word(self.protocol, &PROTOCOLS)),
            ("mooncake", engines),
            (
                "relay_body_signature",
                self.relay_body_signature.map(Value::from),
            ),
            (
                "report_cached_tokens",
                self.report_cached_tokens.map(Value::from),
            ),
            (
                "prefill_load_factor",
                self.load_factor.map(|factor| json!(factor.get())),
            ),
            (
                "load_report_interval_ms",
                self.report_interval.map(|_| json!(self.report_interval())),
            ),
            (
                "load_report_path",
                self.report_path.as_ref().map(|_| json!(self.report_path())),
            ),
            (
                "kv_usage_limit",
                self.kv_usage_limit.map(|limit| json!(limit.get())),
            ),
            (
                unknown.as_deref().unwrap_or("x"),
                unknown.as_ref().map(|_| json!(null)),
            ),
        ] {
            if let Some(value) = value {
                config[field] = value;
            }
        }
        config
    }

    /// Fields with a value that is not allowed.
    fn mistakes(&self) -> Vec<String> {
        let mut wrong = workers::mistakes("decode_clusters", &self.decode);
        match (self.is_by_endpoint(), self.endpoints()) {
            (false, []) => {}
            (false, _) => wrong.push("decode_endpoints".into()),
            (true, _) if self.decode.len() != 1 => wrong.push("decode_clusters".into()),
            (true, endpoints) => wrong.extend(workers::mistakes("decode_endpoints", endpoints)),
        }
        let prefill = names(&self.prefill);
        if prefill.is_empty() {
            wrong.push("prefill_clusters".into());
        }
        for (index, name) in prefill.iter().enumerate() {
            if !visible(name) || prefill[..index].contains(name) {
                wrong.push(format!("prefill_clusters[{index}]"));
            }
        }
        self.hand_over_mistakes(&prefill, &mut wrong);
        let numbers = self.numbers();
        let beyond = numbers.iter().filter(|field| !field.is_allowed());
        wrong.extend(beyond.map(|Field(name, ..)| (*name).to_owned()));
        let interval = self.report_interval();
        let path = self.report_path();
        let factor = self.load_factor.map_or(1.25, Small::get);
        let limit = self.kv_usage_limit.map_or(0.95, Small::get);
        for (field, is_allowed) in [
            (
                "load_report_interval_ms",
                interval == 0 || (200..=60_000).contains(&interval),
            ),
            ("load_report_path", path.starts_with('/') && visible(&path)),
            ("kv_usage_limit", (0.0..=1.0).contains(&limit)),
            ("prefill_load_factor", (1.0..=100.0).contains(&factor)),
            ("models", !self.models.is_empty()),
        ] {
            if !is_allowed {
                wrong.push(field.into());
            }
        }
        for (index, model) in self.models.iter().enumerate() {
            let name = model.name();
            let mut before = self.models[..index].iter();
            if name.is_empty() || before.any(|other| other.name() == name) {
                wrong.push(format!("models[{index}].model"));
            }
            model.mistakes(|field| wrong.push(format!("models[{index}].{field}")));
        }
        wrong.sort();
        wrong.dedup();
        wrong
    }

    /// What mode and protocol do not go together with.
    fn hand_over_mistakes(&self, prefill: &[String], wrong: &mut Vec<String>) {
        let (relay, protocol) = (self.is_relay(), Self::word(self.protocol, &PROTOCOLS));
        for (field, is_wrong) in [
            ("protocol", relay && protocol == "shared_storage"),
            (
                "report_cached_tokens",
                relay && self.report_cached_tokens == Some(true),
            ),
            (
                "relay_body_signature",
                !relay && self.relay_body_signature == Some(true),
            ),
        ] {
            if is_wrong {
                wrong.push(field.into());
            }
        }
        let (wanted, engines) = (!relay && protocol == "mooncake", self.engines());
        let missing = prefill.iter().filter(|name| !engines.contains_key(*name));
        let missing = missing.map(|name| format!("mooncake.{name}"));
        wrong.extend(missing.filter(|_| wanted));
        for (name, engine) in engines {
            if !wanted || !prefill.contains(&name) {
                wrong.push("mooncake".into());
            }
            if engine.scheme.is_none() {
                wrong.push(format!("mooncake.{name}.bootstrap_addr"));
            }
            if !engine.has_id {
                wrong.push(format!("mooncake.{name}.engine_id"));
            }
        }
    }

    /// What was accepted is what was said.
    fn became(&self, config: &Config) {
        assert_eq!(config.prefill_clusters, names(&self.prefill));
        let (workers, destination) = match &self.decode[..] {
            [pool] if self.is_by_endpoint() => {
                let pool = workers::names(std::slice::from_ref(pool)).remove(0);
                (
                    workers::names(self.endpoints()),
                    Destination::Endpoint(pool),
                )
            }
            _ => (workers::names(&self.decode), Destination::Cluster),
        };
        assert_eq!(config.decode_clusters, workers);
        assert_eq!(config.destination, destination);
        assert_eq!(config.shares.len(), workers.len());
        assert_eq!(config.mode == Mode::Relay, self.is_relay());
        let protocol = Self::word(self.protocol, &PROTOCOLS);
        assert_eq!(
            config.protocol == Protocol::Mooncake,
            protocol == "mooncake"
        );
        assert_eq!(config.reporting.interval_ms, self.report_interval());
        assert_eq!(config.reporting.path, self.report_path());
        for Field(field, value, default, ..) in self.numbers() {
            let found = match field {
                "prefill_prefix_bytes" => config.prefill_prefix_bytes as u64,
                "prefill_timeout_ms" => config.prefill_timeout_ms,
                "load_lease_ms" => config.timing.lease_ms,
                "load_refresh_ms" => config.timing.refresh_ms,
                "relay_ttl_ms" => config.relay_ttl_ms,
                "load_report_stale_ms" => config.reporting.stale_ms,
                "eject_ms" => config.cool_down.first_ms,
                "eject_max_ms" => config.cool_down.max_ms,
                _ => config.log_decisions_per_mille,
            };
            assert_eq!(found, value.unwrap_or(default), "{field}");
        }
        assert_eq!(config.models.len(), self.models.len());
        for (model, said) in config.models.iter().zip(&self.models) {
            said.became(model);
        }
    }
}

fn names(names: &[Name]) -> Vec<String> {
    names.iter().map(Name::get).collect()
}

/// The configuration, if it is accepted.
pub fn accepted(input: Input) -> Option<String> {
    let json = input.json().to_string();
    Config::parse(json.as_bytes()).is_ok().then_some(json)
}

/// Panics where a promise is broken.
pub fn check(input: Input) {
    let (json, wrong) = (input.json().to_string(), input.mistakes());
    match Config::parse(json.as_bytes()) {
        Ok(config) => {
            assert!(wrong.is_empty() && !input.is_unreadable(), "{wrong:?}");
            input.became(&config);
        }
        Err(_) if input.is_unreadable() => {}
        Err(found) => {
            let mut found: Vec<String> = found.0.into_iter().map(|mistake| mistake.field).collect();
            found.sort();
            found.dedup();
            assert_eq!(found, wrong);
        }
    }
}
