//! The batches of one kind, and beside them what is learned of step times.

use eldr_core::batch::{Batches, Footprint, Request};
use eldr_core::decide::WorkerIndex;
use eldr_core::learn::{Learner, Stay};

use super::Key;

/// A request's place in a batch: what [`Running::join`](super::Running::join) added is what [`Running::leave`](super::Running::leave) takes off, once.
#[derive(Debug, PartialEq)]
#[must_use = "who joins is to leave"]
pub struct Seat {
    pub(super) key: Key,
    pub(super) worker: WorkerIndex,
    pub(super) footprint: Footprint,
    pub(super) stay: Option<Stay>,
}

/// What is kept of a kind.
#[derive(Debug)]
pub(super) struct Book {
    pub(super) batches: Batches,
    /// Where step times are learned.
    pub(super) learner: Option<Learner>,
    pub(super) workers: Vec<String>,
    pub(super) sums: usize,
    /// Requests of this VM in them.
    pub(super) members: usize,
    pub(super) used_ms: u64,
}

impl Book {
    /// The worker of this name.
    pub(super) fn worker(&self, name: &str) -> Option<WorkerIndex> {
        let found = self.workers.iter().position(|worker| worker == name);
        found.map(WorkerIndex)
    }

    /// A request joins the batch of a worker, of which the learner is told.
    pub(super) fn join(
        &mut self,
        key: Key,
        worker: WorkerIndex,
        request: Option<&Request>,
        footprint: Footprint,
        now_ms: u64,
    ) -> Seat {
        let learner = self.learner.as_mut();
        let stay = learner.map(|learner| learner.begin(worker, request, now_ms as f64));
        self.batches.join(worker, &footprint);
        self.members += 1;
        self.runs(worker, now_ms);
        Seat {
            key,
            worker,
            footprint,
            stay,
        }
    }

    /// Tells the learner what a worker runs from now on.
    pub(super) fn runs(&mut self, worker: WorkerIndex, now_ms: u64) {
        if let Some(learner) = &mut self.learner {
            learner.runs(worker, &self.batches, now_ms as f64);
        }
    }

    /// Leaves only what was joined and heard: how many requests there are is told elsewhere.
    pub(super) fn without_totals(&mut self) {
        for worker in 0..self.workers.len() {
            self.batches.set_totals(WorkerIndex(worker), 0, 0);
        }
    }
}
