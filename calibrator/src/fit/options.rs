//! What a fit is asked for.

use serde::Serialize;

use crate::weights::Weight;

/// What a fit is asked for.
#[derive(Clone, Debug, PartialEq)]
pub struct Options {
    /// Decode cluster names, all different, at least one.
    pub workers: Vec<String>,
    /// Model that the signatures come from.
    pub model: String,
    /// Width of the band that the blob proposes, 0 to 2.
    pub tau: f32,
    /// Seed of everything random: the split, the pairs of the layer selection, the K-means starts.
    pub seed: u64,
    /// Revision of the blob.
    pub revision: u64,
    /// How experts are weighted, where the signature is counts × weight.
    pub weight: Weight,
    /// Which layers are compared.
    pub layers: Layers,
    /// How many regions there are.
    pub regions: Regions,
    /// K-means starts, of which the best is kept; at least 1.
    pub restarts: usize,
    /// Whether layers and regions are first fitted to a part of the requests and measured on the others. What is told of the
    /// fit's quality then rests on requests that it did not see; the blob itself is fitted to all.
    pub hold_out: bool,
}

impl Options {
    /// The defaults, for these `workers`.
    pub fn new(workers: Vec<String>) -> Self {
        Options {
            workers,
            model: "*".into(),
            tau: 0.1,
            seed: 1,
            revision: 1,
            weight: Weight::default(),
            layers: Layers::default(),
            regions: Regions::default(),
            restarts: RESTARTS,
            hold_out: true,
        }
    }

    /// The fit of the paper: its weight, one region per worker, one K-means start, all requests.
    pub fn as_published(workers: Vec<String>) -> Self {
        Options {
            weight: Weight::PresenceIdf,
            regions: Regions::Fixed(workers.len()),
            restarts: 1,
            hold_out: false,
            ..Options::new(workers)
        }
    }
}

/// K-means starts unless asked otherwise.
pub const RESTARTS: usize = 3;

/// Which layers are compared.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Layers {
    /// Those that predict decode best, where enough requests have decode counts; otherwise all.
    #[default]
    Auto,
    /// All that the signatures have.
    All,
    /// These of the model's layers, ascending.
    List(Vec<u16>),
}

/// How many regions there are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Regions {
    /// As many as held-out requests spread over evenly, at most one per worker.
    #[default]
    Auto,
    /// This many, at least 1.
    Fixed(usize),
}
