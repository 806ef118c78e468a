//! Gate sums, for signatures that counts do not give.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;

/// Writes gate sums, row-major `[layer][expert]`, as a trace carries them: base64 of little-endian `f32`.
pub fn encode_gate(sums: &[f32]) -> String {
    let bytes: Vec<u8> = sums.iter().flat_map(|sum| sum.to_le_bytes()).collect();
    STANDARD.encode(bytes)
}

/// Reads `count` gate sums; the error says what does not fit.
pub(super) fn decode(text: &str, count: usize) -> Result<Vec<f32>, String> {
    let bytes = STANDARD
        .decode(text)
        .map_err(|error| format!("it is not base64: {error}"))?;
    if bytes.len() != 4 * count {
        return Err(format!(
            "{} bytes where {count} sums of 4 bytes were expected, as many as `prefill` has counts",
            bytes.len()
        ));
    }
    let (sums, _) = bytes.as_chunks::<4>();
    let sums: Vec<f32> = sums.iter().map(|&sum| f32::from_le_bytes(sum)).collect();
    match sums.iter().position(|sum| !(0.0..=1e9).contains(sum)) {
        Some(at) => Err(format!("sum {at} is {}, allowed are 0 to 1e9", sums[at])),
        None => Ok(sums),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_are_read_as_they_were_written() {
        let sums = [0.0, 1.5, 3e8];
        assert_eq!(decode(&encode_gate(&sums), 3).unwrap(), sums);
    }

    #[test]
    fn what_is_no_sum_is_told() {
        let error = |text: &str| decode(text, 2).unwrap_err();
        assert!(error("?").contains("it is not base64"));
        assert!(error("AAAA").contains("3 bytes where 2 sums of 4 bytes"));
        for bad in [-1.0, f32::NAN, f32::INFINITY] {
            assert!(error(&encode_gate(&[0.5, bad])).contains("sum 1 is "));
        }
    }
}
