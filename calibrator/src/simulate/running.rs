//! Policies that look at running batches, and the batches that they look at.

use std::sync::Arc;
use std::time::Duration;

use eldr_core::batch::{Batches, Footprint, Measure};
use eldr_core::decide::{Decision, Rule, WorkerIndex};
use eldr_core::route::{Fleet, Prompt, Scratch, route_running};

use super::Cluster;
use super::follow::Follower;
use super::policy::{Ask, Known, Router};
use super::usage::Usage;
use super::workload::Workload;
use crate::error::Error;

/// Each gateway knows the batches that it makes itself; where gateways learn of each other at once, all know all. What they tell each
/// other later is requests, not signatures.
pub(super) struct ByBatch<'a> {
    rule: Rule,
    known: Option<&'a Known>,
    /// Centroids that follow, in place of those known.
    follower: Option<Follower>,
    /// By request of the workload: signature and prompt tokens.
    prompts: Vec<(Option<Arc<str>>, u32)>,
    /// What each adds to a batch, once it was seen.
    footprints: Vec<Option<Footprint>>,
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
                let layers = (0..workload.geometry.layers as u16).collect();
                Batches::new(measure, workload.geometry, layers, workers)
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
            footprints: vec![None; workload.requests.len()],
            batches: vec![idle; views],
            scratch: Scratch::default(),
        })
    }

    /// Centroids of their own, which follow what is asked for.
    pub(super) fn follow(&mut self, follower: Option<Follower>) {
        self.follower = follower;
    }

    fn view(&self, gateway: usize) -> usize {
        gateway % self.batches.len()
    }
}

impl Router for ByBatch<'_> {
    fn choose(&mut self, ask: Ask<'_>) -> Decision {
        let (header, tokens) = &self.prompts[ask.signature];
        let prompt = Prompt {
            header: header.as_ref().map(|header| header.as_bytes()),
            tokens: Some((*tokens).into()),
            kv_tokens: *tokens,
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
        let scratch = &mut self.scratch;
        let decision = route_running(&self.rule, map, prompt, fleet, ask.draw, scratch);
        self.footprints[ask.signature].get_or_insert_with(|| match scratch.request() {
            Some(request) => request.footprint(),
            None => Footprint::unknown(*tokens),
        });
        decision
    }

    fn entered(&mut self, gateway: usize, worker: usize, signature: usize) {
        let view = self.view(gateway);
        if let Some(footprint) = &self.footprints[signature] {
            self.batches[view].join(WorkerIndex(worker), footprint);
        }
    }

    fn left(&mut self, gateway: usize, worker: usize, signature: usize) {
        let view = self.view(gateway);
        if let Some(footprint) = &self.footprints[signature] {
            self.batches[view].leave(WorkerIndex(worker), footprint);
        }
    }
}
