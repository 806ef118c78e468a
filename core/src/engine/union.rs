//! The experts that a batch activates together.

use std::sync::Arc;

use super::activation::SCALE;
use super::{Activation, ExpertIds, Ranks};
use crate::signature::Geometry;

/// Which experts a request's tokens activate, as far as it is known.
#[derive(Clone, Debug)]
pub enum Experts {
    /// Recorded token by token: distinct experts are counted.
    Recorded(Arc<ExpertIds>),
    /// Known by probability: distinct experts are expected, tokens of one request and of different ones taken as independent.
    Expected(Arc<Activation>),
}

impl Experts {
    /// Layers and experts of the model that they are of.
    pub fn geometry(&self) -> Geometry {
        match self {
            Experts::Recorded(ids) => ids.geometry(),
            Experts::Expected(activation) => activation.geometry(),
        }
    }

    /// How probably a token activates each expert, `[layers][experts]`, 0 to 1: of recorded ones the share of the tokens. It is
    /// what a gateway would have to know to foresee a decode step.
    pub fn usage(&self) -> Vec<f32> {
        match self {
            Experts::Recorded(ids) => ids.usage(),
            Experts::Expected(activation) => activation.usage(),
        }
    }
}

impl From<Arc<ExpertIds>> for Experts {
    fn from(ids: Arc<ExpertIds>) -> Self {
        Experts::Recorded(ids)
    }
}

impl From<Arc<Activation>> for Experts {
    fn from(activation: Arc<Activation>) -> Self {
        Experts::Expected(activation)
    }
}

/// Words of a layer's bitset; at least 1, so that a layer is never an empty chunk.
pub(super) fn words(geometry: Geometry) -> usize {
    geometry.experts.div_ceil(64).max(1)
}

/// The union over the members of a batch. Recorded tokens are or-ed at each step; what is expected changes with the members only.
#[derive(Clone, Debug)]
pub(super) struct Union {
    geometry: Geometry,
    /// One bit per expert, `words` words per layer; cleared and refilled by every step.
    active: Vec<u64>,
    /// Σ −ln(1 − p) over the members known by probability, `[layers][experts]`; empty until there is one.
    sums: Vec<u64>,
    /// 1 − exp(−sum), as of the last step; stale while `changed`.
    likely: Vec<f64>,
    likely_total: f64,
    changed: bool,
    /// Of expert parallelism, where there is any: experts on the busiest rank are counted, not all.
    ranks: Option<Arc<Ranks>>,
    /// Tokens of each member that a step decodes.
    tokens: u32,
}

impl Union {
    pub(super) fn new(geometry: Geometry) -> Self {
        Union {
            geometry,
            active: vec![0; geometry.layers.saturating_mul(words(geometry))],
            sums: Vec::new(),
            likely: Vec::new(),
            likely_total: 0.0,
            changed: false,
            ranks: None,
            tokens: 1,
        }
    }

    pub(super) fn set_ranks(&mut self, ranks: Arc<Ranks>) {
        self.ranks = Some(ranks);
    }

    /// To be called before anybody enters.
    pub(super) fn set_tokens(&mut self, tokens: u32) {
        self.tokens = tokens;
    }

    pub(super) fn enter(&mut self, experts: &Experts) {
        let cells = self.geometry.layers.saturating_mul(self.geometry.experts);
        if matches!(experts, Experts::Expected(_)) && self.sums.is_empty() {
            self.sums = vec![0; cells];
            self.likely = vec![0.0; cells];
        }
        self.update(experts, |sum, cost| *sum = sum.saturating_add(cost));
    }

    pub(super) fn leave(&mut self, experts: &Experts) {
        self.update(experts, |sum, cost| *sum = sum.saturating_sub(cost));
    }

    /// Cells of a model larger than this one are left out where they do not fit.
    fn update(&mut self, experts: &Experts, change: impl Fn(&mut u64, u64)) {
        let Experts::Expected(activation) = experts else {
            return;
        };
        self.changed = true;
        let tokens = self.tokens;
        let layers = self.sums.chunks_exact_mut(self.geometry.experts.max(1));
        for (sums, costs) in layers.zip(activation.rows()) {
            for (sum, &cost) in sums.iter_mut().zip(costs) {
                change(sum, u64::from(cost) * u64::from(tokens));
            }
        }
    }

    /// Distinct experts, mean over layers, if the members of known ids decode the given tokens; with expert parallelism those on the
    /// busiest rank of each layer.
    pub(super) fn mean<'a>(&mut self, recorded: impl Iterator<Item = (&'a ExpertIds, u32)>) -> f64 {
        self.active.fill(0);
        self.expect();
        let words = words(self.geometry);
        let mut any = false;
        for (ids, token) in recorded {
            any = true;
            let (theirs, mask) = (ids.words(), ids.token(token));
            if theirs == words {
                or(&mut self.active, mask);
            } else {
                let layers = self.active.chunks_exact_mut(words);
                layers
                    .zip(mask.chunks_exact(theirs))
                    .for_each(|(layer, mask)| or(layer, mask));
            }
        }
        let distinct = match (&self.ranks, any, self.sums.is_empty()) {
            (_, false, _) => self.likely_total,
            (Some(ranks), true, _) => ranks.busiest(&self.active, &self.likely),
            (None, true, true) => f64::from(self.count()),
            (None, true, false) => f64::from(self.count()) + self.likely_beyond_active(),
        };
        distinct / self.geometry.layers.max(1) as f64
    }

    /// Active experts that this model has.
    fn count(&self) -> u32 {
        let words = words(self.geometry);
        let spare = (64 * words).saturating_sub(self.geometry.experts) as u32;
        let last = u64::MAX.checked_shr(spare).unwrap_or(0);
        let count = |layer: &[u64]| -> u32 {
            let all: u32 = layer.iter().map(|word| word.count_ones()).sum();
            all - layer.last().map_or(0, |word| (word & !last).count_ones())
        };
        self.active.chunks_exact(words).map(count).sum()
    }

    /// To be called while nothing is active.
    fn expect(&mut self) {
        if !std::mem::take(&mut self.changed) {
            return;
        }
        self.likely_total = 0.0;
        for (likely, &sum) in self.likely.iter_mut().zip(&self.sums) {
            *likely = match sum {
                0 => 0.0,
                sum => 1.0 - (-(sum as f64 / SCALE)).exp(),
            };
            self.likely_total += *likely;
        }
        if let Some(ranks) = &self.ranks {
            // Nothing is active yet: this is for steps without recorded members.
            self.likely_total = ranks.busiest(&self.active, &self.likely);
        }
    }

    /// Expected experts that no recorded token activates.
    fn likely_beyond_active(&self) -> f64 {
        let layers = self.likely.chunks_exact(self.geometry.experts.max(1));
        let active = self.active.chunks_exact(words(self.geometry));
        let mut total = 0.0;
        for (likely, active) in layers.zip(active) {
            for (likely, &word) in likely.chunks(64).zip(active) {
                for (bit, likely) in likely.iter().enumerate() {
                    if (word >> bit) & 1 == 0 {
                        total += likely;
                    }
                }
            }
        }
        total
    }
}

fn or(words: &mut [u64], mask: &[u64]) {
    for (word, mask) in words.iter_mut().zip(mask) {
        *word |= mask;
    }
}
