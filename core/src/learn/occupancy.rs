//! What ran on a worker, over time.

/// What runs on a worker, or ran there in the mean.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Met {
    /// Distinct experts per layer that a step is expected to use.
    pub experts: f64,
    /// Requests in the batch.
    pub requests: f64,
    /// Tokens in the KV cache.
    pub kv_tokens: f64,
}

impl Met {
    fn map2(self, other: Met, f: impl Fn(f64, f64) -> f64) -> Met {
        Met {
            experts: f(self.experts, other.experts),
            requests: f(self.requests, other.requests),
            kv_tokens: f(self.kv_tokens, other.kv_tokens),
        }
    }
}

/// What ran on a worker, summed over time: what a request met there is the difference between its end and its beginning, so that
/// nothing is to be done for those in flight when others come and go.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Occupancy {
    now: Met,
    /// Times milliseconds.
    sum: Met,
    since_ms: f64,
}

impl Occupancy {
    /// The same at `now_ms`. A clock that goes back stands still.
    #[must_use]
    pub fn at(self, now_ms: f64) -> Self {
        Self {
            sum: self.sum_at(now_ms),
            since_ms: self.since_ms.max(now_ms),
            ..self
        }
    }

    /// So much runs from `now_ms` on.
    pub fn set(&mut self, now: Met, now_ms: f64) {
        *self = Self {
            now,
            ..self.at(now_ms)
        };
    }

    /// What ran in the mean since `begun` until `now_ms`; `None` where no time passed.
    pub fn mean_since(&self, begun: &Occupancy, now_ms: f64) -> Option<Met> {
        let lasted = now_ms.max(self.since_ms) - begun.since_ms;
        let sum = self.sum_at(now_ms);
        (lasted > 0.0).then(|| sum.map2(begun.sum, |end, begin| (end - begin) / lasted))
    }

    fn sum_at(&self, now_ms: f64) -> Met {
        let lasted = (now_ms - self.since_ms).max(0.0);
        self.sum.map2(self.now, |sum, now| sum + now * lasted)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn met(requests: f64) -> Met {
        Met {
            experts: 3.0 * requests,
            requests,
            kv_tokens: 100.0 * requests,
        }
    }

    proptest! {
        #[test]
        fn a_mean_is_that_of_every_millisecond(
            changes in proptest::collection::vec((0u32..50, 0u32..20), 1..20), begins in any::<prop::sample::Index>(), rest in 1u32..50,
        ) {
            let (mut occupancy, mut now) = (Occupancy::default(), 0);
            let begins = begins.index(changes.len());
            let (mut begun, mut each) = (Occupancy::default(), Vec::new());
            for (index, &(wait, requests)) in changes.iter().enumerate() {
                each.extend(std::iter::repeat_n(occupancy.now, wait as usize));
                now += wait;
                occupancy.set(met(requests.into()), now.into());
                if index == begins {
                    (begun, each) = (occupancy, Vec::new());
                }
            }
            each.extend(std::iter::repeat_n(occupancy.now, rest as usize));
            let found = occupancy.mean_since(&begun, f64::from(now + rest)).unwrap();
            let expected = each.iter().map(|met| met.requests).sum::<f64>() / each.len() as f64;
            for (found, factor) in [(found.requests, 1.0), (found.experts, 3.0), (found.kv_tokens, 100.0)] {
                prop_assert!((found - factor * expected).abs() < 1e-6 * factor, "{found} {expected}");
            }
        }
    }

    #[test]
    fn a_clock_that_goes_back_stands_still() {
        let mut occupancy = Occupancy::default();
        occupancy.set(met(2.0), 1_000.0);
        let begun = occupancy;
        assert_eq!(occupancy.mean_since(&begun, 900.0), None);
        occupancy.set(met(4.0), 900.0);
        assert_eq!(occupancy.mean_since(&begun, 1_010.0), Some(met(4.0)));
    }
}
