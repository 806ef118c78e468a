//! What a decision is made by: a signature or what was kept of one, and the batches that it is held against.

use eldr_core::decide::{Decision, Draw, Reason, Worker, WorkerIndex};
use eldr_core::engine::StepModel;
use eldr_core::route::{Prompt, Step, see};

use super::stages;
use super::vm::Vm;
use crate::plugin::{Course, ModelIndex, Plugin};
use crate::ring::Kept;
use crate::running::{Key, Seat};

/// What there is to decide by.
#[derive(Clone, Copy)]
pub(super) enum Clue<'a> {
    /// A signature header, if there is one.
    Header(Option<&'a [u8]>),
    /// What was kept of an earlier answer.
    Kept(&'a Kept),
}

impl<'a> Clue<'a> {
    /// What was kept, which may be a signature.
    pub(super) fn of(kept: &'a Kept) -> Self {
        let signature = kept.signature();
        signature.map_or(Self::Kept(kept), |signature| Self::Header(Some(signature)))
    }

    pub(super) fn header(self) -> Option<&'a [u8]> {
        match self {
            Self::Header(header) => header,
            Self::Kept(_) => None,
        }
    }

    /// The running batches that it is held against, where the model's policies look at any.
    pub(super) fn hold(
        self,
        plugin: &Plugin,
        model: Option<ModelIndex>,
        now: u64,
        vm: &mut Vm,
    ) -> Held {
        match self {
            Self::Header(header) => vm.hold(plugin, model, header, now),
            Self::Kept(Kept { found, .. }) => {
                let reason = found.as_ref().err();
                reason.and_then(|reason| plugin.measure(model).map(|_| Err(*reason)))
            }
        }
    }
}

/// The running batches of a request, or why there are none; `None` where nobody looks at them.
pub(super) type Held = Option<Result<Key, Reason>>;

/// A request that is to be decided.
pub(super) struct Question<'a> {
    pub(super) plugin: &'a Plugin,
    pub(super) clue: Clue<'a>,
    pub(super) prompt: Prompt<'a>,
    pub(super) held: Held,
}

impl Question<'_> {
    pub(super) fn decide(
        &self,
        course: Course,
        workers: &[Worker],
        draw: Draw,
        vm: &mut Vm,
    ) -> Decision {
        let (plugin, scratch) = (self.plugin, &mut vm.scratch);
        if let Some(held) = self.held {
            let known = held.and_then(|key| vm.running.of(key).ok_or(Reason::Blind));
            return plugin.decide_running(course, self.prompt, known, workers, draw, scratch);
        }
        let kept = match self.clue {
            Clue::Kept(kept) => plugin.decide_by(course, kept, workers, draw),
            Clue::Header(_) => None,
        };
        let done = |step| match step {
            Step::Decode => stages::end("decode"),
            Step::Compare => stages::end("compare"),
        };
        let header = self.prompt.header;
        kept.unwrap_or_else(|| plugin.decide(course, header, workers, draw, scratch, done))
    }

    /// Requests of known experts that ran on the chosen worker before.
    pub(super) fn known(&self, worker: WorkerIndex, vm: &Vm) -> Option<u32> {
        let known = vm.running.of(self.held?.ok()?)?;
        Some(known.batches.workers().get(worker.0)?.known())
    }

    /// What a decode step is believed to cost, where that is learned.
    pub(super) fn steps(&self, vm: &Vm) -> Option<StepModel> {
        vm.running.of(self.held?.ok()?)?.steps
    }

    /// Has the request join the batch of the chosen worker, whatever chose it.
    pub(super) fn join(&self, worker: WorkerIndex, now_ms: u64, vm: &mut Vm) -> Option<Seat> {
        let key = self.held?.ok()?;
        if vm.scratch.request().is_none() {
            see(self.prompt, vm.running.of(key)?.batches, &mut vm.scratch).ok()?;
        }
        let request = vm.scratch.request()?;
        vm.running.join(key, worker, request, now_ms)
    }
}
