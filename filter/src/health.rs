//! Decode workers that do not answer are left out for a while: passive health, known to all threads.
//!
//! ```text
//!         failure               cool-down over             sent
//! in ───────────────► out ───────────────────► due ─────────────► on trial
//! ▲                    ▲                                             │ │
//! │                    └─────── failure: twice the cool-down ────────┘ │
//! └──────────────────────────────── answer ────────────────────────────┘
//! ```
//!
//! A worker that is *out* gets nothing while another is in. Once its cool-down is over exactly one request of the whole
//! gateway is sent to it. One that says nothing (its client left) gives the trial back; one that never ends, because
//! its thread died, is given up after the longest cool-down.
//!
//! A verdict on a request that was sent before its worker was taken out is old news: a worker that dies with fifty
//! requests fails once, and the end of an old stream does not bring it back.
//!
//! What is known is one entry of shared data, which is empty as long as all is well, so that looking costs one read.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::shared::Shared;

const KEY: &str = "eldr.health";

/// Attempts to write against other threads. Each loses only to one that wrote, so more than threads is enough.
const MAX_ATTEMPTS: usize = crate::load::MAX_SLOTS;

/// An entry whose cool-down has been over for this many of the longest ones is forgotten: nobody sends there.
const FORGET_AFTER: u64 = 10;

/// How long a worker is left out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CoolDown {
    /// After the first failure, milliseconds; 0 leaves nobody out.
    pub first_ms: u64,
    /// Doubling ends here, milliseconds.
    pub max_ms: u64,
}

impl CoolDown {
    /// The cool-down after this many failures in a row.
    fn after(self, failures: u32) -> u64 {
        let doublings = failures.saturating_sub(1).min(63);
        self.first_ms
            .saturating_mul(1 << doublings)
            .min(self.max_ms.max(self.first_ms))
    }
}

/// A worker that failed and has not answered since.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
struct Out {
    /// In a row.
    failures: u32,
    /// When the last of them was, wall clock, milliseconds.
    since_ms: u64,
    /// End of the cool-down.
    until_ms: u64,
    /// When the trial request was sent, while it is under way.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    trial_ms: Option<u64>,
}

impl Out {
    fn is_due(&self, now_ms: u64, cool_down: CoolDown) -> bool {
        // A clock that was set back must not keep a worker out for longer than the longest cool-down.
        let cooling = now_ms < self.until_ms && self.until_ms - now_ms <= cool_down.max_ms;
        let tried = |sent: u64| now_ms.abs_diff(sent) <= cool_down.max_ms;
        !cooling && !self.trial_ms.is_some_and(tried)
    }
}

/// What became of a request that was sent to a worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// The worker answered, with whatever status.
    Answered,
    /// No worker was reached, or it broke off before it answered.
    Failed,
    /// Neither: the client left, or another part of the gateway answered.
    Unknown,
}

/// Bits of Envoy's response flags that stand for a worker that did not answer: no healthy host (UH), reset (UR), connection
/// failure (UF) or termination (UC), circuit breaker (UO), no such cluster (NC), no address (DF).
const NOT_ANSWERED: u64 = 1 << 1 | 1 << 4 | 1 << 5 | 1 << 6 | 1 << 7 | 1 << 24 | 1 << 26;

impl Verdict {
    /// Reads Envoy's `response.flags`, and `response.code_details`, which is `via_upstream` for an answer that came from
    /// a worker.
    pub fn of(flags: u64, code_details: &[u8]) -> Self {
        if code_details == b"via_upstream" {
            Self::Answered
        } else if flags & NOT_ANSWERED != 0 {
            Self::Failed
        } else {
            Self::Unknown
        }
    }
}

/// A request that was sent to a worker, until there is a verdict on it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sent {
    cluster: String,
    at_ms: u64,
    is_trial: bool,
}

impl Sent {
    /// Where it was sent.
    pub fn cluster(&self) -> &str {
        &self.cluster
    }
}

/// One thread's view of which workers are out.
#[derive(Debug, Default)]
pub struct Health {
    out: BTreeMap<String, Out>,
    version: Option<u32>,
    read_ms: Option<u64>,
}

impl Health {
    /// Reads what is known, if the last look is too old.
    pub fn refresh(&mut self, shared: &impl Shared, now_ms: u64, refresh_ms: u64) {
        let fresh = |read: u64| now_ms.abs_diff(read) < refresh_ms;
        if !self.read_ms.is_some_and(fresh) {
            self.read(shared, now_ms);
        }
    }

    /// Whether a request may be sent to the worker now: it is in, or due for a trial.
    pub fn is_available(&self, cluster: &str, now_ms: u64, cool_down: CoolDown) -> bool {
        let out = self.out.get(cluster);
        cool_down.first_ms == 0 || out.is_none_or(|out| out.is_due(now_ms, cool_down))
    }

    /// A request goes to the worker; one that is due gets it as its trial. `None` if another thread's trial was
    /// first, and the worker is not available after all.
    pub fn send(
        &mut self,
        shared: &impl Shared,
        cluster: &str,
        now_ms: u64,
        cool_down: CoolDown,
    ) -> Option<Sent> {
        let sent = |is_trial| {
            Some(Sent {
                cluster: cluster.to_owned(),
                at_ms: now_ms,
                is_trial,
            })
        };
        let is_due = |out: &Out| out.is_due(now_ms, cool_down);
        if cool_down.first_ms == 0 || !self.out.get(cluster).is_some_and(is_due) {
            return sent(false);
        }
        let claimed = self.change(shared, now_ms, |workers| match workers.get_mut(cluster) {
            Some(out) if out.is_due(now_ms, cool_down) => {
                out.trial_ms = Some(now_ms);
                true
            }
            _ => false,
        });
        match self.out.get(cluster) {
            _ if claimed => sent(true),
            Some(_) => None,
            None => sent(false),
        }
    }

    /// Takes the verdict on a request. True if it took the worker out, or left it out for longer.
    pub fn learn(
        &mut self,
        shared: &impl Shared,
        sent: &Sent,
        verdict: Verdict,
        now_ms: u64,
        cool_down: CoolDown,
    ) -> bool {
        let known = self.out.get(&sent.cluster);
        // All is well, which is nearly always: nothing to write.
        if cool_down.first_ms == 0 || (known.is_none() && verdict != Verdict::Failed) {
            return false;
        }
        let cluster = &sent.cluster;
        let changed = self.change(shared, now_ms, |workers| {
            let forget = cool_down.max_ms.saturating_mul(FORGET_AFTER);
            workers.retain(|_, out| now_ms < out.until_ms.saturating_add(forget));
            let Some(out) = workers.get_mut(cluster) else {
                if verdict == Verdict::Failed {
                    let out = Out {
                        failures: 1,
                        since_ms: now_ms,
                        until_ms: now_ms.saturating_add(cool_down.after(1)),
                        trial_ms: None,
                    };
                    workers.insert(cluster.clone(), out);
                }
                return verdict == Verdict::Failed;
            };
            let ours = sent.is_trial && out.trial_ms == Some(sent.at_ms);
            match verdict {
                // What was sent when all were out tells as much as a trial.
                Verdict::Answered if ours || sent.at_ms > out.since_ms => {
                    workers.remove(cluster).is_some()
                }
                Verdict::Failed if ours => {
                    out.failures = out.failures.saturating_add(1);
                    out.since_ms = now_ms;
                    out.until_ms = now_ms.saturating_add(cool_down.after(out.failures));
                    out.trial_ms = None;
                    true
                }
                Verdict::Unknown if ours => {
                    out.trial_ms = None;
                    true
                }
                _ => false,
            }
        });
        changed && verdict == Verdict::Failed
    }

    /// Applies `act` to what all threads know, against a version that nobody else changed. False if it changed nothing.
    fn change(
        &mut self,
        shared: &impl Shared,
        now_ms: u64,
        mut act: impl FnMut(&mut BTreeMap<String, Out>) -> bool,
    ) -> bool {
        for _ in 0..MAX_ATTEMPTS {
            self.read(shared, now_ms);
            if self.version.is_none() {
                shared.create(KEY);
                self.read(shared, now_ms);
            }
            let mut changed = self.out.clone();
            if !act(&mut changed) {
                return false;
            }
            let bytes = serde_json::to_vec(&changed).unwrap_or_default();
            if shared.set(KEY, &bytes, self.version) {
                self.out = changed;
                return true;
            }
        }
        false
    }

    fn read(&mut self, shared: &impl Shared, now_ms: u64) {
        let (value, version) = shared.get(KEY);
        self.read_ms = Some(now_ms);
        if version.is_some() && version == self.version {
            return; // what is known is still so
        }
        self.version = version;
        let known = value.and_then(|bytes| serde_json::from_slice(&bytes).ok());
        self.out = known.unwrap_or_default();
    }
}

#[cfg(test)]
mod tests;
