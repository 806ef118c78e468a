//! The simulator: what a policy would do on a cluster, without one.
//!
//! Discrete events in the order of a request's life. It **arrives** ([`arrivals`]), waits first come, first served for one of the
//! **prefill** workers, and is **decided** by a gateway when its prefill ends, by the code that gateways run
//! ([`eldr_core::route`]) and from what that gateway sees ([`views`]). After the transfer of its KV blocks it **decodes** in the
//! continuous batch of its worker, whose steps take what [`eldr_core::engine`] says: the model that the mock engine runs in real
//! time. Every policy meets the same arrivals, lengths and random bits, so that differences are the policies' own.
//!
//! What it leaves out: chunked prefill, preemption, prefix caches, and whatever else the linear step model does not know.
//! Distinct experts are counted where the trace recorded them token by token, else expected from counts.
//!
//! The same inputs and seed give the same results, whatever the number of threads.

pub mod arrivals;
pub mod changes;
pub mod compare;
mod events;
mod follow;
pub mod hindsight;
pub mod lengths;
pub mod measure;
pub mod mix;
pub mod placement;
pub mod policy;
mod running;
mod spec;
pub mod usage;
pub mod views;
pub mod workload;

use std::sync::Arc;
use std::time::Duration;

use eldr_core::engine::{Ranks, Speculation, StepModel};
use rand::SeedableRng as _;
use rand_chacha::ChaCha8Rng;

pub use arrivals::{Arrival, Plan, Times};
pub use changes::Change;
pub use compare::{Comparison, compare};
pub use events::{Served, run, run_served};
pub use follow::Refit;
pub use hindsight::Goal;
pub use lengths::Lengths;
pub use measure::{Outcome, Spread};
pub use mix::Mix;
pub use policy::{Ask, Known, PolicySpec, Router, Seat, Steps};
pub use usage::Usage;
pub use views::LoadUnit;
pub use workload::{Replay, Workload};

/// What requests are served by.
#[derive(Clone, Debug, PartialEq)]
pub struct Cluster {
    /// Prefill workers; with none, prefill takes no time.
    pub prefill_workers: usize,
    /// Time of a prefill per token of the prompt.
    pub prefill_ms_per_token: f64,
    /// Time from the decision until the decode worker has the KV blocks.
    pub transfer_ms: f64,
    /// Decode workers, at least 1.
    pub decode_workers: usize,
    /// Most requests that a decode worker runs at a time.
    pub batch_max: usize,
    /// Tokens that a decode worker's KV cache holds; `None` without a limit.
    pub kv_tokens_max: Option<u64>,
    /// Time of a decode step.
    pub step: StepModel,
    /// What policies take that time for; `None`: they know it.
    pub assumed: Option<StepModel>,
    /// Expert parallelism of the decode workers: none, one placement for all, or one for each.
    pub ranks: Vec<Arc<Ranks>>,
    /// Tokens of each request that a decode step verifies.
    pub speculation: Speculation,
    /// What gateways count loads in.
    pub load_unit: LoadUnit,
    /// Gateways that decide, at least 1; requests reach them at random.
    pub gateways: usize,
    /// How often gateways learn each other's requests in flight: zero at once, `None` never.
    pub share: Option<Duration>,
    /// Whether they then tell each other what runs where as well, for policies that look at it; else only how much.
    pub share_batches: bool,
    /// Decode workers that fail, drain or come back.
    pub changes: Vec<Change>,
    /// Requests that arrive before this are served and not measured.
    pub warm_up: Duration,
    /// Decode steps that begin later are not measured: arrivals end, and batches empty.
    pub duration: Duration,
    /// When phases of the run begin, ascending, that are measured on their own as well: requests by when they arrive.
    pub phases: Vec<Duration>,
}

impl Default for Cluster {
    /// The setting of the ELDR paper (arXiv 2607.00466): 8 prefill and 16 decode workers, one gateway, 120 s.
    fn default() -> Self {
        Cluster {
            prefill_workers: 8,
            prefill_ms_per_token: 0.035,
            transfer_ms: 2.0,
            decode_workers: 16,
            batch_max: 256,
            kv_tokens_max: None,
            step: StepModel::QWEN3_30B_A3B,
            assumed: None,
            ranks: Vec::new(),
            speculation: Speculation::NONE,
            load_unit: LoadUnit::Requests,
            gateways: 1,
            share: Some(Duration::ZERO),
            share_batches: false,
            changes: Vec::new(),
            warm_up: Duration::ZERO,
            duration: Duration::from_secs(120),
            phases: Vec::new(),
        }
    }
}

/// What is drawn, each from a stream of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stream {
    Arrivals,
    Placebo,
    Hindsight,
}

fn rng(seed: u64, stream: Stream) -> ChaCha8Rng {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    rng.set_stream(match stream {
        Stream::Arrivals => 0,
        Stream::Placebo => 1,
        Stream::Hindsight => 2,
    });
    rng
}

#[cfg(test)]
mod tests;
