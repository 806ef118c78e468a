//! One weight per (layer, expert): how much it tells requests apart.
//!
//! The paper's inverse document frequency counts the requests that touch an expert at all, so it fades as prompts grow: once
//! every prompt touches every expert, all weights are zero. The others look at shares of a request's tokens instead, and last.

use eldr_core::transform;
use serde::Serialize;

use crate::requests::Requests;

/// How experts are weighted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum Weight {
    /// Standard deviation across requests of the share of a request's tokens
    #[default]
    Deviation,
    /// That deviation by the square root of the mean share: what exceeds the noise of counting
    Dispersion,
    /// Logarithm of the inverse of the share of all tokens
    ShareIdf,
    /// Inverse document frequency, by requests that use the expert more than the mean does
    MeanIdf,
    /// The paper's inverse document frequency, by requests that touch the expert at all; fades as prompts grow
    PresenceIdf,
}

impl Weight {
    /// Every weight once.
    pub const ALL: [Self; 5] = [
        Self::Deviation,
        Self::Dispersion,
        Self::ShareIdf,
        Self::MeanIdf,
        Self::PresenceIdf,
    ];

    /// The weights that the prefill counts of the requests `members` give, row-major `[layer][expert]`.
    ///
    /// Those by shares are scaled to a mean of 1. All are zero where nothing tells the requests apart.
    pub fn of(self, requests: &Requests, members: &[usize]) -> Vec<f32> {
        let count = members.len() as u32;
        if self == Self::PresenceIdf {
            let touched = how_many(requests, members, |_, used, _| used > 0);
            return transform::idf(&touched, count);
        }
        let Shares { mean, deviation } = Shares::of(requests, members);
        let experts = requests.geometry().experts as f64;
        let weights: Vec<f64> = match self {
            Self::Deviation => deviation,
            Self::Dispersion => {
                // The least share that can be told from none.
                let floor = 1.0 / (experts * f64::from(count.max(1)));
                let pairs = deviation.iter().zip(&mean);
                pairs
                    .map(|(deviation, mean)| deviation / (mean + floor).sqrt())
                    .collect()
            }
            Self::ShareIdf => {
                let floor = 0.1 / (experts * f64::from(count.max(1)));
                mean.iter().map(|mean| -mean.max(floor).ln()).collect()
            }
            Self::MeanIdf | Self::PresenceIdf => {
                let above = how_many(requests, members, |place, used, total| {
                    f64::from(used) > mean[place] * f64::from(total)
                });
                let idf = transform::idf(&above, count);
                idf.into_iter().map(f64::from).collect()
            }
        };
        scaled(weights)
    }
}

/// Per (layer, expert), how many of the requests count, by place, uses of the expert and uses of all experts of its layer.
fn how_many(
    requests: &Requests,
    members: &[usize],
    counts: impl Fn(usize, u16, u32) -> bool,
) -> Vec<u32> {
    let experts = requests.geometry().experts;
    let mut frequency = vec![0u32; requests.layers().len() * experts];
    for &member in members {
        let layers = requests.prefill_of(member).chunks_exact(experts);
        for (layer, used) in layers.enumerate() {
            let total = total(used);
            for (expert, &used) in used.iter().enumerate() {
                let place = layer * experts + expert;
                frequency[place] += u32::from(counts(place, used, total));
            }
        }
    }
    frequency
}

/// Mean and standard deviation, across requests, of each expert's share of a layer's counts.
struct Shares {
    mean: Vec<f64>,
    deviation: Vec<f64>,
}

impl Shares {
    fn of(requests: &Requests, members: &[usize]) -> Self {
        let size = requests.layers().len() * requests.geometry().experts;
        let (mut mean, mut square) = (vec![0.0f64; size], vec![0.0f64; size]);
        // Welford's update: no difference of large sums.
        for (before, &member) in members.iter().enumerate() {
            let layers = requests
                .prefill_of(member)
                .chunks_exact(requests.geometry().experts);
            let shares = layers.flat_map(|layer| {
                let total = f64::from(total(layer).max(1));
                layer.iter().map(move |&used| f64::from(used) / total)
            });
            for ((mean, square), share) in mean.iter_mut().zip(&mut square).zip(shares) {
                let off = share - *mean;
                *mean += off / (before + 1) as f64;
                *square += off * (share - *mean);
            }
        }
        let count = members.len().max(1) as f64;
        let deviation = square
            .iter()
            .map(|square| (square / count).sqrt())
            .collect();
        Shares { mean, deviation }
    }
}

fn total(layer: &[u16]) -> u32 {
    layer.iter().map(|&used| u32::from(used)).sum()
}

/// To a mean of 1; what is zero stays.
fn scaled(weights: Vec<f64>) -> Vec<f32> {
    let sum: f64 = weights.iter().sum();
    let by = if sum > 0.0 {
        weights.len() as f64 / sum
    } else {
        1.0
    };
    weights.iter().map(|weight| (weight * by) as f32).collect()
}

#[cfg(test)]
mod tests;
