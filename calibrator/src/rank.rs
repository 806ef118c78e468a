//! Spearman's rank correlation against a fixed target, with average ranks for ties.

use std::ops::Range;

/// Ranks `values` from 1; equal values share the average of their ranks.
///
/// Values must not be NaN.
pub fn average_ranks(values: &[f32]) -> Vec<f64> {
    let mut ranks = vec![0.0; values.len()];
    let mut sorted = Vec::new();
    sort(values, &mut sorted);
    for (rank, ties) in ties(&sorted) {
        sorted[ties]
            .iter()
            .for_each(|&(_, at)| ranks[at as usize] = rank);
    }
    ranks
}

/// Correlates many rankings with one target.
#[derive(Clone, Debug)]
pub struct Spearman {
    /// Ranks, less their mean: halves, which an `f32` holds exactly up to 2²³ of them.
    target: Vec<f32>,
    target_square: f64,
}

/// Room that [`Spearman::rho`] works in: the layer selection asks a thousand times for tens of thousands of values.
pub type Scratch = Vec<(f32, u32)>;

impl Spearman {
    /// A target; `None` if all its values are equal, since nothing correlates with a constant.
    pub fn new(target: &[f32]) -> Option<Self> {
        let mean = mean_rank(target.len());
        let ranks = average_ranks(target).into_iter().map(|rank| rank - mean);
        let target: Vec<f32> = ranks.map(|rank| rank as f32).collect();
        let square = |&rank: &f32| f64::from(rank) * f64::from(rank);
        let target_square = target.iter().map(square).sum();
        (target_square > 0.0).then_some(Spearman {
            target,
            target_square,
        })
    }

    /// Rank correlation of `values` with the target, −1 to 1; 0 if all values are equal.
    ///
    /// # Panics
    /// If there are not as many values as the target has.
    pub fn rho(&self, values: &[f32], scratch: &mut Scratch) -> f64 {
        assert_eq!(
            values.len(),
            self.target.len(),
            "one value per value of the target"
        );
        sort(values, scratch);
        let mean = mean_rank(values.len());
        let (mut square, mut covariance) = (0.0, 0.0);
        for (rank, ties) in ties(scratch) {
            let rank = rank - mean;
            square += rank * rank * ties.len() as f64;
            let target = scratch[ties]
                .iter()
                .map(|&(_, at)| f64::from(self.target[at as usize]));
            covariance += rank * target.sum::<f64>();
        }
        if square == 0.0 {
            return 0.0;
        }
        (covariance / (square * self.target_square).sqrt()).clamp(-1.0, 1.0)
    }
}

/// The mean of the ranks 1 to `count`, ties or not.
fn mean_rank(count: usize) -> f64 {
    (count as f64 + 1.0) / 2.0
}

/// The values with their places, ascending. In linear time: the layer selection does little else.
fn sort(values: &[f32], sorted: &mut Scratch) {
    sorted.clear();
    // Adding zero makes both zeros one value.
    sorted.extend(values.iter().zip(0..).map(|(&value, at)| (value + 0.0, at)));
    radsort::sort_by_key(sorted, |&(value, _)| value);
}

/// Runs of equal values, each with the average of its ranks.
fn ties(sorted: &[(f32, u32)]) -> impl Iterator<Item = (f64, Range<usize>)> {
    let mut first = 0;
    sorted.chunk_by(|(a, _), (b, _)| a == b).map(move |ties| {
        let run = first..first + ties.len();
        first = run.end;
        (run.start as f64 + mean_rank(run.len()), run)
    })
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
        let target = Spearman::new(&[1.0, 2.0, 3.0]).unwrap();
        let scratch = &mut Scratch::new();
        assert_eq!(target.rho(&[-5.0, 0.0, 700.0], scratch), 1.0);
        assert_eq!(target.rho(&[3.0, 2.0, 1.0], scratch), -1.0);
        assert_eq!(
            target.rho(&[2.0, 2.0, 2.0], scratch),
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
