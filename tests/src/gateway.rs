//! A gateway under test: Envoy with the filter, one prefill worker, decode workers, and a default upstream for what is
//! not routed.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use bytes::Bytes;
use eldr_examples::envoy::Envoy;
use eldr_examples::setup;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::client::{Connection, Reply, post};
use crate::config::{self, Listener};
use crate::upstream::{Answer, Upstream};
use crate::{blob, eventually};

/// What a prefill worker of these tests answers, unless a test says otherwise.
pub const KV_TRANSFER_PARAMS: &str =
    r#"{"do_remote_prefill":true,"remote_block_ids":[[1,2]],"remote_host":"10.0.0.1"}"#;

/// The filter, built once per process.
pub fn wasm_module() -> &'static Path {
    static MODULE: LazyLock<PathBuf> =
        LazyLock::new(|| setup::wasm_module().unwrap_or_else(|e| panic!("{e}")));
    &MODULE
}

/// The filter that traps on request, built once per process.
fn trapping_wasm_module() -> &'static Path {
    static MODULE: LazyLock<PathBuf> =
        LazyLock::new(|| setup::trapping_wasm_module().unwrap_or_else(|e| panic!("{e}")));
    &MODULE
}

/// Envoy, found once per process.
pub fn envoy_binary() -> &'static Path {
    static BINARY: LazyLock<PathBuf> =
        LazyLock::new(|| setup::envoy_binary().unwrap_or_else(|e| panic!("{e}")));
    &BINARY
}

/// How a gateway is arranged.
#[derive(Debug, Clone)]
pub struct Options {
    /// Decode workers, named `decode-0` and so on, one region each.
    pub workers: usize,
    /// Prefill workers, named `prefill`, `prefill-1` and so on.
    pub prefills: usize,
    /// Envoy's worker threads.
    pub threads: usize,
    /// Laid over the filter's default configuration; `null` removes a field.
    pub filter: Value,
    /// See [`Listener::without_stop_iteration`].
    pub without_stop_iteration: bool,
    /// See [`Listener::buffer_limit`].
    pub buffer_limit: u32,
    /// Listeners come from a file that [`Gateway::update`] replaces.
    pub lds: bool,
    /// How long a replaced listener may finish what it has, seconds.
    pub drain_time_s: u32,
    /// More Envoy clusters, by name.
    pub clusters: Vec<(&'static str, SocketAddr)>,
    /// One more cluster, `pool`, whose endpoint is chosen by header, with the endpoints of these addresses.
    pub pool: Vec<SocketAddr>,
    /// More static listeners: name, `root_id`, and what is laid over the filter's default configuration.
    pub listeners: Vec<(&'static str, &'static str, Value)>,
    /// The filter is the build that traps at a request with the header `x-eldr-trap-for-tests`.
    pub traps: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            workers: 3,
            prefills: 1,
            threads: 1,
            filter: json!({}),
            without_stop_iteration: false,
            buffer_limit: 64 << 20,
            lds: false,
            drain_time_s: 600,
            clusters: Vec::new(),
            pool: Vec::new(),
            listeners: Vec::new(),
            traps: false,
        }
    }
}

impl Options {
    /// The defaults with these fields of the filter's configuration.
    pub fn filter(filter: Value) -> Self {
        Self {
            filter,
            ..Self::default()
        }
    }

    /// The filter's configuration: band routing on a blob with one expert per decode worker.
    pub fn filter_config(&self) -> Value {
        let workers = worker_names(self.workers);
        let regions: Vec<Vec<String>> = workers.iter().map(|name| vec![name.clone()]).collect();
        let blob = blob::inline(&blob::one_expert_per_region(&regions));
        let mut config = json!({
            "models": [{ "model": "*", "blob": { "inline": blob }, "policy": "band" }],
            "decode_clusters": workers,
            "prefill_clusters": prefill_names(self.prefills),
            "debug_headers": true
        });
        for (key, value) in self.filter.as_object().expect("an object of overrides") {
            config[key] = value.clone();
        }
        config
            .as_object_mut()
            .expect("an object")
            .retain(|_, value| !value.is_null());
        config
    }
}

fn worker_names(count: usize) -> Vec<String> {
    (0..count).map(|index| format!("decode-{index}")).collect()
}

fn prefill_names(count: usize) -> Vec<String> {
    let others = (1..count).map(|index| format!("prefill-{index}"));
    std::iter::once("prefill".to_owned())
        .chain(others)
        .collect()
}

/// A running gateway and everything around it.
#[derive(Debug)]
pub struct Gateway {
    /// The Envoy process.
    pub envoy: Envoy,
    /// Answers each prefill leg with [`KV_TRANSFER_PARAMS`] and a signature of region 0.
    pub prefill: Upstream,
    /// `prefill-1` and so on, which answer as `prefill` does.
    pub other_prefills: Vec<Upstream>,
    /// `decode-0` and so on; each answers with its own name.
    pub decode: Vec<Upstream>,
    /// Gets what the filter does not route; answers `default`.
    pub default: Upstream,
    /// Where clients connect.
    pub address: SocketAddr,
    options: Options,
    dir: TempDir,
}

impl Gateway {
    /// Starts everything; returns when requests are served.
    pub async fn start(options: Options) -> Self {
        Self::try_start(options)
            .await
            .unwrap_or_else(|e| panic!("{e}"))
    }

    /// Waits until Envoy counts so many requests under way. It ends a request's books before it stops counting it, and this gauge is
    /// never late.
    pub async fn counts(&self, requests: u64) {
        let active = async || {
            let found = self.envoy.stat("http.gateway.downstream_rq_active").await;
            found.expect("a connection manager's gauge")
        };
        eventually("the counts settle", active, |found| *found == requests).await;
    }

    /// As [`Gateway::start`], but Envoy may refuse: the error is its own words.
    pub async fn try_start(options: Options) -> Result<Self, String> {
        let prefill = Upstream::start(Answer::status(500)).await;
        let mut other_prefills = Vec::new();
        for _ in 1..options.prefills {
            other_prefills.push(Upstream::start(Answer::status(500)).await);
        }
        let default = Upstream::start(Answer::json("default")).await;
        let mut decode = Vec::new();
        for name in worker_names(options.workers) {
            decode.push(Upstream::start(Answer::json(name)).await);
        }
        let dir = tempfile::tempdir().expect("a temporary directory");
        let mut clusters = clusters(&prefill, &decode, &default);
        for (name, worker) in prefill_names(options.prefills)
            .iter()
            .skip(1)
            .zip(&other_prefills)
        {
            clusters.push(config::cluster(name, worker.address));
        }
        let more = options.clusters.iter();
        clusters.extend(more.map(|&(name, address)| config::cluster(name, address)));
        if !options.pool.is_empty() {
            clusters.push(config::pool(&options.pool));
        }
        let listener = listener(&options, MAIN, dir.path());
        let bootstrap = if options.lds {
            write_lds(dir.path(), &listener, 1);
            config::bootstrap_with_lds(&clusters, &dir.path().join(LDS))
        } else {
            let mut listeners = vec![listener];
            for (name, root_id, filter) in &options.listeners {
                let options = Options {
                    filter: filter.clone(),
                    ..options.clone()
                };
                listeners.push(self::listener(&options, (name, root_id), dir.path()));
            }
            config::bootstrap(&clusters, &listeners)
        };
        let (binary, bootstrap) = (envoy_binary(), bootstrap.to_string());
        let drain = [
            "--drain-time-s".to_owned(),
            options.drain_time_s.to_string(),
        ];
        let envoy = Envoy::start_with(binary, &bootstrap, options.threads, &drain).await;
        let envoy = envoy.map_err(|e| e.to_string())?;
        let address = envoy
            .listener(config::LISTENER)
            .await
            .map_err(|e| e.to_string())?;
        let gateway = Self {
            envoy,
            prefill,
            other_prefills,
            decode,
            default,
            address,
            options,
            dir,
        };
        gateway.prefill_says(Some(0));
        Ok(gateway)
    }

    /// Prefill workers answer with a signature of this region from now on, or with none.
    pub fn prefill_says(&self, region: Option<usize>) {
        let signature = region.map(|region| blob::signature_of(region, self.options.workers));
        let answer = Answer::prefill(KV_TRANSFER_PARAMS, signature.as_deref());
        for prefill in std::iter::once(&self.prefill).chain(&self.other_prefills) {
            prefill.answers(answer.clone());
        }
    }

    /// A new client connection.
    pub async fn connect(&self) -> Connection {
        Connection::open(self.address).await
    }

    /// Posts a JSON body on a connection of its own.
    pub async fn post(&self, path: &str, body: impl Into<Bytes>) -> Reply {
        self.connect().await.call(post(path, body)).await
    }

    /// Replaces the listener's filter configuration at run time (LDS). `version` must be new.
    pub fn update(&self, filter: Value, version: u32) {
        assert!(self.options.lds, "this gateway's listener is static");
        let options = Options {
            filter,
            ..self.options.clone()
        };
        let listener = listener(&options, MAIN, self.dir.path());
        write_lds(self.dir.path(), &listener, version);
    }

    /// Access log entries, once there are at least `count`.
    pub async fn access_log(&self, count: usize) -> Vec<Value> {
        let file = self.dir.path().join(ACCESS_LOG);
        // Envoy buffers the file; this admin action makes it write.
        let read = async || {
            let reopened = self.envoy.admin_post("/reopen_logs").await;
            reopened.unwrap_or_else(|e| panic!("{e}"));
            let text = std::fs::read_to_string(&file).unwrap_or_default();
            let lines = text.lines().map(serde_json::from_str);
            lines.collect::<Result<Vec<Value>, _>>().unwrap_or_default()
        };
        eventually("access log entries", read, |entries| entries.len() >= count).await
    }

    /// Waits until the filter's gauges say that this many requests are in flight to decode workers. They are set
    /// at its tick, a few times a second.
    pub async fn expect_in_flight(&self, expected: u64) {
        let sum = async || {
            let stats = self.filter_stats().await.into_iter();
            stats
                .filter(|(name, _)| name.ends_with(".in_flight"))
                .map(|(_, count)| count)
                .sum::<u64>()
        };
        eventually("requests in flight", sum, |count| *count == expected).await;
    }

    /// Waits until requests have ended in exactly these outcomes, such as `routed(in_band)`, by the filter's counters
    /// as by the access log.
    pub async fn expect_outcomes(&self, expected: &[(&str, u64)]) {
        let expected: BTreeMap<String, u64> = expected
            .iter()
            .map(|&(name, count)| (name.to_owned(), count))
            .collect();
        let mut by_counter = BTreeMap::new();
        for (name, count) in &expected {
            let name = name.split('(').next().unwrap_or_default();
            *by_counter.entry(name.to_owned()).or_default() += count;
        }
        let outcomes = async || {
            let stats = self
                .filter_stats()
                .await
                .into_iter()
                .filter(|(_, count)| *count > 0);
            let named = stats.filter_map(|(name, count)| {
                Some((name.strip_prefix("eldr.outcome.")?.to_owned(), count))
            });
            named.collect::<BTreeMap<String, u64>>()
        };
        let what = format!("outcome counters {by_counter:?}");
        eventually(&what, outcomes, |found| *found == by_counter).await;

        let total: u64 = expected.values().sum();
        let mut logged = BTreeMap::<String, u64>::new();
        for entry in self.access_log(total as usize).await {
            *logged
                .entry(entry["outcome"].as_str().unwrap_or("none").to_owned())
                .or_default() += 1;
        }
        assert_eq!(logged, expected, "the access log differs from the counters");
        self.assert_no_trap();
    }

    /// No worker has received anything.
    pub fn assert_nothing_sent(&self) {
        let prefills = std::iter::once(&self.prefill).chain(&self.other_prefills);
        let received = prefills.chain(&self.decode).flat_map(Upstream::received);
        let received: Vec<_> = received.collect();
        assert!(received.is_empty(), "{received:?}");
    }

    /// The filter's VM has not trapped: a trap takes every stream of its thread along.
    pub fn assert_no_trap(&self) {
        let log = self.envoy.log_tail(usize::MAX);
        for sign in ["panicked", "Wasm VM failed", "Function: proxy_"] {
            assert!(!log.contains(sign), "the filter trapped: {log}");
        }
    }

    /// Waits until one of the filter's counters or gauges has this value.
    pub async fn expect_stat(&self, name: &str, expected: u64) {
        let value = async || self.filter_stats().await.get(name).copied().unwrap_or(0);
        eventually(name, value, |found| *found == expected).await;
    }

    /// The filter's counters and gauges, without the prefix that Envoy gives them.
    pub async fn filter_stats(&self) -> BTreeMap<String, u64> {
        let stats = self
            .envoy
            .stats(r"^wasmcustom\.")
            .await
            .unwrap_or_else(|e| panic!("{e}"));
        let strip = |name: String| name.trim_start_matches("wasmcustom.").to_owned();
        stats
            .values
            .into_iter()
            .map(|(name, value)| (strip(name), value))
            .collect()
    }
}

const LDS: &str = "lds.json";
const ACCESS_LOG: &str = "access.log";

fn clusters(prefill: &Upstream, decode: &[Upstream], default: &Upstream) -> Vec<Value> {
    let mut clusters = vec![
        config::cluster("prefill", prefill.address),
        config::cluster("default", default.address),
    ];
    for (name, worker) in worker_names(decode.len()).iter().zip(decode) {
        clusters.push(config::cluster(name, worker.address));
    }
    clusters
}

/// Name and `root_id` of the listener that every gateway has.
const MAIN: (&str, &str) = (config::LISTENER, "eldr");

fn listener(options: &Options, (name, root_id): (&str, &str), dir: &Path) -> Value {
    let module = if options.traps {
        trapping_wasm_module()
    } else {
        wasm_module()
    };
    let listener = Listener {
        name,
        root_id,
        module,
        filter: &options.filter_config(),
        access_log: &dir.join(ACCESS_LOG),
        without_stop_iteration: options.without_stop_iteration,
        buffer_limit: options.buffer_limit,
    };
    listener.render()
}

/// Moves a new LDS file into place: Envoy watches for moves, not for writes.
fn write_lds(dir: &Path, listener: &Value, version: u32) {
    let new = dir.join("lds.new");
    let mut listener = listener.clone();
    listener["@type"] = json!("type.googleapis.com/envoy.config.listener.v3.Listener");
    let response = json!({ "version_info": version.to_string(), "resources": [listener] });
    std::fs::write(&new, response.to_string()).expect("the temporary directory is writable");
    std::fs::rename(&new, dir.join(LDS)).expect("a rename within one directory");
}
