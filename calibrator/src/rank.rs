//! Spearman's rank correlation against a fixed target, with average ranks for ties.

/// Ranks `values` from 1; equal values share the average of their ranks.
///
/// Values must not be NaN.
pub fn average_ranks(values: &[f32]) -> Vec<f64> {
    let mut ranks = Vec::new();
    rank_into(values, &mut Vec::new(), &mut ranks);
    ranks
}

/// Correlates many rankings with one target.
#[derive(Clone, Debug)]
pub struct Spearman {
    target: Vec<f64>,
    target_square: f64,
    // Reused: the layer selection asks a thousand times for tens of thousands of values.
    keys: Vec<u64>,
    ranks: Vec<f64>,
}

impl Spearman {
    /// A target; `None` if all its values are equal, since nothing correlates with a constant.
    pub fn new(target: &[f32]) -> Option<Self> {
        let mut target = average_ranks(target);
        let target_square = centre(&mut target);
        let varies = target_square > 0.0;
        varies.then(|| Spearman {
            target,
            target_square,
            keys: Vec::new(),
            ranks: Vec::new(),
        })
    }

    /// Rank correlation of `values` with the target, −1 to 1; 0 if all values are equal.
    ///
    /// # Panics
    /// If there are not as many values as the target has.
    pub fn rho(&mut self, values: &[f32]) -> f64 {
        assert_eq!(
            values.len(),
            self.target.len(),
            "one value per value of the target"
        );
        rank_into(values, &mut self.keys, &mut self.ranks);
        let square = centre(&mut self.ranks);
        if square == 0.0 {
            return 0.0;
        }
        let covariance: f64 = self
            .ranks
            .iter()
            .zip(&self.target)
            .map(|(a, b)| a * b)
            .sum();
        (covariance / (square * self.target_square).sqrt()).clamp(-1.0, 1.0)
    }
}

/// Subtracts the mean; returns the squared length of what remains.
fn centre(ranks: &mut [f64]) -> f64 {
    // The mean of the ranks 1 to n, ties or not.
    let mean = (ranks.len() as f64 + 1.0) / 2.0;
    let mut square = 0.0;
    for rank in ranks {
        *rank -= mean;
        square += *rank * *rank;
    }
    square
}

fn rank_into(values: &[f32], keys: &mut Vec<u64>, ranks: &mut Vec<f64>) {
    keys.clear();
    // One integer orders by value, then by position: sorting integers is several times faster than
    // sorting positions by a float comparison.
    keys.extend(
        values
            .iter()
            .enumerate()
            .map(|(at, &v)| u64::from(ordered(v)) << 32 | at as u64),
    );
    keys.sort_unstable();
    ranks.clear();
    ranks.resize(values.len(), 0.0);
    let mut first = 0;
    while first < keys.len() {
        let value = keys[first] >> 32;
        let equal = keys[first..]
            .iter()
            .take_while(|&&key| key >> 32 == value)
            .count();
        let rank = first as f64 + (equal as f64 + 1.0) / 2.0;
        for key in &keys[first..first + equal] {
            ranks[(key & u64::from(u32::MAX)) as usize] = rank;
        }
        first += equal;
    }
}

/// Bits that compare like the float, both zeros alike.
fn ordered(value: f32) -> u32 {
    let bits = (value + 0.0).to_bits();
    if bits >> 31 == 1 {
        !bits
    } else {
        bits | 1 << 31
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The definition, by counting.
    fn oracle(values: &[f32]) -> Vec<f64> {
        let count = |pick: &dyn Fn(f32) -> bool| values.iter().filter(|&&v| pick(v)).count() as f64;
        values
            .iter()
            .map(|&v| count(&|w| w < v) + (count(&|w| w == v) + 1.0) / 2.0)
            .collect()
    }

    #[test]
    fn equal_values_share_their_average_rank() {
        assert_eq!(
            average_ranks(&[3.0, -1.0, 3.0, 0.0, -0.0]),
            [4.5, 1.0, 4.5, 2.5, 2.5]
        );
    }

    #[test]
    fn same_order_is_one_and_reverse_order_minus_one() {
        let mut target = Spearman::new(&[1.0, 2.0, 3.0]).unwrap();
        assert_eq!(target.rho(&[-5.0, 0.0, 700.0]), 1.0);
        assert_eq!(target.rho(&[3.0, 2.0, 1.0]), -1.0);
        assert_eq!(
            target.rho(&[2.0, 2.0, 2.0]),
            0.0,
            "a constant tells nothing"
        );
    }

    #[test]
    fn a_constant_is_no_target() {
        assert!(Spearman::new(&[1.0, 1.0]).is_none());
        assert!(Spearman::new(&[1.0]).is_none());
        assert!(Spearman::new(&[]).is_none());
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn ranks_are_those_of_the_definition(
            values in prop::collection::vec(
                prop_oneof![(-3i8..3).prop_map(f32::from), -1e3f32..1e3], 0..40,
            ),
        ) {
            prop_assert_eq!(average_ranks(&values), oracle(&values));
        }
    }
}
