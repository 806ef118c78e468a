//! One model and workload, ready to run.

use std::sync::Arc;
use std::time::Duration;

use eldr_core::blob::Blob;
use eldr_core::decide::Rule;
use eldr_core::engine::{Ranks, StepModel};

use super::engine::Growth;
use super::published::Cell;
use crate::error::Error;
use crate::fit::{self, Layers, Options};
use crate::generate::{self, Generator, Kind, Shape, Strengths};
use crate::kmeans::Vectors;
use crate::requests::Requests;
use crate::simulate::compare::{Setting, compare};
use crate::simulate::{Cluster, Known, Plan, PolicySpec, Times, Workload};

/// Requests that regions are fitted to, as in the paper.
const CALIBRATION: usize = 1_000;
/// Rounds of plain K-means at most.
const ROUNDS: usize = 50;

/// How much is simulated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Size {
    /// Requests to fit regions to.
    pub calibration: usize,
    /// Different requests that are replayed.
    pub requests: usize,
    /// Seconds in which requests arrive. All are measured, those that meet empty workers too, as published.
    pub seconds: u64,
}

impl Size {
    /// The paper's.
    pub const FULL: Self = Size {
        calibration: CALIBRATION,
        requests: 2_000,
        seconds: 120,
    };
    /// For a first look.
    pub const QUICK: Self = Size {
        calibration: 320,
        requests: 400,
        seconds: 30,
    };
}

/// How a blob is fitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fit {
    /// As the paper does.
    Published,
    /// Plain K-means from the paper's regions on: they need not be of like size.
    Plain,
    /// Over all layers, where the paper chooses some.
    AllLayers,
}

/// A workload, and blobs fitted to other requests of its kind.
#[derive(Debug)]
pub struct Bench {
    /// The model.
    pub shape: Shape,
    /// What requests are about.
    pub kind: Kind,
    pub(super) calibration: Requests,
    workload: Workload,
    seconds: u64,
    seed: u64,
    pub(super) strengths: Strengths,
}

impl Bench {
    /// Generates requests to fit to and others to replay, and counts how experts grow among the latter. `cluster` is a place of
    /// [`CLUSTERS`](crate::generate::CLUSTERS).
    ///
    /// # Errors
    /// None in practice.
    pub fn new(
        shape: Shape,
        kind: Kind,
        cluster: usize,
        size: Size,
        seed: u64,
    ) -> Result<(Self, Growth), Error> {
        let strengths = Strengths::fitted_with(&shape, kind, cluster);
        let generator = Generator::new(shape, kind, strengths, seed);
        let end = size.calibration + size.requests;
        let bench = Bench {
            shape,
            kind,
            calibration: generate::requests(&generator, 0..size.calibration)?,
            workload: generate::workload(&generator, size.calibration..end)?,
            seconds: size.seconds,
            seed,
            strengths,
        };
        let sample = generator.gates(size.calibration..end.min(size.calibration + 1_000));
        let growth = Growth::of(&sample, shape.geometry.layers);
        Ok((bench, growth))
    }

    /// What gateways know, with so many decode workers.
    ///
    /// # Errors
    /// Fewer requests than workers.
    pub fn known(&self, workers: usize, how: Fit) -> Result<Known, Error> {
        let (names, blob) = self.blob(workers, how)?;
        Ok(Known::of_blob(blob, &names, &self.workload)?)
    }

    /// Decode workers, and regions for them.
    pub(super) fn blob(&self, workers: usize, how: Fit) -> Result<(Vec<String>, Blob), Error> {
        let names: Vec<String> = (0..workers).map(|n| format!("decode-{n}")).collect();
        let published = Options {
            seed: self.seed,
            ..Options::as_published(names.clone())
        };
        let options = match how {
            Fit::Published | Fit::Plain => published,
            Fit::AllLayers => Options {
                layers: Layers::All,
                ..published
            },
        };
        let mut blob = fit::fit(&self.calibration, &options, |_| ())?.blob;
        if how == Fit::Plain {
            plain_kmeans(&mut blob, &self.calibration);
        }
        Ok((names, blob))
    }

    /// Runs policies at a rate; one cell each. `ranks` is the expert parallelism of the workers: none, one placement for all, or one
    /// for each.
    ///
    /// # Errors
    /// Nothing arrives.
    pub fn run(
        &self,
        known: &Known,
        step: StepModel,
        rate: u32,
        workers: usize,
        policies: &[PolicySpec],
        ranks: &[Arc<Ranks>],
    ) -> Result<Vec<Cell>, Error> {
        let duration = Duration::from_secs(self.seconds);
        let cluster = Cluster {
            step,
            decode_workers: workers,
            duration,
            warm_up: Duration::ZERO,
            ranks: ranks.to_vec(),
            ..Cluster::default()
        };
        let setting = Setting {
            cluster: &cluster,
            workload: &self.workload,
            plan: Plan {
                times: Times::Drawn {
                    rate_per_s: rate.into(),
                    shape: 1.0,
                },
                duration,
                lengths: None,
                decode_tokens: None,
                permute_signatures: false,
                mix: None,
            },
            // At least two regions are candidates in the runs that were published.
            rule: Rule {
                widen_single: true,
                ..Rule::as_published(0.1)
            },
            known: Some(known),
        };
        let compared = compare(setting, policies, &[self.seed], || ())?;
        let cell = |metric: &str, of: &crate::simulate::compare::PolicyResult| {
            of.values.get(metric).map_or(f64::NAN, |value| value.mean)
        };
        let cells = compared.policies.iter().map(|of| Cell {
            p50_ms: cell("tpot_p50_ms", of),
            p99_ms: cell("tpot_p99_ms", of),
        });
        Ok(cells.collect())
    }
}

/// Signatures of requests, one after the other.
pub(super) fn signatures(blob: &Blob, requests: &Requests) -> Vec<f32> {
    let experts = blob.transform.geometry().experts;
    let layers = blob.transform.layers().iter();
    let rows: Vec<usize> = layers.map(|&layer| layer.into()).collect();
    let of = requests.prefill().flat_map(|counts| {
        let chosen = rows
            .iter()
            .flat_map(|row| &counts[row * experts..(row + 1) * experts]);
        let chosen: Vec<u16> = chosen.copied().collect();
        blob.transform.apply(&chosen)
    });
    of.collect()
}

/// The region whose centroid is nearest to each.
pub(super) fn nearest(vectors: Vectors<'_>, centroids: Vectors<'_>) -> Vec<usize> {
    let regions = centroids.len();
    let of = |row: &[f32]| {
        (0..regions)
            .min_by(|&a, &b| row[a].total_cmp(&row[b]))
            .unwrap_or_default()
    };
    let distances = vectors.distances(centroids);
    distances.chunks_exact(regions).map(of).collect()
}

/// Moves the centroids to the means of the requests that are nearest to them, until nothing changes.
fn plain_kmeans(blob: &mut Blob, requests: &Requests) {
    let dimension = blob.transform.dimension();
    let vectors = signatures(blob, requests);
    let vectors = Vectors {
        dimension,
        values: &vectors,
    };
    let mut before: Vec<usize> = Vec::new();
    for _ in 0..ROUNDS {
        let assignment = nearest(vectors, Vectors::centroids_of(blob));
        if assignment == before {
            return;
        }
        let mut sums = vec![0.0f32; blob.centroids.len()];
        for (index, &region) in assignment.iter().enumerate() {
            let sum = &mut sums[region * dimension..][..dimension];
            sum.iter_mut()
                .zip(vectors.row(index))
                .for_each(|(sum, x)| *sum += x);
        }
        for (centroid, sum) in blob
            .centroids
            .chunks_exact_mut(dimension)
            .zip(sums.chunks_exact(dimension))
        {
            let norm = sum.iter().map(|x| x * x).sum::<f32>().sqrt();
            // A region that nobody is nearest to stays where it is.
            if norm > 0.0 {
                centroid
                    .iter_mut()
                    .zip(sum)
                    .for_each(|(x, sum)| *x = sum / norm);
            }
        }
        before = assignment;
    }
}
