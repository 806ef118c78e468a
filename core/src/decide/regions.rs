//! The band: regions nearly as similar as the best, and the worker chosen among theirs.

use super::{
    Decision, Policy, Reason, RegionIndex, Regions, Rule, Tie, Worker, WorkerIndex, at, load_limit,
};

/// What a policy that looks at signatures measures regions and workers by.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Bounds {
    /// Similarity from which on a region is in the band, before the band is widened.
    pub threshold: f32,
    /// Highest load that a candidate may have; infinite without a cap.
    pub load: f64,
}

/// The bounds of a decision; `None` where no similarity is a number.
pub fn bounds(
    rule: &Rule,
    similarities: &[f32],
    regions: &Regions,
    workers: &[Worker],
) -> Option<Bounds> {
    let (_, top) = first_max(similarities, |_, _| true)?;
    let tau = match rule.policy {
        Policy::Top1 => 0.0,
        _ => rule.tau,
    };
    let serving = regions.serving.iter();
    let serving = serving.filter_map(|index| workers.get(index.0));
    Some(Bounds {
        threshold: top - tau,
        load: load_limit(rule.max_load_factor, serving),
    })
}

/// The best worker of the band, which widens until there is one; `None` where nobody may take the request.
pub(super) fn choose(
    rule: &Rule,
    similarities: &[f32],
    growth: Option<&[f64]>,
    regions: &Regions,
    workers: &[Worker],
) -> Option<Decision> {
    let growth = growth.filter(|_| rule.policy == Policy::Hybrid);
    let (best, top) = first_max(similarities, |_, _| true)?;
    let Bounds {
        mut threshold,
        load: limit,
    } = bounds(rule, similarities, regions, workers)?;
    let (tau, reason) = match rule.policy {
        Policy::Top1 => (0.0, Reason::Top1),
        Policy::Hybrid if growth.is_some() => (rule.tau, Reason::Marginal),
        _ => (rule.tau, Reason::InBand),
    };
    let band = similarities
        .iter()
        .filter(|&&similarity| similarity >= threshold)
        .count();
    let second = if rule.widen_single && tau > 0.0 && band == 1 {
        first_max(similarities, |region, _| region != best).map(|(region, _)| region)
    } else {
        None
    };
    loop {
        let member =
            |region: usize, similarity: f32| similarity >= threshold || Some(region) == second;
        if let Some((target, region, similarity)) = best_member(
            rule.tie,
            similarities,
            growth,
            member,
            regions,
            workers,
            limit,
        ) {
            return Some(Decision {
                target,
                reason,
                region: Some(region),
                similarity: Some(similarity),
                top: Some(top),
                band: band + usize::from(second.is_some()),
            });
        }
        // Nobody there may take the request: widen to the next most similar region.
        threshold = first_max(similarities, |_, similarity| similarity < threshold)?.1;
    }
}

/// The largest similarity that `accept`s, and the lowest region that has it.
fn first_max(similarities: &[f32], accept: impl Fn(usize, f32) -> bool) -> Option<(usize, f32)> {
    let candidates = similarities.iter().copied().enumerate();
    candidates
        .filter(|&(region, similarity)| !similarity.is_nan() && accept(region, similarity))
        .reduce(|best, next| if next.1 > best.1 { next } else { best })
}

/// Among the workers of member regions: the one with the least growth, where that is known, or the least load.
fn best_member(
    tie: Tie,
    similarities: &[f32],
    growth: Option<&[f64]>,
    member: impl Fn(usize, f32) -> bool,
    regions: &Regions,
    workers: &[Worker],
    limit: f64,
) -> Option<(WorkerIndex, RegionIndex, f32)> {
    type Member = (f64, f64, WorkerIndex, RegionIndex, f32);
    let mut best: Option<Member> = None;
    for (region, (&similarity, served_by)) in
        similarities.iter().zip(&regions.served_by).enumerate()
    {
        if !member(region, similarity) {
            continue;
        }
        for &index in served_by {
            let Some(worker) = workers.get(index.0) else {
                continue;
            };
            if !worker.available || worker.load > limit {
                continue;
            }
            let cost = growth.map_or(0.0, |growth| at(growth, index.0));
            let better = best.is_none_or(|(least, load, chosen, _, chosen_similarity)| {
                let by_load = cost.total_cmp(&least).then(worker.load.total_cmp(&load));
                let by_similarity = match tie {
                    Tie::Similar => chosen_similarity.total_cmp(&similarity),
                    Tie::Index => std::cmp::Ordering::Equal,
                };
                by_load.then(by_similarity).then(index.cmp(&chosen)).is_lt()
            });
            if better {
                best = Some((cost, worker.load, index, RegionIndex(region), similarity));
            }
        }
    }
    best.map(|(_, _, worker, region, similarity)| (worker, region, similarity))
}
