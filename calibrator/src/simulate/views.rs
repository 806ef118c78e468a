//! What each gateway knows of the decode workers: its own requests now, those of others as of when they were last told.

use eldr_core::decide::Worker;

/// Requests in flight by gateway and decode worker.
#[derive(Clone, Debug)]
pub struct Views {
    workers: usize,
    live: bool,
    /// `[gateway][worker]`, as it is.
    own: Vec<u32>,
    /// Of all gateways, as it is.
    total: Vec<u32>,
    /// `[gateway][worker]`: what each knows of the others.
    others: Vec<u32>,
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
    pub fn enter(&mut self, gateway: usize, worker: usize) {
        self.own[gateway * self.workers + worker] += 1;
        self.total[worker] += 1;
    }

    /// It is done.
    pub fn leave(&mut self, gateway: usize, worker: usize) {
        self.own[gateway * self.workers + worker] -= 1;
        self.total[worker] -= 1;
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
                    load: known(worker).into(),
                    available,
                }),
        );
    }
}
