//! From raw to valid: every value is looked at, and every mistake noted.

use std::collections::BTreeMap;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use eldr_core::blob::Blob;
use eldr_core::decide::{MAX_CANDIDATES, Policy, Rule};
use eldr_core::rollout::Rollout;
use eldr_core::route::Map;
use serde_json::Value;

use super::raw::{RawBlob, RawHttp, RawModel, RawRollout};
use super::{Mistake, Mode, Model, Mooncake, Protocol};
use crate::destination::{self, Destination, Kind};
use crate::poll::Source;
use crate::reports::Reporting;
use crate::worker::DecodeCluster;

/// Collects mistakes while raw values become valid ones.
pub(super) struct Check(pub(super) Vec<Mistake>);

impl Check {
    pub(super) fn mistake(&mut self, field: &str, found: &str, allowed: &str) {
        let (field, found, allowed) = (field.to_owned(), found.to_owned(), allowed.to_owned());
        self.0.push(Mistake {
            field,
            found,
            allowed,
        });
    }

    pub(super) fn range(&mut self, field: &str, value: u64, low: u64, high: u64) {
        if !(low..=high).contains(&value) {
            self.mistake(field, &value.to_string(), &format!("{low} to {high}"));
        }
    }

    pub(super) fn reporting(&mut self, reporting: &Reporting) {
        let Reporting {
            interval_ms,
            path,
            stale_ms,
        } = reporting;
        // The tick comes every 200 ms.
        let in_range = (200..=60_000).contains(interval_ms);
        if *interval_ms != 0 && !in_range {
            let found = interval_ms.to_string();
            self.mistake(
                "load_report_interval_ms",
                &found,
                "0 (off), or 200 to 60000",
            );
        }
        if !path.starts_with('/') || !path.bytes().all(|byte| byte.is_ascii_graphic()) {
            let allowed = "a path that begins with /, of visible ASCII characters";
            self.mistake("load_report_path", &format!("{path:?}"), allowed);
        }
        let least = if in_range { *interval_ms } else { 200 };
        self.range("load_report_stale_ms", *stale_ms, least, 600_000);
    }

    pub(super) fn clusters(&mut self, field: &str, names: &[String]) {
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

    pub(super) fn protocol(
        &mut self,
        mode: Mode,
        protocol: Protocol,
        clusters: &[String],
        engines: &BTreeMap<String, Mooncake>,
    ) {
        if mode == Mode::Relay && protocol == Protocol::SharedStorage {
            let allowed = "a protocol whose legs can be told apart: nixl, mooncake";
            self.mistake(
                "protocol",
                "\"shared_storage\" with \"mode\": \"relay\"",
                allowed,
            );
        }
        // In relay mode the coordinator knows them.
        let needed = mode == Mode::Orchestrate && protocol == Protocol::Mooncake;
        for cluster in clusters
            .iter()
            .filter(|name| needed && !engines.contains_key(*name))
        {
            let allowed = "{\"bootstrap_addr\": \"http://host:8998\", \"engine_id\": \"…\"}";
            self.mistake(&format!("mooncake.{cluster}"), "nothing", allowed);
        }
        for (
            name,
            Mooncake {
                bootstrap_addr,
                engine_id,
            },
        ) in engines
        {
            if !needed || !clusters.contains(name) {
                let allowed =
                    "clusters of `prefill_clusters`, where the filter runs mooncake's prefill leg";
                self.mistake("mooncake", &format!("{name:?}"), allowed);
            }
            if !bootstrap_addr.starts_with("http://") && !bootstrap_addr.starts_with("https://") {
                let allowed = "a URL such as \"http://10.0.0.1:8998\"";
                let field = format!("mooncake.{name}.bootstrap_addr");
                self.mistake(&field, &format!("{bootstrap_addr:?}"), allowed);
            }
            if engine_id.is_empty() {
                let field = format!("mooncake.{name}.engine_id");
                self.mistake(
                    &field,
                    "\"\"",
                    "the `engine_id` of the worker's `--kv-transfer-config`",
                );
            }
        }
    }

    pub(super) fn model(
        &mut self,
        field: &str,
        raw: RawModel,
        decode_clusters: &[String],
    ) -> Model {
        if raw.model.is_empty() {
            self.mistake(
                &format!("{field}.model"),
                "\"\"",
                "a model name, or \"*\" for any",
            );
        }
        let objective = self.objective(field, &raw);
        let (blob, source) = match raw.blob {
            None => (None, None),
            Some(RawBlob {
                inline: None,
                http: None,
            }) => {
                let allowed = "\"inline\", \"http\", or both";
                self.mistake(&format!("{field}.blob"), "{}", allowed);
                (None, None)
            }
            Some(RawBlob { inline, http }) => (
                inline.and_then(|text| self.blob(field, &text, decode_clusters)),
                http.map(|http| self.source(field, http)),
            ),
        };
        let mut rule = Rule {
            policy: raw.policy,
            objective,
            ..Rule::default()
        };
        if let Some(map) = &blob {
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
        if let Some(drawn) = raw.candidates {
            let field = format!("{field}.candidates");
            self.range(&field, drawn, 1, MAX_CANDIDATES.into());
            rule.candidates = drawn.try_into().ok();
        }
        let sample = raw.signature_sample;
        let samples = format!("{field}.signature_sample");
        if !(0.0..=1.0).contains(&sample) {
            self.mistake(&samples, &sample.to_string(), "a number from 0 to 1");
        } else if sample > 0.0 && source.is_none() {
            let allowed = "0, or a blob that comes over \"http\": samples go to its server";
            self.mistake(&samples, &sample.to_string(), allowed);
        }
        Model {
            name: raw.model,
            load_unit: raw.load_unit,
            rule,
            tau_is_fixed: raw.tau.is_some(),
            learns_steps: raw.learn_steps.unwrap_or(true),
            blob,
            source,
            rollout: raw
                .rollout
                .map(|rollout| self.rollout(field, raw.policy, &rollout)),
            signature_sample: sample,
        }
    }

    fn rollout(&mut self, field: &str, policy: Policy, raw: &RawRollout) -> (Rollout, Policy) {
        let field = |name: &str| format!("{field}.rollout.{name}");
        let rollout = self.rollout_kind(&field, raw);
        self.same_batches(&field("control"), policy, rollout.1);
        if rollout.1 == policy {
            let found = format!("{:?}", policy.name());
            let allowed = "another policy than the model's: figures are told apart by policy";
            self.mistake(&field("control"), &found, allowed);
        }
        rollout
    }

    fn rollout_kind(
        &mut self,
        field: &impl Fn(&str) -> String,
        raw: &RawRollout,
    ) -> (Rollout, Policy) {
        match *raw {
            RawRollout::Shadow { control } => (Rollout::Shadow, control),
            RawRollout::Percentage { control, percent } => {
                self.range(&field("percent"), percent, 0, 100);
                let percent = u8::try_from(percent).unwrap_or(u8::MAX);
                (Rollout::Percentage { percent }, control)
            }
            RawRollout::Switchback {
                control,
                slice_ms,
                washout_ms,
            } => {
                self.range(&field("slice_ms"), slice_ms, 100, 86_400_000);
                let most = slice_ms.saturating_sub(1);
                self.range(&field("washout_ms"), washout_ms, 0, most);
                let rollout = Rollout::Switchback {
                    slice_ms,
                    washout_ms,
                };
                (rollout, control)
            }
        }
    }

    pub(super) fn shares(&mut self, list: &str, clusters: &[DecodeCluster]) {
        for (index, DecodeCluster { share, .. }) in clusters.iter().enumerate() {
            if !(0.1..=100.0).contains(&share.weight) {
                let field = format!("{list}[{index}].weight");
                self.mistake(&field, &share.weight.to_string(), "0.1 to 100");
            }
        }
        if !clusters.is_empty() && clusters.iter().all(|cluster| cluster.share.drain) {
            let allowed = "at least one that takes new requests";
            self.mistake(list, "all of them drain", allowed);
        }
    }

    /// Whether decode goes by cluster or by endpoint, with what that needs.
    pub(super) fn destination(
        &mut self,
        kind: Kind,
        clusters: &[String],
        endpoints: &[DecodeCluster],
    ) -> Destination {
        let field = "decode_endpoints";
        if kind == Kind::Cluster {
            if !endpoints.is_empty() {
                let found = format!("{} endpoint(s)", endpoints.len());
                self.mistake(field, &found, "none, or \"destination\": \"endpoint\"");
            }
            return Destination::Cluster;
        }
        let [cluster] = clusters else {
            let found = format!("{} clusters", clusters.len());
            self.mistake(
                "decode_clusters",
                &found,
                "one, with \"destination\": \"endpoint\"",
            );
            return Destination::Cluster;
        };
        if endpoints.is_empty() {
            self.mistake(
                field,
                "[]",
                "at least one address and port of the decode cluster",
            );
        }
        for (index, DecodeCluster { name, .. }) in endpoints.iter().enumerate() {
            let is_plain = destination::endpoint(name).as_ref() == Some(name);
            let first = endpoints.iter().position(|other| other.name == *name) == Some(index);
            if !is_plain || !first {
                let allowed = "address and port such as \"10.0.0.5:8000\" or \"[2001:db8::1]:8000\", each once";
                self.mistake(&format!("{field}[{index}]"), &format!("{name:?}"), allowed);
            }
        }
        self.shares(field, endpoints);
        Destination::Endpoint(cluster.clone())
    }

    fn source(&mut self, field: &str, raw: RawHttp) -> Source {
        let field = format!("{field}.blob.http");
        let visible = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_graphic());
        let authority = raw.authority.unwrap_or_else(|| raw.cluster.clone());
        for (name, text) in [("cluster", &raw.cluster), ("authority", &authority)] {
            if !visible(text) {
                let allowed = "visible ASCII characters";
                self.mistake(&format!("{field}.{name}"), &format!("{text:?}"), allowed);
            }
        }
        if !visible(&raw.path) || !raw.path.starts_with('/') {
            let allowed = "an absolute path such as \"/v1/blob\"";
            self.mistake(
                &format!("{field}.path"),
                &format!("{:?}", raw.path),
                allowed,
            );
        }
        let interval = format!("{field}.interval_ms");
        self.range(&interval, raw.interval_ms, 200, 3_600_000);
        Source {
            cluster: raw.cluster,
            path: raw.path,
            authority,
            interval_ms: raw.interval_ms,
        }
    }

    fn blob(&mut self, field: &str, inline: &str, decode_clusters: &[String]) -> Option<Map> {
        let field = format!("{field}.blob.inline");
        let allowed = "base64 of a file that `eldr fit` wrote";
        let text: String = inline.split_ascii_whitespace().collect();
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
            Ok(map) => Some(map),
            Err(error) => {
                self.mistake(&field, &error, allowed);
                None
            }
        }
    }
}
