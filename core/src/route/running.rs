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
