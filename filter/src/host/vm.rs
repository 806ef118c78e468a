//! What all contexts of one VM share: load counts, waiting prefill legs, metrics.

use std::cell::RefCell;
use std::collections::{HashMap, VecDeque};
use std::rc::Rc;

use eldr_core::decide::{Draw, Reason, Worker};
use eldr_core::route::Scratch;
use proxy_wasm::hostcalls;
use proxy_wasm::types::LogLevel;

use super::calls::{Call, Errand};
use super::metrics::Metrics;
use super::{EnvoyShared, log, now_ms, now_ns};
use crate::config::Config;
use crate::health::{Health, Sent};
use crate::load::{Flight, LoadUnit, Loads, Timing};
use crate::meter::Meter;
use crate::plugin::{ModelIndex, Now, Plugin};
use crate::reports::Reports;
use crate::request::Request;
use crate::running::{Key, Running};
use crate::tokens::Expected;

/// A plugin, which its root replaces blobs in, and the streams that use it.
pub(super) type SharedPlugin = Rc<RefCell<Plugin>>;
/// A request, which its stream and the root that runs its prefill leg both act on.
pub(super) type SharedRequest = Rc<RefCell<Request>>;

/// A stream that waits for its prefill leg.
#[derive(Clone)]
pub(super) struct Waiting {
    pub(super) plugin: SharedPlugin,
    pub(super) request: SharedRequest,
    pub(super) started_ms: u64,
    /// Length of the body the client sent; `None` where it did not say so in a header.
    pub(super) content_length: Option<usize>,
    /// Where this stream is counted, once its cluster is chosen.
    pub(super) counted: Rc<RefCell<Option<Flight>>>,
    /// The same until there is a verdict on how that cluster does.
    pub(super) sent: Rc<RefCell<Option<Sent>>>,
    pub(super) request_id: Rc<[u8]>,
    /// Times the answer, once a worker is chosen and where that is asked for.
    pub(super) meter: Rc<RefCell<Option<Meter>>>,
}

/// A stream of a plugin that has not shown yet that bodies come while headers are held.
pub(super) struct Starving {
    pub(super) waiting: Waiting,
    /// Bytes that Envoy had of the request when its headers came.
    pub(super) received: u64,
}

#[derive(Default)]
pub(super) struct Vm {
    pub(super) loads: Loads,
    pub(super) health: Health,
    pub(super) reports: Reports,
    pub(super) expected: Expected,
    pub(super) running: Running,
    pub(super) metrics: Metrics,
    pub(super) scratch: Scratch,
    /// Streams that wait, by context id.
    pub(super) waiting: HashMap<u32, Waiting>,
    /// Streams that wait for their body, while it is in doubt that one comes.
    pub(super) starving: HashMap<u32, Starving>,
    /// What roots are to dispatch for streams.
    pub(super) errands: VecDeque<Errand>,
    /// Calls under way, by token.
    pub(super) calls: HashMap<u32, Call>,
    /// How many of them are releases.
    pub(super) releases: usize,
    sequence: u64,
    /// Prefill legs have a sequence of their own: in step with the other, a round robin would skip workers.
    pub(super) turn: u64,
    entropy: u64,
}

thread_local! {
    // One thread runs a VM; nothing keeps this borrowed across a call that comes back.
    static VM: RefCell<Vm> = RefCell::default();
}

/// Runs `act` on this VM's state.
pub(super) fn with<T>(act: impl FnOnce(&mut Vm) -> T) -> T {
    VM.with(|vm| act(&mut vm.borrow_mut()))
}

impl Vm {
    /// Looks at what other threads know.
    pub(super) fn refresh(&mut self, now_ms: u64, config: &Config) {
        let timing = config.timing;
        self.loads.refresh(&EnvoyShared, now_ms, timing);
        self.health.refresh(&EnvoyShared, now_ms, timing.refresh_ms);
        if config.reporting.interval_ms > 0 {
            self.reports
                .refresh(&EnvoyShared, now_ms, timing.refresh_ms);
        }
    }

    /// The decode clusters as a decision sees them now, their loads in this unit.
    pub(super) fn workers(&self, plugin: &Plugin, unit: LoadUnit, now_ms: u64) -> Vec<Worker> {
        let config = plugin.config();
        plugin.workers(|cluster| {
            let report = self.reports.of(cluster, now_ms, config.reporting.stale_ms);
            let elsewhere = report.map_or(0, |report| report.elsewhere);
            let usage = report.and_then(|report| report.kv_usage);
            Now {
                load: self.loads.of(unit, cluster, elsewhere, &self.expected),
                is_available: self.health.is_available(cluster, now_ms, config.cool_down),
                is_full: usage.is_some_and(|usage| usage > config.kv_usage_limit),
            }
        })
    }

    /// The running batches that a request with this signature is held against, with all requests that are on the workers now; `None`
    /// where the model's policies look at none.
    pub(super) fn hold(
        &mut self,
        plugin: &Plugin,
        model: Option<ModelIndex>,
        signature: Option<&[u8]>,
        now_ms: u64,
    ) -> Option<Result<Key, Reason>> {
        let kind = match plugin.kind(model, signature)? {
            Ok(kind) => kind,
            Err(reason) => return Some(Err(reason)),
        };
        let config = plugin.config();
        let slots = self.loads.slots();
        let kept = self
            .running
            .keep(&kind, &EnvoyShared, slots, now_ms, config.timing);
        if let Ok(key) = kept {
            let Self {
                running,
                loads,
                reports,
                expected,
                ..
            } = self;
            running.set_totals(key, now_ms, |cluster| {
                let report = reports.of(cluster, now_ms, config.reporting.stale_ms);
                let elsewhere = report.map_or(0, |report| report.elsewhere);
                let of = |unit| loads.of(unit, cluster, elsewhere, expected);
                let tokens = match config.counts_tokens() {
                    true => of(LoadUnit::KvTokens),
                    false => 0.0,
                };
                (of(LoadUnit::Requests) as u32, tokens as u64)
            });
        }
        Some(kept)
    }

    /// A request to a decode cluster has ended, after decode steps of `step_ms` each, where that is known; the cluster's name.
    pub(super) fn end(
        &mut self,
        mut flight: Flight,
        step_ms: Option<f64>,
        timing: Timing,
    ) -> String {
        let now_ms = now_ms();
        if let Some(seat) = flight.rise() {
            self.running.leave(seat, step_ms, now_ms);
        }
        self.loads.end(&EnvoyShared, flight, now_ms, timing)
    }

    /// Randomness of one decision that a request is sent by: it takes a turn of the round robin.
    pub(super) fn draw(&mut self) -> Draw {
        self.sequence += 1;
        self.preview()
    }

    /// Randomness of a decision that leads to nothing: a round robin does not move on.
    pub(super) fn preview(&mut self) -> Draw {
        Draw {
            sequence: self.sequence,
            entropy: self.entropy(),
        }
    }

    /// A name that no other transfer has, on no thread of any gateway.
    pub(super) fn transfer_id(&mut self, timing: Timing) -> String {
        let slot = self.claim(timing).unwrap_or(usize::MAX);
        let (now, entropy) = (now_ns(), self.entropy());
        format!("xfer-{slot:x}-{now:x}-{entropy:016x}")
    }

    /// 64 random bits: splitmix64, seeded by the clock.
    pub(super) fn entropy(&mut self) -> u64 {
        if self.entropy == 0 {
            self.entropy = now_ns() | 1;
        }
        self.entropy = self.entropy.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut bits = self.entropy;
        bits = (bits ^ bits >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ bits >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        bits ^ bits >> 31
    }

    /// Claims this VM's slot and returns its number.
    pub(super) fn claim(&mut self, timing: Timing) -> Option<usize> {
        let slot = self.loads.claim(&EnvoyShared, now_ms(), timing);
        if slot.is_none() {
            log(
                LogLevel::Warn,
                "eldr: all load slots are taken, this thread counts for itself alone",
            );
        }
        slot
    }

    /// Asks the root of the current stream to dispatch something.
    ///
    /// The queue is registered anew each time: that binds it to the root of this very stream, which lives as
    /// long as the stream does, whatever was reconfigured meanwhile.
    pub(super) fn wake_root(&mut self, errand: Errand, timing: Timing) -> bool {
        let name = match self.claim(timing) {
            Some(slot) => format!("eldr.queue.{slot}"),
            // Without a slot there is no name that is this VM's alone but one made of its clock.
            None => format!("eldr.queue.x{:x}", self.entropy),
        };
        let woken = hostcalls::register_shared_queue(&name)
            .and_then(|queue| hostcalls::enqueue_shared_queue(queue, Some(b"1")))
            .is_ok();
        if woken {
            self.errands.push_back(errand);
        }
        woken
    }
}
