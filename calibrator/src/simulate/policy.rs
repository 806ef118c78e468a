//! Policies by name, and what they decide from.

use std::collections::BTreeMap;
use std::str::FromStr;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use clap::ValueEnum as _;
use eldr_core::blob::Blob;
use eldr_core::decide::{
    Decision, Draw, Evidence, Policy, Reason, Regions, Rule, Worker, WorkerIndex, decide,
};
use eldr_core::marginal::{MAX_EXPONENT, Objective};
use eldr_core::route::{BindError, Map, Scratch, route, route_by};

use super::Cluster;
use super::follow::{Follower, Refit};
use super::hindsight::Goal;
use super::running::ByBatch;
use super::usage::Usage;
use super::workload::Workload;
use crate::error::Error;

/// Band width of `hybrid` where it has none of its own: wider than that of `band`, as batches choose within it.
const HYBRID_TAU: f32 = 0.3;

/// A policy as the user names it: `band`, or with parameters of its own `band:tau=0.2:cap=none`, `marginal:q=1`.
#[derive(Clone, Debug, PartialEq)]
pub struct PolicySpec {
    /// As given.
    pub name: String,
    /// Which one.
    pub kind: PolicyKind,
    /// Band width in place of the run's.
    pub tau: Option<f32>,
    /// Load cap in place of the run's; `Some(None)` is none.
    pub max_load_factor: Option<Option<f64>>,
    /// What it knows of requests.
    pub usage: Usage,
    /// How its centroids follow the traffic; `None`: not at all.
    pub refit: Option<Refit>,
    /// Exponent of the objective of `marginal` and `hybrid` in place of the run's.
    pub exponent: Option<u32>,
}

/// Core's policies, and one that no gateway could use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PolicyKind {
    /// A policy of gateways.
    Rule(Policy),
    /// Workers of its own for each label, as many as its share of the requests, and the least loaded of them: the paper's
    /// baseline `Domain`. It knows labels, and the shares of the very trace that is replayed.
    Label,
    /// The best assignment of the whole run that a search finds which knows all of it, and starts from the best of the other
    /// policies: see [`hindsight`](super::hindsight).
    Hindsight(Goal),
}

impl PolicySpec {
    /// What a list of policies may name.
    pub fn names() -> Vec<&'static str> {
        let policies = Policy::ALL.into_iter().map(Policy::name);
        policies.chain(["label", "hindsight"]).collect()
    }

    /// Whether it decides request by request, and not in hindsight.
    pub fn is_online(&self) -> bool {
        !matches!(self.kind, PolicyKind::Hindsight(_))
    }

    /// The same rule with [`Usage::Decode`]; none where it does not look at requests, or is that already.
    pub fn with_true_usage(&self) -> Option<Self> {
        let looks = matches!(self.kind, PolicyKind::Rule(policy) if policy.looks());
        (looks && self.usage == Usage::Prefill).then(|| PolicySpec {
            name: format!("{}:usage=decode", self.name),
            usage: Usage::Decode,
            ..self.clone()
        })
    }

    /// Whether it balances load and looks at nothing else: the references that a policy has to beat.
    pub fn is_load_balancer(&self) -> bool {
        matches!(self.kind, PolicyKind::Rule(policy) if !policy.looks())
    }

    /// Whether both decide alike, whatever they are called.
    pub(super) fn is_same(&self, other: &PolicySpec) -> bool {
        let name = other.name.clone();
        PolicySpec {
            name,
            ..self.clone()
        } == *other
    }

    /// The rule, with the run's tau and load cap where it has none of its own.
    pub fn rule(&self, run: &Rule) -> Rule {
        Rule {
            policy: match self.kind {
                PolicyKind::Rule(policy) => policy,
                PolicyKind::Label | PolicyKind::Hindsight(_) => Policy::Band,
            },
            tau: self.tau.unwrap_or(match self.kind {
                PolicyKind::Rule(Policy::Hybrid) => HYBRID_TAU,
                _ => run.tau,
            }),
            max_load_factor: self.max_load_factor.unwrap_or(run.max_load_factor),
            objective: Objective {
                exponent: self.exponent.unwrap_or(run.objective.exponent),
                ..run.objective
            },
            ..*run
        }
    }
}

impl FromStr for PolicySpec {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut parts = text.split(':');
        let name = parts.next().unwrap_or_default();
        let policy = Policy::ALL.into_iter().find(|policy| policy.name() == name);
        let mut kind = match policy {
            Some(policy) => PolicyKind::Rule(policy),
            None if name == "label" => PolicyKind::Label,
            None if name == "hindsight" => PolicyKind::Hindsight(Goal::default()),
            None => {
                let names = PolicySpec::names().join(", ");
                return Err(format!("{name:?} is no policy; there are {names}"));
            }
        };
        let scores = matches!(policy, Some(Policy::Marginal | Policy::Hybrid));
        let (mut tau, mut max_load_factor, mut exponent) = (None, None, None);
        let (mut usage, mut refit) = (Usage::default(), None);
        for part in parts {
            match part.split_once('=') {
                Some(("tau", value)) => {
                    let value = value.parse().ok().filter(|tau| (0.0..=2.0).contains(tau));
                    tau = Some(value.ok_or("tau: a number from 0 to 2 was expected")?);
                }
                Some(("cap", "none")) => max_load_factor = Some(None),
                Some(("cap", value)) => {
                    let value = value.parse().ok().filter(|cap| (1.0..=100.0).contains(cap));
                    let value =
                        value.ok_or("cap: a number from 1 to 100, or none, was expected")?;
                    max_load_factor = Some(Some(value));
                }
                Some(("usage", value)) => {
                    if !policy.is_some_and(Policy::looks) {
                        return Err(format!("usage: {name} does not look at requests"));
                    }
                    usage = Usage::from_str(value, true)
                        .map_err(|_| "usage: prefill or decode was expected")?;
                }
                Some(("refit", value)) => {
                    if !policy.is_some_and(Policy::compares_regions) {
                        return Err(format!("refit: {name} has no centroids"));
                    }
                    refit = Some(value.parse().map_err(|error| format!("refit: {error}"))?);
                }
                Some(("for", value)) if kind == PolicyKind::Hindsight(Goal::default()) => {
                    let goal = Goal::from_str(value, true);
                    kind =
                        PolicyKind::Hindsight(goal.map_err(|_| "for: mean or p99 was expected")?);
                }
                Some(("q", value)) if scores => {
                    let value = value.parse().ok();
                    let value = value.filter(|q| (1..=MAX_EXPONENT).contains(q));
                    let allowed =
                        || format!("q: a whole number from 1 to {MAX_EXPONENT} was expected");
                    exponent = Some(value.ok_or_else(allowed)?);
                }
                Some(("q", _)) => {
                    return Err("q: only marginal and hybrid have an exponent".to_owned());
                }
                _ => {
                    return Err(format!(
                        "{part:?}: tau=…, cap=…, q=…, usage=… or refit=… was expected"
                    ));
                }
            }
        }
        Ok(PolicySpec {
            name: text.to_owned(),
            kind,
            tau,
            max_load_factor,
            usage,
            refit,
            exponent,
        })
    }
}

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
    /// The decode workers as the gateway sees them.
    pub workers: &'a [Worker],
    /// The decision's randomness.
    pub draw: Draw,
}

/// Decides, and keeps what it decides from. What gateways see of loads is given; a policy that scores running batches keeps its own
/// state by gateway and worker, of which it is told here.
pub trait Router {
    /// Chooses the decode worker.
    fn choose(&mut self, ask: Ask<'_>) -> Decision;

    /// A request with the signature of request `signature` was sent by `gateway` to `worker`.
    fn entered(&mut self, gateway: usize, worker: usize, signature: usize) {
        let _ = (gateway, worker, signature);
    }

    /// It is done, or its worker has failed.
    fn left(&mut self, gateway: usize, worker: usize, signature: usize) {
        let _ = (gateway, worker, signature);
    }

    /// The gateways tell each other what they have in flight.
    fn shared(&mut self) {}
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
            None => route(
                &self.rule,
                None,
                None,
                workers,
                draw,
                &mut self.scratch,
                |_| (),
            ),
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
        route(
            &self.rule,
            map,
            header,
            ask.workers,
            ask.draw,
            scratch,
            |_| (),
        )
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
        let counts: Vec<usize> = labels.values().copied().collect();
        let index: BTreeMap<&Arc<str>, usize> = labels.keys().zip(0..).collect();
        let similarities = workload.requests.iter().map(|request| {
            let own = index.get(request.label.as_ref()?)?;
            Some(
                (0..labels.len())
                    .map(|label| f32::from(u8::from(label == *own)))
                    .collect(),
            )
        });
        Ok(ByLabel {
            rule,
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

/// Workers for each of `counts`, by largest remainder and at least one each; with more labels than workers they take turns.
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

    #[test]
    fn a_policy_may_have_parameters_of_its_own() {
        let run = Rule::default();
        let rule = |text: &str| text.parse::<PolicySpec>().unwrap().rule(&run);
        assert_eq!(rule("band"), run);
        let own = rule("top1:tau=0.25:cap=none");
        assert_eq!(
            (own.policy, own.tau, own.max_load_factor),
            (Policy::Top1, 0.25, None)
        );
        assert_eq!(rule("label:cap=2").max_load_factor, Some(2.0));
        assert_eq!(rule("hybrid").objective, run.objective);
        let tail = rule("hybrid:tau=0.3:q=8:cap=1.25");
        assert_eq!((tail.objective.exponent, tail.tau), (8, 0.3));
        assert_eq!(tail.objective.step, run.objective.step);
        for wrong in [
            "bond",
            "band:tau=3",
            "band:cap=0.5",
            "band:width=1",
            "band:",
            "band:usage=guess",
            "band:refit=0",
            "marginal:refit=2",
            "band:for=mean",
            "p2c:usage=decode",
            "hindsight:for=p50",
            "marginal:q=0",
            "marginal:q=17",
            "marginal:q=1.5",
            "band:q=1",
        ] {
            assert!(wrong.parse::<PolicySpec>().is_err(), "{wrong}");
        }
    }
}
