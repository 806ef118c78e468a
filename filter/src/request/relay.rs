//! Relay mode: requests of a coordinator, who runs both legs himself and is trusted.
//!
//! ```text
//!                 body                      answer's head
//! ReadingBody ──┬──────► Relayed (prefill leg) ──────► Answered
//!               └──────► Routed  (decode leg)
//! ```

use std::borrow::Cow;

use eldr_core::Outcome;

use super::{Head, OnBody, Request, State, prompt_tokens};
use crate::api::Api;
use crate::body::{Edit, Object};
use crate::config::PrefillPolicy;
use crate::handover::ELDR_SIG;
use crate::headers;
use crate::plugin::Plugin;
use crate::prefill;

/// One of a coordinator's two legs.
#[derive(Debug, PartialEq, Eq)]
pub enum Relayed {
    /// Wants KV blocks to be computed and kept: choose a prefill cluster.
    Prefill,
    /// Anything else: choose a decode cluster.
    Decode {
        /// Signature header that the request itself carries or spells in its body.
        signature: Option<Vec<u8>>,
        /// Whether it fetches blocks, so that a prefill leg with its id went before.
        fetches: bool,
        /// The whole body without the signature, where it had one.
        body: Option<Head>,
    },
}

impl Request {
    /// Keeps the signature that a coordinator sent along, which does not go further.
    pub fn carries(&mut self, signature: Option<Vec<u8>>) {
        self.carried = signature;
    }

    /// The id that both legs of a request have.
    pub fn id(&self) -> Option<&[u8]> {
        headers::get(&self.leg.headers, headers::REQUEST_ID)
    }

    /// Reads which leg it is.
    pub(super) fn on_relayed_body(
        &mut self,
        plugin: &Plugin,
        api: Api,
        object: &Object<'_>,
    ) -> OnBody {
        let raw = api.params(object).unwrap_or_default();
        let params = Object::parse(raw.as_bytes()).ok();
        let params = params.as_ref();
        let is = |key| params.is_some_and(|params| params.get(key) == Some("true"));
        if is("do_remote_decode") {
            if plugin.config().prefill_policy == PrefillPolicy::PrefixHash {
                self.leg.prefix =
                    prefill::prefix(api, object, plugin.config().prefill_prefix_bytes);
            }
            self.state = State::Relayed;
            return OnBody::Relay(Relayed::Prefill);
        }
        let eldr_sig = params.and_then(|params| params.get(ELDR_SIG));
        let from_body = || plugin.header_from_eldr_sig(self.model, eldr_sig?);
        let signature = self.carried.take().or_else(from_body);
        if plugin.config().counts_tokens() {
            self.tokens.prompt = prompt_tokens(signature.as_deref(), || None);
        }
        let signed = params.filter(|params| params.has(ELDR_SIG));
        let body = signed.map(|params| {
            let params = params.edit(&[(ELDR_SIG, Edit::Remove)]);
            Head {
                replaces: object.text().len(),
                bytes: api.with_params(object, &params),
            }
        });
        OnBody::Relay(Relayed::Decode {
            signature,
            fetches: is("do_remote_prefill"),
            body,
        })
    }

    /// Tokens of the prompt, by the body of a prefill leg's answer.
    pub fn prompt_tokens_of(&self, answer: &Object<'_>) -> Option<u64> {
        self.api?.prompt_tokens(answer)
    }

    /// The head of a prefill leg's answer has come. True if there may be a signature.
    pub fn on_relayed_answer(&mut self, status: Option<u32>) -> bool {
        self.end(match status {
            Some(200..=299) => Outcome::Prefilled,
            Some(400..=499) => Outcome::PrefillRejected,
            _ => Outcome::PrefillFailed,
        });
        matches!(status, Some(200..=299))
    }
}

/// Whether the signature of a prefill answer with these headers is to be looked for in its body, which is then held:
/// JSON of a known or no length, never a stream of events.
pub fn is_readable(all: &[headers::Header]) -> bool {
    let text = |name| headers::get(all, name).map(String::from_utf8_lossy);
    let kind = text("content-type").unwrap_or_default();
    let length = text("content-length").unwrap_or(Cow::Borrowed("0"));
    kind.trim_start().starts_with("application/json")
        && headers::get(all, "content-encoding").is_none()
        && length
            .parse()
            .is_ok_and(|length: usize| length <= MAX_ANSWER_BYTES)
}

/// A longer prefill answer passes unread: Envoy turns what it cannot hold into an error, at 1 MiB by default.
pub const MAX_ANSWER_BYTES: usize = 512 << 10;

#[cfg(test)]
mod tests;
