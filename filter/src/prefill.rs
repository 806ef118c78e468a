//! The prefill leg: what is sent, to which cluster, and whether it is sent once more.

use crate::body::{self, Object};
use crate::config::{Config, PrefillPolicy};
use crate::headers::Header;

/// A retry with less time than this left would only time out, milliseconds.
const LEAST_TIME_MS: u64 = 10;

/// A request's prefill leg. Kept until it is answered, for the retry; and where the answer pins KV blocks, until a
/// decode worker has the request, for their release.
#[derive(Debug, Default)]
pub struct Leg {
    /// The request's headers, cleaned.
    pub headers: Vec<Header>,
    /// Body of the leg.
    pub body: String,
    /// Beginning of the prompt, where the policy looks at it.
    pub prefix: Vec<u8>,
    /// Index of the cluster that has it or had it.
    cluster: Option<usize>,
    retried: bool,
}

impl Leg {
    /// Chooses the cluster to send to next and returns its name. `turn` grows by one per leg, per thread.
    pub fn choose<'c>(
        &mut self,
        config: &'c Config,
        in_flight: impl Fn(&str) -> u32,
        turn: u64,
    ) -> &'c str {
        let clusters = &config.prefill_clusters;
        let loads: Vec<u32> = clusters.iter().map(|cluster| in_flight(cluster)).collect();
        let chosen = match (self.cluster, config.prefill_policy) {
            // A retry goes to the least loaded of the others, whatever the policy.
            (Some(failed), _) => {
                self.retried = true;
                least_loaded(&loads, turn, Some(failed))
            }
            (None, PrefillPolicy::RoundRobin) => {
                turn.checked_rem(clusters.len() as u64).unwrap_or_default() as usize
            }
            (None, PrefillPolicy::LeastLoaded) => least_loaded(&loads, turn, None),
            (None, PrefillPolicy::PrefixHash) => config.prefill_ring.choose(&self.prefix, &loads),
        };
        self.cluster = Some(chosen);
        clusters.get(chosen).map(String::as_str).unwrap_or_default()
    }

    /// Whether to send it once more, to another cluster, after an answer with this status (`None`: reset, or never
    /// sent). Envoy says 503 when it could not connect, and 504 at our deadline, when no time is left.
    pub fn may_retry(
        &self,
        status: Option<u32>,
        config: &Config,
        now_ms: u64,
        deadline_ms: u64,
    ) -> bool {
        config.prefill_retry
            && !self.retried
            && config.prefill_clusters.len() > 1
            && matches!(status, None | Some(502..=504))
            && now_ms + LEAST_TIME_MS <= deadline_ms
    }
}

/// Index of the lowest load but for `excluded`; equal loads take turns.
fn least_loaded(loads: &[u32], turn: u64, excluded: Option<usize>) -> usize {
    let count = loads.len().max(1);
    let start = (turn % count as u64) as usize;
    let others = (0..count).map(|step| (start + step) % count);
    let load = |&index: &usize| loads.get(index).copied().unwrap_or(u32::MAX);
    others
        .filter(|index| Some(*index) != excluded)
        .min_by_key(load)
        .unwrap_or_default()
}

/// Up to `limit` bytes from the beginning of a prompt, as the official artifact takes them: the text of a string, the
/// decimal digits of token ids one after the other; of a chat, its messages as they were sent.
pub fn prefix(request: &Object<'_>, limit: usize) -> Vec<u8> {
    let text = match request.get("prompt") {
        Some(raw) if raw.starts_with('[') => {
            let digits = raw.bytes().filter(u8::is_ascii_digit);
            return digits.take(limit).collect();
        }
        Some(raw) => body::string(raw).unwrap_or(raw.into()),
        None => request.get("messages").unwrap_or_default().into(),
    };
    text.bytes().take(limit).collect()
}
