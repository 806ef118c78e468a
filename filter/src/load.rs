//! Requests in flight per cluster, over all threads of the gateway.
//!
//! Each VM (one per thread) owns a slot in shared data, writes only its own and reads the others. A slot carries a
//! heartbeat; one whose heartbeat is older than the lease does not count. So when a VM traps, its counts vanish
//! with the streams that the gateway dropped, and nothing ever has to be counted down on behalf of somebody else.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::shared::Shared;

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

/// What a slot holds.
#[derive(Debug, Serialize, Deserialize)]
struct Slot<Counts> {
    /// Wall clock, milliseconds.
    heartbeat_ms: u64,
    in_flight: Counts,
}

impl Slot<BTreeMap<String, u32>> {
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

/// One VM's view: its own counts, live, and those of others, as of the last look.
#[derive(Default)]
pub struct Loads {
    claim: Option<Claim>,
    own: BTreeMap<String, u32>,
    others: BTreeMap<String, u32>,
    others_read_ms: Option<u64>,
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

    /// One more request in flight.
    pub fn start(&mut self, shared: &impl Shared, cluster: &str, now_ms: u64, timing: Timing) {
        *self.own.entry(cluster.to_owned()).or_default() += 1;
        self.publish(shared, now_ms, timing);
    }

    /// One less.
    pub fn end(&mut self, shared: &impl Shared, cluster: &str, now_ms: u64, timing: Timing) {
        if let Some(count) = self.own.get_mut(cluster) {
            *count = count.saturating_sub(1);
            if *count == 0 {
                self.own.remove(cluster);
            }
        }
        self.publish(shared, now_ms, timing);
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
        self.others.clear();
        let own = self.claim.as_ref().map(|claim| claim.index);
        for index in 0..MAX_SLOTS {
            let (value, version) = shared.get(&key(index));
            if version.is_none() {
                break; // keys are created in order
            }
            let slot = value.and_then(|bytes| Slot::read(&bytes));
            let Some(slot) = slot.filter(|slot| slot.is_fresh(now_ms, timing.lease_ms)) else {
                continue;
            };
            if Some(index) != own {
                for (cluster, count) in slot.in_flight {
                    let sum = self.others.entry(cluster).or_default();
                    *sum = sum.saturating_add(count);
                }
            }
        }
    }

    /// Requests in flight to a cluster, from all threads.
    pub fn in_flight(&self, cluster: &str) -> u32 {
        let of = |counts: &BTreeMap<String, u32>| counts.get(cluster).copied().unwrap_or_default();
        of(&self.own).saturating_add(of(&self.others))
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
            in_flight: &self.own,
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
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::shared::memory::Memory;

    const TIMING: Timing = Timing {
        lease_ms: 2_000,
        refresh_ms: 1,
    };

    fn seen_by(vm: &mut Loads, shared: &Memory, now_ms: u64) -> u32 {
        vm.refresh(shared, now_ms, TIMING);
        vm.in_flight("d")
    }

    #[test]
    fn threads_see_each_others_requests() {
        let shared = Memory::default();
        let (mut a, mut b) = (Loads::default(), Loads::default());
        assert_eq!(a.claim(&shared, 0, TIMING), Some(0));
        assert_eq!(b.claim(&shared, 0, TIMING), Some(1));
        a.start(&shared, "d", 10, TIMING);
        b.start(&shared, "d", 10, TIMING);
        a.start(&shared, "e", 10, TIMING);
        assert_eq!(seen_by(&mut a, &shared, 11), 2);
        assert_eq!(seen_by(&mut b, &shared, 11), 2);
        a.end(&shared, "d", 12, TIMING);
        assert_eq!(seen_by(&mut b, &shared, 13), 1);
        b.end(&shared, "d", 14, TIMING);
        assert_eq!(
            (seen_by(&mut a, &shared, 15), seen_by(&mut b, &shared, 15)),
            (0, 0)
        );
        assert_eq!(a.in_flight("e"), 1);
    }

    #[test]
    fn the_counts_of_a_dead_thread_vanish_with_its_lease_and_its_slot_is_reused() {
        let shared = Memory::default();
        let (mut dead, mut alive) = (Loads::default(), Loads::default());
        dead.claim(&shared, 0, TIMING);
        alive.claim(&shared, 0, TIMING);
        dead.start(&shared, "d", 0, TIMING);
        assert_eq!(seen_by(&mut alive, &shared, 1_999), 1);
        alive.tick(&shared, 2_000, TIMING);
        assert_eq!(seen_by(&mut alive, &shared, 2_001), 0);
        assert_eq!(Loads::default().claim(&shared, 2_001, TIMING), Some(0));
    }

    #[test]
    fn a_heartbeat_keeps_a_slot_alive_without_requests() {
        let shared = Memory::default();
        let (mut a, mut b) = (Loads::default(), Loads::default());
        a.claim(&shared, 0, TIMING);
        b.claim(&shared, 0, TIMING);
        a.start(&shared, "d", 0, TIMING);
        for now in (0..10_000).step_by(200) {
            a.tick(&shared, now, TIMING);
        }
        assert_eq!(seen_by(&mut b, &shared, 10_000), 1);
    }

    #[test]
    fn a_thread_that_stood_still_moves_to_another_slot_and_keeps_its_counts() {
        let shared = Memory::default();
        let (mut slow, mut new) = (Loads::default(), Loads::default());
        slow.claim(&shared, 0, TIMING);
        slow.start(&shared, "d", 0, TIMING);
        assert_eq!(new.claim(&shared, 5_000, TIMING), Some(0));
        new.start(&shared, "d", 5_000, TIMING);
        slow.tick(&shared, 5_001, TIMING);
        assert_eq!(slow.claim(&shared, 5_001, TIMING), Some(1));
        assert_eq!(seen_by(&mut new, &shared, 5_002), 2);
        assert_eq!(seen_by(&mut slow, &shared, 5_002), 2);
    }

    #[test]
    fn ending_more_than_was_started_stays_at_zero() {
        let shared = Memory::default();
        let mut vm = Loads::default();
        vm.claim(&shared, 0, TIMING);
        vm.end(&shared, "d", 0, TIMING);
        vm.start(&shared, "d", 0, TIMING);
        assert_eq!(seen_by(&mut vm, &shared, 1), 1);
    }

    #[test]
    fn rubbish_in_a_slot_is_an_empty_slot() {
        let shared = Memory::default();
        shared.set("eldr.slot.0", b"\xff{", None);
        let mut vm = Loads::default();
        assert_eq!(vm.claim(&shared, 0, TIMING), Some(0));
    }

    proptest! {
        #[test]
        fn live_threads_agree_on_the_true_sum(
            steps in proptest::collection::vec((0usize..4, any::<bool>(), 0u64..500), 1..60),
        ) {
            let shared = Memory::default();
            let mut vms: Vec<Loads> = (0..4).map(|_| Loads::default()).collect();
            let mut truth = [0u32; 4];
            let mut now = 0;
            for vm in &mut vms {
                vm.claim(&shared, now, TIMING);
            }
            for (vm, start, pause) in steps {
                now += pause;
                for vm in &mut vms {
                    vm.tick(&shared, now, TIMING);
                }
                if start {
                    vms[vm].start(&shared, "d", now, TIMING);
                    truth[vm] += 1;
                } else {
                    vms[vm].end(&shared, "d", now, TIMING);
                    truth[vm] = truth[vm].saturating_sub(1);
                }
                now += 1;
                for vm in &mut vms {
                    prop_assert_eq!(seen_by(vm, &shared, now), truth.iter().sum::<u32>());
                }
            }
        }
    }
}
