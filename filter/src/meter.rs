//! TTFT and TPOT of one answer, from the moments at which pieces of its event stream pass.
//!
//! Nothing is held and nothing parsed: events end with an empty line (HTML standard §9.2.6), which is looked for in each
//! piece as it passes. Engines send one event per token (or per step, where speculative decoding verifies several), then
//! events without tokens: `[DONE]`, perhaps the usage. So what is called TPOT is the time per *event* after the first
//! one, of answers that came to their end; the few events at the end without tokens make it a little too small, for
//! both arms alike. What an answer's length is taken for, where load is counted in tokens, is the same number less `[DONE]`,
//! and so is what step times are learned from.

use eldr_core::decide::Policy;
use eldr_core::rollout::Rollout;

/// What one answer's times are counted to.
#[derive(Debug, Clone, PartialEq)]
pub struct Course {
    /// Policy that chose the worker.
    pub policy: Policy,
    /// The rollout that it is part of.
    pub rollout: Option<Rollout>,
}

/// Takes the times of one answer.
#[derive(Debug)]
pub struct Meter {
    /// None where only the length of the answer is of interest.
    course: Option<Course>,
    /// The gateway had the request, nanoseconds.
    begun_ns: u64,
    first_ns: Option<u64>,
    last_ns: u64,
    events: u64,
    /// The last byte that passed ended a line.
    at_line_start: bool,
    complete: bool,
}

/// Times of one answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Times {
    /// There is nothing to time.
    NothingPassed,
    /// The clock went back, or a wash-out or a switch of a rollout came in between.
    Spoiled,
    /// They count.
    Taken {
        /// Until the first event began to pass, milliseconds.
        ttft_ms: u64,
        /// Per event after the first, microseconds; `None` for an answer that broke off or had one event.
        tpot_us: Option<u64>,
    },
}

impl Meter {
    /// For a request that the gateway had at `begun_ns`; without a course its times are nobody's.
    pub fn new(course: Option<Course>, begun_ns: u64) -> Self {
        Self {
            course,
            begun_ns,
            first_ns: None,
            last_ns: begun_ns,
            events: 0,
            at_line_start: false,
            complete: false,
        }
    }

    /// What its times are counted to.
    pub fn course(&self) -> Option<&Course> {
        self.course.as_ref()
    }

    /// Tokens of an answer that came to its end, in all its sequences.
    pub fn output(&self) -> Option<u64> {
        let done = 1;
        (self.complete && self.events > 0).then(|| self.events.saturating_sub(done))
    }

    /// Milliseconds per decode step of an answer of so many sequences that came to its end, by its tokens alone: the events at the end would
    /// make steps of short answers seem shorter than those of long ones. `None` where there was one step only.
    pub fn step_ms(&self, sequences: u32) -> Option<f64> {
        let nanos = self.last_ns.checked_sub(self.first_ns?)?;
        let tokens = self.output()? as f64 / f64::from(sequences.max(1));
        (tokens > 1.0).then(|| nanos as f64 / 1e6 / (tokens - 1.0))
    }

    /// A piece of the answer passes.
    pub fn pass(&mut self, piece: &[u8], ends: bool, now_ns: u64) {
        self.complete |= ends;
        if piece.is_empty() {
            return;
        }
        self.first_ns.get_or_insert(now_ns);
        self.last_ns = now_ns;
        for &byte in piece {
            match byte {
                b'\n' => {
                    self.events += u64::from(self.at_line_start);
                    self.at_line_start = true;
                }
                b'\r' => {}
                _ => self.at_line_start = false,
            }
        }
    }

    /// The times, once the answer has ended.
    pub fn times(&self, now_ns: u64) -> Times {
        const MS: u64 = 1_000_000;
        let Some(first_ns) = self.first_ns else {
            return Times::NothingPassed;
        };
        let rollout = self.course.as_ref().and_then(|course| course.rollout);
        let counts = match rollout {
            Some(rollout) => rollout.counts(self.begun_ns / MS, now_ns / MS),
            None => true,
        };
        if !counts || first_ns < self.begun_ns || self.last_ns < first_ns {
            return Times::Spoiled;
        }
        let after_first = self.events.saturating_sub(1);
        let per_event = ((self.last_ns - first_ns) / 1_000).checked_div(after_first);
        Times::Taken {
            ttft_ms: (first_ns - self.begun_ns) / MS,
            tpot_us: per_event.filter(|_| self.complete),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MS: u64 = 1_000_000;

    fn meter(rollout: Option<Rollout>) -> Meter {
        let policy = Policy::Band;
        Meter::new(Some(Course { policy, rollout }), 10 * MS)
    }

    #[test]
    fn the_time_per_event_is_taken_between_the_first_and_the_last_piece() {
        let mut meter = meter(None);
        assert_eq!(meter.times(11 * MS), Times::NothingPassed);
        meter.pass(b"data: 1\n\n", false, 15 * MS);
        meter.pass(b"data: 2\n\ndata: 3\n\n", false, 17 * MS);
        let cut = Times::Taken {
            ttft_ms: 5,
            tpot_us: None,
        };
        assert_eq!(meter.times(17 * MS), cut);
        meter.pass(b"data: [DONE]\n\n", false, 18 * MS);
        meter.pass(b"", true, 19 * MS);
        let whole = Times::Taken {
            ttft_ms: 5,
            tpot_us: Some(1_000),
        };
        assert_eq!(meter.times(19 * MS), whole);
    }

    #[test]
    fn the_length_of_an_answer_is_known_once_it_has_ended() {
        let mut meter = Meter::new(None, 10 * MS);
        meter.pass(b"data: 1\n\ndata: 2\n\n", false, 15 * MS);
        assert_eq!(meter.output(), None);
        meter.pass(b"data: [DONE]\n\n", true, 18 * MS);
        assert_eq!((meter.output(), meter.course()), (Some(2), None));
        let mut empty = Meter::new(None, 10 * MS);
        empty.pass(b"", true, 15 * MS);
        assert_eq!(empty.output(), None);
    }

    #[test]
    fn a_step_takes_the_time_between_tokens_whatever_comes_after_them() {
        let mut meter = meter(None);
        meter.pass(b"data: 1\n\n", false, 15 * MS);
        meter.pass(b"data: 2\n\n", false, 25 * MS);
        meter.pass(b"data: 3\n\ndata: [DONE]\n\n", false, 35 * MS);
        assert_eq!(meter.step_ms(1), None, "not at its end");
        meter.pass(b"", true, 35 * MS);
        assert_eq!(meter.step_ms(1), Some(10.0));
        // Three sequences of one token each.
        assert_eq!(meter.step_ms(3), None);
        let mut two = super::Meter::new(None, 0);
        two.pass(b"a\n\nb\n\n", false, 10 * MS);
        two.pass(b"a\n\nb\n\n", false, 20 * MS);
        two.pass(b"a\n\nb\n\ndata: [DONE]\n\n", true, 30 * MS);
        assert_eq!(two.step_ms(2), Some(10.0));
    }

    #[test]
    fn a_single_event_has_no_time_per_event() {
        let mut meter = meter(None);
        meter.pass(b"data: 1\n\n", true, 15 * MS);
        let once = Times::Taken {
            ttft_ms: 5,
            tpot_us: None,
        };
        assert_eq!(meter.times(15 * MS), once);
    }

    #[test]
    fn what_a_switch_or_a_clock_spoils_is_not_counted() {
        let switchback = Rollout::Switchback {
            slice_ms: 100,
            washout_ms: 10,
        };
        let mut measured = meter(Some(switchback));
        measured.pass(b"data: 1\n\n", true, 50 * MS);
        assert!(matches!(measured.times(99 * MS), Times::Taken { .. }));
        assert_eq!(
            measured.times(100 * MS),
            Times::Spoiled,
            "the other arm's slice"
        );
        let mut set_back = meter(None);
        set_back.pass(b"data: 1\n\n", true, 9 * MS);
        assert_eq!(set_back.times(9 * MS), Times::Spoiled);
    }

    proptest! {
        #[test]
        fn events_are_counted_however_they_are_cut(
            texts in proptest::collection::vec("[a-z]{0,3}(\r?\n[a-z]{1,3})?", 0..12),
            carriage in any::<bool>(),
            cuts in proptest::collection::vec(any::<proptest::sample::Index>(), 0..8),
        ) {
            let end = if carriage { "\r\n\r\n" } else { "\n\n" };
            let stream: String = texts.iter().map(|text| format!("data: {text}{end}")).collect();
            let mut cuts: Vec<usize> = cuts.iter().map(|cut| cut.index(stream.len() + 1)).collect();
            cuts.sort_unstable();
            let mut meter = meter(None);
            let mut from = 0;
            for to in cuts.into_iter().chain([stream.len()]) {
                meter.pass(&stream.as_bytes()[from..to], false, 20 * MS);
                from = to;
            }
            prop_assert_eq!(meter.events, texts.len() as u64);
        }
    }
}
