use proptest::prelude::*;

use super::*;
use crate::shared::memory::Memory;

const COOL_DOWN: CoolDown = CoolDown {
    first_ms: 1_000,
    max_ms: 8_000,
};

/// One gateway of several threads that look at every request.
struct Threads {
    shared: Memory,
    threads: Vec<Health>,
}

impl Threads {
    fn new(count: usize) -> Self {
        Self {
            shared: Memory::default(),
            threads: (0..count).map(|_| Health::default()).collect(),
        }
    }

    fn available(&mut self, thread: usize, now_ms: u64) -> bool {
        let health = &mut self.threads[thread];
        health.refresh(&self.shared, now_ms, 0);
        health.is_available("d", now_ms, COOL_DOWN)
    }

    fn send(&mut self, thread: usize, now_ms: u64) -> Option<Sent> {
        let health = &mut self.threads[thread];
        health.send(&self.shared, "d", now_ms, COOL_DOWN)
    }

    fn learn(&mut self, thread: usize, sent: &Sent, verdict: Verdict, now_ms: u64) -> bool {
        let health = &mut self.threads[thread];
        health.learn(&self.shared, sent, verdict, now_ms, COOL_DOWN)
    }

    /// Sends and fails at once.
    fn fail(&mut self, thread: usize, now_ms: u64) {
        assert!(self.available(thread, now_ms));
        let sent = self.send(thread, now_ms).unwrap();
        assert!(self.learn(thread, &sent, Verdict::Failed, now_ms));
    }
}

#[test]
fn a_failure_takes_a_worker_out_on_every_thread_for_the_cool_down() {
    let mut gateway = Threads::new(2);
    gateway.fail(0, 10_000);
    for thread in 0..2 {
        assert!(!gateway.available(thread, 10_001));
        assert!(!gateway.available(thread, 10_999));
        assert!(gateway.available(thread, 11_000));
    }
    assert!(gateway.threads[0].is_available("e", 10_001, COOL_DOWN));
}

#[test]
fn one_trial_is_let_through_by_one_thread() {
    let mut gateway = Threads::new(2);
    gateway.fail(0, 0);
    assert!(gateway.available(0, 1_000) && gateway.available(1, 1_000));
    let trial = gateway.send(0, 1_000).unwrap();
    // The other thread had seen it due.
    assert_eq!(gateway.send(1, 1_000), None);
    assert!(!gateway.available(1, 5_000));
    assert!(!gateway.learn(0, &trial, Verdict::Answered, 5_000));
    assert!(gateway.available(0, 5_000) && gateway.available(1, 5_000));
    assert!(gateway.send(0, 5_000).is_some() && gateway.send(1, 5_000).is_some());
}

#[test]
fn each_failed_trial_doubles_the_cool_down_up_to_the_limit() {
    let mut gateway = Threads::new(1);
    let mut now = 0;
    for cool_down in [1_000, 2_000, 4_000, 8_000, 8_000] {
        gateway.fail(0, now);
        assert!(!gateway.available(0, now + cool_down - 1));
        now += cool_down;
    }
    let trial = (gateway.available(0, now), gateway.send(0, now));
    gateway.learn(0, &trial.1.unwrap(), Verdict::Answered, now);
    gateway.fail(0, now);
    assert!(gateway.available(0, now + 1_000), "an answer starts anew");
}

#[test]
fn a_worker_that_dies_with_many_requests_fails_once() {
    let mut gateway = Threads::new(1);
    let sent: Vec<Sent> = (0..50).filter_map(|_| gateway.send(0, 0)).collect();
    let failures = sent
        .iter()
        .filter(|sent| gateway.learn(0, sent, Verdict::Failed, 5))
        .count();
    assert_eq!((sent.len(), failures), (50, 1));
    assert!(gateway.available(0, 1_005));
}

#[test]
fn the_end_of_an_old_request_brings_nobody_back_but_one_sent_when_all_were_out_does() {
    let mut gateway = Threads::new(1);
    let old = gateway.send(0, 0).unwrap();
    gateway.fail(0, 10);
    gateway.learn(0, &old, Verdict::Answered, 20);
    assert!(!gateway.available(0, 20));
    let desperate = gateway.send(0, 30).unwrap();
    gateway.learn(0, &desperate, Verdict::Answered, 40);
    assert!(gateway.available(0, 40));
}

#[test]
fn a_trial_that_says_nothing_is_given_back_and_one_that_never_ends_is_given_up() {
    let mut gateway = Threads::new(1);
    gateway.fail(0, 0);
    assert!(gateway.available(0, 1_000));
    let trial = gateway.send(0, 1_000).unwrap();
    assert!(!gateway.available(0, 1_100));
    assert!(!gateway.learn(0, &trial, Verdict::Unknown, 1_100));
    assert!(gateway.available(0, 1_100));
    gateway.send(0, 1_100).unwrap();
    assert!(!gateway.available(0, 9_100));
    assert!(gateway.available(0, 9_101));
}

#[test]
fn switched_off_nobody_is_left_out() {
    let off = CoolDown {
        first_ms: 0,
        max_ms: 0,
    };
    let (shared, mut health) = (Memory::default(), Health::default());
    let sent = health.send(&shared, "d", 0, off).unwrap();
    assert!(!health.learn(&shared, &sent, Verdict::Failed, 0, off));
    assert!(health.is_available("d", 0, off));
}

#[test]
fn rubbish_in_shared_data_is_no_knowledge_and_a_clock_set_back_heals() {
    let mut gateway = Threads::new(1);
    gateway.shared.set(KEY, b"\xff{", None);
    gateway.fail(0, 1_000_000);
    assert!(!gateway.available(0, 1_000_000));
    assert!(gateway.available(0, 500_000));
}

#[test]
fn flags_and_details_are_told_apart() {
    let of = |flag: u32, details: &str| Verdict::of(1 << flag, details.as_bytes());
    assert_eq!(of(5, "upstream_reset_before_response"), Verdict::Failed);
    assert_eq!(of(1, "no_healthy_upstream"), Verdict::Failed);
    assert_eq!(of(24, "cluster_not_found"), Verdict::Failed);
    assert_eq!(of(14, "downstream_remote_disconnect"), Verdict::Unknown);
    assert_eq!(Verdict::of(0, b""), Verdict::Unknown);
    // A worker's own 503, even after a connection that failed before.
    assert_eq!(of(5, "via_upstream"), Verdict::Answered);
}

/// What a reader would say about one worker: a list of failures since the last answer, and who is on trial.
#[derive(Default)]
struct Oracle {
    failures: Vec<u64>,
    trial: Option<u64>,
}

impl Oracle {
    fn cool_down(&self) -> u64 {
        let mut cool_down = COOL_DOWN.first_ms;
        for _ in 1..self.failures.len() {
            cool_down = (cool_down * 2).min(COOL_DOWN.max_ms);
        }
        cool_down
    }

    fn available(&self, now: u64) -> bool {
        let Some(last) = self.failures.last() else {
            return true;
        };
        let tried = self
            .trial
            .is_some_and(|sent| now - sent <= COOL_DOWN.max_ms);
        now >= last + self.cool_down() && !tried
    }

    /// True if the request is a trial.
    fn send(&mut self, now: u64) -> bool {
        let trial = !self.failures.is_empty() && self.available(now);
        if trial {
            self.trial = Some(now);
        }
        trial
    }

    fn learn(&mut self, sent: u64, trial: bool, verdict: Verdict, now: u64) {
        let ours = trial && self.trial == Some(sent);
        let after = self.failures.last().is_none_or(|last| sent > *last);
        match verdict {
            Verdict::Answered if ours || after => *self = Self::default(),
            Verdict::Failed if ours || self.failures.is_empty() => {
                self.failures.push(now);
                self.trial = None;
            }
            Verdict::Unknown if ours => self.trial = None,
            _ => {}
        }
    }
}

fn verdict() -> impl Strategy<Value = Verdict> {
    prop_oneof![
        Just(Verdict::Failed),
        Just(Verdict::Answered),
        Just(Verdict::Unknown)
    ]
}

proptest! {
    #[test]
    fn every_thread_agrees_with_the_oracle(
        steps in proptest::collection::vec(
            (0usize..3, 1u64..1_000, any::<bool>(), any::<prop::sample::Index>(), verdict()),
            1..80,
        ),
    ) {
        let mut gateway = Threads::new(3);
        let mut oracle = Oracle::default();
        let mut under_way: Vec<(Sent, bool)> = Vec::new();
        let mut now = 0;
        for (thread, pause, send, which, verdict) in steps {
            now += pause;
            for thread in 0..3 {
                prop_assert_eq!(gateway.available(thread, now), oracle.available(now));
            }
            if send || under_way.is_empty() {
                let sent = gateway.send(thread, now).unwrap();
                let trial = oracle.send(now);
                prop_assert_eq!(sent.is_trial, trial);
                under_way.push((sent, trial));
            } else {
                let (sent, trial) = under_way.swap_remove(which.index(under_way.len()));
                gateway.learn(thread, &sent, verdict, now);
                oracle.learn(sent.at_ms, trial, verdict, now);
            }
        }
    }
}
