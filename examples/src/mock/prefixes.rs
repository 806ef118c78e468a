//! A worker's prefix cache: which leading KV blocks of a prompt need no computing, and its signature all the same.
//!
//! Blocks are shared by what the trace says and not by text, since the prompts are filler: full blocks of a
//! group's prefix by all its requests, the others by equal prompts. Only prompts with a recorded signature take part.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use eldr_core::prefix_cache::{PrefixCache, Sequence};

use super::registry::BLOCK_TOKENS;
use super::spread::Spread;

/// Content of a KV block and all before it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Key {
    /// Block of a group's prefix.
    Group(Arc<str>, u64),
    /// Block of the prompt with this hash.
    Prompt(u64, u64),
}

/// The cache of one worker.
#[derive(Clone, Debug)]
pub(crate) struct Prefixes(Arc<Mutex<PrefixCache<Key>>>);

/// A prompt's KV blocks, pinned until this is dropped.
#[derive(Debug)]
pub(crate) struct Pinned {
    cache: Prefixes,
    /// Always there but in `drop`.
    sequence: Option<Sequence<Key>>,
}

impl Prefixes {
    /// A cache of `tokens` tokens of a model with `counts` counts (layers × experts).
    pub(crate) fn new(tokens: u64, counts: usize) -> Self {
        let blocks = usize::try_from(tokens / BLOCK_TOKENS).unwrap_or(usize::MAX);
        let cache = PrefixCache::new(blocks, BLOCK_TOKENS as usize, counts);
        Prefixes(Arc::new(Mutex::new(cache)))
    }

    /// Pins the blocks of a prompt that are cached and room for the rest; `None` if all room is pinned.
    pub(crate) fn begin(&self, spread: &Spread, hash: u64, tokens: u64) -> Option<Pinned> {
        let group = spread.group(tokens);
        let shared = group.map_or(0, |group| group.tokens / BLOCK_TOKENS);
        let keys = (0..tokens / BLOCK_TOKENS)
            .map(|index| match group {
                Some(group) if index < shared => Key::Group(Arc::clone(&group.name), index),
                _ => Key::Prompt(hash, index),
            })
            .collect();
        let tokens = usize::try_from(tokens).ok()?;
        let sequence = self.lock().begin(keys, tokens).ok()?;
        Some(Pinned {
            cache: self.clone(),
            sequence: Some(sequence),
        })
    }

    fn lock(&self) -> MutexGuard<'_, PrefixCache<Key>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Pinned {
    /// How many tokens were found.
    pub(crate) fn cached_tokens(&self) -> u64 {
        let cached = self.sequence.as_ref().map_or(0, Sequence::cached_tokens);
        cached as u64
    }

    /// Writes the counts of what was not cached, block by block, and gives the sum over all blocks.
    pub(crate) fn compute(&mut self, spread: &Spread, tokens: u64) -> Vec<u16> {
        let mut cache = self.cache.lock();
        let Some(sequence) = &mut self.sequence else {
            return Vec::new();
        };
        let mut before = spread.until(tokens - sequence.remaining() as u64, tokens);
        while sequence.room() > 0 {
            let room = sequence.room();
            let end = tokens - (sequence.remaining() - room) as u64;
            let until = spread.until(end, tokens);
            let block: Vec<u16> = until.iter().zip(&before).map(|(a, b)| a - b).collect();
            if let Err(error) = cache.add(sequence, room, &block) {
                unreachable!("a chunk of the size that the cache asked for: {error}");
            }
            before = until;
        }
        cache.signature(sequence)
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if let Some(sequence) = self.sequence.take() {
            self.cache.lock().release(sequence);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::spread::Group;
    use super::*;

    #[test]
    fn the_sum_is_the_record_whatever_is_cached_pinned_or_evicted() {
        let records: [&[u16]; 3] = [&[100, 7, 0], &[50, 9, 3], &[80, 65_535, 1]];
        let tokens = [70, 64, 50];
        let members: Vec<_> = std::iter::zip(records, tokens)
            .map(|(counts, tokens)| (counts, tokens, 40))
            .collect();
        let group = Group::new("g", &members);
        // Room for two prompts, so the third evicts.
        let prefixes = Prefixes::new(7 * BLOCK_TOKENS, 3);
        let mut cached = Vec::new();
        let mut held: Option<Pinned> = None;
        for turn in 0..40_usize {
            let which = turn * turn % 7 % 3;
            let spread = Spread {
                counts: records[which].to_vec(),
                group: group.clone(),
            };
            let begun = prefixes.begin(&spread, which as u64, tokens[which]);
            let mut pinned = begun.unwrap();
            cached.push(pinned.cached_tokens());
            assert_eq!(pinned.compute(&spread, tokens[which]), records[which]);
            held = Some(pinned);
        }
        assert_eq!(cached[..3], [0, 32, 64], "nothing, the prefix, all");
        let evicted = cached[7..].iter().any(|&tokens| tokens <= 32);
        assert!(evicted && cached[7..].contains(&64), "{cached:?}");
        drop(held);
        assert_eq!(prefixes.lock().free(), 7);
    }

    #[test]
    fn no_room_is_said() {
        let spread = Spread {
            counts: vec![1],
            group: None,
        };
        let prefixes = Prefixes::new(2 * BLOCK_TOKENS, 1);
        let pinned = prefixes.begin(&spread, 1, 20);
        assert!(prefixes.begin(&spread, 2, 20).is_none());
        drop(pinned);
        assert!(prefixes.begin(&spread, 2, 20).is_some());
    }
}
