//! Signatures as vectors, in the space of a blob that exists already, and requests of traces by their regions.

use std::path::Path;

use eldr_core::blob::Blob;
use eldr_core::route::BindError;
use eldr_core::signature::{Encoded, Scratch, Signature, SignatureError};
use eldr_core::similarity::dot;
use eldr_core::transform::Transform;

use crate::error::Error;
use crate::trace::{self, Record, TraceError};

/// Turns signatures into vectors, with buffers that are reused.
#[derive(Debug)]
pub struct Space {
    transform: Transform,
    scratch: Scratch,
    counts: Vec<u16>,
}

impl Space {
    /// The space of the blob's centroids.
    ///
    /// # Errors
    /// The blob compares gate sums, and signatures have counts.
    pub fn of(blob: &Blob) -> Result<Self, Error> {
        let kind = blob.transform.kind();
        if !kind.is_of_counts() {
            return Err(BindError::NotOfCounts { kind }.into());
        }
        Ok(Space {
            transform: blob.transform.clone(),
            scratch: Scratch::default(),
            counts: Vec::new(),
        })
    }

    /// The transform that makes the vectors.
    pub fn transform(&self) -> &Transform {
        &self.transform
    }

    /// Puts the unit vector of `header`, a value of `x-eldr-signature`, in place of what is in `vector`; zeros if none of its
    /// counts has a weight.
    ///
    /// # Errors
    /// It is no signature, or one of another model; the text says why.
    pub fn vector(&mut self, header: &[u8], vector: &mut Vec<f32>) -> Result<(), String> {
        let told = |error: SignatureError| error.to_string();
        let encoded = Encoded::parse(header).map_err(told)?;
        let (found, expected) = (encoded.geometry(), self.transform.geometry());
        if found != expected {
            return Err(format!("it has {found}, the blob {expected}"));
        }
        encoded
            .rows(self.transform.layers(), &mut self.scratch, &mut self.counts)
            .map_err(told)?;
        self.transform.apply_into(&self.counts, vector);
        Ok(())
    }

    /// Puts the unit vector of the record's prefill `signature` in place of what is in `vector`; false if it has no weight on the
    /// blob's layers, so that no region is near.
    ///
    /// # Errors
    /// It lacks a layer that the blob compares.
    fn vector_of(
        &mut self,
        record: &Record,
        signature: &Signature,
        vector: &mut Vec<f32>,
    ) -> Result<bool, TraceError> {
        let experts = signature.geometry().experts;
        self.counts.clear();
        for layer in self.transform.layers() {
            let Ok(row) = signature.layers().binary_search(layer) else {
                let problem = format!("it has no row for layer {layer}, which the blob compares");
                let hint = "record all layers, or those that `eldr inspect` shows of the blob";
                return Err(record.invalid("prefill", problem, hint));
            };
            let counts = &signature.counts()[row * experts..][..experts];
            self.counts.extend_from_slice(counts);
        }
        self.transform.apply_into(&self.counts, vector);
        Ok(vector.iter().any(|&value| value != 0.0))
    }
}

/// A request of a trace as a blob sees it.
pub(crate) struct Seen<'a> {
    /// Its prefill signature.
    pub(crate) signature: Signature,
    /// The unit vector of that.
    pub(crate) vector: &'a [f32],
    /// The regions by similarity of their centroids, the most similar first; of equal ones the first.
    pub(crate) similar: Vec<(usize, f32)>,
}

/// Reads traces, one record in memory at a time. `on_record` is told of every record, `on_request` of those that are in a region;
/// returns how many these are, and how many records without a prefill signature, or with one that has no weight, were skipped.
///
/// # Errors
/// Those of `on_request`; traces that cannot be read, do not fit the blob, or have no request with a region.
pub(crate) fn each_request<P: AsRef<Path>>(
    paths: &[P],
    blob: &Blob,
    mut on_record: impl FnMut(),
    mut on_request: impl FnMut(&Record, Seen<'_>) -> Result<(), Error>,
) -> Result<(usize, usize), Error> {
    let mut space = Space::of(blob)?;
    let mut vector = Vec::new();
    let (mut requests, mut skipped) = (0, 0);
    for path in paths {
        for record in trace::read(path)? {
            on_record();
            let record = record?;
            let Some(signature) = record.prefill_signature()? else {
                skipped += 1;
                continue;
            };
            check_geometry(&record, "prefill", &signature, blob)?;
            if !space.vector_of(&record, &signature, &mut vector)? {
                skipped += 1;
                continue;
            }
            requests += 1;
            let seen = Seen {
                signature,
                similar: by_similarity(&vector, blob),
                vector: &vector,
            };
            on_request(&record, seen)?;
        }
    }
    if requests == 0 {
        return Err(Error::new(
            format!("no signatures with a region: 0 of {skipped} records"),
            "give a trace with the field `prefill`, of the traffic that the blob was fitted to",
        ));
    }
    Ok((requests, skipped))
}

/// Checks that the record's `signature` is of the blob's model.
pub(crate) fn check_geometry(
    record: &Record,
    field: &'static str,
    signature: &Signature,
    blob: &Blob,
) -> Result<(), TraceError> {
    let (found, expected) = (signature.geometry(), blob.transform.geometry());
    if found == expected {
        return Ok(());
    }
    let problem = format!("it has {found}, the blob has {expected}");
    let hint = "give the blob of the model that the trace is of";
    Err(record.invalid(field, problem, hint))
}

fn by_similarity(vector: &[f32], blob: &Blob) -> Vec<(usize, f32)> {
    let mut regions: Vec<(usize, f32)> = blob
        .rows()
        .map(|row| dot(vector, row))
        .enumerate()
        .collect();
    regions.sort_by(|a, b| b.1.total_cmp(&a.1));
    regions
}
