//! KV blocks that prefill computed and decode has not fetched yet.
//!
//! Prefill holds the blocks of a request until a decode worker fetches them, somebody releases them or the
//! lease runs out; blocks whose lease ran out are *stranded*: computed and pinned for nobody.
//!
//! A real engine does not check that the blocks it reads belong to the prompt it was sent: a gateway
//! that mixes up two requests gets a wrong answer with status 200. The mock remembers what it handed
//! out and to whom, so that a mix-up is an error that a test can see.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tokio::sync::Notify;

use super::prefixes::Pinned;
use super::stats::KvReport;

/// vLLM's KV block size on GPUs, tokens.
pub(crate) const BLOCK_TOKENS: u64 = 16;
/// Hand-overs that are remembered after their blocks were freed; an older one is unknown.
const ENDED_MAX: usize = 8192;

/// Whom the blocks were computed for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Owner {
    /// Hash of the prompt.
    pub(crate) prompt: u64,
    /// The `x-request-id` of the prefill request, if it had one.
    pub(crate) request_id: Option<String>,
}

/// The blocks all workers of one engine hold for requests between their two legs.
#[derive(Debug)]
pub(crate) struct Registry {
    lease: Duration,
    inner: Mutex<Inner>,
    /// Whenever blocks were freed.
    freed: Notify,
}

#[derive(Debug, Default)]
struct Inner {
    next: u64,
    handed: HashMap<String, Handed>,
    /// Hand-overs whose blocks were freed, oldest first.
    ended: VecDeque<String>,
    stranded: HashMap<Arc<str>, Blocks>,
    /// Shared storage: prompts whose blocks it has.
    stored: HashSet<u64>,
}

/// A hand-over from prefill to decode.
#[derive(Debug)]
struct Handed {
    worker: Arc<str>,
    params: Value,
    owner: Owner,
    blocks: u64,
    /// The blocks that are also in the worker's prefix cache; empty once they are free.
    pinned: Vec<Pinned>,
    state: State,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Held { until: Instant },
    Fetched,
    Released,
    Expired,
}

#[derive(Clone, Copy, Debug, Default)]
struct Blocks {
    requests: u64,
    blocks: u64,
}

/// A decode request's KV blocks, if nothing was mixed up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fetched {
    InTime,
    /// The lease had run out.
    Late,
}

/// What a release found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Release {
    Freed,
    /// The blocks were fetched or released before, or their lease had run out.
    Again,
    /// Nobody handed these params out.
    Unknown,
}

impl Registry {
    /// Blocks are held for `lease` at most, as engines do it.
    pub(crate) fn new(lease: Duration) -> Self {
        Registry {
            lease,
            inner: Mutex::default(),
            freed: Notify::new(),
        }
    }

    /// Holds the blocks of a prompt of `tokens` tokens at the prefill worker `worker`, which listens at `address`; the
    /// answer is the `kv_transfer_params` that fetch them, shaped as vLLM's NixlConnector shapes them.
    pub(crate) fn hold(
        &self,
        worker: &Arc<str>,
        address: std::net::SocketAddr,
        answer_id: &str,
        tokens: u64,
        owner: Owner,
        pinned: Vec<Pinned>,
    ) -> Value {
        let mut inner = self.current();
        inner.next += 1;
        let id = format!("{answer_id}-0-{:08x}", inner.next);
        let blocks = tokens.div_ceil(BLOCK_TOKENS).max(1);
        let first = inner.next.wrapping_mul(blocks) % 1_000_000;
        let params = json!({
            "do_remote_prefill": true,
            "do_remote_decode": false,
            "remote_block_ids": [(first..first + blocks).collect::<Vec<_>>()],
            "remote_engine_id": format!("mock-{worker}"),
            "remote_request_id": id,
            "remote_host": address.ip().to_string(),
            "remote_port": address.port(),
            "tp_size": 1,
            "remote_num_tokens": tokens,
            "remote_blocks_expiry_time": null,
            "transfer_mode": "pull",
        });
        let handed = self.handed(worker, params.clone(), owner, blocks, pinned);
        inner.handed.insert(id, handed);
        params
    }

    /// The same as MooncakeConnector does it: whoever sent the request gave the transfer its name, and knows where this
    /// worker's bootstrap server is and what its engine is called. An error if the name was used before.
    pub(crate) fn hold_transfer(
        &self,
        worker: &Arc<str>,
        address: std::net::SocketAddr,
        transfer_id: &str,
        tokens: u64,
        owner: Owner,
        pinned: Vec<Pinned>,
    ) -> Result<(), String> {
        let mut inner = self.current();
        if transfer_id.is_empty() || inner.handed.contains_key(transfer_id) {
            return Err(format!(
                "transfer_id `{transfer_id}` is missing or was used before"
            ));
        }
        let blocks = tokens.div_ceil(BLOCK_TOKENS).max(1);
        let params = json!({
            "do_remote_prefill": true,
            "do_remote_decode": false,
            "transfer_id": transfer_id,
            "remote_bootstrap_addr": format!("http://{address}"),
            "remote_engine_id": format!("mock-{worker}"),
        });
        let handed = self.handed(worker, params, owner, blocks, pinned);
        inner.handed.insert(transfer_id.to_owned(), handed);
        Ok(())
    }

    /// Shared storage: whether the blocks of this prompt are found there by a decode worker; a prefill worker leaves
    /// them there.
    pub(crate) fn stores(&self, prompt: u64, is_prefill: bool) -> bool {
        let mut inner = self.current();
        if is_prefill {
            inner.stored.insert(prompt);
            return false;
        }
        inner.stored.contains(&prompt)
    }

    fn handed(
        &self,
        worker: &Arc<str>,
        params: Value,
        owner: Owner,
        blocks: u64,
        pinned: Vec<Pinned>,
    ) -> Handed {
        Handed {
            worker: Arc::clone(worker),
            params,
            owner,
            blocks,
            pinned,
            state: State::Held {
                until: Instant::now() + self.lease,
            },
        }
    }

    /// Fetches the blocks that `params` names, once; the error says what was mixed up.
    pub(crate) fn fetch(&self, params: &Value, owner: &Owner) -> Result<Fetched, String> {
        let id = request_id_of(params);
        let mut inner = self.current();
        let handed = inner
            .handed
            .get(id)
            .ok_or_else(|| format!("nobody handed out KV blocks for remote_request_id `{id}`"))?;
        if handed.params != *params {
            let handed = &handed.params;
            return Err(format!(
                "kv_transfer_params were changed: {handed} became {params}"
            ));
        }
        if handed.owner.prompt != owner.prompt {
            return Err(format!(
                "the KV blocks of `{id}` were computed for another prompt"
            ));
        }
        if handed.owner.request_id != owner.request_id {
            let (theirs, ours) = (&handed.owner.request_id, &owner.request_id);
            return Err(format!(
                "x-request-id was {theirs:?} in prefill and is {ours:?} in decode"
            ));
        }
        let fetched = match handed.state {
            State::Held { .. } => Fetched::InTime,
            State::Expired => Fetched::Late,
            State::Fetched => return Err(format!("the KV blocks of `{id}` were fetched before")),
            State::Released => return Err(format!("the KV blocks of `{id}` were released before")),
        };
        inner.end(id, State::Fetched);
        self.freed.notify_waiters();
        Ok(fetched)
    }

    /// Frees the blocks that `params` names; doing it again changes nothing.
    pub(crate) fn release(&self, params: &Value) -> Release {
        let id = request_id_of(params);
        let mut inner = self.current();
        let Some(handed) = inner.handed.get(id).filter(|one| one.params == *params) else {
            return Release::Unknown;
        };
        if !matches!(handed.state, State::Held { .. }) {
            return Release::Again;
        }
        inner.end(id, State::Released);
        self.freed.notify_waiters();
        Release::Freed
    }

    /// Frees the blocks whose lease has run out; whoever reads the registry does it too.
    pub(crate) fn expire(&self) {
        drop(self.current());
    }

    /// Requests whose blocks are held.
    pub(crate) fn held(&self) -> usize {
        self.current().held().count()
    }

    /// Waits until no blocks are held, which is the lease at most unless new ones come.
    pub(crate) async fn nothing_held(&self) {
        loop {
            let freed = self.freed.notified();
            tokio::pin!(freed);
            // From here on a wake-up counts, also one before the first poll.
            freed.as_mut().enable();
            let last = self.current().held().map(|(_, until)| until).max();
            match last {
                None => return,
                Some(until) => {
                    let _ = tokio::time::timeout_at(until.into(), freed).await;
                }
            }
        }
    }

    /// Fills in what `worker` holds and what was stranded there.
    pub(crate) fn report(&self, worker: &str, report: &mut KvReport) {
        let inner = self.current();
        let held = inner.held().filter(|(one, _)| *one.worker == *worker);
        (report.held_requests, report.held_blocks) = held
            .fold((0, 0), |(requests, blocks), (one, _)| {
                (requests + 1, blocks + one.blocks)
            });
        let stranded = inner.stranded.get(worker).copied().unwrap_or_default();
        (report.stranded_requests, report.stranded_blocks) = (stranded.requests, stranded.blocks);
    }

    /// Counts stranded blocks from zero again.
    pub(crate) fn restart_statistics(&self) {
        self.current().stranded.clear();
    }

    /// The state as of now: leases that have run out are ended first.
    fn current(&self) -> std::sync::MutexGuard<'_, Inner> {
        // Nothing panics while the lock is held; should it ever, the map is still whole.
        let mut inner = self
            .inner
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        let now = Instant::now();
        let expired: Vec<String> = inner
            .handed
            .iter()
            .filter(|(_, one)| matches!(one.state, State::Held { until } if until <= now))
            .map(|(id, _)| id.clone())
            .collect();
        for id in expired {
            inner.end(&id, State::Expired);
        }
        inner
    }
}

impl Inner {
    fn held(&self) -> impl Iterator<Item = (&Handed, Instant)> {
        self.handed.values().filter_map(|one| match one.state {
            State::Held { until } => Some((one, until)),
            _ => None,
        })
    }

    /// Puts the hand-over `id` into a state without blocks.
    fn end(&mut self, id: &str, state: State) {
        let Some(handed) = self.handed.get_mut(id) else {
            return;
        };
        let before = std::mem::replace(&mut handed.state, state);
        handed.pinned.clear();
        if state == State::Expired {
            let stranded = self.stranded.entry(Arc::clone(&handed.worker)).or_default();
            stranded.requests += 1;
            stranded.blocks += handed.blocks;
        }
        if matches!(before, State::Held { .. }) {
            self.ended.push_back(id.to_owned());
            if self.ended.len() > ENDED_MAX
                && let Some(oldest) = self.ended.pop_front()
            {
                self.handed.remove(&oldest);
            }
        }
    }
}

fn request_id_of(params: &Value) -> &str {
    params
        .get("remote_request_id")
        .or_else(|| params.get("transfer_id"))
        .and_then(Value::as_str)
        .unwrap_or_default()
}

#[cfg(test)]
mod tests;
