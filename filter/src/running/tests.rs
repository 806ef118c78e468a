use eldr_core::batch::Request;
use proptest::prelude::*;

use super::*;
use crate::load::{Flight, Loads};
use crate::shared::memory::Memory;

const TIMING: Timing = Timing {
    lease_ms: 2_000,
    refresh_ms: 0,
};
const EXPERTS: usize = 4;

fn names(count: usize) -> Vec<String> {
    (0..count).map(|index| format!("decode-{index}")).collect()
}

fn kind(workers: &[String], layers: Vec<u16>) -> Kind<'_> {
    Kind {
        model: "*",
        measure: Measure::Usage,
        geometry: Geometry {
            layers: 3,
            experts: EXPERTS,
        },
        layers,
        workers,
        steps: Some(StepModel::QWEN3_30B_A3B),
    }
}

fn request(batches: &Batches, expert: usize) -> Request {
    let mut counts = vec![0.0; batches.layers().len() * EXPERTS];
    counts[expert] = 10.0;
    let mut request = Request::default();
    assert!(batches.see(&counts, 10, 0, &mut request));
    request
}

/// A thread as the host runs it.
#[derive(Default)]
struct Vm {
    loads: Loads,
    running: Running,
    held: Vec<(Flight, Option<Seat>)>,
}

impl Vm {
    fn place(
        &mut self,
        shared: &Memory,
        kind: &Kind<'_>,
        worker: usize,
        expert: usize,
        now_ms: u64,
    ) {
        self.loads.claim(shared, now_ms, TIMING);
        self.loads.refresh(shared, now_ms, TIMING);
        let slots = self.loads.slots();
        let key = self.running.keep(kind, shared, slots, now_ms, TIMING);
        let key = key.unwrap();
        let flight = self
            .loads
            .start(shared, &kind.workers[worker], 0, now_ms, TIMING);
        let request = request(self.running.of(key).unwrap().batches, expert);
        let worker = WorkerIndex(worker);
        let seat = self.running.join(key, worker, &request, now_ms);
        self.held.push((flight, seat));
    }

    fn end(&mut self, shared: &Memory, index: usize, now_ms: u64) {
        let (flight, seat) = self.held.swap_remove(index);
        self.running.leave(seat.unwrap(), None, now_ms);
        self.loads.end(shared, flight, now_ms, TIMING);
    }

    fn tick(&mut self, shared: &Memory, now_ms: u64) {
        self.loads.tick(shared, now_ms, TIMING);
        self.loads.refresh(shared, now_ms, TIMING);
        let slots = self.loads.slots();
        self.running.tick(shared, slots, now_ms, TIMING);
    }
}

#[derive(Debug, Clone)]
enum Act {
    Place {
        vm: usize,
        worker: usize,
        expert: usize,
    },
    End {
        vm: usize,
        index: prop::sample::Index,
    },
    /// The VM is lost with its streams, and another takes its place.
    Trap {
        vm: usize,
    },
    Tick,
}

fn act() -> impl Strategy<Value = Act> {
    let place = (0usize..3, 0usize..2, 0usize..EXPERTS);
    prop_oneof![
        5 => place.prop_map(|(vm, worker, expert)| Act::Place { vm, worker, expert }),
        3 => (0usize..3, any::<prop::sample::Index>()).prop_map(|(vm, index)| Act::End { vm, index }),
        1 => (0usize..3).prop_map(|vm| Act::Trap { vm }),
        3 => Just(Act::Tick),
    ]
}

proptest! {
    #[test]
    fn every_thread_knows_what_all_live_ones_run_and_in_the_end_nothing_is_left(
        acts in proptest::collection::vec(act(), 0..60),
    ) {
        let (shared, workers) = (Memory::default(), names(2));
        let kind = kind(&workers, vec![0, 2]);
        let mut vms: [Vm; 3] = Default::default();
        let mut now_ms = 1_000_000;
        for act in acts {
            match act {
                Act::Place { vm, worker, expert } => vms[vm].place(&shared, &kind, worker, expert, now_ms),
                Act::End { vm, index } if !vms[vm].held.is_empty() => {
                    let index = index.index(vms[vm].held.len());
                    vms[vm].end(&shared, index, now_ms);
                }
                Act::End { .. } => {}
                Act::Trap { vm } => {
                    vms[vm] = Vm::default();
                    // The others live on; what the dead one told expires.
                    for _ in 0..11 {
                        now_ms += 200;
                        vms.iter_mut().for_each(|vm| vm.tick(&shared, now_ms));
                    }
                }
                Act::Tick => {
                    now_ms += 200;
                    // All tell, then all hear.
                    vms.iter_mut().for_each(|vm| vm.tick(&shared, now_ms));
                    now_ms += 200;
                    vms.iter_mut().for_each(|vm| vm.tick(&shared, now_ms));
                    for worker in &workers {
                        let held = vms.iter().flat_map(|vm| &vm.held);
                        let all = held.filter(|(flight, _)| flight.cluster() == worker).count();
                        for vm in vms.iter().filter(|vm| !vm.running.books.is_empty()) {
                            prop_assert_eq!(vm.running.known(worker) as usize, all);
                            prop_assert_eq!(vm.loads.in_flight(worker) as usize, all);
                        }
                    }
                }
            }
        }
        for vm in &mut vms {
            while !vm.held.is_empty() {
                vm.end(&shared, 0, now_ms);
            }
        }
        for _ in 0..2 {
            now_ms += 200;
            vms.iter_mut().for_each(|vm| vm.tick(&shared, now_ms));
        }
        let new = Batches::new(kind.measure, kind.geometry, kind.layers.clone(), 2).unwrap();
        for vm in &mut vms {
            for book in vm.running.books.values_mut() {
                book.without_totals();
                prop_assert_eq!(&book.batches, &new);
            }
        }
        let slots = Slots { own: None, count: 8 };
        prop_assert!(others(&shared, slots, now_ms, TIMING).is_empty(), "a record that says something");
        // And then even the batches are forgotten.
        now_ms += IDLE_MS + 200;
        vms.iter_mut().for_each(|vm| vm.tick(&shared, now_ms));
        prop_assert!(vms.iter().all(|vm| vm.running.books.is_empty()));
    }

    #[test]
    fn a_record_that_is_none_is_passed_over(noise in proptest::collection::vec(any::<u8>(), 0..200)) {
        let (shared, workers) = (Memory::default(), names(2));
        let kind = kind(&workers, vec![0, 2]);
        let mut record = 1_000u64.to_le_bytes().to_vec();
        record.extend(noise);
        shared.set(&key(0), &record, None);
        let mut running = Running::default();
        let slots = Slots { own: Some(1), count: 2 };
        let kept = running.keep(&kind, &shared, slots, 1_000, TIMING).unwrap();
        running.tick(&shared, slots, 1_000, TIMING);
        let new = Batches::new(kind.measure, kind.geometry, kind.layers.clone(), 2).unwrap();
        prop_assert_eq!(running.of(kept).unwrap().batches, &new);
    }
}

#[test]
fn a_new_thread_knows_at_once_what_the_others_run() {
    let (shared, workers) = (Memory::default(), names(2));
    let kind = kind(&workers, vec![0, 2]);
    let [mut old, mut new] = <[Vm; 2]>::default();
    old.place(&shared, &kind, 1, 3, 1_000);
    old.tick(&shared, 1_200);
    new.place(&shared, &kind, 0, 1, 1_300);
    assert_eq!(
        [new.running.known("decode-0"), new.running.known("decode-1")],
        [1, 1]
    );
    // Past the lease of what the old one told.
    let mut late = Vm::default();
    late.place(&shared, &kind, 0, 1, 4_000);
    assert_eq!(late.running.known("decode-1"), 0);
}

#[test]
fn requests_in_flight_end_where_they_began_when_the_layers_or_the_workers_change() {
    let (shared, both, one) = (Memory::default(), names(2), names(1));
    let mut vm = Vm::default();
    let kinds = [
        kind(&both, vec![0, 2]),
        kind(&both, vec![1]),
        kind(&one, vec![0, 2]),
    ];
    for kind in &kinds {
        vm.place(&shared, kind, 0, 1, 1_000);
    }
    assert_eq!(vm.running.books.len(), 3);
    let known = |vm: &Vm| vm.running.known("decode-0");
    assert_eq!(known(&vm), 3);
    // Of each kind one is known; the other two are on the worker all the same.
    for kind in &kinds {
        vm.running
            .set_totals(kind.key(), 1_000, |name| (vm.loads.in_flight(name), 0));
        let batch = &vm.running.of(kind.key()).unwrap().batches.workers()[0];
        assert_eq!((batch.known(), batch.requests()), (1, 3));
    }
    for left in [2, 1, 0] {
        vm.end(&shared, 0, 1_000);
        assert_eq!(known(&vm), left);
    }
}

#[test]
fn a_request_that_another_worker_serves_counts_there() {
    let (shared, workers) = (Memory::default(), names(2));
    let kind = kind(&workers, vec![0]);
    let mut vm = Vm::default();
    vm.place(&shared, &kind, 0, 1, 1_000);
    let known = |running: &Running| ["decode-0", "decode-1"].map(|name| running.known(name));
    let (_, seat) = vm.held.remove(0);
    let seat = vm.running.change(seat.unwrap(), "decode-1", 1_000).unwrap();
    assert_eq!(known(&vm.running), [0, 1]);
    assert_eq!(vm.running.change(seat, "elsewhere", 1_000), None);
    assert_eq!(known(&vm.running), [0, 0]);
}

#[test]
fn what_does_not_fit_is_refused_unless_others_can_be_forgotten() {
    let (shared, workers) = (Memory::default(), names(64));
    let slots = Slots {
        own: None,
        count: 0,
    };
    let large = |model| Kind {
        model,
        measure: Measure::Usage,
        geometry: Geometry {
            layers: 512,
            experts: 128,
        },
        layers: (0..512).collect(),
        workers: &workers,
        steps: None,
    };
    let mut running = Running::default();
    let keep = |running: &mut Running, model| {
        let kind = large(model);
        running.keep(&kind, &shared, slots, 1_000, TIMING)
    };
    let first = keep(&mut running, "a").unwrap();
    let second = keep(&mut running, "b").unwrap();
    let unknown = Request::default();
    let seat = running.join(first, WorkerIndex(0), &unknown, 1_000);
    // `b` has no members.
    let third = keep(&mut running, "c").unwrap();
    assert!(running.of(second).is_none() && running.of(first).is_some());
    let other = running.join(third, WorkerIndex(0), &unknown, 1_000);
    assert_eq!(keep(&mut running, "d"), Err(Reason::GeometryMismatch));
    running.leave(seat.unwrap(), None, 1_000);
    assert!(keep(&mut running, "d").is_ok());
    running.leave(other.unwrap(), None, 1_000);
}

#[test]
fn what_a_step_costs_is_learned_from_requests_that_end_and_forgotten_with_what_was_stated() {
    let (shared, workers) = (Memory::default(), names(1));
    let stated = kind(&workers, vec![0, 2]);
    let mut vm = Vm::default();
    let steps = |vm: &Vm, kind: &Kind<'_>| vm.running.of(kind.key()).unwrap().steps;
    // Alone on the worker for a second, 20 ms a step.
    vm.place(&shared, &stated, 0, 1, 1_000);
    assert_eq!(steps(&vm, &stated), stated.steps);
    let (_, seat) = vm.held.remove(0);
    vm.running.leave(seat.unwrap(), Some(20.0), 2_000);
    // It uses one expert of one of the two layers.
    let learned = steps(&vm, &stated).unwrap();
    assert!(
        (learned.step_ms(0.49, 1, 0) - 20.0).abs() < 0.01,
        "{learned:?}"
    );
    // Other statements, or that nothing is to be learned, make another kind.
    let other = Kind {
        steps: Some(StepModel::GPT_OSS_120B),
        ..stated.clone()
    };
    let fixed = Kind {
        steps: None,
        ..stated.clone()
    };
    for kind in [&other, &fixed] {
        vm.place(&shared, kind, 0, 1, 2_000);
        assert_eq!(steps(&vm, kind), kind.steps);
    }
    let (_, seat) = vm.held.pop().unwrap();
    vm.running.leave(seat.unwrap(), Some(20.0), 3_000);
    assert_eq!(steps(&vm, &fixed), None);
}
