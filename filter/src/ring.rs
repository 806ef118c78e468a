//! What prefill answers said, kept until the decode request with the same id comes, on whichever thread: relay mode.
//!
//! A fixed number of keys in shared data, created when first used and changed by compare-and-swap. Each holds a few
//! entries, the newest in place of the oldest. An entry has the whole request id, so that ids that share a key do not
//! mix. An id that two requests use at a time is good for neither: it becomes *ambiguous*, and both are routed without a
//! signature.
//!
//! ```text
//!        begin            put             take
//! none ────────► pending ─────► ready ──────────► none
//!   ▲               │  │          │
//!   └── withdraw ───┘  └──────────┴── begin, or what belongs to another request ──► ambiguous
//! ```
//!
//! Entries that nobody touched for the time to live are forgotten, ambiguous ones too.

mod entry;

use eldr_core::decide::Reason;

use crate::shared::Shared;
use entry::{Entry, State};

/// Keys in shared data.
pub const KEYS: u64 = 1024;
/// Entries per key.
pub const ENTRIES: usize = 8;
/// A longer request id is not kept.
pub const MAX_ID_BYTES: usize = 256;

/// Attempts to write against other threads, which share a key by chance only.
const MAX_ATTEMPTS: usize = 64;

/// A longer signature is not kept, bytes.
pub const MAX_SIGNATURE_BYTES: usize = 32 << 10;

/// What a prefill answer said of the request's experts, as far as its model's policies ask.
#[derive(Debug, Clone, PartialEq)]
pub enum Found {
    /// Similarity to each region of the blob.
    Similarities(Vec<f32>),
    /// Policies that look at running batches need it whole: a header value with the layers that they look at.
    Signature(Vec<u8>),
}

/// What is kept of a prefill answer.
#[derive(Debug, Clone, PartialEq)]
pub struct Kept {
    /// Revision of the blob; 0, and so the fingerprint, where there was none.
    pub revision: u64,
    /// [`Map::fingerprint`](eldr_core::route::Map::fingerprint) of it: two models or listeners may have the same
    /// revision of different blobs.
    pub fingerprint: u64,
    /// What there is to decide by, or why there is nothing.
    pub found: Result<Found, Reason>,
    /// Tokens of the prompt, where they are known and wanted; not 0.
    pub prompt_tokens: Option<u64>,
}

impl Kept {
    /// The signature, where that was kept.
    pub fn signature(&self) -> Option<&[u8]> {
        match &self.found {
            Ok(Found::Signature(header)) => Some(header),
            _ => None,
        }
    }
}

/// Now, and for how long an entry stays good, milliseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Clock {
    /// Wall clock.
    pub now_ms: u64,
    /// Time to live.
    pub ttl_ms: u64,
}

/// A prefill leg's place in the ring.
#[derive(Debug, PartialEq, Eq)]
pub struct Ticket {
    id: Vec<u8>,
    token: u64,
}

/// What [`begin`] found.
#[derive(Debug, PartialEq, Eq)]
pub enum Begun {
    /// A place.
    Place(Ticket),
    /// Another request with this id is under way.
    Duplicate,
    /// The id is too long or empty, or other threads were always faster.
    NoPlace,
}

/// What [`take`] found.
#[derive(Debug, PartialEq)]
pub enum Taken {
    /// What this id's prefill answer said.
    Kept(Kept),
    /// Several requests use this id.
    Duplicate,
    /// Nothing: no prefill leg with this id passed, or it is too long ago or had no signature.
    Missing,
}

/// A prefill leg starts. `token` tells it from all others.
pub fn begin(shared: &impl Shared, id: &[u8], token: u64, clock: Clock) -> Begun {
    if id.is_empty() || id.len() > MAX_ID_BYTES {
        return Begun::NoPlace;
    }
    let begun = change(shared, id, clock, |entries| {
        if let Some(entry) = entries.iter_mut().find(|entry| entry.id == id) {
            entry.state = State::Ambiguous;
            entry.touched_ms = clock.now_ms;
            return (false, true);
        }
        if entries.len() >= ENTRIES {
            entries.remove(0);
        }
        entries.push(Entry {
            id: id.to_vec(),
            token,
            touched_ms: clock.now_ms,
            state: State::Pending,
        });
        (true, true)
    });
    match begun {
        Some(true) => Begun::Place(Ticket {
            id: id.to_vec(),
            token,
        }),
        Some(false) => Begun::Duplicate,
        None => Begun::NoPlace,
    }
}

/// Keeps what its prefill leg was answered. False where its place is gone or another request uses the id.
pub fn put(shared: &impl Shared, ticket: &Ticket, kept: &Kept, clock: Clock) -> bool {
    let put = change(shared, &ticket.id, clock, |entries| {
        let Some(entry) = entries.iter_mut().find(|entry| entry.id == ticket.id) else {
            return (false, false);
        };
        let is_ours = matches!(entry.state, State::Pending) && entry.token == ticket.token;
        entry.touched_ms = clock.now_ms;
        entry.state = if is_ours {
            State::Ready(kept.clone())
        } else {
            State::Ambiguous
        };
        (is_ours, true)
    });
    put == Some(true)
}

/// The prefill leg ended with nothing to keep: its place is free, and the id may be used again.
pub fn withdraw(shared: &impl Shared, ticket: &Ticket, clock: Clock) {
    let _ = change(shared, &ticket.id, clock, |entries| {
        let before = entries.len();
        let is_ours = |entry: &Entry| entry.id == ticket.id && entry.token == ticket.token;
        entries.retain(|entry| !(is_ours(entry) && matches!(entry.state, State::Pending)));
        ((), entries.len() < before)
    });
}

/// The decode request with this id has come; what is kept for it is given once.
pub fn take(shared: &impl Shared, id: &[u8], clock: Clock) -> Taken {
    if id.is_empty() || id.len() > MAX_ID_BYTES {
        return Taken::Missing;
    }
    let taken = change(shared, id, clock, |entries| {
        let Some(index) = entries.iter().position(|entry| entry.id == id) else {
            return (Taken::Missing, false);
        };
        let Some(entry) = entries.get_mut(index) else {
            return (Taken::Missing, false);
        };
        match std::mem::replace(&mut entry.state, State::Ambiguous) {
            State::Ready(kept) => {
                entries.remove(index);
                (Taken::Kept(kept), true)
            }
            State::Ambiguous => (Taken::Duplicate, false),
            // An answer that its coordinator has not seen cannot have led to this request.
            State::Pending => (Taken::Duplicate, true),
        }
    });
    taken.unwrap_or(Taken::Missing)
}

/// Changes the entries that share a key with `id`, those that are too old left out; `act` says whether there is anything
/// to write. `None` if other threads were always faster.
fn change<T>(
    shared: &impl Shared,
    id: &[u8],
    clock: Clock,
    mut act: impl FnMut(&mut Vec<Entry>) -> (T, bool),
) -> Option<T> {
    let key = format!("eldr.ring.{}", fnv1a(id) % KEYS);
    for _ in 0..MAX_ATTEMPTS {
        let (value, version) = shared.get(&key);
        let Some(version) = version else {
            shared.create(&key);
            continue;
        };
        let mut entries = entry::read(&value.unwrap_or_default());
        entries.retain(|entry| clock.now_ms.abs_diff(entry.touched_ms) <= clock.ttl_ms);
        let (result, changed) = act(&mut entries);
        if !changed || shared.set(&key, &entry::write(&entries), Some(version)) {
            return Some(result);
        }
    }
    None
}

/// FNV-1a. Whoever makes ids collide loses signatures, no more.
pub(crate) fn fnv1a(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, &byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

#[cfg(test)]
mod tests;
