//! Least squares over the last requests, kept as sums.

/// How many requests are remembered: older ones fade.
const MEMORY: f64 = 1_000.0;

/// Means and sums of products of what requests met and how long their steps took, the newest counted most.
#[derive(Debug, Clone, PartialEq, Default)]
pub(super) struct Moments {
    /// Of all requests, at most [`MEMORY`].
    weight: f64,
    /// Experts, requests, milliseconds.
    means: [f64; 3],
    /// Around the means, a triangle: experts², experts·requests, experts·ms, requests², requests·ms, ms².
    products: [f64; 6],
}

impl Moments {
    pub(super) fn weight(&self) -> f64 {
        self.weight
    }

    pub(super) fn mean_ms(&self) -> f64 {
        let [_, _, ms] = self.means;
        ms
    }

    /// One more request, of `[experts, requests]`.
    pub(super) fn add(&mut self, [experts, requests]: [f64; 2], ms: f64) {
        let keep = 1.0 - 1.0 / MEMORY;
        self.weight = keep * self.weight + 1.0;
        let values = [experts, requests, ms];
        let [mut e, mut r, mut m] = [0.0; 3];
        for ((mean, value), off) in self
            .means
            .iter_mut()
            .zip(values)
            .zip([&mut e, &mut r, &mut m])
        {
            *off = value - *mean;
            *mean += *off / self.weight;
        }
        // Off the mean before times off the mean after.
        let part = 1.0 - 1.0 / self.weight;
        let pairs = [e * e, e * r, e * m, r * r, r * m, m * m];
        for (product, pair) in self.products.iter_mut().zip(pairs) {
            *product = keep * *product + part * pair;
        }
    }

    /// Costs of an expert and of a request, at least 0, that make least the squares of what they leave unexplained, plus the squares
    /// of how far they are from `stated`, each times how much that is `believed`.
    pub(super) fn costs(&self, stated: [f64; 2], believed: [f64; 2]) -> [f64; 2] {
        let [ee, er, em, rr, rm, _] = self.products;
        let ([b0, c0], [of_b, of_c]) = (stated, believed);
        let (ee, rr) = (ee + of_b, rr + of_c);
        let (em, rm) = (em + of_b * b0, rm + of_c * c0);
        // Not 0, because something is believed of either.
        let determinant = ee * rr - er * er;
        let b = (em * rr - rm * er) / determinant;
        let c = (rm * ee - em * er) / determinant;
        if b >= 0.0 && c >= 0.0 {
            return [b, c];
        }
        // Else the least is where one of them is 0 and the other one as good as it can be then.
        let bounds = [[(em / ee).max(0.0), 0.0], [0.0, (rm / rr).max(0.0)]];
        let squares =
            |[b, c]: [f64; 2]| b * b * ee + 2.0 * b * c * er + c * c * rr - 2.0 * (b * em + c * rm);
        let [of_b, of_c] = bounds;
        if squares(of_b) < squares(of_c) {
            of_b
        } else {
            of_c
        }
    }

    /// What of the mean time such costs leave.
    pub(super) fn rest_ms(&self, [b, c]: [f64; 2]) -> f64 {
        let [experts, requests, ms] = self.means;
        ms - b * experts - c * requests
    }

    /// Variance of the times that such costs leave.
    pub(super) fn residual(&self, [b, c]: [f64; 2]) -> f64 {
        let [ee, er, em, rr, rm, mm] = self.products;
        let explained = 2.0 * (b * em + c * rm) - (b * b * ee + 2.0 * b * c * er + c * c * rr);
        ((mm - explained) / self.weight.max(1.0)).max(0.0)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn loads() -> impl Strategy<Value = Vec<([f64; 2], f64)>> {
        let load = ([0.0..128.0, 0.0..64.0], 1.0..50.0);
        proptest::collection::vec(load, 0..60)
    }

    /// What is to be least, request by request.
    fn squares(
        requests: &[([f64; 2], f64)],
        [b, c]: [f64; 2],
        stated: [f64; 2],
        believed: [f64; 2],
    ) -> f64 {
        let weights: Vec<f64> = (0..requests.len())
            .map(|n| (1.0 - 1.0 / MEMORY).powi((requests.len() - 1 - n) as i32))
            .collect();
        let left = |([experts, requests], ms): &([f64; 2], f64)| ms - b * experts - c * requests;
        let total: f64 = weights.iter().sum();
        let mean = requests
            .iter()
            .zip(&weights)
            .map(|(request, weight)| weight * left(request))
            .sum::<f64>()
            / total.max(1.0);
        let squares: f64 = requests
            .iter()
            .zip(&weights)
            .map(|(request, weight)| weight * (left(request) - mean).powi(2))
            .sum();
        squares + believed[0] * (b - stated[0]).powi(2) + believed[1] * (c - stated[1]).powi(2)
    }

    proptest! {
        #[test]
        fn no_other_costs_leave_less(
            requests in loads(), stated in [0.0..1.0, 0.0..1.0], believed in [0.1..100.0, 0.1..100.0],
            others in proptest::collection::vec([-0.2..0.2, -0.2..0.2], 20),
        ) {
            let mut moments = Moments::default();
            for (load, ms) in &requests {
                moments.add(*load, *ms);
            }
            let found = moments.costs(stated, believed);
            prop_assert!(found[0] >= 0.0 && found[1] >= 0.0, "{found:?}");
            let least = squares(&requests, found, stated, believed);
            let scales = [1.0, 0.1, 0.01];
            for (other, scale) in others.iter().flat_map(|other| scales.map(|scale| (other, scale))) {
                let near = [0, 1].map(|index| f64::max(found[index] + scale * other[index], 0.0));
                let more = squares(&requests, near, stated, believed);
                prop_assert!(more >= least * (1.0 - 1e-9), "{near:?} {more} is less than {found:?} {least}");
            }
        }

        #[test]
        fn what_is_left_is_what_requests_say_one_by_one(requests in loads(), costs in [0.0..1.0, 0.0..1.0]) {
            let mut moments = Moments::default();
            for (load, ms) in &requests {
                moments.add(*load, *ms);
            }
            let expected = squares(&requests, costs, costs, [0.0; 2]) / moments.weight().max(1.0);
            prop_assert!((moments.residual(costs) - expected).abs() < 1e-6 * expected.max(1.0));
        }
    }
}
