//! Names of what is counted. Envoy prints them with the prefix `wasmcustom.`; the shipped configuration turns
//! worker, outcome and reason into tags.

use eldr_core::Outcome;
use eldr_core::decide::{Policy, Reason};

/// Counter: requests that ended so.
pub fn outcome(outcome: Outcome) -> String {
    format!("eldr.outcome.{}", outcome.name())
}

/// Counter: decisions that rested on this.
pub fn reason(reason: Reason) -> String {
    format!("eldr.reason.{}", reason.name())
}

/// Counter: requests sent to a decode cluster.
pub fn routed(cluster: &str) -> String {
    format!("eldr.worker.{cluster}.routed")
}

/// Gauge: decode requests or prefill legs in flight to a cluster, from all threads, as of the last tick.
pub fn in_flight(cluster: &str) -> String {
    format!("eldr.worker.{cluster}.in_flight")
}

/// Gauge: tokens of the requests in flight to a decode cluster, where a model's loads are compared in them.
pub fn kv_tokens(cluster: &str) -> String {
    format!("eldr.worker.{cluster}.kv_tokens")
}

/// Gauge: requests in flight to a decode cluster whose experts are known, from all threads, where policies look at running batches.
pub fn known(cluster: &str) -> String {
    format!("eldr.worker.{cluster}.known")
}

/// Gauge: requests that a decode cluster reports and this gateway did not send; 0 where nothing fresh is known.
pub fn elsewhere(cluster: &str) -> String {
    format!("eldr.worker.{cluster}.elsewhere")
}

/// Counter: times that a decode cluster was left out because it did not answer.
pub fn ejections(cluster: &str) -> String {
    format!("eldr.worker.{cluster}.ejections")
}

/// Under a rollout: what a policy did with a decode cluster. Counter `sent`: requests. Histograms of streams: `ttft_ms`, time
/// to first token in milliseconds, and `tpot_us`, time per output token after the first in microseconds. Counter
/// `not_counted`: streams whose times a switch, a wash-out or the clock spoiled.
pub fn of_policy(policy: Policy, cluster: &str, what: &str) -> String {
    format!("eldr.policy.{}.worker.{cluster}.{what}", policy.name())
}

/// Counter: what decisions in shadow mode rested on, whatever was done.
pub fn shadow_reason(reason: Reason) -> String {
    format!("eldr.shadow.reason.{}", reason.name())
}

/// Gauge: memory of the VM that has this slot, bytes. It never shrinks.
pub fn vm_memory(slot: usize) -> String {
    format!("eldr.vm.{slot}.memory_bytes")
}

/// Counter: requests in shadow mode that the policy would have sent where they went.
pub const SHADOW_AGREES: &str = "eldr.shadow_agrees";
/// Counter: those that it would have sent elsewhere.
pub const SHADOW_DIFFERS: &str = "eldr.shadow_differs";
/// Histogram: header bytes → target, nanoseconds.
pub const DECISION_NS: &str = "eldr.decision_ns";
/// Histogram: similarity to the chosen region, per mille.
pub const SIMILARITY: &str = "eldr.similarity_permille";
/// Histogram: similarity to the most similar region, per mille; apart from the former where load spoke against it.
pub const TOP_SIMILARITY: &str = "eldr.top_similarity_permille";
/// Histogram: regions within tau of the most similar one, where signatures were compared.
pub const BAND: &str = "eldr.band";
/// Histogram: duration of the prefill leg, milliseconds.
pub const PREFILL_MS: &str = "eldr.prefill_ms";
/// Counter: prefill answers whose client was gone.
pub const LATE_PREFILL: &str = "eldr.late_prefill";
/// Counter: prefill legs that were sent once more, to another cluster.
pub const PREFILL_RETRY: &str = "eldr.prefill_retry";
/// Counter: releases of KV blocks that were sent.
pub const RELEASE_SENT: &str = "eldr.release_sent";
/// Counter: releases that could not be sent or were not answered with success.
pub const RELEASE_FAILED: &str = "eldr.release_failed";
/// Counter: releases that were not sent because too many were under way.
pub const RELEASE_DROPPED: &str = "eldr.release_dropped";
/// Counter: relay mode, decode requests for which a prefill answer's similarities were found.
pub const RELAY_FOUND: &str = "eldr.relay_found";
/// Counter: relay mode, decode requests that fetch blocks, for which nothing was kept.
pub const RELAY_MISSING: &str = "eldr.relay_missing";
/// Counter: relay mode, legs whose id another request used at the same time.
pub const RELAY_DUPLICATE: &str = "eldr.relay_duplicate";
/// Counter: relay mode, decode requests for which the similarities found were of another revision of the blob.
pub const RELAY_OUTDATED: &str = "eldr.relay_outdated";
/// Counter: polls of a decode worker's load from which nothing was learned.
pub const LOAD_REPORT_FAILED: &str = "eldr.load_report_failed";
/// Counter: answers of another endpoint than the one chosen, which Envoy did not have or did not hold healthy.
pub const ENDPOINT_FALLBACK: &str = "eldr.endpoint_fallback";
/// Counter: signatures that were sampled. Each is posted, dropped, or still waits.
pub const SIGNATURES_SAMPLED: &str = "eldr.signatures_sampled";
/// Counter: sampled signatures that their server took.
pub const SIGNATURES_POSTED: &str = "eldr.signatures_posted";
/// Counter: sampled signatures that found no room, or whose post failed.
pub const SIGNATURES_DROPPED: &str = "eldr.signatures_dropped";
/// Counter: blobs that came and could not be used.
pub const BLOB_REFUSED: &str = "eldr.blob_refused";
/// Counter: blobs that could not be fetched from their server.
pub const BLOB_FETCH_FAILED: &str = "eldr.blob_fetch_failed";
