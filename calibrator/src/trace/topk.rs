//! Expert ids of every decode step, for exact replay.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use eldr_core::signature::{Geometry, Signature};

/// Which experts every decode step of one request activates: row-major `[tokens][layers][k]` ids.
///
/// On the wire it is base64 of that array, one byte per id in a model of up to 256 experts per
/// layer, else little-endian u16. The text carries no shape: layers and experts are those of the
/// record's signatures, tokens is the record's `decode_tokens`, and `k` is what then remains of the
/// length. All of the model's layers are there, even if a signature has only some of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TopK {
    geometry: Geometry,
    k: usize,
    ids: Vec<u16>,
}

impl TopK {
    /// Takes `ids`, `[tokens][layers][k]`; the error says what does not fit.
    pub fn new(geometry: Geometry, k: usize, ids: Vec<u16>) -> Result<Self, String> {
        if k == 0 || k > geometry.experts {
            return Err(format!(
                "k is {k} where 1 to {} experts can be chosen",
                geometry.experts
            ));
        }
        let row = geometry.layers * k;
        if row == 0 || !ids.len().is_multiple_of(row) {
            let layers = geometry.layers;
            return Err(format!(
                "{} ids are no multiple of {layers} layers × {k}",
                ids.len()
            ));
        }
        match ids.iter().find(|&&id| usize::from(id) >= geometry.experts) {
            Some(id) => Err(format!(
                "expert {id} where 0 to {} exist",
                geometry.experts - 1
            )),
            None => Ok(TopK { geometry, k, ids }),
        }
    }

    /// Reads the base64 of `tokens` decode steps; the error says what does not fit.
    pub fn decode(text: &str, geometry: Geometry, tokens: u64) -> Result<Self, String> {
        let bytes = STANDARD
            .decode(text)
            .map_err(|error| format!("it is not base64: {error}"))?;
        let width = width(geometry);
        let steps = usize::try_from(tokens).ok().and_then(|tokens| {
            tokens
                .checked_mul(geometry.layers)
                .and_then(|steps| steps.checked_mul(width))
        });
        let k = match steps {
            Some(steps) if steps > 0 && bytes.len().is_multiple_of(steps) => bytes.len() / steps,
            _ => {
                return Err(format!(
                    "{} bytes are no multiple of {tokens} tokens × {} layers × {width} bytes per id",
                    bytes.len(),
                    geometry.layers,
                ));
            }
        };
        let ids = match width {
            1 => bytes.into_iter().map(u16::from).collect(),
            _ => bytes
                .chunks_exact(2)
                .map(|id| u16::from_le_bytes([id[0], id[1]]))
                .collect(),
        };
        TopK::new(geometry, k, ids)
    }

    /// The base64 that [`TopK::decode`] reads.
    pub fn encode(&self) -> String {
        let bytes: Vec<u8> = match width(self.geometry) {
            1 => self.ids.iter().map(|&id| id.to_le_bytes()[0]).collect(),
            _ => self.ids.iter().flat_map(|id| id.to_le_bytes()).collect(),
        };
        STANDARD.encode(bytes)
    }

    /// Layers and experts of the model.
    pub fn geometry(&self) -> Geometry {
        self.geometry
    }

    /// Experts per token and layer.
    pub fn k(&self) -> usize {
        self.k
    }

    /// Decode steps.
    pub fn tokens(&self) -> usize {
        self.ids.len() / (self.geometry.layers * self.k)
    }

    /// The ids of decode step `token`, `[layers][k]`.
    ///
    /// # Panics
    /// If `token` is not below [`TopK::tokens`].
    pub fn step(&self, token: usize) -> &[u16] {
        let row = self.geometry.layers * self.k;
        &self.ids[token * row..][..row]
    }

    /// How often each expert occurs, `[layers][experts]`: the decode signature, not saturated.
    pub fn counts(&self) -> Vec<u32> {
        let mut counts = vec![0; self.geometry.layers * self.geometry.experts];
        for (row, ids) in self.ids.chunks_exact(self.k).enumerate() {
            let layer = row % self.geometry.layers;
            for &id in ids {
                counts[layer * self.geometry.experts + usize::from(id)] += 1;
            }
        }
        counts
    }

    /// Whether the counts of `decode` are those of these ids; the error says where they differ.
    pub(super) fn agrees_with(&self, decode: Option<&Signature>) -> Result<(), String> {
        let Some(decode) = decode else { return Ok(()) };
        let experts = self.geometry.experts;
        let counts = self.counts();
        for (&layer, row) in decode
            .layers()
            .iter()
            .zip(decode.counts().chunks_exact(experts))
        {
            let mine = &counts[usize::from(layer) * experts..][..experts];
            for (expert, (&count, &mine)) in row.iter().zip(mine).enumerate() {
                if u32::from(count) != mine.min(u32::from(u16::MAX)) {
                    return Err(format!(
                        "expert {expert} of layer {layer} occurs {mine} times, `decode` counts {count}"
                    ));
                }
            }
        }
        Ok(())
    }
}

/// Bytes per id.
fn width(geometry: Geometry) -> usize {
    if geometry.experts <= 256 { 1 } else { 2 }
}
