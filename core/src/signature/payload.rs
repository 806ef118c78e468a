//! A parsed header whose payload is still base64, and the decoding of the rows that a caller asks for.

use base64::Engine as _;
use base64::alphabet;
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};

use super::scan::{Bare, MAX_INTEGER, Scanner};
use super::{Encoding, Geometry, MAX_COUNTS, MAX_HEADER_BYTES, SignatureError, layers};

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
    counts: Vec<u16>,
}

/// A signature header whose parameters are read and whose payload is not yet decoded.
#[derive(Debug, Clone)]
pub struct Encoded<'a> {
    geometry: Geometry,
    encoding: Encoding,
    prompt_tokens: Option<u64>,
    /// Rows in the payload where they are not all layers.
    layers: Option<Vec<u16>>,
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
        let (mut l, mut e, mut rows) = (None, None, None);
        let (mut encoding, mut prompt_tokens) = (Encoding::U16, None);
        while let Some((key, value)) = scanner.parameter()? {
            match key {
                b"l" => l = Some(size("l", &value)?),
                b"e" => e = Some(size("e", &value)?),
                b"n" => prompt_tokens = Some(tokens(&value)?),
                b"enc" => encoding = encoding_of(&value)?,
                b"layers" => match value {
                    Bare::String(list) => rows = Some(list),
                    _ => rows = Some(b"".as_slice()), // refused below, with the message for bad lists
                },
                _ => {}
            }
        }
        let geometry = Geometry::new(
            l.ok_or(SignatureError::Missing { name: "l" })?,
            e.ok_or(SignatureError::Missing { name: "e" })?,
        )?;
        let layers = rows
            .map(|list| layers::parse(list, geometry.layers))
            .transpose()?;
        let encoded = Self {
            geometry,
            encoding,
            prompt_tokens,
            layers,
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
        match &self.layers {
            Some(layers) => layers.clone(),
            None => (0..self.geometry.layers)
                .map(|layer| layer as u16)
                .collect(),
        }
    }

    /// Counts of the `wanted` layers (ascending), row-major `[wanted][expert]`.
    /// Of a `u16` payload only these rows are decoded; a `varint` payload has to be walked.
    ///
    /// # Errors
    /// A wanted layer has no row, or its text is not what the header promised.
    pub fn rows<'s>(
        &self,
        wanted: &[u16],
        scratch: &'s mut Scratch,
    ) -> Result<&'s [u16], SignatureError> {
        scratch.counts.clear();
        match self.encoding {
            Encoding::U16 => self.rows_u16(wanted, scratch)?,
            Encoding::Varint => self.rows_varint(wanted, scratch)?,
        }
        Ok(&scratch.counts)
    }

    fn row_count(&self) -> usize {
        self.layers.as_ref().map_or(self.geometry.layers, Vec::len)
    }

    /// Index of a layer's row in the payload.
    fn row_of(&self, layer: u16) -> Result<usize, SignatureError> {
        let missing = SignatureError::NoRow { layer };
        match &self.layers {
            Some(layers) => layers.binary_search(&layer).map_err(|_| missing),
            None if usize::from(layer) < self.geometry.layers => Ok(usize::from(layer)),
            None => Err(missing),
        }
    }

    fn check_length(&self) -> Result<(), SignatureError> {
        let found = decoded_length(self.text.len()).ok_or(SignatureError::Base64 {
            at: self.text.len() / 4 * 4,
        })?;
        let counts = self.row_count() * self.geometry.experts;
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

    fn rows_u16(&self, wanted: &[u16], scratch: &mut Scratch) -> Result<(), SignatureError> {
        let row_bytes = 2 * self.geometry.experts;
        scratch.counts.reserve(wanted.len() * self.geometry.experts);
        for run in wanted.chunk_by(|a, b| u32::from(*a) + 1 == u32::from(*b)) {
            // Layers that follow each other and are all present are rows that follow each other.
            let mut rows = run.iter().map(|&layer| self.row_of(layer));
            let first = rows.clone().next().transpose()?.unwrap_or_default();
            rows.try_for_each(|row| row.map(drop))?;
            let (start, length) = (first * row_bytes, run.len() * row_bytes);
            let bytes = self.bytes(start, length, &mut scratch.bytes)?;
            let (pairs, _) = bytes.as_chunks::<2>();
            scratch
                .counts
                .extend(pairs.iter().map(|pair| u16::from_le_bytes(*pair)));
        }
        Ok(())
    }

    fn rows_varint(&self, wanted: &[u16], scratch: &mut Scratch) -> Result<(), SignatureError> {
        let length = decoded_length(self.text.len()).unwrap_or_default();
        let mut bytes = self
            .bytes(0, length, &mut scratch.bytes)?
            .iter()
            .copied()
            .enumerate();
        let mut wanted = wanted.iter().copied().peekable();
        for row in 0..self.row_count() {
            let layer = match &self.layers {
                Some(layers) => layers.get(row).copied(),
                None => u16::try_from(row).ok(),
            };
            let keep = layer.is_some() && wanted.next_if(|next| Some(*next) == layer).is_some();
            for _ in 0..self.geometry.experts {
                let count = varint(&mut bytes)?;
                if keep {
                    scratch.counts.push(count);
                }
            }
        }
        if let Some(layer) = wanted.next() {
            return Err(SignatureError::NoRow { layer });
        }
        match bytes.count() {
            0 => Ok(()),
            rest => {
                let expected = length - rest;
                Err(SignatureError::Length {
                    found: length,
                    expected,
                    unit: "bytes",
                })
            }
        }
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
        // The decoder wants room for whole groups.
        buffer.resize(text.len().div_ceil(4) * 3, 0);
        let broken = SignatureError::Base64 { at: from };
        LENIENT
            .decode_slice(text, buffer)
            .map_err(|_| broken.clone())?;
        let skip = start % 3;
        buffer.get(skip..skip + length).ok_or(broken)
    }
}

/// Counts in wire form.
pub(super) fn pack(counts: &[u16], encoding: Encoding) -> Vec<u8> {
    match encoding {
        Encoding::U16 => counts
            .iter()
            .flat_map(|count| count.to_le_bytes())
            .collect(),
        Encoding::Varint => {
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
    }
}

/// One LEB128 number of at most three bytes.
fn varint(bytes: &mut impl Iterator<Item = (usize, u8)>) -> Result<u16, SignatureError> {
    let mut value = 0u32;
    let mut at = 0;
    for shift in [0, 7, 14] {
        let Some((index, byte)) = bytes.next() else {
            return Err(SignatureError::Length {
                found: at,
                expected: at + 1,
                unit: "bytes",
            });
        };
        at = index + 1;
        value |= u32::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            return u16::try_from(value).map_err(|_| SignatureError::Varint { at: index });
        }
    }
    Err(SignatureError::Varint {
        at: at.saturating_sub(1),
    })
}

/// A byte sequence that no parameter of ours is: checked, not used.
pub(super) fn check_base64(text: &[u8]) -> Result<(), SignatureError> {
    let mut buffer = vec![0; text.len().div_ceil(4) * 3];
    match LENIENT.decode_slice(without_padding(text)?, &mut buffer) {
        Ok(_) => Ok(()),
        Err(_) => Err(SignatureError::Base64 { at: 0 }),
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

fn size(name: &'static str, value: &Bare<'_>) -> Result<usize, SignatureError> {
    match value {
        Bare::Integer(value) => usize::try_from(*value)
            .ok()
            .filter(|size| (1..=MAX_COUNTS).contains(size))
            .ok_or(SignatureError::Parameter {
                name,
                allowed: ALLOWED_SIZE,
            }),
        _ => Err(SignatureError::Parameter {
            name,
            allowed: ALLOWED_SIZE,
        }),
    }
}

fn tokens(value: &Bare<'_>) -> Result<u64, SignatureError> {
    match value {
        Bare::Integer(value) => u64::try_from(*value)
            .ok()
            .filter(|tokens| *tokens <= MAX_INTEGER)
            .ok_or(SignatureError::Parameter {
                name: "n",
                allowed: ALLOWED_N,
            }),
        _ => Err(SignatureError::Parameter {
            name: "n",
            allowed: ALLOWED_N,
        }),
    }
}

fn encoding_of(value: &Bare<'_>) -> Result<Encoding, SignatureError> {
    match value {
        Bare::Token(b"u16") => Ok(Encoding::U16),
        Bare::Token(b"varint") => Ok(Encoding::Varint),
        _ => Err(SignatureError::Parameter {
            name: "enc",
            allowed: "`u16` or `varint`",
        }),
    }
}
