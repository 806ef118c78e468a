//! Answers of decode workers that are held until they can be edited; off by default, and never a stream of events.

use proxy_wasm::hostcalls;
use proxy_wasm::types::{Action, BufferType, MapType};

use super::set_header;
use super::vm::SharedRequest;
use crate::headers::{self as names, Header};
use crate::request::{MAX_ANSWER_BYTES, is_readable};

/// An answer whose headers are held.
pub(super) struct HeldAnswer {
    /// Whether a header says how long the body is.
    has_length: bool,
}

impl HeldAnswer {
    /// Holds the answer if there is something to edit in it.
    pub(super) fn new(
        request: &SharedRequest,
        all: &[Header],
        end_of_stream: bool,
    ) -> Option<Self> {
        let wanted = request.borrow().reports_cached_tokens() && !end_of_stream;
        (wanted && is_readable(all)).then(|| Self {
            has_length: names::get(all, "content-length").is_some(),
        })
    }

    /// More of its body; true once it may go on.
    pub(super) fn on_body(&self, request: &SharedRequest, size: usize, ends: bool) -> bool {
        let is_too_long = size != usize::MAX && size > MAX_ANSWER_BYTES;
        if !ends || is_too_long {
            return is_too_long;
        }
        let body = hostcalls::get_buffer(BufferType::HttpResponseBody, 0, size);
        let body = body.ok().flatten().unwrap_or_default();
        if let Some(edited) = request.borrow_mut().with_cached_tokens(&body) {
            let all = body.len();
            let set =
                hostcalls::set_buffer(BufferType::HttpResponseBody, 0, all, edited.as_bytes());
            if set.is_ok() && self.has_length {
                let length = edited.len().to_string();
                let _ = set_header(
                    MapType::HttpResponseHeaders,
                    "content-length",
                    length.as_bytes(),
                );
            }
        }
        true
    }
}

/// What the host does with an answer that may be held.
pub(super) fn action(goes_on: bool) -> Action {
    match goes_on {
        true => Action::Continue,
        false => Action::Pause,
    }
}
