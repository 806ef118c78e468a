//! A parsed header whose payload is still base64, and the decoding of the rows that a caller asks for.

use std::ops::RangeInclusive;

use base64::Engine as _;
use base64::alphabet;
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};
use base64_simd::AsOut as _;

use super::scan::{Bare, MAX_INTEGER, Scanner};
use super::{Encoding, Geometry, MAX_COUNTS, MAX_HEADER_BYTES, SignatureError, layers, varint};

pub(super) const ALLOWED_N: &str = "a whole number from 0 to 999999999999999";
const ALLOWED_SIZE: &str = "a whole number from 1 to 65536";

/// RFC 9651 §4.2.7 asks parsers to accept missing padding and non-zero pad bits; padding is cut off before.
const LENIENT: GeneralPurpose = GeneralPurpose::new(
    &alphabet::STANDARD,
    GeneralPurposeConfig::new()
        .with_decode_padding_mode(DecodePaddingMode::RequireNone)
        .with_decode_allow_trailing_bits(true),
);

/// Buffers that decoding reuses; keep one per thread.
#[derive(Debug, Default)]
pub struct Scratch {
    bytes: Vec<u8>,
    layers: Vec<u16>,
}

/// A signature header whose parameters are read and whose payload is not yet decoded.
#[derive(Debug, Clone)]
pub struct Encoded<'a> {
    geometry: Geometry,
    encoding: Encoding,
    prompt_tokens: Option<u64>,
    /// Checked list of the payload's rows where they are not all layers.
    list: Option<&'a [u8]>,
    /// Rows in the payload.
    rows: usize,
    /// base64 without padding.
    text: &'a [u8],
}

impl<'a> Encoded<'a> {
    /// Reads the parameters and checks the payload's length against them.
    ///
    /// # Errors
    /// See [`SignatureError`]. Broken base64 is found when its rows are decoded.
    pub fn parse(header: &'a [u8]) -> Result<Self, SignatureError> {
        if header.len() > MAX_HEADER_BYTES {
            return Err(SignatureError::TooLong {
                bytes: header.len(),
            });
        }
        let mut scanner = Scanner::new(header);
        let text = scanner.byte_sequence()?;
        let (mut l, mut e, mut enc, mut n, mut list) = (None, None, None, None, None);
        // Only the last value of a name counts, so none is judged before the end.
        while let Some((key, value)) = scanner.parameter()? {
            match key {
                b"l" => l = Some(value),
                b"e" => e = Some(value),
                b"enc" => enc = Some(value),
                b"n" => n = Some(value),
                b"layers" => list = Some(value),
                _ => {}
            }
        }
        let geometry = Geometry::new(size("l", l)?, size("e", e)?)?;
        let encoding = match enc {
            None | Some(Bare::Token(b"u16")) => Encoding::U16,
            Some(Bare::Token(b"varint")) => Encoding::Varint,
            Some(_) => return Err(invalid("enc", "`u16` or `varint`")),
        };
        let prompt_tokens = n
            .map(|n| whole(&n, 0..=MAX_INTEGER).ok_or(invalid("n", ALLOWED_N)))
            .transpose()?;
        let list = list.map(|list| match list {
            Bare::String(text) => text,
            _ => b"", // refused below, with the message for bad lists
        });
        let rows = match list {
            Some(list) => layers::ranges(list, geometry.layers)
                .try_fold(0, |rows, range| Ok(rows + range?.len()))?,
            None => geometry.layers,
        };
        let encoded = Self {
            geometry,
            encoding,
            prompt_tokens,
            list,
            rows,
            text: without_padding(text)?,
        };
        encoded.check_length()?;
        Ok(encoded)
    }

    /// The model's geometry, whatever rows the payload has.
    pub fn geometry(&self) -> Geometry {
        self.geometry
    }

    /// Prompt tokens, where the sender said so.
    pub fn prompt_tokens(&self) -> Option<u64> {
        self.prompt_tokens
    }

    /// Layers that have a row, ascending.
    pub fn layers(&self) -> Vec<u16> {
        let mut layers = Vec::with_capacity(self.rows);
        self.layers_into(&mut layers);
        layers
    }

    fn layers_into(&self, layers: &mut Vec<u16>) {
        layers.clear();
        match self.list {
            // Checked by `parse`: every range is good.
            Some(list) => {
                layers.extend(
                    layers::ranges(list, self.geometry.layers)
                        .flatten()
                        .flatten(),
                );
            }
            None => layers.extend((0..self.rows).map(|layer| layer as u16)),
        }
    }

    /// Counts of the `wanted` layers (ascending), row-major `[wanted][expert]`, in place of what is in `counts`.
    /// Of a `u16` payload only these rows are decoded; a `varint` payload has to be walked.
    ///
    /// # Errors
    /// A wanted layer has no row, or its text is not what the header promised.
    pub fn rows<T: From<u16>>(
        &self,
        wanted: &[u16],
        scratch: &mut Scratch,
        counts: &mut Vec<T>,
    ) -> Result<(), SignatureError> {
        counts.clear();
        self.layers_into(&mut scratch.layers);
        match self.encoding {
            Encoding::U16 => self.rows_u16(wanted, scratch, counts),
            Encoding::Varint => self.rows_varint(wanted, scratch, counts),
        }
    }

    fn check_length(&self) -> Result<(), SignatureError> {
        let found = decoded_length(self.text.len()).ok_or(SignatureError::Base64 {
            at: self.text.len() / 4 * 4,
        })?;
        let counts = self.rows * self.geometry.experts;
        let fits = match self.encoding {
            Encoding::U16 => found == 2 * counts,
            Encoding::Varint => (counts..=3 * counts).contains(&found),
        };
        let expected = if self.encoding == Encoding::U16 {
            2 * counts
        } else {
            counts
        };
        if fits {
            Ok(())
        } else {
            Err(SignatureError::Length {
                found,
                expected,
                unit: "bytes",
            })
        }
    }

    fn rows_u16<T: From<u16>>(
        &self,
        wanted: &[u16],
        Scratch { bytes, layers }: &mut Scratch,
        counts: &mut Vec<T>,
    ) -> Result<(), SignatureError> {
        let row_bytes = 2 * self.geometry.experts;
        let row_of = |&layer: &u16| {
            let row = layers.binary_search(&layer);
            row.map_err(|_| SignatureError::NoRow { layer })
        };
        for run in wanted.chunk_by(|a, b| u32::from(*a) + 1 == u32::from(*b)) {
            // Layers that follow each other and are all present are rows that follow each other.
            let mut rows = run.iter().map(row_of);
            let first = rows.next().transpose()?.unwrap_or_default();
            rows.try_for_each(|row| row.map(drop))?;
            let (start, length) = (first * row_bytes, run.len() * row_bytes);
            let (pairs, _) = self.bytes(start, length, bytes)?.as_chunks::<2>();
            counts.extend(pairs.iter().map(|&pair| T::from(u16::from_le_bytes(pair))));
        }
        Ok(())
    }

    fn rows_varint<T: From<u16>>(
        &self,
        wanted: &[u16],
        Scratch { bytes, layers }: &mut Scratch,
        counts: &mut Vec<T>,
    ) -> Result<(), SignatureError> {
        let length = decoded_length(self.text.len()).unwrap_or_default();
        let mut reader = varint::Reader::new(self.bytes(0, length, bytes)?);
        let mut wanted = wanted.iter().copied().peekable();
        for &layer in layers.iter() {
            let keep = wanted.next_if_eq(&layer).is_some();
            reader.row(self.geometry.experts, keep.then_some(&mut *counts))?;
        }
        if let Some(layer) = wanted.next() {
            return Err(SignatureError::NoRow { layer });
        }
        reader.end()
    }

    /// Decodes `length` payload bytes from byte `start` on: the groups of four characters that hold them.
    fn bytes<'s>(
        &self,
        start: usize,
        length: usize,
        buffer: &'s mut Vec<u8>,
    ) -> Result<&'s [u8], SignatureError> {
        let from = start / 3 * 4;
        let to = ((start + length).div_ceil(3) * 4).min(self.text.len());
        let text = self.text.get(from..to).unwrap_or_default();
        let broken = SignatureError::Base64 { at: from };
        decode(text, buffer).ok_or_else(|| broken.clone())?;
        let skip = start % 3;
        buffer.get(skip..skip + length).ok_or(broken)
    }
}

/// Decodes base64 without padding, leniently, into `buffer`; `None` where it is broken.
fn decode(text: &[u8], buffer: &mut Vec<u8>) -> Option<()> {
    // The SIMD decoder refuses pad bits that are not zero; only the last group can have pad bits.
    let (whole, rest) = text.split_at(text.len() / 4 * 4);
    buffer.resize(whole.len() / 4 * 3 + 3, 0);
    let (groups, last) = buffer.split_at_mut(whole.len() / 4 * 3);
    base64_simd::STANDARD_NO_PAD
        .decode(whole, groups.as_out())
        .ok()?;
    let length = LENIENT.decode_slice(rest, last).ok()?;
    buffer.truncate(whole.len() / 4 * 3 + length);
    Some(())
}

/// A byte sequence that no parameter of ours is: checked, not used.
pub(super) fn check_base64(text: &[u8]) -> Result<(), SignatureError> {
    match decode(without_padding(text)?, &mut Vec::new()) {
        Some(()) => Ok(()),
        None => Err(SignatureError::Base64 { at: 0 }),
    }
}

/// Padding may be absent or short, but it never goes beyond the last group of four.
fn without_padding(text: &[u8]) -> Result<&[u8], SignatureError> {
    let shorter = text.strip_suffix(b"=").unwrap_or(text);
    let unpadded = shorter.strip_suffix(b"=").unwrap_or(shorter);
    if text.len().div_ceil(4) == unpadded.len().div_ceil(4) {
        Ok(unpadded)
    } else {
        Err(SignatureError::Base64 { at: unpadded.len() })
    }
}

/// Bytes that unpadded base64 of this length holds; one character alone in its group holds none.
fn decoded_length(characters: usize) -> Option<usize> {
    match characters % 4 {
        1 => None,
        rest => Some(characters / 4 * 3 + rest * 3 / 4),
    }
}

fn size(name: &'static str, value: Option<Bare<'_>>) -> Result<usize, SignatureError> {
    let value = value.ok_or(SignatureError::Missing { name })?;
    let size = whole(&value, 1..=MAX_COUNTS as u64);
    size.map(|size| size as usize)
        .ok_or(invalid(name, ALLOWED_SIZE))
}

fn whole(value: &Bare<'_>, range: RangeInclusive<u64>) -> Option<u64> {
    match value {
        Bare::Integer(value) => u64::try_from(*value).ok(),
        _ => None,
    }
    .filter(|number| range.contains(number))
}

fn invalid(name: &'static str, allowed: &'static str) -> SignatureError {
    SignatureError::Parameter { name, allowed }
}
