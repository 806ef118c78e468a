//! Draws requests. What is drawn does not depend on the strengths, so that these can be solved for on the same draws.

use std::ops::Range;

use rand::{RngExt as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;
use rand_distr::{Binomial, Distribution as _, LogNormal, StandardNormal};
use rayon::prelude::*;

use super::Shape;
use super::popularity::Popularity;
use super::strengths::Strengths;
use super::workload::{Domain, Kind};

/// Prompt lengths as in the paper: 4 to 1,024 tokens; the distribution between is assumed, with a median of 160.
const PROMPT_TOKENS: (f64, f64) = (4.0, 1024.0);
const PROMPT_MEDIAN: f64 = 160.0;
const PROMPT_SIGMA: f64 = 0.8;
/// Mean prompt length under that distribution, about.
pub const PROMPT_TOKENS_MEAN: f64 = 216.0;
/// Rounds that shift a layer's logits until its probabilities sum to top-k, and most of them where a few experts are nearly certain.
const ROUNDS: usize = 8;
const ROUNDS_MAX: usize = 64;
/// The sum is near enough within this part of top-k.
const CLOSE: f32 = 0.005;

/// One request's experts.
#[derive(Clone, Debug, PartialEq)]
pub struct Gates {
    /// Which domain of its workload it belongs to.
    pub domain: usize,
    /// Tokens of its prompt.
    pub prompt_tokens: u32,
    /// Prompt tokens routed to each (layer, expert), `[layers][experts]`.
    pub prefill_counts: Vec<u16>,
    /// How likely one decode step uses each (layer, expert); every layer sums to top-k.
    pub decode: Vec<f32>,
}

impl Gates {
    /// Expected counts over so many decode steps, rounded.
    pub fn decode_counts(&self, tokens: u32) -> Vec<u16> {
        let count = |&p: &f32| (f64::from(p) * f64::from(tokens)).round() as u16;
        self.decode.iter().map(count).collect()
    }
}

/// Draws the requests of one model and workload.
#[derive(Clone, Debug)]
pub struct Generator {
    shape: Shape,
    kind: Kind,
    strengths: Strengths,
    seed: u64,
    popularity: Popularity,
    /// By domain: what it prefers, and what each of its clusters does, `[layers][experts]`.
    domains: Vec<(Vec<f32>, Vec<Vec<f32>>)>,
}

/// What of a request is drawn whatever the strengths are.
#[derive(Clone, Debug)]
pub(super) struct Drawn {
    pub(super) domain: usize,
    cluster: usize,
    prompt_tokens: u32,
    own: Vec<f32>,
    prefill: Vec<f32>,
    decode: Vec<f32>,
    /// What comes after.
    rng: ChaCha8Rng,
}

impl Generator {
    /// Requests of `kind` on a model of `shape`; the same seed gives the same ones.
    pub fn new(shape: Shape, kind: Kind, strengths: Strengths, seed: u64) -> Self {
        let cells = shape.geometry.counts();
        let mut stream = 0;
        let mut preferences = || {
            stream += 1;
            normals(&mut rng(seed, stream), cells)
        };
        let domains = kind.domains().iter().map(|domain| {
            let own = preferences();
            (own, domain.clusters.iter().map(|_| preferences()).collect())
        });
        Generator {
            domains: domains.collect(),
            popularity: Popularity::of(&shape),
            shape,
            kind,
            strengths,
            seed,
        }
    }

    /// The model.
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// The workload.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// The same draws with other strengths.
    #[must_use]
    pub fn with_strengths(self, strengths: Strengths) -> Self {
        Generator { strengths, ..self }
    }

    /// Requests by number: each is the same whatever others are asked for.
    pub fn gates(&self, range: Range<usize>) -> Vec<Gates> {
        range
            .into_par_iter()
            .map(|index| self.finish(self.draw(index)))
            .collect()
    }

    pub(super) fn draw(&self, index: usize) -> Drawn {
        // Streams below are the preferences'.
        let mut rng = rng(self.seed, (1 << 32) + index as u64);
        let domains = self.kind.domains();
        let shares = domains.iter().map(|domain| domain.share);
        let domain = pick(shares, &mut rng);
        let Domain { clusters, .. } = domains[domain];
        let cluster = pick(clusters.iter().copied(), &mut rng);
        let cells = self.shape.geometry.counts();
        Drawn {
            domain,
            cluster,
            prompt_tokens: prompt_tokens(&mut rng),
            own: normals(&mut rng, cells),
            prefill: normals(&mut rng, cells),
            decode: normals(&mut rng, cells),
            rng,
        }
    }

    pub(super) fn finish(&self, mut drawn: Drawn) -> Gates {
        let tokens = drawn.prompt_tokens;
        let prefill = self.probabilities(&drawn, &drawn.prefill);
        let count = |p: f32| {
            let draws = Binomial::new(tokens.into(), f64::from(p).clamp(0.0, 1.0));
            draws.map_or(0, |draws| draws.sample(&mut drawn.rng) as u16)
        };
        Gates {
            domain: drawn.domain,
            prompt_tokens: tokens,
            prefill_counts: prefill.into_iter().map(count).collect(),
            decode: self.probabilities(&drawn, &drawn.decode),
        }
    }

    /// Of one phase, given what only this phase prefers.
    fn probabilities(&self, drawn: &Drawn, phase: &[f32]) -> Vec<f32> {
        let Strengths {
            domain,
            cluster,
            request,
            phase: noise,
        } = self.strengths;
        let experts = self.shape.geometry.experts;
        let (of_domain, clusters) = &self.domains[drawn.domain];
        let of_cluster = &clusters[drawn.cluster];
        let mut p = vec![0.0; phase.len()];
        for (cell, p) in p.iter_mut().enumerate() {
            let differs = domain * of_domain[cell]
                + cluster * of_cluster[cell]
                + request * drawn.own[cell]
                + noise * phase[cell];
            let spread = self.popularity.spread[cell / experts];
            *p = self.popularity.logits[cell] + spread * differs;
        }
        p.chunks_exact_mut(experts)
            .for_each(|layer| to_probabilities(layer, self.shape.top_k));
        p
    }
}

/// Logits of one layer → probabilities that sum to `top_k`: a common shift, found by Newton's method.
fn to_probabilities(layer: &mut [f32], top_k: usize) {
    let most = layer.iter().copied().fold(f32::MIN, f32::max);
    layer.iter_mut().for_each(|x| *x = (*x - most).exp());
    let top_k = top_k.min(layer.len()) as f32;
    let mut factor = top_k / layer.iter().sum::<f32>();
    for round in 0..ROUNDS_MAX {
        let (mut sum, mut slope) = (0.0f32, 0.0f32);
        for odds in layer.iter() {
            let p = factor * odds / (1.0 + factor * odds);
            sum += p;
            slope += p * (1.0 - p);
        }
        if round >= ROUNDS && (top_k - sum).abs() < CLOSE * top_k {
            break;
        }
        factor *= ((top_k - sum) / slope.max(1e-6)).clamp(-2.0, 2.0).exp();
    }
    layer
        .iter_mut()
        .for_each(|odds| *odds = factor * *odds / (1.0 + factor * *odds));
}

fn rng(seed: u64, stream: u64) -> ChaCha8Rng {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    rng.set_stream(stream);
    rng
}

fn normals(rng: &mut ChaCha8Rng, count: usize) -> Vec<f32> {
    (0..count).map(|_| StandardNormal.sample(rng)).collect()
}

/// An index with a probability by its share.
fn pick(shares: impl Iterator<Item = f64> + Clone, rng: &mut ChaCha8Rng) -> usize {
    let mut left = rng.random_range(0.0..shares.clone().sum::<f64>());
    let mut last = 0;
    for (index, share) in shares.enumerate() {
        last = index;
        if left < share {
            break;
        }
        left -= share;
    }
    last
}

fn prompt_tokens(rng: &mut ChaCha8Rng) -> u32 {
    let (least, most) = PROMPT_TOKENS;
    let lengths = LogNormal::new(PROMPT_MEDIAN.ln(), PROMPT_SIGMA);
    let tokens = lengths.map_or(PROMPT_MEDIAN, |lengths| lengths.sample(rng));
    tokens.clamp(least, most).round() as u32
}
