//! What workers report of themselves, so that a gateway knows of load that it did not send: other gateways' requests.
//!
//! One thread polls each worker (see [`poll`](crate::poll)) and keeps in shared data what came of it; all threads read that as
//! often as each other's counts, so that none decides by an older report than another. An engine's gauges lag behind, so our own
//! counts come first:
//!
//! ```text
//! load = own in flight, live + max(0, reported running + waiting − own in flight when it was reported)
//! ```
//!
//! A report that is too old counts for nothing: then the gateway goes by its own counts alone.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::exposition::{self, Gauges};
use crate::shared::Shared;

const KEY: &str = "eldr.reports";

/// Attempts to write against other threads. Each loses only to one that wrote, so more than threads is enough.
const MAX_ATTEMPTS: usize = crate::load::MAX_SLOTS;

/// Reports older than this many times their longest age are taken out when another is written.
const FORGET_AFTER: u64 = 10;

/// A poll that takes longer has failed, milliseconds; less where polls are more frequent.
const MAX_POLL_MS: u64 = 5_000;

/// Whether and how workers are asked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reporting {
    /// From one poll to the next, milliseconds; 0 asks nobody.
    pub interval_ms: u64,
    /// Path of the metrics.
    pub path: String,
    /// An older report counts for nothing, milliseconds.
    pub stale_ms: u64,
}

impl Reporting {
    /// Deadline of a poll.
    pub fn timeout_ms(&self) -> u64 {
        self.interval_ms.min(MAX_POLL_MS)
    }

    /// Headers of a poll.
    pub fn request<'a>(&'a self, cluster: &'a str) -> [(&'a str, &'a str); 4] {
        [
            (":method", "GET"),
            (":path", &self.path),
            (":authority", cluster),
            ("accept", "text/plain"),
        ]
    }
}

/// Name of the lease on polling a worker: see [`is_due`](crate::poll::is_due).
pub fn lease(cluster: &str) -> String {
    format!("load.{cluster}")
}

/// What a worker said, as far as it matters.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// When, wall clock, milliseconds.
    at_ms: u64,
    /// Requests that it has and this gateway did not send.
    pub elsewhere: u32,
    /// Part of its KV cache that is in use, 0 to 1.
    pub kv_usage: Option<f64>,
}

impl Report {
    /// Compares what a worker reports with what this gateway, all threads of it, had in flight there.
    ///
    /// `own` is the most that it had between question and answer: a request that began or ended in between must
    /// not be taken for somebody else's.
    pub fn new(gauges: Gauges, own: u32, now_ms: u64) -> Self {
        Self {
            at_ms: now_ms,
            elsewhere: gauges.requests.saturating_sub(own),
            kv_usage: gauges.kv_usage,
        }
    }

    /// A clock that was set back makes a report of the future; it is as suspicious as an old one.
    fn is_fresh(&self, now_ms: u64, stale_ms: u64) -> bool {
        now_ms.abs_diff(self.at_ms) <= stale_ms
    }
}

/// Reads a worker's answer; no status stands for one that broke off or was too large for Envoy.
///
/// # Errors
/// Why nothing can be learned from it.
pub fn judge(status: Option<u32>, body: &[u8]) -> Result<Gauges, String> {
    match status {
        Some(200) => exposition::read(body).map_err(|why| why.to_string()),
        Some(504) => Err("no answer in time (504)".into()),
        Some(status) => Err(format!("the worker answered {status}, not 200")),
        None => Err("the worker could not be reached, broke off, or sent too much".into()),
    }
}

/// One thread's view of all reports, as of its last look.
#[derive(Debug, Default)]
pub struct Reports {
    known: BTreeMap<String, Report>,
    version: Option<u32>,
    read_ms: Option<u64>,
}

impl Reports {
    /// Looks at what there is, if the last look is too old.
    pub fn refresh(&mut self, shared: &impl Shared, now_ms: u64, refresh_ms: u64) {
        let fresh = |read: u64| now_ms.abs_diff(read) < refresh_ms;
        if !self.read_ms.is_some_and(fresh) {
            self.read_ms = Some(now_ms);
            self.read(shared);
        }
    }

    fn read(&mut self, shared: &impl Shared) {
        let (value, version) = shared.get(KEY);
        if version.is_some() && version == self.version {
            return; // what is known is still so
        }
        self.version = version;
        let known = value.and_then(|bytes| serde_json::from_slice(&bytes).ok());
        self.known = known.unwrap_or_default();
    }

    /// What is known of a worker now.
    pub fn of(&self, cluster: &str, now_ms: u64, stale_ms: u64) -> Option<&Report> {
        let report = self.known.get(cluster)?;
        report.is_fresh(now_ms, stale_ms).then_some(report)
    }

    /// Tells all threads.
    pub fn publish(&mut self, shared: &impl Shared, cluster: &str, report: Report, stale_ms: u64) {
        for _ in 0..MAX_ATTEMPTS {
            self.read(shared);
            if self.version.is_none() {
                shared.create(KEY);
                self.read(shared);
            }
            let mut changed = self.known.clone();
            let forget = stale_ms.saturating_mul(FORGET_AFTER);
            changed.retain(|_, old| old.is_fresh(report.at_ms, forget));
            changed.insert(cluster.to_owned(), report);
            let bytes = serde_json::to_vec(&changed).unwrap_or_default();
            if shared.set(KEY, &bytes, self.version) {
                return self.read(shared);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::shared::memory::Memory;

    fn report(requests: u32, own: u32, at_ms: u64) -> Report {
        let gauges = Gauges {
            requests,
            kv_usage: Some(0.5),
        };
        Report::new(gauges, own, at_ms)
    }

    #[test]
    fn all_threads_see_a_report_until_it_is_stale() {
        let shared = Memory::default();
        let (mut a, mut b) = (Reports::default(), Reports::default());
        a.publish(&shared, "d", report(9, 4, 10_000), 5_000);
        b.publish(&shared, "e", report(3, 4, 10_100), 5_000);
        a.refresh(&shared, 10_100, 0);
        for reports in [&a, &b] {
            let elsewhere = |name, now| Some(reports.of(name, now, 5_000)?.elsewhere);
            assert_eq!(elsewhere("d", 15_000), Some(5));
            assert_eq!(elsewhere("d", 15_001), None, "stale");
            assert_eq!(elsewhere("e", 15_001), Some(0), "never below 0");
            assert_eq!(elsewhere("e", 5_099), None, "of the future");
            assert_eq!(elsewhere("f", 10_000), None);
        }
    }

    #[test]
    fn a_look_that_is_young_enough_serves_again() {
        let shared = Memory::default();
        let (mut a, mut b) = (Reports::default(), Reports::default());
        b.refresh(&shared, 1_000, 5);
        a.publish(&shared, "d", report(3, 0, 1_000), 5_000);
        let mut seen_at = |now_ms| {
            b.refresh(&shared, now_ms, 5);
            b.of("d", now_ms, 5_000).is_some()
        };
        assert_eq!([1_004, 1_005].map(&mut seen_at), [false, true]);
    }

    #[test]
    fn rubbish_is_no_report_and_old_ones_are_forgotten() {
        let shared = Memory::default();
        shared.set(KEY, b"\xff[", None);
        let mut reports = Reports::default();
        reports.refresh(&shared, 0, 0);
        assert!(reports.of("d", 0, u64::MAX).is_none());
        reports.publish(&shared, "d", report(1, 0, 1_000), 5_000);
        reports.publish(&shared, "e", report(1, 0, 51_001), 5_000);
        assert!(reports.of("d", 1_000, 5_000).is_none());
        assert!(reports.of("e", 51_001, 5_000).is_some());
    }

    #[test]
    fn answers_are_read() {
        let good = b"vllm:num_requests_running 2\nvllm:num_requests_waiting 1\n";
        assert_eq!(judge(Some(200), good).unwrap().requests, 3);
        for (status, body, word) in [
            (None, &good[..], "broke off"),
            (Some(504), good, "504"),
            (Some(503), good, "503"),
            (Some(200), b"x", "no gauge"),
        ] {
            assert!(
                judge(status, body).unwrap_err().contains(word),
                "{status:?}"
            );
        }
    }

    proptest! {
        /// Two gateways whose reports come at any time, with gauges as old as they like: what each thinks of a
        /// worker is never below its own counts, and is the truth when nothing lags.
        #[test]
        fn load_is_own_plus_what_others_have(own in 0u32..1_000, others in 0u32..1_000, lag in 0u32..1_000) {
            let exact = report(own + others, own, 1).elsewhere;
            prop_assert_eq!(own + exact, own + others);
            let lagging = report((own + others).saturating_sub(lag), own, 1).elsewhere;
            prop_assert!(lagging <= exact);
        }
    }
}
