//! A recorded signature spread over the prompt's tokens, so that every KV block has counts of its own.
//!
//! A trace has one signature per request, a prefix cache needs one per block. The rule: counts grow linearly along
//! the prompt, rounded down, so that blocks differ by rounding alone and their sum is what was recorded, whatever that was.
//!
//! Requests with a common prefix need common counts for it, which must not exceed those of any of them. The
//! counts of a group's prefix are the smallest, over the group's records, of the share that the rule gives to the
//! prefix; what a record has beyond them is spread linearly over the tokens after the prefix. So both hold exactly for
//! arbitrary records: blocks of the prefix are equal throughout the group, and blocks of a request sum to its record.

use std::sync::Arc;

/// A prefix that several records share.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Group {
    pub(crate) name: Arc<str>,
    /// Length of the prefix: the shortest that a record says, and shorter than each prompt.
    pub(crate) tokens: u64,
    /// Counts of the prefix, `[layer][expert]`.
    counts: Vec<u16>,
}

impl Group {
    /// The prefix of the records `members`: counts, tokens of the prompt and of its prefix. `None` if it is empty.
    pub(crate) fn new(name: &str, members: &[(&[u16], u64, u64)]) -> Option<Arc<Self>> {
        let tokens = members
            .iter()
            .map(|&(_, prompt, prefix)| prefix.min(prompt.saturating_sub(1)))
            .min()
            .filter(|&tokens| tokens > 0)?;
        let mut counts: Option<Vec<u16>> = None;
        for &(member, prompt, _) in members {
            let share = member.iter().map(|&count| part(count, tokens, prompt));
            counts = Some(match counts {
                None => share.collect(),
                Some(counts) => counts
                    .into_iter()
                    .zip(share)
                    .map(|(a, b)| a.min(b))
                    .collect(),
            });
        }
        Some(Arc::new(Group {
            name: name.into(),
            tokens,
            counts: counts?,
        }))
    }
}

/// The counts of one record by position in its prompt.
#[derive(Clone, Debug)]
pub(crate) struct Spread {
    /// All layers, `[layer][expert]`.
    pub(crate) counts: Vec<u16>,
    pub(crate) group: Option<Arc<Group>>,
}

impl Spread {
    /// The group whose prefix a prompt of `tokens` tokens begins with.
    pub(crate) fn group(&self, tokens: u64) -> Option<&Group> {
        self.group.as_deref().filter(|group| group.tokens < tokens)
    }

    /// Counts of the first `end` of `tokens` tokens.
    pub(crate) fn until(&self, end: u64, tokens: u64) -> Vec<u16> {
        match self.group(tokens) {
            None => self
                .counts
                .iter()
                .map(|&count| part(count, end, tokens))
                .collect(),
            Some(group) => {
                let prefix = end.min(group.tokens);
                let (rest, rest_of) = (end - prefix, tokens - group.tokens);
                let counts = self.counts.iter().zip(&group.counts);
                counts
                    .map(|(&count, &shared)| {
                        part(shared, prefix, group.tokens) + part(count - shared, rest, rest_of)
                    })
                    .collect()
            }
        }
    }
}

/// The first `end` of `tokens` tokens' part of `count`, rounded down.
fn part(count: u16, end: u64, tokens: u64) -> u16 {
    let part = u128::from(count) * u128::from(end.min(tokens)) / u128::from(tokens.max(1));
    // At most `count`.
    u16::try_from(part).unwrap_or(count)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Counts block by block.
    fn blocks(spread: &Spread, tokens: u64, block: u64) -> Vec<Vec<u16>> {
        let ends = (1..=tokens.div_ceil(block)).map(|index| (index * block).min(tokens));
        let mut before = vec![0; spread.counts.len()];
        ends.map(|end| {
            let until = spread.until(end, tokens);
            let block = until.iter().zip(&before).map(|(now, before)| now - before);
            let block = block.collect();
            before = until;
            block
        })
        .collect()
    }

    /// Pseudo-random counts, also zeros and the largest.
    fn record(seed: u64, counts: usize) -> Vec<u16> {
        (0..counts as u64)
            .map(|index| {
                let hash = crate::mock::catalog::fnv1a(&(seed * 977 + index).to_le_bytes());
                match hash % 7 {
                    0 => 0,
                    1 => u16::MAX,
                    _ => (hash >> 32) as u16 >> (hash % 13),
                }
            })
            .collect()
    }

    #[test]
    fn blocks_sum_to_the_record_and_prefix_blocks_are_equal_in_the_group() {
        let mut shared_blocks = 0;
        for seed in 0..60 {
            let records: Vec<_> = (0..4).map(|i| record(seed * 4 + i, 12)).collect();
            let lengths: Vec<u64> = (0..4).map(|i| 1 + (seed * 13 + i * 29) % 90).collect();
            let members: Vec<(&[u16], u64, u64)> = records
                .iter()
                .zip(&lengths)
                .map(|(counts, &tokens)| (counts.as_slice(), tokens, 5 + seed % 50))
                .collect();
            let group = Group::new("g", &members);
            let mut prefix: Option<Vec<Vec<u16>>> = None;
            for (counts, &tokens) in records.iter().zip(&lengths) {
                let spread = Spread {
                    counts: counts.clone(),
                    group: group.clone(),
                };
                let blocks = blocks(&spread, tokens, 4);
                let sum = blocks.iter().fold(vec![0; 12], |mut sum, block| {
                    sum.iter_mut()
                        .zip(block)
                        .for_each(|(sum, count)| *sum += count);
                    sum
                });
                assert_eq!(sum, *counts, "seed {seed}");
                let Some(group) = &group else { continue };
                let shared = &blocks[..(group.tokens / 4) as usize];
                shared_blocks += shared.len();
                assert_eq!(prefix.get_or_insert(shared.to_vec()), shared, "seed {seed}");
            }
        }
        assert!(shared_blocks > 100, "{shared_blocks}");
    }

    #[test]
    fn the_prefix_has_the_smallest_share_of_the_group() {
        let members: [(&[u16], u64, u64); 2] = [(&[10, 8, 0], 20, 10), (&[30, 2, 9], 30, 12)];
        let group = Group::new("g", &members).unwrap();
        assert_eq!((group.tokens, &group.counts[..]), (10, &[5, 0, 0][..]));
        assert_eq!(
            Group::new("g", &[(&[1], 1, 9)]),
            None,
            "one token is not in the prefix"
        );
        assert_eq!(Group::new("g", &[(&[1], 9, 0)]), None);
    }

    #[test]
    fn a_prompt_no_longer_than_the_prefix_does_not_share_it() {
        let group = Group::new("g", &[(&[10], 20, 10)]);
        let spread = Spread {
            counts: vec![10],
            group,
        };
        assert_eq!(spread.group(10), None);
        assert_eq!(spread.until(10, 10), [10]);
        assert!(spread.group(11).is_some());
        assert_eq!(spread.until(11, 11), [10]);
    }
}
