//! Counts as LEB128: one byte below 128, two below 16,384, three above.

use super::SignatureError;

/// Bytes that are looked at together.
const BLOCK: usize = 16;

/// Counts in wire form.
pub(super) fn pack(counts: &[u16]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(counts.len());
    for &count in counts {
        let mut rest = count;
        while rest > 0x7f {
            bytes.push(rest as u8 | 0x80);
            rest >>= 7;
        }
        bytes.push(rest as u8);
    }
    bytes
}

/// Reads counts one row after the other.
pub(super) struct Reader<'a> {
    rest: &'a [u8],
    length: usize,
}

impl<'a> Reader<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Self {
            rest: bytes,
            length: bytes.len(),
        }
    }

    /// Reads a row of `experts` counts, into `counts` if they are wanted.
    pub(super) fn row<T: From<u16>>(
        &mut self,
        experts: usize,
        mut counts: Option<&mut Vec<T>>,
    ) -> Result<(), SignatureError> {
        let mut left = experts;
        while left > 0 {
            // Most counts are small: blocks of single bytes need no look at each of them.
            if let Some((block, rest)) = self.rest.split_first_chunk::<BLOCK>()
                && left >= BLOCK
                && block.iter().fold(0, |all, byte| all | byte) < 0x80
            {
                if let Some(counts) = &mut counts {
                    counts.extend(block.iter().map(|&byte| T::from(u16::from(byte))));
                }
                self.rest = rest;
                left -= BLOCK;
                continue;
            }
            let count = self.count()?;
            if let Some(counts) = &mut counts {
                counts.push(T::from(count));
            }
            left -= 1;
        }
        Ok(())
    }

    /// Nothing may be left over.
    pub(super) fn end(&self) -> Result<(), SignatureError> {
        match self.rest.len() {
            0 => Ok(()),
            rest => Err(SignatureError::Length {
                found: self.length,
                expected: self.length - rest,
                unit: "bytes",
            }),
        }
    }

    /// One number of at most three bytes.
    fn count(&mut self) -> Result<u16, SignatureError> {
        let at = self.length - self.rest.len();
        let (value, size) = match *self.rest {
            [a, ..] if a < 0x80 => (u32::from(a), 1),
            [a, b, ..] if b < 0x80 => (u32::from(a & 0x7f) | u32::from(b) << 7, 2),
            [a, b, c, ..] => {
                let low = u32::from(a & 0x7f) | u32::from(b & 0x7f) << 7;
                // A fourth byte would follow where the third says so: above any count.
                (low | u32::from(c) << 14, 3)
            }
            _ => {
                return Err(SignatureError::Length {
                    found: self.length,
                    expected: self.length + 1,
                    unit: "bytes",
                });
            }
        };
        self.rest = self.rest.get(size..).unwrap_or_default();
        u16::try_from(value).map_err(|_| SignatureError::Varint { at: at + size - 1 })
    }
}
