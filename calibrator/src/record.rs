//! Recording: prompts go to a running engine, and what its experts did becomes a trace.
//!
//! Answers are written in the order of the prompts, one line each, so that a recording that was interrupted can
//! go on: see [`resume`](Existing).

mod client;
mod prompts;
mod resume;
mod routing;

use std::collections::VecDeque;
use std::path::Path;

use tokio::task::JoinHandle;

pub use client::Engine;
pub use prompts::{Content, Prompt, Prompts};
pub use resume::Existing;
pub use routing::{NO_ROUTING, Routing};

use crate::error::Error;
use client::Answered;

/// What is asked of the engine for every prompt.
#[derive(Clone, Debug, PartialEq)]
pub struct Options {
    /// Name of the model, as the engine serves it.
    pub model: String,
    /// Tokens to generate, at least 1. From 2 on, an engine that returns all routed experts gives decode counts.
    pub max_tokens: u32,
    /// Layers and experts, for engines that do not say them.
    pub routing: Routing,
    /// Ask for a hand-over of KV blocks, as the official fork's `eldr_sig` needs it, and release them again.
    pub hand_over: bool,
    /// Requests at a time.
    pub concurrency: usize,
    /// Times that a request is sent once more, after a failure that may pass.
    pub retries: u32,
}

/// How a recording went.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Done {
    /// Requests written.
    pub recorded: u64,
    /// Prompts whose id the trace had already.
    pub there: u64,
    /// Prompts that the engine would not take, left out.
    pub rejected: u64,
}

/// What happened to one prompt.
#[derive(Clone, Debug)]
pub enum Event {
    /// It was written.
    Recorded,
    /// The trace had it already.
    There,
    /// The engine would not take it, for this reason.
    Rejected(String),
}

/// Sends the prompts to the engine and appends what comes back to the trace at `output`.
///
/// # Errors
/// Prompts, trace or engine fail; what was written until then stays, and the next call goes on after it.
pub async fn record(
    engine: &Engine,
    prompts: Prompts,
    output: &Path,
    options: &Options,
    mut on_event: impl FnMut(Event),
) -> Result<Done, Error> {
    let mut trace = Existing::open(output)?;
    let mut done = Done::default();
    let mut under_way: VecDeque<JoinHandle<Result<Answered, Error>>> = VecDeque::new();
    let mut prompts = prompts.fuse();
    loop {
        while under_way.len() < options.concurrency.max(1) {
            let Some(prompt) = prompts.next().transpose()? else {
                break;
            };
            if !trace.is_new(&prompt.id) {
                done.there += 1;
                on_event(Event::There);
                continue;
            }
            let (engine, options) = (engine.clone(), options.clone());
            let asked = async move { engine.ask(&prompt, &options).await };
            under_way.push_back(tokio::spawn(asked));
        }
        let Some(first) = under_way.pop_front() else {
            return Ok(done);
        };
        let answered = first.await.unwrap_or_else(|error| {
            let hint = "run it again: it goes on where it ended";
            Err(Error::new(format!("a request ended: {error}"), hint))
        });
        match answered {
            Ok(Answered::Recorded(record)) => {
                trace.append(&record)?;
                done.recorded += 1;
                on_event(Event::Recorded);
            }
            Ok(Answered::Rejected(why)) => {
                done.rejected += 1;
                on_event(Event::Rejected(why));
            }
            Err(error) => {
                under_way.iter().for_each(JoinHandle::abort);
                return Err(error);
            }
        }
    }
}
