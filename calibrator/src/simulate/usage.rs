//! What a policy knows of the experts that a request will use.

use std::sync::Arc;

use eldr_core::signature::{Encoding, Signature};

use super::workload::Request;

/// Where the knowledge comes from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Usage {
    /// The signature of its prefill, as gateways have it.
    #[default]
    Prefill,
    /// What it really activates while it decodes, which nobody knows beforehand: what a rule could gain if signatures were perfect.
    Decode,
}

/// Tokens that a signature of [`Usage::Decode`] counts: as many as keep probabilities apart best.
const TOKENS: u16 = u16::MAX;

impl Usage {
    /// The signature that the request has for this knowledge.
    pub(super) fn signature(self, request: &Request) -> Option<Arc<str>> {
        match self {
            Usage::Prefill => request.signature.clone(),
            Usage::Decode => {
                let count = |p: f32| (p * f32::from(TOKENS)).round() as u16;
                let counts = request.experts.usage().into_iter().map(count).collect();
                let geometry = request.experts.geometry();
                let signature = Signature::dense(geometry, counts, Some(TOKENS.into())).ok()?;
                Some(signature.encode(Encoding::U16).into())
            }
        }
    }
}
