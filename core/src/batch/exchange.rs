//! What gateways, or the threads of one, tell each other of their requests.
//!
//! Each places requests of its own and knows only those exactly. Now and then it [shares](Batches::share) what it has in flight, and
//! [hears](Batches::hear) what the others have; what was heard before is taken off first, to the bit. Of an expert one byte is told, the
//! probability that none of the teller's requests uses it: an error of 0.002 at most, where a dot product with shares of tokens is taken.
//!
//! A message is little-endian: the key (8 bytes), then for each worker the known and the unknown requests (4 bytes each), their KV
//! tokens (8 bytes), and, where there are known ones, a byte per selected (layer, expert). 16 workers take 25 KB with 12 layers of 128 experts.

use super::{Batch, Batches, Measure, fixed};

/// What others run on a worker, as last heard.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct Others {
    /// Empty, or one per selected (layer, expert).
    costs: Vec<u32>,
    known: u32,
    unknown: u32,
    kv_tokens: u64,
}

/// One worker's part of a message.
struct Part<'a> {
    known: u32,
    unknown: u32,
    kv_tokens: u64,
    levels: &'a [u8],
}

impl<'a> Part<'a> {
    /// Reads the next part of a message about so many (layer, expert).
    fn next(message: &mut &'a [u8], dimension: usize) -> Option<Self> {
        let (&known, rest) = message.split_first_chunk()?;
        let (&unknown, rest) = rest.split_first_chunk()?;
        let (&kv_tokens, rest) = rest.split_first_chunk()?;
        let known = u32::from_le_bytes(known);
        let length = if known > 0 { dimension } else { 0 };
        let (levels, rest) = rest.split_at_checked(length)?;
        *message = rest;
        Some(Self {
            known,
            unknown: u32::from_le_bytes(unknown),
            kv_tokens: u64::from_le_bytes(kv_tokens),
            levels,
        })
    }
}

impl Batches {
    /// Writes what runs here by our own doing, without what was heard of others, in place of what is in `message`. The `key` stands
    /// for all that teller and hearer must agree on: which workers in which order, which layers.
    ///
    /// With [`Measure::Direction`] only numbers of requests are told.
    pub fn share(&self, key: u64, message: &mut Vec<u8>) {
        message.clear();
        message.extend(key.to_le_bytes());
        for batch in &self.workers {
            let others = &batch.others;
            let own = |all: u32, others: u32| all.saturating_sub(others);
            let (mut known, mut unknown) = (
                own(batch.known, others.known),
                own(batch.unknown, others.unknown),
            );
            if self.measure == Measure::Direction {
                (known, unknown) = (0, known.saturating_add(unknown));
            }
            let kv_tokens = batch.kv_tokens.saturating_sub(others.kv_tokens);
            message.extend(known.to_le_bytes());
            message.extend(unknown.to_le_bytes());
            message.extend(kv_tokens.to_le_bytes());
            if known > 0 {
                let start = message.len();
                message.resize(start + batch.sums.len(), 0);
                let told = message.get_mut(start..).unwrap_or_default();
                let each = told.iter_mut().zip(&batch.sums);
                if others.costs.is_empty() {
                    each.for_each(|(told, &sum)| *told = fixed::level(sum));
                } else {
                    each.zip(&others.costs).for_each(|((told, sum), heard)| {
                        *told = fixed::level(sum.wrapping_sub(*heard));
                    });
                }
            }
        }
    }

    /// Takes in what others told last, in place of what was heard before. Messages with another key, or that are not about as
    /// many workers and experts, are passed over; returns how many were not.
    pub fn hear<'m>(&mut self, key: u64, messages: impl IntoIterator<Item = &'m [u8]>) -> usize {
        let dimension = self.layers.len() * self.geometry.experts;
        let mut heard = vec![Others::default(); self.workers.len()];
        let costs: [u32; 256] = std::array::from_fn(|level| fixed::cost_of_level(level as u8));
        let mut understood = 0;
        for message in messages {
            let Some(parts) = parts(message, key, heard.len(), dimension) else {
                continue;
            };
            understood += 1;
            for (others, part) in heard.iter_mut().zip(parts) {
                others.known = others.known.saturating_add(part.known);
                others.unknown = others.unknown.saturating_add(part.unknown);
                others.kv_tokens = others.kv_tokens.saturating_add(part.kv_tokens);
                if !part.levels.is_empty() {
                    others.costs.resize(dimension, 0);
                }
                for (sum, &level) in others.costs.iter_mut().zip(part.levels) {
                    let cost = costs.get(usize::from(level)).copied();
                    *sum = sum.wrapping_add(cost.unwrap_or_default());
                }
            }
        }
        for (batch, others) in self.workers.iter_mut().zip(heard) {
            batch.hear(others);
        }
        understood
    }
}

/// The parts of a message, if it is one of this key and shape.
fn parts(message: &[u8], key: u64, workers: usize, dimension: usize) -> Option<Vec<Part<'_>>> {
    let (&found, mut rest) = message.split_first_chunk()?;
    let parts: Option<Vec<Part<'_>>> = (0..workers)
        .map(|_| Part::next(&mut rest, dimension))
        .collect();
    parts.filter(|_| u64::from_le_bytes(found) == key && rest.is_empty())
}

impl Batch {
    /// Replaces what is known of others.
    fn hear(&mut self, others: Others) {
        if others == self.others {
            return;
        }
        let before = std::mem::replace(&mut self.others, others);
        let Others {
            costs,
            known,
            unknown,
            kv_tokens,
        } = &self.others;
        let replace =
            |all: u32, before: u32, now: u32| all.saturating_sub(before).saturating_add(now);
        self.known = replace(self.known, before.known, *known);
        self.unknown = replace(self.unknown, before.unknown, *unknown);
        let own = self.kv_tokens.saturating_sub(before.kv_tokens);
        self.kv_tokens = own.saturating_add(*kv_tokens);
        for (sum, cost) in self.sums.iter_mut().zip(&before.costs) {
            *sum = sum.wrapping_sub(*cost);
        }
        for (sum, cost) in self.sums.iter_mut().zip(costs) {
            *sum = sum.wrapping_add(*cost);
        }
        self.show();
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::batch::{Footprint, Request};
    use crate::decide::WorkerIndex;
    use crate::signature::Geometry;

    const EXPERTS: usize = 8;

    fn idle(measure: Measure) -> Batches {
        let geometry = Geometry {
            layers: 3,
            experts: EXPERTS,
        };
        Batches::new(measure, geometry, vec![0, 2], 2).unwrap()
    }

    /// Counts of prompts of 20 tokens; none: an unknown request.
    fn requests() -> impl Strategy<Value = Vec<(usize, Option<Vec<u16>>)>> {
        let counts = proptest::collection::vec(0u16..=20, 2 * EXPERTS);
        let counts = counts.prop_filter("counts", |counts| counts.iter().any(|&count| count > 0));
        proptest::collection::vec((0usize..2, prop::option::weighted(0.8, counts)), 0..6)
    }

    fn place(batches: &mut Batches, requests: &[(usize, Option<Vec<u16>>)]) {
        for (worker, counts) in requests {
            let footprint = match counts {
                Some(counts) => see(batches, counts).footprint(),
                None => Footprint::unknown(70),
            };
            batches.join(WorkerIndex(*worker), &footprint);
        }
    }

    fn see(batches: &Batches, counts: &[u16]) -> Request {
        let counts: Vec<f32> = counts.iter().map(|&count| count.into()).collect();
        let mut request = Request::default();
        assert!(batches.see(&counts, 20, 70, &mut request));
        request
    }

    fn message(batches: &Batches, key: u64) -> Vec<u8> {
        let mut message = vec![1];
        batches.share(key, &mut message);
        message
    }

    proptest! {
        #[test]
        fn who_hears_all_others_knows_nearly_what_somebody_would_who_placed_all(
            tellers in proptest::collection::vec(requests(), 1..4),
            own in requests(),
            arriving in proptest::collection::vec(1u16..=20, 2 * EXPERTS),
        ) {
            let (mut here, mut all) = (idle(Measure::Usage), idle(Measure::Usage));
            place(&mut here, &own);
            place(&mut all, &own);
            let alone = here.clone();
            let mut messages = Vec::new();
            for requests in &tellers {
                let mut there = idle(Measure::Usage);
                place(&mut there, requests);
                place(&mut all, requests);
                messages.push(message(&there, 9));
            }
            let told: Vec<&[u8]> = messages.iter().map(Vec::as_slice).collect();
            prop_assert_eq!(here.hear(9, told.clone()), tellers.len());
            let request = see(&here, &arriving);
            for (here, all) in here.workers().iter().zip(all.workers()) {
                prop_assert_eq!((here.known(), here.requests(), here.kv_tokens()),
                    (all.known(), all.requests(), all.kv_tokens()));
                // Each teller's factor is off by 1/510 at most.
                let bound = tellers.len() as f64 * EXPERTS as f64 / 500.0;
                let extra = here.extra_experts(&request) - all.extra_experts(&request);
                let experts = here.expected_experts(&request) - all.expected_experts(&request);
                prop_assert!(extra.abs() < bound && experts.abs() < bound, "{extra}, {experts}");
            }
            // What was heard is not told again.
            prop_assert_eq!(message(&here, 9), message(&alone, 9));
            // Heard twice is heard once, and nobody leaves a trace.
            prop_assert_eq!(here.clone().hear(9, told.clone()), tellers.len());
            let mut again = here.clone();
            again.hear(9, told);
            prop_assert_eq!(&again, &here);
            prop_assert_eq!(here.hear(9, []), 0);
            prop_assert_eq!(here, alone);
        }

        #[test]
        fn what_is_not_such_a_message_changes_nothing(
            requests in requests(), cut in any::<prop::sample::Index>(), noise in proptest::collection::vec(any::<u8>(), 0..200),
        ) {
            let mut there = idle(Measure::Usage);
            place(&mut there, &requests);
            let whole = message(&there, 9);
            let long = [whole.as_slice(), &[0]].concat();
            let mut here = idle(Measure::Usage);
            let bad = [&whole[..cut.index(whole.len())], &long, &noise];
            prop_assert_eq!(here.hear(9, bad), 0);
            prop_assert_eq!(here.hear(8, [whole.as_slice()]), 0);
            prop_assert_eq!(here, idle(Measure::Usage));
        }
    }

    #[test]
    fn of_directions_only_numbers_are_told() {
        let mut there = idle(Measure::Direction);
        place(&mut there, &[(1, Some(vec![3; 2 * EXPERTS])), (1, None)]);
        let message = message(&there, 9);
        let mut here = idle(Measure::Direction);
        assert_eq!(here.hear(9, [message.as_slice()]), 1);
        let [_, batch] = here.workers() else { panic!() };
        assert_eq!((batch.known(), batch.requests()), (0, 2));
    }
}
