//! What a topology says, checked.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use eldr_core::blob::Blob;
use eldr_core::decide::Policy;
use serde_json::{Value, json};
use toml::de::{DeTable, DeValue};

use super::table::{Entries, Mistakes, nearest, show, to_json};
use crate::blob_file;
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

const WORKERS: &str = "list the workers: workers = [\"host:port\", …]";
const ADDRESS: &str = "host:port is allowed, such as decode-0:8000";

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
    let workers = workers(
        &mut table,
        &mut told,
        "prefill",
        false,
        mooncake && mode == Mode::Orchestrate,
    );
    table.end(&mut told);
    let separate = policy != "round_robin" || mooncake;
    check_names(&mut told, &decode, &workers, separate);
    let only =
        |workers: Vec<(usize, Worker)>| workers.into_iter().map(|(_, worker)| worker).collect();
    let decode: Vec<Worker> = only(decode);
    let prefill = Prefill {
        policy,
        separate,
        workers: only(workers),
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

/// Host and port; an IPv6 address stands in brackets.
fn split_address(text: &str) -> Option<(String, u16)> {
    let (host, port) = text.rsplit_once(':')?;
    let inner = host
        .strip_prefix('[')
        .and_then(|host| host.strip_suffix(']'));
    let valid = match inner {
        Some(address) => address.parse::<std::net::Ipv6Addr>().is_ok(),
        None => {
            !host.is_empty()
                && host
                    .chars()
                    .all(|c| c.is_ascii_alphanumeric() || "._-".contains(c))
        }
    };
    let port = port.parse().ok()?;
    valid.then(|| (inner.unwrap_or(host).to_owned(), port))
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

fn workers(
    table: &mut Entries<'_, '_>,
    told: &mut Mistakes<'_>,
    kind: &str,
    endpoints: bool,
    mooncake: bool,
) -> Vec<(usize, Worker)> {
    let Some((at, list)) = table.array(told, "workers", WORKERS) else {
        if table.get("workers").is_none() {
            told.add(table.at, kind, "it has no workers", WORKERS);
        }
        return Vec::new();
    };
    if list.is_empty() {
        told.add(at, &table.field("workers"), "the list is empty", WORKERS);
    }
    let mut workers = Vec::new();
    for (index, value) in list.iter().enumerate() {
        let (at, path) = (value.span().start, format!("{kind}.workers[{index}]"));
        let inline = match value.get_ref() {
            DeValue::Table(inline) => Some(inline),
            _ => None,
        };
        let mut entries = Entries::new(&path, at, inline);
        let name = entries.text(told, "name");
        let (at, address) = match (value.get_ref().as_str(), inline) {
            (Some(address), _) => (at, address.to_owned()),
            (_, Some(_)) => match entries.text(told, "address") {
                Some(found) => found,
                None => {
                    told.add(
                        at,
                        &path,
                        "it has no address",
                        "say address = \"host:port\"",
                    );
                    continue;
                }
            },
            _ => {
                told.add(at, &path, show(value.get_ref()), ADDRESS);
                continue;
            }
        };
        let weight = entries.number(told, "weight", 0.1..=100.0);
        let drain = entries.boolean(told, "drain").unwrap_or(false);
        let bootstrap = entries.text(told, "bootstrap_addr").map(|(_, text)| text);
        let engine = entries.text(told, "engine_id").map(|(_, text)| text);
        let engine_known = bootstrap.is_some() && engine.is_some();
        if mooncake && !engine_known {
            let hint = "with the protocol mooncake say address, bootstrap_addr = \"http://host:8998\" and engine_id";
            told.add(at, &path, "how to reach its KV blocks is not said", hint);
        }
        entries.end(told);
        let Some((host, port)) = split_address(&address) else {
            told.add(at, &path, format!("{address:?} is no address"), ADDRESS);
            continue;
        };
        if endpoints && host.parse::<std::net::IpAddr>().is_err() {
            let hint =
                "an endpoint is named by its IP address; a name wants destination = \"cluster\"";
            told.add(at, &path, format!("{host:?} is a name"), hint);
        }
        if endpoints && let Some((at, _)) = name {
            told.add(
                at,
                &path,
                "an endpoint has no name",
                "its address is its name: leave `name` out",
            );
        }
        if kind == "prefill" && (weight.is_some() || drain) {
            told.add(
                at,
                &path,
                "prefill workers have no weight and do not drain",
                "leave them out",
            );
        }
        let own = name.map_or_else(|| format!("{kind}-{index}"), |(_, name)| name);
        let worker = Worker {
            name: if endpoints { address } else { own },
            host,
            port,
            weight,
            drain,
            mooncake: bootstrap.zip(engine),
        };
        workers.push((at, worker));
    }
    workers
}

/// Names go into a header and into statistics, and each cluster has its own.
fn check_names(
    told: &mut Mistakes<'_>,
    decode: &[(usize, Worker)],
    prefill: &[(usize, Worker)],
    separate: bool,
) {
    let mut seen: BTreeMap<&str, String> = BTreeMap::from([
        ("decode-any", "the cluster of all decode workers".into()),
        ("eldr-serve", "the cluster of a blob server".into()),
    ]);
    if !separate {
        seen.insert("prefill", "the cluster of all prefill workers".into());
    }
    // In the cluster of all, prefill workers have no names.
    let prefill = if separate { prefill } else { &[] };
    for (kind, workers) in [("decode", decode), ("prefill", prefill)] {
        for (index, (at, worker)) in workers.iter().enumerate() {
            let (name, path) = (worker.name.as_str(), format!("{kind}.workers[{index}]"));
            let letters = |c: char| c.is_ascii_alphanumeric() || "._-:[]".contains(c);
            if name.is_empty() || !name.chars().all(letters) {
                let hint = "letters, digits, '.', '_' and '-' are allowed";
                told.add(*at, &path, format!("its name is {name:?}"), hint);
            }
            if let Some(other) = seen.insert(name, path.clone()) {
                let hint = "give each worker a name of its own";
                told.add(
                    *at,
                    &path,
                    format!("{name} is the name of {other} as well"),
                    hint,
                );
            }
        }
    }
}

fn models(
    root: &mut Entries<'_, '_>,
    told: &mut Mistakes<'_>,
    folder: &Path,
    decode: &[Worker],
) -> Vec<Model> {
    let hint = "write each model as a table: [[model]]";
    let Some((_, list)) = root.array(told, "model", hint) else {
        let fields = json!({"model": "*", "policy": "band"});
        return vec![Model {
            fields,
            fetched: None,
        }];
    };
    let mut models: Vec<Model> = Vec::new();
    for (index, value) in list.iter().enumerate() {
        let (at, path) = (value.span().start, format!("model[{index}]"));
        if !value.get_ref().is_table() {
            told.add(at, &path, show(value.get_ref()), hint);
        }
        let mut entries = Entries::new(&path, at, value.get_ref().as_table());
        let name = entries
            .text(told, "name")
            .map_or_else(|| "*".into(), |(_, name)| name);
        let policies = Policy::ALL.map(|policy| (policy.name(), policy.name()));
        let policy = entries
            .choice(told, "policy", &policies)
            .unwrap_or_default();
        let mut fields = json!({"model": name, "policy": policy});
        if let Some(tau) = entries.number(told, "tau", 0.0..=2.0) {
            fields["tau"] = json!(tau);
        }
        if let Some((_, DeValue::String(none))) = entries.get("max_load_factor")
            && none == "none"
        {
            fields["max_load_factor"] = json!("none");
        } else if let Some(factor) = entries.number(told, "max_load_factor", 1.0..=100.0) {
            fields["max_load_factor"] = json!(factor);
        }
        if let Some((at, rollout)) = entries.get("rollout") {
            match to_json(rollout).filter(Value::is_object) {
                Some(rollout) => fields["rollout"] = rollout,
                None => told.add(
                    at,
                    &entries.field("rollout"),
                    show(rollout),
                    "say rollout = { kind = \"shadow\" }",
                ),
            }
        }
        let fetched = blob(&mut entries, told, folder, decode, &mut fields);
        entries.end(told);
        if models
            .iter()
            .any(|model| model.fields["model"] == fields["model"])
        {
            let hint = "each model has one entry, and \"*\" is every other";
            told.add(at, &path, format!("{name:?} is there twice"), hint);
        }
        models.push(Model { fields, fetched });
    }
    models
}

/// A model's blob: a file that goes into the configuration, or a server.
fn blob(
    entries: &mut Entries<'_, '_>,
    told: &mut Mistakes<'_>,
    folder: &Path,
    decode: &[Worker],
    fields: &mut Value,
) -> Option<BlobSource> {
    let hint = "say blob = \"task.eldr\", or blob = { server = \"host:8089\" }";
    let (at, value) = entries.get("blob")?;
    let field = entries.field("blob");
    match value {
        DeValue::String(name) => {
            let path: PathBuf = folder.join(name.as_ref());
            let read = blob_file::read(&path)
                .and_then(|bytes| Ok((blob_file::verify(&path, &bytes)?, bytes)));
            match read {
                Ok((blob, bytes)) => {
                    check_regions(&blob, decode, told, at, &field);
                    fields["blob"] = json!({"inline": STANDARD.encode(bytes)});
                }
                Err(error) => told.add(at, &field, error.to_string(), error.hint()),
            }
            None
        }
        DeValue::Table(server) => {
            let mut server = Entries::new(&field, at, Some(server));
            let interval_ms = server.whole(told, "interval_ms", 200..=3_600_000);
            let path = server
                .text(told, "path")
                .map_or_else(|| "/v1/blob".into(), |(_, path)| path);
            if !path.starts_with('/') {
                told.add(
                    at,
                    &server.field("path"),
                    format!("{path:?}"),
                    "a path begins with /",
                );
            }
            let address = server.text(told, "server");
            let parsed = address
                .as_ref()
                .and_then(|(_, address)| split_address(address));
            if parsed.is_none() {
                let found = address.map_or("nothing".into(), |(_, address)| format!("{address:?}"));
                told.add(
                    at,
                    &server.field("server"),
                    found,
                    "host:port is allowed, such as eldr-serve:8089",
                );
            }
            server.end(told);
            let (host, port) = parsed?;
            Some(BlobSource {
                host,
                port,
                path,
                interval_ms,
            })
        }
        other => {
            told.add(at, &field, show(other), hint);
            None
        }
    }
}

fn check_regions(blob: &Blob, decode: &[Worker], told: &mut Mistakes<'_>, at: usize, field: &str) {
    for (region, names) in blob.regions.iter().enumerate() {
        for name in names {
            if !decode.iter().any(|worker| worker.name == *name) {
                let known: Vec<_> = decode.iter().map(|worker| worker.name.as_str()).collect();
                let hint = format!("the decode workers are: {}", known.join(", "));
                told.add(
                    at,
                    field,
                    format!("its region {region} is for {name}, which is none"),
                    &hint,
                );
            }
        }
    }
}
