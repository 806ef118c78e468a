//! The requests that run on each decode worker, as far as a policy must know them.
//!
//! Centroids say which requests *usually* sit together; a [`Batch`] says who sits there now. Per worker it keeps one integer per
//! selected (layer, expert), to which every request adds its [`Footprint`] when it is placed and from which it takes it off when it
//! ends. Integers, so that no error is left behind, in whatever order requests come and go. What of requests is summed is
//! the policy's [`Measure`].
//!
//! A gateway does not know the experts of every request: some have no signature, others were placed by somebody else. Such a
//! request counts as one that uses every expert alike, so that a batch of which nothing is known is judged by its size.
//!
//! ```
//! use eldr_core::batch::{Batches, Measure, Request};
//! use eldr_core::decide::{Policy, Rule, WorkerIndex};
//! use eldr_core::signature::Geometry;
//!
//! // One layer of four experts, top-2, prompts of ten tokens.
//! let geometry = Geometry { layers: 1, experts: 4 };
//! let mut batches = Batches::new(Measure::Usage, geometry, vec![0], 2)?;
//! let mut request = Request::default();
//! batches.see(&[10.0, 10.0, 0.0, 0.0], 10, 0, &mut request);
//! batches.join(WorkerIndex(0), &request.footprint());
//!
//! // The same again costs worker 0 next to nothing, and worker 1 two experts.
//! let extra: Vec<f64> = batches.workers().iter().map(|batch| batch.extra_experts(&request)).collect();
//! assert!(extra[0] < 0.05 && extra[1] == 2.0);
//! # Ok::<(), eldr_core::transform::TransformError>(())
//! ```

mod exchange;
mod fixed;
mod running;
mod spread;

use crate::decide::{Policy, Rule, WorkerIndex};
use crate::signature::Geometry;
use crate::similarity::{ROWS, dot, dot_each};
use crate::transform::{MIN_NORM, TransformError, check_layers};

pub use running::Batch;
pub use spread::{MAX_LAYERS, spread};

/// What of the requests of a batch is summed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Measure {
    /// How probably a token uses each expert: p = counts / prompt tokens. A batch then knows the probability
    /// Π(1 − p) that an expert is not used.
    Usage,
    /// The unit vector of the counts. A batch then knows its mean request.
    Direction,
}

/// A request that is to be placed, seen through a [`Measure`]. A buffer to be reused.
#[derive(Debug, Clone, PartialEq)]
pub struct Request {
    measure: Measure,
    /// Row-major `[selected layer][expert]`.
    vector: Vec<f32>,
    /// Mean of the vector: of usage, top-k / experts.
    mean: f64,
    kv_tokens: u32,
}

impl Default for Request {
    fn default() -> Self {
        Self {
            measure: Measure::Usage,
            vector: Vec::new(),
            mean: 0.0,
            kv_tokens: 0,
        }
    }
}

impl Request {
    /// What the request adds to the batch that it joins, and takes off when it leaves.
    pub fn footprint(&self) -> Footprint {
        let mut values = vec![0; self.vector.len()].into_boxed_slice();
        let each = values.iter_mut().zip(&self.vector);
        match self.measure {
            Measure::Usage => each.for_each(|(value, &p)| *value = fixed::cost(p)),
            Measure::Direction => each.for_each(|(value, &part)| *value = fixed::part(part)),
        }
        Footprint {
            values,
            kv_tokens: self.kv_tokens,
        }
    }

    /// Share of the experts that a token uses, mean over layers: top-k / experts. 0 of a request of which nothing is known, or that is
    /// seen by its direction.
    pub fn usage(&self) -> f64 {
        match self.measure {
            Measure::Usage => self.mean,
            Measure::Direction => 0.0,
        }
    }

    /// Tokens that the request has in the worker's KV cache, or will have.
    pub fn kv_tokens(&self) -> u32 {
        self.kv_tokens
    }
}

/// What a request added to its batch: two bytes per selected (layer, expert).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Footprint {
    /// Empty: unknown.
    values: Box<[u16]>,
    kv_tokens: u32,
}

impl Footprint {
    /// That of a request whose experts are not known.
    pub fn unknown(kv_tokens: u32) -> Self {
        Self {
            values: Box::default(),
            kv_tokens,
        }
    }
}

/// The batches of all workers of a model, in the order of the workers.
#[derive(Debug, Clone, PartialEq)]
pub struct Batches {
    measure: Measure,
    geometry: Geometry,
    layers: Vec<u16>,
    workers: Vec<Batch>,
}

impl Batches {
    /// Idle workers. Of each request the counts of `layers` are looked at, ascending numbers of the model's: see [`spread`].
    ///
    /// # Errors
    /// [`TransformError::Layers`] if they are none, not ascending, or not the model's.
    pub fn new(
        measure: Measure,
        geometry: Geometry,
        layers: Vec<u16>,
        workers: usize,
    ) -> Result<Self, TransformError> {
        check_layers(geometry, &layers)?;
        Ok(Self::of_layers(measure, geometry, layers, workers))
    }

    /// As [`new`](Self::new), of layers that are known to be the model's.
    pub(crate) fn of_layers(
        measure: Measure,
        geometry: Geometry,
        layers: Vec<u16>,
        workers: usize,
    ) -> Self {
        let idle = Batch::new(measure, layers.len(), geometry.experts);
        Self {
            measure,
            geometry,
            layers,
            workers: vec![idle; workers],
        }
    }

    /// The model's geometry.
    pub fn geometry(&self) -> Geometry {
        self.geometry
    }

    /// Layers that are looked at, ascending.
    pub fn layers(&self) -> &[u16] {
        &self.layers
    }

    /// What of requests is summed.
    pub fn measure(&self) -> Measure {
        self.measure
    }

    /// Each worker's batch.
    pub fn workers(&self) -> &[Batch] {
        &self.workers
    }

    /// Sees a request by the counts of the layers that are looked at, `[layer][expert]`, of so many prompt tokens, and with so
    /// many tokens in the KV cache. False, and a request of which nothing is known, where that makes no probabilities: no
    /// prompt tokens, no counts, or not as many as there are experts.
    pub fn see(
        &self,
        counts: &[f32],
        prompt_tokens: u64,
        kv_tokens: u32,
        request: &mut Request,
    ) -> bool {
        let expected = self.layers.len() * self.geometry.experts;
        let length = match self.measure {
            Measure::Usage => prompt_tokens as f32,
            Measure::Direction => dot(counts, counts).sqrt(),
        };
        request.measure = self.measure;
        request.kv_tokens = kv_tokens;
        request.mean = 0.0;
        request.vector.clear();
        if counts.len() == expected && length >= MIN_NORM {
            let scale = 1.0 / length;
            let values = counts.iter().map(|count| (count * scale).clamp(0.0, 1.0));
            request.vector.extend(values);
            request.mean = running::sum(&request.vector) / expected.max(1) as f64;
        }
        let good = request.mean > 0.0;
        if !good {
            request.vector.clear();
        }
        good
    }

    /// A request was placed: it belongs to the worker's batch from now on.
    pub fn join(&mut self, worker: WorkerIndex, footprint: &Footprint) {
        if let Some(batch) = self.workers.get_mut(worker.0) {
            batch.join(footprint);
        }
    }

    /// A request ended: takes off what [`join`](Self::join) added with the same footprint.
    pub fn leave(&mut self, worker: WorkerIndex, footprint: &Footprint) {
        if let Some(batch) = self.workers.get_mut(worker.0) {
            batch.leave(footprint);
        }
    }

    /// So many requests are on the worker in all, with so many tokens in its KV cache: for who counts them by other means. Those without
    /// a footprint here count as requests of unknown experts, whoever placed them; what joins, leaves and is heard after this
    /// counts on from there.
    pub fn set_totals(&mut self, worker: WorkerIndex, requests: u32, kv_tokens: u64) {
        if let Some(batch) = self.workers.get_mut(worker.0) {
            batch.unknown = requests.saturating_sub(batch.known);
            batch.kv_tokens = kv_tokens;
        }
    }

    /// What the policy goes by of each worker's batch, in place of what is in `out`: see
    /// [`Evidence::Running`](crate::decide::Evidence).
    pub fn to_each(&self, rule: &Rule, request: &Request, out: &mut Vec<f64>) {
        out.clear();
        for group in self.workers.chunks(ROWS) {
            let scores = scores(rule, request, |index| group.get(index));
            out.extend(group.iter().zip(scores).map(|(_, score)| score));
        }
    }

    /// The same of some workers only, [candidates](crate::decide::candidates); what is said of the others makes them the worst.
    pub fn to_some(
        &self,
        rule: &Rule,
        request: &Request,
        workers: &[WorkerIndex],
        out: &mut Vec<f64>,
    ) {
        out.clear();
        out.resize(self.workers.len(), f64::INFINITY);
        for group in workers.chunks(ROWS) {
            let batch = |index: usize| self.workers.get(group.get(index)?.0);
            let scores = scores(rule, request, batch);
            for (worker, score) in group.iter().zip(scores) {
                if let Some(out) = out.get_mut(worker.0) {
                    *out = score;
                }
            }
        }
    }
}

/// What the policy goes by of a few batches, for which the request is loaded once. Of those that only fill a group it says nothing.
fn scores<'b>(
    rule: &Rule,
    request: &Request,
    batch: impl Fn(usize) -> Option<&'b Batch>,
) -> [f64; ROWS] {
    let batches: [Option<&Batch>; ROWS] = std::array::from_fn(batch);
    let first = batches.first().copied().flatten();
    let views = batches.map(|batch| batch.or(first).map_or(&[][..], Batch::view));
    let mut dots = dot_each(&request.vector, views).into_iter();
    batches.map(|batch| {
        let (Some(batch), Some(dot)) = (batch, dots.next()) else {
            return f64::INFINITY;
        };
        match rule.policy {
            Policy::BatchBand => batch.cosine_by(request, dot).map_or(f64::NAN, f64::from),
            _ => {
                let extra = batch.extra_by(request, dot);
                rule.objective.growth_by(batch, request, extra)
            }
        }
    })
}

#[cfg(test)]
mod tests;
