//! Relay mode: both legs of a request are streams of their own, sent by a coordinator.

use proxy_wasm::hostcalls;
use proxy_wasm::types::{Action, BufferType, MapType};

use super::attributes::log_signature;
use super::decision;
use super::question::Clue;
use super::vm::{self, Waiting};
use super::{EnvoyShared, headers, now_ms, remove_header, set_header};
use super::{decode, post};
use crate::body::Object;
use crate::handover;
use crate::headers::{self as names, Header, is_private};
use crate::metrics;
use crate::plugin::Plugin;
use crate::request::{Answer, MAX_ANSWER_BYTES, Relayed, Reply, is_readable, prompt_tokens};
use crate::ring::{self, Begun, Clock, Kept, Taken, Ticket};

/// A prefill leg on its way.
pub(super) struct PrefillLeg {
    waiting: Waiting,
    sent_ms: u64,
    /// Its place in the ring, until something is kept there.
    ticket: Option<Ticket>,
    /// Its answer's headers are held until the body is there.
    holds: bool,
}

impl PrefillLeg {
    /// Chooses the prefill cluster and counts the leg there.
    pub(super) fn send(stream: u32, waiting: &Waiting) -> Result<Self, Reply> {
        let plugin = waiting.plugin.borrow();
        let mut request = waiting.request.borrow_mut();
        let (timing, now) = (plugin.config().timing, now_ms());
        let cluster = vm::with(|vm| {
            vm.claim(timing);
            vm.loads.refresh(&EnvoyShared, now, timing);
            let turn = || {
                vm.turn += 1;
                vm.turn
            };
            let leg = request.leg();
            let cluster = plugin.choose_prefill(leg, |name| vm.loads.in_flight(name), turn);
            let flight = vm.loads.start(&EnvoyShared, cluster, 0, now, timing);
            *waiting.counted.borrow_mut() = Some(flight);
            cluster.to_owned()
        });
        let token = vm::with(|vm| vm.entropy()) ^ u64::from(stream);
        let begun = request
            .id()
            .map(|id| ring::begin(&EnvoyShared, id, token, clock(&plugin)));
        let ticket = match begun {
            Some(Begun::Place(ticket)) => Some(ticket),
            Some(Begun::Duplicate) => {
                vm::with(|vm| vm.metrics.count(metrics::RELAY_DUPLICATE));
                None
            }
            Some(Begun::NoPlace) | None => None,
        };
        let leg = Self {
            waiting: waiting.clone(),
            sent_ms: now,
            ticket,
            holds: false,
        };
        match decode::edit((&cluster, None), waiting.content_length, None) {
            Ok(()) => Ok(leg),
            Err(status) => {
                leg.end();
                let what = format!("the request could not be edited: {status:?}");
                Err(request.internal(&what))
            }
        }
    }

    /// The head of the answer: its signature is read there, or the answer is held until its body can be read.
    pub(super) fn on_answer_headers(&mut self, end_of_stream: bool) -> Action {
        let elapsed = now_ms().saturating_sub(self.sent_ms);
        vm::with(|vm| vm.metrics.record(metrics::PREFILL_MS, elapsed));
        let mut all = headers(MapType::HttpResponseHeaders);
        let signature = names::get(&all, names::SIGNATURE).map(<[u8]>::to_vec);
        // The coordinator may send the signature along with the decode request, so it stays.
        let is_foreign = |(name, _): &Header| is_private(name) && name != names::SIGNATURE;
        for (name, _) in all.iter().filter(|header| is_foreign(header)) {
            remove_header(MapType::HttpResponseHeaders, name);
        }
        all.retain(|header| !is_foreign(header));
        let answer = Answer {
            headers: all,
            body: Vec::new(),
        };
        let succeeded = self
            .waiting
            .request
            .borrow_mut()
            .on_relayed_answer(answer.status());
        if !succeeded {
            return Action::Continue;
        }
        let reads_bodies = self.waiting.plugin.borrow().config().relay_body_signature;
        self.holds =
            signature.is_none() && reads_bodies && !end_of_stream && is_readable(&answer.headers);
        if self.holds {
            return Action::Pause;
        }
        self.keep(signature.as_deref(), None);
        Action::Continue
    }

    /// More of the body of an answer that may be held.
    pub(super) fn on_answer_body(&mut self, size: usize, end_of_stream: bool) -> Action {
        if !self.holds {
            return Action::Continue;
        }
        let is_too_long = size != usize::MAX && size > MAX_ANSWER_BYTES;
        if !end_of_stream && !is_too_long {
            return Action::Pause;
        }
        self.holds = false;
        let body = if is_too_long {
            None
        } else {
            let bytes = hostcalls::get_buffer(BufferType::HttpResponseBody, 0, size);
            bytes.ok().flatten()
        };
        let object = body.as_ref().and_then(|body| Object::parse(body).ok());
        let said = object.as_ref().and_then(handover::read);
        let (signature, usage) = {
            let request = self.waiting.request.borrow();
            let plugin = self.waiting.plugin.borrow();
            let eldr_sig = said.and_then(|said| said.eldr_sig);
            let signature =
                eldr_sig.and_then(|raw| plugin.header_from_eldr_sig(request.model(), &raw));
            let usage = object.and_then(|object| request.prompt_tokens_of(&object));
            (signature, usage)
        };
        self.keep(signature.as_deref(), usage);
        Action::Continue
    }

    /// The leg has ended, in whatever way.
    pub(super) fn end(self) {
        if let Some(ticket) = &self.ticket {
            let clock = clock(&self.waiting.plugin.borrow());
            ring::withdraw(&EnvoyShared, ticket, clock);
        }
    }

    /// Keeps what the signature says, and how long the prompt is by it or by the answer's `usage`, and tells the
    /// coordinator which decode cluster it suggests.
    fn keep(&mut self, signature: Option<&[u8]>, usage: Option<u64>) {
        post::sample(&self.waiting, signature);
        let plugin = self.waiting.plugin.borrow();
        let model = self.waiting.request.borrow().model();
        if plugin.config().log_signatures {
            log_signature(signature);
        }
        let asks = plugin.asks_for_prompt_tokens(model);
        let tokens = asks.then(|| prompt_tokens(signature, || usage)).flatten();
        let kept = vm::with(|vm| plugin.keep(model, signature, tokens, &mut vm.scratch));
        if let Some(kept) = &kept
            && let Some(ticket) = self.ticket.take()
            && !ring::put(&EnvoyShared, &ticket, kept, clock(&plugin))
        {
            vm::with(|vm| vm.metrics.count(metrics::RELAY_DUPLICATE));
        }
        let clue = kept.as_ref().map_or(Clue::Header(None), Clue::of);
        let decision = decision::suggest(&plugin, model, clue, &self.waiting.request_id);
        let cluster = plugin.decode_cluster(decision.target);
        let _ = set_header(
            MapType::HttpResponseHeaders,
            names::DECODE_CLUSTER,
            cluster.as_bytes(),
        );
    }
}

/// Routes a decode leg by its own signature, or by what was kept when prefill answered.
pub(super) fn send_decode(waiting: &Waiting, decode: Relayed) -> Result<(), Reply> {
    let Relayed::Decode {
        signature,
        fetches,
        body,
    } = decode
    else {
        return Ok(());
    };
    // Taken in any case: the place is free for another request with the same id.
    let kept = if fetches { take(waiting) } else { None };
    if kept.is_none() {
        // Where something was kept, its prefill answer passed here and was the sample.
        post::sample(waiting, signature.as_deref());
    }
    let clue = match (&signature, &kept) {
        (Some(header), _) => Clue::Header(Some(header)),
        (None, Some(kept)) => Clue::of(kept),
        (None, None) => Clue::Header(None),
    };
    decode::route(waiting, clue, body.as_ref())
}

/// What the prefill answer of this request said, if it is known and can be used.
fn take(waiting: &Waiting) -> Option<Kept> {
    let (plugin, mut request) = (waiting.plugin.borrow(), waiting.request.borrow_mut());
    let taken = ring::take(&EnvoyShared, request.id()?, clock(&plugin));
    if let Taken::Kept(kept) = &taken {
        // Of whatever centroids: a prompt is as long by any.
        request.prompt_has(kept.prompt_tokens);
    }
    let (kept, counter) = match taken {
        Taken::Kept(kept) if plugin.is_current(request.model(), &kept) => {
            (Some(kept), metrics::RELAY_FOUND)
        }
        Taken::Kept(_) => (None, metrics::RELAY_OUTDATED),
        Taken::Duplicate => (None, metrics::RELAY_DUPLICATE),
        Taken::Missing => (None, metrics::RELAY_MISSING),
    };
    vm::with(|vm| vm.metrics.count(counter));
    kept
}

fn clock(plugin: &Plugin) -> Clock {
    Clock {
        now_ms: now_ms(),
        ttl_ms: plugin.config().relay_ttl_ms,
    }
}
