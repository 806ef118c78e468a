//! The `x-eldr-signature` header: how many prompt tokens went to each (layer, expert).
//!
//! On the wire it is an RFC 9651 (Structured Fields) Item, a Byte Sequence with parameters:
//!
//! ```text
//! x-eldr-signature: :AAABAAMA…=:;l=48;e=128;n=512
//! ```
//!
//! | parameter | meaning |
//! |---|---|
//! | `l` | MoE layers of the model |
//! | `e` | experts per layer |
//! | `enc` | `u16` (default): little-endian `u16`, row-major `[layer][expert]`; `varint`: LEB128, same order |
//! | `n` | prompt tokens |
//! | `layers` | the payload has only these rows, e.g. `"0-3,7"`; `l` stays the model's count |
//!
//! Unknown parameters are ignored, a repeated one counts with its last value (RFC 9651 §3.1.2).
//! Counts saturate at 65,535.
//!
//! [`Encoded`] is the hot path: it reads the parameters and decodes only the rows that a caller asks for.
//! [`Signature`] is the owned form, for everything that is not in a hurry.

mod eldr_sig;
mod layers;
mod payload;
mod scan;
mod varint;

use std::fmt::Write as _;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;

pub use eldr_sig::header_from_eldr_sig;
pub use payload::{Encoded, Scratch};

/// Longest header value that is looked at, bytes.
pub const MAX_HEADER_BYTES: usize = 1 << 20;
/// Most counts (layers × experts) that a signature may have. Kimi-K2, the largest public model, has 23,040.
pub const MAX_COUNTS: usize = 65_536;

/// Shape of a model's routing: `layers` MoE layers with `experts` experts each.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Geometry {
    /// MoE layers, dense layers not counted.
    pub layers: usize,
    /// Routed experts per layer, shared experts not counted.
    pub experts: usize,
}

impl Geometry {
    /// A geometry within the limits: both at least 1, the product at most [`MAX_COUNTS`].
    ///
    /// # Errors
    /// [`SignatureError::Geometry`] names both numbers.
    pub fn new(layers: usize, experts: usize) -> Result<Self, SignatureError> {
        match layers.checked_mul(experts) {
            Some(1..=MAX_COUNTS) => Ok(Self { layers, experts }),
            _ => Err(SignatureError::Geometry { layers, experts }),
        }
    }

    /// Layers × experts.
    pub fn counts(self) -> usize {
        self.layers * self.experts
    }
}

impl std::fmt::Display for Geometry {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} layers × {} experts", self.layers, self.experts)
    }
}

/// How the counts are packed into the byte sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Encoding {
    /// Two bytes per count, little-endian.
    #[default]
    U16,
    /// LEB128: one byte for counts below 128, two below 16,384, three above.
    Varint,
}

/// Why a header value is not a signature.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SignatureError {
    /// The value is longer than [`MAX_HEADER_BYTES`].
    #[error("signature header has {bytes} bytes, at most {MAX_HEADER_BYTES} are allowed")]
    TooLong {
        /// Length of the value.
        bytes: usize,
    },
    /// Not a Structured Field Item with a Byte Sequence.
    #[error("signature header, byte {at}: expected {expected} (RFC 9651)")]
    Syntax {
        /// Offset into the value.
        at: usize,
        /// What the grammar wants there.
        expected: &'static str,
    },
    /// `l` or `e` is missing.
    #[error("signature header lacks parameter `{name}`")]
    Missing {
        /// The parameter.
        name: &'static str,
    },
    /// A parameter has a value of the wrong kind or out of range.
    #[error("signature parameter `{name}` must be {allowed}")]
    Parameter {
        /// The parameter.
        name: &'static str,
        /// What is allowed.
        allowed: &'static str,
    },
    /// Zero or too many counts.
    #[error(
        "a signature of {layers} layers × {experts} experts is out of range: 1 to {MAX_COUNTS} counts are allowed"
    )]
    Geometry {
        /// Layers asked for.
        layers: usize,
        /// Experts asked for.
        experts: usize,
    },
    /// The base64 text is broken.
    #[error("signature payload is not base64 near character {at}")]
    Base64 {
        /// Offset into the base64 text, to the next group of four.
        at: usize,
    },
    /// The payload has another length than its parameters say.
    #[error("signature payload has {found} {unit}, its parameters say {expected}")]
    Length {
        /// What the payload has.
        found: usize,
        /// What `l`, `e` and `layers` ask for.
        expected: usize,
        /// Bytes or counts.
        unit: &'static str,
    },
    /// A LEB128 number does not fit 16 bits.
    #[error("signature payload, byte {at}: a LEB128 count above 65535")]
    Varint {
        /// Offset into the decoded payload.
        at: usize,
    },
    /// A count of the official artifact's `eldr_sig` is below zero.
    #[error("signature count {index} is negative")]
    Negative {
        /// Index into the counts.
        index: usize,
    },
    /// A row that the caller needs is not in the payload.
    #[error("signature has no row for layer {layer}")]
    NoRow {
        /// The layer.
        layer: u16,
    },
}

/// An expert signature: counts for the rows that are present.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Signature {
    geometry: Geometry,
    layers: Vec<u16>,
    counts: Vec<u16>,
    prompt_tokens: Option<u64>,
}

impl Signature {
    /// A signature with a row for every layer; `counts` is row-major `[layer][expert]`.
    ///
    /// # Errors
    /// The geometry is out of range or `counts` has another length.
    pub fn dense(
        geometry: Geometry,
        counts: Vec<u16>,
        prompt_tokens: Option<u64>,
    ) -> Result<Self, SignatureError> {
        let layers = (0..geometry.layers.min(MAX_COUNTS))
            .map(|layer| layer as u16)
            .collect();
        Self::sparse(geometry, layers, counts, prompt_tokens)
    }

    /// A signature with rows for `layers` only, ascending; `counts` is row-major `[row][expert]`.
    ///
    /// # Errors
    /// The geometry is out of range, the layers are not ascending or not the model's, or `counts` has another length.
    pub fn sparse(
        geometry: Geometry,
        layers: Vec<u16>,
        counts: Vec<u16>,
        prompt_tokens: Option<u64>,
    ) -> Result<Self, SignatureError> {
        let geometry = Geometry::new(geometry.layers, geometry.experts)?;
        layers::check(&layers, geometry)?;
        let expected = layers.len() * geometry.experts;
        if counts.len() != expected {
            return Err(SignatureError::Length {
                found: counts.len(),
                expected,
                unit: "counts",
            });
        }
        if prompt_tokens.is_some_and(|n| n > scan::MAX_INTEGER) {
            return Err(SignatureError::Parameter {
                name: "n",
                allowed: payload::ALLOWED_N,
            });
        }
        Ok(Self {
            geometry,
            layers,
            counts,
            prompt_tokens,
        })
    }

    /// Reads a header value, every row of it.
    ///
    /// # Errors
    /// See [`SignatureError`].
    pub fn decode(header: &[u8]) -> Result<Self, SignatureError> {
        let encoded = Encoded::parse(header)?;
        let layers = encoded.layers();
        let mut counts = Vec::new();
        encoded.rows(&layers, &mut Scratch::default(), &mut counts)?;
        let (geometry, prompt_tokens) = (encoded.geometry(), encoded.prompt_tokens());
        Ok(Self {
            geometry,
            layers,
            counts,
            prompt_tokens,
        })
    }

    /// The header value. `decode(encode(x)) == x` for both encodings.
    pub fn encode(&self, encoding: Encoding) -> String {
        let bytes = match encoding {
            Encoding::U16 => self.counts.iter().flat_map(|n| n.to_le_bytes()).collect(),
            Encoding::Varint => varint::pack(&self.counts),
        };
        let mut header = String::with_capacity(bytes.len() / 3 * 4 + 64);
        header.push(':');
        STANDARD.encode_string(&bytes, &mut header);
        let Geometry { layers, experts } = self.geometry;
        // Writing into a String cannot fail.
        let _ = write!(header, ":;l={layers};e={experts}");
        if encoding == Encoding::Varint {
            header.push_str(";enc=varint");
        }
        if let Some(n) = self.prompt_tokens {
            let _ = write!(header, ";n={n}");
        }
        if self.layers.len() != layers {
            let _ = write!(header, ";layers=\"{}\"", layers::format(&self.layers));
        }
        header
    }

    /// The model's geometry.
    pub fn geometry(&self) -> Geometry {
        self.geometry
    }

    /// Layers that have a row, ascending.
    pub fn layers(&self) -> &[u16] {
        &self.layers
    }

    /// Counts, row-major `[row][expert]`, one row per entry of [`layers`](Self::layers).
    pub fn counts(&self) -> &[u16] {
        &self.counts
    }

    /// Prompt tokens, where the sender said so.
    pub fn prompt_tokens(&self) -> Option<u64> {
        self.prompt_tokens
    }
}

#[cfg(test)]
mod tests;
