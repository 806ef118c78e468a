//! Expert parallelism: the experts of a worker are spread over ranks (GPUs), and every layer waits for its busiest one.

use super::union::words;
use crate::signature::Geometry;

/// Which experts each rank of a worker holds, in every layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ranks {
    geometry: Geometry,
    ranks: usize,
    /// One bit per expert, `[layers][ranks][words]`.
    masks: Vec<u64>,
}

/// A placement that is none.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RanksError {
    /// There is no rank, or there are more than experts.
    #[error("{ranks} ranks where 1 to {experts} can share {experts} experts")]
    Count {
        /// How many.
        ranks: usize,
        /// Experts per layer of the model.
        experts: usize,
    },
    /// Not one entry per layer, or layers with different numbers of ranks.
    #[error("the placement has {found} {what} where {expected} are expected")]
    Shape {
        /// Layers, or ranks of a layer.
        what: &'static str,
        /// How many there are.
        found: usize,
        /// How many there must be.
        expected: usize,
    },
    /// A slot holds an expert that the model lacks.
    #[error("layer {layer} places expert {expert} where 0 to {} exist", experts.saturating_sub(1))]
    Expert {
        /// The layer.
        layer: usize,
        /// The id.
        expert: u16,
        /// Experts per layer of the model.
        experts: usize,
    },
    /// No rank of a layer holds an expert.
    #[error("layer {layer} places expert {expert} on no rank")]
    Missing {
        /// The layer.
        layer: usize,
        /// The expert.
        expert: usize,
    },
}

impl Ranks {
    /// Equally many experts per rank in the order of their numbers, as engines place them unless told otherwise; the first ranks hold
    /// one more where it does not come out even.
    ///
    /// # Errors
    /// There is no rank, or there are more than experts.
    pub fn contiguous(geometry: Geometry, ranks: usize) -> Result<Self, RanksError> {
        let experts = geometry.experts;
        if ranks == 0 || ranks > experts {
            return Err(RanksError::Count { ranks, experts });
        }
        let of = |rank: usize| {
            let first = rank * (experts / ranks) + rank.min(experts % ranks);
            let held = experts / ranks + usize::from(rank < experts % ranks);
            (first..first + held).map(|expert| expert as u16).collect()
        };
        let layer: Vec<Vec<u16>> = (0..ranks).map(of).collect();
        Self::new(geometry, &vec![layer; geometry.layers])
    }

    /// As placed: `[layer][rank][slot]`, the expert of each slot. Of an expert in several places every replica is taken to be read, as
    /// it is in all but the smallest batches.
    ///
    /// # Errors
    /// It is not a placement of every expert of each layer on equally many ranks.
    pub fn new(geometry: Geometry, layers: &[Vec<Vec<u16>>]) -> Result<Self, RanksError> {
        let shape = |what, found, expected| match found == expected {
            true => Ok(()),
            false => Err(RanksError::Shape {
                what,
                found,
                expected,
            }),
        };
        let experts = geometry.experts;
        shape("layers", layers.len(), geometry.layers)?;
        let ranks = layers.first().map_or(0, Vec::len);
        if ranks == 0 || ranks > experts {
            return Err(RanksError::Count { ranks, experts });
        }
        let words = words(geometry);
        let mut masks = Vec::with_capacity(geometry.layers.saturating_mul(ranks * words));
        for (layer, placed) in layers.iter().enumerate() {
            shape("ranks", placed.len(), ranks)?;
            let mut held = vec![false; experts];
            for slots in placed {
                let mut mask = vec![0u64; words];
                for &expert in slots {
                    let index = usize::from(expert);
                    let (held, word) = held.get_mut(index).zip(mask.get_mut(index / 64)).ok_or(
                        RanksError::Expert {
                            layer,
                            expert,
                            experts,
                        },
                    )?;
                    *held = true;
                    *word |= 1 << (index % 64);
                }
                masks.extend(mask);
            }
            if let Some(expert) = held.iter().position(|held| !held) {
                return Err(RanksError::Missing { layer, expert });
            }
        }
        Ok(Ranks {
            geometry,
            ranks,
            masks,
        })
    }

    /// Layers and experts of the model.
    pub fn geometry(&self) -> Geometry {
        self.geometry
    }

    /// How many ranks there are.
    pub fn ranks(&self) -> usize {
        self.ranks
    }

    /// Experts that the busiest rank reads, the sum over layers: those `active`, one bit each, and of the others `likely` ones by
    /// their probability, which may be empty.
    pub(super) fn busiest(&self, active: &[u64], likely: &[f64]) -> f64 {
        let words = words(self.geometry);
        let mut likely = likely.chunks_exact(self.geometry.experts.max(1));
        let layers = self
            .masks
            .chunks_exact(words.saturating_mul(self.ranks).max(1));
        let of_layer = |(masks, active): (&[u64], &[u64])| {
            let likely = likely.next().unwrap_or_default();
            let of_rank = |mask: &[u64]| rank(mask, active, likely);
            masks.chunks_exact(words).map(of_rank).fold(0.0, f64::max)
        };
        layers.zip(active.chunks_exact(words)).map(of_layer).sum()
    }
}

/// Experts that one rank reads in one layer.
fn rank(mask: &[u64], active: &[u64], likely: &[f64]) -> f64 {
    let mut read = 0.0;
    let mut likely = likely.chunks(64);
    for (&mask, &active) in mask.iter().zip(active) {
        read += f64::from((mask & active).count_ones());
        let Some(likely) = likely.next() else {
            continue;
        };
        let mut left = mask & !active;
        while left != 0 {
            let bit = left.trailing_zeros() as usize;
            read += likely.get(bit).copied().unwrap_or_default();
            left &= left - 1;
        }
    }
    read
}
