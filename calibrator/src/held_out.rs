//! How a fit does on requests that it did not see.

mod balance;

use eldr_core::similarity::dot;
use rand::RngExt as _;
use rand::seq::SliceRandom as _;
use rand_chacha::ChaCha8Rng;
use serde::Serialize;

pub use balance::{BUSIEST_MAX, busiest};

use crate::kmeans::Vectors;
use crate::layers;
use crate::rank::Spearman;
use crate::trace::Phase;

/// Fewest requests to measure on; fewer say nothing.
pub const REQUESTS_MIN: usize = 12;
/// Most requests to measure on: more say nothing new, and take longer.
pub const REQUESTS_MAX: usize = 1_000;
/// Drawn regions that the real ones are compared with.
const PLACEBOS: usize = 20;
/// Draws of requests that say what chance does to so many.
const DRAWS: usize = 5;

/// Requests that a fit did not see, as a gateway and a decode worker see them.
#[derive(Clone, Debug)]
pub struct HeldOut {
    /// Length of a signature vector.
    pub dimension: usize,
    /// Signature vectors, row-major `[request][dimension]`; zero where a request has no weighted count.
    pub vectors: Vec<f32>,
    /// What the requests do in decode: unit vectors, row-major `[request][profile]`.
    pub profiles: Vec<f32>,
    /// What the profiles are of.
    pub profiles_of: Phase,
    /// Seed of what is drawn.
    pub seed: u64,
}

/// How regions do on held-out requests.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Trial {
    /// How many regions.
    pub regions: usize,
    /// Requests that the busiest worker gets, as a multiple of the mean, from a gateway without a load cap.
    pub busiest: f64,
    /// How much of that is by chance alone, on so few requests: what draws of as many of those that were fitted to have more than
    /// all of these, in the mean.
    pub chance: f64,
    /// Per region, the share of the requests that it is nearest to.
    pub shares: Vec<f64>,
    /// How alike the requests of a region are.
    pub alike: Alike,
}

/// Mean cosine similarity of pairs of requests, by their expert counts.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Alike {
    /// Of what.
    pub of: Phase,
    /// Pairs of the same region.
    pub in_region: f64,
    /// Any pairs.
    pub any: f64,
    /// Pairs of the same region if regions of the same sizes are drawn at random.
    pub placebo: f64,
    /// Standard deviation of that between draws.
    pub placebo_deviation: f64,
}

impl Trial {
    /// Whether held-out requests spread evenly, as far as so many can tell.
    pub fn is_balanced(&self) -> bool {
        self.busiest <= self.busiest_max()
    }

    /// What [`busiest`](Self::busiest) may be.
    pub fn busiest_max(&self) -> f64 {
        BUSIEST_MAX + self.chance
    }
}

impl Alike {
    /// Whether the regions tell more than chance does, and enough to matter.
    pub fn has_structure(&self) -> bool {
        let noise = 3.0 * self.placebo_deviation;
        self.in_region - self.placebo > noise.max(0.01)
    }
}

impl HeldOut {
    /// Requests to measure on.
    pub fn len(&self) -> usize {
        self.vectors.len() / self.dimension
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.vectors.is_empty()
    }

    /// Rank correlation between distance of signatures and distance in decode; `None` where that is not known or all alike.
    pub fn rho(&self) -> Option<f64> {
        if self.profiles_of != Phase::Decode {
            return None;
        }
        let pairs = layers::pairs(self.len(), self.seed);
        let distances = |vectors: Vectors<'_>| -> Vec<f32> {
            let distance = |&(a, b): &(usize, usize)| 1.0 - dot(vectors.row(a), vectors.row(b));
            pairs.iter().map(distance).collect()
        };
        let decode = Spearman::new(&distances(self.profiles()))?;
        Some(decode.rho(&distances(self.signatures()), &mut Default::default()))
    }

    /// Measures regions with these unit `centroids`, each served by the workers (numbered from 0) that `served_by` lists, and
    /// compares with requests that were `fitted` to.
    pub fn measure(
        &self,
        fitted: Vectors<'_>,
        centroids: &[f32],
        served_by: &[Vec<usize>],
        tau: f32,
    ) -> Trial {
        let regions = served_by.len();
        let similarities = |vectors: Vectors<'_>| -> Vec<f32> {
            let distances = vectors.distances(Vectors {
                dimension: self.dimension,
                values: centroids,
            });
            distances
                .into_iter()
                .map(|distance| 1.0 - distance)
                .collect()
        };
        let own = similarities(self.signatures());
        let nearest: Vec<usize> = own.chunks_exact(regions).map(largest).collect();
        let mut sizes = vec![0usize; regions];
        nearest.iter().for_each(|&region| sizes[region] += 1);
        let share = |&size: &usize| size as f64 / self.len() as f64;

        let seen = similarities(fitted);
        let all = busiest(&seen, served_by, tau, self.seed);
        let mut rng = rng(self.seed, Stream::Chance);
        let draws = (0..DRAWS).map(|_| {
            let rows = (0..self.len()).map(|_| rng.random_range(0..fitted.len()));
            let drawn: Vec<f32> = rows
                .flat_map(|row| &seen[row * regions..][..regions])
                .copied()
                .collect();
            busiest(&drawn, served_by, tau, self.seed)
        });
        Trial {
            regions,
            chance: (draws.sum::<f64>() / DRAWS as f64 - all).max(0.0),
            busiest: busiest(&own, served_by, tau, self.seed),
            shares: sizes.iter().map(share).collect(),
            alike: self.alike(nearest, regions),
        }
    }

    fn alike(&self, mut region_of: Vec<usize>, regions: usize) -> Alike {
        let profiles = self.profiles();
        let any = mean_similarity(profiles, &vec![0; self.len()], 1);
        let in_region = mean_similarity(profiles, &region_of, regions);
        let mut rng = rng(self.seed, Stream::Placebo);
        let drawn: Vec<f64> = (0..PLACEBOS)
            .map(|_| {
                region_of.shuffle(&mut rng);
                mean_similarity(profiles, &region_of, regions)
            })
            .collect();
        let placebo = drawn.iter().sum::<f64>() / PLACEBOS as f64;
        let square = drawn
            .iter()
            .map(|mean| (mean - placebo).powi(2))
            .sum::<f64>();
        Alike {
            of: self.profiles_of,
            in_region,
            any,
            placebo,
            placebo_deviation: (square / PLACEBOS as f64).sqrt(),
        }
    }

    fn signatures(&self) -> Vectors<'_> {
        Vectors {
            dimension: self.dimension,
            values: &self.vectors,
        }
    }

    fn profiles(&self) -> Vectors<'_> {
        Vectors {
            dimension: self.profiles.len() / self.len(),
            values: &self.profiles,
        }
    }
}

/// Mean dot product of all pairs of different vectors in the same group; 0 if there is none. From the groups' sums, so that no pair
/// is multiplied out.
fn mean_similarity(vectors: Vectors<'_>, group_of: &[usize], groups: usize) -> f64 {
    let mut sums = vec![0.0f32; groups * vectors.dimension];
    let mut sizes = vec![0.0f64; groups];
    let mut own = 0.0;
    for (index, &group) in group_of.iter().enumerate() {
        let row = vectors.row(index);
        let sum = &mut sums[group * vectors.dimension..][..vectors.dimension];
        sum.iter_mut()
            .zip(row)
            .for_each(|(sum, value)| *sum += value);
        sizes[group] += 1.0;
        own += f64::from(dot(row, row));
    }
    let pairs: f64 = sizes.iter().map(|size| size * (size - 1.0)).sum();
    let sums = sums.chunks_exact(vectors.dimension);
    let products: f64 = sums.map(|sum| f64::from(dot(sum, sum))).sum();
    if pairs > 0.0 {
        (products - own) / pairs
    } else {
        0.0
    }
}

/// The first of the largest.
fn largest(values: &[f32]) -> usize {
    let all = 0..values.len();
    let better = |best: usize, next: usize| {
        if values[next] > values[best] {
            next
        } else {
            best
        }
    };
    all.reduce(better).unwrap_or(0)
}

/// What is drawn, so that no two draws hang together.
#[derive(Clone, Copy, Debug)]
pub enum Stream {
    /// Where K-means starts, by restart.
    Start(usize),
    /// Who is held out.
    Split,
    /// Drawn regions.
    Placebo,
    /// Draws of requests that were fitted to.
    Chance,
    /// Order of arrivals.
    Arrivals,
}

/// The generator of what is drawn under `seed`.
pub fn rng(seed: u64, stream: Stream) -> ChaCha8Rng {
    use rand::SeedableRng as _;
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    rng.set_stream(match stream {
        Stream::Start(restart) => restart as u64,
        Stream::Split => 1 << 32,
        Stream::Placebo => 2 << 32,
        Stream::Arrivals => 3 << 32,
        Stream::Chance => 4 << 32,
    });
    rng
}

#[cfg(test)]
mod tests;
