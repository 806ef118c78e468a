//! Signatures of cached prompt prefixes: a signature block beside every KV block.
//!
//! An engine that finds a prompt's beginning in its prefix cache does not run the gate over it again, so the counts of those
//! tokens have to come from where the KV comes from. Each KV block has the counts of its tokens under the same index, written
//! when the block is computed and gone when it is evicted (ELDR §4). The sum over a request's blocks is
//! then the signature of the whole prompt, whichever of them were cached.
//!
//! Blocks are found by a key that names their content and everything before it, such as a chained hash; equal keys must
//! mean equal prefixes. Only full blocks are shared, as engines do. Blocks in use are pinned; of the others
//! the least recently used goes first, and of one request the last block before the first, since a block
//! is of no use without those before it.
//!
//! ```
//! use eldr_core::prefix_cache::PrefixCache;
//!
//! // 8 blocks of 4 tokens, signatures of 3 counts.
//! let mut cache = PrefixCache::new(8, 4, 3);
//! let mut first = cache.begin(vec!["a"], 5)?; // one full block, one token after it
//! cache.add(&mut first, 3, &[1, 2, 0])?; // chunked prefill
//! cache.add(&mut first, 1, &[0, 1, 0])?;
//! cache.add(&mut first, 1, &[0, 0, 1])?;
//! assert_eq!(cache.signature(&first), [1, 3, 1]);
//!
//! let mut second = cache.begin(vec!["a", "ab"], 8)?;
//! assert_eq!((second.cached_tokens(), second.room()), (4, 4));
//! cache.add(&mut second, 4, &[4, 0, 0])?;
//! assert_eq!(cache.signature(&second), [5, 3, 0]);
//! cache.release(first);
//! cache.release(second);
//! # Ok::<(), eldr_core::prefix_cache::PrefixCacheError>(())
//! ```

use std::collections::BTreeMap;

/// KV blocks of one worker with their signature blocks. `K` names a block's content and all before it.
#[derive(Debug, Clone)]
pub struct PrefixCache<K> {
    block_tokens: usize,
    counts: usize,
    blocks: Vec<Block<K>>,
    /// Full blocks by content, in use or not.
    cached: BTreeMap<K, usize>,
    /// Full blocks that nobody uses, by last use.
    idle: BTreeMap<u64, usize>,
    /// Blocks without content.
    empty: Vec<usize>,
    /// Counts uses; there is no clock.
    uses: u64,
}

#[derive(Debug, Clone)]
struct Block<K> {
    /// Present once the block is full and others may find it.
    key: Option<K>,
    /// Saturating; allocated at first use.
    counts: Vec<u16>,
    users: usize,
    last_use: u64,
}

/// A request's blocks, which stay in place until [`PrefixCache::release`] takes this back. Not to be dropped before.
#[derive(Debug)]
pub struct Sequence<K> {
    keys: Vec<K>,
    blocks: Vec<usize>,
    block_tokens: usize,
    cached: usize,
    /// Tokens whose counts are in the blocks.
    done: usize,
    tokens: usize,
}

impl<K> Sequence<K> {
    /// Indices of the request's KV blocks, in order.
    pub fn blocks(&self) -> &[usize] {
        &self.blocks
    }

    /// How many of the leading blocks were found.
    pub fn cached_blocks(&self) -> usize {
        self.cached
    }

    /// How many leading tokens need no computing.
    pub fn cached_tokens(&self) -> usize {
        self.cached * self.block_tokens
    }

    /// Tokens of the prompt that are still to be computed.
    pub fn remaining(&self) -> usize {
        self.tokens - self.done
    }

    /// Tokens that the next [`PrefixCache::add`] may have at most: up to the end of the block or the prompt. 0 at the end.
    pub fn room(&self) -> usize {
        (self.block_tokens - self.done % self.block_tokens).min(self.remaining())
    }
}

/// Why the cache refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PrefixCacheError {
    /// A prompt has one key per full block.
    #[error("{found} block keys for a prompt of {tokens} tokens, which has {expected} full blocks")]
    Keys {
        /// Keys given.
        found: usize,
        /// Full blocks.
        expected: usize,
        /// Tokens of the prompt.
        tokens: usize,
    },
    /// Too many blocks are in use.
    #[error("{needed} more KV blocks are needed and {free} are free")]
    NoRoom {
        /// Blocks that were not found.
        needed: usize,
        /// Blocks that nobody uses.
        free: usize,
    },
    /// A chunk reaches over the end of its block or of the prompt.
    #[error("a chunk of {tokens} tokens where the block takes {room}")]
    Chunk {
        /// Tokens of the chunk.
        tokens: usize,
        /// See [`Sequence::room`].
        room: usize,
    },
    /// Counts of another model.
    #[error("{found} counts where the model has {expected}")]
    Counts {
        /// Counts given.
        found: usize,
        /// Layers × experts.
        expected: usize,
    },
}

impl<K: Ord + Clone> PrefixCache<K> {
    /// A cache of `capacity` blocks of `block_tokens` tokens (0 is taken as 1), each with `counts` counts (layers ×
    /// experts; two bytes per count and used block).
    pub fn new(capacity: usize, block_tokens: usize, counts: usize) -> Self {
        let block = || Block {
            key: None,
            counts: Vec::new(),
            users: 0,
            last_use: 0,
        };
        Self {
            block_tokens: block_tokens.max(1),
            counts,
            blocks: std::iter::repeat_with(block).take(capacity).collect(),
            cached: BTreeMap::new(),
            idle: BTreeMap::new(),
            empty: (0..capacity).rev().collect(),
            uses: 0,
        }
    }

    /// Starts a prompt of `tokens` tokens with one key per full block: pins the leading blocks that are cached and
    /// takes others for the rest, evicting what was used least recently.
    ///
    /// # Errors
    /// The keys do not fit the tokens, or there is no room until another request is released; nothing changed then.
    pub fn begin(&mut self, keys: Vec<K>, tokens: usize) -> Result<Sequence<K>, PrefixCacheError> {
        let expected = tokens / self.block_tokens;
        if keys.len() != expected {
            let found = keys.len();
            return Err(PrefixCacheError::Keys {
                found,
                expected,
                tokens,
            });
        }
        let hits = keys.iter().map_while(|key| self.cached.get(key).copied());
        let mut blocks: Vec<usize> = hits.collect();
        let cached = blocks.len();
        let needed = tokens.div_ceil(self.block_tokens) - cached;
        let in_use = |index: &&usize| self.blocks.get(**index).is_some_and(|b| b.users > 0);
        let idle_hits = cached - blocks.iter().filter(in_use).count();
        let free = self.free().saturating_sub(idle_hits);
        if needed > free {
            return Err(PrefixCacheError::NoRoom { needed, free });
        }
        for &hit in &blocks {
            if let Some(block) = self.blocks.get_mut(hit) {
                self.idle.remove(&block.last_use);
                block.users += 1;
            }
        }
        blocks.extend(std::iter::from_fn(|| self.take()).take(needed));
        Ok(Sequence {
            keys,
            blocks,
            block_tokens: self.block_tokens,
            cached,
            done: cached * self.block_tokens,
            tokens,
        })
    }

    /// Adds the counts of the request's next `tokens` tokens, which lie in one block. A block that gets full can be
    /// found from then on.
    ///
    /// # Errors
    /// The tokens are more than [`Sequence::room`], or the counts are another model's; nothing changed then.
    pub fn add(
        &mut self,
        sequence: &mut Sequence<K>,
        tokens: usize,
        counts: &[u16],
    ) -> Result<(), PrefixCacheError> {
        let room = sequence.room();
        if tokens > room {
            return Err(PrefixCacheError::Chunk { tokens, room });
        }
        if counts.len() != self.counts {
            let (found, expected) = (counts.len(), self.counts);
            return Err(PrefixCacheError::Counts { found, expected });
        }
        let position = sequence.done / self.block_tokens;
        let place = sequence.blocks.get(position).copied();
        if let Some((index, block)) = place.and_then(|at| Some((at, self.blocks.get_mut(at)?))) {
            add_saturating(&mut block.counts, counts);
            sequence.done += tokens;
            if let Some(key) = sequence.keys.get(position)
                && tokens == room
                && !self.cached.contains_key(key)
            {
                // Of two requests that compute the same block, the first shares it and the second keeps its own.
                block.key = Some(key.clone());
                self.cached.insert(key.clone(), index);
            }
        }
        Ok(())
    }

    /// Sum of the request's blocks: the signature of the prompt once nothing [remains](Sequence::remaining).
    pub fn signature(&self, sequence: &Sequence<K>) -> Vec<u16> {
        let mut sum = vec![0; self.counts];
        for block in sequence.blocks.iter().filter_map(|&at| self.blocks.get(at)) {
            add_saturating(&mut sum, &block.counts);
        }
        sum
    }

    /// Unpins a request's blocks. Full ones stay until their place is needed.
    pub fn release(&mut self, sequence: Sequence<K>) {
        for at in sequence.blocks.into_iter().rev() {
            let Some(block) = self.blocks.get_mut(at) else {
                continue;
            };
            block.users = block.users.saturating_sub(1);
            if block.users > 0 {
                continue;
            }
            if block.key.is_some() {
                self.uses += 1;
                block.last_use = self.uses;
                self.idle.insert(self.uses, at);
            } else {
                self.empty.push(at);
            }
        }
    }

    /// Blocks that nobody uses; full ones among them are cached until they are needed.
    pub fn free(&self) -> usize {
        self.empty.len() + self.idle.len()
    }

    /// Blocks that can be found, in use or not.
    pub fn cached(&self) -> usize {
        self.cached.len()
    }

    /// A block for new content: an empty one, else the least recently used.
    fn take(&mut self) -> Option<usize> {
        let at = match self.empty.pop() {
            Some(at) => at,
            None => self.idle.pop_first()?.1,
        };
        let block = self.blocks.get_mut(at)?;
        if let Some(key) = block.key.take() {
            self.cached.remove(&key);
        }
        block.counts.clear();
        block.counts.resize(self.counts, 0);
        block.users = 1;
        Some(at)
    }
}

fn add_saturating(sum: &mut [u16], counts: &[u16]) {
    for (sum, count) in sum.iter_mut().zip(counts) {
        *sum = sum.saturating_add(*count);
    }
}

#[cfg(test)]
mod tests;
