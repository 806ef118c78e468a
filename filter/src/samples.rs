//! Signatures that are sampled for whoever refits the blob: which requests', what waits for the next post, and how many
//! are under way. One of these per model and VM.
//!
//! No request waits for a sample. What waits is bounded in bytes and in number, new ones are dropped while there is no
//! room, and one batch at a time is under way; whoever counts finds each sample posted, dropped or still here.

/// Most bytes that wait, a line break after each signature included. `eldr serve` takes batches of four times as many.
pub const MAX_BYTES: usize = 1 << 20;
/// Most signatures that wait.
pub const MAX_SIGNATURES: u64 = 512;
/// From the beginning of one post to the next, milliseconds, at least.
pub const POST_EVERY_MS: u64 = 1_000;
/// A post that takes longer has failed, milliseconds.
pub const TIMEOUT_MS: u64 = 10_000;

/// 2^64 divided by the golden ratio.
const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

/// What is sampled of one model's requests.
#[derive(Debug)]
pub struct Samples {
    /// Share of the requests, in parts of 2^64.
    share: u64,
    turn: u64,
    /// Header values, a line break after each.
    lines: Vec<u8>,
    /// How many they are.
    waiting: u64,
    /// Signatures of the batch under way.
    under_way: Option<u64>,
    /// When it began, or the one before.
    begun_ms: u64,
}

impl Samples {
    /// Of this share of the requests, 0 to 1; `None` where that is none.
    pub fn new(share: f64) -> Option<Self> {
        (share > 0.0).then(|| Self {
            // Saturates: 1 is all.
            share: (share * 2f64.powi(64)) as u64,
            turn: 0,
            lines: Vec::new(),
            waiting: 0,
            under_way: None,
            begun_ms: 0,
        })
    }

    /// Whether the next request is one of those to sample.
    ///
    /// Multiples of the golden ratio, modulo one, are below the share just that often, and never in step with traffic
    /// that repeats itself, as every n-th request would be.
    pub fn is_in_turn(&mut self) -> bool {
        self.turn = self.turn.wrapping_add(STEP);
        self.turn <= self.share
    }

    /// Keeps a header value for the next batch; false if there is no room.
    pub fn push(&mut self, header: &[u8]) -> bool {
        let bytes = self.lines.len().saturating_add(header.len());
        if self.waiting >= MAX_SIGNATURES || bytes >= MAX_BYTES {
            return false;
        }
        self.lines.extend_from_slice(header);
        self.lines.push(b'\n');
        self.waiting += 1;
        true
    }

    /// What is to be posted now, if something waits and it is time. It is under way until [`answered`](Self::answered).
    pub fn batch(&mut self, now_ms: u64) -> Option<Vec<u8>> {
        // A clock that was set back must not put the next post off for ever.
        let is_time = now_ms.abs_diff(self.begun_ms) >= POST_EVERY_MS;
        if self.under_way.is_some() || self.waiting == 0 || !is_time {
            return None;
        }
        self.begun_ms = now_ms;
        self.under_way = Some(std::mem::take(&mut self.waiting));
        Some(std::mem::take(&mut self.lines))
    }

    /// The batch under way has ended, in whatever way: so many signatures it had.
    pub fn answered(&mut self) -> u64 {
        self.under_way.take().unwrap_or_default()
    }

    /// Forgets what waits: so many signatures it were.
    pub fn forget(&mut self) -> u64 {
        self.lines = Vec::new();
        std::mem::take(&mut self.waiting)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn samples(share: f64) -> Samples {
        Samples::new(share).unwrap()
    }

    #[test]
    fn all_are_sampled_or_none_where_that_is_asked_for() {
        assert!(Samples::new(0.0).is_none());
        let mut all = samples(1.0);
        assert!((0..100_000).all(|_| all.is_in_turn()));
    }

    #[test]
    fn one_batch_is_under_way_and_the_next_begins_a_second_later_at_the_earliest() {
        let mut samples = samples(1.0);
        assert_eq!(samples.batch(10_000), None, "nothing waits");
        assert!(samples.push(b"a") && samples.push(b"b"));
        assert_eq!(samples.batch(10_000).as_deref(), Some(&b"a\nb\n"[..]));
        assert!(samples.push(b"c"));
        assert_eq!(samples.batch(20_000), None, "one is under way");
        assert_eq!(samples.answered(), 2);
        assert_eq!(samples.answered(), 0, "it ends once");
        assert_eq!(samples.batch(10_999), None, "too early");
        assert_eq!(samples.batch(11_000).as_deref(), Some(&b"c\n"[..]));
        assert_eq!(samples.answered(), 1);
        assert!(samples.push(b"d"));
        assert!(samples.batch(5_000).is_some(), "the clock was set back");
    }

    #[test]
    fn what_waits_is_bounded_in_bytes_and_in_number_and_may_be_forgotten() {
        let mut short = samples(1.0);
        let kept = (0..2 * MAX_SIGNATURES).filter(|_| short.push(b":AA==:;l=1;e=1"));
        assert_eq!(kept.count() as u64, MAX_SIGNATURES);
        assert_eq!(short.forget(), MAX_SIGNATURES);
        assert_eq!((short.forget(), short.batch(10_000)), (0, None));
        let mut long = samples(1.0);
        assert!(!long.push(&vec![b'x'; MAX_BYTES]));
        assert!(long.push(&vec![b'x'; MAX_BYTES - 1]), "with its line break");
        assert!(!long.push(b""));
        assert_eq!(long.batch(10_000).unwrap().len(), MAX_BYTES);
        assert!(long.push(b"x"), "there is room while a batch is under way");
    }

    proptest! {
        /// Whatever repeats itself with whatever period has its share.
        #[test]
        fn each_of_a_few_kinds_of_requests_that_take_turns_is_sampled_alike(
            share in 0.001f64..=1.0,
            period in 1usize..=12,
        ) {
            let mut samples = samples(share);
            let mut sampled = vec![0u32; period];
            let rounds = 20_000;
            for _ in 0..rounds {
                for kind in &mut sampled {
                    *kind += u32::from(samples.is_in_turn());
                }
            }
            for kind in sampled {
                let expected = share * f64::from(rounds);
                prop_assert!((f64::from(kind) - expected).abs() < 100.0, "{kind} of {expected}");
            }
        }

        /// By a slow account of each signature: none is lost or twice there, and none beyond the bounds is here.
        #[test]
        fn each_signature_is_kept_or_dropped_and_each_kept_one_is_in_one_batch(
            steps in proptest::collection::vec((0u8..6, 0usize..400_000, 0u64..900), 1..200),
        ) {
            let mut samples = samples(1.0);
            let (mut waiting, mut under_way): (Vec<Vec<u8>>, Option<u64>) = (Vec::new(), None);
            let (mut now, mut begun) = (10_000, 0);
            for (serial, (step, length, pause)) in steps.into_iter().enumerate() {
                now += pause;
                match step {
                    0 => {
                        prop_assert_eq!(samples.answered(), under_way.take().unwrap_or(0));
                    }
                    1 => {
                        let due = under_way.is_none() && !waiting.is_empty() && now - begun >= 1_000;
                        let batch = samples.batch(now);
                        prop_assert_eq!(batch.is_some(), due);
                        if let Some(batch) = batch {
                            prop_assert!(batch.len() <= MAX_BYTES);
                            let lines = batch.strip_suffix(b"\n").unwrap().split(|&b| b == b'\n');
                            prop_assert!(lines.eq(waiting.iter().map(Vec::as_slice)));
                            begun = now;
                            under_way = Some(waiting.len() as u64);
                            waiting.clear();
                        }
                    }
                    _ => {
                        let mut header = format!("{serial}-").into_bytes();
                        header.resize(header.len() + length, b'x');
                        let bytes: usize = waiting.iter().map(|line| line.len() + 1).sum();
                        let room = bytes + header.len() < MAX_BYTES;
                        prop_assert_eq!(samples.push(&header), room);
                        if room {
                            waiting.push(header);
                        }
                    }
                }
            }
            prop_assert_eq!(samples.forget(), waiting.len() as u64);
            prop_assert_eq!(samples.answered(), under_way.unwrap_or(0));
        }
    }
}
