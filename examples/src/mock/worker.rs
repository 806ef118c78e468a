//! One worker: a prefill lane, a decode step loop, and the two legs a request can take through them.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use axum::http::HeaderValue;
use eldr_core::Signature;
use eldr_core::signature::Encoding;
use serde_json::Value;

use super::carriage::{ELDR_SIG, SignatureCarriage, eldr_sig, without_eldr_sig};
use super::catalog::{Catalog, Entry};
use super::prefixes::{Pinned, Prefixes};
use super::registry::{Fetched, Owner, Registry, Release};
use super::request::{ApiError, GenerationRequest, Limits, Prompt};
use super::stats::{Counted, Counters, Gauges, WorkerReport};
use super::steps::{Sequence, StepLoop, Tokens, scaled};
use super::{KvLoadFailurePolicy, KvProtocol, MockConfig};

/// What all workers of one engine share.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) config: MockConfig,
    pub(crate) catalog: Arc<Catalog>,
    pub(crate) registry: Registry,
    pub(crate) limits: Limits,
    /// Unix time of the engine's start, seconds: `created` of every answer.
    pub(crate) created: u64,
    pub(crate) next_request: AtomicU64,
}

/// A worker. Prefill and decode workers differ in name only, as in vLLM: any can do either.
#[derive(Debug)]
pub(crate) struct Worker {
    pub(crate) name: Arc<str>,
    pub(crate) address: SocketAddr,
    pub(crate) shared: Arc<Shared>,
    pub(crate) gauges: Arc<Gauges>,
    counters: Arc<Mutex<Counters>>,
    /// One prefill at a time; tokio's mutex lets them in first come, first served.
    lane: tokio::sync::Mutex<()>,
    prefixes: Prefixes,
    steps: StepLoop,
}

/// Prompts that were computed.
#[derive(Debug)]
pub(crate) struct Prefilled {
    /// Tokens found in the prefix cache.
    pub(crate) cached_tokens: u64,
    /// What prefill tells about the experts, where it was recorded; of one prompt only.
    signature: Option<HeaderValue>,
    pinned: Vec<Pinned>,
}

impl Worker {
    pub(crate) fn start(
        name: String,
        address: SocketAddr,
        shared: Arc<Shared>,
    ) -> std::io::Result<Self> {
        let gauges = Arc::new(Gauges::default());
        let counters = Arc::new(Mutex::new(Counters::default()));
        let config = &shared.config;
        let batch = eldr_core::engine::DecodeBatch::new(
            config.step,
            shared.catalog.geometry(),
            config.batch_max,
        );
        let steps = StepLoop::start(
            name.clone(),
            batch,
            config.time_scale,
            Arc::clone(&gauges),
            Arc::clone(&counters),
        )?;
        let counts = shared.catalog.geometry().counts();
        let prefixes = Prefixes::new(config.kv_cache_tokens, counts);
        let lane = tokio::sync::Mutex::new(());
        Ok(Worker {
            name: name.into(),
            address,
            shared,
            gauges,
            counters,
            lane,
            prefixes,
            steps,
        })
    }

    pub(crate) fn counters(&self) -> MutexGuard<'_, Counters> {
        self.counters.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn report(&self) -> WorkerReport {
        let mut report = self
            .counters()
            .report(&self.name, self.address, &self.gauges);
        self.shared.registry.report(&self.name, &mut report.kv);
        report
    }

    pub(crate) fn restart_statistics(&self) {
        *self.counters() = Counters::default();
    }

    pub(crate) fn entry(&self, prompt: &Prompt) -> &Entry {
        self.shared.catalog.entry(&prompt.id)
    }

    /// Computes the prompts: waits for the lane, then for as long as the tokens that are not cached take.
    ///
    /// Dropping the future gives up the place in the queue and counts as a disconnect.
    pub(crate) async fn prefill(&self, prompts: &[Prompt]) -> Prefilled {
        let mut left_early = LeftEarly {
            worker: self,
            done: false,
        };
        let waiting = Counted::new(&self.gauges.prefill_waiting);
        let _lane = self.lane.lock().await;
        drop(waiting);
        let _running = Counted::new(&self.gauges.prefilling);
        let config = &self.shared.config;
        self.shared.registry.expire();
        let mut blocks: Vec<_> = prompts.iter().map(|prompt| self.begin(prompt)).collect();
        let found = blocks.iter().flatten().map(Pinned::cached_tokens);
        let cached_tokens = found.sum::<u64>();
        let tokens = prompts.iter().map(|prompt| prompt.tokens).sum::<u64>();
        let ms = config.prefill_base_ms
            + config.prefill_ms_per_token * tokens.saturating_sub(cached_tokens) as f64;
        let duration = Duration::try_from_secs_f64(ms / 1e3).unwrap_or_default();
        let duration = scaled(duration, config.time_scale);
        if !duration.is_zero() {
            tokio::time::sleep(duration).await;
        }
        let signatures: Vec<_> = std::iter::zip(prompts, &mut blocks)
            .map(|(prompt, blocks)| self.signature(prompt, blocks.as_mut()))
            .collect();
        let mut counters = self.counters();
        counters.prefill_tokens += tokens;
        counters.kv.cached_tokens += cached_tokens;
        drop(counters);
        left_early.done = true;
        Prefilled {
            cached_tokens,
            signature: match <[_; 1]>::try_from(signatures) {
                Ok([signature]) => signature,
                Err(_) => None,
            },
            pinned: blocks.into_iter().flatten().collect(),
        }
    }

    /// The prompt's place in the prefix cache, if it was recorded and there is room. Without room it is computed all the
    /// same: KV memory never runs out.
    fn begin(&self, prompt: &Prompt) -> Option<Pinned> {
        let spread = self.shared.catalog.spread(&prompt.id)?;
        self.prefixes.begin(spread, prompt.hash, prompt.tokens)
    }

    /// The signature of a prompt by the counts of its blocks: the recorded header where they sum to it, as they must.
    fn signature(&self, prompt: &Prompt, blocks: Option<&mut Pinned>) -> Option<HeaderValue> {
        let recorded = self.entry(prompt).signature.as_ref()?;
        let (Some(spread), Some(blocks)) = (self.shared.catalog.spread(&prompt.id), blocks) else {
            return Some(recorded.clone());
        };
        let sum = blocks.compute(spread, prompt.tokens);
        debug_assert_eq!(sum, spread.counts, "blocks of {}", prompt.id);
        if sum == spread.counts {
            return Some(recorded.clone());
        }
        let geometry = self.shared.catalog.geometry();
        let signature = Signature::dense(geometry, sum, Some(prompt.tokens)).ok()?;
        HeaderValue::try_from(signature.encode(Encoding::U16)).ok()
    }

    /// The signature of an answer, where headers carry it.
    pub(crate) fn signature_header(&self, prefilled: &Prefilled) -> Option<HeaderValue> {
        match self.shared.config.signature_carriage {
            SignatureCarriage::Header => prefilled.signature.clone(),
            SignatureCarriage::Body => None,
        }
    }

    /// Keeps the KV blocks of computed prompts of `tokens` tokens for the decode worker that will ask for them.
    pub(crate) fn hold(
        &self,
        answer_id: &str,
        tokens: u64,
        owner: Owner,
        prefilled: Prefilled,
        transfer_id: Option<&str>,
    ) -> Result<Option<Value>, ApiError> {
        let Prefilled {
            signature, pinned, ..
        } = prefilled;
        let shared = &self.shared;
        let (name, address) = (&self.name, self.address);
        if self.speaks(KvProtocol::Mooncake) {
            let id = transfer_id.unwrap_or_default();
            let held = shared
                .registry
                .hold_transfer(name, address, id, tokens, owner, pinned);
            return held.map(|()| None).map_err(|mix_up| {
                self.counters().mixed_up += 1;
                ApiError::internal(mix_up)
            });
        }
        let mut params = shared
            .registry
            .hold(name, address, answer_id, tokens, owner, pinned);
        if shared.config.signature_carriage == SignatureCarriage::Body
            && let Some(signature) = signature
        {
            params[ELDR_SIG] = eldr_sig(&signature).into();
        }
        Ok(Some(params))
    }

    /// Whether the engine hands KV blocks over in this way.
    pub(crate) fn speaks(&self, protocol: KvProtocol) -> bool {
        self.shared.config.protocol == protocol
    }

    /// Shared storage: whether these prompts' blocks are there already, so that decode finds them. A prefill worker
    /// computes, or finds in its own cache, and leaves them there.
    pub(crate) fn finds_stored(&self, prompt: u64) -> bool {
        self.speaks(KvProtocol::SharedStorage)
            && self
                .shared
                .registry
                .stores(prompt, self.name.starts_with("prefill"))
    }

    /// Takes over the KV blocks that `params` names.
    pub(crate) fn fetch(&self, params: &Value, owner: &Owner) -> Result<Fetched, ApiError> {
        let params = self.without_leak(params);
        let fetched = self.shared.registry.fetch(&params, owner);
        let fetched = fetched.map_err(|mix_up| {
            self.counters().mixed_up += 1;
            ApiError::internal(mix_up)
        })?;
        if fetched == Fetched::Late {
            self.counters().kv.late_decodes += 1;
            if self.shared.config.kv_load_failure_policy == KvLoadFailurePolicy::Fail {
                let message = "the lease of the request's KV blocks has run out";
                return Err(ApiError::internal(message));
            }
        }
        Ok(fetched)
    }

    /// Frees the KV blocks that `params` names, whichever worker holds them.
    pub(crate) fn release(&self, params: &Value) -> Release {
        let params = self.without_leak(params);
        let release = self.shared.registry.release(&params);
        let kv = &mut self.counters().kv;
        match release {
            Release::Freed => kv.releases += 1,
            Release::Again => kv.repeated_releases += 1,
            Release::Unknown => kv.unknown_releases += 1,
        }
        release
    }

    /// The params as the registry knows them; a signature in them is for the gateway alone.
    fn without_leak<'a>(&self, params: &'a Value) -> std::borrow::Cow<'a, Value> {
        let params = without_eldr_sig(params);
        if let std::borrow::Cow::Owned(_) = params {
            self.counters().kv.leaked_signatures += 1;
        }
        params
    }

    /// Lets the request join the batch: one sequence per prompt and choice.
    pub(crate) fn decode(&self, request: &GenerationRequest) -> Tokens {
        let lengths = self.lengths(request);
        let prompts = request.prompts.iter();
        let sequences = prompts
            .flat_map(|prompt| std::iter::repeat_n(prompt, request.choices))
            .zip(lengths)
            .map(|(prompt, tokens)| Sequence {
                ids: Arc::clone(&self.entry(prompt).ids),
                tokens,
                prompt_tokens: prompt.tokens,
            })
            .collect();
        let number = self.shared.next_request.fetch_add(1, Ordering::Relaxed);
        self.steps.join(number, sequences)
    }

    /// How many tokens each sequence gets: what the client asks for, else what the trace says.
    pub(crate) fn lengths(&self, request: &GenerationRequest) -> Vec<u32> {
        let length = |prompt: &Prompt| {
            let room = self
                .shared
                .limits
                .context_tokens
                .saturating_sub(prompt.tokens);
            let room = u32::try_from(room).unwrap_or(u32::MAX);
            request
                .max_tokens
                .unwrap_or(self.entry(prompt).decode_tokens)
                .min(room)
                .max(1)
        };
        let prompts = request.prompts.iter();
        prompts
            .flat_map(|prompt| std::iter::repeat_n(length(prompt), request.choices))
            .collect()
    }
}

struct LeftEarly<'a> {
    worker: &'a Worker,
    done: bool,
}

impl Drop for LeftEarly<'_> {
    fn drop(&mut self) {
        if !self.done {
            self.worker.counters().disconnects += 1;
        }
    }
}
