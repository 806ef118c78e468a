//! The rolling window of requests that a refit looks at.

use std::collections::VecDeque;

/// How long the window is, and how often it is due. Times are seconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Limits {
    /// Requests older than this are forgotten.
    pub age: f64,
    /// Most requests that are kept; the oldest make room.
    pub requests: usize,
    /// Fewest requests per region to refit to.
    pub requests_per_region: usize,
    /// Time between two refits, at least.
    pub interval: f64,
}

/// Unit vectors of recent requests, oldest first. Time is an argument and never goes back.
#[derive(Clone, Debug)]
pub struct Window {
    limits: Limits,
    dimension: usize,
    times: VecDeque<f64>,
    values: VecDeque<f32>,
    /// When the next refit may be.
    next: Option<f64>,
}

impl Window {
    /// An empty window of vectors of `dimension` values.
    pub fn new(dimension: usize, limits: Limits) -> Self {
        Window {
            limits,
            dimension,
            times: VecDeque::new(),
            values: VecDeque::new(),
            next: None,
        }
    }

    /// A request came. One without any weighted count (a zero vector) tells nothing and is not kept.
    ///
    /// # Panics
    /// If the vector has another dimension.
    pub fn push(&mut self, now: f64, vector: &[f32]) {
        assert_eq!(vector.len(), self.dimension, "a vector of the window");
        // The first refit waits until the window has been filled once.
        self.next.get_or_insert(now + self.limits.age);
        self.forget(now);
        if vector.iter().all(|&value| value == 0.0) {
            return;
        }
        if self.times.len() == self.limits.requests {
            self.pop();
        }
        self.times.push_back(now);
        self.values.extend(vector);
    }

    /// Forgets what is older than the window.
    pub fn forget(&mut self, now: f64) {
        while self
            .times
            .front()
            .is_some_and(|&time| time < now - self.limits.age)
        {
            self.pop();
        }
    }

    fn pop(&mut self) {
        self.times.pop_front();
        self.values.drain(..self.dimension.min(self.values.len()));
    }

    /// Whether a refit of that many regions is due, which is then counted as begun.
    pub fn due(&mut self, now: f64, regions: usize) -> bool {
        let enough = regions.saturating_mul(self.limits.requests_per_region);
        let due = self.next.is_some_and(|next| now >= next) && self.len() >= enough;
        if due {
            self.next = Some(now + self.limits.interval);
        }
        due
    }

    /// Requests in the window.
    pub fn len(&self) -> usize {
        self.times.len()
    }

    /// Whether it has none.
    pub fn is_empty(&self) -> bool {
        self.times.is_empty()
    }

    /// The vectors, row-major, oldest first.
    pub fn vectors(&mut self) -> &[f32] {
        self.values.make_contiguous()
    }
}
