//! Online refit: gateways post samples of their signatures, and the served blobs follow the traffic.
//!
//! A POST of header values, one per line, to a blob's path and `/signatures` is queued for one thread, which owns the windows.
//! The queue is short: under pressure samples are refused, never waited for. A refit is written to the blob's file like any
//! other publication, from where the server takes it over; so whoever replaces the file by hand wins.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, sync_channel};
use std::time::{Duration, Instant};

use axum::body::Bytes;
use axum::extract::State;
use axum::http::StatusCode;
use eldr_core::blob::Blob;
use tokio::sync::watch;

use super::metrics::Metrics;
use super::source::Served;
use crate::error::Error;
use crate::history;
use crate::kmeans::Vectors;
use crate::refit::{Drift, Limits, Window, refit};
use crate::signatures::Space;

/// Largest batch of signatures, in bytes.
pub(super) const BATCH_BYTES_MAX: usize = 4 << 20;
/// Batches that wait.
const QUEUE: usize = 16;
/// How often drift is measured, and refits are thought of, while nothing comes.
const TICK: Duration = Duration::from_secs(1);

/// When to refit.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Online {
    /// The window, and how often it may be refitted to.
    pub limits: Limits,
    /// Refit only if this share of the traffic has moved, 0 to 1; 0 refits whenever it is due.
    pub if_moved: f64,
    /// Old revisions to keep beside each blob file.
    pub keep: usize,
}

/// What came of a refit that was due.
#[derive(Debug)]
pub enum Outcome {
    /// The next revision was written.
    Refitted(Drift),
    /// It was not called for, or could not be done; what is served stays.
    Failed(Error),
}

/// Signatures for the blob of that index.
type Batch = (usize, Bytes);

/// Takes batches for one blob.
#[derive(Clone, Debug)]
pub(super) struct Inbox {
    sender: SyncSender<Batch>,
    index: usize,
    path: Arc<str>,
    metrics: Arc<Metrics>,
}

/// A queue, and the inboxes of the blobs at `paths`.
pub(super) fn queue(paths: &[&str], metrics: &Arc<Metrics>) -> (Vec<Inbox>, Receiver<Batch>) {
    let (sender, receiver) = sync_channel(QUEUE);
    let inbox = |(index, &path): (usize, &&str)| Inbox {
        sender: sender.clone(),
        index,
        path: path.into(),
        metrics: Arc::clone(metrics),
    };
    (paths.iter().enumerate().map(inbox).collect(), receiver)
}

/// Answers a POST of signatures: 204 when it is queued, 503 when there is no room.
pub(super) async fn take(State(inbox): State<Inbox>, body: Bytes) -> StatusCode {
    match inbox.sender.try_send((inbox.index, body)) {
        Ok(()) => StatusCode::NO_CONTENT,
        Err(TrySendError::Full(_) | TrySendError::Disconnected(_)) => {
            inbox.metrics.dropped(&inbox.path);
            StatusCode::SERVICE_UNAVAILABLE
        }
    }
}

/// A blob that follows its traffic.
pub(super) struct Follower {
    path: String,
    file: std::path::PathBuf,
    served: watch::Receiver<Served>,
    /// Of the blob that is served; `None` until it is looked at.
    state: Option<Following>,
    /// Hash of the blob that the last refit replaced: while it is still served, there is nothing to do.
    replaced: Option<String>,
}

struct Following {
    sha256: String,
    blob: Blob,
    space: Space,
    window: Window,
}

impl Follower {
    pub(super) fn new(
        path: String,
        file: std::path::PathBuf,
        served: watch::Receiver<Served>,
    ) -> Self {
        Follower {
            path,
            file,
            served,
            state: None,
            replaced: None,
        }
    }

    /// What is served now. The window outlives a new blob as long as vectors mean the same.
    fn state(&mut self, limits: Limits) -> Option<&mut Following> {
        let served = self.served.borrow().clone();
        if self
            .state
            .as_ref()
            .is_none_or(|state| state.sha256 != served.sha256)
        {
            // It was verified when it was read. One of gate sums has no signatures to follow.
            let blob = Blob::from_bytes(&served.bytes).ok()?;
            let space = Space::of(&blob).ok()?;
            let kept = self
                .state
                .take()
                .filter(|state| *state.space.transform() == blob.transform);
            let window = match kept {
                Some(state) => state.window,
                None => Window::new(blob.transform.dimension(), limits),
            };
            self.state = Some(Following {
                sha256: served.sha256,
                space,
                window,
                blob,
            });
        }
        self.state.as_mut()
    }

    fn push(&mut self, now: f64, batch: &[u8], limits: Limits, metrics: &Metrics) {
        let lines = batch
            .split(|&byte| byte == b'\n')
            .filter(|line| !line.is_empty());
        let Some(Following { space, window, .. }) = self.state(limits) else {
            metrics.took(&self.path, 0, lines.count() as u64);
            return;
        };
        let mut vector = Vec::new();
        let (mut kept, mut refused) = (0, 0);
        for line in lines {
            match space.vector(line, &mut vector) {
                Ok(()) => {
                    window.push(now, &vector);
                    kept += 1;
                }
                Err(_) => refused += 1,
            }
        }
        metrics.took(&self.path, kept, refused);
    }

    /// Measures drift and, where it is due, refits.
    fn tick(&mut self, now: f64, online: Online, metrics: &Metrics) -> Option<Outcome> {
        let (file, replaced) = (self.file.clone(), self.replaced.take());
        let Following {
            sha256,
            blob,
            window,
            ..
        } = self.state(online.limits)?;
        window.forget(now);
        let waiting = replaced.as_ref() == Some(sha256);
        let due = !waiting && window.due(now, blob.regions.len());
        let vectors = Vectors {
            dimension: blob.transform.dimension(),
            values: window.vectors(),
        };
        let drift = Drift::of(blob, vectors);
        let moved = drift.moved >= online.if_moved;
        let outcome = (due && moved).then(|| {
            let done = refit(blob, vectors)
                .and_then(|refitted| history::replace(&file, &refitted.blob, online.keep));
            match done {
                Ok(()) => Outcome::Refitted(drift.clone()),
                Err(error) => Outcome::Failed(error),
            }
        });
        let refitted = matches!(outcome, Some(Outcome::Refitted(_)));
        self.replaced = (waiting || refitted).then(|| sha256.clone());
        metrics.drifted(&self.path, &drift);
        match &outcome {
            Some(Outcome::Refitted(_)) => metrics.refitted(&self.path),
            Some(Outcome::Failed(_)) => metrics.refit_failed(&self.path),
            None => {}
        }
        outcome
    }
}

/// Follows the traffic until nobody can post any more.
pub(super) fn follow(
    mut followers: Vec<Follower>,
    receiver: &Receiver<Batch>,
    online: Online,
    metrics: &Metrics,
    on_outcome: impl Fn(&str, Outcome),
) {
    let begin = Instant::now();
    let mut last = begin;
    loop {
        let batch = receiver.recv_timeout(TICK);
        let now = begin.elapsed().as_secs_f64();
        match batch {
            Ok((index, batch)) => {
                if let Some(follower) = followers.get_mut(index) {
                    follower.push(now, &batch, online.limits, metrics);
                }
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return,
        }
        if last.elapsed() >= TICK {
            last = Instant::now();
            for follower in &mut followers {
                if let Some(outcome) = follower.tick(now, online, metrics) {
                    on_outcome(&follower.path, outcome);
                }
            }
        }
    }
}
