//! Counts → unit vector: weight, concatenate the selected layers, L2-normalise (ELDR §4).

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

/// What turns counts into vectors that can be compared: layer selection and one weight per (layer, expert).
#[derive(Debug, Clone, PartialEq)]
pub struct Transform {
    geometry: Geometry,
    layers: Vec<u16>,
    weights: Vec<f32>,
}

impl Transform {
    /// `layers` ascending, `weights` row-major `[selected layer][expert]`.
    ///
    /// # Errors
    /// See [`TransformError`].
    pub fn new(
        geometry: Geometry,
        layers: Vec<u16>,
        weights: Vec<f32>,
    ) -> Result<Self, TransformError> {
        let known = layers
            .last()
            .is_some_and(|&last| usize::from(last) < geometry.layers);
        if !known || !layers.is_sorted_by(|a, b| a < b) {
            return Err(TransformError::Layers {
                found: layers,
                layers: geometry.layers,
            });
        }
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
            layers,
            weights,
        })
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

    /// The unit vector of the counts of the selected layers, row-major `[selected layer][expert]`.
    pub fn apply<T: Copy + Into<f32>>(&self, counts: &[T]) -> Vec<f32> {
        let mut vector = Vec::new();
        self.apply_into(counts, &mut vector);
        vector
    }

    /// [`apply`](Self::apply) into a buffer that is reused.
    pub fn apply_into<T: Copy + Into<f32>>(&self, counts: &[T], vector: &mut Vec<f32>) {
        vector.clear();
        vector.extend(
            counts
                .iter()
                .zip(&self.weights)
                .map(|(&count, weight)| count.into() * weight),
        );
        let norm = crate::similarity::dot(vector, vector).sqrt().max(MIN_NORM);
        for value in vector {
            *value /= norm;
        }
    }
}

#[cfg(test)]
mod tests;
