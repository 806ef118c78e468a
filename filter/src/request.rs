//! Life of one request, without the host: what to do with its headers, its body and the prefill answer.
//!
//! ```text
//!            headers           body             prefill answer
//! New ──► ReadingBody ──► Prefilling ──────► Routed      one Outcome each, exactly once
//!   │          │               └──────────► Answered
//!   │          ├──► Answered (refused)
//!   │          ├──► Bypassed (JSON for another path, looked through)
//!   │          ├──► Routed   (several prompts in one body)
//!   │          └──► Relayed, Routed (relay mode: see `relay.rs`)
//!   ├──► Answered (an encoded body)
//!   └──► Bypassed
//! ```

mod answer;
mod leg;
mod relay;
mod step;
mod tokens;
mod usage;

use std::fmt::Write as _;

use eldr_core::Outcome;
use eldr_core::decide::{Decision, Policy, Reason};

use crate::api::{Api, Place};
use crate::body::{self, Object};
use crate::config::{Mode, PrefillPolicy};
use crate::handover::{self, KV_PARAMS};
use crate::headers::{self, Header};
use crate::plugin::{ModelIndex, Plugin};
use crate::prefill::{self, Leg};
use crate::tokens::Known;

pub use answer::{Answer, Reply};
pub use relay::{MAX_ANSWER_BYTES, Relayed, is_readable};
pub use step::{Head, OnBody, OnHeaders, OnPrefill};
pub use tokens::prompt_tokens;

const NO_KV_PARAMS: &str =
    "kv_transfer_params is set by the gateway and may not be sent by clients";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    New,
    Bypassed,
    ReadingBody,
    Prefilling,
    Relayed,
    Routed,
    Answered,
}

/// One request.
#[derive(Debug)]
pub struct Request {
    state: State,
    outcome: Option<Outcome>,
    /// The API of the path, if it is one that we route.
    api: Option<Api>,
    leg: Leg,
    /// Raw params of a hand-over that decode has, unless it turns out that no worker got it.
    handed_over: Option<String>,
    model: Option<ModelIndex>,
    tokens: Known,
    /// Signature header of a coordinator's request.
    carried: Option<Vec<u8>>,
    /// Where the body gets its hand-over.
    place: Place,
    /// Mooncake: names this request's transfer.
    transfer_id: String,
    /// Prompt tokens that prefill had cached, where the answer is to say so.
    cached_tokens: Option<u64>,
    decision: String,
    /// Headers of our own answer that the host's call for that cannot take; added as the answer goes out.
    not_text: Vec<Header>,
}

impl Default for Request {
    fn default() -> Self {
        Self {
            state: State::New,
            outcome: None,
            api: None,
            leg: Leg::default(),
            handed_over: None,
            model: None,
            tokens: Known::default(),
            carried: None,
            place: Place::default(),
            transfer_id: String::new(),
            cached_tokens: None,
            decision: String::new(),
            not_text: Vec::new(),
        }
    }
}

impl Request {
    /// Takes the request headers, already without those that steer.
    pub fn on_headers(&mut self, headers: Vec<Header>, end_of_stream: bool) -> OnHeaders {
        let is_post = headers::get(&headers, ":method") == Some(b"POST");
        self.api = Api::of(headers::get(&headers, ":path").unwrap_or_default());
        // Engines take transfer params on more paths than we route, and read as JSON what does not say otherwise.
        let may_be_json = headers::get(&headers, "content-type").is_none_or(|kind| {
            kind.to_ascii_lowercase()
                .windows(4)
                .any(|word| word == b"json")
        });
        if !is_post || end_of_stream || !(self.api.is_some() || may_be_json) {
            self.state = State::Bypassed;
            return OnHeaders::Bypass;
        }
        // A WebSocket opens with GET. A POST that upgrades could carry a body past us to an engine that ignores the header.
        if headers::get(&headers, "upgrade").is_some() {
            return OnHeaders::Reply(self.refuse(400, "a POST may not ask for an upgrade"));
        }
        // An engine that ignores the header would read a body that we could not look into.
        let encoded = |(name, value): &Header| {
            name == "content-encoding" && !value.eq_ignore_ascii_case(b"identity")
        };
        if headers.iter().any(encoded) {
            let message = "a request body with a content-encoding is not supported";
            return OnHeaders::Reply(self.refuse(415, message));
        }
        self.state = State::ReadingBody;
        self.leg.headers = headers;
        OnHeaders::ReadBody
    }

    /// Names the transfer of KV blocks; two requests with one name would get each other's.
    pub fn names_transfer(&mut self, id: String) {
        self.transfer_id = id;
    }

    /// True while the body is being collected.
    pub fn reads_body(&self) -> bool {
        self.state == State::ReadingBody
    }

    /// True between the body and the prefill answer.
    pub fn prefills(&self) -> bool {
        self.state == State::Prefilling
    }

    /// Takes the complete body.
    pub fn on_body(&mut self, plugin: &Plugin, bytes: &[u8]) -> OnBody {
        let Some(api) = self.api else {
            // Where other engine paths take transfer params, they may be further inside.
            // A coordinator may send them.
            if plugin.config().mode == Mode::Relay {
                self.state = State::Bypassed;
                return OnBody::Bypass;
            }
            return match body::has_key_anywhere(bytes, KV_PARAMS) {
                Ok(false) => {
                    self.state = State::Bypassed;
                    OnBody::Bypass
                }
                Ok(true) => OnBody::Reply(self.refuse(400, NO_KV_PARAMS)),
                Err(error) => OnBody::Reply(self.refuse(400, &not_json(&error))),
            };
        };
        // Not for the engine to judge: its parser takes more than JSON (NaN, UTF-16, lone surrogates), and a body that
        // we cannot read could carry the fields that a client may not send.
        let object = match Object::parse(bytes) {
            Ok(object) => object,
            Err(error) => return OnBody::Reply(self.refuse(400, &not_json(&error))),
        };
        let model = object.get("model").and_then(body::string);
        self.model = plugin.model(model.as_deref());
        if plugin.config().counts_tokens() {
            self.read_limits(api, &object);
        }
        if plugin.config().mode == Mode::Relay {
            return self.on_relayed_body(plugin, api, &object);
        }
        if api.has_params(&object) {
            return OnBody::Reply(self.refuse(400, NO_KV_PARAMS));
        }
        let place = api.place(&object).filter(|_| !api.goes_alone(&object));
        let Some(place) = place else {
            return OnBody::Route;
        };
        self.place = place;
        let config = plugin.config();
        let params = handover::prefill_params(config.protocol, &self.transfer_id);
        self.leg.api = api;
        self.leg.body = api.prefill_body(&object, params.as_deref());
        if config.prefill_policy == PrefillPolicy::PrefixHash {
            self.leg.prefix = prefill::prefix(api, &object, config.prefill_prefix_bytes);
        }
        self.state = State::Prefilling;
        OnBody::Prefill
    }

    /// The request's model, as configured.
    pub fn model(&self) -> Option<ModelIndex> {
        self.model
    }

    /// Takes note of the decision that sends the request to `cluster`.
    pub fn routed(&mut self, decision: &Decision, cluster: &str) {
        self.state = State::Routed;
        // A failed prefill stays the outcome of a request that decode then serves alone.
        self.outcome.get_or_insert(Outcome::Routed(decision.reason));
        self.decision.clear();
        let _ = write!(self.decision, "{cluster};reason={}", decision.reason.name());
        if let Some(region) = decision.region {
            let _ = write!(self.decision, ";region={}", region.0);
        }
        if let Some(similarity) = decision.similarity {
            let band = decision.band;
            let _ = write!(self.decision, ";band={band};similarity={similarity:.3}");
        }
    }

    /// Takes note of how many requests of known experts ran where it goes.
    pub fn met(&mut self, known: Option<u32>) {
        if let Some(known) = known {
            let _ = write!(self.decision, ";known={known}");
        }
    }

    /// Takes note, under a rollout, of the policy that decided, and in shadow mode of where the other would have sent it.
    pub fn went_by(&mut self, policy: Policy, shadow: Option<(&str, Reason)>) {
        let _ = write!(self.decision, ";policy={}", policy.name());
        if let Some((cluster, reason)) = shadow {
            let reason = reason.name();
            let _ = write!(self.decision, ";shadow={cluster};shadow_reason={reason}");
        }
    }

    /// The decision, for people: `decode-2;reason=in_band;region=2;band=1;similarity=0.931`.
    /// A Structured Field token with parameters; empty where nothing was decided.
    pub fn decision(&self) -> &str {
        &self.decision
    }

    /// Response headers are on their way to the client. If the request was not that far, the host answered:
    /// a body over the limit, a timeout.
    pub fn on_response(&mut self) {
        match self.state {
            State::ReadingBody => self.end(Outcome::Refused),
            State::Prefilling => self.end(Outcome::PrefillFailed),
            _ => {}
        }
    }

    /// A promise was broken; the client gets 500.
    pub fn internal(&mut self, what: &str) -> Reply {
        self.end(Outcome::Internal);
        Reply::error(500, "internal_error", what)
    }

    /// Headers of an answer as text, which is all that the host takes in one call. The others, with values that are
    /// not UTF-8, are kept for [`take_not_text`](Self::take_not_text).
    pub fn text_headers<'a>(&mut self, answer: &'a Reply) -> Vec<(&'a str, &'a str)> {
        let mut text = Vec::with_capacity(answer.headers.len());
        for (name, value) in &answer.headers {
            match std::str::from_utf8(value) {
                Ok(value) => text.push((name.as_str(), value)),
                Err(_) => self.not_text.push((name.clone(), value.clone())),
            }
        }
        text
    }

    /// What [`text_headers`](Self::text_headers) left out, once.
    pub fn take_not_text(&mut self) -> Vec<Header> {
        std::mem::take(&mut self.not_text)
    }

    /// The outcome, as far as it is known.
    pub fn outcome(&self) -> Option<Outcome> {
        match self.state {
            State::New => None,
            State::Bypassed => Some(Outcome::Bypassed),
            State::ReadingBody | State::Prefilling | State::Relayed => Some(Outcome::ClientGone),
            State::Routed | State::Answered => self.outcome,
        }
    }

    fn end(&mut self, outcome: Outcome) {
        self.state = State::Answered;
        self.outcome = Some(outcome);
    }

    fn refuse(&mut self, status: u32, message: &str) -> Reply {
        self.end(Outcome::Refused);
        Reply::error(status, "invalid_request_error", message)
    }
}

fn not_json(error: &dyn std::error::Error) -> String {
    format!("the body cannot be read: {error}")
}

#[cfg(test)]
mod tests;
