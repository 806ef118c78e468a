//! Which experts every token of a request activates.

use super::union::words;
use crate::signature::Geometry;

/// Recorded experts of one request's decode steps. Kept as bitsets, `[tokens][layers][words]`: what a step needs of them is
/// their union with others, a word at a time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExpertIds {
    geometry: Geometry,
    masks: Vec<u64>,
}

/// Ids that do not have the shape that was announced.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ExpertIdsError {
    /// The geometry is empty, or k is not from 1 to the number of experts.
    #[error("k is {k} where a token chooses 1 to {} experts in each of {} layers", geometry.experts, geometry.layers)]
    Shape {
        /// Layers and experts of the model.
        geometry: Geometry,
        /// Experts per token and layer.
        k: usize,
    },
    /// The ids are not whole tokens.
    #[error("{ids} ids are no multiple of {layers} layers × {k} experts per token")]
    Length {
        /// How many ids were given.
        ids: usize,
        /// Layers of the model.
        layers: usize,
        /// Experts per token and layer.
        k: usize,
    },
    /// An id names an expert that the model lacks.
    #[error("expert {expert} where 0 to {} exist", experts.saturating_sub(1))]
    Expert {
        /// The id.
        expert: u16,
        /// Experts per layer of the model.
        experts: usize,
    },
}

impl ExpertIds {
    /// Takes `ids`, row-major `[tokens][layers][k]`, of a model of `geometry`.
    pub fn new(geometry: Geometry, k: usize, ids: Vec<u16>) -> Result<Self, ExpertIdsError> {
        let layers = geometry.layers;
        if layers == 0 || k == 0 || k > geometry.experts {
            return Err(ExpertIdsError::Shape { geometry, k });
        }
        if !ids.len().is_multiple_of(layers.saturating_mul(k)) {
            return Err(ExpertIdsError::Length {
                ids: ids.len(),
                layers,
                k,
            });
        }
        if let Some(&expert) = ids.iter().find(|&&id| usize::from(id) >= geometry.experts) {
            return Err(ExpertIdsError::Expert {
                expert,
                experts: geometry.experts,
            });
        }
        let words = words(geometry);
        let mut masks = vec![0u64; (ids.len() / k).saturating_mul(words)];
        for (mask, ids) in masks.chunks_exact_mut(words).zip(ids.chunks_exact(k)) {
            for &id in ids {
                if let Some(word) = mask.get_mut(usize::from(id) / 64) {
                    *word |= 1 << (id % 64);
                }
            }
        }
        Ok(ExpertIds { geometry, masks })
    }

    /// Layers and experts of the model.
    pub fn geometry(&self) -> Geometry {
        self.geometry
    }

    /// How many tokens are recorded.
    pub fn tokens(&self) -> usize {
        self.masks.len().checked_div(self.row()).unwrap_or(0)
    }

    /// Share of the tokens that activate each expert, `[layers][experts]`; without tokens all 0.
    pub(super) fn usage(&self) -> Vec<f32> {
        let experts = self.geometry.experts;
        let mut usage = vec![0.0; self.geometry.layers.saturating_mul(experts)];
        let share = 1.0 / self.tokens().max(1) as f64;
        let mut counts = vec![0u32; usage.len()];
        for token in self.masks.chunks_exact(self.row().max(1)) {
            let layers = token.chunks_exact(self.words());
            for (counts, layer) in counts.chunks_exact_mut(experts.max(1)).zip(layers) {
                for (counts, &word) in counts.chunks_mut(64).zip(layer) {
                    for (bit, count) in counts.iter_mut().enumerate() {
                        *count += ((word >> bit) & 1) as u32;
                    }
                }
            }
        }
        for (usage, count) in usage.iter_mut().zip(counts) {
            *usage = (f64::from(count) * share) as f32;
        }
        usage
    }

    /// The experts of token `token`, one bit each, [`words`](Self::words) words per layer.
    ///
    /// Past the last token the record starts over; without any there are no words.
    pub(super) fn token(&self, token: u32) -> &[u64] {
        let token = (token as usize).checked_rem(self.tokens()).unwrap_or(0);
        let start = token.saturating_mul(self.row());
        let end = start.saturating_add(self.row());
        self.masks.get(start..end).unwrap_or_default()
    }

    /// Words per layer.
    pub(super) fn words(&self) -> usize {
        words(self.geometry)
    }

    fn row(&self) -> usize {
        self.geometry.layers.saturating_mul(self.words())
    }
}
