//! What `eldr serve` counts, for Prometheus.

use std::sync::atomic::AtomicU64;

use prometheus_client::encoding::{EncodeLabelSet, text};
use prometheus_client::metrics::{counter::Counter, family::Family, gauge::Gauge};
use prometheus_client::registry::Registry;

use crate::refit::Drift;

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
    online: OnlineMetrics,
}

/// Of blobs that follow their traffic.
#[derive(Debug, Default)]
struct OnlineMetrics {
    signatures: Family<Blob, Counter>,
    signatures_refused: Family<Blob, Counter>,
    batches_dropped: Family<Blob, Counter>,
    window: Family<Blob, Gauge>,
    moved: Family<Blob, Gauge<f64, AtomicU64>>,
    similarity_lost: Family<Blob, Gauge<f64, AtomicU64>>,
    refits: Family<Blob, Counter>,
    refits_failed: Family<Blob, Counter>,
}

impl Metrics {
    pub(super) fn new() -> Self {
        let mut metrics = Metrics {
            registry: Registry::with_prefix("eldr_serve"),
            requests: Family::default(),
            revision: Family::default(),
            reloads: Family::default(),
            refused: Family::default(),
            online: OnlineMetrics::default(),
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
        let online = &metrics.online;
        let help = "Signatures of the gateways' samples that went into the window";
        registry.register("signatures", help, online.signatures.clone());
        let help = "Signatures that are malformed or of another model";
        registry.register(
            "signatures_refused",
            help,
            online.signatures_refused.clone(),
        );
        let help = "Batches of signatures that found no room";
        registry.register("batches_dropped", help, online.batches_dropped.clone());
        let help = "Requests in the window";
        registry.register("window_requests", help, online.window.clone());
        let help = "Share of the window's requests in other regions than when the blob was fitted";
        registry.register("drift_moved", help, online.moved.clone());
        let help =
            "How much less similar the window's median request is to its region than in the fit";
        registry.register(
            "drift_similarity_lost",
            help,
            online.similarity_lost.clone(),
        );
        let help = "Refits that were published";
        registry.register("refits", help, online.refits.clone());
        let help = "Refits that failed";
        registry.register("refits_failed", help, online.refits_failed.clone());
        metrics
    }

    /// Signatures came for the blob at `path`.
    pub(super) fn took(&self, path: &str, kept: u64, refused: u64) {
        let online = &self.online;
        online.signatures.get_or_create(&blob(path)).inc_by(kept);
        online
            .signatures_refused
            .get_or_create(&blob(path))
            .inc_by(refused);
    }

    /// A batch for the blob at `path` found no room.
    pub(super) fn dropped(&self, path: &str) {
        self.online.batches_dropped.get_or_create(&blob(path)).inc();
    }

    /// The drift of the blob at `path` was measured.
    pub(super) fn drifted(&self, path: &str, drift: &Drift) {
        let online = &self.online;
        online
            .window
            .get_or_create(&blob(path))
            .set(drift.requests as i64);
        online.moved.get_or_create(&blob(path)).set(drift.moved);
        online
            .similarity_lost
            .get_or_create(&blob(path))
            .set(drift.similarity_lost);
    }

    /// A refit of the blob at `path` was published.
    pub(super) fn refitted(&self, path: &str) {
        self.online.refits.get_or_create(&blob(path)).inc();
    }

    /// A refit of the blob at `path` failed.
    pub(super) fn refit_failed(&self, path: &str) {
        self.online.refits_failed.get_or_create(&blob(path)).inc();
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
