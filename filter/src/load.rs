//! Requests in flight per cluster, and their tokens, over all threads of the gateway.
//!
//! Each VM (one per thread) owns a slot in shared data, writes only its own and reads the others. A slot carries a
//! heartbeat; one whose heartbeat is older than the lease does not count. So when a VM traps, its counts vanish
//! with the streams that the gateway dropped, and nothing ever has to be counted down on behalf of somebody else.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::running::Seat;
use crate::shared::Shared;
use crate::tokens::Expected;

/// Most threads that can share their counts. Keys of shared data cannot be deleted, so they are few and reused.
pub const MAX_SLOTS: usize = 256;

/// How long what is known stays good, milliseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Timing {
    /// A slot without a heartbeat for this long is dead.
    pub lease_ms: u64,
    /// Other slots are read again after this long.
    pub refresh_ms: u64,
}

/// The slots that threads of the gateway have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Slots {
    /// That of this VM.
    pub own: Option<usize>,
    /// So many were ever claimed, from the first on, as of the last look.
    pub count: usize,
}

/// What loads are compared in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LoadUnit {
    /// Requests in flight.
    #[default]
    Requests,
    /// Tokens that they have in a worker's KV cache, or will have: see [`tokens`](crate::tokens).
    KvTokens,
}

/// What a slot holds.
#[derive(Debug, Serialize, Deserialize)]
struct Slot<Counts, Tokens> {
    /// Wall clock, milliseconds.
    heartbeat_ms: u64,
    in_flight: Counts,
    /// Absent where nobody counts them.
    #[serde(skip_serializing_if = "Option::is_none")]
    tokens: Option<Tokens>,
}

impl Slot<BTreeMap<String, u32>, BTreeMap<String, u64>> {
    fn read(bytes: &[u8]) -> Option<Self> {
        serde_json::from_slice(bytes).ok()
    }

    /// A clock that was set back makes a heartbeat of the future; it is as suspicious as an old one.
    fn is_fresh(&self, now_ms: u64, lease_ms: u64) -> bool {
        now_ms.abs_diff(self.heartbeat_ms) <= lease_ms
    }
}

struct Claim {
    index: usize,
    version: Option<u32>,
}

/// A request that is counted: what [`Loads::start`] added is what [`Loads::end`] takes off, once.
#[derive(Debug, PartialEq)]
#[must_use = "what is started is to be ended"]
pub struct Flight {
    cluster: String,
    tokens: u32,
    seat: Option<Seat>,
}

impl Flight {
    /// Where it is.
    pub fn cluster(&self) -> &str {
        &self.cluster
    }

    /// Its tokens; 0 where they are not counted.
    pub fn tokens(&self) -> u32 {
        self.tokens
    }

    /// It has a place in a running batch from now on.
    pub fn sit(&mut self, seat: Option<Seat>) {
        self.seat = seat;
    }

    /// Gives that place up, if it has one.
    pub fn rise(&mut self) -> Option<Seat> {
        self.seat.take()
    }
}

/// Requests and tokens by cluster; what is 0 is not there.
#[derive(Debug, Default)]
struct Counts {
    requests: BTreeMap<String, u32>,
    tokens: BTreeMap<String, u64>,
}

/// One VM's view: its own counts, live, and those of others, as of the last look.
#[derive(Default)]
pub struct Loads {
    claim: Option<Claim>,
    own: Counts,
    others: Counts,
    others_read_ms: Option<u64>,
    slots: usize,
}

fn key(index: usize) -> String {
    format!("eldr.slot.{index}")
}

impl Loads {
    /// Takes a slot unless this VM has one. Call it for the first request, not when configured: a VM that only
    /// validates a configuration must not hold one. With all slots taken it counts for itself alone.
    pub fn claim(&mut self, shared: &impl Shared, now_ms: u64, timing: Timing) -> Option<usize> {
        if self.claim.is_none() {
            for index in 0..MAX_SLOTS {
                let key = key(index);
                if shared.get(&key).1.is_none() {
                    shared.create(&key);
                }
                let (value, version) = shared.get(&key);
                let taken = value
                    .and_then(|bytes| Slot::read(&bytes))
                    .is_some_and(|slot| slot.is_fresh(now_ms, timing.lease_ms));
                if !taken && version.is_some() {
                    self.claim = Some(Claim { index, version });
                    if self.write(shared, now_ms) {
                        break;
                    }
                }
            }
        }
        self.claim.as_ref().map(|claim| claim.index)
    }

    /// The slot that this VM has.
    pub fn slot(&self) -> Option<usize> {
        self.claim.as_ref().map(|claim| claim.index)
    }

    /// The slots that there are.
    pub fn slots(&self) -> Slots {
        let own = self.slot();
        let count = self.slots.max(own.map_or(0, |own| own + 1));
        Slots { own, count }
    }

    /// One more request in flight, with so many tokens.
    pub fn start(
        &mut self,
        shared: &impl Shared,
        cluster: &str,
        tokens: u32,
        now_ms: u64,
        timing: Timing,
    ) -> Flight {
        let cluster = cluster.to_owned();
        *self.own.requests.entry(cluster.clone()).or_default() += 1;
        if tokens > 0 {
            *self.own.tokens.entry(cluster.clone()).or_default() += u64::from(tokens);
        }
        self.publish(shared, now_ms, timing);
        Flight {
            cluster,
            tokens,
            seat: None,
        }
    }

    /// One less; the name of its cluster.
    pub fn end(
        &mut self,
        shared: &impl Shared,
        flight: Flight,
        now_ms: u64,
        timing: Timing,
    ) -> String {
        let Flight {
            cluster, tokens, ..
        } = flight;
        if let Some(count) = self.own.requests.get_mut(&cluster) {
            *count = count.saturating_sub(1);
            if *count == 0 {
                self.own.requests.remove(&cluster);
            }
        }
        if let Some(sum) = self.own.tokens.get_mut(&cluster) {
            *sum = sum.saturating_sub(tokens.into());
            if *sum == 0 {
                self.own.tokens.remove(&cluster);
            }
        }
        self.publish(shared, now_ms, timing);
        cluster
    }

    /// The heartbeat. Nothing to do for a VM that never served a request.
    pub fn tick(&mut self, shared: &impl Shared, now_ms: u64, timing: Timing) {
        if self.claim.is_some() {
            self.publish(shared, now_ms, timing);
        }
    }

    /// Reads the other slots, if the last look is too old.
    pub fn refresh(&mut self, shared: &impl Shared, now_ms: u64, timing: Timing) {
        let fresh = |read: u64| now_ms.abs_diff(read) < timing.refresh_ms;
        if self.others_read_ms.is_some_and(fresh) {
            return;
        }
        self.others_read_ms = Some(now_ms);
        self.others = Counts::default();
        let own = self.claim.as_ref().map(|claim| claim.index);
        for index in 0..MAX_SLOTS {
            let (value, version) = shared.get(&key(index));
            if version.is_none() {
                break; // keys are created in order
            }
            self.slots = self.slots.max(index + 1);
            let slot = value.and_then(|bytes| Slot::read(&bytes));
            let Some(slot) = slot.filter(|slot| slot.is_fresh(now_ms, timing.lease_ms)) else {
                continue;
            };
            if Some(index) != own {
                for (cluster, count) in slot.in_flight {
                    let sum = self.others.requests.entry(cluster).or_default();
                    *sum = sum.saturating_add(count);
                }
                for (cluster, count) in slot.tokens.unwrap_or_default() {
                    let sum = self.others.tokens.entry(cluster).or_default();
                    *sum = sum.saturating_add(count);
                }
            }
        }
    }

    /// Requests in flight to a cluster, from all threads.
    pub fn in_flight(&self, cluster: &str) -> u32 {
        let of = |counts: &Counts| counts.requests.get(cluster).copied().unwrap_or_default();
        of(&self.own).saturating_add(of(&self.others))
    }

    /// Tokens of the requests in flight to a cluster, from all threads that count them.
    pub fn tokens(&self, cluster: &str) -> u64 {
        let of = |counts: &Counts| counts.tokens.get(cluster).copied().unwrap_or_default();
        of(&self.own).saturating_add(of(&self.others))
    }

    /// Load of a cluster that so many requests of others are at besides.
    pub fn of(&self, unit: LoadUnit, cluster: &str, elsewhere: u32, expected: &Expected) -> f64 {
        match unit {
            LoadUnit::Requests => f64::from(self.in_flight(cluster).saturating_add(elsewhere)),
            LoadUnit::KvTokens => self.tokens(cluster) as f64 + expected.of_others(elsewhere),
        }
    }

    fn publish(&mut self, shared: &impl Shared, now_ms: u64, timing: Timing) {
        if self.claim.is_some() && !self.write(shared, now_ms) {
            // This VM stood still for longer than the lease and somebody else took the slot.
            self.claim(shared, now_ms, timing);
        }
    }

    /// Writes the slot; false, and no claim any more, if another VM has it.
    fn write(&mut self, shared: &impl Shared, now_ms: u64) -> bool {
        let Some(claim) = &mut self.claim else {
            return false;
        };
        let slot = Slot {
            heartbeat_ms: now_ms,
            in_flight: &self.own.requests,
            tokens: (!self.own.tokens.is_empty()).then_some(&self.own.tokens),
        };
        let key = key(claim.index);
        let bytes = serde_json::to_vec(&slot).unwrap_or_default();
        if shared.set(&key, &bytes, claim.version) {
            claim.version = shared.get(&key).1;
            true
        } else {
            self.claim = None;
            false
        }
    }
}

#[cfg(test)]
mod tests;
