//! Why a request would be sent where: the gateway's own decision, and all that it rests on.

mod text;

use std::collections::BTreeMap;

use eldr_core::batch::{Batches, Footprint, Measure, Request};
use eldr_core::blob::Blob;
use eldr_core::decide::{Decision, Draw, Policy, Reason, Rule, Worker, WorkerIndex};
use eldr_core::route::{Fleet, Map, Prompt, Scratch, route, route_running, see};
use eldr_core::signature::Signature;
use serde::Serialize;

use crate::error::Error;
use crate::regions;

/// The moment at which a request is decided.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Situation {
    /// Load by decode cluster, in any unit that all share, over the cluster's weight; of those not named, the requests that run there.
    /// Clusters that the blob does not name serve no region.
    pub loads: BTreeMap<String, f64>,
    /// The requests that run on each decode cluster, for policies that look at them.
    pub running: BTreeMap<String, Vec<Asked>>,
    /// Decode clusters that are taken out or drain.
    pub out: Vec<String>,
    /// Decisions before this one, for round robin, and random bits, for `p2c` and `random`.
    pub draw: u64,
}

/// What prefill said of a request.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Asked {
    /// Its signature header, where it has one.
    pub header: Option<String>,
    /// Tokens of its prompt, for signatures that do not say.
    pub prompt_tokens: Option<u64>,
}

impl Asked {
    fn prompt(&self) -> Prompt<'_> {
        let tokens = self.prompt_tokens;
        Prompt {
            header: self.header.as_deref().map(str::as_bytes),
            tokens,
            kv_tokens: tokens.unwrap_or_default().try_into().unwrap_or(u32::MAX),
        }
    }
}

/// A decision and what it rests on.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Explanation {
    /// Policy that decided.
    pub policy: &'static str,
    /// Band width.
    pub tau: f32,
    /// Load cap as a multiple of the mean; none without one.
    pub max_load_factor: Option<f64>,
    /// Similarity from which on a region is in the band; none where nothing was compared.
    pub threshold: Option<f32>,
    /// Highest load that a candidate may have; none without a cap.
    pub load_limit: Option<f64>,
    /// What is wrong with the signature, if it could not be compared.
    pub problem: Option<String>,
    /// The regions in the blob's order.
    pub regions: Vec<Region>,
    /// Clusters of the situation that serve no region: they get fallback traffic only.
    pub spare: Vec<Candidate>,
    /// Chosen decode cluster.
    pub worker: String,
    /// What the choice rested on, as the gateway's metrics name it.
    pub reason: &'static str,
    /// Region through which the cluster was chosen.
    pub region: Option<usize>,
    /// Regions in the band; 0 where nobody looked.
    pub band: usize,
    /// Whether nobody in the band could take the request, so that a less similar region got it.
    pub widened: bool,
    /// All of it in a sentence.
    pub why: String,
}

/// A region as the decision saw it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Region {
    /// Cosine similarity of the request to its centroid; none where nothing was compared.
    pub similarity: Option<f32>,
    /// Whether it is in the band.
    pub in_band: bool,
    /// Who serves it.
    pub workers: Vec<Candidate>,
}

/// A decode cluster as the decision saw it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Candidate {
    /// Its name.
    pub name: String,
    /// Its load.
    pub load: f64,
    /// Whether it is taken out or drains.
    pub out: bool,
    /// Whether its load is above the cap.
    pub capped: bool,
    /// What its running batch says, for policies that look at it.
    pub batch: Option<Standing>,
    /// Whether it was chosen.
    pub chosen: bool,
}

/// A running batch as the decision saw it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Standing {
    /// Requests in it.
    pub requests: u32,
    /// Distinct experts per layer that the request is expected to add to its steps; of `marginal` and `hybrid`.
    pub extra_experts: Option<f64>,
    /// By how much the objective would grow, ms to its exponent; of `marginal` and `hybrid`.
    pub growth: Option<f64>,
    /// Cosine of the request to its mean request; of `batch_band`, where it has requests.
    pub cosine: Option<f32>,
}

/// Decides a request as the gateway does.
///
/// Clusters are taken in the order in which the blob names them, others after them by name; the order matters
/// for equal loads of equally similar regions and for policies that do not look.
///
/// # Errors
/// A cluster that is out is nowhere; the blob compares what no header carries.
pub fn explain(
    blob: &Blob,
    asked: &Asked,
    rule: &Rule,
    situation: &Situation,
) -> Result<Explanation, Error> {
    let mut names = regions::workers(&blob.regions);
    let served = names.len();
    for name in situation.loads.keys().chain(situation.running.keys()) {
        if !names.contains(name) {
            names.push(name.clone());
        }
    }
    if let Some(unknown) = situation.out.iter().find(|name| !names.contains(name)) {
        return Err(Error::new(
            format!("{unknown} is to be out, but is no decode cluster of the blob"),
            format!("the decode clusters are: {}", names.join(", ")),
        ));
    }
    let workers: Vec<Worker> = names
        .iter()
        .map(|name| Worker {
            load: situation.load(name),
            available: !situation.out.contains(name),
        })
        .collect();
    let map = Map::bind(blob.clone(), &names)?;
    let draw = Draw {
        sequence: situation.draw,
        entropy: situation.draw,
    };
    let mut scratch = Scratch::default();
    let prompt = asked.prompt();
    let batches = situation.batches(rule, &map, &names, &mut scratch);
    let decision = match &batches {
        Some(batches) => {
            let fleet = Fleet {
                workers: &workers,
                batches,
            };
            route_running(rule, Some(&map), prompt, fleet, draw, &mut scratch)
        }
        None => {
            let header = prompt.header;
            route(rule, Some(&map), header, &workers, draw, &mut scratch)
        }
    };
    let request = scratch.request().cloned();
    let similarities = prompt
        .header
        .and_then(|header| map.similarities(header, &mut scratch, |_| {}).ok());
    let bounds = similarities
        .filter(|_| rule.policy.looks() && (batches.is_none() || request.is_some()))
        .and_then(|similarities| map.bounds(rule, similarities, &workers));
    let threshold = bounds
        .filter(|_| rule.policy.compares_regions())
        .map(|bounds| bounds.threshold);
    let candidate = |name: &String| {
        let index = names.iter().position(|known| known == name);
        let worker = index.and_then(|index| workers.get(index));
        Candidate {
            name: name.clone(),
            load: worker.map_or(0.0, |worker| worker.load),
            out: worker.is_some_and(|worker| !worker.available),
            capped: bounds
                .zip(worker)
                .is_some_and(|(bounds, worker)| worker.load > bounds.load),
            batch: index.and_then(|index| {
                Some(standing(rule, batches.as_ref()?, index, request.as_ref()?))
            }),
            chosen: index == Some(decision.target.0),
        }
    };
    let regions = blob.regions.iter().enumerate();
    let regions = regions.map(|(region, clusters)| {
        let similarity = similarities.and_then(|similarities| similarities.get(region).copied());
        Region {
            similarity,
            in_band: threshold
                .zip(similarity)
                .is_some_and(|(threshold, similarity)| similarity >= threshold),
            workers: clusters.iter().map(candidate).collect(),
        }
    });
    let regions: Vec<Region> = regions.collect();
    let widened = decision
        .region
        .and_then(|region| regions.get(region.0))
        .is_some_and(|region| !region.in_band && rule.policy.compares_regions());
    let worker = names.get(decision.target.0).cloned().unwrap_or_default();
    Ok(Explanation {
        policy: rule.policy.name(),
        tau: rule.tau,
        max_load_factor: rule.max_load_factor,
        threshold,
        load_limit: bounds
            .map(|bounds| bounds.load)
            .filter(|load| load.is_finite()),
        problem: problem(prompt.header, blob).or_else(|| {
            // What is left to be wrong with a header that can be read.
            let unseen = prompt.header.is_some() && batches.is_some() && request.is_none();
            unseen.then(|| "nothing says how many tokens the prompt has".into())
        }),
        why: why(rule, &decision, &worker, widened),
        spare: names[served..].iter().map(candidate).collect(),
        regions,
        worker,
        reason: decision.reason.name(),
        region: decision.region.map(|region| region.0),
        band: decision.band,
        widened,
    })
}

impl Situation {
    fn load(&self, name: &str) -> f64 {
        let running = || {
            self.running
                .get(name)
                .map_or(0.0, |those| those.len() as f64)
        };
        self.loads.get(name).copied().unwrap_or_else(running)
    }

    /// What runs on each of the clusters `names`; `None` where the policy does not look.
    fn batches(
        &self,
        rule: &Rule,
        map: &Map,
        names: &[String],
        scratch: &mut Scratch,
    ) -> Option<Batches> {
        let mut batches = map.batches(rule.policy.measure()?, names.len());
        for (index, name) in names.iter().enumerate() {
            for asked in self.running.get(name).into_iter().flatten() {
                let prompt = asked.prompt();
                let seen = see(prompt, &batches, scratch).ok();
                let footprint = seen
                    .and_then(|()| scratch.request())
                    .map(Request::footprint);
                let unknown = || Footprint::unknown(prompt.kv_tokens);
                batches.join(WorkerIndex(index), &footprint.unwrap_or_else(unknown));
            }
        }
        Some(batches)
    }
}

fn standing(rule: &Rule, batches: &Batches, worker: usize, request: &Request) -> Standing {
    let batch = &batches.workers()[worker];
    let usage = batches.measure() == Measure::Usage;
    Standing {
        requests: batch.requests(),
        extra_experts: usage.then(|| batch.extra_experts(request)),
        growth: usage.then(|| rule.objective.growth(batch, request)),
        cosine: batch.cosine(request),
    }
}

fn problem(header: Option<&[u8]>, blob: &Blob) -> Option<String> {
    let geometry = blob.transform.geometry();
    match Signature::decode(header?) {
        Err(error) => Some(error.to_string()),
        Ok(signature) if signature.geometry() != geometry => Some(format!(
            "the signature has {}, the blob {geometry}",
            signature.geometry()
        )),
        Ok(signature) => {
            let mut selected = blob.transform.layers().iter();
            let missing = selected.find(|layer| !signature.layers().contains(layer))?;
            Some(format!(
                "the signature has no row for layer {missing}, which the blob compares"
            ))
        }
    }
}

fn why(rule: &Rule, decision: &Decision, worker: &str, widened: bool) -> String {
    let policy = rule.policy.name();
    let least = match rule.policy {
        Policy::RoundRobin | Policy::Random | Policy::P2c => format!("{worker} was drawn"),
        _ => format!("{worker} has the least load of all"),
    };
    match decision.reason {
        Reason::InBand | Reason::Top1 if widened => format!(
            "{worker}: every worker in the band is above the load cap or out, so the next most similar region that can take the request got it"
        ),
        Reason::InBand if rule.policy == Policy::BatchBand => format!(
            "{worker} has the least load of the {} worker(s) whose batch is within tau {} of the most alike one",
            decision.band, rule.tau
        ),
        Reason::InBand => format!(
            "{worker} has the least load of the {} region(s) within tau {} of the most similar one",
            decision.band, rule.tau
        ),
        Reason::Top1 => format!("{worker} serves the most similar region"),
        Reason::Marginal if rule.policy == Policy::Hybrid => format!(
            "{worker} is where the request costs least, of the {} region(s) within tau {} of the most similar one",
            decision.band, rule.tau
        ),
        Reason::Marginal => format!("{worker} is where the request costs least"),
        Reason::Blind => format!("{policy} does not look at signatures: {least}"),
        Reason::NoBlob => format!("there is no blob: {worker} has the least load of all"),
        Reason::NoSignature => {
            format!("the request has no signature: {worker} has the least load of all")
        }
        Reason::MalformedSignature => {
            format!("the signature cannot be read: {worker} has the least load of all")
        }
        Reason::GeometryMismatch => format!(
            "the signature is of another model or lacks a layer: {worker} has the least load of all"
        ),
        Reason::AllEjected => {
            format!("no worker that may be chosen is there: {worker} has the least load of what is")
        }
    }
}

#[cfg(test)]
mod tests;
