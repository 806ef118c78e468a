//! Header bytes → decision, in one call: what a gateway does per request.

mod running;

use crate::batch::{Batches, Measure, Request, spread};
use crate::blob::Blob;
use crate::decide::{
    Bounds, Decision, Draw, Evidence, Reason, Regions, Rule, Worker, WorkerIndex, bounds, decide,
};
use crate::signature::{Encoded, Geometry, SignatureError};
use crate::similarity::Folded;
use crate::transform::SignatureKind;

pub use running::{Fleet, Prompt, route_running, see};

/// Buffers that routing reuses; keep one per thread.
#[derive(Debug, Default)]
pub struct Scratch {
    signature: crate::signature::Scratch,
    counts: Vec<f32>,
    similarities: Vec<f32>,
    request: Request,
    is_seen: bool,
    /// Workers whose batches are compared.
    candidates: Vec<WorkerIndex>,
    /// What the policy goes by of each worker's batch.
    running: Vec<f64>,
}

impl Scratch {
    /// The request that was routed or [seen](see) last, if it was held against batches: whoever places it
    /// has its footprint join the batch.
    pub fn request(&self) -> Option<&Request> {
        self.is_seen.then_some(&self.request)
    }

    /// Reads the counts of some layers.
    fn count(
        &mut self,
        signature: &Encoded<'_>,
        geometry: Geometry,
        layers: &[u16],
    ) -> Result<(), Reason> {
        if signature.geometry() != geometry {
            return Err(Reason::GeometryMismatch);
        }
        signature
            .rows(layers, &mut self.signature, &mut self.counts)
            .map_err(|error| match error {
                SignatureError::NoRow { .. } => Reason::GeometryMismatch,
                _ => Reason::MalformedSignature,
            })
    }
}

/// Why a blob cannot route here.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BindError {
    /// A blob names a decode cluster that the configuration does not list.
    #[error(
        "region {region} of the centroid blob names decode cluster {cluster:?}, which is not configured\n\
         hint: list it in `decode_clusters`, or give the blob the configured ones with `eldr remap`"
    )]
    UnknownCluster {
        /// Region in the blob.
        region: usize,
        /// The name.
        cluster: String,
    },
    /// A blob compares what the signature header does not carry.
    #[error(
        "the centroid blob compares signatures of kind {}, but the signature header carries expert counts only\n\
         hint: fit with `--signature count-idf`",
        kind.name()
    )]
    NotOfCounts {
        /// What it compares.
        kind: SignatureKind,
    },
}

/// A blob bound to the configured decode workers.
#[derive(Debug, Clone, PartialEq)]
pub struct Map {
    /// The blob's revision.
    pub revision: u64,
    /// Band width that the blob proposes.
    pub tau: f32,
    /// Tells maps of the same revision and other numbers apart.
    pub fingerprint: u64,
    geometry: Geometry,
    kind: SignatureKind,
    /// Selected layers.
    layers: Vec<u16>,
    folded: Folded,
    regions: Regions,
}

impl Map {
    /// Finds the blob's decode clusters among `workers`.
    ///
    /// # Errors
    /// The blob names a cluster that is not there, or compares what the signature header does not carry.
    pub fn bind(blob: Blob, workers: &[String]) -> Result<Self, BindError> {
        let kind = blob.transform.kind();
        if !kind.is_of_counts() {
            return Err(BindError::NotOfCounts { kind });
        }
        let index_of = |region: usize, cluster: &String| {
            let found = workers
                .iter()
                .position(|worker| worker == cluster)
                .map(WorkerIndex);
            found.ok_or_else(|| BindError::UnknownCluster {
                region,
                cluster: cluster.clone(),
            })
        };
        let regions = blob
            .regions
            .iter()
            .enumerate()
            .map(|(region, clusters)| {
                clusters
                    .iter()
                    .map(|cluster| index_of(region, cluster))
                    .collect()
            })
            .collect::<Result<_, _>>()?;
        Ok(Self {
            revision: blob.revision,
            tau: blob.tau,
            fingerprint: fingerprint(&blob),
            geometry: blob.transform.geometry(),
            kind,
            layers: blob.transform.layers().to_vec(),
            folded: Folded::new(&blob.transform, &blob.centroids),
            regions: Regions::new(regions),
        })
    }

    /// Idle batches of so many workers that look at layers [spread] over those which the blob selects.
    pub fn batches(&self, measure: Measure, workers: usize) -> Batches {
        Batches::of_layers(measure, self.geometry, spread(&self.layers), workers)
    }

    /// Layers that the blob selects, ascending.
    pub fn layers(&self) -> &[u16] {
        &self.layers
    }

    /// Which workers serve each region, for [`decide`] with evidence that was computed elsewhere.
    pub fn regions(&self) -> &Regions {
        &self.regions
    }

    /// Shape of the model's routing.
    pub fn geometry(&self) -> Geometry {
        self.geometry
    }

    /// What [`route`] measures regions and workers by, given the similarities to the regions.
    pub fn bounds(&self, rule: &Rule, similarities: &[f32], workers: &[Worker]) -> Option<Bounds> {
        bounds(rule, similarities, &self.regions, workers)
    }

    /// Whether a signature header is good for this blob in every part: of its shape, with a row for each selected layer, and
    /// with rows that can all be read, those too that [`similarities`](Self::similarities) never looks at.
    pub fn fits(&self, header: &[u8], scratch: &mut Scratch) -> bool {
        let Ok(signature) = Encoded::parse(header) else {
            return false;
        };
        let layers = signature.layers();
        signature.geometry() == self.geometry
            && self
                .layers
                .iter()
                .all(|layer| layers.binary_search(layer).is_ok())
            && signature
                .rows(&layers, &mut scratch.signature, &mut scratch.counts)
                .is_ok()
    }

    /// Similarity of a signature header to each region.
    ///
    /// # Errors
    /// The reason why there is none.
    pub fn similarities<'s>(
        &self,
        header: &[u8],
        scratch: &'s mut Scratch,
        mut done: impl FnMut(Step),
    ) -> Result<&'s [f32], Reason> {
        let signature = Encoded::parse(header).map_err(|_| Reason::MalformedSignature)?;
        scratch.count(&signature, self.geometry, &self.layers)?;
        done(Step::Decode);
        self.compare(scratch);
        done(Step::Compare);
        Ok(&scratch.similarities)
    }

    /// Counts to similarities.
    fn compare(&self, scratch: &mut Scratch) {
        self.kind.shape(&mut scratch.counts);
        self.folded
            .to_each(&mut scratch.counts, &mut scratch.similarities);
    }
}

/// FNV-1a of all that similarities depend on, word by word.
fn fingerprint(blob: &Blob) -> u64 {
    let transform = &blob.transform;
    let numbers = transform.weights().iter().chain(&blob.centroids);
    let kind = std::iter::once(transform.kind() as u32);
    let words = kind.chain(transform.layers().iter().map(|&layer| u32::from(layer)));
    let words = words.chain(numbers.map(|number| number.to_bits()));
    words.fold(0xcbf2_9ce4_8422_2325, |hash, word| {
        (hash ^ u64::from(word)).wrapping_mul(0x0100_0000_01b3)
    })
}

/// What takes the time of a decision.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// Header bytes to counts of the selected layers.
    Decode,
    /// Counts to similarities.
    Compare,
}

/// Chooses the decode worker for a request. `map` is the model's bound blob, `header` the value of the
/// signature header; either may be missing. `workers` must not be empty.
///
/// Policies that look at running batches are for [`route_running`]: here `hybrid` is `band`, the others choose the least loaded.
pub fn route(
    rule: &Rule,
    map: Option<&Map>,
    header: Option<&[u8]>,
    workers: &[Worker],
    draw: Draw,
    scratch: &mut Scratch,
) -> Decision {
    route_timed(rule, map, header, workers, draw, scratch, |_| ())
}

/// As [`route`]; `done` is told of each step, for those who take the time.
pub fn route_timed(
    rule: &Rule,
    map: Option<&Map>,
    header: Option<&[u8]>,
    workers: &[Worker],
    draw: Draw,
    scratch: &mut Scratch,
    done: impl FnMut(Step),
) -> Decision {
    scratch.is_seen = false;
    let none = Regions::NONE;
    let regions = map.map_or(&none, |map| &map.regions);
    let found = match (map, header) {
        _ if !rule.policy.compares_regions() => Err(Reason::Blind),
        (None, _) => Err(Reason::NoBlob),
        (Some(_), None) => Err(Reason::NoSignature),
        (Some(map), Some(header)) => map.similarities(header, scratch, done),
    };
    decide(rule, evidence(found), regions, workers, draw)
}

/// As [`route`], by what [`Map::similarities`] gave earlier of the same revision of `map`.
pub fn route_by(
    rule: &Rule,
    map: &Map,
    found: Result<&[f32], Reason>,
    workers: &[Worker],
    draw: Draw,
) -> Decision {
    let found = if rule.policy.compares_regions() {
        found
    } else {
        Err(Reason::Blind)
    };
    decide(rule, evidence(found), &map.regions, workers, draw)
}

fn evidence(found: Result<&[f32], Reason>) -> Evidence<'_> {
    found.map_or_else(Evidence::Missing, Evidence::Similarities)
}

#[cfg(test)]
mod tests;
