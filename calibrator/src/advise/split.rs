//! Which requests calibrate and which evaluate.

use eldr_core::route::{Map, Scratch};
use rand::SeedableRng as _;
use rand::seq::SliceRandom as _;
use rand_chacha::ChaCha8Rng;

use super::ground::{Ground, Wrong};
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
pub fn splits(question: Question<'_>, effort: Effort) -> Result<Vec<Split>, Error> {
    let count = question.requests.len();
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
    /// Fits, and makes of the requests what is replayed.
    pub(super) fn grounds<'a>(&self, question: Question<'a>) -> Result<Grounds<'a>, Error> {
        let fitted = question.requests.pick(&self.fitted);
        let maps = FITS.map(|fit| self.map(question, &fitted, fit));
        let maps: Vec<Map> = maps.into_iter().collect::<Result<_, _>>()?;
        let replayed = Replayed::new(question.workload);
        let kinds = replayed.kinds(&maps[0]);
        let wrong = match question.other {
            Some(other) => Some((self.map(question, other, FITS[0])?, None)),
            None => self
                .half(question, &kinds)?
                .map(|(map, half)| (map, Some(half))),
        };
        let ground = |indices: &[usize]| {
            let workload = replayed.pick(indices);
            let known = maps.iter().map(|map| Known::new(map.clone(), &workload));
            let known = known.collect();
            let wrong = wrong.as_ref().and_then(|(map, half)| {
                let others = |index: &&usize| {
                    half.as_ref()
                        .is_none_or(|half| !half.contains(&kinds[**index]))
                };
                let others: Vec<usize> = indices.iter().filter(others).copied().collect();
                let workload = replayed.pick(&others);
                (!others.is_empty()).then(|| Wrong {
                    known: Known::new(map.clone(), &workload),
                    workload,
                })
            });
            let mut by_kind = vec![Vec::new(); kinds.iter().max().map_or(0, |most| most + 1)];
            for (place, &index) in indices.iter().enumerate() {
                by_kind[kinds[index]].push(place);
            }
            by_kind.retain(|those| !those.is_empty());
            Ground {
                workload,
                known,
                wrong,
                kinds: by_kind,
                cluster: question.cluster.clone(),
                plan: question.plan,
            }
        };
        let calibration = [self.fitted.as_slice(), &self.tuning].concat();
        Ok(Grounds {
            tuning: ground(&self.tuning),
            calibration: ground(&ascending(&calibration)),
            evaluation: ground(&self.evaluation),
        })
    }

    fn map(&self, question: Question<'_>, requests: &Requests, fit: Fit) -> Result<Map, Error> {
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
        let fitted = fit::fit(requests, &options, |_| ())?;
        Ok(Map::bind(fitted.blob, question.workers)?)
    }

    /// A blob of one half of the kinds, and which those are; none where there are not two kinds with enough requests.
    fn half(
        &self,
        question: Question<'_>,
        kinds: &[usize],
    ) -> Result<Option<(Map, Vec<usize>)>, Error> {
        let half: Vec<usize> = (0..=kinds.iter().copied().max().unwrap_or(0))
            .filter(|kind| kind % 2 == 0)
            .collect();
        let (those, others): (Vec<usize>, Vec<usize>) =
            (self.fitted.iter().copied()).partition(|&index| half.contains(&kinds[index]));
        if those.len() < question.workers.len().max(8) || others.is_empty() {
            return Ok(None);
        }
        let requests = question.requests.pick(&those);
        Ok(Some((self.map(question, &requests, FITS[0])?, half)))
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
