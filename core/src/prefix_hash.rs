//! Prefill choice by prompt prefix: equal prompt prefixes go to the same prefill worker, whose prefix cache has them.
//!
//! A consistent ring with a load bound, as the published ELDR artifact has it: every worker stands at many positions of a
//! ring of 64-bit hashes (BLAKE2b with 8 bytes, big-endian), a request goes to the first position at or after the
//! hash of its [`prompt_key`], and to the least loaded worker instead where that one is above its share of the load.
//! When a worker comes or goes, only the prompts next to its positions move.

use std::fmt::{self, Write as _};

use blake2::digest::consts::U8;
use blake2::{Blake2b, Digest as _};
use serde::Deserializer as _;
use serde::de::{SeqAccess, Visitor};

use crate::decide::Worker;

/// Positions of each worker on the ring, in the artifact.
pub const VNODES: usize = 160;
/// Bytes of a prompt that count, in the artifact.
pub const PREFIX_BYTES: usize = 1024;
/// Load bound as a multiple of the mean, in the artifact.
pub const LOAD_FACTOR: f64 = 1.25;

/// Prefill workers on a ring.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ring {
    /// Position and worker, ascending.
    points: Vec<(u64, usize)>,
}

impl Ring {
    /// Puts each worker at `vnodes` positions, which depend on its name alone.
    pub fn new(workers: &[String], vnodes: usize) -> Self {
        let mut points: Vec<(u64, usize)> = workers
            .iter()
            .enumerate()
            .flat_map(|(index, name)| {
                (0..vnodes).map(move |vnode| (hash(format!("{name}#{vnode}").as_bytes()), index))
            })
            .collect();
        points.sort_unstable();
        Self { points }
    }

    /// Chooses among `workers`, which are those of [`new`](Self::new) as they are now; the index points there.
    ///
    /// An empty key, or a load above `load_factor` × (sum of loads + 1) / workers, sends the request to the least
    /// loaded, of equals the first. Workers that are not available are passed over and do not count, unless none is.
    pub fn choose(&self, key: &[u8], workers: &[Worker], load_factor: f64) -> usize {
        let any = workers.iter().any(|worker| worker.available);
        let usable = || {
            let all = workers.iter().enumerate();
            all.filter(|(_, worker)| worker.available || !any)
        };
        let owner = self.owner(key, |index| {
            workers.get(index).filter(|worker| worker.available || !any)
        });
        let total: f64 = usable().map(|(_, worker)| worker.load).sum();
        let bound = (total + 1.0) / usable().count() as f64 * load_factor;
        match owner {
            Some((index, worker)) if worker.load <= bound => index,
            _ => usable()
                .min_by(|(_, a), (_, b)| a.load.total_cmp(&b.load))
                .map_or(0, |(index, _)| index),
        }
    }

    /// The first usable worker at or after the key's hash; nobody owns the empty key.
    fn owner<'w>(
        &self,
        key: &[u8],
        usable: impl Fn(usize) -> Option<&'w Worker>,
    ) -> Option<(usize, &'w Worker)> {
        if key.is_empty() {
            return None;
        }
        let hash = hash(key);
        let start = self
            .points
            .partition_point(|&(position, _)| position < hash);
        let (before, after) = self.points.split_at_checked(start)?;
        let mut round = after.iter().chain(before);
        round.find_map(|&(_, index)| Some((index, usable(index)?)))
    }
}

fn hash(bytes: &[u8]) -> u64 {
    u64::from_be_bytes(Blake2b::<U8>::digest(bytes).into())
}

/// The first `limit` bytes of a prompt's key, from the prompt's JSON.
///
/// A string's key is its text, without lone surrogates; a list of token ids has its digits, one number after the other, as
/// in the artifact. The key of anything else, such as a chat's messages, is its JSON.
pub fn prompt_key(json: &str, limit: usize) -> Vec<u8> {
    let key = serde_json::Deserializer::from_str(json).deserialize_bytes(Key(limit));
    key.unwrap_or_else(|_| json.bytes().take(limit).collect())
}

/// Asks for bytes, since a JSON string may hold lone surrogates that no text can have.
struct Key(usize);

impl<'de> Visitor<'de> for Key {
    type Value = Vec<u8>;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("a string or token ids")
    }

    fn visit_bytes<E>(self, bytes: &[u8]) -> Result<Vec<u8>, E> {
        let text = bytes.utf8_chunks().flat_map(|chunk| chunk.valid().bytes());
        Ok(text.take(self.0).collect())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut ids: A) -> Result<Vec<u8>, A::Error> {
        let mut digits = String::new();
        while let Some(id) = ids.next_element::<u64>()? {
            if digits.len() < self.0 {
                // Writing into a String cannot fail.
                let _ = write!(digits, "{id}");
            }
        }
        digits.truncate(self.0);
        Ok(digits.into_bytes())
    }
}

#[cfg(test)]
mod tests {
    use base64::Engine as _;
    use base64::engine::general_purpose::STANDARD;
    use blake2::digest::consts::U16;
    use proptest::prelude::*;
    use serde_json::Value;

    use super::*;

    fn vectors() -> Value {
        let text = include_str!("../tests/data/parity/g_prefix_hash.json");
        // A lone surrogate, which no text of ours can hold; a test below has it.
        serde_json::from_str(&text.replace("\\ud800bad", "bad")).unwrap()
    }

    fn list(value: &Value) -> &[Value] {
        value.as_array().unwrap()
    }

    fn text(value: &Value) -> &str {
        value.as_str().unwrap()
    }

    fn key(value: &Value) -> Vec<u8> {
        STANDARD.decode(text(&value["key_b64"])).unwrap()
    }

    fn hex(hash: u64) -> String {
        format!("{hash:016x}")
    }

    fn names(count: usize) -> Vec<String> {
        (0..count)
            .map(|worker| format!("prefill-{worker}"))
            .collect()
    }

    fn workers(loads: &[f64]) -> Vec<Worker> {
        let worker = |&load| Worker {
            load,
            available: true,
        };
        loads.iter().map(worker).collect()
    }

    #[test]
    fn rings_and_choices_equal_the_published_artifact() {
        let mut choices = 0;
        for router in list(&vectors()["routers"]) {
            let names: Vec<String> = list(&router["workers"])
                .iter()
                .map(|name| text(name).to_owned())
                .collect();
            let ring = Ring::new(
                &names,
                router["vnodes_per_worker"].as_u64().unwrap() as usize,
            );
            let lines: String = ring
                .points
                .iter()
                .map(|&(position, worker)| format!("{}:{worker}\n", hex(position)))
                .collect();
            let digest: [u8; 16] = Blake2b::<U16>::digest(lines.as_bytes()).into();
            assert_eq!(
                format!("{:032x}", u128::from_be_bytes(digest)),
                text(&router["ring_blake2b16"])
            );
            let prefix = router["prefix_byte_count"].as_u64().unwrap() as usize;
            for selection in list(&router["selections"]) {
                let mut key = key(selection);
                key.truncate(prefix);
                assert_eq!(hex(hash(&key)), text(&selection["hash_hex"]));
                let loads: Vec<f64> = list(&selection["loads"])
                    .iter()
                    .map(|load| load.as_f64().unwrap())
                    .collect();
                let factor = router["load_factor"].as_f64().unwrap();
                let found = ring.choose(&key, &workers(&loads), factor);
                assert_eq!(found as u64, selection["index"].as_u64().unwrap());
                choices += 1;
            }
        }
        assert_eq!(choices, 990);
    }

    #[test]
    fn prompt_keys_equal_the_published_artifact() {
        for prompt in list(&vectors()["prompt_keys"]) {
            let json = prompt["prompt"].to_string();
            assert_eq!(prompt_key(&json, PREFIX_BYTES), key(prompt), "{json}");
        }
        assert_eq!(
            prompt_key(r#""\ud800bad surrogate""#, PREFIX_BYTES),
            b"bad surrogate"
        );
    }

    #[test]
    fn keys_are_cut_at_the_limit_and_anything_else_is_its_own_key() {
        assert_eq!(prompt_key(r#""\u00e9\nab""#, 4), "é\na".as_bytes());
        assert_eq!(prompt_key("[11, 22, 33]", 3), b"112");
        let chat = r#"[{"role":"user","content":"hi"}]"#;
        assert_eq!(prompt_key(chat, 9), b"[{\"role\":");
        assert_eq!(prompt_key("[1,-2]", 99), b"[1,-2]");
        assert_eq!(prompt_key("", 99), b"");
    }

    #[test]
    fn workers_that_are_out_are_passed_over_until_none_is_left() {
        let ring = Ring::new(&names(2), VNODES);
        let mut fleet = workers(&[5.0, 3.0]);
        fleet[0].available = false;
        for key in ["a", "b", "c", "d", "e", ""] {
            assert_eq!(ring.choose(key.as_bytes(), &fleet, LOAD_FACTOR), 1);
        }
        fleet[1].available = false;
        assert_eq!(ring.choose(b"", &fleet, LOAD_FACTOR), 1);
        assert_eq!(ring.choose(b"", &[], LOAD_FACTOR), 0);
    }

    proptest! {
        #[test]
        fn only_prompts_of_the_worker_that_left_move(key in "[a-z]{1,9}", left in 0usize..5) {
            let ring = Ring::new(&names(5), VNODES);
            let mut fleet = workers(&[0.0; 5]);
            let before = ring.choose(key.as_bytes(), &fleet, f64::INFINITY);
            fleet[left].available = false;
            let after = ring.choose(key.as_bytes(), &fleet, f64::INFINITY);
            prop_assert!(after != left);
            prop_assert!(before == left || before == after);
            // A ring without that worker gives the same, so taking it out and removing it agree.
            let rest: Vec<usize> = (0..5).filter(|&worker| worker != left).collect();
            let rest_names: Vec<String> = rest.iter().map(|&worker| names(5)[worker].clone()).collect();
            let smaller = Ring::new(&rest_names, VNODES);
            let chosen = smaller.choose(key.as_bytes(), &workers(&[0.0; 4]), f64::INFINITY);
            prop_assert_eq!(rest[chosen], after);
        }

        #[test]
        fn nobody_above_the_bound_is_chosen_while_another_is_below(
            key in "[a-z]{0,9}", loads in proptest::collection::vec(0u32..50, 1..8),
        ) {
            let loads: Vec<f64> = loads.into_iter().map(f64::from).collect();
            let ring = Ring::new(&names(loads.len()), VNODES);
            let chosen = ring.choose(key.as_bytes(), &workers(&loads), LOAD_FACTOR);
            let mean = (loads.iter().sum::<f64>() + 1.0) / loads.len() as f64;
            prop_assert!(loads[chosen] <= LOAD_FACTOR * mean);
        }

        #[test]
        fn any_json_has_a_key_within_the_limit(json: String, limit in 0usize..20) {
            prop_assert!(prompt_key(&json, limit).len() <= limit);
        }
    }
}
