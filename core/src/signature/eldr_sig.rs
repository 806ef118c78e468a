//! The official artifact's carriage: `kv_transfer_params.eldr_sig` in the body of a prefill answer, standard base64 of
//! dense little-endian `i16` counts, row-major `[layer][expert]`.
//!
//! It does not say its geometry, so the blob's is taken. A count that is not negative has the same two bytes as `i16`
//! and as `u16`, so a valid text is the payload of a header as it stands.

use std::fmt::Write as _;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;

use super::{Geometry, MAX_HEADER_BYTES, SignatureError};

/// The header value that says the same as `eldr_sig` (the text between its quotes) of a model with this geometry.
///
/// The artifact's reader is strict where headers are lenient: padding is required, pad bits are zero.
///
/// # Errors
/// Not base64, another number of counts than the geometry's, or a negative count.
///
/// ```
/// use eldr_core::signature::{Geometry, Signature, header_from_eldr_sig};
///
/// let header = header_from_eldr_sig(b"AQAAAP9/", Geometry::new(1, 3)?)?;
/// assert_eq!(header, ":AQAAAP9/:;l=1;e=3");
/// assert_eq!(Signature::decode(header.as_bytes())?.counts(), [1, 0, 32_767]);
/// # Ok::<(), eldr_core::signature::SignatureError>(())
/// ```
pub fn header_from_eldr_sig(text: &[u8], geometry: Geometry) -> Result<String, SignatureError> {
    if text.len() > MAX_HEADER_BYTES {
        return Err(SignatureError::TooLong { bytes: text.len() });
    }
    let bytes = STANDARD
        .decode(text)
        .map_err(|_| SignatureError::Base64 { at: 0 })?;
    let expected = 2 * geometry.counts();
    if bytes.len() != expected {
        return Err(SignatureError::Length {
            found: bytes.len(),
            expected,
            unit: "bytes",
        });
    }
    let (pairs, _) = bytes.as_chunks::<2>();
    if let Some(index) = pairs.iter().position(|&pair| i16::from_le_bytes(pair) < 0) {
        return Err(SignatureError::Negative { index });
    }
    let mut header = String::with_capacity(text.len() + 24);
    header.push(':');
    // base64 is ASCII.
    header.push_str(&String::from_utf8_lossy(text));
    let Geometry { layers, experts } = geometry;
    let _ = write!(header, ":;l={layers};e={experts}");
    Ok(header)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::Value;

    use super::*;
    use crate::signature::Signature;

    fn read(name: &str) -> Value {
        let path = format!("{}/tests/data/parity/{name}", env!("CARGO_MANIFEST_DIR"));
        serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
    }

    fn geometry(vectors: &Value) -> Geometry {
        let file = read(vectors["centroid_file"].as_str().unwrap());
        let size = |field: &str| file[field].as_u64().unwrap() as usize;
        Geometry::new(size("L"), size("e")).unwrap()
    }

    #[test]
    fn the_artifacts_signatures_are_read_as_the_artifact_reads_them() {
        for name in ["tiny", "tiny_count", "full"] {
            let vectors = read(&format!("e_routing_e2e_{name}.json"));
            let geometry = geometry(&vectors);
            for case in vectors["cases"].as_array().unwrap() {
                let text = case["signature_b64"].as_str().unwrap();
                let header = header_from_eldr_sig(text.as_bytes(), geometry).unwrap();
                let counts = Signature::decode(header.as_bytes()).unwrap();
                let bytes = STANDARD.decode(text).unwrap();
                let expected: Vec<i64> = bytes
                    .chunks(2)
                    .map(|pair| i64::from(i16::from_le_bytes([pair[0], pair[1]])))
                    .collect();
                let found: Vec<i64> = counts.counts().iter().map(|&n| i64::from(n)).collect();
                assert_eq!(found, expected);
            }
        }
    }

    #[test]
    fn what_the_artifact_refuses_is_refused() {
        let mut refused = 0;
        for name in ["tiny", "tiny_count"] {
            let vectors = read(&format!("e_routing_e2e_{name}.json"));
            let geometry = geometry(&vectors);
            for case in vectors["invalid"].as_array().unwrap() {
                if let Some(text) = case["signature_b64"].as_str() {
                    let error = header_from_eldr_sig(text.as_bytes(), geometry);
                    assert!(error.is_err(), "{}", case["name"]);
                    refused += 1;
                }
            }
        }
        assert_eq!(refused, 18);
    }

    #[test]
    fn errors_say_what_is_wrong() {
        let geometry = Geometry::new(1, 2).unwrap();
        let of = |counts: &[i16]| {
            let bytes: Vec<u8> = counts.iter().flat_map(|n| n.to_le_bytes()).collect();
            let error = header_from_eldr_sig(STANDARD.encode(bytes).as_bytes(), geometry);
            error.unwrap_err().to_string()
        };
        assert_eq!(of(&[1, -1]), "signature count 1 is negative");
        assert_eq!(
            of(&[1]),
            "signature payload has 2 bytes, its parameters say 4"
        );
    }

    proptest! {
        #[test]
        fn any_counts_survive(counts in prop::collection::vec(0i16.., 1..300)) {
            let bytes: Vec<u8> = counts.iter().flat_map(|n| n.to_le_bytes()).collect();
            let geometry = Geometry::new(1, counts.len()).unwrap();
            let header = header_from_eldr_sig(STANDARD.encode(bytes).as_bytes(), geometry).unwrap();
            let decoded = Signature::decode(header.as_bytes()).unwrap();
            let found: Vec<i16> = decoded.counts().iter().map(|&n| n as i16).collect();
            prop_assert_eq!(found, counts);
        }

        #[test]
        fn arbitrary_text_never_panics(text: Vec<u8>) {
            let _ = header_from_eldr_sig(&text, Geometry::new(2, 3).unwrap());
        }
    }
}
