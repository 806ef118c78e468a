//! Routing by what runs on each worker.

use super::{Map, Scratch, route};
use crate::batch::Batches;
use crate::decide::{Decision, Draw, Evidence, Reason, Regions, Rule, Worker, candidates, decide};
use crate::signature::Encoded;

/// What prefill said of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Prompt<'a> {
    /// Value of the signature header.
    pub header: Option<&'a [u8]>,
    /// Prompt tokens, for signatures without `n`.
    pub tokens: Option<u64>,
    /// Tokens that the request will have in the worker's KV cache.
    pub kv_tokens: u32,
}

/// The decode workers as the gateway sees them, not empty, and what runs on each.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Fleet<'a> {
    /// Load and availability.
    pub workers: &'a [Worker],
    /// In the same order, of the rule's [`measure`](crate::decide::Policy::measure).
    pub batches: &'a Batches,
}

/// As [`route`], with the running batches for policies that look at them. [`Scratch::request`] then has what is to join the batch of the chosen worker.
pub fn route_running(
    rule: &Rule,
    map: Option<&Map>,
    prompt: Prompt<'_>,
    fleet: Fleet<'_>,
    draw: Draw,
    scratch: &mut Scratch,
) -> Decision {
    if rule.policy.measure().is_none() {
        return route(rule, map, prompt.header, fleet.workers, draw, scratch);
    }
    let none = Regions::NONE;
    let regions = map.map_or(&none, |map| &map.regions);
    let evidence = match compare(rule, map, prompt, fleet, draw, scratch) {
        Ok(similarities) => Evidence::Running {
            workers: &scratch.running,
            similarities: similarities.map(|()| scratch.similarities.as_slice()),
        },
        Err(reason) => Evidence::Missing(reason),
    };
    decide(rule, evidence, regions, fleet.workers, draw)
}

/// Sees a request without routing it: [`Scratch::request`] then has what is to join the batch of the worker that it goes to by other means.
///
/// # Errors
/// The reason why it cannot be held against these batches.
pub fn see(prompt: Prompt<'_>, batches: &Batches, scratch: &mut Scratch) -> Result<(), Reason> {
    read(prompt, batches, scratch).map(|_| ())
}

/// As [`see`], with the parsed header.
fn read<'a>(
    prompt: Prompt<'a>,
    batches: &Batches,
    scratch: &mut Scratch,
) -> Result<Encoded<'a>, Reason> {
    scratch.is_seen = false;
    let header = prompt.header.ok_or(Reason::NoSignature)?;
    let signature = Encoded::parse(header).map_err(|_| Reason::MalformedSignature)?;
    scratch.count(&signature, batches.geometry(), batches.layers())?;
    let tokens = signature.prompt_tokens().or(prompt.tokens);
    let tokens = tokens.unwrap_or_default();
    let Scratch {
        counts, request, ..
    } = scratch;
    if !batches.see(counts, tokens, prompt.kv_tokens, request) {
        return Err(Reason::MalformedSignature);
    }
    scratch.is_seen = true;
    Ok(signature)
}

/// Fills `scratch` with all that the policy goes by; inside, whether there are similarities.
fn compare(
    rule: &Rule,
    map: Option<&Map>,
    prompt: Prompt<'_>,
    fleet: Fleet<'_>,
    draw: Draw,
    scratch: &mut Scratch,
) -> Result<Result<(), Reason>, Reason> {
    scratch.is_seen = false;
    let Fleet { workers, batches } = fleet;
    if rule.policy.measure() != Some(batches.measure()) {
        return Err(Reason::Blind);
    }
    let signature = read(prompt, batches, scratch)?;
    let none = Regions::NONE;
    let (regions, similar) = match map.filter(|_| rule.policy.compares_regions()) {
        Some(map) => (&map.regions, similar(map, &signature, batches, scratch)),
        None if rule.policy.compares_regions() => (&none, Err(Reason::NoBlob)),
        None => (&none, Err(Reason::Blind)),
    };
    let Scratch {
        request,
        similarities,
        candidates: among,
        running,
        ..
    } = scratch;
    let similarities = similar.is_ok().then_some(similarities.as_slice());
    candidates(rule, similarities, regions, workers, draw, among);
    batches.to_some(rule, request, among, running);
    Ok(similar)
}

/// Fills in the similarities to the regions; `scratch` has the counts of the layers that `batches` look at.
fn similar(
    map: &Map,
    signature: &Encoded<'_>,
    batches: &Batches,
    scratch: &mut Scratch,
) -> Result<(), Reason> {
    if map.layers != batches.layers() {
        scratch.count(signature, map.geometry, &map.layers)?;
    }
    map.compare(scratch);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::batch::{Measure, spread};
    use crate::blob::{Blob, Fit};
    use crate::decide::{Policy, WorkerIndex};
    use crate::signature::{Encoding, Geometry, Signature};
    use crate::transform::Transform;

    const LAYERS: u16 = 30;
    const WORKERS: [Worker; 2] = [Worker {
        load: 1.0,
        available: true,
    }; 2];

    /// Region `i` is about expert `i` of the third layer that is selected, and served by worker `i`.
    fn map(selected: &[u16]) -> Map {
        let geometry = Geometry::new(LAYERS.into(), 2).unwrap();
        let dimension = 2 * selected.len();
        let weights = vec![1.0; dimension];
        let mut centroids = vec![0.0; 2 * dimension];
        centroids[4] = 1.0;
        centroids[dimension + 5] = 1.0;
        let names = ["a", "b"].map(str::to_owned);
        let blob = Blob {
            revision: 1,
            model: "m".into(),
            transform: Transform::new(geometry, selected.to_vec(), weights).unwrap(),
            centroids,
            tau: 0.1,
            regions: names.iter().map(|name| vec![name.clone()]).collect(),
            fit: Fit {
                quantiles: vec![vec![0.5; 7]; 2],
                requests: 2,
                rho: None,
                seed: 0,
                shares: vec![0.5; 2],
            },
            source: None,
        };
        Map::bind(blob, &names).unwrap()
    }

    /// All ten tokens of a prompt used this expert of each layer.
    fn header(expert: impl Fn(u16) -> usize) -> String {
        let geometry = Geometry::new(LAYERS.into(), 2).unwrap();
        let mut counts = vec![0; geometry.counts()];
        for layer in 0..LAYERS {
            counts[2 * usize::from(layer) + expert(layer)] = 10;
        }
        let signature = Signature::dense(geometry, counts, Some(10)).unwrap();
        signature.encode(Encoding::Varint)
    }

    #[test]
    fn batches_look_at_a_dozen_of_the_layers_that_regions_are_compared_by() {
        let selected: Vec<u16> = (0..LAYERS).filter(|layer| layer % 6 > 0).collect();
        let map = map(&selected);
        let mut batches = map.batches(Measure::Usage, 2);
        let looked_at = batches.layers().to_vec();
        assert_eq!(looked_at, spread(&selected));
        assert!(looked_at.len() == 12 && !looked_at.contains(&selected[2]));

        let mut scratch = Scratch::default();
        for (worker, expert) in [(0, 1), (1, 0)] {
            let header = header(|_| expert);
            let prompt = Prompt {
                header: Some(header.as_bytes()),
                ..Prompt::default()
            };
            see(prompt, &batches, &mut scratch).unwrap();
            let footprint = scratch.request().unwrap().footprint();
            batches.join(WorkerIndex(worker), &footprint);
        }
        let mut choose = |policy, header: &str| {
            let rule = Rule {
                tau: 0.1,
                ..Rule::of(policy)
            };
            let prompt = Prompt {
                header: Some(header.as_bytes()),
                ..Prompt::default()
            };
            let fleet = Fleet {
                workers: &WORKERS,
                batches: &batches,
            };
            let draw = Draw {
                sequence: 0,
                entropy: 0,
            };
            let decision = route_running(&rule, Some(&map), prompt, fleet, draw, &mut scratch);
            (decision.target.0, decision.reason)
        };
        // Worker 1 runs expert 0 everywhere, worker 0 expert 1; regions are about the same experts the other way round.
        for expert in [0, 1] {
            let alike = header(|_| expert);
            assert_eq!(
                choose(Policy::Marginal, &alike),
                (1 - expert, Reason::Marginal)
            );
            assert_eq!(choose(Policy::Hybrid, &alike), (expert, Reason::Marginal));
            // What differs where batches do not look moves regions alone.
            let other = header(|layer| match looked_at.contains(&layer) {
                true => expert,
                false => 1 - expert,
            });
            assert_eq!(
                choose(Policy::Marginal, &other),
                (1 - expert, Reason::Marginal)
            );
            assert_eq!(
                choose(Policy::Hybrid, &other),
                (1 - expert, Reason::Marginal)
            );
        }
    }
}
