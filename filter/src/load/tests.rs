use proptest::prelude::*;

use super::*;
use crate::shared::memory::Memory;
use crate::tokens::Known;

const TIMING: Timing = Timing {
    lease_ms: 2_000,
    refresh_ms: 1,
};

/// One more request, of no tokens.
fn start(vm: &mut Loads, shared: &Memory, cluster: &str, now_ms: u64) -> Flight {
    vm.start(shared, cluster, 0, now_ms, TIMING)
}

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
    let of_a = start(&mut a, &shared, "d", 10);
    let of_b = start(&mut b, &shared, "d", 10);
    let _other = start(&mut a, &shared, "e", 10);
    assert_eq!(seen_by(&mut a, &shared, 11), 2);
    assert_eq!(seen_by(&mut b, &shared, 11), 2);
    a.end(&shared, of_a, 12, TIMING);
    assert_eq!(seen_by(&mut b, &shared, 13), 1);
    b.end(&shared, of_b, 14, TIMING);
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
    let _lost = dead.start(&shared, "d", 40, 0, TIMING);
    assert_eq!(seen_by(&mut alive, &shared, 1_999), 1);
    assert_eq!(alive.tokens("d"), 40);
    alive.tick(&shared, 2_000, TIMING);
    assert_eq!(seen_by(&mut alive, &shared, 2_001), 0);
    assert_eq!(alive.tokens("d"), 0);
    assert_eq!(Loads::default().claim(&shared, 2_001, TIMING), Some(0));
}

#[test]
fn a_heartbeat_keeps_a_slot_alive_without_requests() {
    let shared = Memory::default();
    let (mut a, mut b) = (Loads::default(), Loads::default());
    a.claim(&shared, 0, TIMING);
    b.claim(&shared, 0, TIMING);
    let _held = start(&mut a, &shared, "d", 0);
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
    let _first = start(&mut slow, &shared, "d", 0);
    assert_eq!(new.claim(&shared, 5_000, TIMING), Some(0));
    let _second = start(&mut new, &shared, "d", 5_000);
    slow.tick(&shared, 5_001, TIMING);
    assert_eq!(slow.claim(&shared, 5_001, TIMING), Some(1));
    assert_eq!(seen_by(&mut new, &shared, 5_002), 2);
    assert_eq!(seen_by(&mut slow, &shared, 5_002), 2);
}

#[test]
fn slots_of_threads_that_count_no_tokens_are_read_and_written_as_ever() {
    let shared = Memory::default();
    let (mut plain, mut counting) = (Loads::default(), Loads::default());
    plain.claim(&shared, 0, TIMING);
    counting.claim(&shared, 0, TIMING);
    let _one = start(&mut plain, &shared, "d", 7);
    let slot = shared.get("eldr.slot.0").0.unwrap();
    assert_eq!(slot, br#"{"heartbeat_ms":7,"in_flight":{"d":1}}"#);
    let two = counting.start(&shared, "d", 300, 7, TIMING);
    let slot = shared.get("eldr.slot.1").0.unwrap();
    let expected = br#"{"heartbeat_ms":7,"in_flight":{"d":1},"tokens":{"d":300}}"#;
    assert_eq!(slot, expected);
    assert_eq!(seen_by(&mut plain, &shared, 8), 2);
    assert_eq!(plain.tokens("d"), 300);
    counting.end(&shared, two, 9, TIMING);
    assert_eq!(seen_by(&mut plain, &shared, 10), 1);
    assert_eq!(plain.tokens("d"), 0);
}

#[test]
fn rubbish_in_a_slot_is_an_empty_slot() {
    let shared = Memory::default();
    shared.set("eldr.slot.0", b"\xff{", None);
    let mut vm = Loads::default();
    assert_eq!(vm.claim(&shared, 0, TIMING), Some(0));
}

#[test]
fn a_load_is_in_the_unit_that_is_asked_for_with_others_at_the_mean_of_ours() {
    let shared = Memory::default();
    let (mut vm, mut expected) = (Loads::default(), Expected::default());
    vm.claim(&shared, 0, TIMING);
    for prompt in [90, 290] {
        let known = Known {
            prompt: Some(prompt),
            limit: Some(10),
            sequences: 1,
        };
        let tokens = expected.arrives("m", known);
        let _held = vm.start(&shared, "d", tokens, 0, TIMING);
    }
    for (unit, alone, with_three_others) in [
        (LoadUnit::Requests, 2.0, 5.0),
        (LoadUnit::KvTokens, 400.0, 400.0 + 3.0 * 200.0),
    ] {
        assert_eq!(vm.of(unit, "d", 0, &expected), alone);
        assert_eq!(vm.of(unit, "d", 3, &expected), with_three_others);
        assert_eq!(vm.of(unit, "nobody's", 0, &expected), 0.0);
    }
}

const CLUSTERS: [&str; 3] = ["d", "e", "f"];

#[derive(Debug, Clone)]
enum Step {
    Arrive { cluster: usize, tokens: u32 },
    Leave { which: prop::sample::Index },
}

fn step() -> impl Strategy<Value = Step> {
    let tokens = prop_oneof![Just(0), 1u32..5_000, Just(u32::MAX)];
    prop_oneof![
        (0..CLUSTERS.len(), tokens).prop_map(|(cluster, tokens)| Step::Arrive { cluster, tokens }),
        any::<prop::sample::Index>().prop_map(|which| Step::Leave { which }),
    ]
}

proptest! {
    /// Against a list of who is there, summed anew each time.
    #[test]
    fn live_threads_agree_on_the_true_sums(
        steps in proptest::collection::vec((0usize..4, step(), 0u64..500), 1..60),
    ) {
        let shared = Memory::default();
        let mut vms: Vec<Loads> = (0..4).map(|_| Loads::default()).collect();
        let mut there: Vec<Vec<Flight>> = vms.iter().map(|_| Vec::new()).collect();
        let mut now = 0;
        for vm in &mut vms {
            vm.claim(&shared, now, TIMING);
        }
        for (at, step, pause) in steps {
            now += pause;
            for vm in &mut vms {
                vm.tick(&shared, now, TIMING);
            }
            match step {
                Step::Arrive { cluster, tokens } => {
                    let flight = vms[at].start(&shared, CLUSTERS[cluster], tokens, now, TIMING);
                    there[at].push(flight);
                }
                Step::Leave { which } if !there[at].is_empty() => {
                    let flight = which.index(there[at].len());
                    vms[at].end(&shared, there[at].remove(flight), now, TIMING);
                }
                Step::Leave { .. } => {}
            }
            now += 1;
            for vm in &mut vms {
                vm.refresh(&shared, now, TIMING);
                for cluster in CLUSTERS {
                    let all = there.iter().flatten().filter(|flight| flight.cluster() == cluster);
                    let tokens: Vec<u64> = all.map(|flight| flight.tokens().into()).collect();
                    prop_assert_eq!(vm.in_flight(cluster) as usize, tokens.len());
                    prop_assert_eq!(vm.tokens(cluster), tokens.iter().sum::<u64>());
                }
            }
        }
        // Nothing stays behind in the slots once all have left.
        for (vm, there) in vms.iter_mut().zip(there) {
            for flight in there {
                vm.end(&shared, flight, now, TIMING);
            }
            vm.tick(&shared, now, TIMING);
            let slot = vm.slot().unwrap();
            let bytes = shared.get(&format!("eldr.slot.{slot}")).0.unwrap();
            let expected = format!(r#"{{"heartbeat_ms":{now},"in_flight":{{}}}}"#);
            prop_assert_eq!(bytes, expected.into_bytes());
        }
    }
}
