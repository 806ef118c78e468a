//! Why a request would be sent where: the gateway's own decision, and all that it rests on.

use std::collections::BTreeMap;

use comfy_table::{CellAlignment, Table};
use eldr_core::blob::Blob;
use eldr_core::decide::{Decision, Draw, Policy, Reason, Rule, Worker};
use eldr_core::route::{Map, Scratch, route};
use eldr_core::signature::Signature;
use serde::Serialize;

use crate::error::Error;
use crate::regions;
use crate::table::table;

/// The moment at which a request is decided.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Situation {
    /// Load by decode cluster, in any unit that all share, over the cluster's weight; 0 for those not named.
    /// Clusters that the blob does not name serve no region.
    pub loads: BTreeMap<String, f64>,
    /// Decode clusters that are taken out or drain.
    pub out: Vec<String>,
    /// Decisions before this one, for round robin, and random bits, for `p2c` and `random`.
    pub draw: u64,
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
    /// Whether it was chosen.
    pub chosen: bool,
}

/// Decides a request with the signature header `header`, or with none, as the gateway does.
///
/// Clusters are taken in the order in which the blob names them, others after them by name; the order matters
/// for equal loads of equally similar regions and for policies that do not look.
///
/// # Errors
/// A cluster that is out is nowhere; the blob compares what no header carries.
pub fn explain(
    blob: &Blob,
    header: Option<&[u8]>,
    rule: &Rule,
    situation: &Situation,
) -> Result<Explanation, Error> {
    let mut names = regions::workers(&blob.regions);
    let served = names.len();
    for name in situation.loads.keys() {
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
            load: situation.loads.get(name).copied().unwrap_or(0.0),
            available: !situation.out.contains(name),
        })
        .collect();
    let map = Map::bind(blob.clone(), &names)?;
    let draw = Draw {
        sequence: situation.draw,
        entropy: situation.draw,
    };
    let mut scratch = Scratch::default();
    let decision = route(
        rule,
        Some(&map),
        header,
        &workers,
        draw,
        &mut scratch,
        |_| {},
    );
    let similarities =
        header.and_then(|header| map.similarities(header, &mut scratch, |_| {}).ok());
    let bounds = similarities
        .filter(|_| rule.policy.looks())
        .and_then(|similarities| map.bounds(rule, similarities, &workers));
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
            chosen: index == Some(decision.target.0),
        }
    };
    let regions = blob.regions.iter().enumerate();
    let regions = regions.map(|(region, clusters)| {
        let similarity = similarities.and_then(|similarities| similarities.get(region).copied());
        Region {
            similarity,
            in_band: bounds
                .zip(similarity)
                .is_some_and(|(bounds, similarity)| similarity >= bounds.threshold),
            workers: clusters.iter().map(candidate).collect(),
        }
    });
    let regions: Vec<Region> = regions.collect();
    let widened = decision
        .region
        .and_then(|region| regions.get(region.0))
        .is_some_and(|region| !region.in_band);
    let worker = names.get(decision.target.0).cloned().unwrap_or_default();
    Ok(Explanation {
        policy: rule.policy.name(),
        tau: rule.tau,
        max_load_factor: rule.max_load_factor,
        threshold: bounds.map(|bounds| bounds.threshold),
        load_limit: bounds
            .map(|bounds| bounds.load)
            .filter(|load| load.is_finite()),
        problem: problem(header, blob),
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
        Reason::InBand => format!(
            "{worker} has the least load of the {} region(s) within tau {} of the most similar one",
            decision.band, rule.tau
        ),
        Reason::Top1 => format!("{worker} serves the most similar region"),
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

impl Explanation {
    /// The decision as lines, and a table of regions and workers, the most similar first.
    pub fn text(&self) -> String {
        let cap = match (self.max_load_factor, self.load_limit) {
            (Some(factor), Some(limit)) => format!("{factor} × the mean load: {limit:.2}"),
            (Some(factor), None) => format!("{factor} × the mean load"),
            (None, _) => "none".into(),
        };
        let mut text = format!(
            "decision {}; reason {}\nwhy      {}\npolicy   {}, tau {}, load cap {cap}\n",
            self.worker, self.reason, self.why, self.policy, self.tau,
        );
        if let Some(problem) = &self.problem {
            text += &format!("problem  {problem}\n");
        }
        if let Some(threshold) = self.threshold {
            text += &format!(
                "band     {} region(s) from similarity {threshold:.4}\n",
                self.band
            );
        }
        text + &format!("\n{}\n", self.table())
    }

    fn table(&self) -> Table {
        let mut table = table([
            "region",
            "similarity",
            "band",
            "worker",
            "load",
            "",
            "chosen",
        ]);
        let mut order: Vec<(usize, &Region)> = self.regions.iter().enumerate().collect();
        // Stable: equal ones, and all where nothing was compared, stay in the blob's order.
        order.sort_by(|(_, a), (_, b)| {
            let value = |region: &Region| region.similarity.unwrap_or(f32::NEG_INFINITY);
            value(b).total_cmp(&value(a))
        });
        let mut row = |region: String,
                       similarity: Option<f32>,
                       band: &str,
                       worker: &Candidate,
                       through: bool| {
            let state = match (worker.out, worker.capped) {
                (true, _) => "out",
                (_, true) => "above the cap",
                _ => "",
            };
            table.add_row([
                region,
                similarity.map_or("none".into(), |similarity| format!("{similarity:.4}")),
                band.into(),
                worker.name.clone(),
                worker.load.to_string(),
                state.into(),
                if worker.chosen && through {
                    "chosen"
                } else {
                    ""
                }
                .into(),
            ]);
        };
        for (index, region) in order {
            let through = self.region.is_none_or(|chosen| chosen == index);
            for worker in &region.workers {
                let band = if region.in_band { "in" } else { "" };
                row(index.to_string(), region.similarity, band, worker, through);
            }
        }
        for worker in &self.spare {
            row("none".into(), None, "", worker, true);
        }
        for column in [0, 1, 4] {
            if let Some(column) = table.column_mut(column) {
                column.set_cell_alignment(CellAlignment::Right);
            }
        }
        table
    }
}

#[cfg(test)]
mod tests;
