//! Any bytes as a centroid blob: refused, or exactly what the blob would be written as.

use eldr_core::blob::Blob;

/// Panics where a promise is broken.
pub fn check(bytes: &[u8]) {
    match Blob::from_bytes(bytes) {
        Ok(blob) => assert_eq!(blob.to_bytes().expect("it was read"), bytes),
        Err(error) => assert!(error.to_string().contains("\nhint: ")),
    }
}
