//! Envoy metrics by name, defined when first used.

use std::collections::HashMap;

use proxy_wasm::hostcalls;
use proxy_wasm::types::MetricType;

/// Metric ids of this VM.
#[derive(Default)]
pub(super) struct Metrics {
    ids: HashMap<String, u32>,
}

impl Metrics {
    /// Adds one to a counter.
    pub(super) fn count(&mut self, name: &str) {
        self.add(name, 1);
    }

    /// Adds so many to a counter.
    pub(super) fn add(&mut self, name: &str, more: u64) {
        if let Some(id) = self.id(MetricType::Counter, name) {
            let _ = hostcalls::increment_metric(id, i64::try_from(more).unwrap_or(i64::MAX));
        }
    }

    /// Sets a gauge.
    pub(super) fn set(&mut self, name: &str, value: u64) {
        if let Some(id) = self.id(MetricType::Gauge, name) {
            let _ = hostcalls::record_metric(id, value);
        }
    }

    /// Adds a value to a histogram.
    pub(super) fn record(&mut self, name: &str, value: u64) {
        if let Some(id) = self.id(MetricType::Histogram, name) {
            let _ = hostcalls::record_metric(id, value);
        }
    }

    fn id(&mut self, kind: MetricType, name: &str) -> Option<u32> {
        if let Some(&id) = self.ids.get(name) {
            return Some(id);
        }
        let id = hostcalls::define_metric(kind, name).ok()?;
        self.ids.insert(name.to_owned(), id);
        Some(id)
    }
}
