//! Probabilities as fixed-point numbers that can be multiplied by adding, and undone exactly.
//!
//! Π(1 − pᵣ) over the requests of a batch is kept as Σ −log₂(1 − pᵣ), in units of 2⁻¹³ bits: integers, so that what was added
//! comes off again without a trace, in whatever order requests end. Both directions are polynomials of plain additions and
//! multiplications, because the logarithms of operating systems differ in their last bits and WebAssembly has none.

/// Fractional bits of a [`cost`].
const FRACTION_BITS: u32 = 13;
const ONE: f32 = (1u32 << FRACTION_BITS) as f32;
/// Largest probability. Certainty could not be taken back: its logarithm has no end. The cost of this one fits 16 bits.
pub(super) const MAX_PROBABILITY: f32 = 0.98;

/// −log₂(1 − p) in units of 2⁻¹³ bits, `p` clipped to 0 to 0.98.
#[inline]
pub(super) fn cost(p: f32) -> u16 {
    let bits = (1.0 - p.clamp(0.0, MAX_PROBABILITY)).to_bits();
    let exponent = (127 - (bits >> 23) as i32) as f32;
    // log₂ m for m = 1 + t in [1, 2): interpolated at Chebyshev nodes, off by at most 8e-6. No constant term: log₂ 1 is 0.
    let t = f32::from_bits(bits & 0x007f_ffff | 0x3f80_0000) - 1.0;
    let slope = -0.033_822_045 * t + 0.144_471_1;
    let slope = slope * t - 0.301_638;
    let slope = slope * t + 0.468_658_86;
    let slope = slope * t - 0.720_358_8;
    let slope = slope * t + 1.442_681_4;
    // Below 2¹⁶, so that adding 2²³ rounds it to a whole number and leaves that in the low bits; a cast would look for what
    // does not fit, one value at a time.
    ((exponent - slope * t) * ONE + 8_388_608.0).to_bits() as u16
}

/// A unit vector's entry, 0 to 1, in units of 1/65,535.
#[inline]
pub(super) fn part(value: f32) -> u16 {
    (value.clamp(0.0, 1.0) * f32::from(u16::MAX) + 8_388_608.0).to_bits() as u16
}

/// 2^−x for the sum of costs x: the probability that none of the requests uses the expert. 1 for 0, exactly.
#[inline]
pub(super) fn survival(sum: u32) -> f32 {
    // Whole bits go into the exponent; beyond 100 of them it makes no difference, and numbers stay normal.
    let whole = ((sum >> FRACTION_BITS) as i32).min(100) as u32;
    let x = (sum & ((1 << FRACTION_BITS) - 1)) as i32 as f32 * (1.0 / ONE);
    // 2^−x for x in [0, 1): interpolated at Chebyshev nodes, off by a relative 6e-7 at most.
    let slope = -0.001_003_630_5 * x + 0.009_344_231;
    let slope = slope * x - 0.055_408_56;
    let slope = slope * x + 0.240_214_69;
    let slope = slope * x - 0.693_146_94;
    f32::from_bits((slope * x + 1.0).to_bits() - (whole << 23))
}

/// The survival of a sum of costs in units of 1/255, to be told to others.
#[inline]
pub(super) fn level(sum: u32) -> u8 {
    (survival(sum) * 255.0 + 8_388_608.0).to_bits() as u8
}

/// The cost that a [`level`] stands for; the lowest stands for a quarter of a unit.
pub(super) fn cost_of_level(level: u8) -> u32 {
    let mut survival = f32::from(level).max(0.25) / 255.0;
    let mut whole = 0;
    while survival < 0.5 {
        survival *= 2.0;
        whole += 1 << FRACTION_BITS;
    }
    whole + u32::from(cost(1.0 - survival))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn costs_are_logarithms_within_one_unit_and_ascend() {
        let mut last = 0;
        for n in 0..=100_000u32 {
            let p = n as f32 / 100_000.0;
            let expected = -(1.0 - f64::from(p.min(MAX_PROBABILITY))).log2() * f64::from(ONE);
            let found = cost(p);
            assert!(
                (f64::from(found) - expected).abs() < 0.6,
                "{p}: {found}, not {expected}"
            );
            assert!(found >= last, "{p}");
            last = found;
        }
        assert_eq!(cost(0.0), 0);
        assert_eq!(cost(-1.0), 0);
        assert_eq!(cost(2.0), cost(MAX_PROBABILITY));
    }

    #[test]
    fn parts_are_rounded_to_the_nearest_unit() {
        for n in 0..=65_535u16 {
            assert_eq!(part(f32::from(n) / 65_535.0), n);
        }
        assert_eq!(
            (part(-0.1), part(1.1), part(0.4 / 65_535.0)),
            (0, 65_535, 0)
        );
    }

    #[test]
    fn survivals_are_powers_of_two_and_descend() {
        let mut last = 1.0;
        for sum in 0..100 << FRACTION_BITS {
            let expected = (-f64::from(sum) / f64::from(ONE)).exp2();
            let found = survival(sum);
            assert!(
                (f64::from(found) / expected - 1.0).abs() < 1e-6,
                "{sum}: {found}"
            );
            assert!(found <= last * (1.0 + 1e-6), "{sum}");
            last = found;
        }
        assert_eq!(survival(0), 1.0);
        for beyond in [100 << FRACTION_BITS, 1 << 20, u32::MAX] {
            let found = survival(beyond);
            assert!(found <= last && found.is_normal(), "{beyond}: {found}");
        }
    }

    #[test]
    fn levels_are_what_they_stand_for() {
        for told in 0..=255u8 {
            assert_eq!(level(cost_of_level(told)), told);
        }
        assert_eq!((cost_of_level(255), level(u32::MAX)), (0, 0));
    }
}
