//! The fit: calibration requests in, centroid blob out.
//!
//! Weights are the inverse document frequency of each (layer, expert); layers are chosen by how well
//! they predict decode ([`crate::layers`]); regions are balanced clusters of the weighted signatures
//! ([`crate::kmeans`]), one per decode worker. The same requests and options give the same bytes.

use eldr_core::blob::{Blob, Fit, QUANTILES};
use eldr_core::similarity::dot;
use eldr_core::transform::{self, Transform};
use rand::SeedableRng as _;
use rand_chacha::ChaCha8Rng;

use crate::error::Error;
use crate::kmeans::{self, Clustering, Vectors};
use crate::layers::{self, Profiles, Selection};
use crate::requests::Requests;

/// Fewest requests with decode counts that can choose layers: two have one distance, which has no
/// order.
pub const DECODE_REQUESTS_MIN: usize = 3;

/// What a fit is asked for.
#[derive(Clone, Debug, PartialEq)]
pub struct Options {
    /// Decode cluster names, all different; worker i serves region i.
    pub workers: Vec<String>,
    /// Model that the signatures come from.
    pub model: String,
    /// Width of the band that the blob proposes, 0 to 2.
    pub tau: f32,
    /// Seed of the pairs of the layer selection and of the K-means start.
    pub seed: u64,
    /// Revision of the blob.
    pub revision: u64,
}

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
        /// Done.
        done: usize,
    },
}

/// A blob and how it came about.
#[derive(Clone, Debug, PartialEq)]
pub struct Fitted {
    /// The blob.
    pub blob: Blob,
    /// Requests with decode counts, which choose the layers.
    pub decode_requests: usize,
    /// The choice of layers; `None` if too few requests had decode counts, so that all are used.
    pub selection: Option<Selection>,
    /// K-means rounds.
    pub rounds: usize,
    /// Whether K-means came to rest.
    pub converged: bool,
    /// Total cosine distance of the requests to their centroids.
    pub total_distance: f64,
}

/// Fits a blob to `requests`.
///
/// # Errors
/// Fewer requests than workers; weights that are all zero; a request without any weighted count on
/// the chosen layers; decode counts that cannot order anything; options that no blob may have.
pub fn fit(
    requests: &Requests,
    options: &Options,
    on_progress: impl FnMut(Progress),
) -> Result<Fitted, Error> {
    let Options {
        seed, ref workers, ..
    } = *options;
    let pairs = layers::pairs(requests.decode().len(), seed);
    let start = |vectors: Vectors<'_>| {
        let rng = &mut ChaCha8Rng::seed_from_u64(seed);
        let drawn = kmeans::plus_plus(vectors, workers.len(), rng);
        drawn
            .into_iter()
            .flat_map(|index| vectors.row(index))
            .copied()
            .collect()
    };
    fit_with(requests, options, &pairs, start, on_progress)
}

/// [`fit`] with its random choices given: the `pairs` of requests with decode counts that choose the
/// layers, and the centroids that K-means starts from, one unit vector per worker.
///
/// # Errors
/// As [`fit`].
pub fn fit_with(
    requests: &Requests,
    options: &Options,
    pairs: &[(usize, usize)],
    start: impl FnOnce(Vectors<'_>) -> Vec<f32>,
    mut on_progress: impl FnMut(Progress),
) -> Result<Fitted, Error> {
    let regions = options.workers.len();
    if requests.len() < regions || regions == 0 {
        return Err(Error::new(
            format!(
                "too few requests to calibrate on: {} for {regions} workers",
                requests.len()
            ),
            "each worker needs at least one request, better 30: give more traces or fewer workers",
        ));
    }
    let weights = idf(requests)?;
    let selection = choose_layers(requests, &weights, pairs, &mut on_progress)?;
    let chosen = match &selection {
        Some(selection) => selection.layers(),
        None => (0..requests.layers().len()).collect(),
    };
    let transform = select_rows(requests, &weights, &chosen)?;
    let vectors = vectors(requests, &transform, &chosen)?;
    let vectors = Vectors {
        dimension: transform.dimension(),
        values: &vectors,
    };

    let clustering = kmeans::balanced(vectors, start(vectors), |round| {
        on_progress(Progress::Rounds {
            done: round.index + 1,
        });
    });

    let (shares, quantiles) = shares_and_quantiles(vectors, &clustering, regions);
    let blob = Blob {
        revision: options.revision,
        model: options.model.clone(),
        transform,
        centroids: clustering.centroids,
        tau: options.tau,
        regions: options
            .workers
            .iter()
            .map(|worker| vec![worker.clone()])
            .collect(),
        fit: Fit {
            quantiles,
            requests: requests.len() as u64,
            rho: selection.as_ref().map(Selection::peak),
            seed: options.seed,
            shares,
        },
        source: None,
    };
    Ok(Fitted {
        blob,
        decode_requests: requests.decode().len(),
        selection,
        rounds: clustering.rounds,
        converged: clustering.converged,
        total_distance: clustering.total_distance,
    })
}

/// The weight of every (layer, expert) of the signatures, `[layer][expert]`: the inverse document
/// frequency, by how many requests touch it at all.
///
/// # Errors
/// All weights are zero.
pub fn idf(requests: &Requests) -> Result<Vec<f32>, Error> {
    let mut touched = vec![0u32; requests.layers().len() * requests.geometry().experts];
    for counts in requests.prefill() {
        touched
            .iter_mut()
            .zip(counts)
            .for_each(|(df, &count)| *df += u32::from(count > 0));
    }
    let weights = transform::idf(&touched, requests.len() as u32);
    if weights.iter().all(|&weight| weight == 0.0) {
        return Err(Error::new(
            format!(
                "all weights are zero: each of {} requests touches every expert",
                requests.len()
            ),
            "the inverse document frequency tells nothing on prompts this long: calibrate on shorter ones",
        ));
    }
    Ok(weights)
}

/// Which rows of the signatures to keep, where enough requests have decode counts to tell.
fn choose_layers(
    requests: &Requests,
    weights: &[f32],
    pairs: &[(usize, usize)],
    on_progress: &mut impl FnMut(Progress),
) -> Result<Option<Selection>, Error> {
    let layers = requests.layers().len();
    let count = requests.decode().len();
    if count < DECODE_REQUESTS_MIN {
        return Ok(None);
    }
    let prefill: Vec<&[u16]> = requests.prefill().collect();
    let mut signal = Vec::with_capacity(count * weights.len());
    let mut decode = Vec::new();
    for (request, counts) in requests.decode() {
        let weighted = prefill[request].iter().zip(weights);
        signal.extend(weighted.map(|(&count, weight)| f32::from(count) * weight));
        decode.extend(counts.iter().map(|&count| f32::from(count)));
    }
    let experts = requests.geometry().experts;
    let decode_layers = decode.len() / (count * experts);
    let (mut done, total) = (0, layers * (layers + 1) / 2);
    layers::select(
        Profiles {
            layers,
            experts,
            values: &signal,
        },
        Profiles {
            layers: decode_layers,
            experts,
            values: &decode,
        },
        pairs,
        |_, _, _| {
            done += 1;
            on_progress(Progress::Layers { done, total });
        },
    )
    .map(Some)
}

/// The transform of the `chosen` rows of the signatures.
fn select_rows(requests: &Requests, weights: &[f32], chosen: &[usize]) -> Result<Transform, Error> {
    let layers = chosen.iter().map(|&row| requests.layers()[row]).collect();
    let weights = rows_of(weights, chosen, requests.geometry().experts);
    Transform::new(requests.geometry(), layers, weights).map_err(|error| {
        let hint = "give requests that differ in the experts they touch";
        Error::new(format!("the fit makes no transform: {error}"), hint)
    })
}

fn rows_of<T: Copy>(values: &[T], rows: &[usize], experts: usize) -> Vec<T> {
    rows.iter()
        .flat_map(|&row| &values[row * experts..][..experts])
        .copied()
        .collect()
}

/// The unit vector of every request, one after the other.
fn vectors(
    requests: &Requests,
    transform: &Transform,
    chosen: &[usize],
) -> Result<Vec<f32>, Error> {
    let mut vectors = Vec::with_capacity(requests.len() * transform.dimension());
    let mut vector = Vec::new();
    for (index, counts) in requests.prefill().enumerate() {
        let counts = rows_of(counts, chosen, requests.geometry().experts);
        transform.apply_into(&counts, &mut vector);
        if vector.iter().all(|&value| value == 0.0) {
            let layers = transform.layers();
            return Err(Error::new(
                format!(
                    "request {} is a zero vector: it has no count with a weight on layers {layers:?}",
                    requests.name(index)
                ),
                "leave the request out: its prompt touches only experts that all requests touch, or none",
            ));
        }
        vectors.append(&mut vector);
    }
    Ok(vectors)
}

/// Per region its share of the requests, and the similarity of its own requests at [`QUANTILES`]
/// (zeros for a region that has none).
pub(crate) fn shares_and_quantiles(
    vectors: Vectors<'_>,
    clustering: &Clustering,
    regions: usize,
) -> (Vec<f64>, Vec<Vec<f64>>) {
    let centroids = Vectors {
        values: &clustering.centroids,
        ..vectors
    };
    let mut similarities = vec![Vec::new(); regions];
    for (index, &region) in clustering.assignment.iter().enumerate() {
        let similarity = dot(vectors.row(index), centroids.row(region));
        similarities[region].push(f64::from(similarity).clamp(-1.0, 1.0));
    }
    let share = |own: &Vec<f64>| own.len() as f64 / vectors.len() as f64;
    let shares = similarities.iter().map(share).collect();
    let quantiles = similarities
        .into_iter()
        .map(|mut own| {
            own.sort_unstable_by(f64::total_cmp);
            QUANTILES.map(|q| quantile(&own, q)).to_vec()
        })
        .collect();
    (shares, quantiles)
}

/// The quantile `q` of ascending values, linear between neighbours; 0 of none.
pub(crate) fn quantile(ascending: &[f64], q: f64) -> f64 {
    let at = q * ascending.len().saturating_sub(1) as f64;
    let below = at.floor() as usize;
    let Some(&low) = ascending.get(below) else {
        return 0.0;
    };
    let high = ascending.get(below + 1).copied().unwrap_or(low);
    low + (high - low) * (at - below as f64)
}

#[cfg(test)]
mod tests;
