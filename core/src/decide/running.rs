//! Choices by the running batches alone: every available worker is a candidate, whatever regions it serves.

use super::{Decision, Reason, Rule, Worker, WorkerIndex, at, available, load_limit};

/// The worker with the least growth among those below the cap; of equal ones the less loaded, then the lower index.
pub(super) fn least_growth(rule: &Rule, growth: &[f64], workers: &[Worker]) -> Option<Decision> {
    let limit = load_limit(rule.max_load_factor, workers.iter());
    available(workers)
        .filter(|(_, worker)| worker.load <= limit)
        .min_by(|(a, x), (b, y)| {
            let by_growth = at(growth, *a).total_cmp(&at(growth, *b));
            by_growth.then(x.load.total_cmp(&y.load))
        })
        .map(|(index, _)| Decision {
            target: WorkerIndex(index),
            reason: Reason::Marginal,
            region: None,
            similarity: None,
            top: None,
            band: 0,
        })
}

/// The least loaded worker whose batch is within tau of the most similar one; the cap and ties as with regions.
///
/// A worker of whose batch nothing is known, an idle one above all, is as good as the best: it goes by load.
pub(super) fn band(rule: &Rule, cosines: &[f64], workers: &[Worker]) -> Option<Decision> {
    let limit = load_limit(rule.max_load_factor, workers.iter());
    let known = |index: usize| {
        cosines
            .get(index)
            .copied()
            .filter(|cosine| !cosine.is_nan())
    };
    let most = |most: f64, cosine: f64| most.max(cosine);
    let top = available(workers)
        .filter_map(|(index, _)| known(index))
        .reduce(most);
    let cosine = |index: usize| known(index).or(top).unwrap_or_default();
    let candidates = || {
        let below = available(workers).filter(|(_, worker)| worker.load <= limit);
        below.map(|(index, worker)| (index, cosine(index), worker.load))
    };
    let threshold = top.unwrap_or_default() - f64::from(rule.tau);
    // If nobody in the band may take the request, the band widens to the most similar one that may.
    let nearest = candidates().map(|(_, cosine, _)| cosine).reduce(most)?;
    let (index, similarity, _) = candidates()
        .filter(|(_, cosine, _)| *cosine >= threshold.min(nearest))
        .min_by(|(_, a, x), (_, b, y)| x.total_cmp(y).then(b.total_cmp(a)))?;
    let in_band = |(index, _): &(usize, &Worker)| cosine(*index) >= threshold;
    Some(Decision {
        target: WorkerIndex(index),
        reason: Reason::InBand,
        region: None,
        similarity: top.map(|_| similarity as f32),
        top: top.map(|top| top as f32),
        band: available(workers).filter(in_band).count(),
    })
}
