//! Mock engine: prefill and decode workers that speak vLLM's protocol and keep a real model's time.
//!
//! Every worker listens on a loopback port of its own and serves `/v1/completions`,
//! `/v1/chat/completions`, `/v1/responses`, `/inference/v1/generate`, `/v1/models`, `/health` and `/metrics`. What a request does is replayed
//! from a trace ([`Catalog`]): its prefill answers with the recorded expert signature, and each of
//! its decode steps activates the recorded experts. Decode workers batch continuously, and a step
//! takes as long as a [`StepModel`] says for the distinct experts that its tokens activate.
//!
//! The KV hand-over is that of vLLM's NixlConnector, or another's ([`KvProtocol`]). A real engine believes what it is told; the
//! mock checks that the `kv_transfer_params` of a decode request are those which prefill handed out
//! for this prompt and request id, once, and answers 500 and counts if not. Prefill holds the blocks for
//! a lease; they are freed when decode fetches them, by `POST /v1/kv_transfer/release` (official ELDR fork), or
//! when the lease runs out, which strands them.
//!
//! Every worker has a prefix cache with signature blocks beside the KV blocks; records with a common `prefix`
//! share its blocks, prefill takes time for the others only, and signs the sum of all.
//!
//! What it leaves out: a prefill on a decode worker does not slow the steps beside it, and KV
//! memory is counted but never runs out. Every answer whose prompt was prefilled here carries the
//! signature header, as an engine with the signature adapter would answer; or its hand-over carries `eldr_sig`, as
//! the official fork's does ([`SignatureCarriage`]).

mod answer;
mod carriage;
mod catalog;
mod metrics;
mod prefixes;
mod prompt;
mod registry;
mod request;
mod server;
mod spread;
mod stats;
mod steps;
mod worker;

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, ensure};
use eldr_core::engine::StepModel;
use tokio::net::TcpListener;
use tokio::task::JoinSet;

pub use carriage::SignatureCarriage;
pub use catalog::{Catalog, Entry};
pub use prompt::{PROMPT_WORDS_MAX, prompt_for, tokens_of, trace_id_of};
pub use stats::{KvReport, WorkerReport};

use registry::Registry;
use request::Limits;
use worker::{Shared, Worker};

/// How many workers, and how fast.
#[derive(Clone, Debug)]
pub struct MockConfig {
    /// Name of the served model; a request that names another gets 404.
    pub model: String,
    /// Prefill workers, at least 0.
    pub prefill_workers: usize,
    /// Decode workers, at least 0.
    pub decode_workers: usize,
    /// Port of the first worker, the others follow it, prefill first; 0 takes free ones.
    pub base_port: u16,
    /// Time of a decode step.
    pub step: StepModel,
    /// Most requests that a worker decodes at a time.
    pub batch_max: usize,
    /// Time of a prefill whatever its length, milliseconds.
    pub prefill_base_ms: f64,
    /// Time per prompt token, milliseconds.
    pub prefill_ms_per_token: f64,
    /// All times are multiplied by this; 0 answers as fast as the machine can.
    pub time_scale: f64,
    /// How long prefill holds KV blocks that nobody fetches; not multiplied by `time_scale`.
    pub kv_lease: Duration,
    /// What becomes of a decode request that comes after that.
    pub kv_load_failure_policy: KvLoadFailurePolicy,
    /// How prefill hands KV blocks over.
    pub protocol: KvProtocol,
    /// How prefill tells the signature.
    pub signature_carriage: SignatureCarriage,
    /// KV cache of a worker in tokens: what its prefix cache has room for and `vllm:kv_cache_usage_perc` is relative to.
    pub kv_cache_tokens: u64,
    /// Longest prompt and answer together, tokens.
    pub context_tokens: u64,
}

/// vLLM's `kv_load_failure_policy`: what a decode worker does when the KV blocks are no more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum KvLoadFailurePolicy {
    /// Answer 500.
    Fail,
    /// Prefill the prompt itself.
    Recompute,
}

/// vLLM's connectors, as far as a gateway sees them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum KvProtocol {
    /// NixlConnector: prefill says where the blocks are.
    Nixl,
    /// MooncakeConnector: the gateway names the transfer and knows the prefill worker: its bootstrap server is at the
    /// worker's own address, its `engine_id` is `mock-prefill-0` and so on.
    Mooncake,
    /// SharedStorageConnector: nothing on the wire.
    SharedStorage,
}

impl Default for MockConfig {
    /// One prefill worker of about 28,000 tokens per second, four decode workers, Qwen3-30B-A3B.
    fn default() -> Self {
        MockConfig {
            model: "mock".into(),
            prefill_workers: 1,
            decode_workers: 4,
            base_port: 0,
            step: StepModel::QWEN3_30B_A3B,
            batch_max: 256,
            prefill_base_ms: 4.0,
            prefill_ms_per_token: 0.035,
            time_scale: 1.0,
            kv_lease: Duration::from_secs(30),
            kv_load_failure_policy: KvLoadFailurePolicy::Fail,
            protocol: KvProtocol::Nixl,
            signature_carriage: SignatureCarriage::Header,
            kv_cache_tokens: 1 << 18,
            context_tokens: 1 << 17,
        }
    }
}

/// A running mock engine. Dropping it cuts all connections and ends its threads.
#[derive(Debug)]
pub struct MockEngine {
    // Before the workers: servers hold them too, and step loops end with the last holder.
    servers: JoinSet<std::convert::Infallible>,
    prefill: Vec<Arc<Worker>>,
    decode: Vec<Arc<Worker>>,
    shared: Arc<Shared>,
}

impl MockEngine {
    /// Starts all workers on the current tokio runtime; once this returns, they accept connections.
    pub async fn start(config: MockConfig, catalog: Arc<Catalog>) -> anyhow::Result<Self> {
        for (name, value) in [
            ("prefill_base_ms", config.prefill_base_ms),
            ("prefill_ms_per_token", config.prefill_ms_per_token),
            ("time_scale", config.time_scale),
        ] {
            ensure!(
                value >= 0.0 && value.is_finite(),
                "{name} is {value}: it must be 0 or more"
            );
        }
        let created = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .map_or(0, |now| now.as_secs());
        let (prefill_workers, decode_workers) = (config.prefill_workers, config.decode_workers);
        let mut port = config.base_port;
        let shared = Arc::new(Shared {
            registry: Registry::new(config.kv_lease),
            limits: Limits {
                model: config.model.clone(),
                context_tokens: config.context_tokens,
            },
            config,
            catalog,
            created,
            next_request: AtomicU64::new(0),
        });
        let mut servers = JoinSet::new();
        let mut workers = Vec::with_capacity(prefill_workers + decode_workers);
        let names = (0..prefill_workers)
            .map(|index| format!("prefill-{index}"))
            .chain((0..decode_workers).map(|index| format!("decode-{index}")));
        for name in names {
            let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, port)).await.with_context(|| {
                format!("cannot listen on 127.0.0.1:{port} for {name}\nhint: choose another base port")
            })?;
            if port > 0 {
                port = port
                    .checked_add(1)
                    .context("ports end at 65535: choose a lower base port")?;
            }
            let address = listener.local_addr()?;
            let worker = Arc::new(Worker::start(name, address, Arc::clone(&shared))?);
            servers.spawn(server::serve(listener, Arc::clone(&worker)));
            workers.push(worker);
        }
        let decode = workers.split_off(prefill_workers);
        Ok(MockEngine {
            servers,
            prefill: workers,
            decode,
            shared,
        })
    }

    /// Where the prefill workers listen.
    pub fn prefill(&self) -> Vec<SocketAddr> {
        self.prefill.iter().map(|worker| worker.address).collect()
    }

    /// Where the decode workers listen.
    pub fn decode(&self) -> Vec<SocketAddr> {
        self.decode.iter().map(|worker| worker.address).collect()
    }

    /// What each worker did, prefill workers first.
    pub fn reports(&self) -> Vec<WorkerReport> {
        self.prefill
            .iter()
            .chain(&self.decode)
            .map(|worker| worker.report())
            .collect()
    }

    /// What each decode worker did.
    pub fn decode_reports(&self) -> Vec<WorkerReport> {
        self.decode.iter().map(|worker| worker.report()).collect()
    }

    /// Requests whose KV blocks prefill holds and nobody has fetched.
    pub fn kv_held(&self) -> usize {
        self.shared.registry.held()
    }

    /// Requests whose KV blocks prefill held until their lease ran out: nobody fetched or released them.
    pub fn kv_stranded(&self) -> u64 {
        let reports = self.reports();
        reports.iter().map(|one| one.kv.stranded_requests).sum()
    }

    /// Waits until no KV blocks are held: all were fetched, released or stranded. As long as a lease at most, unless
    /// prefill goes on.
    pub async fn kv_nothing_held(&self) {
        self.shared.registry.nothing_held().await;
    }

    /// Counts from zero again, all but what is running and waiting now.
    pub fn restart_statistics(&self) {
        self.shared.registry.restart_statistics();
        for worker in self.prefill.iter().chain(&self.decode) {
            worker.restart_statistics();
        }
    }

    /// Cuts all connections, ends all threads and gives the last reports.
    pub async fn shutdown(mut self) -> Vec<WorkerReport> {
        self.servers.shutdown().await;
        self.reports()
    }
}
