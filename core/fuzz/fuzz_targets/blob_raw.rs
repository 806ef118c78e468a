//! Any bytes as a centroid blob: refused, or exactly what the blob would be written as.
#![no_main]

use eldr_core::blob::Blob;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    match Blob::from_bytes(bytes) {
        Ok(blob) => assert_eq!(blob.to_bytes().expect("it was read"), bytes),
        Err(error) => assert!(error.to_string().contains("\nhint: ")),
    }
});
