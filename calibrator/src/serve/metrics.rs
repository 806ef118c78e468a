//! What `eldr serve` counts, for Prometheus.

use std::sync::atomic::AtomicU64;

use prometheus_client::encoding::{EncodeLabelSet, text};
use prometheus_client::metrics::{counter::Counter, family::Family, gauge::Gauge};
use prometheus_client::registry::Registry;

/// The media type of [`Metrics::text`].
pub(super) const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Request {
    path: String,
    status: u16,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Blob {
    path: String,
}

/// The counters, and the registry that shows them.
#[derive(Debug)]
pub(super) struct Metrics {
    registry: Registry,
    requests: Family<Request, Counter>,
    revision: Family<Blob, Gauge<u64, AtomicU64>>,
    reloads: Family<Blob, Counter>,
    refused: Family<Blob, Counter>,
}

impl Metrics {
    pub(super) fn new() -> Self {
        let mut metrics = Metrics {
            registry: Registry::with_prefix("eldr_serve"),
            requests: Family::default(),
            revision: Family::default(),
            reloads: Family::default(),
            refused: Family::default(),
        };
        let registry = &mut metrics.registry;
        let help = "Requests answered";
        registry.register("requests", help, metrics.requests.clone());
        let help = "Revision of the blob that is served";
        registry.register("blob_revision", help, metrics.revision.clone());
        let help = "Changes of the file that were taken over";
        registry.register("reloads", help, metrics.reloads.clone());
        let help = "Changes of the file that were refused because it is no valid blob";
        registry.register("reloads_refused", help, metrics.refused.clone());
        metrics
    }

    /// A request to `path` was answered. The paths must be few: each is kept forever.
    pub(super) fn answered(&self, path: &str, status: u16) {
        let path = path.to_owned();
        let request = Request { path, status };
        self.requests.get_or_create(&request).inc();
    }

    /// The blob at `path` begins to be served.
    pub(super) fn serves(&self, path: &str, revision: u64) {
        self.revision.get_or_create(&blob(path)).set(revision);
        // A counter that is there from the start lets an alert see its first step.
        self.reloads.get_or_create(&blob(path)).inc_by(0);
        self.refused.get_or_create(&blob(path)).inc_by(0);
    }

    /// The blob at `path` was replaced.
    pub(super) fn reloaded(&self, path: &str, revision: u64) {
        self.revision.get_or_create(&blob(path)).set(revision);
        self.reloads.get_or_create(&blob(path)).inc();
    }

    /// A change of the blob at `path` was refused.
    pub(super) fn refused(&self, path: &str) {
        self.refused.get_or_create(&blob(path)).inc();
    }

    /// All of it in the text format.
    pub(super) fn text(&self) -> String {
        let mut text = String::new();
        // Writing to a string cannot fail.
        let _ = text::encode(&mut text, &self.registry);
        text
    }
}

fn blob(path: &str) -> Blob {
    Blob {
        path: path.to_owned(),
    }
}
