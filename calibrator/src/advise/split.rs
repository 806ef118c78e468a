//! Which requests calibrate and which evaluate.

use eldr_core::blob::Blob;
use eldr_core::route::{Map, Scratch};
use rand::SeedableRng as _;
use rand::seq::SliceRandom as _;
use rand_chacha::ChaCha8Rng;

use super::ground::{Change, Ground};
use super::{Effort, Question, REQUESTS_MIN};
use crate::error::Error;
use crate::fit::{self, Layers, Regions};
use crate::requests::Requests;
use crate::simulate::policy::Known;
use crate::simulate::workload::{Request, Workload};

/// One request of this many evaluates; the others calibrate.
const EVALUATION_PART: usize = 2;
/// Of the requests that calibrate, one of this many tunes; a blob is fitted to the others.
const TUNING_PART: usize = 3;

/// Ways to fit a blob, of which tuning takes one; the first is the default.
pub const FITS: [Fit; 3] = [
    Fit {
        regions: "auto",
        layers: "auto",
    },
    Fit {
        regions: "workers",
        layers: "auto",
    },
    Fit {
        regions: "auto",
        layers: "all",
    },
];

/// Options of `eldr fit` that tuning chooses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Fit {
    /// `auto`, or as many as `workers`.
    pub regions: &'static str,
    /// `auto` or `all`.
    pub layers: &'static str,
}

/// Requests by their index among those with a signature, ascending.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Split {
    /// A blob is fitted to them.
    pub fitted: Vec<usize>,
    /// Parameters are chosen on them.
    pub tuning: Vec<usize>,
    /// Nothing is chosen on them: the same ones in every split.
    pub evaluation: Vec<usize>,
    /// Seed of the fit.
    seed: u64,
}

/// Splits at random: the evaluation requests once, the others as often as is asked for.
///
/// # Errors
/// Fewer than [`REQUESTS_MIN`] requests have a signature.
pub fn splits(requests: &Requests, effort: Effort) -> Result<Vec<Split>, Error> {
    let count = requests.len();
    if count < REQUESTS_MIN {
        return Err(Error::new(
            format!(
                "{count} requests with a signature are too few to advise on: {REQUESTS_MIN} are needed, and a thousand are better"
            ),
            "record more requests",
        ));
    }
    let mut order: Vec<usize> = (0..count).collect();
    order.shuffle(&mut ChaCha8Rng::seed_from_u64(effort.seed));
    let mut calibration = order.split_off(count / EVALUATION_PART);
    let evaluation = ascending(&order);
    let splits = (0..effort.splits).map(|split| {
        let seed = effort.seed.wrapping_add(split as u64 + 1);
        calibration.shuffle(&mut ChaCha8Rng::seed_from_u64(seed));
        let (tuning, fitted) = calibration.split_at(calibration.len() / TUNING_PART);
        Split {
            fitted: ascending(fitted),
            tuning: ascending(tuning),
            evaluation: evaluation.clone(),
            seed,
        }
    });
    Ok(splits.collect())
}

fn ascending(indices: &[usize]) -> Vec<usize> {
    let mut indices = indices.to_vec();
    indices.sort_unstable();
    indices
}

/// The requests of a split as they are replayed.
#[derive(Debug)]
pub(super) struct Grounds<'a> {
    pub(super) tuning: Ground<'a>,
    /// The fitted ones and those that tune.
    pub(super) calibration: Ground<'a>,
    pub(super) evaluation: Ground<'a>,
}

impl Split {
    /// Fits, and makes of the requests what is replayed; `other` is the same split of other traffic.
    pub(super) fn grounds<'a>(
        &self,
        question: Question<'a>,
        other: Option<&Split>,
    ) -> Result<Grounds<'a>, Error> {
        let fitted = question.requests.pick(&self.fitted);
        let blobs = FITS.map(|fit| self.blob(question, &fitted, fit));
        let blobs: Vec<Blob> = blobs.into_iter().collect::<Result<_, _>>()?;
        let map = Map::bind(blobs[0].clone(), question.workers)?;
        let replayed = Replayed::new(question.workload);
        let kinds = replayed.kinds(&map);
        let traffics = self.traffics(question, other, &kinds)?;
        let ground = |part: Part| -> Result<Ground<'a>, Error> {
            let indices = part(self);
            let workload = replayed.pick(&indices);
            let known = blobs.iter().map(|blob| known(blob, question, &workload));
            let known = known.collect::<Result<_, _>>()?;
            let change = match &traffics {
                Some(traffics) => traffics.change(question, &replayed, &indices, part)?,
                None => None,
            };
            let mut by_kind = vec![Vec::new(); kinds.iter().max().map_or(0, |most| most + 1)];
            for (place, &index) in indices.iter().enumerate() {
                by_kind[kinds[index]].push(place);
            }
            by_kind.retain(|those| !those.is_empty());
            Ok(Ground {
                change,
                workload,
                known,
                kinds: by_kind,
                cluster: question.cluster.clone(),
                plan: question.plan,
            })
        };
        Ok(Grounds {
            tuning: ground(|split| split.tuning.clone())?,
            calibration: ground(|split| ascending(&[&split.fitted[..], &split.tuning].concat()))?,
            evaluation: ground(|split| split.evaluation.clone())?,
        })
    }

    fn blob(&self, question: Question<'_>, requests: &Requests, fit: Fit) -> Result<Blob, Error> {
        let options = fit::Options {
            seed: self.seed,
            regions: match fit.regions {
                "workers" => Regions::Fixed(question.workers.len().min(requests.len() / 2).max(1)),
                _ => Regions::Auto,
            },
            layers: match fit.layers {
                "all" => Layers::All,
                _ => Layers::Auto,
            },
            ..fit::Options::new(question.workers.to_vec())
        };
        Ok(fit::fit(requests, &options, |_| ())?.blob)
    }

    /// Two kinds of traffic with a blob of each: other traffic and this one, or both halves of the kinds. None where there are not two
    /// kinds with enough requests.
    fn traffics<'a>(
        &'a self,
        question: Question<'a>,
        other: Option<&'a Split>,
        kinds: &'a [usize],
    ) -> Result<Option<Traffics<'a>>, Error> {
        if let Some((traffic, split)) = question.other.zip(other) {
            let theirs = traffic.requests.pick(&split.fitted);
            let own = question.requests.pick(&self.fitted);
            return Ok(Some(Traffics::Other {
                split,
                replayed: Replayed::new(traffic.workload),
                blobs: [
                    split.blob(question, &theirs, FITS[0])?,
                    self.blob(question, &own, FITS[0])?,
                ],
            }));
        }
        let halves = [0, 1].map(|half| -> Vec<usize> {
            let those = self.fitted.iter().copied();
            those.filter(|&index| kinds[index] % 2 == half).collect()
        });
        let enough = question.workers.len().max(8);
        if halves.iter().any(|half| half.len() < enough) {
            return Ok(None);
        }
        let [even, odd] = halves.map(|half| {
            let requests = question.requests.pick(&half);
            self.blob(question, &requests, FITS[0])
        });
        let blobs = [even?, odd?];
        Ok(Some(Traffics::Halves { kinds, blobs }))
    }
}

/// What a blob says of the requests that are replayed.
fn known(blob: &Blob, question: Question<'_>, workload: &Workload) -> Result<Known, Error> {
    Ok(Known::of_blob(blob.clone(), question.workers, workload)?)
}

/// Some requests of a split.
type Part = fn(&Split) -> Vec<usize>;

/// Two kinds of traffic, and a blob of each.
enum Traffics<'a> {
    /// Other traffic, then the user's.
    Other {
        split: &'a Split,
        replayed: Replayed<'a>,
        blobs: [Blob; 2],
    },
    /// Requests of kinds with an even and with an odd number.
    Halves {
        kinds: &'a [usize],
        blobs: [Blob; 2],
    },
}

impl Traffics<'_> {
    /// What is replayed of them beside the requests `own`; none where there is nothing of one of them.
    fn change(
        &self,
        question: Question<'_>,
        replayed: &Replayed<'_>,
        own: &[usize],
        part: Part,
    ) -> Result<Option<Change>, Error> {
        let mut workload = replayed.pick(own);
        let (blobs, requests) = match self {
            Traffics::Other {
                split,
                replayed,
                blobs,
            } => {
                let (first, theirs) = (own.len(), replayed.pick(&part(split)).requests);
                workload.exact &= replayed.workload.exact;
                workload.requests.extend(theirs);
                let all = 0..workload.requests.len();
                (blobs, [all.skip(first).collect(), (0..first).collect()])
            }
            Traffics::Halves { kinds, blobs } => {
                let half = |half| -> Vec<usize> {
                    let places = own.iter().enumerate();
                    let those = places.filter(|(_, index)| kinds[**index] % 2 == half);
                    those.map(|(place, _)| place).collect()
                };
                (blobs, [half(0), half(1)])
            }
        };
        let [first, second] = blobs;
        let known = [
            known(first, question, &workload)?,
            known(second, question, &workload)?,
        ];
        let some = requests.iter().all(|those: &Vec<usize>| !those.is_empty());
        Ok(some.then_some(Change {
            workload,
            known,
            requests,
        }))
    }
}

/// The requests with a signature, in the order in which [`Requests`] has them.
struct Replayed<'a> {
    workload: &'a Workload,
    requests: Vec<&'a Request>,
}

impl<'a> Replayed<'a> {
    fn new(workload: &'a Workload) -> Self {
        let requests = workload.requests.iter();
        Replayed {
            workload,
            requests: requests
                .filter(|request| request.signature.is_some())
                .collect(),
        }
    }

    fn pick(&self, indices: &[usize]) -> Workload {
        let requests = indices.iter().map(|&index| self.requests[index].clone());
        Workload {
            geometry: self.workload.geometry,
            requests: requests.collect(),
            exact: self.workload.exact,
            skipped: 0,
        }
    }

    /// A kind for each request: its label where all have one and they differ, else the region that it is nearest to.
    fn kinds(&self, map: &Map) -> Vec<usize> {
        let labels = self.workload.labels();
        let labelled: Option<Vec<usize>> = self
            .requests
            .iter()
            .map(|request| {
                labels
                    .keys()
                    .position(|label| Some(label) == request.label.as_ref())
            })
            .collect();
        if let Some(labelled) = labelled.filter(|_| labels.len() > 1) {
            return labelled;
        }
        let mut scratch = Scratch::default();
        let nearest = |request: &&Request| {
            let header = request.signature.as_deref().unwrap_or_default();
            let found = map.similarities(header.as_bytes(), &mut scratch, |_| ());
            let found = found.unwrap_or_default().iter().enumerate();
            let most = found.max_by(|(_, a), (_, b)| a.total_cmp(b));
            most.map_or(0, |(region, _)| region)
        };
        self.requests.iter().map(nearest).collect()
    }
}
