//! What a topology says, checked.

use std::path::Path;

use serde_json::Value;
use toml::de::DeTable;

use super::models::models;
use super::table::{Entries, Mistakes, nearest, show, to_json};
use super::workers::{check_names, split_address, workers};
use crate::error::Error;

/// Fields of the filter's configuration that a topology passes on as they are, in the table `filter`; the
/// others follow from the rest of the file. The filter checks their values.
pub const FILTER_FIELDS: [&str; 22] = [
    "prefill_prefix_bytes",
    "prefill_load_factor",
    "prefill_timeout_ms",
    "prefill_retry",
    "on_prefill_failure",
    "release",
    "relay_ttl_ms",
    "relay_body_signature",
    "protocol",
    "report_cached_tokens",
    "load_lease_ms",
    "load_refresh_ms",
    "load_report_interval_ms",
    "load_report_path",
    "load_report_stale_ms",
    "kv_usage_limit",
    "eject_ms",
    "eject_max_ms",
    "log_signatures",
    "log_decisions_per_mille",
    "measure_streams",
    "debug_headers",
];

/// A gateway and its workers.
#[derive(Clone, Debug, PartialEq)]
pub struct Topology {
    /// Host and port that clients connect to.
    pub listen: (String, u16),
    /// Host and port of Envoy's admin interface.
    pub admin: (String, u16),
    /// Path of the compiled filter.
    pub module: String,
    /// File that requests are logged to; none for standard output.
    pub access_log: Option<String>,
    /// Who coordinates.
    pub mode: Mode,
    /// How decode workers are named to Envoy.
    pub destination: Destination,
    /// Decode workers.
    pub decode: Vec<Worker>,
    /// Prefill workers.
    pub prefill: Prefill,
    /// Models.
    pub models: Vec<Model>,
    /// Longest request body that is held, bytes.
    pub body_bytes: u32,
    /// Longest headers of a request and of a prefill answer, KiB.
    pub header_kb: u32,
    /// Passed on to the filter, in the order of the file.
    pub filter: Vec<(String, Value)>,
}

/// Who runs the prefill leg.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// The filter.
    Orchestrate,
    /// Somebody else.
    Relay,
}

/// What a decode worker is to Envoy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Destination {
    /// A cluster of its own.
    Cluster,
    /// An endpoint of one cluster.
    Endpoint,
}

/// An engine.
#[derive(Clone, Debug, PartialEq)]
pub struct Worker {
    /// Name of its Envoy cluster; of an endpoint, its address.
    pub name: String,
    /// Host or address.
    pub host: String,
    /// Port.
    pub port: u16,
    /// Share of the load; 1 unless it is said.
    pub weight: Option<f64>,
    /// Whether it gets no new requests.
    pub drain: bool,
    /// Mooncake's `bootstrap_addr` and `engine_id` of a prefill worker.
    pub mooncake: Option<(String, String)>,
}

/// The prefill workers and how one is chosen.
#[derive(Clone, Debug, PartialEq)]
pub struct Prefill {
    /// Name of the policy.
    pub policy: &'static str,
    /// Whether each worker is a cluster of its own. Otherwise Envoy goes round them in the cluster `prefill`.
    pub separate: bool,
    /// The workers.
    pub workers: Vec<Worker>,
}

/// A model's entry in the filter's configuration, but for a blob that is fetched.
#[derive(Clone, Debug, PartialEq)]
pub struct Model {
    /// Fields of the filter's configuration.
    pub fields: Value,
    /// Where its blob is fetched.
    pub fetched: Option<BlobSource>,
}

/// A server of blobs.
#[derive(Clone, Debug, PartialEq)]
pub struct BlobSource {
    /// Host.
    pub host: String,
    /// Port.
    pub port: u16,
    /// Path of the blob.
    pub path: String,
    /// Milliseconds between two questions; none for the filter's default.
    pub interval_ms: Option<u32>,
}

/// Reads a topology. `file` names it in errors; blobs are relative to `folder`.
///
/// # Errors
/// Lists every mistake with its line.
pub fn parse(file: &str, text: &str, folder: &Path) -> Result<Topology, Error> {
    let mut told = Mistakes::new(file, text);
    let (root, errors) = DeTable::parse_recoverable(text);
    if !errors.is_empty() {
        // Alone: what could not be read would be missing for a reason that is told already.
        for error in &errors {
            let at = error.span().map_or(0, |span| span.start);
            told.add(at, "", error.message().trim(), "the file must be TOML");
        }
        let told = told.told();
        return Err(told.unwrap_or_else(|| Error::new(file, "the file must be TOML")));
    }
    let mut root = Entries::new("", 0, Some(root.get_ref()));
    let mut address = |key, default: (&str, u16)| {
        let found = root.text(&mut told, key);
        let parsed = found.map(|(at, text)| {
            let parsed = split_address(&text);
            if parsed.is_none() {
                let hint = "address:port is allowed, such as 0.0.0.0:10000";
                told.add(at, key, format!("{text:?} is no address"), hint);
            }
            parsed
        });
        parsed
            .flatten()
            .unwrap_or((default.0.to_owned(), default.1))
    };
    let listen = address("listen", ("0.0.0.0", 10000));
    let admin = address("admin", ("127.0.0.1", 9901));
    let module = root.text(&mut told, "module");
    let access_log = root.text(&mut told, "access_log");
    let mode = [("orchestrate", Mode::Orchestrate), ("relay", Mode::Relay)];
    let mode = root
        .choice(&mut told, "mode", &mode)
        .unwrap_or(Mode::Orchestrate);

    let mut limits = root.table(&mut told, "limits");
    let body_bytes = limits
        .whole(&mut told, "body_bytes", 1 << 16..=1 << 30)
        .unwrap_or(32 << 20);
    let header_kb = limits.whole(&mut told, "header_kb", 1..=8192).unwrap_or(96);
    limits.end(&mut told);

    let filter = filter(&root.table(&mut told, "filter"), &mut told);
    let mooncake = filter
        .iter()
        .any(|(key, value)| key == "protocol" && value == "mooncake");

    let mut table = root.table(&mut told, "decode");
    let kinds = [
        ("cluster", Destination::Cluster),
        ("endpoint", Destination::Endpoint),
    ];
    let destination = table
        .choice(&mut told, "destination", &kinds)
        .unwrap_or(Destination::Cluster);
    let decode = workers(
        &mut table,
        &mut told,
        "decode",
        destination == Destination::Endpoint,
        false,
    );
    table.end(&mut told);

    let mut table = root.table(&mut told, "prefill");
    let policies = ["round_robin", "least_loaded", "prefix_hash"].map(|name| (name, name));
    let policy = table
        .choice(&mut told, "policy", &policies)
        .unwrap_or("round_robin");
    let prefill = workers(
        &mut table,
        &mut told,
        "prefill",
        false,
        mooncake && mode == Mode::Orchestrate,
    );
    table.end(&mut told);
    let separate = policy != "round_robin" || mooncake;
    check_names(&mut told, &decode, &prefill, separate);
    let only =
        |workers: Vec<(usize, Worker)>| workers.into_iter().map(|(_, worker)| worker).collect();
    let decode: Vec<Worker> = only(decode);
    let prefill = Prefill {
        policy,
        separate,
        workers: only(prefill),
    };
    let models = models(&mut root, &mut told, folder, &decode);
    root.end(&mut told);
    if let Some(error) = told.told() {
        return Err(error);
    }
    Ok(Topology {
        listen,
        admin,
        module: module.map_or_else(
            || "/etc/envoy/eldr_filter.wasm".into(),
            |(_, module)| module,
        ),
        access_log: access_log.map(|(_, log)| log).filter(|log| log != "stdout"),
        mode,
        destination,
        decode,
        prefill,
        models,
        body_bytes,
        header_kb,
        filter,
    })
}

fn filter(table: &Entries<'_, '_>, told: &mut Mistakes<'_>) -> Vec<(String, Value)> {
    let mut filter = Vec::new();
    for (at, key, value) in table.all() {
        let field = table.field(key);
        if !FILTER_FIELDS.contains(&key) {
            told.add(
                at,
                &field,
                "the filter gets no such field from here",
                &nearest(key, &FILTER_FIELDS),
            );
        } else if let Some(value) = to_json(value.get_ref()) {
            filter.push((key.to_owned(), value));
        } else {
            told.add(
                at,
                &field,
                show(value.get_ref()),
                "a text, a number, true or false is allowed",
            );
        }
    }
    filter
}
