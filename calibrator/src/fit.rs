//! The fit: calibration requests in, centroid blob out.
//!
//! Experts are weighted by how much they tell requests apart ([`crate::weights`]); layers are chosen by how well they predict decode
//! ([`crate::layers`]); regions are balanced clusters of the weighted signatures ([`crate::kmeans`]), each served by one decode
//! worker or several ([`crate::regions`]). First all of this is done on a part of the requests and measured on the others
//! ([`crate::held_out`]), which chooses the number of regions; then weights and regions are fitted to all. The same requests and
//! options give the same bytes.

mod facts;
mod options;
mod parts;
mod quality;

use eldr_core::blob::Blob;

pub(crate) use facts::{MEDIAN, quantile, quantiles, shares_and_quantiles};
pub use options::{Layers, Options, RESTARTS, Regions};
pub use quality::{Choice, Quality};

use crate::error::Error;
use crate::held_out::{self, HeldOut, Stream, Trial};
use crate::kmeans::{self, Clustering, Vectors};
use crate::layers::{self, Selection};
use crate::regions;
use crate::requests::Requests;
use parts::{Space, Vectorised};

/// Fewest requests with decode counts that can choose layers: two have one distance, which has no
/// order.
pub const DECODE_REQUESTS_MIN: usize = 3;
/// Most requests that choose layers; with more, pairs that are drawn hardly meet a request twice, and memory grows for nothing.
const LAYER_REQUESTS_MAX: usize = 4_000;
/// Most requests that regions are tried on before all are clustered.
const TRIAL_REQUESTS_MAX: usize = 4_000;
/// One request of so many is held out.
const HELD_OUT_PART: usize = 4;

/// Where a fit is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// Layer candidates tried, of how many.
    Layers {
        /// Tried.
        done: usize,
        /// In all.
        total: usize,
    },
    /// K-means rounds done, of at most [`kmeans::ROUNDS_MAX`].
    Rounds {
        /// How many regions.
        regions: usize,
        /// Starts before this one.
        restart: usize,
        /// Done.
        done: usize,
    },
}

/// A blob and how it came about.
#[derive(Clone, Debug, PartialEq)]
pub struct Fitted {
    /// The blob.
    pub blob: Blob,
    /// Requests with decode counts.
    pub decode_requests: usize,
    /// The choice of layers; `None` if they were given, or too few requests had decode counts, so that all are used.
    pub selection: Option<Selection>,
    /// All weights were zero, so that plain counts are compared.
    pub faded: bool,
    /// Requests without any weighted count on the chosen layers, which no region was fitted to.
    pub without_weight: Vec<usize>,
    /// K-means rounds of the clustering that is kept.
    pub rounds: usize,
    /// Whether K-means came to rest.
    pub converged: bool,
    /// Total cosine distance of the requests to their centroids.
    pub total_distance: f64,
    /// Why there are so many regions.
    pub choice: Choice,
    /// How the fit does on requests that it did not see; `None` where too few were held out.
    pub quality: Option<Quality>,
}

/// What a fit is measured on.
#[derive(Clone, Copy, Debug)]
pub enum Measure<'a> {
    /// Nothing.
    Nothing,
    /// A part of the calibration requests, which layers and number of regions are chosen without.
    Part,
    /// These requests; all calibration requests are fitted to.
    Against(&'a Requests),
}

/// Fits a blob to `requests`, and measures it on a part of them if [`Options::hold_out`] says so.
///
/// # Errors
/// Fewer requests than regions; a list of layers that the signatures do not have; decode counts that cannot order anything;
/// options that no blob may have.
pub fn fit(
    requests: &Requests,
    options: &Options,
    on_progress: impl FnMut(Progress),
) -> Result<Fitted, Error> {
    let measure = if options.hold_out {
        Measure::Part
    } else {
        Measure::Nothing
    };
    fit_measured(requests, measure, options, on_progress)
}

/// [`fit`], measured as `measure` says.
///
/// # Errors
/// As [`fit`]; held-out requests of another model or with other layers.
pub fn fit_measured(
    requests: &Requests,
    measure: Measure<'_>,
    options: &Options,
    on_progress: impl FnMut(Progress),
) -> Result<Fitted, Error> {
    let pairs = |count| layers::pairs(count, options.seed);
    let start = |vectors: Vectors<'_>, regions, restart| {
        let rng = &mut held_out::rng(options.seed, Stream::Start(restart));
        let drawn = kmeans::plus_plus(vectors, regions, rng);
        let rows = drawn.into_iter().flat_map(|index| vectors.row(index));
        rows.copied().collect()
    };
    run(requests, measure, options, pairs, start, on_progress)
}

/// The fit with its random choices given, one start and nothing held out: the `pairs` of requests with decode counts that choose
/// the layers, and the centroids that K-means starts from, one unit vector per region.
///
/// # Errors
/// As [`fit`].
pub fn fit_with(
    requests: &Requests,
    options: &Options,
    pairs: &[(usize, usize)],
    start: impl Fn(Vectors<'_>) -> Vec<f32>,
    on_progress: impl FnMut(Progress),
) -> Result<Fitted, Error> {
    let once = Options {
        restarts: 1,
        ..options.clone()
    };
    let start = |vectors: Vectors<'_>, _, _| start(vectors);
    run(
        requests,
        Measure::Nothing,
        &once,
        |_| pairs.to_vec(),
        start,
        on_progress,
    )
}

/// K-means starts: vectors, regions and restart to centroids.
trait Start: Fn(Vectors<'_>, usize, usize) -> Vec<f32> {}
impl<F: Fn(Vectors<'_>, usize, usize) -> Vec<f32>> Start for F {}

fn run(
    requests: &Requests,
    measure: Measure<'_>,
    options: &Options,
    pairs: impl FnOnce(usize) -> Vec<(usize, usize)>,
    start: impl Start,
    mut on_progress: impl FnMut(Progress),
) -> Result<Fitted, Error> {
    let (seen, unseen) = parts::split(requests, measure, options.seed)?;
    let selection = choose_layers(requests, &seen, pairs, options, &mut on_progress)?;
    let rows = parts::rows(requests, options, selection.as_ref())?;
    let space = Space::of(requests, &seen, &rows, options)?;
    let sample = match unseen {
        Some(_) => &seen[..seen.len().min(TRIAL_REQUESTS_MAX)],
        None => &seen[..],
    };
    let trained = space.vectors(requests, sample);
    let held_out = unseen.map(|(others, members)| space.held_out(others, &members, options.seed));
    let tried = choose_regions(
        &trained,
        held_out.as_ref(),
        options,
        start,
        &mut on_progress,
    )?;
    let quality = held_out.map(|held_out| Quality::new(&held_out, tried.trials, trained.len()));

    // What was tried on a part goes on from there on all requests, so that the regions stay those that were measured.
    let (space, vectors, clustering) = if sample.len() == requests.len() {
        (space, trained, tried.clustering)
    } else {
        let all: Vec<usize> = (0..requests.len()).collect();
        let space = Space::of(requests, &all, &rows, options)?;
        let vectors = space.vectors(requests, &all);
        let regions = tried.regions;
        let go_on = tried.clustering.centroids;
        let clustering = balanced(&vectors, go_on, |done| {
            on_progress(Progress::Rounds {
                regions,
                restart: 0,
                done,
            });
        });
        (space, vectors, clustering)
    };
    let rho = selection.as_ref().map(Selection::peak);
    Ok(Fitted {
        decode_requests: requests.decode().len(),
        selection,
        faded: space.faded,
        choice: tried.choice,
        quality,
        rounds: clustering.rounds,
        converged: clustering.converged,
        total_distance: clustering.total_distance,
        blob: facts::blob(space.transform, vectors.all(), clustering, rho, options),
        without_weight: vectors.without_weight,
    })
}

/// Which rows of the signatures to keep, where that is asked for and enough of `members` have decode counts to tell.
fn choose_layers(
    requests: &Requests,
    members: &[usize],
    pairs: impl FnOnce(usize) -> Vec<(usize, usize)>,
    options: &Options,
    on_progress: &mut impl FnMut(Progress),
) -> Result<Option<Selection>, Error> {
    let of_decode = &parts::with_decode(requests, members, LAYER_REQUESTS_MAX);
    if options.layers != Layers::Auto || of_decode.len() < DECODE_REQUESTS_MIN {
        return Ok(None);
    }
    let layers = requests.layers().len();
    let signal = parts::signal(requests, members, of_decode, options);
    let decode = parts::decode(requests, of_decode);
    let (mut done, total) = (0, layers * (layers + 1) / 2);
    let pairs = pairs(of_decode.len());
    layers::select(signal.profiles(), decode.profiles(), &pairs, |_, _, _| {
        done += 1;
        on_progress(Progress::Layers { done, total });
    })
    .map(Some)
}

/// Regions and how they were found.
struct Tried {
    regions: usize,
    clustering: Clustering,
    /// The chosen one last.
    trials: Vec<Trial>,
    choice: Choice,
}

/// Clusters into as many regions as are asked for, or into the most over which held-out requests spread evenly.
fn choose_regions(
    vectors: &Vectorised,
    held_out: Option<&HeldOut>,
    options: &Options,
    start: impl Start,
    on_progress: &mut impl FnMut(Progress),
) -> Result<Tried, Error> {
    let workers = options.workers.len();
    let candidates = match options.regions {
        Regions::Fixed(regions) => vec![regions],
        Regions::Auto => regions::candidates(workers, vectors.len()),
    };
    let mut best: Option<(Clustering, Trial)> = None;
    let mut trials: Vec<Trial> = Vec::new();
    for &regions in &candidates {
        let clustering = cluster(vectors, regions, options, &start, on_progress)?;
        let Some(held_out) = held_out else {
            let choice = Choice::unmeasured(options.regions, regions, workers);
            return Ok(Tried {
                regions,
                clustering,
                trials,
                choice,
            });
        };
        let centroids = Vectors {
            values: &clustering.centroids,
            ..vectors.all()
        };
        let served_by = regions::lay_out(centroids, workers);
        let trial = held_out.measure(
            vectors.all(),
            &clustering.centroids,
            &served_by,
            options.tau,
        );
        let balanced = trial.is_balanced();
        trials.push(trial.clone());
        if best
            .as_ref()
            .is_none_or(|(_, best)| trial.busiest < best.busiest)
        {
            best = Some((clustering, trial));
        }
        if balanced {
            break;
        }
    }
    let (clustering, chosen) = best.ok_or_else(|| too_few(vectors.len(), workers))?;
    trials.retain(|trial| trial.regions != chosen.regions);
    let choice = Choice::measured(options.regions, &chosen, &trials, workers);
    let regions = chosen.regions;
    trials.push(chosen);
    Ok(Tried {
        regions,
        clustering,
        trials,
        choice,
    })
}

/// The best clustering of all restarts.
fn cluster(
    vectors: &Vectorised,
    regions: usize,
    options: &Options,
    start: &impl Start,
    on_progress: &mut impl FnMut(Progress),
) -> Result<Clustering, Error> {
    if vectors.len() < regions || regions == 0 || options.workers.is_empty() {
        return Err(too_few(vectors.len(), regions));
    }
    let mut best: Option<Clustering> = None;
    for restart in 0..options.restarts.max(1) {
        let start = start(vectors.all(), regions, restart);
        let clustering = balanced(vectors, start, |done| {
            on_progress(Progress::Rounds {
                regions,
                restart,
                done,
            });
        });
        if best
            .as_ref()
            .is_none_or(|best| clustering.total_distance < best.total_distance)
        {
            best = Some(clustering);
        }
    }
    best.ok_or_else(|| too_few(vectors.len(), regions))
}

fn balanced(vectors: &Vectorised, start: Vec<f32>, mut on_round: impl FnMut(usize)) -> Clustering {
    kmeans::balanced(vectors.all(), start, |round| on_round(round.index + 1))
}

fn too_few(requests: usize, regions: usize) -> Error {
    Error::new(
        format!("too few requests to calibrate on: {requests} for {regions} regions"),
        "each region needs at least one request with a weighted count, better 30: give more traces, fewer workers or a smaller `--regions`",
    )
}

#[cfg(test)]
mod tests;
