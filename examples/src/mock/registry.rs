//! KV blocks that prefill computed and decode has not fetched yet.
//!
//! A real engine does not check that the blocks it reads belong to the prompt it was sent: a gateway
//! that mixes up two requests gets a wrong answer with status 200. The mock remembers what it handed
//! out and to whom, so that a mix-up is an error that a test can see.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

/// vLLM's KV block size on GPUs, tokens.
const BLOCK_TOKENS: u64 = 16;

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
}

#[derive(Debug, Default)]
struct Inner {
    next: u64,
    held: HashMap<String, Held>,
}

#[derive(Debug)]
struct Held {
    params: Value,
    owner: Owner,
    until: Instant,
}

impl Registry {
    /// Blocks are held for `lease` at most, as engines do it.
    pub(crate) fn new(lease: Duration) -> Self {
        Registry {
            lease,
            inner: Mutex::default(),
        }
    }

    /// Holds the blocks of a prompt of `tokens` tokens; the answer is the `kv_transfer_params` that
    /// fetch them, shaped as vLLM's NixlConnector shapes them.
    pub(crate) fn hold(
        &self,
        engine: &str,
        address: SocketAddr,
        answer_id: &str,
        tokens: u64,
        owner: Owner,
    ) -> Value {
        let mut inner = self.lock();
        let now = Instant::now();
        // Whatever is never fetched would pile up otherwise.
        inner.held.retain(|_, held| held.until > now);
        inner.next += 1;
        let id = format!("{answer_id}-0-{:08x}", inner.next);
        let blocks = tokens.div_ceil(BLOCK_TOKENS).max(1);
        let first = inner.next.wrapping_mul(blocks) % 1_000_000;
        let params = json!({
            "do_remote_prefill": true,
            "do_remote_decode": false,
            "remote_block_ids": [(first..first + blocks).collect::<Vec<_>>()],
            "remote_engine_id": engine,
            "remote_request_id": id,
            "remote_host": address.ip().to_string(),
            "remote_port": address.port(),
            "tp_size": 1,
            "remote_num_tokens": tokens,
            "remote_blocks_expiry_time": null,
            "transfer_mode": "pull",
        });
        let held = Held {
            params: params.clone(),
            owner,
            until: now + self.lease,
        };
        inner.held.insert(id, held);
        params
    }

    /// Fetches the blocks that `params` names, once; the error says what was mixed up.
    pub(crate) fn fetch(&self, params: &Value, owner: &Owner) -> Result<(), String> {
        let id = params
            .get("remote_request_id")
            .and_then(Value::as_str)
            .unwrap_or_default();
        let mut inner = self.lock();
        let held = inner.held.get(id).ok_or_else(|| {
            format!("no KV blocks are held for remote_request_id `{id}`: never, or fetched before")
        })?;
        if held.until <= Instant::now() {
            inner.held.remove(id);
            return Err(format!("the lease of the KV blocks of `{id}` has run out"));
        }
        if held.params != *params {
            let held = &held.params;
            return Err(format!(
                "kv_transfer_params were changed: {held} became {params}"
            ));
        }
        if held.owner.prompt != owner.prompt {
            return Err(format!(
                "the KV blocks of `{id}` were computed for another prompt"
            ));
        }
        if held.owner.request_id != owner.request_id {
            let (theirs, ours) = (&held.owner.request_id, &owner.request_id);
            return Err(format!(
                "x-request-id was {theirs:?} in prefill and is {ours:?} in decode"
            ));
        }
        inner.held.remove(id);
        Ok(())
    }

    /// Requests whose blocks are held.
    pub(crate) fn held(&self) -> usize {
        let now = Instant::now();
        self.lock()
            .held
            .values()
            .filter(|held| held.until > now)
            .count()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Inner> {
        // Nothing panics while the lock is held; should it ever, the map is still whole.
        self.inner
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn owner(prompt: u64) -> Owner {
        Owner {
            prompt,
            request_id: Some(format!("r{prompt}")),
        }
    }

    fn hold(registry: &Registry, prompt: u64) -> Value {
        registry.hold(
            "engine",
            ([127, 0, 0, 1], 5600).into(),
            "cmpl-a",
            20,
            owner(prompt),
        )
    }

    #[test]
    fn blocks_are_fetched_once_by_the_request_they_were_computed_for() {
        let registry = Registry::new(Duration::from_secs(60));
        let (a, b) = (hold(&registry, 1), hold(&registry, 2));
        assert_eq!(a["remote_block_ids"][0].as_array().unwrap().len(), 2);
        assert!(
            registry
                .fetch(&a, &owner(2))
                .unwrap_err()
                .contains("another prompt")
        );
        let strange = Owner {
            request_id: None,
            ..owner(1)
        };
        assert!(
            registry
                .fetch(&a, &strange)
                .unwrap_err()
                .contains("x-request-id")
        );
        let mut changed = a.clone();
        changed["tp_size"] = json!(2);
        assert!(
            registry
                .fetch(&changed, &owner(1))
                .unwrap_err()
                .contains("were changed")
        );
        assert_eq!(registry.held(), 2);
        assert_eq!(registry.fetch(&a, &owner(1)), Ok(()));
        assert!(
            registry
                .fetch(&a, &owner(1))
                .unwrap_err()
                .contains("fetched before")
        );
        assert_eq!(registry.fetch(&b, &owner(2)), Ok(()));
        assert_eq!(registry.held(), 0);
    }

    #[test]
    fn blocks_are_not_held_beyond_their_lease() {
        let registry = Registry::new(Duration::ZERO);
        let params = hold(&registry, 1);
        assert_eq!(registry.held(), 0);
        assert!(
            registry
                .fetch(&params, &owner(1))
                .unwrap_err()
                .contains("lease")
        );
    }
}
