//! KV blocks that no decode worker will fetch: their client is gone, or the decode leg never reached a worker.
//!
//! Prefill workers pin the blocks until their lease ends unless somebody releases them, and how that is done is the
//! engine's affair: see [`Form`]. Params are released at most once, and never when a decode worker has begun to answer.

use serde::Deserialize;

use crate::body::Object;
use crate::handover::KV_PARAMS;
use crate::headers::Header;
use crate::prefill::Leg;

/// Most releases under way per thread; what comes on top is left to the engine's lease.
pub const MAX_UNDER_WAY: usize = 64;
/// Deadline of a release, milliseconds.
pub const TIMEOUT_MS: u64 = 10_000;

/// How blocks are released.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Form {
    /// Not at all: their lease ends.
    None,
    /// Official ELDR fork: a decode worker is told to.
    Eldr,
    /// Stock vLLM: a decode worker fetches them and generates one token, which nobody reads.
    #[default]
    Decode,
}

/// A request to a decode worker that releases blocks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Release {
    /// Headers, as of the client's request; `:path` is that of the release.
    pub headers: Vec<Header>,
    /// Body.
    pub body: String,
    /// How often it may be sent.
    pub tries: u8,
}

impl Form {
    /// Whether blocks may be released of which it is not known that no worker has them: a worker that went without an
    /// answer, perhaps before it had read the request. The fork's release is a note with the request's id, which is
    /// nothing to an engine that has freed the blocks; a decode request would fetch what may be another request's by
    /// then. So it is also sent once more, by another worker, when it fails.
    pub fn may_repeat(self) -> bool {
        self == Self::Eldr
    }
}

impl Release {
    /// Releases the blocks that `params` stand for, of the request with this prefill leg.
    pub fn new(form: Form, leg: Leg, params: &str) -> Option<Self> {
        let Leg {
            api,
            mut headers,
            body,
            ..
        } = leg;
        let body = match form {
            Form::None => return None,
            Form::Eldr => {
                headers.retain(|(name, _)| name != ":path");
                headers.push((":path".into(), b"/v1/kv_transfer/release".to_vec()));
                format!("{{\"{KV_PARAMS}\":{params}}}")
            }
            // The prefill leg already asks for one token and no stream.
            Form::Decode => api.with_params(&Object::parse(body.as_bytes()).ok()?, params),
        };
        // The worker that was to take it may be the one in trouble.
        let tries = if form.may_repeat() { 2 } else { 1 };
        Some(Self {
            headers,
            body,
            tries,
        })
    }
}

/// Envoy's response flags of a leg that ended before any host had it: no healthy upstream, connection failure,
/// overflow, no route, no cluster.
const NOT_SENT: u64 = 0x2 | 0x20 | 0x80 | 0x100 | 0x100_0000;
/// Of one that a host had: remote reset, connection termination.
const SENT: u64 = 0x10 | 0x40;

/// Whether a decode leg reached a worker, by Envoy's attribute `response.flags` (bits of `CoreResponseFlag`) and
/// whether there is an `upstream.address`. In doubt it did.
pub fn reached_worker(flags: u64, has_upstream: bool) -> bool {
    flags & SENT != 0 || (has_upstream && flags & NOT_SENT == 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn leg() -> Leg {
        Leg {
            headers: vec![
                (":path".into(), b"/v1/completions".to_vec()),
                ("x-request-id".into(), b"r".to_vec()),
            ],
            body: r#"{"prompt":"a","max_tokens":1,"stream":false,"kv_transfer_params":{"x":null}}"#
                .into(),
            ..Leg::default()
        }
    }

    #[test]
    fn each_form_says_what_its_engine_understands() {
        let params = r#"{"remote_block_ids":[[1]]}"#;
        assert_eq!(Release::new(Form::None, leg(), params), None);
        let decode = Release::new(Form::Decode, leg(), params).unwrap();
        assert_eq!(
            decode.body,
            r#"{"prompt":"a","max_tokens":1,"stream":false,"kv_transfer_params":{"remote_block_ids":[[1]]}}"#
        );
        assert_eq!(decode.headers, leg().headers);
        let eldr = Release::new(Form::Eldr, leg(), params).unwrap();
        assert_eq!(
            eldr.body,
            r#"{"kv_transfer_params":{"remote_block_ids":[[1]]}}"#
        );
        assert_eq!(
            crate::headers::get(&eldr.headers, ":path"),
            Some(b"/v1/kv_transfer/release".as_slice())
        );
    }

    #[test]
    fn a_leg_reached_a_worker_unless_envoy_says_that_it_did_not() {
        for (flags, has_upstream, reached) in [
            (0, true, true),            // an answer
            (0, false, false),          // another filter answered, or the client left first
            (0x20, true, false), // connection refused: a host was chosen, it never had the request
            (0x2, false, false), // no healthy host
            (0x100_0000, false, false), // no such cluster
            (0x80, true, false), // circuit breaker
            (0x40, true, true),  // broke off
            (0x20 | 0x40, true, true), // broke off, then the retry was refused
            (0x4000, true, true), // the client left while a worker had it
            (0x4000, false, false), // the client left while connecting
        ] {
            assert_eq!(
                reached_worker(flags, has_upstream),
                reached,
                "{flags:#x} {has_upstream}"
            );
        }
    }
}
