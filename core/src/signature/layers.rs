//! Lists of layers such as `0-3,7`.

use std::ops::RangeInclusive;

use super::{Geometry, SignatureError};

const ALLOWED: &str = "ascending layers below `l`, such as \"0-3,7\"";

fn invalid() -> SignatureError {
    SignatureError::Parameter {
        name: "layers",
        allowed: ALLOWED,
    }
}

/// Layers must be non-empty, strictly ascending and below the model's count.
pub(super) fn check(layers: &[u16], geometry: Geometry) -> Result<(), SignatureError> {
    let ascending = layers.is_sorted_by(|a, b| a < b);
    match layers.last() {
        Some(&last) if ascending && usize::from(last) < geometry.layers => Ok(()),
        _ => Err(invalid()),
    }
}

/// Reads a list, range by range, in ascending order and below `limit`. Nothing is allocated.
pub(super) fn ranges(
    text: &[u8],
    limit: usize,
) -> impl Iterator<Item = Result<RangeInclusive<u16>, SignatureError>> {
    let mut previous = None;
    text.split(|&byte| byte == b',').map(move |part| {
        let (first, last) = match part.iter().position(|&byte| byte == b'-') {
            Some(dash) => {
                let (first, rest) = part.split_at(dash);
                (number(first)?, number(rest.get(1..).unwrap_or_default())?)
            }
            None => (number(part)?, number(part)?),
        };
        let ascending = previous.is_none_or(|previous| first > previous);
        if !ascending || first > last || usize::from(last) >= limit {
            return Err(invalid());
        }
        previous = Some(last);
        Ok(first..=last)
    })
}

fn number(digits: &[u8]) -> Result<u16, SignatureError> {
    if digits.is_empty() || digits.len() > 5 || !digits.iter().all(u8::is_ascii_digit) {
        return Err(invalid());
    }
    let value = digits
        .iter()
        .fold(0u32, |value, digit| value * 10 + u32::from(digit - b'0'));
    u16::try_from(value).map_err(|_| invalid())
}

/// Writes ascending layers, runs of consecutive ones as ranges.
pub(super) fn format(layers: &[u16]) -> String {
    let runs = layers.chunk_by(|a, b| u32::from(*a) + 1 == u32::from(*b));
    let parts: Vec<String> = runs
        .filter_map(|run| match (run.first(), run.last()) {
            (Some(first), Some(last)) if first == last => Some(first.to_string()),
            (Some(first), Some(last)) => Some(format!("{first}-{last}")),
            _ => None,
        })
        .collect();
    parts.join(",")
}
