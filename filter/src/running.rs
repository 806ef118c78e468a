//! What runs on each decode worker: the experts of this VM's own requests, live, and those of the other threads', as of the last tick.
//!
//! A VM adds the footprint of each request that it places to the [`Batches`] of its kind and takes it off when the request ends.
//! At its tick it writes what it has in flight into one key of shared data, named by its slot, with a heartbeat, and reads what the
//! others wrote. A record whose heartbeat is older than the lease does not count, so what a VM that trapped had told vanishes as
//! its [load counts](crate::load) do.
//!
//! Only experts are told here. How many requests a worker has is what the load counts say, from all threads and a millisecond old:
//! those of them whose experts are not known, because they are too new, of another blob or without a signature, count as requests of unknown experts.
//!
//! What a decode step costs is [learned](eldr_core::learn) beside the batches, by each VM from the times of its own requests.
//!
//! A record is little-endian: u64 heartbeat in milliseconds, then for each kind u32 length and a
//! [message](eldr_core::batch::Batches::share), whose key is the [`Kind`]'s.

mod book;

use std::collections::BTreeMap;

use eldr_core::batch::{Batches, Measure, Request};
use eldr_core::decide::{Reason, WorkerIndex};
use eldr_core::engine::StepModel;
use eldr_core::learn::Learner;
use eldr_core::signature::Geometry;

use crate::load::{Slots, Timing};
use crate::ring::fnv1a;
use crate::shared::Shared;
use book::Book;

pub use book::Seat;

/// Most sums (workers × layers × experts) that one VM keeps, 16 bytes each, over all kinds.
pub const MAX_SUMS: usize = 8 << 20;
/// Batches that nobody is in are forgotten after this long, milliseconds.
const IDLE_MS: u64 = 60_000;
/// Several listeners tick in one VM; what was told this recently is not told again, milliseconds.
const TELL_MS: u64 = 100;

/// What requests must have in common to be held against each other.
///
/// A blob with other layers, or a configuration with other workers or step times, makes another kind: requests in flight end where they began, and
/// for newer ones they are of unknown experts.
#[derive(Debug, Clone, PartialEq)]
pub struct Kind<'a> {
    /// Name of the model, as configured.
    pub model: &'a str,
    /// What of requests is summed.
    pub measure: Measure,
    /// The model's shape.
    pub geometry: Geometry,
    /// Layers that are looked at, ascending.
    pub layers: Vec<u16>,
    /// The decode workers, in the order of a decision's.
    pub workers: &'a [String],
    /// What a decode step is stated to cost, where it is learned how much that is.
    pub steps: Option<StepModel>,
}

impl Kind<'_> {
    /// The same number for the same kind, in every VM.
    fn key(&self) -> Key {
        let Geometry { layers, experts } = self.geometry;
        let shape = [layers, experts, self.layers.len()];
        let mut bytes = vec![self.measure as u8];
        bytes.push(u8::from(self.steps.is_some()));
        if let Some(steps) = self.steps {
            let times = [steps.t0_ms, steps.b_ms, steps.c_ms, steps.kv_ms_per_1k];
            bytes.extend(times.iter().flat_map(|ms| ms.to_le_bytes()));
        }
        bytes.extend(shape.iter().flat_map(|number| number.to_le_bytes()));
        bytes.extend(self.layers.iter().flat_map(|layer| layer.to_le_bytes()));
        for name in std::iter::once(self.model).chain(self.workers.iter().map(String::as_str)) {
            bytes.extend(name.as_bytes());
            bytes.push(0);
        }
        Key(fnv1a(&bytes))
    }

    fn sums(&self) -> usize {
        let each = self.layers.len().saturating_mul(self.geometry.experts);
        each.saturating_mul(self.workers.len())
    }
}

/// Names the batches of a kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key(u64);

/// What is known of a kind.
#[derive(Debug, Clone, Copy)]
pub struct Known<'a> {
    /// What runs.
    pub batches: &'a Batches,
    /// What a decode step costs, where that is learned.
    pub steps: Option<StepModel>,
}

/// The running batches of one VM.
#[derive(Debug, Default)]
pub struct Running {
    books: BTreeMap<Key, Book>,
    /// Slot for which a record was written last, and whether it said nothing.
    told: Option<(usize, bool)>,
    told_ms: u64,
    record: Vec<u8>,
    message: Vec<u8>,
}

fn key(slot: usize) -> String {
    format!("eldr.batch.{slot}")
}

impl Running {
    /// The batches of a kind, which are kept from now on. New ones know at once what others have told.
    ///
    /// # Errors
    /// They are more than there is room for.
    pub fn keep(
        &mut self,
        kind: &Kind<'_>,
        shared: &impl Shared,
        slots: Slots,
        now_ms: u64,
        timing: Timing,
    ) -> Result<Key, Reason> {
        let key = kind.key();
        if let Some(book) = self.books.get_mut(&key) {
            book.used_ms = now_ms;
            return Ok(key);
        }
        let sums = kind.sums();
        let is_full = |books: &BTreeMap<Key, Book>| {
            let kept: usize = books.values().map(|book| book.sums).sum();
            kept.saturating_add(sums) > MAX_SUMS
        };
        if is_full(&self.books) {
            self.books.retain(|_, book| book.members > 0);
        }
        if is_full(&self.books) {
            return Err(Reason::GeometryMismatch);
        }
        let workers = kind.workers.to_vec();
        let layers = kind.layers.clone();
        let batches = Batches::new(kind.measure, kind.geometry, layers, workers.len());
        let mut book = Book {
            batches: batches.map_err(|_| Reason::GeometryMismatch)?,
            learner: kind.steps.map(|steps| Learner::new(steps, workers.len())),
            workers,
            sums,
            members: 0,
            used_ms: now_ms,
        };
        let records = others(shared, slots, now_ms, timing);
        book.batches.hear(key.0, messages(&records));
        self.books.insert(key, book);
        Ok(key)
    }

    /// What is known under a key.
    pub fn of(&self, key: Key) -> Option<Known<'_>> {
        self.books.get(&key).map(|book| Known {
            batches: &book.batches,
            steps: book.learner.as_ref().map(Learner::model),
        })
    }

    /// How many requests there are on each worker, and tokens in its KV cache, by name.
    pub fn set_totals(&mut self, key: Key, now_ms: u64, total: impl Fn(&str) -> (u32, u64)) {
        let Some(book) = self.books.get_mut(&key) else {
            return;
        };
        for (index, name) in book.workers.iter().enumerate() {
            let (requests, kv_tokens) = total(name);
            let worker = WorkerIndex(index);
            book.batches.set_totals(worker, requests, kv_tokens);
            if let Some(learner) = &mut book.learner {
                learner.runs(worker, &book.batches, now_ms as f64);
            }
        }
    }

    /// A request was sent to a worker.
    pub fn join(
        &mut self,
        key: Key,
        worker: WorkerIndex,
        request: &Request,
        now_ms: u64,
    ) -> Option<Seat> {
        let book = self.books.get_mut(&key)?;
        let footprint = request.footprint();
        Some(book.join(key, worker, Some(request), footprint, now_ms))
    }

    /// It has ended, after decode steps of `step_ms` each, where that is known.
    pub fn leave(&mut self, seat: Seat, step_ms: Option<f64>, now_ms: u64) {
        // Nobody forgets batches that have members.
        let Some(book) = self.books.get_mut(&seat.key) else {
            return;
        };
        if let (Some(learner), Some(stay), Some(step_ms)) = (&mut book.learner, seat.stay, step_ms)
        {
            learner.end(seat.worker, stay, step_ms, now_ms as f64);
        }
        book.batches.leave(seat.worker, &seat.footprint);
        book.members = book.members.saturating_sub(1);
        book.runs(seat.worker, now_ms);
    }

    /// It runs on another worker than the one that it was sent to; `None` where that one is not of its kind.
    pub fn change(&mut self, seat: Seat, worker: &str, now_ms: u64) -> Option<Seat> {
        let (key, footprint) = (seat.key, seat.footprint.clone());
        self.leave(seat, None, now_ms);
        let book = self.books.get_mut(&key)?;
        let worker = book.worker(worker)?;
        Some(book.join(key, worker, None, footprint, now_ms))
    }

    /// Whether no batches are kept, because nobody asked lately.
    pub fn is_empty(&self) -> bool {
        self.books.is_empty()
    }

    /// Requests on a worker whose experts are known, other threads' as of the last tick.
    pub fn known(&self, worker: &str) -> u32 {
        let books = self.books.values();
        let batches = books.filter_map(|book| book.batches.workers().get(book.worker(worker)?.0));
        batches.fold(0, |sum, batch| sum.saturating_add(batch.known()))
    }

    /// Tells the others, hears them, and forgets what nobody uses.
    pub fn tick(&mut self, shared: &impl Shared, slots: Slots, now_ms: u64, timing: Timing) {
        if self.told_ms.abs_diff(now_ms) < TELL_MS {
            return;
        }
        self.told_ms = now_ms;
        self.books.retain(|_, book| {
            book.members > 0 || book.used_ms.abs_diff(now_ms) <= IDLE_MS.max(timing.lease_ms)
        });
        if let Some(slot) = slots.own {
            self.tell(shared, slot, now_ms);
        }
        let hears = |book: &Book| book.batches.measure() == Measure::Usage;
        if self.books.values().any(hears) {
            let records = others(shared, slots, now_ms, timing);
            for (key, book) in self.books.iter_mut().filter(|(_, book)| hears(book)) {
                book.without_totals();
                book.batches.hear(key.0, messages(&records));
            }
        }
    }

    fn tell(&mut self, shared: &impl Shared, slot: usize, now_ms: u64) {
        self.record.clear();
        self.record.extend(now_ms.to_le_bytes());
        // Of directions nothing but numbers of requests would be told.
        let tells = |book: &Book| book.members > 0 && book.batches.measure() == Measure::Usage;
        for (key, book) in self.books.iter_mut().filter(|(_, book)| tells(book)) {
            book.without_totals();
            book.batches.share(key.0, &mut self.message);
            self.record
                .extend((self.message.len() as u32).to_le_bytes());
            self.record.extend(&self.message);
        }
        let is_empty = self.record.len() == size_of::<u64>();
        // In a slot that was another's before, an old record is overwritten even by nothing.
        if !(is_empty && self.told == Some((slot, true))) {
            let record: &[u8] = if is_empty { &[] } else { &self.record };
            shared.set(&key(slot), record, None);
            self.told = Some((slot, is_empty));
        }
    }
}

/// The fresh records of other VMs.
fn others(shared: &impl Shared, slots: Slots, now_ms: u64, timing: Timing) -> Vec<Vec<u8>> {
    let others = (0..slots.count).filter(|index| Some(*index) != slots.own);
    let records = others.filter_map(|index| shared.get(&key(index)).0);
    let is_fresh = |record: &Vec<u8>| {
        record
            .first_chunk()
            .is_some_and(|&ms| u64::from_le_bytes(ms).abs_diff(now_ms) <= timing.lease_ms)
    };
    records.filter(is_fresh).collect()
}

/// All messages of some records; what is none ends its record.
fn messages(records: &[Vec<u8>]) -> impl Iterator<Item = &[u8]> {
    records.iter().flat_map(|record| {
        let mut rest = record.get(size_of::<u64>()..).unwrap_or_default();
        std::iter::from_fn(move || {
            let (&length, after) = rest.split_first_chunk()?;
            let length = usize::try_from(u32::from_le_bytes(length)).ok()?;
            let (message, after) = after.split_at_checked(length)?;
            rest = after;
            Some(message)
        })
    })
}

#[cfg(test)]
mod tests;
