//! The decode step loop: a [`DecodeBatch`] run in real time.
//!
//! Each worker's loop has a thread of its own: an async timer is a millisecond coarse, which a step
//! of ten would feel. Steps follow each other on an absolute schedule (a step begins when the one
//! before it should have ended), so waking up late shifts one token and not all that follow; how
//! late each step ended is recorded.

use std::collections::HashMap;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use eldr_core::engine::{DecodeBatch, ExpertIds};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use super::stats::{Counters, Gauges};

/// One sequence to decode: a request has one per prompt and choice.
pub(crate) struct Sequence {
    pub(crate) ids: Arc<ExpertIds>,
    /// Tokens to decode.
    pub(crate) tokens: u32,
    pub(crate) prompt_tokens: u64,
}

/// A token that was decoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Token {
    /// Which of the request's sequences it belongs to.
    pub(crate) sequence: usize,
    /// Which token of it, from 0.
    pub(crate) token: u32,
    pub(crate) last: bool,
}

/// A running step loop. Dropping it ends the thread, with the step it is in, and all streams of tokens.
#[derive(Debug)]
pub(crate) struct StepLoop {
    commands: Sender<Command>,
}

enum Command {
    Join {
        request: u64,
        sequences: Vec<Sequence>,
        tokens: UnboundedSender<Token>,
    },
    Leave {
        request: u64,
    },
    Stop,
}

/// The tokens of one request. Dropping it takes the request out of the batch at the next step.
#[derive(Debug)]
pub(crate) struct Tokens {
    request: u64,
    tokens: UnboundedReceiver<Token>,
    commands: Sender<Command>,
}

impl Tokens {
    /// The next token; `None` once all were given, or if the worker has stopped.
    pub(crate) fn poll(
        &mut self,
        context: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Option<Token>> {
        self.tokens.poll_recv(context)
    }

    /// The same for `async` code.
    pub(crate) async fn next(&mut self) -> Option<Token> {
        self.tokens.recv().await
    }
}

impl Drop for Tokens {
    fn drop(&mut self) {
        // A loop that has ended has no batch to leave.
        let _ = self.commands.send(Command::Leave {
            request: self.request,
        });
    }
}

impl StepLoop {
    /// Starts the loop; step times are multiplied by `time_scale`, 0 runs as fast as it can.
    pub(crate) fn start(
        name: String,
        batch: DecodeBatch<(u64, usize)>,
        time_scale: f64,
        gauges: Arc<Gauges>,
        counters: Arc<Mutex<Counters>>,
    ) -> std::io::Result<Self> {
        let (commands, inbox) = channel();
        let mut worker = Worker {
            batch,
            time_scale,
            requests: HashMap::new(),
            kv_tokens: 0,
            gauges,
            counters,
        };
        std::thread::Builder::new()
            .name(name)
            .spawn(move || worker.run(&inbox))?;
        Ok(StepLoop { commands })
    }

    /// Puts the sequences of `request` (a number of its own) into the batch.
    pub(crate) fn join(&self, request: u64, sequences: Vec<Sequence>) -> Tokens {
        let (sender, tokens) = unbounded_channel();
        // Should the loop have ended, the sender is dropped and the stream of tokens is empty.
        let _ = self.commands.send(Command::Join {
            request,
            sequences,
            tokens: sender,
        });
        Tokens {
            request,
            tokens,
            commands: self.commands.clone(),
        }
    }
}

impl Drop for StepLoop {
    fn drop(&mut self) {
        // Not joined: the one who drops it may be an async task, which must not wait for a step.
        let _ = self.commands.send(Command::Stop);
    }
}

struct Worker {
    batch: DecodeBatch<(u64, usize)>,
    time_scale: f64,
    requests: HashMap<u64, Running>,
    kv_tokens: u64,
    gauges: Arc<Gauges>,
    counters: Arc<Mutex<Counters>>,
}

/// A request whose sequences are not all decoded.
struct Running {
    tokens: UnboundedSender<Token>,
    /// Tokens that each sequence holds in the KV cache; `None` once it is done.
    held: Vec<Option<u64>>,
}

impl Worker {
    fn run(&mut self, inbox: &Receiver<Command>) {
        let mut planned = Instant::now();
        loop {
            if self.batch.is_idle() {
                match inbox.recv() {
                    Ok(Command::Stop) | Err(_) => return,
                    Ok(command) => self.obey(command),
                }
                planned = Instant::now();
            }
            while let Ok(command) = inbox.try_recv() {
                if matches!(command, Command::Stop) {
                    return;
                }
                self.obey(command);
            }
            let report = self.batch.step();
            let (batch, mean_experts) = (report.batch(), report.mean_experts);
            planned += scaled(report.duration, self.time_scale);
            self.publish(batch);
            if batch > 0 {
                sleep_until(planned);
                // At full speed nothing is planned, so nothing is late.
                let late = match self.time_scale > 0.0 {
                    true => planned.elapsed(),
                    false => Duration::ZERO,
                };
                // Before the tokens are out: who has read the last one may ask for the report.
                let mut counters = self.counters.lock().unwrap_or_else(PoisonError::into_inner);
                counters.step(batch, mean_experts, late);
                drop(counters);
                self.emit();
                self.publish(self.batch.running());
            }
        }
    }

    fn obey(&mut self, command: Command) {
        match command {
            Command::Join {
                request,
                sequences,
                tokens,
            } => {
                let mut held = Vec::with_capacity(sequences.len());
                for (
                    sequence,
                    Sequence {
                        ids,
                        tokens,
                        prompt_tokens,
                    },
                ) in sequences.into_iter().enumerate()
                {
                    let context = u32::try_from(prompt_tokens).unwrap_or(u32::MAX);
                    self.batch.join((request, sequence), ids, context, tokens);
                    self.kv_tokens += prompt_tokens;
                    held.push(Some(prompt_tokens));
                }
                self.requests.insert(request, Running { tokens, held });
            }
            Command::Leave { request } => {
                let Some(running) = self.requests.remove(&request) else {
                    return;
                };
                for (sequence, held) in running.held.into_iter().enumerate() {
                    self.batch.cancel(&(request, sequence));
                    self.kv_tokens -= held.unwrap_or(0);
                }
                self.counters
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .disconnects += 1;
            }
            Command::Stop => {}
        }
    }

    /// Sends the tokens of the step that has just ended.
    fn emit(&mut self) {
        for decoded in self.batch.last_step().decoded.iter().copied() {
            let (request, sequence) = decoded.key;
            let Some(running) = self.requests.get_mut(&request) else {
                continue;
            };
            let token = Token {
                sequence,
                token: decoded.token,
                last: decoded.last,
            };
            // A client that is gone says so by a command.
            let _ = running.tokens.send(token);
            let Some(slot) = running.held.get_mut(sequence) else {
                continue;
            };
            if decoded.last {
                self.kv_tokens -= slot.take().unwrap_or(0);
                if running.held.iter().all(Option::is_none) {
                    self.requests.remove(&request);
                }
            } else if let Some(held) = slot {
                *held += 1;
                self.kv_tokens += 1;
            }
        }
    }

    fn publish(&self, decoding: usize) {
        self.gauges
            .decoding
            .store(decoding as u64, Ordering::Relaxed);
        self.gauges
            .decode_waiting
            .store(self.batch.waiting() as u64, Ordering::Relaxed);
        self.gauges
            .kv_tokens
            .store(self.kv_tokens, Ordering::Relaxed);
    }
}

/// `duration × scale`; a scale that gives no duration gives none.
pub(crate) fn scaled(duration: Duration, scale: f64) -> Duration {
    Duration::try_from_secs_f64(duration.as_secs_f64() * scale).unwrap_or_default()
}

fn sleep_until(deadline: Instant) {
    let left = deadline.saturating_duration_since(Instant::now());
    if !left.is_zero() {
        std::thread::sleep(left);
    }
}
