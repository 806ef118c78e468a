//! A signature is read as it was written, whichever rows are asked for; a header that was tampered with is read as the
//! `sfv` crate reads it.
#![no_main]

use eldr_core::signature::{Encoded, Encoding, Geometry, Scratch, Signature};
use libfuzzer_sys::arbitrary::{self, Arbitrary};
use libfuzzer_sys::fuzz_target;

#[path = "../../src/signature/tests/oracle.rs"]
mod oracle;

#[derive(Arbitrary, Debug)]
struct Input {
    layers: u8,
    experts: u8,
    /// Which layers have a row; none means all.
    present: u32,
    /// Which layers are asked for.
    wanted: u32,
    counts: Vec<u16>,
    prompt_tokens: Option<u32>,
    varint: bool,
    splice: Option<Splice>,
}

#[derive(Arbitrary, Debug)]
struct Splice {
    /// From the end, where the parameters are.
    from_end: u8,
    removed: u8,
    inserted: Vec<u8>,
}

fn chosen(layers: usize, mask: u32) -> Vec<u16> {
    (0..layers as u16)
        .filter(|layer| mask >> layer & 1 == 1)
        .collect()
}

fuzz_target!(|input: Input| {
    let geometry = Geometry {
        layers: usize::from(input.layers % 32) + 1,
        experts: usize::from(input.experts % 40) + 1,
    };
    let mut layers = chosen(geometry.layers, input.present);
    if layers.is_empty() {
        layers = (0..geometry.layers as u16).collect();
    }
    let mut counts = input.counts;
    counts.resize(layers.len() * geometry.experts, 3);
    let tokens = input.prompt_tokens.map(u64::from);
    let signature = Signature::sparse(geometry, layers, counts, tokens).expect("valid");
    let encoding = if input.varint {
        Encoding::Varint
    } else {
        Encoding::U16
    };
    let mut header = signature.encode(encoding).into_bytes();
    assert_eq!(Signature::decode(&header).expect("ours"), signature);
    assert_eq!(oracle::decode(&header).expect("ours"), signature);

    let wanted = chosen(geometry.layers, input.wanted);
    let (mut scratch, mut found) = (Scratch::default(), Vec::<u16>::new());
    let rows = Encoded::parse(&header)
        .expect("ours")
        .rows(&wanted, &mut scratch, &mut found);
    let row = |layer| {
        let at = signature.layers().binary_search(layer).ok()?;
        signature.counts().chunks(geometry.experts).nth(at)
    };
    let expected: Option<Vec<&[u16]>> = wanted.iter().map(row).collect();
    assert_eq!(
        rows.ok().map(|()| found),
        expected.map(|rows| rows.concat())
    );

    if let Some(splice) = input.splice {
        let start = header.len().saturating_sub(usize::from(splice.from_end));
        let end = (start + usize::from(splice.removed % 8)).min(header.len());
        header.splice(start..end, splice.inserted);
        assert_eq!(Signature::decode(&header).ok(), oracle::decode(&header));
    }
});
