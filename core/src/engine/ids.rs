//! Which experts every token of a request activates.

use crate::signature::Geometry;

/// Recorded expert ids of one request's decode steps, row-major `[tokens][layers][k]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExpertIds {
    geometry: Geometry,
    k: usize,
    ids: Vec<u16>,
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
    /// Takes `ids`, `[tokens][layers][k]` of a model of `geometry`.
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
        match ids.iter().find(|&&id| usize::from(id) >= geometry.experts) {
            Some(&expert) => Err(ExpertIdsError::Expert {
                expert,
                experts: geometry.experts,
            }),
            None => Ok(ExpertIds { geometry, k, ids }),
        }
    }

    /// Layers and experts of the model.
    pub fn geometry(&self) -> Geometry {
        self.geometry
    }

    /// How many tokens are recorded.
    pub fn tokens(&self) -> usize {
        self.ids.len().checked_div(self.row()).unwrap_or(0)
    }

    /// The experts of token `token`, one row of k ids per layer.
    ///
    /// Past the last token the record starts over; without any there are no rows.
    pub fn token(&self, token: u32) -> impl Iterator<Item = &[u16]> {
        let token = (token as usize).checked_rem(self.tokens()).unwrap_or(0);
        let start = token.saturating_mul(self.row());
        self.ids
            .get(start..)
            .unwrap_or_default()
            .chunks_exact(self.k)
            .take(self.geometry.layers)
    }

    fn row(&self) -> usize {
        self.geometry.layers.saturating_mul(self.k)
    }
}
