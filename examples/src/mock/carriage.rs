//! How prefill tells a signature: in a header, or in the body as the official ELDR fork does.

use std::borrow::Cow;

use axum::http::HeaderValue;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use eldr_core::Signature;
use serde_json::Value;

/// Where the answer of a prefill leg has the signature.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum SignatureCarriage {
    /// Header `x-eldr-signature`.
    Header,
    /// Body, `kv_transfer_params.eldr_sig`: base64 of dense little-endian i16 counts `[layer][expert]`. Answers
    /// without `kv_transfer_params` carry none.
    Body,
}

/// The signature's key in `kv_transfer_params`.
pub(crate) const ELDR_SIG: &str = "eldr_sig";

/// What the body carries where a header would carry `header`; what is no signature stays as it is.
pub(crate) fn eldr_sig(header: &HeaderValue) -> String {
    let Ok(signature) = Signature::decode(header.as_bytes()) else {
        return String::from_utf8_lossy(header.as_bytes()).into_owned();
    };
    let bytes: Vec<u8> = dense(&signature)
        .into_iter()
        .flat_map(|count| i16::try_from(count).unwrap_or(i16::MAX).to_le_bytes())
        .collect();
    STANDARD.encode(bytes)
}

/// Counts of all layers `[layer][expert]`; rows that the signature lacks are 0.
pub(crate) fn dense(signature: &Signature) -> Vec<u16> {
    let geometry = signature.geometry();
    let mut counts = vec![0; geometry.counts()];
    let rows = signature.counts().chunks(geometry.experts);
    for (&layer, row) in signature.layers().iter().zip(rows) {
        let start = usize::from(layer) * geometry.experts;
        counts[start..start + row.len()].copy_from_slice(row);
    }
    counts
}

/// `kv_transfer_params` without the signature; borrowed if there was none.
pub(crate) fn without_eldr_sig(params: &Value) -> Cow<'_, Value> {
    match params.as_object() {
        Some(object) if object.contains_key(ELDR_SIG) => {
            let mut object = object.clone();
            object.remove(ELDR_SIG);
            Cow::Owned(Value::Object(object))
        }
        _ => Cow::Borrowed(params),
    }
}

#[cfg(test)]
mod tests {
    use eldr_core::signature::Encoding;
    use eldr_core::{Geometry, Signature};

    use super::*;

    #[test]
    fn the_body_has_all_layers_saturated_at_i16() {
        let geometry = Geometry::new(3, 2).unwrap();
        let signature = Signature::sparse(geometry, vec![0, 2], vec![1, 2, 40_000, 3], None);
        let header = signature.unwrap().encode(Encoding::Varint);
        let bytes = STANDARD.decode(eldr_sig(&header.parse().unwrap())).unwrap();
        assert_eq!(bytes, [1, 0, 2, 0, 0, 0, 0, 0, 0xff, 0x7f, 3, 0]);
    }

    #[test]
    fn what_is_no_signature_goes_out_as_it_is() {
        assert_eq!(eldr_sig(&HeaderValue::from_static("?!")), "?!");
    }
}
