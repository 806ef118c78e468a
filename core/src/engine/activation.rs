//! How likely a token of a request activates each expert: what is known where no token was recorded.

use crate::signature::Geometry;

/// Fixed point of [`Activation`]: steps per unit of −ln(1 − p).
pub(super) const SCALE: f64 = (1u32 << 24) as f64;
/// Highest probability that is taken as it is: −ln(1 − p) of 1 would be infinite, and a batch could never lose it again.
const PROBABILITY_MAX: f64 = 1.0 - 1e-6;

/// Activation probabilities of one request, `[layers][experts]`.
///
/// Kept as −ln(1 − p) in fixed point: a batch leaves an expert alone with probability Π(1 − p) over its members, a sum in this
/// form, to which members are added and from which they are taken exactly, however often.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Activation {
    geometry: Geometry,
    /// −ln(1 − p) × [`SCALE`].
    costs: Vec<u32>,
}

/// Counts that do not have the shape that was announced.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{found} counts where {geometry} need {}", geometry.counts())]
pub struct ActivationError {
    /// How many counts were given.
    pub found: usize,
    /// Layers and experts of the model.
    pub geometry: Geometry,
}

impl Activation {
    /// From `counts`, `[layers][experts]`, over `tokens` tokens: p is count over tokens, at most 1. Without tokens nothing is
    /// activated.
    ///
    /// # Errors
    /// Not one count per layer and expert.
    pub fn from_counts(
        geometry: Geometry,
        counts: &[u16],
        tokens: u64,
    ) -> Result<Self, ActivationError> {
        if counts.len() != geometry.counts() {
            return Err(ActivationError {
                found: counts.len(),
                geometry,
            });
        }
        let cost = |&count: &u16| match tokens {
            0 => 0,
            tokens => {
                let p = (f64::from(count) / tokens as f64).min(PROBABILITY_MAX);
                (-(-p).ln_1p() * SCALE).round() as u32
            }
        };
        Ok(Activation {
            geometry,
            costs: counts.iter().map(cost).collect(),
        })
    }

    /// Layers and experts of the model.
    pub fn geometry(&self) -> Geometry {
        self.geometry
    }

    /// p, `[layers][experts]`.
    pub(super) fn usage(&self) -> Vec<f32> {
        let p = |&cost: &u32| -(-f64::from(cost) / SCALE).exp_m1() as f32;
        self.costs.iter().map(p).collect()
    }

    /// −ln(1 − p) × [`SCALE`], one row per layer.
    pub(super) fn rows(&self) -> impl Iterator<Item = &[u32]> {
        self.costs.chunks_exact(self.geometry.experts.max(1))
    }
}
