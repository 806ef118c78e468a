//! Answers: the gateway's own to a client, and a prefill worker's to the gateway.

use crate::headers::{self, Header};

/// An answer to the client from the gateway.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reply {
    /// HTTP status.
    pub status: u32,
    /// Headers.
    pub headers: Vec<Header>,
    /// Body.
    pub body: Vec<u8>,
}

impl Reply {
    /// An error in the shape that OpenAI clients read.
    pub(super) fn error(status: u32, kind: &str, message: &str) -> Self {
        let body = serde_json::json!({
            "error": {"message": message, "type": kind, "param": null, "code": status}
        });
        Self {
            status,
            headers: vec![("content-type".into(), b"application/json".to_vec())],
            body: body.to_string().into_bytes(),
        }
    }
}

/// The prefill worker's answer as the host hands it out.
#[derive(Debug)]
pub struct Answer {
    /// Headers; none at all after a reset or an answer that was too large.
    pub headers: Vec<Header>,
    /// Body.
    pub body: Vec<u8>,
}

impl Answer {
    /// No answer at all.
    pub fn none() -> Self {
        Self {
            headers: vec![],
            body: vec![],
        }
    }

    /// HTTP status; `None` where there is no answer.
    pub fn status(&self) -> Option<u32> {
        let value = headers::get(&self.headers, ":status")?;
        std::str::from_utf8(value).ok()?.parse().ok()
    }
}
