//! What each gateway knows of the decode workers: its own requests now, those of others as of when they were last told.

use eldr_core::decide::Worker;

/// What the load of a worker is counted in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
#[value(rename_all = "snake_case")]
pub enum LoadUnit {
    /// Requests in flight
    #[default]
    Requests,
    /// Tokens that they will have in the KV cache: the prompt, and the mean of the last answers
    KvTokens,
}

/// Load in flight by gateway and decode worker, in whatever unit.
#[derive(Clone, Debug)]
pub struct Views {
    workers: usize,
    live: bool,
    /// `[gateway][worker]`, as it is.
    own: Vec<u64>,
    /// Of all gateways, as it is.
    total: Vec<u64>,
    /// `[gateway][worker]`: what each knows of the others.
    others: Vec<u64>,
    available: Vec<bool>,
}

impl Views {
    /// Idle workers. Gateways that are not `live` know of each other's requests what [`share`](Self::share) told them.
    pub fn new(gateways: usize, workers: usize, live: bool) -> Self {
        Views {
            workers,
            live,
            own: vec![0; gateways * workers],
            total: vec![0; workers],
            others: vec![0; gateways * workers],
            available: vec![true; workers],
        }
    }

    /// A request of `gateway` goes to `worker`.
    pub fn enter(&mut self, gateway: usize, worker: usize, load: u64) {
        self.own[gateway * self.workers + worker] += load;
        self.total[worker] += load;
    }

    /// It is done; `load` is what it was when it came.
    pub fn leave(&mut self, gateway: usize, worker: usize, load: u64) {
        self.own[gateway * self.workers + worker] -= load;
        self.total[worker] -= load;
    }

    /// Takes a worker out, or in; every gateway knows.
    pub fn set_available(&mut self, worker: usize, available: bool) {
        self.available[worker] = available;
    }

    /// Tells every gateway what the others have in flight.
    pub fn share(&mut self) {
        for (own, others) in
            (self.own.chunks_exact(self.workers)).zip(self.others.chunks_exact_mut(self.workers))
        {
            for ((others, own), total) in others.iter_mut().zip(own).zip(&self.total) {
                *others = total - own;
            }
        }
    }

    /// The workers as `gateway` sees them, in place of what is in `out`.
    pub fn of(&self, gateway: usize, out: &mut Vec<Worker>) {
        let first = gateway * self.workers;
        let known = |worker: usize| match self.live {
            true => self.total[worker],
            false => self.own[first + worker] + self.others[first + worker],
        };
        out.clear();
        out.extend(
            self.available
                .iter()
                .enumerate()
                .map(|(worker, &available)| Worker {
                    load: known(worker) as f64,
                    available,
                }),
        );
    }
}

/// How long answers are, as a gateway knows it from the last ones: the mean of the first 64, then one that forgets.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Answers {
    mean: f64,
    count: u32,
}

impl Answers {
    /// An answer while none has ended.
    const FIRST: f64 = 256.0;
    /// About so many of the last ones count.
    const MEMORY: u32 = 64;

    pub(super) fn learn(&mut self, tokens: u32) {
        self.count = (self.count + 1).min(Self::MEMORY);
        self.mean += (f64::from(tokens) - self.mean) / f64::from(self.count);
    }

    pub(super) fn expected(self) -> u32 {
        match self.count {
            0 => Self::FIRST as u32,
            _ => self.mean.round() as u32,
        }
    }
}
