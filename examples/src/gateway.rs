//! Envoy's configuration for prefill/decode routing, rendered from the few things that differ.
//!
//! It is JSON, which Envoy reads as it reads YAML. The reference configuration for people,
//! `envoy/envoy.yaml` (`envoy/relay.yaml` in relay mode, `envoy/endpoint.yaml` for decode by endpoint), says the same and gives the reason for each setting; a test holds the two together.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

/// Name of the listener that clients talk to.
pub const LISTENER: &str = "gateway";
/// Request header in which the filter names the decode cluster.
pub const DECODE_CLUSTER_HEADER: &str = "x-eldr-decode-cluster";
/// Request header in which the filter names the endpoint, where decode goes by endpoint.
pub const ENDPOINT_HEADER: &str = "x-gateway-destination-endpoint";

/// Prompts beyond Envoy's 1 MiB, bytes.
const BUFFER_BYTES: u32 = 32 << 20;
/// A signature header and the headers beside it, KiB.
const HEADERS_KB: u32 = 96;
/// No limit that a queue of requests could run into.
const CONCURRENT_MAX: u32 = 100_000;
/// Load balancing over all decode workers, for what the filter does not route.
pub const ANY_DECODE: &str = "decode-any";

/// A gateway before prefill and decode workers.
#[derive(Clone, Debug)]
pub struct Gateway {
    /// Where clients connect; port 0 takes a free one.
    pub listen: SocketAddr,
    /// The compiled filter.
    pub module: PathBuf,
    /// Shared data is keyed by it alone: gateways of one process need different ones.
    pub vm_id: String,
    /// The filter's configuration.
    pub filter: Value,
    /// Prefill workers, together the cluster `prefill`.
    pub prefill: Vec<SocketAddr>,
    /// Decode workers, each a cluster of its own: see [`decode_cluster`]. With `"destination": "endpoint"` in the filter's
    /// configuration they are the endpoints of one, [`ANY_DECODE`].
    pub decode: Vec<SocketAddr>,
    /// Where to log each request with its outcome and decision.
    pub access_log: Option<PathBuf>,
}

/// Name of the cluster of decode worker `index`.
pub fn decode_cluster(index: usize) -> String {
    format!("decode-{index}")
}

impl Gateway {
    /// The bootstrap configuration, as JSON text.
    pub fn bootstrap(&self) -> String {
        let mut clusters = vec![
            cluster("prefill", "ROUND_ROBIN", &self.prefill),
            cluster(ANY_DECODE, "LEAST_REQUEST", &self.decode),
        ];
        if self.filter["destination"] == "endpoint" {
            // What the filter does not route takes the fallback policy.
            let mut any = cluster(ANY_DECODE, "ROUND_ROBIN", &self.decode);
            any["load_balancing_policy"] = by_endpoint();
            if let Some(any) = any.as_object_mut() {
                any.remove("lb_policy");
            }
            clusters[1] = any;
        } else {
            clusters.extend(self.decode.iter().enumerate().map(|(index, &address)| {
                cluster(&decode_cluster(index), "ROUND_ROBIN", &[address])
            }));
        }
        json!({
            "admin": {"address": address(SocketAddr::from(([127, 0, 0, 1], 0)))},
            "static_resources": {"listeners": [self.listener()], "clusters": clusters},
            "stats_config": stats_config(),
            "stats_flush_on_admin": true,
        })
        .to_string()
    }

    fn listener(&self) -> Value {
        json!({
            "name": LISTENER,
            "address": address(self.listen),
            "per_connection_buffer_limit_bytes": BUFFER_BYTES,
            "filter_chains": [{"filters": [{
                "name": "envoy.filters.network.http_connection_manager",
                "typed_config": self.connection_manager(),
            }]}],
        })
    }

    fn connection_manager(&self) -> Value {
        const TYPE: &str = "type.googleapis.com/envoy.extensions.filters.network\
                            .http_connection_manager.v3.HttpConnectionManager";
        let mut manager = json!({
            "@type": TYPE,
            "stat_prefix": LISTENER,
            "max_request_headers_kb": HEADERS_KB,
            "preserve_external_request_id": true,
            "stream_idle_timeout": "600s",
            "http_filters": [
                {"name": "eldr", "typed_config": self.wasm()},
                {"name": "envoy.filters.http.router", "typed_config": {
                    "@type": "type.googleapis.com/envoy.extensions.filters.http.router.v3.Router",
                }},
            ],
            "route_config": {"name": "decode", "virtual_hosts": [
                {"name": "all", "domains": ["*"], "routes": routes()},
            ]},
        });
        if self.filter["mode"] == "relay" {
            // Both legs keep the id that their coordinator gave them.
            manager["request_id_extension"] = json!({"typed_config": {
                "@type": "type.googleapis.com/envoy.extensions.request_id.uuid.v3.UuidRequestIdConfig",
                "pack_trace_reason": false,
            }});
        }
        if let Some(path) = &self.access_log {
            manager["access_log"] = json!([access_log(path)]);
        }
        manager
    }

    fn wasm(&self) -> Value {
        json!({
            "@type": "type.googleapis.com/envoy.extensions.filters.http.wasm.v3.Wasm",
            "config": {
                "name": "eldr",
                "root_id": "eldr",
                "vm_config": {
                    "vm_id": self.vm_id,
                    "runtime": "envoy.wasm.runtime.v8",
                    "code": {"local": {"filename": self.module}},
                },
                "configuration": {
                    "@type": "type.googleapis.com/google.protobuf.StringValue",
                    "value": self.filter.to_string(),
                },
                "failure_policy": "FAIL_RELOAD",
                "allow_on_headers_stop_iteration": true,
            },
        })
    }
}

/// A decision in the header goes to the cluster it names; what the filter let pass, to any decode worker.
fn routes() -> Value {
    json!([
        {
            "match": {
                "prefix": "/",
                "headers": [{"name": DECODE_CLUSTER_HEADER, "present_match": true}],
            },
            "route": {
                "cluster_header": DECODE_CLUSTER_HEADER,
                "timeout": "0s",
                "retry_policy": {"retry_on": "connect-failure", "num_retries": 1},
            },
            "request_headers_to_remove": [DECODE_CLUSTER_HEADER],
        },
        {"match": {"prefix": "/"}, "route": {"cluster": ANY_DECODE, "timeout": "0s"}},
    ])
}

/// Load balancing of a cluster whose endpoint the filter chooses (`destination: endpoint`): Envoy's `override_host` policy.
pub fn by_endpoint() -> Value {
    const POLICIES: &str = "type.googleapis.com/envoy.extensions.load_balancing_policies";
    json!({"policies": [{"typed_extension_config": {
        "name": "envoy.load_balancing_policies.override_host",
        "typed_config": {
            "@type": format!("{POLICIES}.override_host.v3.OverrideHost"),
            "override_host_sources": [{"header": ENDPOINT_HEADER}],
            "fallback_policy": {"policies": [{"typed_extension_config": {
                "name": "envoy.load_balancing_policies.least_request",
                "typed_config": {"@type": format!("{POLICIES}.least_request.v3.LeastRequest")},
            }}]},
        },
    }}]})
}

fn cluster(name: &str, policy: &str, workers: &[SocketAddr]) -> Value {
    const OPTIONS: &str = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions";
    let endpoints: Vec<Value> = workers
        .iter()
        .map(|&worker| json!({"endpoint": {"address": address(worker)}}))
        .collect();
    json!({
        "name": name,
        "type": "STATIC",
        "connect_timeout": "1s",
        "lb_policy": policy,
        "per_connection_buffer_limit_bytes": BUFFER_BYTES,
        "load_assignment": {"cluster_name": name, "endpoints": [{"lb_endpoints": endpoints}]},
        "circuit_breakers": {"thresholds": [{
            "max_connections": CONCURRENT_MAX,
            "max_pending_requests": CONCURRENT_MAX,
            "max_requests": CONCURRENT_MAX,
        }]},
        "typed_extension_protocol_options": {OPTIONS: {
            "@type": format!("type.googleapis.com/{OPTIONS}"),
            "common_http_protocol_options": {"max_response_headers_kb": HEADERS_KB},
            "explicit_http_config": {"http_protocol_options": {}},
        }},
    })
}

fn address(address: SocketAddr) -> Value {
    json!({"socket_address": {"address": address.ip().to_string(), "port_value": address.port()}})
}

fn access_log(path: &Path) -> Value {
    json!({
        "name": "envoy.access_loggers.file",
        "typed_config": {
            "@type": "type.googleapis.com/envoy.extensions.access_loggers.file.v3.FileAccessLog",
            "path": path,
            "log_format": {"json_format": {
                "id": "%REQ(x-request-id)%",
                "path": "%REQ(:path)%",
                "status": "%RESPONSE_CODE%",
                "flags": "%RESPONSE_FLAGS%",
                "duration_ms": "%DURATION%",
                "upstream": "%UPSTREAM_CLUSTER%",
                "prompt_tokens": "%FILTER_STATE(wasm.eldr_prompt_tokens:PLAIN)%",
                "prefill": "%FILTER_STATE(wasm.eldr_signature:PLAIN)%",
                "outcome": "%FILTER_STATE(wasm.eldr_outcome:PLAIN)%",
                "decision": "%FILTER_STATE(wasm.eldr_decision:PLAIN)%",
            }},
        },
    })
}

/// Turns outcome, reason and worker in statistics' names into tags, and gives histograms buckets that
/// fit their units.
fn stats_config() -> Value {
    json!({
        "stats_tags": [
            {"tag_name": "eldr_outcome", "regex": r"^wasmcustom\.eldr\.outcome(\.([a-z0-9_]+))$"},
            {"tag_name": "eldr_reason", "regex": r"^wasmcustom\.eldr\.(?:shadow\.)?reason(\.([a-z0-9_]+))$"},
            {
                "tag_name": "eldr_worker",
                "regex": r"^wasmcustom\.eldr\.(?:policy\.[a-z0-9_]+\.)?worker(\.(.+))\.(?:routed|in_flight|kv_tokens|known|elsewhere|ejections|sent|not_counted|ttft_ms|tpot_us)$",
            },
            {"tag_name": "eldr_policy", "regex": r"^wasmcustom\.eldr\.policy(\.([a-z0-9_]+))\.worker\."},
        ],
        "histogram_bucket_settings": [
            {
                "match": {"suffix": "eldr.decision_ns"},
                "buckets": [2000, 5000, 10000, 20000, 50000, 100000, 200000, 500000, 1000000],
            },
            {
                "match": {"suffix": "eldr.similarity_permille"},
                "buckets": [100, 200, 300, 400, 500, 600, 700, 800, 900, 950, 1100],
            },
            {
                "match": {"suffix": "eldr.top_similarity_permille"},
                "buckets": [100, 200, 300, 400, 500, 600, 700, 800, 900, 950, 1100],
            },
            {
                "match": {"suffix": "eldr.band"},
                "buckets": [1.5, 2.5, 3.5, 4.5, 6.5, 8.5, 12.5, 16.5, 32.5, 64.5, 128.5],
            },
            {
                "match": {"suffix": "eldr.prefill_ms"},
                "buckets": [5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 30000],
            },
            {
                "match": {"suffix": "ttft_ms"},
                "buckets": [10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 30000, 60000],
            },
            {
                "match": {"suffix": "tpot_us"},
                "buckets": [2000, 5000, 7500, 10000, 12500, 15000, 20000, 25000, 30000, 40000, 50000, 75000, 100000, 200000, 500000],
            },
        ],
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gateway() -> Gateway {
        let worker = |port| SocketAddr::from(([127, 0, 0, 1], port));
        Gateway {
            listen: worker(0),
            module: "eldr_filter.wasm".into(),
            vm_id: "test".into(),
            filter: json!({"policy": "band", "note": "a \"quoted\" text"}),
            prefill: vec![worker(8100), worker(8101)],
            decode: vec![worker(8200), worker(8201), worker(8202)],
            access_log: Some("access.log".into()),
        }
    }

    #[test]
    fn every_decode_worker_has_a_cluster_and_all_share_the_default() {
        let config: Value = serde_json::from_str(&gateway().bootstrap()).unwrap();
        let clusters = config["static_resources"]["clusters"].as_array().unwrap();
        let names: Vec<_> = clusters
            .iter()
            .map(|cluster| {
                let name = cluster["name"].as_str().unwrap();
                let endpoints = &cluster["load_assignment"]["endpoints"][0]["lb_endpoints"];
                (name, endpoints.as_array().unwrap().len())
            })
            .collect();
        let expected = [
            ("prefill", 2),
            (ANY_DECODE, 3),
            ("decode-0", 1),
            ("decode-1", 1),
            ("decode-2", 1),
        ];
        assert_eq!(names, expected);
    }

    #[test]
    fn the_filter_gets_its_configuration_as_it_is() {
        let gateway = gateway();
        let config: Value = serde_json::from_str(&gateway.bootstrap()).unwrap();
        let manager = &config["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0];
        let filter = &manager["typed_config"]["http_filters"][0]["typed_config"]["config"];
        let given: Value =
            serde_json::from_str(filter["configuration"]["value"].as_str().unwrap()).unwrap();
        assert_eq!(given, gateway.filter);
        assert_eq!(filter["vm_config"]["vm_id"], "test");
    }

    /// `key: value` for everything in `config` that does not differ from gateway to gateway.
    fn settings(config: &Value, found: &mut Vec<String>) {
        const DIFFER: [&str; 11] = [
            "name",
            "stat_prefix",
            "filename",
            "path",
            "port_value",
            "address",
            "value",
            "vm_id",
            "cluster",
            "cluster_name",
            "root_id",
        ];
        match config {
            Value::Object(object) => {
                for (key, value) in object
                    .iter()
                    .filter(|(key, _)| !DIFFER.contains(&key.as_str()))
                {
                    match value {
                        Value::Object(_) => found.push(format!("{key}:")),
                        Value::Array(items) if items.iter().all(Value::is_number) => {
                            found.push(format!("{key}: {value}"));
                        }
                        Value::Array(_) => found.push(format!("{key}:")),
                        Value::String(text) => found.push(format!("{key}: {text}")),
                        value => found.push(format!("{key}: {value}")),
                    }
                    settings(value, found);
                }
            }
            Value::Array(items) => items.iter().for_each(|item| settings(item, found)),
            _ => {}
        }
    }

    #[test]
    fn the_reference_configurations_say_the_same() {
        assert_says_the_same("envoy/envoy.yaml", json!({}));
        assert_says_the_same("envoy/relay.yaml", json!({"mode": "relay"}));
        assert_says_the_same("envoy/endpoint.yaml", json!({"destination": "endpoint"}));
    }

    fn assert_says_the_same(file: &str, filter: Value) {
        let squeeze = |text: &str| text.replace([' ', '"', '\''], "");
        let path = crate::setup::workspace_root().join(file);
        let reference = squeeze(&std::fs::read_to_string(path).unwrap());
        let gateway = Gateway {
            access_log: None,
            filter,
            ..gateway()
        };
        let config: Value = serde_json::from_str(&gateway.bootstrap()).unwrap();
        let mut rendered = Vec::new();
        settings(&config, &mut rendered);
        // Workers here have addresses, there names; nobody has to choose a policy among single workers.
        let ours = [
            "type: STATIC",
            "lb_policy: ROUND_ROBIN",
            "lb_policy: LEAST_REQUEST",
        ];
        let missing: Vec<_> = rendered
            .iter()
            .filter(|setting| !ours.contains(&setting.as_str()))
            .filter(|setting| !reference.contains(&squeeze(setting)))
            .collect();
        assert!(missing.is_empty(), "not in {file}: {missing:?}");
    }
}
