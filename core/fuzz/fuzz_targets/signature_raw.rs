//! Any bytes as a signature header: read as the `sfv` crate reads them, and row by row as at once.
#![no_main]

use eldr_core::signature::{Encoded, Geometry, Scratch, Signature};
use libfuzzer_sys::fuzz_target;

#[path = "../../src/signature/tests/oracle.rs"]
mod oracle;

fuzz_target!(|header: &[u8]| {
    let found = Signature::decode(header).ok();
    assert_eq!(found, oracle::decode(header));
    let Some(signature) = found else {
        return;
    };
    let encoded = Encoded::parse(header).expect("it was read before");
    let (mut scratch, mut counts) = (Scratch::default(), Vec::<u16>::new());
    let rows = signature.counts().chunks(signature.geometry().experts);
    for (&layer, row) in signature.layers().iter().zip(rows).take(20) {
        encoded
            .rows(&[layer], &mut scratch, &mut counts)
            .expect("the row is there");
        assert_eq!(counts, row);
    }
});
