//! The event loop.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::Arc;
use std::time::Duration;

use eldr_core::decide::{Draw, Worker};
use eldr_core::engine::DecodeBatch;

use super::Cluster;
use super::arrivals::Arrival;
use super::changes::ChangeKind;
use super::measure::{Measures, Outcome};
use super::policy::{Ask, Router, Seat};
use super::views::{Answers, LoadUnit, Views};
use super::workload::Workload;

/// What happens next. The order is that of events at the same instant: workers first finish what they do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    /// A worker's step ends, if it has not failed since: of life `life`.
    Stepped {
        worker: usize,
        life: u32,
    },
    Changed {
        change: usize,
    },
    Shared,
    /// A request can be decided.
    Prefilled {
        arrival: usize,
    },
    /// Its KV blocks are where it decodes, unless it was sent elsewhere meanwhile.
    Transferred {
        arrival: usize,
        sent: u32,
    },
}

/// A request on its way.
#[derive(Clone, Copy, Debug, Default)]
struct Flight {
    worker: usize,
    /// How many times it was sent to a worker.
    sent: u32,
    /// Whether a worker has it, or will.
    in_flight: bool,
    /// What it adds to the load of its worker.
    load: u64,
    /// When it was last sent.
    from: Duration,
    first_token: Option<Duration>,
    /// When it was done.
    until: Duration,
}

struct Decoder {
    batch: DecodeBatch<usize>,
    stepping: bool,
    /// Times that it failed.
    life: u32,
}

/// Where and when a request was decoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Served {
    /// The worker that completed it.
    pub worker: usize,
    /// When it was sent there.
    pub from: Duration,
    /// When its last token came.
    pub until: Duration,
}

/// Serves `arrivals`, which ask for requests of `workload`, until the last one is done.
///
/// # Panics
/// If an arrival asks for a request that is not in the workload, or a change names no worker of the cluster, or a worker lacks a
/// placement.
pub fn run(
    cluster: &Cluster,
    workload: &Workload,
    arrivals: &[Arrival],
    router: &mut dyn Router,
) -> Outcome {
    run_served(cluster, workload, arrivals, router).0
}

/// As [`run`], and where each of the arrivals was decoded, in their order.
///
/// # Panics
/// As [`run`].
pub fn run_served(
    cluster: &Cluster,
    workload: &Workload,
    arrivals: &[Arrival],
    router: &mut dyn Router,
) -> (Outcome, Vec<Served>) {
    let batch = DecodeBatch::new(cluster.step, workload.geometry, cluster.batch_max)
        .with_kv_tokens_max(cluster.kv_tokens_max.unwrap_or(u64::MAX))
        .with_speculation(cluster.speculation);
    let decoder = |worker: usize| Decoder {
        batch: match &cluster.ranks[..] {
            [] => batch.clone(),
            [all] => batch.clone().with_ranks(Arc::clone(all)),
            each => batch.clone().with_ranks(Arc::clone(&each[worker])),
        },
        stepping: false,
        life: 0,
    };
    let live = cluster.share == Some(Duration::ZERO);
    let mut world = World {
        cluster,
        workload,
        arrivals,
        router,
        decoders: (0..cluster.decode_workers).map(decoder).collect(),
        views: Views::new(cluster.gateways, cluster.decode_workers, live),
        flights: vec![Flight::default(); arrivals.len()],
        decisions: vec![0; cluster.gateways],
        answers: vec![Answers::default(); cluster.gateways],
        events: BinaryHeap::new(),
        measures: Measures::new(cluster.decode_workers, &cluster.phases),
        seen: Vec::new(),
        undone: arrivals.len(),
        now: Duration::ZERO,
    };
    world.prefill();
    for (change, happens) in cluster.changes.iter().enumerate() {
        world.at(happens.at, Event::Changed { change });
    }
    if let Some(every) = cluster.share.filter(|every| !every.is_zero()) {
        world.at(every, Event::Shared);
    }
    while world.undone > 0 {
        let Some(Reverse((now, event))) = world.events.pop() else {
            break;
        };
        world.now = now;
        world.happens(event);
    }
    let served = world.flights.iter().map(|flight| Served {
        worker: flight.worker,
        from: flight.from,
        until: flight.until,
    });
    let served = served.collect();
    (world.measures.outcome(world.now), served)
}

struct World<'a> {
    cluster: &'a Cluster,
    workload: &'a Workload,
    arrivals: &'a [Arrival],
    router: &'a mut dyn Router,
    decoders: Vec<Decoder>,
    views: Views,
    flights: Vec<Flight>,
    /// By gateway, for round robin.
    decisions: Vec<u64>,
    /// By gateway.
    answers: Vec<Answers>,
    events: BinaryHeap<Reverse<(Duration, Event)>>,
    measures: Measures,
    /// Workers as the deciding gateway sees them.
    seen: Vec<Worker>,
    undone: usize,
    now: Duration,
}

impl World<'_> {
    fn at(&mut self, time: Duration, event: Event) {
        self.events.push(Reverse((time, event)));
    }

    /// The prefill pool: the first that is free takes who waited longest. Nothing that happens later changes it.
    fn prefill(&mut self) {
        let mut free: BinaryHeap<Reverse<Duration>> = BinaryHeap::new();
        free.extend((0..self.cluster.prefill_workers).map(|_| Reverse(Duration::ZERO)));
        let arrivals = self.arrivals;
        for (index, arrival) in arrivals.iter().enumerate() {
            let end = match free.pop() {
                None => arrival.at,
                Some(Reverse(free)) => free.max(arrival.at) + self.prefill_time(arrival),
            };
            if self.cluster.prefill_workers > 0 {
                free.push(Reverse(end));
            }
            self.at(end, Event::Prefilled { arrival: index });
        }
    }

    fn prefill_time(&self, arrival: &Arrival) -> Duration {
        match self.cluster.prefill_workers {
            0 => Duration::ZERO,
            _ => ms(self.cluster.prefill_ms_per_token * f64::from(arrival.prompt_tokens)),
        }
    }

    fn happens(&mut self, event: Event) {
        match event {
            Event::Prefilled { arrival } => self.decide(arrival),
            Event::Transferred { arrival, sent } => self.decode(arrival, sent),
            Event::Stepped { worker, life } => self.stepped(worker, life),
            Event::Changed { change } => self.change(change),
            Event::Shared => {
                self.views.share();
                let told = self.router.shared();
                self.measures.told(told);
                let every = self.cluster.share.unwrap_or_default();
                self.at(self.now + every, Event::Shared);
            }
        }
    }

    fn decide(&mut self, index: usize) {
        let arrival = &self.arrivals[index];
        let gateway = self.gateway(index);
        self.views.of(gateway, &mut self.seen);
        let sequence = self.decisions[gateway];
        self.decisions[gateway] += 1;
        let answer = self.answers[gateway].expected();
        let kv_tokens = arrival.prompt_tokens.saturating_add(answer);
        let load = match self.cluster.load_unit {
            LoadUnit::Requests => 1,
            LoadUnit::KvTokens => kv_tokens.into(),
        };
        let decision = self.router.choose(Ask {
            now: self.now,
            arrival: index,
            gateway,
            request: arrival.request,
            signature: arrival.signature,
            kv_tokens,
            workers: &self.seen,
            draw: Draw {
                sequence,
                entropy: arrival.entropy,
            },
        });
        let worker = decision.target.0;
        self.views.enter(gateway, worker, load);
        self.router.entered(Seat {
            now: self.now,
            gateway,
            worker,
            arrival: index,
        });
        self.measures.decided(worker, decision.reason);
        let flight = &mut self.flights[index];
        flight.worker = worker;
        flight.in_flight = true;
        flight.load = load;
        flight.from = self.now;
        flight.sent += 1;
        let sent = flight.sent;
        let there = self.now + ms(self.cluster.transfer_ms);
        self.at(
            there,
            Event::Transferred {
                arrival: index,
                sent,
            },
        );
    }

    fn gateway(&self, index: usize) -> usize {
        (self.arrivals[index].gateway % self.cluster.gateways as u64) as usize
    }

    fn decode(&mut self, index: usize, sent: u32) {
        let flight = self.flights[index];
        if flight.sent != sent {
            return;
        }
        let arrival = &self.arrivals[index];
        let experts = self.workload.requests[arrival.request].experts.clone();
        let decoder = &mut self.decoders[flight.worker];
        let batch = &mut decoder.batch;
        batch.join(index, experts, arrival.prompt_tokens, arrival.decode_tokens);
        if !decoder.stepping {
            self.step(flight.worker);
        }
    }

    /// Begins the worker's next step, if it has one.
    fn step(&mut self, worker: usize) {
        let decoder = &mut self.decoders[worker];
        decoder.stepping = !decoder.batch.is_idle();
        if !decoder.stepping {
            return;
        }
        let report = decoder.batch.step();
        let measured = self.cluster.warm_up..self.cluster.duration;
        if measured.contains(&self.now) {
            self.measures.stepped(report.batch(), report.mean_experts);
        }
        let (end, life) = (self.now + report.duration, decoder.life);
        self.at(end, Event::Stepped { worker, life });
    }

    fn stepped(&mut self, worker: usize, life: u32) {
        if self.decoders[worker].life != life {
            return;
        }
        for at in 0..self.decoders[worker].batch.last_step().batch() {
            let decoded = self.decoders[worker].batch.last_step().decoded[at];
            let flight = &mut self.flights[decoded.key];
            let first = *flight.first_token.get_or_insert(self.now);
            if decoded.last {
                self.done(decoded.key, decoded.token, first);
            }
        }
        self.step(worker);
    }

    fn done(&mut self, index: usize, tokens_after_first: u32, first: Duration) {
        let arrival = &self.arrivals[index];
        let decoding = (self.now - first).as_secs_f64() * 1e3;
        let tpot = (tokens_after_first > 0).then(|| decoding / f64::from(tokens_after_first));
        // Gateways see an event per step, whatever it accepts.
        let per_step = f64::from(self.cluster.speculation.accept.max(1));
        self.leave(index, tpot.map(|tpot| tpot * per_step));
        let gateway = self.gateway(index);
        self.answers[gateway].learn(arrival.decode_tokens);
        self.flights[index].until = self.now;
        self.undone -= 1;
        if arrival.at >= self.cluster.warm_up {
            let ttft = (first - arrival.at).as_secs_f64() * 1e3;
            self.measures.done(arrival.at, ttft, tpot);
        }
    }

    fn leave(&mut self, index: usize, step_ms: Option<f64>) {
        self.flights[index].in_flight = false;
        let (gateway, flight) = (self.gateway(index), &self.flights[index]);
        self.views.leave(gateway, flight.worker, flight.load);
        let seat = Seat {
            now: self.now,
            gateway,
            worker: flight.worker,
            arrival: index,
        };
        self.router.left(seat, step_ms);
    }

    fn change(&mut self, change: usize) {
        let change = self.cluster.changes[change];
        self.views
            .set_available(change.worker, change.kind == ChangeKind::Join);
        if change.kind != ChangeKind::Fail {
            return;
        }
        let decoder = &mut self.decoders[change.worker];
        decoder.batch.clear();
        decoder.stepping = false;
        decoder.life += 1;
        // Those whose blocks are still on their way as well.
        for index in 0..self.flights.len() {
            let flight = &mut self.flights[index];
            if !flight.in_flight || flight.worker != change.worker {
                continue;
            }
            flight.sent += 1;
            self.leave(index, None);
            self.measures.restarted();
            let again = self.now + self.prefill_time(&self.arrivals[index]);
            self.at(again, Event::Prefilled { arrival: index });
        }
    }
}

fn ms(ms: f64) -> Duration {
    Duration::try_from_secs_f64(ms / 1e3).unwrap_or_default()
}
