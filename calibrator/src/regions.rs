//! Which workers serve which region, for any number of either.
//!
//! Regions and workers are laid along a line of length 1, each in equal parts; a worker serves every region that its part overlaps.
//! As many regions as workers: one each. Fewer: several workers each. More: a worker serves several. Numbers that do not divide:
//! neighbours share a worker. Since regions have equal shares of the requests, there is always a way to give every worker an equal
//! share of them: by the overlaps. So that neighbours on the line are alike, regions are ordered by similarity first.

use eldr_core::similarity::dot;

use crate::assign::assign;
use crate::kmeans::Vectors;

/// Every worker once, in the order in which the regions, which `served_by` lists the workers of, name them.
pub fn workers(served_by: &[Vec<String>]) -> Vec<String> {
    let mut workers: Vec<String> = Vec::new();
    for name in served_by.iter().flatten() {
        if !workers.contains(name) {
            workers.push(name.clone());
        }
    }
    workers
}

/// The workers of each region, given its unit centroid, ascending, for workers that are all alike: places on the line.
///
/// # Panics
/// If there is no worker.
pub fn lay_out(centroids: Vectors<'_>, workers: usize) -> Vec<Vec<usize>> {
    assert!(workers > 0, "regions need workers");
    let regions = centroids.len();
    let mut served_by = vec![Vec::new(); regions];
    for (place, region) in order(centroids, workers).into_iter().enumerate() {
        // In units of 1 / (regions × workers), regions are `workers` long and workers `regions`.
        let (start, end) = (place * workers, (place + 1) * workers);
        served_by[region] = (start / regions..end.div_ceil(regions)).collect();
    }
    served_by
}

/// The order of the regions along the line: each followed by the most similar one that is left. As they are where no worker has
/// several regions.
fn order(centroids: Vectors<'_>, workers: usize) -> Vec<usize> {
    let mut left: Vec<usize> = (0..centroids.len()).collect();
    if workers.is_multiple_of(centroids.len().max(1)) {
        return left;
    }
    let mut order = vec![left.remove(0)];
    while !left.is_empty() {
        let last = order[order.len() - 1];
        let similarity = |place: usize| dot(centroids.row(last), centroids.row(left[place]));
        let nearest = (0..left.len()).reduce(|best, place| {
            if similarity(place) > similarity(best) {
                place
            } else {
                best
            }
        });
        order.push(left.remove(nearest.unwrap_or(0)));
    }
    order
}

/// Gives the regions, which `before` lists the workers of, to `workers` instead, with the least change of roles: of all ways to
/// put workers on the line, the one in which most keep regions that they served, and the others get the most similar ones.
///
/// # Panics
/// If there is no worker, or not one list per region.
pub fn reassign(
    centroids: Vectors<'_>,
    before: &[Vec<String>],
    workers: &[String],
) -> Vec<Vec<String>> {
    assert_eq!(
        before.len(),
        centroids.len(),
        "one list of workers per region"
    );
    let served_by = lay_out(centroids, workers.len());
    let regions_at: Vec<Vec<usize>> = (0..workers.len())
        .map(|place| regions_of(&served_by, |served| served.contains(&place)))
        .collect();
    let mut costs = Vec::with_capacity(workers.len() * workers.len());
    for worker in workers {
        let had = regions_of(before, |served| served.contains(worker));
        costs.extend(regions_at.iter().map(|gets| {
            let kept = |region: &usize| {
                let similarities = had.iter().map(|&had| {
                    // Its own region counts for more than the most similar other.
                    if had == *region {
                        2.0
                    } else {
                        dot(centroids.row(had), centroids.row(*region))
                    }
                });
                similarities.fold(0.0f32, f32::max)
            };
            -gets.iter().map(kept).sum::<f32>() / gets.len().max(1) as f32
        }));
    }
    let mut at = vec![String::new(); workers.len()];
    for (worker, place) in assign(&costs, 1, &mut vec![0; workers.len()])
        .into_iter()
        .enumerate()
    {
        at[place].clone_from(&workers[worker]);
    }
    let names = |places: Vec<usize>| places.into_iter().map(|place| at[place].clone()).collect();
    served_by.into_iter().map(names).collect()
}

fn regions_of<T>(served_by: &[Vec<T>], serves: impl Fn(&[T]) -> bool) -> Vec<usize> {
    (0..served_by.len())
        .filter(|&region| serves(&served_by[region]))
        .collect()
}

/// Numbers of regions to try for `workers`, largest first: one worker each, then several; never just one region where there are
/// two workers, as that tells nothing apart. At most `requests`.
pub fn candidates(workers: usize, requests: usize) -> Vec<usize> {
    let mut candidates: Vec<usize> = [(1, 1), (3, 4), (1, 2), (1, 3), (1, 4), (1, 8)]
        .into_iter()
        .map(|(part, of)| (workers * part / of).max(2))
        .map(|regions| regions.min(workers).min(requests).max(1))
        .collect();
    candidates.dedup();
    candidates
}

#[cfg(test)]
mod tests;
