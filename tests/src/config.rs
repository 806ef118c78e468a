//! The bootstrap configuration that a test's Envoy starts from.

use std::net::SocketAddr;
use std::path::Path;

use serde_json::{Value, json};

/// Name of the listener with the filter.
pub const LISTENER: &str = "gateway";
/// Filter state that the access log shows, one JSON object per request.
const LOG_FORMAT: [(&str, &str); 7] = [
    ("outcome", "%FILTER_STATE(wasm.eldr_outcome:PLAIN)%"),
    ("decision", "%FILTER_STATE(wasm.eldr_decision:PLAIN)%"),
    ("path", "%REQ(:PATH)%"),
    ("status", "%RESPONSE_CODE%"),
    ("cluster", "%UPSTREAM_CLUSTER%"),
    ("flags", "%RESPONSE_FLAGS%"),
    ("test", "%REQ(X-TEST)%"),
];

/// What the listener needs to know.
#[derive(Debug, Clone, Copy)]
pub struct Listener<'a> {
    /// Its name.
    pub name: &'a str,
    /// The filter's `root_id`; all listeners share one VM per thread.
    pub root_id: &'a str,
    /// The built filter.
    pub module: &'a Path,
    /// The filter's configuration.
    pub filter: &'a Value,
    /// Access log file.
    pub access_log: &'a Path,
    /// Leave out the plugin flag without which the filter cannot hold headers while it reads the body.
    pub without_stop_iteration: bool,
    /// Longest body that Envoy holds, bytes.
    pub buffer_limit: u32,
}

impl Listener<'_> {
    /// The listener, as static resource; an LDS file also wants its `@type`.
    pub fn render(&self) -> Value {
        let mut wasm = json!({
            "name": "eldr",
            "root_id": self.root_id,
            "failure_policy": "FAIL_RELOAD",
            "allow_on_headers_stop_iteration": true,
            "vm_config": {
                "vm_id": "eldr",
                "runtime": "envoy.wasm.runtime.v8",
                "code": { "local": { "filename": self.module } }
            },
            "configuration": {
                "@type": "type.googleapis.com/google.protobuf.StringValue",
                "value": self.filter.to_string()
            }
        });
        if self.without_stop_iteration {
            wasm["allow_on_headers_stop_iteration"] = json!(null);
        }
        let log_format: Value = LOG_FORMAT
            .iter()
            .map(|&(k, v)| (k.to_owned(), Value::from(v)))
            .collect();
        let mut listener = json!({
            "name": self.name,
            "address": { "socket_address": { "address": "127.0.0.1", "port_value": 0 } },
            "per_connection_buffer_limit_bytes": self.buffer_limit,
            "filter_chains": [{ "filters": [{
                "name": "envoy.filters.network.http_connection_manager",
                "typed_config": {
                    "@type": "type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
                    "stat_prefix": self.name,
                    "max_request_headers_kb": 1024,
                    "upgrade_configs": [{ "upgrade_type": "websocket" }],
                    "normalize_path": true,
                    "merge_slashes": true,
                    "path_with_escaped_slashes_action": "UNESCAPE_AND_FORWARD",
                    "route_config": routes(),
                    "access_log": [{
                        "name": "envoy.access_loggers.file",
                        "typed_config": {
                            "@type": "type.googleapis.com/envoy.extensions.access_loggers.file.v3.FileAccessLog",
                            "path": self.access_log,
                            "log_format": { "json_format": log_format }
                        }
                    }],
                    "http_filters": [
                        {
                            "name": "envoy.filters.http.wasm",
                            "typed_config": {
                                "@type": "type.googleapis.com/envoy.extensions.filters.http.wasm.v3.Wasm",
                                "config": wasm
                            }
                        },
                        {
                            "name": "envoy.filters.http.router",
                            "typed_config": {
                                "@type": "type.googleapis.com/envoy.extensions.filters.http.router.v3.Router"
                            }
                        }
                    ]
                }
            }] }]
        });
        if self.filter["mode"] == "relay" {
            // Both legs keep the id that their coordinator gave them.
            let manager = &mut listener["filter_chains"][0]["filters"][0]["typed_config"];
            manager["preserve_external_request_id"] = json!(true);
            manager["request_id_extension"] = json!({ "typed_config": {
                "@type": "type.googleapis.com/envoy.extensions.request_id.uuid.v3.UuidRequestIdConfig",
                "pack_trace_reason": false
            } });
        }
        listener
    }
}

/// Two routes: what the filter routed, and everything else.
fn routes() -> Value {
    let header = "x-eldr-decode-cluster";
    json!({
        "name": "all",
        "virtual_hosts": [{ "name": "all", "domains": ["*"], "routes": [
            {
                "match": { "prefix": "/", "headers": [{ "name": header, "present_match": true }] },
                "route": { "cluster_header": header, "timeout": "0s" }
            },
            { "match": { "prefix": "/" }, "route": { "cluster": "default", "timeout": "0s" } }
        ] }]
    })
}

/// A cluster with one endpoint.
pub fn cluster(name: &str, address: SocketAddr) -> Value {
    json!({
        "name": name,
        "type": "STATIC",
        "connect_timeout": "5s",
        "load_assignment": { "cluster_name": name, "endpoints": [{ "lb_endpoints": [{ "endpoint": {
            "address": { "socket_address": {
                "address": address.ip().to_string(), "port_value": address.port()
            } }
        } }] }] },
        "typed_extension_protocol_options": {
            "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
                "@type": "type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions",
                "common_http_protocol_options": { "max_response_headers_kb": 2048 },
                "explicit_http_config": { "http_protocol_options": {} }
            }
        }
    })
}

/// A cluster whose endpoint is chosen by header; an address that it does not have takes the next in turn.
pub fn pool(addresses: &[SocketAddr]) -> Value {
    let mut cluster = cluster("pool", SocketAddr::from(([127, 0, 0, 1], 1)));
    cluster["load_assignment"]["endpoints"][0]["lb_endpoints"] = addresses
        .iter()
        .map(|address| {
            json!({ "endpoint": { "address": { "socket_address": {
                "address": address.ip().to_string(), "port_value": address.port()
            } } } })
        })
        .collect();
    cluster["load_balancing_policy"] = eldr_examples::gateway::by_endpoint();
    cluster
}

/// A bootstrap with these clusters and static listeners.
pub fn bootstrap(clusters: &[Value], listeners: &[Value]) -> Value {
    json!({
        "static_resources": { "clusters": clusters, "listeners": listeners },
        "stats_flush_on_admin": true
    })
}

/// A bootstrap with these clusters, whose listeners come from a file that may be replaced at run time.
pub fn bootstrap_with_lds(clusters: &[Value], lds_file: &Path) -> Value {
    json!({
        "node": { "id": "test", "cluster": "test" },
        "static_resources": { "clusters": clusters },
        "dynamic_resources": { "lds_config": {
            "resource_api_version": "V3",
            "path_config_source": { "path": lds_file }
        } },
        "stats_flush_on_admin": true
    })
}
