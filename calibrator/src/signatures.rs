//! Signature header values as vectors, in the space of a blob that exists already.

use eldr_core::blob::Blob;
use eldr_core::signature::{Encoded, Scratch};
use eldr_core::transform::Transform;

/// Turns header values into vectors, with buffers that are reused.
#[derive(Debug)]
pub struct Space {
    transform: Transform,
    scratch: Scratch,
    counts: Vec<u16>,
}

impl Space {
    /// The space of the blob's centroids.
    pub fn of(blob: &Blob) -> Self {
        Space {
            transform: blob.transform.clone(),
            scratch: Scratch::default(),
            counts: Vec::new(),
        }
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
        let told = |error: eldr_core::signature::SignatureError| error.to_string();
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
}
