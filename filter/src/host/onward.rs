//! A request that was held goes on to its decode worker, or is answered here.

use proxy_wasm::hostcalls;
use proxy_wasm::types::{Action, LogLevel};

use super::attributes::log_signature;
use super::decode::route;
use super::question::Clue;
use super::vm::{self, Waiting};
use super::{log, now_ms, post, stages};
use crate::metrics;
use crate::request::{Answer, OnPrefill, Reply};

/// The prefill leg has ended; the effective context is the stream's.
pub(super) fn after_prefill(waiting: &Waiting, answer: &Answer) {
    let elapsed = now_ms().saturating_sub(waiting.started_ms);
    vm::with(|vm| vm.metrics.record(metrics::PREFILL_MS, elapsed));
    let next = waiting
        .request
        .borrow_mut()
        .on_prefill(answer, &waiting.plugin.borrow());
    stages::end("read_answer");
    let routed = match next {
        OnPrefill::Reply(answer) => Err(answer),
        OnPrefill::Route { signature, head } => {
            let signature = signature.as_deref();
            if waiting.plugin.borrow().config().log_signatures {
                log_signature(signature);
            }
            post::sample(waiting, signature);
            route(waiting, Clue::Header(signature), head.as_ref())
        }
    };
    match routed {
        Ok(()) => {
            let _ = hostcalls::resume_http_request();
            stages::end("resume");
        }
        Err(answer) => reply(waiting, &answer),
    }
}

/// What the host does with a request whose headers are held: it goes on, or it is answered.
pub(super) fn go_on(waiting: &Waiting, sent: Result<(), Reply>) -> Action {
    match sent {
        Ok(()) => Action::Continue,
        Err(answer) => {
            reply(waiting, &answer);
            Action::Pause
        }
    }
}

/// Answers in place of an upstream.
pub(super) fn reply(waiting: &Waiting, answer: &Reply) {
    let headers = waiting.request.borrow_mut().text_headers(answer);
    if hostcalls::send_http_response(answer.status, headers, Some(&answer.body)).is_err() {
        let outcome = waiting.request.borrow().outcome();
        log(
            LogLevel::Error,
            &format!("eldr: an answer could not be sent ({outcome:?})"),
        );
    }
}
