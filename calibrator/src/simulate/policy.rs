//! Policies, and what they decide from.

use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use eldr_core::blob::Blob;
use eldr_core::decide::{
    Decision, Draw, Evidence, Reason, Regions, Rule, Worker, WorkerIndex, decide,
};
use eldr_core::route::{BindError, Map, Scratch, route, route_by};

use super::Cluster;
use super::follow::{Follower, Refit};
use super::running::ByBatch;
use super::usage::Usage;
use super::workload::Workload;
use crate::error::Error;

pub use super::spec::{PolicyKind, PolicySpec, Steps};

/// A request that a gateway has to decide.
#[derive(Clone, Copy, Debug)]
pub struct Ask<'a> {
    /// When, since the start.
    pub now: Duration,
    /// Which arrival it is. Only hindsight may look at it.
    pub arrival: usize,
    /// Which gateway.
    pub gateway: usize,
    /// Which request of the workload it is. Only `label` may look at it.
    pub request: usize,
    /// Which request's signature it carries.
    pub signature: usize,
    /// Tokens that it will have in the KV cache, as the gateway expects.
    pub kv_tokens: u32,
    /// The decode workers as the gateway sees them.
    pub workers: &'a [Worker],
    /// The decision's randomness.
    pub draw: Draw,
}

/// Where a request is, and since or until when.
#[derive(Clone, Copy, Debug)]
pub struct Seat {
    /// When, since the start.
    pub now: Duration,
    /// The gateway that sent it.
    pub gateway: usize,
    /// The decode worker.
    pub worker: usize,
    /// Which arrival it is.
    pub arrival: usize,
}

/// Decides, and keeps what it decides from. What gateways see of loads is given; a policy that scores running batches keeps its own
/// state by gateway and worker, of which it is told here.
pub trait Router {
    /// Chooses the decode worker.
    fn choose(&mut self, ask: Ask<'_>) -> Decision;

    /// The arrival that was chosen for last goes to its worker.
    fn entered(&mut self, seat: Seat) {
        let _ = seat;
    }

    /// It is done, with so many milliseconds per decode step, or its worker has failed.
    fn left(&mut self, seat: Seat, step_ms: Option<f64>) {
        let _ = (seat, step_ms);
    }

    /// The gateways tell each other what they have in flight. Returns the bytes that each one tells, in the mean.
    fn shared(&mut self) -> f64 {
        0.0
    }
}

/// A blob bound to the decode workers, and what it says of each request; the same for all policies and runs.
#[derive(Debug)]
pub struct Known {
    pub(super) map: Map,
    /// By request of the workload.
    similarities: Similarities,
    /// The same of what each really uses while it decodes, once somebody wants to know.
    truth: OnceLock<Similarities>,
    /// The blob and its workers, for refits.
    origin: Option<(Blob, Vec<String>)>,
}

type Similarities = Vec<Result<Vec<f32>, Reason>>;

impl Known {
    /// Compares every request of the workload with the regions.
    pub fn new(map: Map, workload: &Workload) -> Self {
        let signatures = workload.requests.iter();
        let signatures = signatures.map(|request| request.signature.clone());
        Known {
            similarities: compare(&map, signatures),
            map,
            truth: OnceLock::new(),
            origin: None,
        }
    }

    /// As [`new`](Self::new), of a blob that policies may refit.
    ///
    /// # Errors
    /// The blob names a worker that is not there, or does not compare counts.
    pub fn of_blob(blob: Blob, workers: &[String], workload: &Workload) -> Result<Self, BindError> {
        let known = Known::new(Map::bind(blob.clone(), workers)?, workload);
        Ok(Known {
            origin: Some((blob, workers.to_vec())),
            ..known
        })
    }

    /// A blob of their own for those who refit it.
    fn follower(&self, refit: Refit) -> Result<Follower, Error> {
        let (blob, workers) = self.origin.as_ref().ok_or_else(|| {
            Error::new(
                "the blob cannot be refitted",
                "leave out refit=… of the policy",
            )
        })?;
        Follower::new(blob.clone(), workers.clone(), refit)
    }

    /// By request of `workload`, which must be that of [`new`](Self::new).
    fn similarities(&self, workload: &Workload, usage: Usage) -> &Similarities {
        match usage {
            Usage::Prefill => &self.similarities,
            Usage::Decode => self.truth.get_or_init(|| {
                let requests = workload.requests.iter();
                compare(&self.map, requests.map(|request| usage.signature(request)))
            }),
        }
    }
}

fn compare(map: &Map, signatures: impl Iterator<Item = Option<Arc<str>>>) -> Similarities {
    let mut scratch = Scratch::default();
    let similarities = signatures.map(|signature| {
        let header = signature.ok_or(Reason::NoSignature)?;
        let found = map.similarities(header.as_bytes(), &mut scratch, |_| ());
        found.map(<[f32]>::to_vec)
    });
    similarities.collect()
}

/// What decides for `spec`.
///
/// # Errors
/// A policy that looks at signatures without a blob; `label` without labels; `hindsight`, which decides nothing.
pub fn router<'a>(
    spec: &PolicySpec,
    run: &Rule,
    known: Option<&'a Known>,
    workload: &Workload,
    cluster: &Cluster,
) -> Result<Box<dyn Router + 'a>, Error> {
    let usage = spec.usage;
    let rule = spec.rule(run);
    match (spec.kind, known) {
        (PolicyKind::Label, _) => Ok(Box::new(ByLabel::new(
            rule,
            workload,
            cluster.decode_workers,
        )?)),
        (PolicyKind::Hindsight(_), _) => Err(Error::new(
            format!("the policy {} is a search over whole runs", spec.name),
            "compare it with others by `eldr simulate`",
        )),
        (PolicyKind::Rule(policy), None) if policy.compares_regions() => Err(Error::new(
            format!(
                "the policy {} compares signatures with centroids, and there are none",
                spec.name
            ),
            "give a blob with --blob, or a trace to fit one to with --calibrate",
        )),
        (PolicyKind::Rule(policy), known) => match (policy.measure(), spec.refit.zip(known)) {
            (Some(measure), refit) => {
                let follower = refit.map(|(refit, known)| known.follower(refit));
                let mut router = ByBatch::new(rule, measure, usage, known, workload, cluster)?;
                router.follow(follower.transpose()?);
                if spec.steps == Steps::Learned {
                    router.learn();
                }
                Ok(Box::new(router))
            }
            (None, Some((refit, known))) => {
                let requests = workload.requests.iter();
                Ok(Box::new(ByFollowing {
                    rule,
                    follower: known.follower(refit)?,
                    headers: requests.map(|request| usage.signature(request)).collect(),
                    scratch: Scratch::default(),
                }))
            }
            (None, None) => Ok(Box::new(ByRule {
                rule,
                known: known.map(|known| (&known.map, known.similarities(workload, usage))),
                scratch: Scratch::default(),
            })),
        },
    }
}

struct ByRule<'a> {
    rule: Rule,
    known: Option<(&'a Map, &'a Similarities)>,
    scratch: Scratch,
}

impl Router for ByRule<'_> {
    fn choose(&mut self, ask: Ask<'_>) -> Decision {
        let Ask { workers, draw, .. } = ask;
        match self.known {
            Some((map, similarities)) => {
                let found = match &similarities[ask.signature] {
                    Ok(similarities) => Ok(similarities.as_slice()),
                    Err(reason) => Err(*reason),
                };
                route_by(&self.rule, map, found, workers, draw)
            }
            None => route(&self.rule, None, None, workers, draw, &mut self.scratch),
        }
    }
}

/// As [`ByRule`], with centroids that follow what is asked for.
struct ByFollowing {
    rule: Rule,
    follower: Follower,
    /// By request of the workload.
    headers: Vec<Option<Arc<str>>>,
    scratch: Scratch,
}

impl Router for ByFollowing {
    fn choose(&mut self, ask: Ask<'_>) -> Decision {
        let header = self.headers[ask.signature].as_ref();
        let header = header.map(|header| header.as_bytes());
        if let Some(header) = header {
            self.follower.see(ask.now.as_secs_f64(), header);
        }
        let (map, scratch) = (Some(self.follower.map()), &mut self.scratch);
        route(&self.rule, map, header, ask.workers, ask.draw, scratch)
    }
}

/// Each label is a region, and a request is like its own alone.
struct ByLabel {
    rule: Rule,
    regions: Regions,
    /// By request of the workload.
    similarities: Vec<Option<Vec<f32>>>,
}

impl ByLabel {
    fn new(rule: Rule, workload: &Workload, workers: usize) -> Result<Self, Error> {
        let labels = workload.labels();
        if labels.is_empty() {
            return Err(Error::new(
                "the policy label needs requests with a label, and none has one",
                "leave it out of --policies, or record `label`",
            ));
        }
        // As published: labels whose share is less than one worker's have workers in common.
        let total: usize = labels.values().sum();
        let (large, small): (Vec<_>, Vec<_>) = labels
            .iter()
            .partition(|(_, count)| **count * workers >= total);
        let mut counts: Vec<usize> = large.iter().map(|(_, count)| **count).collect();
        let index: BTreeMap<&Arc<str>, usize> =
            large.iter().map(|(label, _)| *label).zip(0..).collect();
        if !small.is_empty() {
            counts.push(small.iter().map(|(_, count)| **count).sum());
        }
        let similarities = workload.requests.iter().map(|request| {
            let own = index.get(request.label.as_ref()?).copied();
            let own = own.unwrap_or(large.len());
            let to = |group| f32::from(u8::from(group == own));
            Some((0..counts.len()).map(to).collect())
        });
        Ok(ByLabel {
            // A band of the one group that a request belongs to is as wide as it is to be.
            rule: Rule {
                widen_single: false,
                ..rule
            },
            similarities: similarities.collect(),
            regions: Regions::new(allot(&counts, workers)),
        })
    }
}

impl Router for ByLabel {
    fn choose(&mut self, ask: Ask<'_>) -> Decision {
        let evidence = match &self.similarities[ask.request] {
            Some(similarities) => Evidence::Similarities(similarities),
            None => Evidence::Missing(Reason::NoSignature),
        };
        decide(&self.rule, evidence, &self.regions, ask.workers, ask.draw)
    }
}

/// Workers for each of `counts`, by largest remainder and at least one each; with more groups than workers they take turns.
fn allot(counts: &[usize], workers: usize) -> Vec<Vec<WorkerIndex>> {
    if counts.len() >= workers {
        return (0..counts.len())
            .map(|label| vec![WorkerIndex(label % workers)])
            .collect();
    }
    let total: usize = counts.iter().sum();
    let mut allotted = vec![1; counts.len()];
    for _ in counts.len()..workers {
        // Who is furthest below its share gets the next one.
        let below =
            |label: usize| (counts[label] * workers) as f64 / total as f64 - allotted[label] as f64;
        let next = (0..counts.len()).reduce(|a, b| if below(b) > below(a) { b } else { a });
        allotted[next.unwrap_or_default()] += 1;
    }
    let mut first = 0;
    let ranges = allotted.into_iter().map(|count| {
        let range = (first..first + count).map(WorkerIndex).collect();
        first += count;
        range
    });
    ranges.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sizes(counts: &[usize], workers: usize) -> Vec<usize> {
        allot(counts, workers).iter().map(Vec::len).collect()
    }

    #[test]
    fn labels_get_workers_by_their_share_and_one_at_least() {
        assert_eq!(sizes(&[500, 450, 400, 355], 16), [5, 4, 4, 3]);
        assert_eq!(sizes(&[450, 450, 150, 150], 16), [6, 6, 2, 2]);
        assert_eq!(sizes(&[1_000, 1], 4), [3, 1]);
        let one = |index| vec![WorkerIndex(index)];
        assert_eq!(allot(&[1, 1, 1], 2), [one(0), one(1), one(0)]);
    }
}
