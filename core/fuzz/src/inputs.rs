//! Inputs for property tests: what the fuzzer's seeds are, damaged seeds, and any bytes.

use std::path::Path;

use arbitrary::{Arbitrary, Unstructured};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::{Index, select};

/// The committed seeds of a target.
pub(crate) fn seeds(fuzz_dir: &str, target: &str) -> Vec<Vec<u8>> {
    let dir = Path::new(fuzz_dir).join("seeds").join(target);
    let files =
        std::fs::read_dir(&dir).unwrap_or_else(|error| panic!("{}: {error}", dir.display()));
    let mut paths: Vec<_> = files.map(|file| file.expect("an entry").path()).collect();
    paths.sort();
    let seeds: Vec<_> = paths
        .iter()
        .map(|path| std::fs::read(path).expect("a seed"))
        .collect();
    assert!(!seeds.is_empty(), "no seeds in {}", dir.display());
    seeds
}

/// Damage of the kind that the fuzzer does, the beginning of one seed with the end of another, and inputs that are nothing
/// but noise.
pub(crate) fn bytes(seeds: Vec<Vec<u8>>) -> impl Strategy<Value = Vec<u8>> {
    let crossed = (select(seeds.clone()), select(seeds.clone()), any::<Index>());
    let crossed = crossed.prop_map(|(mut bytes, other, at)| {
        let at = at.index(bytes.len().min(other.len()) + 1);
        bytes.truncate(at);
        bytes.extend(other.iter().skip(at));
        bytes
    });
    let edits = vec((any::<Index>(), any::<u8>(), 0u8..3), 0..4);
    let damaged = (select(seeds), edits).prop_map(|(mut bytes, edits)| {
        for (at, byte, kind) in edits {
            let at = at.index(bytes.len() + 1);
            match kind {
                0 => bytes.insert(at, byte),
                1 => drop(bytes.drain(at..bytes.len().min(at + usize::from(byte % 16)))),
                _ => bytes
                    .iter_mut()
                    .skip(at)
                    .take(1)
                    .for_each(|old| *old = byte),
            }
        }
        bytes
    });
    prop_oneof![3 => damaged, 1 => crossed, 1 => vec(any::<u8>(), 0..2048)]
}

/// The value that the fuzzer would make of these bytes.
pub(crate) fn value<'a, T: Arbitrary<'a>>(bytes: &'a [u8]) -> Option<T> {
    T::arbitrary_take_rest(Unstructured::new(bytes)).ok()
}
