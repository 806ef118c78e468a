//! The demo: the same arrivals through a real Envoy under several policies.
//!
//! For each workload a blob is fitted to the calibration split and the evaluation split is sent.
//! Each policy gets a fresh mock engine and a fresh Envoy, so that none inherits what another left.
//! What happens before the batches have filled is not measured.

mod report;
mod stack;
mod workload;

use std::time::Duration;

use anyhow::ensure;
use eldr_core::Policy;
use tokio::time::Instant;

use crate::load::{Arrival, LoadConfig, Summary, arrivals, run};
use crate::mock::WorkerReport;

pub use report::{Report, Row};
pub use stack::{MODEL, Stack, Tools};
pub use workload::{WORKLOADS, Workload};

/// What is compared, the baseline first.
pub const POLICIES: [Policy; 6] = [
    Policy::RoundRobin,
    Policy::LeastLoaded,
    Policy::P2c,
    Policy::Band,
    Policy::Marginal,
    Policy::Hybrid,
];

/// A request that takes longer has failed; the longest takes about two seconds.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(30);
/// Far more than are ever in flight when nothing is wrong.
const IN_FLIGHT_MAX: usize = 1_000;

/// How much is sent, and to how many.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Decode workers.
    pub workers: usize,
    /// Prefill workers.
    pub prefill_workers: usize,
    /// Arrivals per second, all workers together.
    pub rate_per_s: f64,
    /// How long requests arrive before measuring begins: the batches fill.
    pub warm_up: Duration,
    /// How long requests arrive that are measured.
    pub measured: Duration,
    /// Seed of arrivals, order of requests and fit.
    pub seed: u64,
}

impl Settings {
    /// Checks what a user may have got wrong.
    pub fn check(&self) -> anyhow::Result<()> {
        ensure!(
            (1..=64).contains(&self.workers),
            "{} workers\nhint: 1 to 64 decode workers are possible, 4 to 6 sensible on two cores",
            self.workers,
        );
        ensure!(
            self.rate_per_s > 0.0 && self.rate_per_s <= 10_000.0,
            "{} requests per second\nhint: choose a rate above 0 and up to 10000; 8.5 per worker make batches of ten",
            self.rate_per_s,
        );
        Ok(())
    }

    /// The arrivals of every run with `workload`: equal for all policies.
    pub fn arrivals(&self, workload: &Workload) -> Vec<Arrival> {
        let duration = self.warm_up + self.measured;
        arrivals(
            workload.requests.len(),
            self.rate_per_s,
            duration,
            self.seed,
        )
    }
}

/// Sends the arrivals of `workload` to `stack` and measures; `progress` is told each time how many
/// answers are complete.
///
/// # Errors
/// If a load generator's task dies or Envoy's statistics cannot be read. Requests that fail are in
/// the row.
pub async fn measure(
    settings: &Settings,
    workload: &Workload,
    stack: &Stack,
    progress: impl FnMut(usize),
) -> anyhow::Result<Row> {
    let load = LoadConfig {
        url: stack.url().to_owned(),
        model: MODEL.into(),
        in_flight_max: IN_FLIGHT_MAX,
        timeout: REQUEST_TIMEOUT,
    };
    let arrivals = settings.arrivals(workload);
    let start = Instant::now();
    let steps = async {
        tokio::time::sleep_until(start + settings.warm_up).await;
        stack.engine().restart_statistics();
        // Before the last answers: draining batches are as small as filling ones.
        tokio::time::sleep_until(start + settings.warm_up + settings.measured).await;
        stack.engine().decode_reports()
    };
    let (samples, workers) =
        tokio::join!(run(&load, &workload.requests, &arrivals, progress), steps);
    let samples = samples?;
    let measured = samples
        .iter()
        .filter(|sample| sample.at >= settings.warm_up);
    let mut failures: Vec<String> = samples
        .iter()
        .filter_map(|sample| Some(format!("{}: {}", sample.id, sample.failure.as_ref()?)))
        .collect();
    failures.truncate(report::FAILURES_SHOWN);
    let failed = samples
        .iter()
        .filter(|sample| sample.failure.is_some())
        .count();
    Ok(Row {
        workload: workload.name.to_owned(),
        policy: stack.policy(),
        requests: samples.len(),
        failures: failed,
        failures_shown: failures,
        summary: Summary::new(measured),
        steps: report::Steps::new(&workers),
        requests_per_worker: workers
            .iter()
            .map(|worker: &WorkerReport| worker.requests)
            .collect(),
        reasons: stack.reasons().await?,
    })
}
