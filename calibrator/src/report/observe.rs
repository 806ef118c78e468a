//! What a trace looks like to a blob: regions, similarities, labels, and a sample of its requests.

use std::collections::BTreeMap;
use std::path::Path;

use eldr_core::blob::{Blob, QUANTILES};
use eldr_core::signature::Signature;
use rand::{RngExt as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;

use crate::error::Error;
use crate::fit;
use crate::layers::{self, Profiles, Selection};
use crate::signatures::each_request;

/// Most requests that are kept for the map and the layer selection.
pub const SAMPLE_MAX: usize = 1000;
/// Most different labels that are counted in a region; the rest are counted together.
const LABELS_MAX: usize = 1000;
/// The label of requests without one, and of those beyond [`LABELS_MAX`].
const OTHER: &str = "other";

/// A trace as a blob sees it.
#[derive(Clone, Debug)]
pub struct Observed {
    /// Requests that are in a region.
    pub requests: usize,
    /// Records without a prefill signature, or with one that has no weight.
    pub skipped: usize,
    /// One entry per region of the blob.
    pub regions: Vec<Region>,
    /// At most [`SAMPLE_MAX`] of the requests, drawn with equal chances.
    pub sample: Vec<Request>,
}

/// The requests of one region.
#[derive(Clone, Debug, Default)]
pub struct Region {
    /// Similarity to the region's centroid, ascending.
    pub own: Vec<f64>,
    /// Similarity to the centroid that is the next similar, ascending; empty if there is no other.
    pub next: Vec<f64>,
    /// How many requests have each label.
    labels: BTreeMap<String, usize>,
}

/// One request of the sample.
#[derive(Clone, Debug)]
pub struct Request {
    /// Its region.
    pub region: usize,
    /// Its unit vector.
    pub vector: Vec<f32>,
    prefill: Signature,
    decode: Option<Signature>,
}

impl Observed {
    /// Reads traces; `on_record` is told of every record.
    ///
    /// # Errors
    /// Traces that cannot be read or do not fit the blob, or have no request with a region.
    pub fn read<P: AsRef<Path>>(
        paths: &[P],
        blob: &Blob,
        seed: u64,
        on_record: impl FnMut(),
    ) -> Result<Self, Error> {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let mut observed = Observed {
            requests: 0,
            skipped: 0,
            regions: vec![Region::default(); blob.regions.len()],
            sample: Vec::new(),
        };
        let (_, skipped) = each_request(paths, blob, on_record, |record, request| {
            let similar = &request.similar;
            let region = similar[0].0;
            observed.regions[region].add(record.label.as_deref(), similar);
            observed.requests += 1;
            // Each request so far is in the sample with the same chance (reservoir sampling).
            let place = match observed.requests {
                few if few <= SAMPLE_MAX => few - 1,
                many => rng.random_range(0..many),
            };
            if place < SAMPLE_MAX {
                let request = Request {
                    region,
                    vector: request.vector.to_vec(),
                    decode: record.decode_signature()?,
                    prefill: request.signature,
                };
                match observed.sample.get_mut(place) {
                    Some(old) => *old = request,
                    None => observed.sample.push(request),
                }
            }
            Ok(())
        })?;
        observed.skipped = skipped;
        for region in &mut observed.regions {
            region.own.sort_unstable_by(f64::total_cmp);
            region.next.sort_unstable_by(f64::total_cmp);
        }
        Ok(observed)
    }

    /// Share of the requests that are in each region.
    pub fn shares(&self) -> Vec<f64> {
        let share = |region: &Region| region.own.len() as f64 / self.requests as f64;
        self.regions.iter().map(share).collect()
    }

    /// The layer selection of a fit to the sample, by counts × IDF.
    ///
    /// # Errors
    /// Too few requests have decode counts, signatures of different layers are mixed, or nothing can be
    /// ordered by the decode counts.
    pub fn selection(&self, seed: u64) -> Result<(Vec<u16>, Selection), Error> {
        let with: Vec<(&Signature, &Signature)> = self
            .sample
            .iter()
            .filter_map(|request| Some((&request.prefill, request.decode.as_ref()?)))
            .collect();
        let hint = "record decode counts of at least 3 requests";
        let Some(&(first, first_decode)) = with.first().filter(|_| with.len() >= 3) else {
            let found = with.len();
            return Err(Error::new(
                format!("requests with decode counts: {found}"),
                hint,
            ));
        };
        let alike = |&(prefill, decode): &(&Signature, &Signature)| {
            prefill.layers() == first.layers() && decode.layers() == first_decode.layers()
        };
        if !with.iter().all(alike) {
            return Err(Error::new(
                "requests have signatures of different layers",
                hint,
            ));
        }
        let weights = self.idf(first.counts().len(), first.layers());
        let (mut signal, mut decode) = (Vec::new(), Vec::new());
        for (own, own_decode) in &with {
            let weighted = own.counts().iter().zip(&weights);
            signal.extend(weighted.map(|(&count, weight)| f32::from(count) * weight));
            decode.extend(own_decode.counts().iter().map(|&count| f32::from(count)));
        }
        let experts = first.geometry().experts;
        let profiles = |layers: usize, values| Profiles {
            layers,
            experts,
            values,
        };
        let selection = layers::select(
            profiles(first.layers().len(), &signal),
            profiles(first_decode.layers().len(), &decode),
            &layers::pairs(with.len(), seed),
            |_, _, _| {},
        )?;
        Ok((first.layers().to_vec(), selection))
    }

    /// Weights of the sample's prefill counts.
    fn idf(&self, width: usize, layers: &[u16]) -> Vec<f32> {
        let mut touched = vec![0u32; width];
        let alike = self
            .sample
            .iter()
            .filter(|request| request.prefill.layers() == layers);
        for request in alike {
            for (touched, &count) in touched.iter_mut().zip(request.prefill.counts()) {
                *touched += u32::from(count > 0);
            }
        }
        eldr_core::transform::idf(&touched, self.sample.len() as u32)
    }
}

impl Region {
    fn add(&mut self, label: Option<&str>, similar: &[(usize, f32)]) {
        self.own.push(similar[0].1.into());
        self.next
            .extend(similar.get(1).map(|next| f64::from(next.1)));
        let label = label.unwrap_or(OTHER);
        let known = self.labels.contains_key(label) || self.labels.len() < LABELS_MAX;
        let label = if known { label } else { OTHER };
        *self.labels.entry(label.to_owned()).or_default() += 1;
    }

    /// The most frequent labels with their shares; of equal ones the first by name.
    pub fn top_labels(&self, most: usize) -> Vec<(&str, f64)> {
        let mut labels: Vec<(&str, usize)> = self
            .labels
            .iter()
            .map(|(label, &count)| (label.as_str(), count))
            .collect();
        labels.sort_by_key(|&(_, count)| std::cmp::Reverse(count));
        let all = self.own.len() as f64;
        let shares = labels
            .into_iter()
            .map(|(label, count)| (label, count as f64 / all));
        shares.take(most).collect()
    }
}

/// Ascending values at [`QUANTILES`]; none of none.
pub fn quantiles(ascending: &[f64]) -> Option<[f64; QUANTILES.len()]> {
    (!ascending.is_empty()).then(|| fit::quantiles(ascending))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_are_ordered_by_how_many_requests_have_them() {
        let mut region = Region::default();
        for label in [Some("b"), Some("a"), None, Some("b"), Some("c")] {
            region.add(label, &[(0, 0.9), (1, 0.2)]);
        }
        assert_eq!(region.top_labels(2), [("b", 0.4), ("a", 0.2)]);
        assert_eq!(region.next.len(), 5);
        for label in 0..2 * LABELS_MAX {
            region.add(Some(&label.to_string()), &[(0, 0.9)]);
        }
        assert!(region.labels.len() <= LABELS_MAX + 1);
        assert_eq!(region.labels.values().sum::<usize>(), region.own.len());
    }

    #[test]
    fn quantiles_are_linear_between_values() {
        assert_eq!(quantiles(&[]), None);
        assert_eq!(quantiles(&[0.5]), Some([0.5; 7]));
        assert_eq!(
            quantiles(&[0.0, 0.25, 0.5, 0.75, 1.0]).map(|q| [q[0], q[2], q[3], q[6]]),
            Some([0.0, 0.25, 0.5, 1.0])
        );
    }
}
