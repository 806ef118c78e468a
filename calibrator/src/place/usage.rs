//! What the experts of each decode cluster are used for: a trace, split by the regions of a blob.

use std::path::Path;

use eldr_core::blob::Blob;
use eldr_core::signature::{Geometry, Signature};

use crate::error::Error;
use crate::regions;
use crate::signatures::{check_geometry, each_request};
use crate::trace::{Phase, Record, TraceError};

/// Expert usage of one decode cluster.
#[derive(Clone, Debug, PartialEq)]
pub struct Usage {
    /// Name of the cluster.
    pub cluster: String,
    /// Regions of the blob that it serves.
    pub regions: Vec<usize>,
    /// Requests of the trace in these regions that were counted. If there are none, the usage is that
    /// of all requests.
    pub requests: usize,
    /// How likely a token activates an expert, row-major `[layer of the trace][expert]`.
    pub probabilities: Vec<f64>,
}

/// A trace, split by the regions of a blob.
#[derive(Clone, Debug, PartialEq)]
pub struct Traffic {
    /// Layers and experts of the model.
    pub geometry: Geometry,
    /// Which counts were used.
    pub counts: Phase,
    /// Layers that have counts, ascending.
    pub layers: Vec<u16>,
    /// Requests with a prefill signature.
    pub requests: usize,
    /// Requests that have the counts that were used.
    pub counted: usize,
    /// Records without a prefill signature, or with one that has no weight: in no region.
    pub skipped: usize,
    /// One entry per decode cluster, in the order of the blob.
    pub clusters: Vec<Usage>,
}

/// Sums of counts by region.
struct Sums {
    counts: Phase,
    layers: Vec<u16>,
    /// `[region][layer][expert]`
    experts: Vec<f64>,
    /// Per region.
    tokens: Vec<f64>,
    /// Per region.
    requests: Vec<usize>,
    /// What is wrong with them, which matters only if they are used.
    problem: Option<TraceError>,
}

impl Traffic {
    /// Reads traces, one record in memory at a time; `on_record` is told of every record. `top_k`:
    /// experts per token, where records do not say how many tokens they count.
    ///
    /// Decode counts are used if at least half of the requests have them. A request is in the region
    /// whose centroid is most similar to it; of equal ones in the first.
    ///
    /// # Errors
    /// Traces that cannot be read, that fit neither the blob nor each other, or that do not say how
    /// many tokens they count.
    pub fn read<P: AsRef<Path>>(
        paths: &[P],
        blob: &Blob,
        top_k: Option<u32>,
        on_record: impl FnMut(),
    ) -> Result<Self, Error> {
        let mut decode = Sums::new(Phase::Decode, blob);
        let mut prefill = Sums::new(Phase::Prefill, blob);
        let (requests, skipped) = each_request(paths, blob, on_record, |record, request| {
            let (region, signature) = (request.similar[0].0, request.signature);
            let tokens = signature.prompt_tokens().or(record.prompt_tokens);
            prefill.add(record, region, &signature, tokens, top_k);
            if let Some(signature) = record.decode_signature()? {
                check_geometry(record, "decode", &signature, blob)?;
                let tokens = record.decode_tokens;
                decode.add(record, region, &signature, tokens, top_k);
            }
            Ok(())
        })?;
        let decoded: usize = decode.requests.iter().sum();
        let mut sums = if 2 * decoded >= requests {
            decode
        } else {
            prefill
        };
        if let Some(problem) = sums.problem.take() {
            return Err(problem.into());
        }
        Ok(Traffic {
            geometry: blob.transform.geometry(),
            counts: sums.counts,
            counted: sums.requests.iter().sum(),
            clusters: sums.clusters(blob),
            layers: sums.layers,
            requests,
            skipped,
        })
    }
}

impl Sums {
    fn new(counts: Phase, blob: &Blob) -> Self {
        Sums {
            counts,
            layers: Vec::new(),
            experts: Vec::new(),
            tokens: vec![0.0; blob.regions.len()],
            requests: vec![0; blob.regions.len()],
            problem: None,
        }
    }

    /// Adds the counts in `signature` of a request in `region`; the first problem is kept.
    fn add(
        &mut self,
        record: &Record,
        region: usize,
        signature: &Signature,
        tokens: Option<u64>,
        top_k: Option<u32>,
    ) {
        self.requests[region] += 1;
        if self.layers.is_empty() {
            self.layers = signature.layers().to_vec();
            self.experts = vec![0.0; self.tokens.len() * signature.counts().len()];
        }
        let counts = signature.counts();
        match self.check(record, signature, tokens, top_k) {
            Ok(tokens) => {
                self.tokens[region] += tokens;
                let sums = &mut self.experts[region * counts.len()..][..counts.len()];
                for (sum, &count) in sums.iter_mut().zip(counts) {
                    *sum += f64::from(count);
                }
            }
            Err(problem) => _ = self.problem.get_or_insert(problem),
        }
    }

    /// The tokens that `signature` counts.
    fn check(
        &self,
        record: &Record,
        signature: &Signature,
        tokens: Option<u64>,
        top_k: Option<u32>,
    ) -> Result<f64, TraceError> {
        let field = self.counts.name();
        if signature.layers() != self.layers {
            let (found, expected) = (signature.layers(), &self.layers);
            let problem = format!("it has layers {found:?}, the requests before it {expected:?}");
            let hint = "give requests with the same layers in every signature";
            return Err(record.invalid(field, problem, hint));
        }
        let counts = signature.counts();
        let tokens = match (top_k, tokens) {
            (Some(k), _) => {
                let sum: f64 = counts.iter().map(|&count| f64::from(count)).sum();
                sum / f64::from(k) / self.layers.len() as f64
            }
            (None, Some(tokens)) => tokens as f64,
            (None, None) => {
                let tokens = match self.counts {
                    Phase::Decode => "decode_tokens",
                    Phase::Prefill => "prompt_tokens",
                };
                let problem = format!("`{tokens}` does not say how many tokens it counts");
                let hint = "give the number of experts that each token activates: --top-k 8";
                return Err(record.invalid(field, problem, hint));
            }
        };
        let most = counts.iter().copied().max().unwrap_or(0);
        if f64::from(most) > tokens {
            let problem = format!("an expert has {most} counts over {tokens} tokens");
            let hint = "a token activates an expert at most once: correct the tokens, or --top-k";
            return Err(record.invalid(field, problem, hint));
        }
        Ok(tokens)
    }

    /// A region's requests are shared by the clusters that serve it.
    fn clusters(&self, blob: &Blob) -> Vec<Usage> {
        let all: Vec<usize> = (0..blob.regions.len()).collect();
        let usage = |cluster: String| {
            let serves = |&region: &usize| blob.regions[region].contains(&cluster);
            let regions: Vec<usize> = all.iter().copied().filter(serves).collect();
            let requests = regions.iter().map(|&region| self.requests[region]).sum();
            let of = if requests == 0 { &all } else { &regions };
            Usage {
                cluster,
                probabilities: self.probabilities(of, blob),
                requests,
                regions,
            }
        };
        regions::workers(&blob.regions)
            .into_iter()
            .map(usage)
            .collect()
    }

    fn probabilities(&self, regions: &[usize], blob: &Blob) -> Vec<f64> {
        let width = self.experts.len() / self.tokens.len();
        let mut sums = vec![0.0; width];
        let mut tokens = 0.0;
        for &region in regions {
            let share = 1.0 / blob.regions[region].len() as f64;
            tokens += share * self.tokens[region];
            let own = &self.experts[region * width..][..width];
            sums.iter_mut()
                .zip(own)
                .for_each(|(sum, own)| *sum += share * own);
        }
        // Requests of no token have no counts either.
        sums.iter()
            .map(|sum| sum / tokens.max(f64::MIN_POSITIVE))
            .collect()
    }
}

#[cfg(test)]
mod tests;
