//! The fit agrees with the official ELDR artifact; `tests/data/parity/README.md` says on what.

mod fit;
mod kmeans;
mod layers;
mod refit;

use std::path::{Path, PathBuf};

use eldr_calibrator::npz::Npz;
use eldr_calibrator::requests::Requests;
use eldr_calibrator::trace::Record;
use eldr_core::signature::{Encoding, Geometry, Signature};
use serde::de::DeserializeOwned;

fn path(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/data/parity")
        .join(name)
}

fn npz(name: &str) -> Npz {
    Npz::open(&path(name)).unwrap()
}

fn json<T: DeserializeOwned>(name: &str) -> T {
    serde_json::from_slice(&std::fs::read(path(name)).unwrap()).unwrap()
}

/// The pairs of an archive, left and right.
fn pairs(npz: &mut Npz, prefix: &str) -> Vec<(usize, usize)> {
    let mut side = |side: &str| {
        let indices = npz.array::<i16>(&format!("{prefix}{side}")).unwrap().data;
        indices
            .into_iter()
            .map(|index| index as usize)
            .collect::<Vec<_>>()
    };
    side("pairs_left")
        .into_iter()
        .zip(side("pairs_right"))
        .collect()
}

/// Requests with the given counts, `[request][layer][expert]`.
fn requests(geometry: Geometry, prefill: &[u16], decode: Option<&[u16]>) -> Requests {
    let signature = |counts: &[u16]| Signature::dense(geometry, counts.to_vec(), None).unwrap();
    let mut decode = decode.map(|decode| decode.chunks(geometry.counts()));
    let mut requests = None;
    for counts in prefill.chunks(geometry.counts()) {
        let prefill = signature(counts);
        let decode = decode.as_mut().and_then(Iterator::next);
        let record = Record {
            decode: decode.map(|counts| signature(counts).encode(Encoding::Varint)),
            ..Record::default()
        };
        let requests = requests.get_or_insert_with(|| Requests::new(&prefill));
        requests.push(&record, &prefill).unwrap();
    }
    requests.unwrap()
}

#[track_caller]
fn assert_close(found: &[f32], expected: &[f32], tolerance: f32) {
    assert_eq!(found.len(), expected.len());
    for (at, (found, expected)) in found.iter().zip(expected).enumerate() {
        assert!(
            (found - expected).abs() <= tolerance,
            "at {at}: {found}, not {expected}"
        );
    }
}
