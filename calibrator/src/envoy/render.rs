//! A topology as Envoy's configuration.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::topology::{BlobSource, Destination, Mode, Topology, Worker};

/// The configurations that the project ships: what does not depend on the workers is taken from them.
const ORCHESTRATE: &str = include_str!("../../../envoy/envoy.yaml");
const RELAY: &str = include_str!("../../../envoy/relay.yaml");
const ENDPOINT: &str = include_str!("../../../envoy/endpoint.yaml");

const DECODE_ANY: &str = "decode-any";

/// The configuration in YAML.
///
/// # Panics
/// If a shipped configuration has no place for something, which the tests rule out.
pub fn render(topology: &Topology) -> String {
    let shipped = match (topology.mode, topology.destination) {
        (Mode::Relay, _) => RELAY,
        (Mode::Orchestrate, Destination::Endpoint) => ENDPOINT,
        (Mode::Orchestrate, Destination::Cluster) => ORCHESTRATE,
    };
    let clusters = "  clusters:\n";
    let (head, _) = shipped.split_once(clusters).expect("clusters");
    let value = "                          value: |\n";
    let router = "                  - name: envoy.filters.http.router\n";
    let (before, rest) = head.split_once(value).expect("the filter's configuration");
    let (_, after) = rest.split_once(router).expect("the router");
    let (servers, models) = blob_servers(topology);
    let plugin = plugin(topology, models);
    let mut text = [before, value, &plugin, router, after, clusters].concat();

    let socket =
        |(host, port): &(String, u16)| format!("address: {}, port_value: {port}", plain(host));
    swap(
        &mut text,
        "address: 127.0.0.1, port_value: 9901",
        &socket(&topology.admin),
    );
    swap(
        &mut text,
        "address: 0.0.0.0, port_value: 10000",
        &socket(&topology.listen),
    );
    swap(
        &mut text,
        "/etc/envoy/eldr_filter.wasm",
        &plain(&topology.module),
    );
    let limit = format!("per_connection_buffer_limit_bytes: {}", topology.body_bytes);
    swap(
        &mut text,
        "per_connection_buffer_limit_bytes: 33554432",
        &limit,
    );
    let limit = format!("max_request_headers_kb: {}", topology.header_kb);
    swap(&mut text, "max_request_headers_kb: 96", &limit);
    if let Some(path) = &topology.access_log {
        swap(
            &mut text,
            "envoy.access_loggers.stdout",
            "envoy.access_loggers.file",
        );
        let file = format!(
            "access_loggers.file.v3.FileAccessLog\n                      path: {}",
            plain(path)
        );
        swap(&mut text, "access_loggers.stream.v3.StdoutAccessLog", &file);
    }

    let mut clusters = Clusters {
        text,
        any: false,
        kb: topology.header_kb,
        explained: false,
    };
    match topology.destination {
        Destination::Endpoint => clusters.endpoints(&topology.decode),
        Destination::Cluster => {
            for worker in &topology.decode {
                clusters.add(&worker.name, std::slice::from_ref(worker), false);
            }
            clusters.add(DECODE_ANY, &topology.decode, false);
        }
    }
    if topology.prefill.separate {
        for worker in &topology.prefill.workers {
            clusters.add(&worker.name, std::slice::from_ref(worker), true);
        }
    } else {
        clusters.add("prefill", &topology.prefill.workers, true);
    }
    for (name, BlobSource { host, port, .. }) in servers {
        let worker = Worker {
            name: name.clone(),
            host,
            port,
            weight: None,
            drain: false,
            mooncake: None,
        };
        clusters.add(&name, &[worker], false);
    }
    clusters.text
}

/// Replaces what must be there once.
fn swap(text: &mut String, from: &str, to: &str) {
    assert_eq!(
        text.matches(from).count(),
        1,
        "{from} in a shipped configuration"
    );
    *text = text.replace(from, to);
}

/// A cluster for each server of blobs, and the models with their blobs.
fn blob_servers(topology: &Topology) -> (BTreeMap<String, BlobSource>, Vec<Value>) {
    let mut servers: BTreeMap<String, BlobSource> = BTreeMap::new();
    let mut models = Vec::new();
    for model in &topology.models {
        let mut fields = model.fields.clone();
        if let Some(source) = &model.fetched {
            let same =
                |known: &BlobSource| (&known.host, known.port) == (&source.host, source.port);
            let known = servers
                .iter()
                .find(|(_, known)| same(known))
                .map(|(name, _)| name.clone());
            let name = known.unwrap_or_else(|| match servers.len() {
                0 => "eldr-serve".into(),
                n => format!("eldr-serve-{n}"),
            });
            let mut http = json!({"cluster": name, "path": source.path});
            if let Some(interval_ms) = source.interval_ms {
                http["interval_ms"] = json!(interval_ms);
            }
            fields["blob"] = json!({ "http": http });
            servers.entry(name).or_insert_with(|| source.clone());
        }
        models.push(fields);
    }
    (servers, models)
}

/// The filter's configuration as the block that stands in the file.
fn plugin(topology: &Topology, models: Vec<Value>) -> String {
    let workers: Vec<Value> = topology
        .decode
        .iter()
        .map(|worker| {
            if worker.weight.is_none() && !worker.drain {
                return json!(worker.name);
            }
            let mut entry = json!({"name": worker.name});
            if let Some(weight) = worker.weight {
                entry["weight"] = json!(weight);
            }
            if worker.drain {
                entry["drain"] = json!(true);
            }
            entry
        })
        .collect();
    let prefill = &topology.prefill;
    let names: Vec<&str> = match prefill.separate {
        true => prefill
            .workers
            .iter()
            .map(|worker| worker.name.as_str())
            .collect(),
        false => vec!["prefill"],
    };
    let mut fields = vec![("models", Value::from(models))];
    if topology.mode == Mode::Relay {
        fields.push(("mode", json!("relay")));
    }
    match topology.destination {
        Destination::Cluster => fields.push(("decode_clusters", workers.into())),
        Destination::Endpoint => {
            fields.push(("destination", json!("endpoint")));
            fields.push(("decode_clusters", json!([DECODE_ANY])));
            fields.push(("decode_endpoints", workers.into()));
        }
    }
    fields.push(("prefill_clusters", json!(names)));
    fields.push(("prefill_policy", json!(prefill.policy)));
    let mooncake: serde_json::Map<String, Value> = prefill
        .workers
        .iter()
        .filter_map(|worker| {
            let (bootstrap_addr, engine_id) = worker.mooncake.as_ref()?;
            let engine = json!({"bootstrap_addr": bootstrap_addr, "engine_id": engine_id});
            Some((worker.name.clone(), engine))
        })
        .collect();
    if !mooncake.is_empty() {
        fields.push(("mooncake", mooncake.into()));
    }
    fields.extend(
        topology
            .filter
            .iter()
            .map(|(key, value)| (key.as_str(), value.clone())),
    );
    let indent = " ".repeat(28);
    let lines: Vec<String> = fields
        .iter()
        .map(|(key, value)| format!("{indent}  {}: {}", json!(key), spaced(value)))
        .collect();
    format!("{indent}{{\n{}\n{indent}}}\n", lines.join(",\n"))
}

/// JSON on one line, with a space behind each comma and colon.
fn spaced(value: &Value) -> String {
    match value {
        Value::Array(items) => {
            format!(
                "[{}]",
                items.iter().map(spaced).collect::<Vec<_>>().join(", ")
            )
        }
        Value::Object(fields) => {
            let fields = fields
                .iter()
                .map(|(key, value)| format!("{}: {}", json!(key), spaced(value)));
            format!("{{{}}}", fields.collect::<Vec<_>>().join(", "))
        }
        value => value.to_string(),
    }
}

/// A text as YAML has it: as it is, if it is then the same text, or in quotes.
fn plain(text: &str) -> String {
    let letters = |c: char| c.is_ascii_alphanumeric() || "._-/".contains(c);
    let begins = text.starts_with(|c: char| c.is_ascii_alphabetic() || c == '/')
        || text.parse::<std::net::Ipv4Addr>().is_ok();
    let word = ["true", "false", "null", "yes", "no", "on", "off", "y", "n"]
        .contains(&text.to_ascii_lowercase().as_str());
    match begins && !word && text.chars().all(letters) {
        true => text.to_owned(),
        false => json!(text).to_string(),
    }
}

/// The clusters, each explained where it comes first.
struct Clusters {
    text: String,
    /// Whether there is a cluster whose limits others may refer to.
    any: bool,
    kb: u32,
    /// Whether the limit of headers was explained.
    explained: bool,
}

impl Clusters {
    fn add(&mut self, name: &str, workers: &[Worker], signs: bool) {
        self.line(&format!("    - name: {}", plain(name)));
        self.line("      type: STRICT_DNS");
        self.line("      connect_timeout: 1s");
        self.limits();
        if signs {
            if !self.explained {
                self.line("      # A signature of 48 × 128 counts is 16 KiB of base64, Kimi-K2's 60 × 384 are 61 KiB.");
                self.explained = true;
            }
            let options = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions";
            self.line("      typed_extension_protocol_options:");
            self.line(&format!("        {options}:"));
            self.line(&format!(
                "          \"@type\": type.googleapis.com/{options}"
            ));
            let kb = self.kb;
            self.line(&format!(
                "          common_http_protocol_options: {{ max_response_headers_kb: {kb} }}"
            ));
            self.line("          explicit_http_config: { http_protocol_options: {} }");
        }
        self.assign(name, workers);
    }

    /// All decode workers as endpoints of one cluster, as the shipped configuration has it.
    fn endpoints(&mut self, workers: &[Worker]) {
        let start = "    - name: decode-any\n";
        let end = "      load_assignment:\n";
        let (_, rest) = ENDPOINT
            .split_once(start)
            .expect("the cluster of all decode workers");
        let (cluster, _) = rest.split_once(end).expect("its endpoints");
        self.text += start;
        self.text += cluster;
        self.any = true;
        self.assign(DECODE_ANY, workers);
    }

    fn limits(&mut self) {
        if self.any {
            self.line("      circuit_breakers: *unlimited");
            return;
        }
        self.line("      # The default of 1,024 requests turns load into 503.");
        self.line("      circuit_breakers: &unlimited");
        self.line("        thresholds: [{ max_connections: 100000, max_pending_requests: 100000, max_requests: 100000 }]");
        self.any = true;
    }

    fn assign(&mut self, name: &str, workers: &[Worker]) {
        self.line("      load_assignment:");
        self.line(&format!("        cluster_name: {}", plain(name)));
        self.line("        endpoints:");
        self.line("          - lb_endpoints:");
        for Worker { host, port, .. } in workers {
            let address = format!("address: {}, port_value: {port}", plain(host));
            self.line(&format!(
                "              - endpoint: {{ address: {{ socket_address: {{ {address} }} }} }}"
            ));
        }
    }

    fn line(&mut self, line: &str) {
        self.text += line;
        self.text.push('\n');
    }
}
