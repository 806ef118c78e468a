//! The prefill leg of a request: its answer, and the blocks that the answer hands over.

use std::borrow::Cow;

use eldr_core::Outcome;

use super::{Answer, Head, OnPrefill, Reply, Request, State, prompt_tokens, usage};
use crate::api::Place;
use crate::body::Object;
use crate::config::{Config, OnPrefillFailure};
use crate::handover::{self, HandOver};
use crate::headers;
use crate::plugin::Plugin;
use crate::prefill::Leg;
use crate::release::{Form, Release};

impl Request {
    /// The prefill leg, until it was answered.
    pub fn leg(&mut self) -> &mut Leg {
        &mut self.leg
    }

    /// Whether to send the leg once more after this answer; see [`Leg::may_retry`].
    pub fn may_retry(
        &self,
        answer: &Answer,
        config: &Config,
        now_ms: u64,
        deadline_ms: u64,
    ) -> bool {
        let status = answer.status();
        self.leg.may_retry(status, config, now_ms, deadline_ms)
    }

    /// Takes the prefill answer.
    pub fn on_prefill<'a>(&mut self, answer: &'a Answer, plugin: &Plugin) -> OnPrefill<'a> {
        let on_failure = plugin.config().on_prefill_failure;
        let next = self.judge(answer, plugin);
        if self.handed_over.is_none() {
            self.leg = Leg::default();
        }
        next.unwrap_or_else(|(status, how)| self.prefill_failed(on_failure, status, how))
    }

    /// What to do, or the status and the words for a failure.
    fn judge<'a>(
        &mut self,
        answer: &'a Answer,
        plugin: &Plugin,
    ) -> Result<OnPrefill<'a>, (u32, &'static str)> {
        match answer.status() {
            Some(200..=299) => {
                let object = Object::parse(&answer.body)
                    .map_err(|_| (502, "gave an answer that is not JSON"))?;
                let said = handover::read(&object);
                let header = headers::get(&answer.headers, headers::SIGNATURE).map(Cow::Borrowed);
                let eldr_sig = said.as_ref().and_then(|said| said.eldr_sig.as_deref());
                let from_eldr_sig = || plugin.header_from_eldr_sig(self.model, eldr_sig?);
                let signature = header.or_else(|| from_eldr_sig().map(Cow::Owned));
                let params = self.params(&object, said.as_ref(), plugin.config());
                let head = params.as_deref().map(|params| self.head(params));
                if plugin.asks_for_prompt_tokens(self.model) {
                    let usage = || self.leg.api.prompt_tokens(&object);
                    self.tokens.prompt = prompt_tokens(signature.as_deref(), usage);
                }
                if plugin.config().report_cached_tokens {
                    self.cached_tokens = usage::cached_tokens(self.leg.api, &object);
                }
                if plugin.config().release != Form::None {
                    self.handed_over = params;
                }
                Ok(OnPrefill::Route { signature, head })
            }
            Some(status @ 400..=499) => {
                self.end(Outcome::PrefillRejected);
                let kept = headers::for_client(&answer.headers);
                Ok(OnPrefill::Reply(Reply {
                    status,
                    headers: kept
                        .iter()
                        .map(|(k, v)| ((*k).to_owned(), v.to_vec()))
                        .collect(),
                    body: answer.body.clone(),
                }))
            }
            Some(504) => Err((504, "did not answer in time")),
            Some(_) => Err((502, "failed")),
            None => Err((502, "could not be reached or broke off")),
        }
    }

    /// Takes a prefill answer that came too late for its client. The blocks it pins, if any, are to be released.
    pub fn on_late_prefill(&mut self, answer: &Answer, config: &Config) -> Option<Release> {
        if !matches!(answer.status(), Some(200..=299)) {
            return None;
        }
        let object = Object::parse(&answer.body).ok()?;
        let params = self.params(&object, handover::read(&object).as_ref(), config)?;
        Release::new(config.release, std::mem::take(&mut self.leg), &params)
    }

    /// Params of the decode leg.
    fn params(
        &self,
        answer: &Object<'_>,
        said: Option<&HandOver>,
        config: &Config,
    ) -> Option<String> {
        let from = self
            .leg
            .cluster
            .and_then(|cluster| config.engines.get(cluster)?.as_ref());
        let (protocol, api, id) = (config.protocol, self.leg.api, &self.transfer_id);
        handover::decode_params(protocol, api, answer, said, id, from)
    }

    /// Whether the request took blocks along of which it is not known that a worker got them.
    pub fn is_handed_over(&self) -> bool {
        self.handed_over.is_some()
    }

    /// A worker has begun to answer the decode leg, so it has the blocks.
    pub fn on_decode_served(&mut self) {
        self.handed_over = None;
        self.leg = Leg::default();
    }

    /// The request has ended. Blocks that decode was to fetch are to be released unless
    /// [it was served](Self::on_decode_served).
    pub fn take_release(&mut self, form: Form) -> Option<Release> {
        let params = self.handed_over.take()?;
        Release::new(form, std::mem::take(&mut self.leg), &params)
    }

    fn prefill_failed(
        &mut self,
        then: OnPrefillFailure,
        status: u32,
        how: &str,
    ) -> OnPrefill<'static> {
        self.outcome = Some(Outcome::PrefillFailed);
        match then {
            OnPrefillFailure::DecodeOnly => OnPrefill::Route {
                signature: None,
                head: None,
            },
            OnPrefillFailure::Error => {
                self.state = State::Answered;
                let message = format!("the prefill worker {how}");
                OnPrefill::Reply(Reply::error(status, "prefill_failed", &message))
            }
        }
    }

    fn head(&self, params: &str) -> Head {
        let Place {
            replaces,
            before,
            after,
        } = &self.place;
        Head {
            replaces: *replaces,
            bytes: format!("{before}{params}{after}"),
        }
    }
}
