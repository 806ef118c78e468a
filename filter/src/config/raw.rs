//! The configuration as it is written: names, types and defaults of the fields, before anything is checked.

use std::collections::BTreeMap;

use eldr_core::decide::Policy;
use eldr_core::prefix_hash::{LOAD_FACTOR, PREFIX_BYTES};
use serde::Deserialize;
use serde_json::Value;

use super::{Mode, Mooncake, OnPrefillFailure, PrefillPolicy, Protocol};
use crate::destination;
use crate::load::LoadUnit;
use crate::release::Form;
use crate::worker::DecodeCluster;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Raw {
    pub(super) models: Vec<RawModel>,
    pub(super) decode_clusters: Vec<DecodeCluster>,
    #[serde(default)]
    pub(super) decode_endpoints: Vec<DecodeCluster>,
    #[serde(default)]
    pub(super) destination: destination::Kind,
    pub(super) prefill_clusters: Vec<String>,
    #[serde(default)]
    pub(super) prefill_policy: PrefillPolicy,
    #[serde(default = "default_prefill_prefix_bytes")]
    pub(super) prefill_prefix_bytes: u64,
    #[serde(default = "default_prefill_load_factor")]
    pub(super) prefill_load_factor: f64,
    #[serde(default = "default_prefill_timeout_ms")]
    pub(super) prefill_timeout_ms: u64,
    #[serde(default = "default_prefill_retry")]
    pub(super) prefill_retry: bool,
    #[serde(default)]
    pub(super) on_prefill_failure: OnPrefillFailure,
    #[serde(default)]
    pub(super) release: Form,
    #[serde(default)]
    pub(super) mode: Mode,
    #[serde(default = "default_relay_ttl_ms")]
    pub(super) relay_ttl_ms: u64,
    #[serde(default)]
    pub(super) relay_body_signature: bool,
    #[serde(default)]
    pub(super) protocol: Protocol,
    #[serde(default)]
    pub(super) mooncake: BTreeMap<String, Mooncake>,
    #[serde(default)]
    pub(super) report_cached_tokens: bool,
    #[serde(default = "default_load_lease_ms")]
    pub(super) load_lease_ms: u64,
    #[serde(default = "default_load_refresh_ms")]
    pub(super) load_refresh_ms: u64,
    #[serde(default)]
    pub(super) load_report_interval_ms: u64,
    #[serde(default = "default_load_report_path")]
    pub(super) load_report_path: String,
    #[serde(default = "default_load_report_stale_ms")]
    pub(super) load_report_stale_ms: u64,
    #[serde(default = "default_kv_usage_limit")]
    pub(super) kv_usage_limit: f64,
    #[serde(default = "default_eject_ms")]
    pub(super) eject_ms: u64,
    #[serde(default = "default_eject_max_ms")]
    pub(super) eject_max_ms: u64,
    #[serde(default)]
    pub(super) debug_headers: bool,
    #[serde(default)]
    pub(super) measure_streams: bool,
    #[serde(default)]
    pub(super) log_signatures: bool,
    #[serde(default)]
    pub(super) log_decisions_per_mille: u64,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RawModel {
    pub(super) model: String,
    pub(super) blob: Option<RawBlob>,
    #[serde(default)]
    pub(super) policy: Policy,
    pub(super) tau: Option<f64>,
    #[serde(default)]
    pub(super) max_load_factor: Option<Value>,
    pub(super) candidates: Option<u64>,
    #[serde(default)]
    pub(super) load_unit: LoadUnit,
    pub(super) step_t0_ms: Option<f64>,
    pub(super) step_b_ms: Option<f64>,
    pub(super) step_c_ms: Option<f64>,
    pub(super) step_kv_ms_per_1k: Option<f64>,
    pub(super) step_exponent: Option<u64>,
    pub(super) learn_steps: Option<bool>,
    pub(super) rollout: Option<RawRollout>,
    #[serde(default)]
    pub(super) signature_sample: f64,
}

#[derive(Debug, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub(super) enum RawRollout {
    Shadow {
        #[serde(default = "default_control")]
        control: Policy,
    },
    Percentage {
        #[serde(default = "default_control")]
        control: Policy,
        percent: u64,
    },
    Switchback {
        #[serde(default = "default_control")]
        control: Policy,
        #[serde(default = "default_slice_ms")]
        slice_ms: u64,
        #[serde(default = "default_washout_ms")]
        washout_ms: u64,
    },
}

fn default_control() -> Policy {
    Policy::LeastLoaded
}

fn default_slice_ms() -> u64 {
    600_000
}

fn default_washout_ms() -> u64 {
    60_000
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RawBlob {
    pub(super) inline: Option<String>,
    pub(super) http: Option<RawHttp>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RawHttp {
    pub(super) cluster: String,
    pub(super) path: String,
    #[serde(default = "default_interval_ms")]
    pub(super) interval_ms: u64,
    pub(super) authority: Option<String>,
}

fn default_interval_ms() -> u64 {
    5_000
}

fn default_eject_ms() -> u64 {
    1_000
}

fn default_eject_max_ms() -> u64 {
    30_000
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

fn default_relay_ttl_ms() -> u64 {
    60_000
}

fn default_load_lease_ms() -> u64 {
    2_000
}

fn default_load_refresh_ms() -> u64 {
    1
}

fn default_load_report_path() -> String {
    "/metrics".into()
}

fn default_load_report_stale_ms() -> u64 {
    5_000
}

fn default_kv_usage_limit() -> f64 {
    0.95
}
