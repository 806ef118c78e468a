//! Policies that look at running batches, and the batches that they look at.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use eldr_core::batch::{Batches, Footprint, Measure, spread};
use eldr_core::decide::{Decision, Rule, WorkerIndex};
use eldr_core::learn::{Learner, Stay};
use eldr_core::route::{Fleet, Prompt, Scratch, route_running};

use super::Cluster;
use super::follow::Follower;
use super::policy::{Ask, Known, Router, Seat};
use super::usage::Usage;
use super::workload::Workload;
use crate::error::Error;

/// Gateways of one simulation agree on all that a key stands for.
const KEY: u64 = 0;

/// Each gateway knows the batches that it makes itself; where gateways learn of each other at once, all know all. What they tell each
/// other later is how many requests, and with [`Cluster::share_batches`] the batches as well, by core's exchange.
pub(super) struct ByBatch<'a> {
    rule: Rule,
    known: Option<&'a Known>,
    /// Centroids that follow, in place of those known.
    follower: Option<Follower>,
    /// By request of the workload: signature and prompt tokens.
    prompts: Vec<(Option<Arc<str>>, u32)>,
    /// What the request that was last decided adds to a batch.
    decided: Footprint,
    /// What those in flight added, by arrival, and since when.
    in_flight: HashMap<usize, (Footprint, Option<Stay>)>,
    /// Beside each of the batches, where step coefficients are learned.
    learners: Vec<Learner>,
    exchanges: bool,
    /// By gateway, what it tells: buffers.
    messages: Vec<Vec<u8>>,
    /// Of each gateway, or one for all.
    batches: Vec<Batches>,
    scratch: Scratch,
}

impl<'a> ByBatch<'a> {
    pub(super) fn new(
        rule: Rule,
        measure: Measure,
        usage: Usage,
        known: Option<&'a Known>,
        workload: &Workload,
        cluster: &Cluster,
    ) -> Result<Self, Error> {
        let workers = cluster.decode_workers;
        let idle = match known {
            Some(known) => known.map.batches(measure, workers),
            None => {
                let layers: Vec<u16> = (0..workload.geometry.layers as u16).collect();
                Batches::new(measure, workload.geometry, spread(&layers), workers)
                    .map_err(|error| Error::new(error.to_string(), "record the trace again"))?
            }
        };
        let views = match cluster.share == Some(Duration::ZERO) {
            true => 1,
            false => cluster.gateways,
        };
        let prompts = workload.requests.iter().map(|request| {
            let tokens = request.prompt_tokens.unwrap_or_default();
            (usage.signature(request), tokens)
        });
        Ok(ByBatch {
            rule,
            known,
            follower: None,
            prompts: prompts.collect(),
            decided: Footprint::unknown(0),
            in_flight: HashMap::new(),
            learners: Vec::new(),
            exchanges: cluster.share_batches && views > 1,
            messages: vec![Vec::new(); views],
            batches: vec![idle; views],
            scratch: Scratch::default(),
        })
    }

    /// Centroids of their own, which follow what is asked for.
    pub(super) fn follow(&mut self, follower: Option<Follower>) {
        self.follower = follower;
    }

    /// Corrects the rule's step coefficients by the times of requests.
    pub(super) fn learn(&mut self) {
        let learner =
            |batches: &Batches| Learner::new(self.rule.objective.step, batches.workers().len());
        self.learners = self.batches.iter().map(learner).collect();
    }

    /// Tells the learner what a worker runs from now on.
    fn runs(&mut self, view: usize, worker: WorkerIndex, now_ms: f64) {
        if let Some(learner) = self.learners.get_mut(view) {
            learner.runs(worker, &self.batches[view], now_ms);
        }
    }

    fn view(&self, gateway: usize) -> usize {
        gateway % self.batches.len()
    }
}

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

impl Router for ByBatch<'_> {
    fn choose(&mut self, ask: Ask<'_>) -> Decision {
        let (header, tokens) = &self.prompts[ask.signature];
        let prompt = Prompt {
            header: header.as_ref().map(|header| header.as_bytes()),
            tokens: Some((*tokens).into()),
            kv_tokens: ask.kv_tokens,
        };
        let fleet = Fleet {
            workers: ask.workers,
            batches: &self.batches[self.view(ask.gateway)],
        };
        if let (Some(follower), Some(header)) = (&mut self.follower, prompt.header) {
            follower.see(ask.now.as_secs_f64(), header);
        }
        let map = match &self.follower {
            Some(follower) => Some(follower.map()),
            None => self.known.map(|known| &known.map),
        };
        let mut rule = self.rule;
        if let Some(learner) = self.learners.get(self.view(ask.gateway)) {
            rule.objective.step = learner.model();
        }
        let scratch = &mut self.scratch;
        let decision = route_running(&rule, map, prompt, fleet, ask.draw, scratch);
        self.decided = match scratch.request() {
            Some(request) => request.footprint(),
            None => Footprint::unknown(ask.kv_tokens),
        };
        decision
    }

    fn entered(&mut self, seat: Seat) {
        let view = self.view(seat.gateway);
        let (worker, now_ms) = (WorkerIndex(seat.worker), ms(seat.now));
        let footprint = std::mem::replace(&mut self.decided, Footprint::unknown(0));
        let learner = self.learners.get_mut(view);
        let request = self.scratch.request();
        let stay = learner.map(|learner| learner.begin(worker, request, now_ms));
        self.batches[view].join(worker, &footprint);
        self.in_flight.insert(seat.arrival, (footprint, stay));
        self.runs(view, worker, now_ms);
    }

    fn left(&mut self, seat: Seat, step_ms: Option<f64>) {
        let view = self.view(seat.gateway);
        let (worker, now_ms) = (WorkerIndex(seat.worker), ms(seat.now));
        let Some((footprint, stay)) = self.in_flight.remove(&seat.arrival) else {
            return;
        };
        if let (Some(learner), Some(stay), Some(step_ms)) =
            (self.learners.get_mut(view), stay, step_ms)
        {
            learner.end(worker, stay, step_ms, now_ms);
        }
        self.batches[view].leave(worker, &footprint);
        self.runs(view, worker, now_ms);
    }

    fn shared(&mut self) -> f64 {
        if !self.exchanges {
            return 0.0;
        }
        for (batches, message) in self.batches.iter().zip(&mut self.messages) {
            batches.share(KEY, message);
        }
        for (gateway, batches) in self.batches.iter_mut().enumerate() {
            let messages = self.messages.iter().enumerate();
            let others = messages.filter(|(teller, _)| *teller != gateway);
            batches.hear(KEY, others.map(|(_, message)| message.as_slice()));
        }
        let bytes: usize = self.messages.iter().map(Vec::len).sum();
        bytes as f64 / self.messages.len() as f64
    }
}
