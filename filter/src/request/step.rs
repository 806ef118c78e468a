//! What the host is to do next with a request.

use std::borrow::Cow;

use super::{Relayed, Reply};

/// What to do once the request headers are there.
#[derive(Debug, PartialEq, Eq)]
pub enum OnHeaders {
    /// Let it pass to the default cluster.
    Bypass,
    /// Answer.
    Reply(Reply),
    /// Hold the headers and collect the body.
    ReadBody,
}

/// What to do once the body is complete.
#[derive(Debug, PartialEq, Eq)]
pub enum OnBody {
    /// Answer.
    Reply(Reply),
    /// Let it pass to the default cluster.
    Bypass,
    /// Choose a decode cluster without a prefill leg.
    Route,
    /// Send the prefill leg, which is kept in the request.
    Prefill,
    /// Relay mode: send the coordinator's leg on.
    Relay(Relayed),
}

/// What to do once the prefill leg has ended.
#[derive(Debug, PartialEq, Eq)]
pub enum OnPrefill<'a> {
    /// Answer.
    Reply(Reply),
    /// Choose a decode cluster by the signature, and put the head in place of the body's first bytes.
    Route {
        /// Value of the signature header.
        signature: Option<Cow<'a, [u8]>>,
        /// Hand-over for the decode worker.
        head: Option<Head>,
    },
}

/// New first bytes of the body: everything after them stays where it is.
#[derive(Debug, PartialEq, Eq)]
pub struct Head {
    /// How many bytes they replace.
    pub replaces: usize,
    /// The bytes.
    pub bytes: String,
}
