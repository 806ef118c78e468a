//! Forward-greedy selection of the layers whose prefill counts predict decode best (ELDR §4).
//!
//! The objective of a set of layers is Spearman's correlation, over pairs of requests, between the
//! cosine distance of their signatures on those layers and the cosine distance of their decode
//! counts. Starting from none, the layer that raises it most is added until all are in; the prefix
//! with the highest correlation is kept.

use eldr_core::similarity::dot;
use eldr_core::transform::MIN_NORM;
use rand::{RngExt as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;
use rayon::prelude::*;
use serde::Serialize;

use crate::error::Error;
use crate::rank::Spearman;

/// Most pairs of requests that are compared.
pub const PAIRS_MAX: usize = 30_000;

/// Non-negative profiles of requests, row-major `[request][layer][expert]`.
#[derive(Clone, Copy, Debug)]
pub struct Profiles<'a> {
    /// Layers per request.
    pub layers: usize,
    /// Values per layer.
    pub experts: usize,
    /// The values.
    pub values: &'a [f32],
}

/// The layers in the order in which they were chosen.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Selection {
    /// Every layer, first choice first.
    pub order: Vec<usize>,
    /// Correlation after each choice.
    pub rho: Vec<f64>,
    /// How many of the choices are kept: up to the first maximum of `rho`.
    pub kept: usize,
}

impl Selection {
    /// The layers that are kept, ascending.
    pub fn layers(&self) -> Vec<usize> {
        let mut layers = self.order[..self.kept].to_vec();
        layers.sort_unstable();
        layers
    }

    /// Correlation of the layers that are kept.
    pub fn peak(&self) -> f64 {
        self.rho[self.kept - 1]
    }
}

/// Pairs of different requests to compare: all of them if they are at most [`PAIRS_MAX`], else that
/// many drawn at random.
pub fn pairs(requests: usize, seed: u64) -> Vec<(usize, usize)> {
    let all = requests * requests.saturating_sub(1) / 2;
    if all <= PAIRS_MAX {
        return (0..requests)
            .flat_map(|i| (i + 1..requests).map(move |j| (i, j)))
            .collect();
    }
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    (0..PAIRS_MAX)
        .map(|_| {
            let left = rng.random_range(0..requests);
            // Uniform over the others: step over `left` itself.
            let right = rng.random_range(0..requests - 1);
            (left, right + usize::from(right >= left))
        })
        .collect()
}

/// Chooses layers of `signal` (weighted prefill counts) that order `pairs` like the `decode` counts.
///
/// Both have the same requests in the same order. Of equal correlations the lowest layer wins.
/// `on_candidate(step, layer, rho)` is told of everything that was tried.
///
/// # Errors
/// All pairs are equally far apart in decode, so that nothing can correlate with them.
pub fn select(
    signal: Profiles<'_>,
    decode: Profiles<'_>,
    pairs: &[(usize, usize)],
    mut on_candidate: impl FnMut(usize, usize, f64),
) -> Result<Selection, Error> {
    let whole = (0..decode.layers)
        .map(|layer| Products::of(decode, layer, pairs))
        .fold(Products::default(), |sum, layer| sum.plus(&layer));
    let mut distances = Vec::new();
    Products::default().distances(&whole, pairs, &mut distances);
    let spearman = Spearman::new(&distances).ok_or_else(|| {
        Error::new(
            format!(
                "the decode counts of all {} pairs of requests are equally far apart",
                pairs.len()
            ),
            "use a trace with more varied requests, or leave `decode` out to use all layers",
        )
    })?;

    let products: Vec<_> = (0..signal.layers)
        .into_par_iter()
        .map(|layer| Products::of(signal, layer, pairs))
        .collect();
    let mut chosen = Products::default();
    let mut open: Vec<usize> = (0..signal.layers).collect();
    let mut selection = Selection {
        order: Vec::new(),
        rho: Vec::new(),
        kept: 0,
    };
    while !open.is_empty() {
        let step = selection.order.len();
        // Candidates are independent of each other, so threads change nothing but the time.
        let rhos: Vec<f64> = open
            .par_iter()
            .map_init(Default::default, |(distances, scratch), &layer| {
                chosen.distances(&products[layer], pairs, distances);
                spearman.rho(distances, scratch)
            })
            .collect();
        let mut best = (0, f64::NEG_INFINITY);
        for (place, &rho) in rhos.iter().enumerate() {
            on_candidate(step, open[place], rho);
            if rho > best.1 {
                best = (place, rho);
            }
        }
        let layer = open.remove(best.0);
        chosen = chosen.plus(&products[layer]);
        if selection.rho[..selection.kept]
            .last()
            .is_none_or(|&peak| best.1 > peak)
        {
            selection.kept = step + 1;
        }
        selection.order.push(layer);
        selection.rho.push(best.1);
    }
    Ok(selection)
}

/// What layers contribute to dot products and squared lengths. The cosine on any set of layers
/// follows from sums of these, so no pair of requests is multiplied out twice.
#[derive(Clone, Default)]
struct Products {
    /// Per pair; empty stands for zeros.
    dots: Vec<f64>,
    /// Per request; empty stands for zeros.
    squares: Vec<f64>,
}

impl Products {
    fn of(profiles: Profiles<'_>, layer: usize, pairs: &[(usize, usize)]) -> Self {
        let Profiles {
            layers,
            experts,
            values,
        } = profiles;
        // Packed: rows of one layer lie a power of two apart or nearly so, which few sets of a cache would hold.
        let rows: Vec<&[f32]> = values
            .chunks_exact(experts)
            .skip(layer)
            .step_by(layers)
            .collect();
        let packed = rows.concat();
        let row = |request: usize| &packed[request * experts..][..experts];
        Products {
            dots: pairs
                .iter()
                .map(|&(i, j)| f64::from(dot(row(i), row(j))))
                .collect(),
            squares: rows.iter().map(|row| f64::from(dot(row, row))).collect(),
        }
    }

    fn plus(mut self, other: &Products) -> Self {
        if self.dots.is_empty() {
            return other.clone();
        }
        self.dots
            .iter_mut()
            .zip(&other.dots)
            .for_each(|(sum, dot)| *sum += dot);
        self.squares
            .iter_mut()
            .zip(&other.squares)
            .for_each(|(sum, square)| *sum += square);
        self
    }

    /// Cosine distance of each pair on the layers of `self` and `extra` together. The cosine is rounded to `f32` before it is taken from 1,
    /// so that what differs by less than its rounding is a tie, requests that are alike included.
    fn distances(&self, extra: &Products, pairs: &[(usize, usize)], out: &mut Vec<f32>) {
        let at = |values: &[f64], index: usize| values.get(index).copied().unwrap_or(0.0);
        // One division per request, not one per pair.
        let inverse: Vec<f64> = extra
            .squares
            .iter()
            .enumerate()
            .map(|(i, square)| {
                let length = (at(&self.squares, i) + square).sqrt();
                1.0 / length.max(f64::from(MIN_NORM))
            })
            .collect();
        let dots = extra.dots.iter().enumerate();
        out.clear();
        out.extend(pairs.iter().zip(dots).map(|(&(i, j), (pair, dot))| {
            let dot = at(&self.dots, pair) + dot;
            1.0 - (dot * (inverse[i] * inverse[j])) as f32
        }));
    }
}

#[cfg(test)]
mod tests;
