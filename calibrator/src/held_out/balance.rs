//! How evenly a gateway would spread requests over workers.

use eldr_core::decide::{Draw, Evidence, Regions, Rule, Worker, WorkerIndex, decide};
use rand::seq::SliceRandom as _;

use super::{Stream, rng};

/// Requests that the busiest worker may get, as a multiple of the mean, if regions are to count as balanced: the load cap that gateways
/// have by default. Above it, the cap sends requests to other regions than their own all the time, not only in a rush.
pub const BUSIEST_MAX: f64 = 1.25;
/// Requests in flight per worker: with more, a band evens out more.
const IN_FLIGHT_PER_WORKER: usize = 8;
/// How many times the requests in flight are replaced, at least.
const TURNOVERS: usize = 6;

/// Routes requests as a gateway does with the rule `band` and no load cap, and returns how many the busiest worker gets, as a
/// multiple of the mean.
///
/// `similarities` are row-major `[request][region]`; requests arrive in random order, again and again, and each stays until as many
/// have come after it as there may be in flight.
pub fn busiest(similarities: &[f32], served_by: &[Vec<usize>], tau: f32, seed: u64) -> f64 {
    let regions = served_by.len();
    let workers = served_by.iter().flatten().max().map_or(0, |last| last + 1);
    let indices = |served: &Vec<usize>| served.iter().copied().map(WorkerIndex).collect();
    let served_by = Regions::new(served_by.iter().map(indices).collect());
    let rule = Rule {
        tau,
        max_load_factor: None,
        ..Rule::default()
    };
    let draw = Draw {
        sequence: 0,
        entropy: 0,
    };

    let in_flight = workers * IN_FLIGHT_PER_WORKER;
    let mut order: Vec<usize> = (0..similarities.len() / regions).collect();
    let mut rng = rng(seed, Stream::Arrivals);
    let idle = Worker {
        load: 0.0,
        available: true,
    };
    let mut loads = vec![idle; workers];
    let mut chosen: Vec<usize> = Vec::new();
    // Everybody arrives equally often.
    while chosen.len() < in_flight * TURNOVERS {
        order.shuffle(&mut rng);
        for &request in &order {
            if let Some(gone) = chosen.len().checked_sub(in_flight) {
                loads[chosen[gone]].load -= 1.0;
            }
            let evidence = Evidence::Similarities(&similarities[request * regions..][..regions]);
            let target = decide(&rule, evidence, &served_by, &loads, draw).target.0;
            loads[target].load += 1.0;
            chosen.push(target);
        }
    }
    let mut counts = vec![0usize; workers];
    chosen.iter().for_each(|&worker| counts[worker] += 1);
    let most = counts.iter().copied().max().unwrap_or_default();
    (most * workers) as f64 / chosen.len() as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one_each(workers: usize) -> Vec<Vec<usize>> {
        (0..workers).map(|worker| vec![worker]).collect()
    }

    #[test]
    fn requests_that_are_like_every_region_spread_evenly() {
        assert_eq!(busiest(&[0.5; 40], &one_each(4), 0.1, 1), 1.0);
    }

    #[test]
    fn requests_of_one_region_all_go_to_its_worker() {
        let similarities = [0.9, 0.1, 0.1, 0.1].repeat(10);
        assert_eq!(busiest(&similarities, &one_each(4), 0.1, 1), 4.0);
    }

    #[test]
    fn several_workers_share_their_region() {
        let similarities = [0.9, 0.1].repeat(10);
        let served_by = vec![vec![0, 1], vec![2, 3]];
        assert_eq!(busiest(&similarities, &served_by, 0.1, 1), 2.0);
    }

    #[test]
    fn two_regions_of_equal_traffic_are_even() {
        let similarities: Vec<f32> = (0..40)
            .flat_map(|request| [0.9, 0.2].map(|s| if request % 2 == 0 { s } else { 1.1 - s }))
            .collect();
        let most = busiest(&similarities, &one_each(2), 0.1, 1);
        assert!(most > 0.99 && most < 1.1, "{most}");
        assert_eq!(most, busiest(&similarities, &one_each(2), 0.1, 1));
    }
}
