//! What a worker counts about itself.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use serde::Serialize;

/// Resolution of recorded lateness.
const BUCKET: Duration = Duration::from_micros(10);
/// Lateness of 100 ms and more shares the last bucket.
const BUCKETS: usize = 10_000;

/// What one worker did with KV blocks since it started, or since its statistics were last restarted.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct KvReport {
    /// Prompt tokens that this worker found in its prefix cache.
    pub cached_tokens: u64,
    /// Requests whose blocks this worker holds now for a decode worker to fetch.
    pub held_requests: u64,
    /// Their blocks.
    pub held_blocks: u64,
    /// Requests whose blocks this worker held until their lease ran out: nobody fetched or released them.
    pub stranded_requests: u64,
    /// Their blocks.
    pub stranded_blocks: u64,
    /// Decode requests that came to this worker after the lease of their blocks had run out.
    pub late_decodes: u64,
    /// Releases through this worker that freed blocks.
    pub releases: u64,
    /// Releases of blocks that were fetched, released or stranded before.
    pub repeated_releases: u64,
    /// Releases of params that nobody handed out.
    pub unknown_releases: u64,
    /// Requests whose `kv_transfer_params` still had the `eldr_sig` that is for the gateway alone.
    pub leaked_signatures: u64,
}

/// What one worker did since it started, or since its statistics were last restarted.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct WorkerReport {
    /// `prefill-0`, `decode-0` and so on.
    pub name: String,
    /// Where it listens.
    pub address: SocketAddr,
    /// Generation requests with a valid body, prefill legs included.
    pub requests: u64,
    /// Prompt tokens that this worker prefilled itself, cached ones included.
    pub prefill_tokens: u64,
    /// Tokens decoded.
    pub tokens: u64,
    /// Decode steps.
    pub steps: u64,
    /// Distinct experts per layer, mean over layers and steps.
    pub mean_experts: f64,
    /// Requests per batch, mean over steps.
    pub mean_batch: f64,
    /// How much later than planned a step ended, median over steps, milliseconds.
    pub lateness_p50_ms: f64,
    /// The same, 99th percentile.
    pub lateness_p99_ms: f64,
    /// Requests whose client went away before their last token.
    pub disconnects: u64,
    /// Requests whose `kv_transfer_params` were not those handed out for them.
    pub mixed_up: u64,
    /// Its KV blocks.
    pub kv: KvReport,
    /// Requests being prefilled or decoded now.
    pub running: u64,
    /// Requests queued now.
    pub waiting: u64,
}

/// Gauges: read by `/metrics` without a lock, never reset.
#[derive(Debug, Default)]
pub(crate) struct Gauges {
    /// Requests in the decode batch, and those queued behind it.
    pub(crate) decoding: AtomicU64,
    pub(crate) decode_waiting: AtomicU64,
    /// Requests in prefill (0 or 1), and those queued behind it.
    pub(crate) prefilling: AtomicU64,
    pub(crate) prefill_waiting: AtomicU64,
    /// Tokens of the decode batch's sequences.
    pub(crate) kv_tokens: AtomicU64,
}

impl Gauges {
    pub(crate) fn running(&self) -> u64 {
        self.decoding.load(Ordering::Relaxed) + self.prefilling.load(Ordering::Relaxed)
    }

    pub(crate) fn waiting(&self) -> u64 {
        self.decode_waiting.load(Ordering::Relaxed) + self.prefill_waiting.load(Ordering::Relaxed)
    }
}

/// Adds one to a gauge for as long as it lives, whatever way the work ends.
#[derive(Debug)]
pub(crate) struct Counted<'a>(&'a AtomicU64);

impl<'a> Counted<'a> {
    pub(crate) fn new(gauge: &'a AtomicU64) -> Self {
        gauge.fetch_add(1, Ordering::Relaxed);
        Counted(gauge)
    }
}

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Counters that a restart sets to zero.
#[derive(Clone, Debug)]
pub(crate) struct Counters {
    pub(crate) requests: u64,
    pub(crate) prefill_tokens: u64,
    pub(crate) tokens: u64,
    pub(crate) steps: u64,
    pub(crate) experts: f64,
    pub(crate) disconnects: u64,
    pub(crate) mixed_up: u64,
    /// Without what the registry knows.
    pub(crate) kv: KvReport,
    lateness: Vec<u32>,
}

impl Default for Counters {
    fn default() -> Self {
        Counters {
            requests: 0,
            prefill_tokens: 0,
            tokens: 0,
            steps: 0,
            experts: 0.0,
            disconnects: 0,
            mixed_up: 0,
            kv: KvReport::default(),
            lateness: vec![0; BUCKETS],
        }
    }
}

impl Counters {
    /// A step that decoded `batch` tokens ended `late` after its time.
    pub(crate) fn step(&mut self, batch: usize, mean_experts: f64, late: Duration) {
        self.steps += 1;
        self.tokens += batch as u64;
        self.experts += mean_experts;
        let bucket = (late.as_nanos() / BUCKET.as_nanos()).min(BUCKETS as u128 - 1);
        self.lateness[bucket as usize] += 1;
    }

    pub(crate) fn report(&self, name: &str, address: SocketAddr, gauges: &Gauges) -> WorkerReport {
        let steps = self.steps.max(1) as f64;
        WorkerReport {
            name: name.to_owned(),
            address,
            requests: self.requests,
            prefill_tokens: self.prefill_tokens,
            tokens: self.tokens,
            steps: self.steps,
            mean_experts: self.experts / steps,
            mean_batch: self.tokens as f64 / steps,
            lateness_p50_ms: self.lateness_ms(0.50),
            lateness_p99_ms: self.lateness_ms(0.99),
            disconnects: self.disconnects,
            mixed_up: self.mixed_up,
            kv: self.kv.clone(),
            running: gauges.running(),
            waiting: gauges.waiting(),
        }
    }

    /// The lateness that a share `quantile` of the steps did not exceed; 0 without steps.
    fn lateness_ms(&self, quantile: f64) -> f64 {
        let rank = (self.steps as f64 * quantile).ceil() as u64;
        let mut seen = 0;
        for (bucket, &count) in self.lateness.iter().enumerate() {
            seen += u64::from(count);
            if seen >= rank.max(1) {
                return (bucket as u128 * BUCKET.as_micros()) as f64 / 1e3;
            }
        }
        0.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_has_means_over_steps_and_percentiles_of_lateness() {
        let mut counters = Counters::default();
        for step in 0..100 {
            let late = if step < 98 { 50 } else { 7_000 };
            counters.step(
                4 + step % 2,
                10.0 + (step % 2) as f64,
                Duration::from_micros(late),
            );
        }
        let report = counters.report("decode-0", ([127, 0, 0, 1], 1).into(), &Gauges::default());
        assert_eq!((report.steps, report.tokens), (100, 450));
        assert_eq!((report.mean_batch, report.mean_experts), (4.5, 10.5));
        assert!((report.lateness_p50_ms - 0.05).abs() < 1e-9);
        assert!((report.lateness_p99_ms - 7.0).abs() < 1e-9);
    }

    #[test]
    fn an_idle_worker_reports_zeros() {
        let report =
            Counters::default().report("decode-0", ([127, 0, 0, 1], 1).into(), &Gauges::default());
        assert_eq!(
            (
                report.mean_batch,
                report.mean_experts,
                report.lateness_p99_ms
            ),
            (0.0, 0.0, 0.0)
        );
    }

    #[test]
    fn a_gauge_returns_to_zero_whatever_way_the_work_ends() {
        let gauge = AtomicU64::new(0);
        {
            let _counted = Counted::new(&gauge);
            assert_eq!(gauge.load(Ordering::Relaxed), 1);
        }
        assert_eq!(gauge.load(Ordering::Relaxed), 0);
    }
}
