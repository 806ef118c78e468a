//! The calibration set: what a fit reads from traces, as matrices.

use std::path::Path;

use eldr_core::signature::{Geometry, Signature};
use eldr_core::transform::SignatureKind;

use crate::error::Error;
use crate::trace::{self, Record, TraceError};

/// Expert counts of the calibration requests, all of one geometry.
#[derive(Clone, Debug, PartialEq)]
pub struct Requests {
    geometry: Geometry,
    kind: SignatureKind,
    layers: Vec<u16>,
    names: Vec<String>,
    prefill: Vec<u16>,
    /// Of a gate kind, as many as there are counts in `prefill`.
    gate: Vec<f32>,
    decode_layers: Vec<u16>,
    with_decode: Vec<usize>,
    decode: Vec<u16>,
    skipped: usize,
}

impl Requests {
    /// Reads whole traces; `on_record` is told of every record.
    ///
    /// Records without a prefill signature are skipped and counted.
    ///
    /// # Errors
    /// A trace cannot be read, is malformed, mixes models, or has no signature at all.
    pub fn read<P: AsRef<Path>>(paths: &[P], on_record: impl FnMut()) -> Result<Self, Error> {
        Self::read_for(SignatureKind::default(), paths, on_record)
    }

    /// [`read`](Self::read) for a fit of `kind`: gate kinds need the gate sums of every request.
    ///
    /// # Errors
    /// As [`read`](Self::read), and if gate sums are missing.
    pub fn read_for<P: AsRef<Path>>(
        kind: SignatureKind,
        paths: &[P],
        mut on_record: impl FnMut(),
    ) -> Result<Self, Error> {
        let mut set = None;
        let mut skipped = 0;
        for path in paths {
            for record in trace::read(path)? {
                on_record();
                let record = record?;
                match record.prefill_signature()? {
                    Some(prefill) => {
                        set.get_or_insert_with(|| Requests::new(&prefill).with_kind(kind))
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
            kind: SignatureKind::default(),
            layers: prefill.layers().to_vec(),
            names: Vec::new(),
            prefill: Vec::new(),
            gate: Vec::new(),
            decode_layers: Vec::new(),
            with_decode: Vec::new(),
            decode: Vec::new(),
            skipped: 0,
        }
    }

    /// The same, still empty, for a fit of `kind`.
    #[must_use]
    pub fn with_kind(self, kind: SignatureKind) -> Self {
        Requests { kind, ..self }
    }

    /// Adds `record`, whose prefill signature is `prefill`.
    ///
    /// # Errors
    /// A signature has another geometry or other layers than those before it, or gate sums are missing.
    pub fn push(&mut self, record: &Record, prefill: &Signature) -> Result<(), TraceError> {
        self.check(record, "prefill", prefill, &self.layers)?;
        let gate = record.gate_sums(self.kind, prefill)?;
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
        self.gate.extend(gate.into_iter().flatten());
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

    /// Some of the requests, in the order of `indices`, which ascend.
    ///
    /// # Panics
    /// If there is no such request.
    #[must_use]
    pub fn pick(&self, indices: &[usize]) -> Self {
        let mut picked = Requests {
            names: Vec::new(),
            prefill: Vec::new(),
            gate: Vec::new(),
            with_decode: Vec::new(),
            decode: Vec::new(),
            skipped: 0,
            layers: self.layers.clone(),
            decode_layers: self.decode_layers.clone(),
            ..*self
        };
        let row = self.layers.len() * self.geometry.experts;
        for &index in indices {
            if let Some(decode) = self.decode_of(index) {
                picked.with_decode.push(picked.len());
                picked.decode.extend_from_slice(decode);
            }
            picked.prefill.extend_from_slice(self.prefill_of(index));
            if !self.gate.is_empty() {
                picked
                    .gate
                    .extend_from_slice(&self.gate[index * row..][..row]);
            }
            picked.names.push(self.names[index].clone());
        }
        picked
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

    /// What of a request's routing is compared.
    pub fn kind(&self) -> SignatureKind {
        self.kind
    }

    /// Puts into `out` what request `index`'s signature is made of, counts or gate sums, for some `rows` (positions in
    /// [`layers`](Self::layers)), row-major `[row][expert]`.
    ///
    /// # Panics
    /// If there is no such request or row.
    pub fn rows_into(&self, index: usize, rows: &[usize], out: &mut Vec<f32>) {
        let experts = self.geometry.experts;
        let first = index * self.layers.len() * experts;
        out.clear();
        for row in rows.iter().map(|row| first + row * experts) {
            let here = row..row + experts;
            if self.kind.is_of_counts() {
                out.extend(self.prefill[here].iter().map(|&count| f32::from(count)));
            } else {
                out.extend_from_slice(&self.gate[here]);
            }
        }
    }

    /// Prefill counts of request `index`, row-major `[layer][expert]`.
    ///
    /// # Panics
    /// If there is no such request.
    pub fn prefill_of(&self, index: usize) -> &[u16] {
        let row = self.layers.len() * self.geometry.experts;
        &self.prefill[index * row..][..row]
    }

    /// Decode counts of request `index`, row-major `[layer][expert]`, if it has any.
    pub fn decode_of(&self, index: usize) -> Option<&[u16]> {
        let place = self.with_decode.binary_search(&index).ok()?;
        let row = self.decode_layers.len() * self.geometry.experts;
        Some(&self.decode[place * row..][..row])
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
