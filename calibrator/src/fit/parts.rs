//! Requests as the vectors that a fit works on.

use eldr_core::similarity::dot;
use eldr_core::transform::{MIN_NORM, SignatureKind, Transform};
use rand::seq::SliceRandom as _;

use super::{HELD_OUT_PART, Layers, Measure, Options};
use crate::error::Error;
use crate::held_out::{self, HeldOut, Stream};
use crate::kmeans::Vectors;
use crate::layers::{Profiles, Selection};
use crate::requests::Requests;
use crate::trace::Phase;

/// Who is fitted to, and whose requests the fit is measured on.
type Parts<'a> = (Vec<usize>, Option<(&'a Requests, Vec<usize>)>);

/// Deals the requests out.
///
/// # Errors
/// Held-out requests of another model, or with other layers.
pub(super) fn split<'a>(
    requests: &'a Requests,
    measure: Measure<'a>,
    seed: u64,
) -> Result<Parts<'a>, Error> {
    let rng = &mut held_out::rng(seed, Stream::Split);
    let mut all: Vec<usize> = (0..requests.len()).collect();
    match measure {
        Measure::Nothing => Ok((all, None)),
        Measure::Against(others) => {
            let shape = |set: &Requests| (set.geometry(), set.layers().to_vec());
            if shape(others) != shape(requests) {
                let ((geometry, layers), (expected, expected_layers)) =
                    (shape(others), shape(requests));
                return Err(Error::new(
                    format!(
                        "the held-out requests have {geometry} and layers {layers:?}, those to fit to {expected} and {expected_layers:?}"
                    ),
                    "hold out requests of the same model, with the same layers in every signature",
                ));
            }
            all.shuffle(rng);
            let mut members: Vec<usize> = (0..others.len()).collect();
            members.shuffle(rng);
            members.truncate(held_out::REQUESTS_MAX);
            Ok((all, Some((others, members))))
        }
        Measure::Part => {
            let held = requests.len() / HELD_OUT_PART;
            if held < held_out::REQUESTS_MIN {
                return Ok((all, None));
            }
            all.shuffle(rng);
            let mut members = all.split_off(all.len() - held);
            members.truncate(held_out::REQUESTS_MAX);
            Ok((all, Some((requests, members))))
        }
    }
}

/// Those of `members` that have decode counts, at most `limit`.
pub(super) fn with_decode(requests: &Requests, members: &[usize], limit: usize) -> Vec<usize> {
    let has = |&member: &usize| requests.decode_of(member).is_some();
    members.iter().copied().filter(has).take(limit).collect()
}

/// The rows of the signatures that are compared, ascending.
///
/// # Errors
/// A layer is asked for that the signatures do not have.
pub(super) fn rows(
    requests: &Requests,
    options: &Options,
    selection: Option<&Selection>,
) -> Result<Vec<usize>, Error> {
    let row = |layer: &u16| {
        requests.layers().binary_search(layer).map_err(|_| {
            Error::new(
                format!(
                    "--layers: layer {layer} is not in the signatures, which have {:?}",
                    requests.layers()
                ),
                "name layers that the signatures have, or give `--layers all`",
            )
        })
    };
    match (&options.layers, selection) {
        (Layers::List(layers), _) => layers.iter().map(row).collect(),
        (_, Some(selection)) => Ok(selection.layers()),
        _ => Ok((0..requests.layers().len()).collect()),
    }
}

/// Values per request, layer and expert.
pub(super) struct Table {
    layers: usize,
    experts: usize,
    values: Vec<f32>,
}

impl Table {
    pub(super) fn profiles(&self) -> Profiles<'_> {
        Profiles {
            layers: self.layers,
            experts: self.experts,
            values: &self.values,
        }
    }
}

/// Weighted signatures of the requests `of`, on all layers, weighted as `members` say.
pub(super) fn signal(
    requests: &Requests,
    members: &[usize],
    of: &[usize],
    options: &Options,
) -> Table {
    let mut weights = weights(requests, members, options);
    none_to_ones(&mut weights);
    let rows: Vec<usize> = (0..requests.layers().len()).collect();
    let mut values = Vec::with_capacity(of.len() * weights.len());
    let mut request = Vec::new();
    for &member in of {
        requests.rows_into(member, &rows, &mut request);
        requests.kind().shape(&mut request);
        values.extend(
            request
                .iter()
                .zip(&weights)
                .map(|(value, weight)| value * weight),
        );
    }
    Table {
        layers: rows.len(),
        experts: requests.geometry().experts,
        values,
    }
}

/// Decode counts of requests that have them.
pub(super) fn decode(requests: &Requests, of: &[usize]) -> Table {
    let counts = of.iter().filter_map(|&member| requests.decode_of(member));
    let values: Vec<f32> = counts.flatten().map(|&count| f32::from(count)).collect();
    let experts = requests.geometry().experts;
    Table {
        layers: values.len() / (of.len().max(1) * experts),
        experts,
        values,
    }
}

/// The weights of all layers, row-major `[layer][expert]`; all 1 where none is called for.
fn weights(requests: &Requests, members: &[usize], options: &Options) -> Vec<f32> {
    match requests.kind() {
        SignatureKind::CountIdf => options.weight.of(requests, members),
        _ => vec![1.0; requests.layers().len() * requests.geometry().experts],
    }
}

/// Where nothing has a weight, everything has the same; whether that was so.
fn none_to_ones(weights: &mut [f32]) -> bool {
    let none = weights.iter().all(|&weight| weight == 0.0);
    if none {
        weights.fill(1.0);
    }
    none
}

/// Where signatures become vectors.
pub(super) struct Space {
    pub(super) transform: Transform,
    rows: Vec<usize>,
    /// No expert of these layers had a weight.
    pub(super) faded: bool,
}

impl Space {
    /// Weights by `members`, on the layers at `rows`.
    ///
    /// # Errors
    /// No layer, or one twice.
    pub(super) fn of(
        requests: &Requests,
        members: &[usize],
        rows: &[usize],
        options: &Options,
    ) -> Result<Self, Error> {
        let experts = requests.geometry().experts;
        let all = weights(requests, members, options);
        let own = rows
            .iter()
            .flat_map(|&row| &all[row * experts..][..experts]);
        let mut weights: Vec<f32> = own.copied().collect();
        let faded = none_to_ones(&mut weights);
        let layers = rows.iter().map(|&row| requests.layers()[row]).collect();
        let transform = Transform::new(requests.geometry(), layers, weights)
            .map_err(|error| {
                Error::new(
                    format!("the fit makes no transform: {error}"),
                    "name each layer once, in ascending order",
                )
            })?
            .with_kind(requests.kind());
        Ok(Space {
            transform,
            rows: rows.to_vec(),
            faded,
        })
    }

    /// The unit vectors of `members`, those without weight left out.
    pub(super) fn vectors(&self, requests: &Requests, members: &[usize]) -> Vectorised {
        let mut vectors = Vectorised {
            dimension: self.transform.dimension(),
            values: Vec::with_capacity(members.len() * self.transform.dimension()),
            without_weight: Vec::new(),
        };
        self.each(requests, members, |member, vector| {
            if vector.iter().any(|&value| value != 0.0) {
                vectors.values.extend_from_slice(vector);
            } else {
                vectors.without_weight.push(member);
            }
        });
        vectors
    }

    /// `members` of `others` as requests that were not fitted to.
    pub(super) fn held_out(&self, others: &Requests, members: &[usize], seed: u64) -> HeldOut {
        let decoding = with_decode(others, members, members.len());
        let of_decode = decoding.len() >= held_out::REQUESTS_MIN;
        let members = if of_decode { &decoding } else { members };
        let mut vectors = Vec::with_capacity(members.len() * self.transform.dimension());
        self.each(others, members, |_, vector| {
            vectors.extend_from_slice(vector);
        });
        let mut profiles = Vec::new();
        for &member in members {
            let counts = match others.decode_of(member) {
                Some(counts) if of_decode => counts,
                _ => others.prefill_of(member),
            };
            let values: Vec<f32> = counts.iter().map(|&count| f32::from(count)).collect();
            let norm = dot(&values, &values).sqrt().max(MIN_NORM);
            profiles.extend(values.into_iter().map(|value| value / norm));
        }
        HeldOut {
            dimension: self.transform.dimension(),
            vectors,
            profiles,
            profiles_of: if of_decode {
                Phase::Decode
            } else {
                Phase::Prefill
            },
            seed,
        }
    }

    fn each(&self, requests: &Requests, members: &[usize], mut on: impl FnMut(usize, &[f32])) {
        let (mut values, mut vector) = (Vec::new(), Vec::new());
        for &member in members {
            requests.rows_into(member, &self.rows, &mut values);
            self.transform.apply_into(&values, &mut vector);
            on(member, &vector);
        }
    }
}

/// Unit vectors of requests.
pub(super) struct Vectorised {
    pub(super) dimension: usize,
    values: Vec<f32>,
    /// Requests that have none.
    pub(super) without_weight: Vec<usize>,
}

impl Vectorised {
    pub(super) fn len(&self) -> usize {
        self.values.len() / self.dimension
    }

    pub(super) fn all(&self) -> Vectors<'_> {
        Vectors {
            dimension: self.dimension,
            values: &self.values,
        }
    }
}
