//! The obvious reader of signature headers; the fuzz targets use it too.

use super::{Geometry, Signature};

/// A header as the `sfv` crate reads it, everything decoded.
pub(super) fn decode(header: &[u8]) -> Option<Signature> {
    let item: sfv::Item = sfv::Parser::new(header).parse().ok()?;
    let bytes = item.bare_item.as_byte_sequence()?.to_vec();
    let integer = |key: &str| Some(i64::from(item.params.get(key)?.as_integer()?));
    let geometry = Geometry::new(
        integer("l")?.try_into().ok()?,
        integer("e")?.try_into().ok()?,
    )
    .ok()?;
    let n = match item.params.get("n") {
        Some(value) => Some(u64::try_from(i64::from(value.as_integer()?)).ok()?),
        None => None,
    };
    let layers = match item.params.get("layers") {
        Some(value) => {
            let mut layers = Vec::new();
            for part in value.as_string()?.as_str().split(',') {
                let (first, last) = part.split_once('-').unwrap_or((part, part));
                for digits in [first, last] {
                    // The format has at most five digits.
                    if !(1..=5).contains(&digits.len())
                        || !digits.bytes().all(|byte| byte.is_ascii_digit())
                    {
                        return None;
                    }
                }
                let (first, last): (u16, u16) = (first.parse().ok()?, last.parse().ok()?);
                if first > last || usize::from(last) >= geometry.layers {
                    return None;
                }
                layers.extend(first..=last);
            }
            layers
        }
        None => (0..geometry.layers).map(|layer| layer as u16).collect(),
    };
    let counts: Vec<u16> = match item.params.get("enc").map(|value| value.as_token()) {
        None => pairs(&bytes)?,
        Some(token) if token?.as_str() == "u16" => pairs(&bytes)?,
        Some(token) if token?.as_str() == "varint" => leb128(&bytes)?,
        Some(_) => return None,
    };
    Signature::sparse(geometry, layers, counts, n).ok()
}

fn pairs(bytes: &[u8]) -> Option<Vec<u16>> {
    bytes
        .chunks(2)
        .map(|pair| Some(u16::from_le_bytes(pair.try_into().ok()?)))
        .collect()
}

fn leb128(bytes: &[u8]) -> Option<Vec<u16>> {
    let mut counts = Vec::new();
    let (mut value, mut length) = (0u64, 0);
    for byte in bytes {
        value |= u64::from(byte & 0x7f) << (7 * length);
        length += 1;
        if length > 3 {
            return None;
        }
        if byte & 0x80 == 0 {
            counts.push(u16::try_from(value).ok()?);
            (value, length) = (0, 0);
        }
    }
    (length == 0).then_some(counts)
}
