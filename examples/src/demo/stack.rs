//! Mock engine and Envoy, wired together for one policy.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;

use eldr_core::Policy;
use serde_json::json;

use super::{Settings, Workload};
use crate::envoy::Envoy;
use crate::gateway::{Gateway, LISTENER, decode_cluster};
use crate::mock::{MockConfig, MockEngine};
use crate::setup::{self, SetupError};

/// Name of the served model.
pub const MODEL: &str = "small-moe";

/// Worker threads of Envoy: as many as a small machine has cores.
const ENVOY_THREADS: usize = 2;

/// What has to be there before anything can run.
#[derive(Clone, Debug)]
pub struct Tools {
    /// The Envoy binary.
    pub envoy: PathBuf,
    /// The compiled filter.
    pub module: PathBuf,
}

impl Tools {
    /// Finds or makes them; the first time this takes minutes and says what it does.
    pub fn set_up() -> Result<Self, SetupError> {
        Ok(Tools {
            envoy: setup::envoy_binary()?,
            module: setup::wasm_module()?,
        })
    }
}

/// A running gateway with the workers behind it.
#[derive(Debug)]
pub struct Stack {
    policy: Policy,
    engine: MockEngine,
    envoy: Envoy,
    url: String,
}

impl Stack {
    /// Starts workers and gateway; once this returns, requests are served.
    ///
    /// `debug_headers` lets clients see each decision in `x-eldr-decision`.
    pub async fn start(
        tools: &Tools,
        settings: &Settings,
        workload: &Workload,
        policy: Policy,
        debug_headers: bool,
    ) -> anyhow::Result<Self> {
        let config = MockConfig {
            model: MODEL.into(),
            prefill_workers: settings.prefill_workers,
            decode_workers: settings.workers,
            ..MockConfig::default()
        };
        let step = config.step;
        let engine = MockEngine::start(config, Arc::clone(&workload.catalog)).await?;
        let decode = engine.decode();
        let clusters: Vec<String> = (0..decode.len()).map(decode_cluster).collect();
        let gateway = Gateway {
            listen: SocketAddr::from(([127, 0, 0, 1], 0)),
            module: tools.module.clone(),
            vm_id: "eldr-demo".into(),
            filter: json!({
                "models": [{
                    "model": "*",
                    "blob": {"inline": workload.blob},
                    "policy": policy,
                    "step_t0_ms": step.t0_ms,
                    "step_b_ms": step.b_ms,
                    "step_c_ms": step.c_ms,
                    "step_kv_ms_per_1k": step.kv_ms_per_1k,
                }],
                "decode_clusters": clusters,
                "prefill_clusters": ["prefill"],
                "debug_headers": debug_headers,
            }),
            prefill: engine.prefill(),
            decode,
            access_log: None,
        };
        let envoy = Envoy::start(&tools.envoy, &gateway.bootstrap(), ENVOY_THREADS).await?;
        let url = format!("http://{}", envoy.listener(LISTENER).await?);
        Ok(Stack {
            policy,
            engine,
            envoy,
            url,
        })
    }

    /// The policy that decides.
    pub fn policy(&self) -> Policy {
        self.policy
    }

    /// Where the gateway listens, as scheme and authority.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// Where Envoy's admin interface listens, likewise.
    pub fn admin_url(&self) -> String {
        format!("http://{}", self.envoy.admin())
    }

    /// The workers.
    pub fn engine(&self) -> &MockEngine {
        &self.engine
    }

    /// How many decisions rested on which reason, by Envoy's counters.
    pub async fn reasons(&self) -> anyhow::Result<BTreeMap<String, u64>> {
        const PREFIX: &str = "wasmcustom.eldr.reason.";
        let stats = self.envoy.stats(r"^wasmcustom\.eldr\.reason\.").await?;
        let named = stats.values.into_iter().filter_map(|(name, count)| {
            Some((name.strip_prefix(PREFIX)?.to_owned(), count)).filter(|&(_, count)| count > 0)
        });
        Ok(named.collect())
    }
}
