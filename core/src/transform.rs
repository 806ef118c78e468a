//! Counts → unit vector: shape, weight, concatenate the selected layers, L2-normalise (ELDR §4).

use serde::{Deserialize, Serialize};

use crate::signature::Geometry;

/// Norms are clipped below here, so that a signature without weight stays the zero vector instead of becoming NaN.
pub const MIN_NORM: f32 = 1e-9;
/// Largest weight: keeps 65,536 counts of 65,535 far from overflow in `f32`. The paper's weights are below ln(N+1).
pub const MAX_WEIGHT: f32 = 1e6;

/// The paper's weight per (layer, expert): ln((N + 1) / (df + 1)), with `df` the number of the `requests` that
/// touched the expert at all. It is 0 for an expert that every request touches.
pub fn idf(document_frequency: &[u32], requests: u32) -> Vec<f32> {
    let above = requests as f32 + 1.0;
    document_frequency
        .iter()
        .map(|&df| (above / (df as f32 + 1.0)).ln())
        .collect()
}

/// What of a request's routing is compared: the six signatures of the paper's ablation (ELDR §4).
///
/// The first four follow from expert counts, which is what the signature header carries; the gate sums are for
/// comparing signatures offline. The names are those of the blob's metadata.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SignatureKind {
    /// Counts × a weight per (layer, expert).
    #[default]
    CountIdf,
    /// Counts.
    Count,
    /// Square roots of counts, which damp the experts that everybody uses.
    Sqrt,
    /// 1 for an expert that was used, 0 for others.
    Binary,
    /// Sums over the prompt of the full softmax of the gate.
    GateProb,
    /// Sums over the prompt of the gate weights of the selected experts.
    GateScore,
}

impl SignatureKind {
    /// Every kind once.
    pub const ALL: [Self; 6] = [
        Self::CountIdf,
        Self::Count,
        Self::Sqrt,
        Self::Binary,
        Self::GateProb,
        Self::GateScore,
    ];

    /// The name in the blob's metadata.
    pub fn name(self) -> &'static str {
        match self {
            Self::CountIdf => "count_idf",
            Self::Count => "count",
            Self::Sqrt => "sqrt",
            Self::Binary => "binary",
            Self::GateProb => "gate_prob",
            Self::GateScore => "gate_score",
        }
    }

    /// Whether expert counts are enough to compute it.
    pub fn is_of_counts(self) -> bool {
        !matches!(self, Self::GateProb | Self::GateScore)
    }

    /// What the counts, or the gate sums of a gate kind, become before they are weighted.
    pub fn shape(self, values: &mut [f32]) {
        match self {
            Self::CountIdf | Self::Count | Self::GateProb | Self::GateScore => {}
            Self::Sqrt => values.iter_mut().for_each(|value| *value = value.sqrt()),
            Self::Binary => values
                .iter_mut()
                .for_each(|value| *value = f32::from(u8::from(*value > 0.0))),
        }
    }
}

/// Why numbers are not a transform.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum TransformError {
    /// No layer is selected, one is selected twice, or one is not the model's.
    #[error(
        "selected layers must be 1 to {layers} ascending numbers below {layers}, not {found:?}"
    )]
    Layers {
        /// The selection.
        found: Vec<u16>,
        /// Layers of the model.
        layers: usize,
    },
    /// Not one weight per selected (layer, expert).
    #[error("{found} weights for {expected} selected (layer, expert) pairs")]
    Length {
        /// Weights given.
        found: usize,
        /// Selected layers × experts.
        expected: usize,
    },
    /// A weight is negative, too large or not a number.
    #[error("weight {index} is {value}, allowed are 0 to {MAX_WEIGHT}")]
    Weight {
        /// Position, row-major `[selected layer][expert]`.
        index: usize,
        /// The weight.
        value: f32,
    },
    /// Every weight is zero: all requests would look alike.
    #[error("all weights are zero, so that every signature would become the zero vector")]
    NoWeight,
}

/// Whether these are layers of the model to look at: some, ascending.
pub(crate) fn check_layers(geometry: Geometry, layers: &[u16]) -> Result<(), TransformError> {
    let known = layers
        .last()
        .is_some_and(|&last| usize::from(last) < geometry.layers);
    if known && layers.is_sorted_by(|a, b| a < b) {
        Ok(())
    } else {
        Err(TransformError::Layers {
            found: layers.to_vec(),
            layers: geometry.layers,
        })
    }
}

/// What turns counts into vectors that can be compared: layer selection, kind, and one weight per (layer, expert).
#[derive(Debug, Clone, PartialEq)]
pub struct Transform {
    geometry: Geometry,
    kind: SignatureKind,
    layers: Vec<u16>,
    weights: Vec<f32>,
}

impl Transform {
    /// `layers` ascending, `weights` row-major `[selected layer][expert]`; weighted counts.
    ///
    /// # Errors
    /// See [`TransformError`].
    pub fn new(
        geometry: Geometry,
        layers: Vec<u16>,
        weights: Vec<f32>,
    ) -> Result<Self, TransformError> {
        check_layers(geometry, &layers)?;
        let expected = layers.len() * geometry.experts;
        if weights.len() != expected {
            return Err(TransformError::Length {
                found: weights.len(),
                expected,
            });
        }
        let bad = weights
            .iter()
            .copied()
            .enumerate()
            .find(|(_, w)| !(0.0..=MAX_WEIGHT).contains(w));
        if let Some((index, value)) = bad {
            return Err(TransformError::Weight { index, value });
        }
        if weights.iter().all(|&weight| weight == 0.0) {
            return Err(TransformError::NoWeight);
        }
        Ok(Self {
            geometry,
            kind: SignatureKind::CountIdf,
            layers,
            weights,
        })
    }

    /// The same of another kind of signature.
    #[must_use]
    pub fn with_kind(self, kind: SignatureKind) -> Self {
        Self { kind, ..self }
    }

    /// What of a request's routing is compared.
    pub fn kind(&self) -> SignatureKind {
        self.kind
    }

    /// The model's geometry.
    pub fn geometry(&self) -> Geometry {
        self.geometry
    }

    /// Selected layers, ascending.
    pub fn layers(&self) -> &[u16] {
        &self.layers
    }

    /// Weights, row-major `[selected layer][expert]`.
    pub fn weights(&self) -> &[f32] {
        &self.weights
    }

    /// Length of a vector: selected layers × experts.
    pub fn dimension(&self) -> usize {
        self.weights.len()
    }

    /// The unit vector of the counts (of a gate kind: the gate sums) of the selected layers, row-major
    /// `[selected layer][expert]`.
    pub fn apply<T: Copy + Into<f32>>(&self, counts: &[T]) -> Vec<f32> {
        let mut vector = Vec::new();
        self.apply_into(counts, &mut vector);
        vector
    }

    /// [`apply`](Self::apply) into a buffer that is reused.
    pub fn apply_into<T: Copy + Into<f32>>(&self, counts: &[T], vector: &mut Vec<f32>) {
        vector.clear();
        vector.extend(counts.iter().map(|&count| count.into()));
        self.kind.shape(vector);
        vector
            .iter_mut()
            .zip(&self.weights)
            .for_each(|(value, weight)| *value *= weight);
        let norm = crate::similarity::dot(vector, vector).sqrt().max(MIN_NORM);
        for value in vector {
            *value /= norm;
        }
    }
}

#[cfg(test)]
mod tests;
