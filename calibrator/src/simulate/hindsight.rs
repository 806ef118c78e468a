//! How good an assignment of a whole run can be, found by somebody who knows all of it: the limit of every policy.
//!
//! The search starts from the best run of the other policies, and improves it in rounds. A round takes some of the requests in
//! turn, all at first, off their workers and puts each where the sum of step times to a power grows least over its *whole* life,
//! with all others where they are, those too that come later: the rule of `marginal` with true usage and a look ahead. That is
//! judged at moments spread over the run, with requests living as long as they did before, so it is only a guess; the round is then
//! simulated, and undone unless it is better. After one that is undone the next moves half as many, down to single requests.
//!
//! It is no proof: a better assignment may exist. What it finds bounds from one side what there is to gain.

use eldr_core::batch::{Batches, Measure, Request};
use eldr_core::decide::{Decision, Evidence, Policy, Reason, Regions, Rule, WorkerIndex, decide};
use eldr_core::engine::StepModel;
use eldr_core::marginal::Objective;
use rand::RngExt as _;
use rand::seq::SliceRandom as _;
use rand_chacha::ChaCha8Rng;

use super::arrivals::Arrival;
use super::events::{Served, run_served};
use super::measure::Outcome;
use super::policy::{Ask, Router};
use super::workload::Workload;
use super::{Cluster, Stream, rng};

/// Rounds of a search, each as long as a run or a few.
pub const ROUNDS: usize = 24;
/// Moments of a life at which batches are looked at.
const MOMENTS: f64 = 8.0;
/// Most bytes that batches of all moments may take; layers are left out beyond.
const BYTES_MAX: usize = 96 << 20;
/// Bytes of a batch per layer and expert: its sums, and what follows from them.
const CELL_BYTES: usize = 8;

/// What is to be small over the run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Goal {
    /// The mean time per output token.
    #[default]
    Mean,
    /// Its 99th percentile.
    P99,
}

impl Goal {
    /// What of an outcome it is.
    pub fn of(self, outcome: &Outcome) -> f64 {
        match self {
            Goal::Mean => outcome.tpot_ms.mean,
            Goal::P99 => outcome.tpot_ms.p99,
        }
    }

    /// The power of step times in a round: several are tried, as none serves the goal exactly.
    fn exponent(self, round: usize) -> u32 {
        let exponents = match self {
            Goal::Mean => [1, 2],
            Goal::P99 => [4, 8],
        };
        exponents[round % exponents.len()]
    }
}

/// A run to be improved.
#[derive(Clone, Copy, Debug)]
pub struct Search<'a> {
    /// What serves.
    pub cluster: &'a Cluster,
    /// What is asked for.
    pub workload: &'a Workload,
    /// When.
    pub arrivals: &'a [Arrival],
    /// What is to be small.
    pub goal: Goal,
    /// Chance of the search.
    pub seed: u64,
    /// How often it may simulate the run.
    pub rounds: usize,
}

impl Search<'_> {
    /// A run to start from where there is no other.
    pub fn least_loaded(&self) -> (Outcome, Vec<Served>) {
        run_served(
            self.cluster,
            self.workload,
            self.arrivals,
            &mut Fixed { workers: &[] },
        )
    }

    /// The best found from `start` on, which is never worse than that.
    pub fn improve(&self, start: (Outcome, Vec<Served>)) -> Outcome {
        let mut rng = rng(self.seed, Stream::Hindsight);
        let usage: Vec<Vec<f32>> = self
            .workload
            .requests
            .iter()
            .map(|request| request.experts.usage())
            .collect();
        let (mut best, mut served) = start;
        let mut moved = self.arrivals.len();
        for round in 0..self.rounds {
            let step = self.cluster.step;
            let objective = Objective {
                exponent: self.goal.exponent(round),
                step,
            };
            let order = self.some(moved, &mut rng);
            let mut workers: Vec<usize> = served.iter().map(|served| served.worker).collect();
            let mut moments = Moments::new(self, &usage, &served, step);
            let mut any = false;
            for index in order {
                let worker = moments.place(index, workers[index], objective);
                any |= worker != workers[index];
                workers[index] = worker;
            }
            if !any {
                // All are where they seem best. Chance may know better.
                let index = rng.random_range(0..workers.len());
                workers[index] = rng.random_range(0..self.cluster.decode_workers);
            }
            let mut fixed = Fixed { workers: &workers };
            let found = run_served(self.cluster, self.workload, self.arrivals, &mut fixed);
            if self.goal.of(&found.0) < self.goal.of(&best) {
                (best, served) = found;
            } else {
                moved = moved.div_ceil(2);
            }
        }
        best
    }

    /// So many of the requests, in random order.
    fn some(&self, count: usize, rng: &mut ChaCha8Rng) -> Vec<usize> {
        let mut order: Vec<usize> = (0..self.arrivals.len()).collect();
        order.shuffle(rng);
        order.truncate(count);
        order
    }
}

/// The batches of all workers at moments of the run.
struct Moments<'a> {
    search: &'a Search<'a>,
    usage: &'a [Vec<f32>],
    /// By arrival: the moments of its life.
    lives: Vec<std::ops::Range<usize>>,
    batches: Vec<Batches>,
    rule: Rule,
    request: Request,
    /// Usage of the layers that are looked at.
    counts: Vec<f32>,
    growth: Vec<f64>,
}

impl<'a> Moments<'a> {
    fn new(
        search: &'a Search<'a>,
        usage: &'a [Vec<f32>],
        served: &[Served],
        step: StepModel,
    ) -> Self {
        let seconds = |served: &Served| (served.until - served.from).as_secs_f64();
        let mean = served.iter().map(seconds).sum::<f64>() / served.len().max(1) as f64;
        let ends = served.iter().map(|served| served.until.as_secs_f64());
        let end = ends.fold(0.0, f64::max);
        // Long tails of a few requests need no more moments than the rest.
        let apart = (mean / MOMENTS).max(end / 4096.0).max(1e-6);
        let at = |time: std::time::Duration| (time.as_secs_f64() / apart) as usize;
        let lives = served.iter().map(|served| {
            let (from, until) = (at(served.from), at(served.until));
            from..until.max(from + 1)
        });
        let lives: Vec<_> = lives.collect();
        let moments = lives.iter().map(|life| life.end).max().unwrap_or_default();
        let geometry = search.workload.geometry;
        let workers = search.cluster.decode_workers;
        let layer_bytes = moments * workers * geometry.experts * CELL_BYTES;
        let layers = (BYTES_MAX / layer_bytes.max(1)).clamp(1, geometry.layers);
        // Spread over the model.
        let layers = (0..layers).map(|layer| (layer * geometry.layers / layers) as u16);
        let idle = Batches::new(Measure::Usage, geometry, layers.collect(), workers);
        let mut moments = Moments {
            search,
            usage,
            lives,
            batches: idle.map_or_else(|_| Vec::new(), |idle| vec![idle; moments]),
            rule: Rule {
                objective: Objective { exponent: 1, step },
                ..Rule::of(Policy::Marginal)
            },
            request: Request::default(),
            counts: Vec::new(),
            growth: Vec::new(),
        };
        for (index, served) in served.iter().enumerate() {
            moments.see(index);
            let footprint = moments.request.footprint();
            for moment in moments.lives[index].clone() {
                moments.batches[moment].join(WorkerIndex(served.worker), &footprint);
            }
        }
        moments
    }

    /// Puts the usage of arrival `index` into `request`.
    fn see(&mut self, index: usize) {
        let Some(batches) = self.batches.first() else {
            return;
        };
        let arrival = &self.search.arrivals[index];
        let experts = batches.geometry().experts;
        self.counts.clear();
        let usage = &self.usage[arrival.request];
        for &layer in batches.layers() {
            self.counts
                .extend(&usage[usize::from(layer) * experts..][..experts]);
        }
        let kv_tokens = arrival
            .prompt_tokens
            .saturating_add(arrival.decode_tokens / 2);
        batches.see(&self.counts, 1, kv_tokens, &mut self.request);
    }

    /// Moves the arrival from worker `from` to where it costs least over its life, and says where that is.
    fn place(&mut self, index: usize, from: usize, objective: Objective) -> usize {
        self.see(index);
        self.rule.objective = objective;
        let footprint = self.request.footprint();
        let mut costs = vec![0.0; self.search.cluster.decode_workers];
        for batches in &mut self.batches[self.lives[index].clone()] {
            batches.leave(WorkerIndex(from), &footprint);
            batches.to_each(&self.rule, &self.request, &mut self.growth);
            for (cost, growth) in costs.iter_mut().zip(&self.growth) {
                *cost += growth;
            }
        }
        // Who is as well where it is stays.
        let less = |best: usize, next: usize| {
            if costs[next] < costs[best] {
                next
            } else {
                best
            }
        };
        let to = (0..costs.len()).fold(from, less);
        for batches in &mut self.batches[self.lives[index].clone()] {
            batches.join(WorkerIndex(to), &footprint);
        }
        to
    }
}

/// Sends every arrival where it is said; where nothing is, or that worker is out, to the least loaded.
struct Fixed<'a> {
    workers: &'a [usize],
}

impl Router for Fixed<'_> {
    fn choose(&mut self, ask: Ask<'_>) -> Decision {
        let Ask { workers, draw, .. } = ask;
        let rule = Rule::of(Policy::LeastLoaded);
        let nothing = Evidence::Missing(Reason::Blind);
        let decision = decide(&rule, nothing, &Regions::NONE, workers, draw);
        match self.workers.get(ask.arrival) {
            Some(&worker) if workers[worker].available => Decision {
                target: WorkerIndex(worker),
                ..decision
            },
            _ => decision,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::simulate::tests::{GEOMETRY, arrival, cluster, request, workload};

    fn of_four_tokens(at_ms: u64, request: usize) -> Arrival {
        Arrival {
            decode_tokens: 4,
            ..arrival(at_ms, request)
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]
        /// Against all assignments there are.
        #[test]
        fn the_best_found_is_between_the_start_and_the_best_there_is(
            experts in prop::collection::vec(prop::collection::btree_set(0..GEOMETRY.experts as u16, 3), 2..4),
            coming in prop::collection::vec((0u64..60, any::<prop::sample::Index>()), 2..7),
            (seed, goal) in (any::<u64>(), prop::sample::select(vec![Goal::Mean, Goal::P99])),
        ) {
            let requests = experts.iter().map(|experts| {
                request("a", &experts.iter().copied().collect::<Vec<_>>(), 4)
            });
            let workload = workload(requests.collect());
            let mut arrivals: Vec<Arrival> = coming
                .iter()
                .map(|(at, which)| of_four_tokens(*at, which.index(experts.len())))
                .collect();
            arrivals.sort_by_key(|arrival| arrival.at);
            let cluster = cluster(2);
            let of = |assignment: usize| {
                let workers: Vec<usize> = (0..arrivals.len()).map(|n| (assignment >> n) & 1).collect();
                run_served(&cluster, &workload, &arrivals, &mut Fixed { workers: &workers })
            };
            let all = (0..1 << arrivals.len()).map(|assignment| goal.of(&of(assignment).0));
            let best = all.fold(f64::INFINITY, f64::min);
            let start = of(0);
            let from = goal.of(&start.0);
            let search = |rounds| Search {
                cluster: &cluster,
                workload: &workload,
                arrivals: &arrivals,
                goal,
                seed,
                rounds,
            };
            let few = goal.of(&search(3).improve(start.clone()));
            let many = goal.of(&search(60).improve(start.clone()));
            prop_assert!(best <= many && many <= few && few <= from, "{best}, {many}, {few}, {from}");
            prop_assert_eq!(search(60).improve(start.clone()), search(60).improve(start));
        }
    }

    #[test]
    fn two_kinds_that_came_mixed_are_told_apart() {
        let workload = workload(vec![
            request("a", &[0, 1, 2], 4),
            request("b", &[4, 5, 6], 4),
        ]);
        let cluster = Cluster {
            prefill_workers: 0,
            ..cluster(2)
        };
        let arrivals: Vec<Arrival> = (0..8).map(|n| of_four_tokens(0, n / 2 % 2)).collect();
        // In turn, so that each worker has both kinds.
        let mixed: Vec<usize> = (0..8).map(|n| n % 2).collect();
        let mut mixed = Fixed { workers: &mixed };
        let start = run_served(&cluster, &workload, &arrivals, &mut mixed);
        assert_eq!(start.0.tpot_ms.mean, 16.0);
        for goal in [Goal::Mean, Goal::P99] {
            let search = Search {
                cluster: &cluster,
                workload: &workload,
                arrivals: &arrivals,
                goal,
                seed: 1,
                rounds: 40,
            };
            let found = search.improve(start.clone());
            assert_eq!((found.tpot_ms.mean, found.tpot_ms.p99), (13.0, 13.0));
        }
    }
}
