//! Stream context: one request on its way through the filter.

use std::cell::RefCell;
use std::rc::Rc;

use proxy_wasm::hostcalls;
use proxy_wasm::traits::{Context, HttpContext};
use proxy_wasm::types::{Action, BufferType, MapType};

use super::attributes::{reached_a_worker, received, set_property};
use super::calls::Errand;
use super::decode::{record, route};
use super::held::{self, HeldAnswer};
use super::onward::{go_on, reply};
use super::question::Clue;
use super::relay::{self, PrefillLeg};
use super::stages;
use super::vm::{self, SharedPlugin, SharedRequest, Starving, Waiting};
use super::{decision, headers, now_ms, now_ns, remove_header, set_header};
use crate::config::{Mode, Protocol};
use crate::headers::{self as names, is_private, is_steering};
use crate::health::{Sent, Verdict};
use crate::load::Flight;
use crate::meter::Meter;
use crate::metrics;
use crate::request::{OnBody, OnHeaders, Relayed};

pub(super) struct Stream {
    id: u32,
    plugin: Option<SharedPlugin>,
    request: SharedRequest,
    /// Where this stream is counted.
    counted: Rc<RefCell<Option<Flight>>>,
    /// Until there is a verdict on its cluster.
    sent: Rc<RefCell<Option<Sent>>>,
    content_length: Option<usize>,
    request_id: Rc<[u8]>,
    /// Times the answer, once a worker is chosen and where that is asked for.
    meter: Rc<RefCell<Option<Meter>>>,
    /// Relay mode: this request is a prefill leg.
    relayed: Option<PrefillLeg>,
    /// The answer's headers are held until its body can be edited.
    held: Option<HeldAnswer>,
    ended: bool,
}

impl Stream {
    pub(super) fn new(id: u32, plugin: Option<SharedPlugin>) -> Self {
        Self {
            id,
            plugin,
            request: SharedRequest::default(),
            counted: Rc::default(),
            sent: Rc::default(),
            content_length: None,
            request_id: Rc::default(),
            meter: Rc::default(),
            relayed: None,
            held: None,
            ended: false,
        }
    }

    /// The whole body is there.
    fn on_body_complete(&mut self, plugin: &SharedPlugin, size: usize) -> Action {
        stages::begin();
        let body = hostcalls::get_buffer(BufferType::HttpRequestBody, 0, size);
        let body = body.ok().flatten().unwrap_or_default();
        stages::end("request_body");
        let waiting = self.waiting(plugin);
        if plugin.borrow().config().protocol == Protocol::Mooncake {
            let id = vm::with(|vm| vm.transfer_id(plugin.borrow().config().timing));
            self.request.borrow_mut().names_transfer(id);
        }
        let next = self.request.borrow_mut().on_body(&plugin.borrow(), &body);
        stages::end("prefill_body");
        match next {
            OnBody::Reply(answer) => {
                reply(&waiting, &answer);
                Action::Pause
            }
            OnBody::Bypass => Action::Continue,
            OnBody::Route => go_on(&waiting, route(&waiting, Clue::Header(None), None)),
            OnBody::Relay(Relayed::Prefill) => {
                let sent = PrefillLeg::send(self.id, &waiting);
                let sent = sent.map(|leg| self.relayed = Some(leg));
                go_on(&waiting, sent)
            }
            OnBody::Relay(decode) => go_on(&waiting, relay::send_decode(&waiting, decode)),
            OnBody::Prefill => {
                let timing = plugin.borrow().config().timing;
                let woken = vm::with(|vm| {
                    vm.waiting.insert(self.id, waiting.clone());
                    vm.wake_root(Errand::Prefill(self.id), timing)
                });
                stages::end("wake_root");
                if !woken {
                    let answer = self
                        .request
                        .borrow_mut()
                        .internal("the prefill leg could not be started");
                    reply(&waiting, &answer);
                }
                Action::Pause
            }
        }
    }

    fn waiting(&self, plugin: &SharedPlugin) -> Waiting {
        Waiting {
            plugin: plugin.clone(),
            request: self.request.clone(),
            started_ms: now_ms(),
            content_length: self.content_length,
            counted: self.counted.clone(),
            sent: self.sent.clone(),
            request_id: self.request_id.clone(),
            meter: self.meter.clone(),
        }
    }

    /// A body comes although the headers are held, so the plugin has the flag for that.
    fn is_fed(&self) {
        let Some(plugin) = &self.plugin else { return };
        if !plugin.borrow().gets_bodies {
            plugin.borrow_mut().gets_bodies = true;
            let of_other = |starving: &Starving| !Rc::ptr_eq(&starving.waiting.plugin, plugin);
            vm::with(|vm| vm.starving.retain(|_, starving| of_other(starving)));
        }
    }

    /// The verdict on the decode cluster that the request was sent to, once.
    fn judge(&self, verdict: impl FnOnce() -> Verdict) {
        if let (Some(sent), Some(plugin)) = (self.sent.borrow_mut().take(), &self.plugin) {
            decision::learn(&plugin.borrow(), &sent, verdict());
        }
    }

    /// Counting ends here, exactly once per stream.
    fn end(&mut self) {
        if std::mem::replace(&mut self.ended, true) {
            return;
        }
        self.judge(|| Verdict::Unknown);
        if let Some(leg) = self.relayed.take() {
            leg.end();
        }
        let Some(plugin) = &self.plugin else { return };
        let timing = plugin.borrow().config().timing;
        let outcome = self.request.borrow().outcome();
        let counted = self.counted.borrow_mut().take();
        let step_ms = match (self.meter.borrow_mut().take(), &counted) {
            (Some(meter), Some(flight)) => record(
                &meter,
                flight.cluster(),
                &plugin.borrow(),
                &self.request.borrow(),
            ),
            _ => None,
        };
        let failed = vm::with(|vm| {
            vm.waiting.remove(&self.id);
            vm.starving.remove(&self.id);
            if let Some(outcome) = outcome {
                vm.metrics.count(&metrics::outcome(outcome));
            }
            counted.map(|flight| vm.end(flight, step_ms, timing))
        });
        let failed = failed.unwrap_or_default();
        if let Some(outcome) = outcome {
            set_property("eldr_outcome", &outcome.to_string());
        }
        self.release(plugin, failed);
    }

    /// Has the KV blocks released that a decode leg was to fetch which never reached a worker.
    fn release(&self, plugin: &SharedPlugin, failed: String) {
        let mut request = self.request.borrow_mut();
        let config = &plugin.borrow();
        let (form, timing) = (config.config().release, config.config().timing);
        if !request.is_handed_over() || !form.may_repeat() && reached_a_worker() {
            return;
        }
        if let Some(release) = request.take_release(form) {
            let errand = Errand::Release(release, plugin.clone(), failed);
            if !vm::with(|vm| vm.wake_root(errand, timing)) {
                vm::with(|vm| vm.metrics.count(metrics::RELEASE_FAILED));
            }
        }
    }
}

impl Context for Stream {
    fn on_done(&mut self) -> bool {
        self.end();
        true
    }
}

impl HttpContext for Stream {
    fn on_http_request_headers(&mut self, _: usize, end_of_stream: bool) -> Action {
        let Some(plugin) = self.plugin.clone() else {
            return Action::Continue;
        };
        stages::begin();
        let mut all = headers(MapType::HttpRequestHeaders);
        if plugin.borrow().config().mode == Mode::Relay {
            let signature = names::get(&all, names::SIGNATURE).map(<[u8]>::to_vec);
            self.request.borrow_mut().carries(signature);
        }
        #[cfg(feature = "trap-for-tests")]
        if names::get(&all, "x-eldr-trap-for-tests").is_some() {
            core::arch::wasm32::unreachable();
        }
        all.retain(|(name, _)| {
            let steers = is_steering(name);
            if steers {
                remove_header(MapType::HttpRequestHeaders, name);
            }
            !steers
        });
        self.content_length = names::get(&all, "content-length")
            .and_then(|value| std::str::from_utf8(value).ok()?.parse().ok());
        if let Some(id) = names::get(&all, names::REQUEST_ID) {
            self.request_id = id.into();
        }
        let next = self.request.borrow_mut().on_headers(all, end_of_stream);
        stages::end("request_headers");
        match next {
            OnHeaders::Bypass => Action::Continue,
            OnHeaders::ReadBody => {
                if !plugin.borrow().gets_bodies {
                    let starving = Starving {
                        waiting: self.waiting(&plugin),
                        received: received(),
                    };
                    vm::with(|vm| vm.starving.insert(self.id, starving));
                }
                Action::Pause
            }
            OnHeaders::Reply(answer) => {
                reply(&self.waiting(&plugin), &answer);
                Action::Pause
            }
        }
    }

    fn on_http_request_body(&mut self, size: usize, end_of_stream: bool) -> Action {
        let (reads, prefills) = {
            let request = self.request.borrow();
            (request.reads_body(), request.prefills())
        };
        if reads {
            self.is_fed();
        }
        match self.plugin.clone() {
            Some(plugin) if reads && end_of_stream => self.on_body_complete(&plugin, size),
            Some(_) if reads || prefills => Action::Pause,
            _ => Action::Continue,
        }
    }

    fn on_http_request_trailers(&mut self, _: usize) -> Action {
        // With trailers the body never says that it ends.
        let reads = self.request.borrow().reads_body();
        if reads {
            self.is_fed();
        }
        match self.plugin.clone() {
            Some(plugin) if reads => self.on_body_complete(&plugin, usize::MAX),
            _ => Action::Continue,
        }
    }

    fn on_http_response_headers(&mut self, _: usize, end_of_stream: bool) -> Action {
        if let Some(leg) = &mut self.relayed {
            return leg.on_answer_headers(end_of_stream);
        }
        stages::begin();
        let all = headers(MapType::HttpResponseHeaders);
        for (name, _) in all.iter().filter(|(name, _)| is_private(name)) {
            remove_header(MapType::HttpResponseHeaders, name);
        }
        if let Some(plugin) = &self.plugin {
            decision::settle_endpoint(&plugin.borrow(), &self.counted, &self.sent);
        }
        // Only a worker says so; asking Envoy what happened costs more than all the rest here.
        let succeeds = names::get(&all, ":status").is_some_and(|status| status.starts_with(b"2"));
        self.judge(|| match succeeds {
            true => Verdict::Answered,
            false => decision::verdict(),
        });
        if succeeds {
            self.held = HeldAnswer::new(&self.request, &all, end_of_stream);
        }
        let mut request = self.request.borrow_mut();
        request.on_response();
        if succeeds {
            request.on_decode_served();
        }
        let streams = names::get(&all, "content-type")
            .is_some_and(|kind| kind.starts_with(b"text/event-stream"));
        if !(succeeds && streams) {
            self.meter.borrow_mut().take();
        }
        for (name, value) in request.take_not_text() {
            let _ = hostcalls::add_map_value_bytes(MapType::HttpResponseHeaders, &name, &value);
        }
        let debug = self
            .plugin
            .as_ref()
            .is_some_and(|plugin| plugin.borrow().config().debug_headers);
        if debug && !request.decision().is_empty() {
            let decision = request.decision().as_bytes();
            let _ = set_header(MapType::HttpResponseHeaders, names::DECISION, decision);
        }
        stages::end("response_headers");
        held::action(self.held.is_none())
    }

    fn on_http_response_body(&mut self, size: usize, end_of_stream: bool) -> Action {
        if let Some(leg) = &mut self.relayed {
            return leg.on_answer_body(size, end_of_stream);
        }
        if let Some(meter) = self.meter.borrow_mut().as_mut() {
            let piece = hostcalls::get_buffer(BufferType::HttpResponseBody, 0, size);
            let piece = piece.ok().flatten().unwrap_or_default();
            meter.pass(&piece, end_of_stream, now_ns());
        }
        let Some(answer) = &self.held else {
            return Action::Continue;
        };
        let goes_on = answer.on_body(&self.request, size, end_of_stream);
        if goes_on {
            self.held = None;
        }
        held::action(goes_on)
    }

    fn on_http_response_trailers(&mut self, _: usize) -> Action {
        if let Some(meter) = self.meter.borrow_mut().as_mut() {
            meter.pass(b"", true, now_ns());
        }
        if let Some(leg) = &mut self.relayed {
            leg.on_answer_body(usize::MAX, true);
        }
        if let Some(answer) = self.held.take() {
            answer.on_body(&self.request, usize::MAX, true);
        }
        Action::Continue
    }

    fn on_log(&mut self) {
        stages::begin();
        self.end();
        stages::end("end");
    }
}
