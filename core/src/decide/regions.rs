//! The band: regions nearly as similar as the best, and the worker chosen among theirs.

use super::candidates::lots;
use super::{
    Decision, Draw, Policy, Reason, RegionIndex, Regions, Rule, Tie, Worker, WorkerIndex, at,
    load_limit,
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

/// A worker that may take the request, by a region of the band.
#[derive(Debug, Clone, Copy)]
pub(super) struct Member {
    pub worker: WorkerIndex,
    pub load: f64,
    pub region: RegionIndex,
    pub similarity: f32,
}

/// The band, as wide as it had to become.
pub(super) struct Band {
    /// Similarity of the most similar region.
    top: f32,
    /// Regions within tau of it.
    regions: usize,
}

/// Tells `each` of the members of the band, which widens until there is one, by region; of a worker that serves several regions of it,
/// several times. `None` where nobody may take the request.
pub(super) fn members(
    rule: &Rule,
    similarities: &[f32],
    regions: &Regions,
    workers: &[Worker],
    mut each: impl FnMut(Member),
) -> Option<Band> {
    let (best, top) = first_max(similarities, |_, _| true)?;
    let Bounds {
        mut threshold,
        load: limit,
    } = bounds(rule, similarities, regions, workers)?;
    let band = similarities
        .iter()
        .filter(|&&similarity| similarity >= threshold)
        .count();
    let wide = rule.policy != Policy::Top1 && rule.tau > 0.0;
    let widens = rule.widen_single && wide && band == 1;
    let second = match widens {
        true => first_max(similarities, |region, _| region != best).map(|(region, _)| region),
        false => None,
    };
    loop {
        let mut found = false;
        let by_region = similarities.iter().zip(&regions.served_by).enumerate();
        for (region, (&similarity, served_by)) in by_region {
            if similarity < threshold && Some(region) != second || similarity.is_nan() {
                continue;
            }
            for &index in served_by {
                let Some(worker) = workers.get(index.0) else {
                    continue;
                };
                if worker.available && worker.load <= limit {
                    found = true;
                    each(Member {
                        worker: index,
                        load: worker.load,
                        region: RegionIndex(region),
                        similarity,
                    });
                }
            }
        }
        if found {
            return Some(Band {
                top,
                regions: band + usize::from(second.is_some()),
            });
        }
        // Nobody there may take the request: widen to the next most similar region.
        threshold = first_max(similarities, |_, similarity| similarity < threshold)?.1;
    }
}

/// The best worker of the band; `None` where nobody may take the request.
pub(super) fn choose(
    rule: &Rule,
    similarities: &[f32],
    growth: Option<&[f64]>,
    regions: &Regions,
    workers: &[Worker],
    draw: Draw,
) -> Option<Decision> {
    let growth = growth.filter(|_| rule.policy == Policy::Hybrid);
    let reason = match rule.policy {
        Policy::Top1 => Reason::Top1,
        _ if growth.is_some() => Reason::Marginal,
        _ => Reason::InBand,
    };
    let mut best: Option<(f64, Member)> = None;
    let mut take = |member: Member| {
        let cost = growth.map_or(0.0, |growth| at(growth, member.worker.0));
        let better = best.is_none_or(|(least, chosen)| {
            let by_load = (cost.total_cmp(&least)).then(member.load.total_cmp(&chosen.load));
            let by_similarity = match rule.tie {
                Tie::Similar => chosen.similarity.total_cmp(&member.similarity),
                Tie::Index => std::cmp::Ordering::Equal,
            };
            let by_index = member.worker.cmp(&chosen.worker);
            by_load.then(by_similarity).then(by_index).is_lt()
        });
        if better {
            best = Some((cost, member));
        }
    };
    let band = match rule.candidates.filter(|_| growth.is_none()) {
        None => members(rule, similarities, regions, workers, take)?,
        // Where there is growth, who computed it has drawn.
        Some(wanted) => {
            let mut all = Vec::new();
            let band = members(rule, similarities, regions, workers, |member| {
                all.push(member);
            });
            lots(&mut all, wanted as usize, draw);
            all.into_iter().for_each(&mut take);
            band?
        }
    };
    best.map(|(_, chosen)| Decision {
        target: chosen.worker,
        reason,
        region: Some(chosen.region),
        similarity: Some(chosen.similarity),
        top: Some(band.top),
        band: band.regions,
    })
}

/// The largest similarity that `accept`s, and the lowest region that has it.
fn first_max(similarities: &[f32], accept: impl Fn(usize, f32) -> bool) -> Option<(usize, f32)> {
    let candidates = similarities.iter().copied().enumerate();
    candidates
        .filter(|&(region, similarity)| !similarity.is_nan() && accept(region, similarity))
        .reduce(|best, next| if next.1 > best.1 { next } else { best })
}
