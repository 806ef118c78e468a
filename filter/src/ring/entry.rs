//! Entries of one key of the ring, as bytes: little-endian, one after the other.
//!
//! ```text
//! u64 token, u64 touched_ms, u8 tag, u8 id length - 1, id
//!     tag 0 pending, 1 ambiguous
//!     tag 2 similarities, 3 malformed signature, 4 geometry mismatch, 5 no blob, 6 no signature:
//!         u64 prompt tokens (0: not known), u64 revision, u64 fingerprint, u32 count, f32 × count (0 but for tag 2)
//!     tag 7 signature: the same, with u8 × count
//! ```

use eldr_core::decide::Reason;

use super::{Found, Kept};

/// A request between its two legs.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Entry {
    /// The whole request id; 1 to 256 bytes.
    pub(super) id: Vec<u8>,
    /// Tells the prefill leg that began it from others with the same id.
    pub(super) token: u64,
    /// Wall clock, milliseconds.
    pub(super) touched_ms: u64,
    pub(super) state: State,
}

#[derive(Debug, Clone, PartialEq)]
pub(super) enum State {
    /// The prefill leg is under way.
    Pending,
    /// Several requests use the id.
    Ambiguous,
    /// The prefill leg was answered.
    Ready(Kept),
}

/// All entries; what is no entry ends the list.
pub(super) fn read(bytes: &[u8]) -> Vec<Entry> {
    let mut rest = Reader(bytes);
    let mut entries = Vec::new();
    while let Some(entry) = rest.entry() {
        entries.push(entry);
    }
    entries
}

pub(super) fn write(entries: &[Entry]) -> Vec<u8> {
    let mut out = Vec::new();
    for entry in entries {
        out.extend(entry.token.to_le_bytes());
        out.extend(entry.touched_ms.to_le_bytes());
        out.push(match &entry.state {
            State::Pending => 0,
            State::Ambiguous => 1,
            State::Ready(kept) => match kept.found {
                Ok(Found::Similarities(_)) => 2,
                Ok(Found::Signature(_)) => 7,
                Err(Reason::GeometryMismatch) => 4,
                Err(Reason::NoBlob) => 5,
                Err(Reason::NoSignature) => 6,
                Err(_) => 3,
            },
        });
        out.push(entry.id.len().saturating_sub(1) as u8);
        out.extend(&entry.id);
        if let State::Ready(kept) = &entry.state {
            out.extend(kept.prompt_tokens.unwrap_or(0).to_le_bytes());
            out.extend(kept.revision.to_le_bytes());
            out.extend(kept.fingerprint.to_le_bytes());
            match &kept.found {
                Ok(Found::Similarities(all)) => {
                    out.extend((all.len() as u32).to_le_bytes());
                    out.extend(all.iter().flat_map(|one| one.to_le_bytes()));
                }
                Ok(Found::Signature(header)) => {
                    out.extend((header.len() as u32).to_le_bytes());
                    out.extend(header);
                }
                Err(_) => out.extend(0u32.to_le_bytes()),
            }
        }
    }
    out
}

fn similarities(bytes: &[u8]) -> Result<Found, Reason> {
    let (quads, _) = bytes.as_chunks();
    let all = quads.iter().copied().map(f32::from_le_bytes);
    Ok(Found::Similarities(all.collect()))
}

struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn entry(&mut self) -> Option<Entry> {
        let (token, touched_ms) = (self.u64()?, self.u64()?);
        let [tag, id_length] = self.array()?;
        let id = self.bytes(usize::from(id_length) + 1)?.to_vec();
        let state = match tag {
            0 => State::Pending,
            1 => State::Ambiguous,
            2 => State::Ready(self.kept(4, similarities)?),
            3 => State::Ready(self.kept(4, |_| Err(Reason::MalformedSignature))?),
            4 => State::Ready(self.kept(4, |_| Err(Reason::GeometryMismatch))?),
            5 => State::Ready(self.kept(4, |_| Err(Reason::NoBlob))?),
            6 => State::Ready(self.kept(4, |_| Err(Reason::NoSignature))?),
            7 => State::Ready(self.kept(1, |bytes| Ok(Found::Signature(bytes.to_vec())))?),
            _ => return None,
        };
        Some(Entry {
            id,
            token,
            touched_ms,
            state,
        })
    }

    fn kept(
        &mut self,
        size: usize,
        found: impl Fn(&[u8]) -> Result<Found, Reason>,
    ) -> Option<Kept> {
        let prompt_tokens = self.u64()?;
        let (revision, fingerprint) = (self.u64()?, self.u64()?);
        let count = usize::try_from(u32::from_le_bytes(self.array()?)).ok()?;
        Some(Kept {
            revision,
            fingerprint,
            found: found(self.bytes(count.checked_mul(size)?)?),
            prompt_tokens: (prompt_tokens > 0).then_some(prompt_tokens),
        })
    }

    fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_le_bytes)
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (head, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(*head)
    }

    fn bytes(&mut self, length: usize) -> Option<&'a [u8]> {
        let (head, rest) = self.0.split_at_checked(length)?;
        self.0 = rest;
        Some(head)
    }
}
