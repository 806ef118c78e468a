//! The calibration set: what a fit reads from traces, as matrices.

use std::path::Path;

use eldr_core::signature::{Geometry, Signature};

use crate::error::Error;
use crate::trace::{self, Record, TraceError};

/// Expert counts of the calibration requests, all of one geometry.
#[derive(Clone, Debug, PartialEq)]
pub struct Requests {
    geometry: Geometry,
    layers: Vec<u16>,
    names: Vec<String>,
    prefill: Vec<u16>,
    decode_layers: Vec<u16>,
    with_decode: Vec<usize>,
    decode: Vec<u16>,
    skipped: usize,
}

impl Requests {
    /// Reads whole traces; `on_record` is told of every record.
    ///
    /// Records without a prefill signature are skipped and counted.
    pub fn read<P: AsRef<Path>>(paths: &[P], mut on_record: impl FnMut()) -> Result<Self, Error> {
        let mut set = None;
        let mut skipped = 0;
        for path in paths {
            for record in trace::read(path)? {
                on_record();
                let record = record?;
                match record.prefill_signature()? {
                    Some(prefill) => {
                        set.get_or_insert_with(|| Requests::new(&prefill))
                            .push(&record, &prefill)?;
                    }
                    None => skipped += 1,
                }
            }
        }
        let mut set = set.ok_or_else(|| {
            Error::new(
                format!("no signatures: records with the field `prefill`: 0 of {skipped}"),
                "record the x-eldr-signature header of prefill responses, one trace line per request",
            )
        })?;
        set.skipped = skipped;
        Ok(set)
    }

    /// An empty set of requests shaped like `prefill`.
    pub fn new(prefill: &Signature) -> Self {
        Requests {
            geometry: prefill.geometry(),
            layers: prefill.layers().to_vec(),
            names: Vec::new(),
            prefill: Vec::new(),
            decode_layers: Vec::new(),
            with_decode: Vec::new(),
            decode: Vec::new(),
            skipped: 0,
        }
    }

    /// Adds `record`, whose prefill signature is `prefill`.
    ///
    /// # Errors
    /// A signature has another geometry or other layers than those before it.
    pub fn push(&mut self, record: &Record, prefill: &Signature) -> Result<(), TraceError> {
        self.check(record, "prefill", prefill, &self.layers)?;
        let decode = record.decode_signature()?;
        if let Some(decode) = &decode {
            if self.with_decode.is_empty() {
                self.decode_layers = decode.layers().to_vec();
            }
            self.check(record, "decode", decode, &self.decode_layers)?;
            self.with_decode.push(self.len());
            self.decode.extend_from_slice(decode.counts());
        }
        self.prefill.extend_from_slice(prefill.counts());
        let trace::Location { file, line } = &record.at;
        self.names.push(format!("{} ({file}:{line})", record.id));
        Ok(())
    }

    fn check(
        &self,
        record: &Record,
        field: &'static str,
        signature: &Signature,
        layers: &[u16],
    ) -> Result<(), TraceError> {
        let hint = "fit one model at a time, with the same layers in every signature";
        let found = signature.geometry();
        if found != self.geometry {
            let expected = self.geometry;
            let problem = format!("it has {found}, the requests before it have {expected}");
            return Err(record.invalid(field, problem, hint));
        }
        if signature.layers() != layers {
            let found = signature.layers();
            let problem = format!("it has layers {found:?}, the requests before it {layers:?}");
            return Err(record.invalid(field, problem, hint));
        }
        Ok(())
    }

    /// Requests in the set.
    pub fn len(&self) -> usize {
        self.names.len()
    }

    /// Whether the set has no request.
    pub fn is_empty(&self) -> bool {
        self.names.is_empty()
    }

    /// Records that had no prefill signature.
    pub fn skipped(&self) -> usize {
        self.skipped
    }

    /// Layers and experts of the model.
    pub fn geometry(&self) -> Geometry {
        self.geometry
    }

    /// Layers that the prefill signatures have, ascending.
    pub fn layers(&self) -> &[u16] {
        &self.layers
    }

    /// Id and place of request `index`, for messages.
    ///
    /// # Panics
    /// If there is no such request.
    pub fn name(&self, index: usize) -> &str {
        &self.names[index]
    }

    /// Prefill counts of each request, row-major `[layer][expert]`.
    pub fn prefill(&self) -> impl ExactSizeIterator<Item = &[u16]> {
        self.prefill
            .chunks_exact(self.layers.len() * self.geometry.experts)
    }

    /// Decode counts, row-major `[layer][expert]`, of the requests that have them, with their index.
    pub fn decode(&self) -> impl ExactSizeIterator<Item = (usize, &[u16])> {
        // `max` only keeps an empty set from asking for chunks of zero.
        let row = (self.decode_layers.len() * self.geometry.experts).max(1);
        self.with_decode
            .iter()
            .copied()
            .zip(self.decode.chunks_exact(row))
    }
}

#[cfg(test)]
mod tests;
