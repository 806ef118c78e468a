//! The prefill leg: what is sent, to which cluster, and whether it is sent once more.

use eldr_core::decide::Worker;
use eldr_core::prefix_hash::{Ring, prompt_key};

use crate::api::Api;
use crate::body::Object;
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
    /// The API that it speaks.
    pub api: Api,
    /// Body of the leg.
    pub body: String,
    /// Beginning of the prompt, where the policy looks at it.
    pub prefix: Vec<u8>,
    /// Index of the cluster that has it or had it.
    pub(crate) cluster: Option<usize>,
    /// Whether that is the second one.
    pub(crate) retried: bool,
}

impl Leg {
    /// Chooses the cluster to send to next and returns its name; never twice the same. `turn` grows with each call, and
    /// is called once per leg.
    pub fn choose<'c>(
        &mut self,
        config: &'c Config,
        ring: &Ring,
        in_flight: impl Fn(&str) -> u32,
        turn: impl FnOnce() -> u64,
    ) -> &'c str {
        let clusters = &config.prefill_clusters;
        let failed = self.cluster;
        let as_worker = |(index, cluster): (usize, &String)| Worker {
            load: f64::from(in_flight(cluster)),
            available: Some(index) != failed,
        };
        let workers: Vec<Worker> = clusters.iter().enumerate().map(as_worker).collect();
        let turn = failed.map_or_else(turn, |failed| failed as u64 + 1);
        let chosen = match config.prefill_policy {
            PrefillPolicy::PrefixHash => {
                ring.choose(&self.prefix, &workers, config.prefill_load_factor)
            }
            PrefillPolicy::RoundRobin => next(turn, clusters.len()),
            PrefillPolicy::LeastLoaded => least_loaded(&workers, turn),
        };
        self.retried = failed.is_some();
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

fn next(turn: u64, count: usize) -> usize {
    turn.checked_rem(count as u64).unwrap_or_default() as usize
}

/// Index of the lowest load among those available; equal loads take turns.
fn least_loaded(workers: &[Worker], turn: u64) -> usize {
    let start = next(turn, workers.len());
    let (before, after) = workers.split_at_checked(start).unwrap_or_default();
    let after = after.iter().zip(start..);
    let available = after.chain(before.iter().zip(0..));
    available
        .filter(|(worker, _)| worker.available)
        .min_by(|(a, _), (b, _)| a.load.total_cmp(&b.load))
        .map_or(0, |(_, index)| index)
}

/// Up to `limit` bytes from the beginning of a request's prompt, or of a chat's messages.
pub fn prefix(api: Api, request: &Object<'_>, limit: usize) -> Vec<u8> {
    api.prompt(request)
        .map_or_else(Vec::new, |json| prompt_key(json, limit))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use serde_json::json;

    use super::*;
    use crate::plugin::Plugin;

    fn plugin(policy: &str) -> Plugin {
        let config = json!({
            "models": [{"model": "*"}],
            "decode_clusters": ["d"],
            "prefill_clusters": ["p0", "p1", "p2"],
            "prefill_policy": policy,
            "prefill_prefix_bytes": 4,
        });
        Plugin::new(Config::parse(config.to_string().as_bytes()).unwrap())
    }

    fn loads(loads: [u32; 3]) -> impl Fn(&str) -> u32 {
        let names = ["p0", "p1", "p2"];
        let loads: BTreeMap<&str, u32> = names.into_iter().zip(loads).collect();
        move |cluster| loads[cluster]
    }

    #[test]
    fn round_robin_takes_turns() {
        let plugin = plugin("round_robin");
        let turns: Vec<&str> = (0..4)
            .map(|turn| plugin.choose_prefill(&mut Leg::default(), loads([9, 0, 0]), || turn))
            .collect();
        assert_eq!(turns, ["p0", "p1", "p2", "p0"]);
    }

    #[test]
    fn least_loaded_counts_and_takes_turns_among_equals() {
        let plugin = plugin("least_loaded");
        let choose = |of, turn| plugin.choose_prefill(&mut Leg::default(), loads(of), || turn);
        assert_eq!(choose([2, 1, 3], 0), "p1");
        let turns: Vec<&str> = (0..4).map(|turn| choose([1, 1, 1], turn)).collect();
        assert_eq!(turns, ["p0", "p1", "p2", "p0"]);
    }

    #[test]
    fn prefix_hash_keeps_equal_beginnings_together_until_that_cluster_is_overloaded() {
        let plugin = plugin("prefix_hash");
        let choose = |prompt: &str, of| {
            let body = json!({"prompt": prompt}).to_string();
            let object = Object::parse(body.as_bytes()).unwrap();
            let mut leg = Leg {
                prefix: prefix(
                    Api::Completions,
                    &object,
                    plugin.config().prefill_prefix_bytes,
                ),
                ..Leg::default()
            };
            plugin.choose_prefill(&mut leg, loads(of), || 0).to_owned()
        };
        let mut used = BTreeMap::new();
        for index in 0..50 {
            let start = format!("{index:04}");
            let owner = choose(&start, [0; 3]);
            assert_eq!(choose(&format!("{start} and more"), [0; 3]), owner);
            let other = if owner == "p0" { "p1" } else { "p0" };
            let busy = ["p0", "p1", "p2"].map(|name| if name == other { 1 } else { 7 });
            assert_eq!(choose(&start, busy), other, "{owner} is overloaded");
            *used.entry(owner).or_insert(0) += 1;
        }
        assert_eq!(used.len(), 3, "{used:?}");
    }

    #[test]
    fn chats_are_known_by_the_beginning_of_their_messages() {
        let of = |api, body: &str| prefix(api, &Object::parse(body.as_bytes()).unwrap(), 5);
        assert_eq!(of(Api::Chat, r#"{"messages":[{"role":1}]}"#), b"[{\"ro");
        let completion = r#"{"prompt":"a\u0062cdefg","input":"x"}"#;
        assert_eq!(of(Api::Completions, completion), b"abcde");
        assert_eq!(of(Api::Responses, completion), b"x");
        assert_eq!(of(Api::Generate, r#"{"token_ids":[1,22,3]}"#), b"1223");
        assert_eq!(of(Api::Chat, "{}"), b"");
    }

    #[test]
    fn a_retry_goes_elsewhere_and_only_once_and_only_while_there_is_time() {
        for policy in ["round_robin", "least_loaded", "prefix_hash"] {
            let plugin = plugin(policy);
            let may_retry = |leg: &Leg, now_ms| {
                let config = plugin.config();
                leg.may_retry(Some(503), config, now_ms, 1_000)
            };
            let mut leg = Leg::default();
            let first = plugin.choose_prefill(&mut leg, loads([1, 1, 1]), || 5);
            assert!(may_retry(&leg, 990) && !may_retry(&leg, 991));
            let second = plugin.choose_prefill(&mut leg, loads([0, 0, 0]), || 5);
            assert_ne!(first, second, "{policy}");
            assert!(!may_retry(&leg, 0), "once");
        }
    }

    #[test]
    fn only_what_did_not_get_through_is_sent_again() {
        let plugin = plugin("round_robin");
        let mut leg = Leg::default();
        plugin.choose_prefill(&mut leg, loads([0; 3]), || 0);
        let may_retry = |status| leg.may_retry(status, plugin.config(), 0, 1_000);
        for status in [None, Some(502), Some(503), Some(504)] {
            assert!(may_retry(status), "{status:?}");
        }
        for status in [200, 302, 400, 429, 500, 501, 505] {
            assert!(!may_retry(Some(status)), "{status}");
        }
    }

    #[test]
    fn without_another_cluster_or_where_it_is_off_there_is_no_retry() {
        for change in [
            json!({"prefill_clusters": ["p0"]}),
            json!({"prefill_retry": false}),
        ] {
            let mut config = json!({
                "models": [{"model": "*"}],
                "decode_clusters": ["d"],
                "prefill_clusters": ["p0", "p1"],
            });
            for (field, value) in change.as_object().unwrap() {
                config[field] = value.clone();
            }
            let config = Config::parse(config.to_string().as_bytes()).unwrap();
            assert!(
                !Leg::default().may_retry(None, &config, 0, 1_000),
                "{change}"
            );
        }
    }
}
