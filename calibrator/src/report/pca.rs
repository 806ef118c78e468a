//! The plane in which vectors differ most: two principal components.

use eldr_core::similarity::dot;
use nalgebra::{DMatrix, SymmetricEigen};

/// Two principal components of some vectors, kept as combinations of these: for few vectors of many
/// dimensions, the matrix of their dot products is far smaller than that of the dimensions.
#[derive(Clone, Debug)]
pub struct Pca<'a> {
    rows: Vec<&'a [f32]>,
    /// Mean dot product of each row with all, and the mean of these.
    means: Vec<f64>,
    mean: f64,
    /// Per component, the coefficient of each row.
    components: [Vec<f64>; 2],
    /// Share of the variance that each component explains.
    pub explained: [f64; 2],
}

impl<'a> Pca<'a> {
    /// The components of `rows`, all of one length and at least one. The first clearly positive
    /// coordinate makes the sign of each.
    pub fn new(rows: Vec<&'a [f32]>) -> Self {
        let n = rows.len();
        let mut products = DMatrix::zeros(n, n);
        for i in 0..n {
            for j in 0..=i {
                let product = f64::from(dot(rows[i], rows[j]));
                products[(i, j)] = product;
                products[(j, i)] = product;
            }
        }
        let means: Vec<f64> = products.column_iter().map(|column| column.mean()).collect();
        let mean = means.iter().sum::<f64>() / n as f64;
        for i in 0..n {
            for j in 0..n {
                products[(i, j)] += mean - means[i] - means[j];
            }
        }
        let total = products.trace();
        let eigen = SymmetricEigen::new(products);
        let mut order: Vec<usize> = (0..n).collect();
        order.sort_by(|&a, &b| eigen.eigenvalues[b].total_cmp(&eigen.eigenvalues[a]));
        let mut explained = [0.0; 2];
        let components = std::array::from_fn(|at| {
            let Some(&column) = order.get(at) else {
                return vec![0.0; n];
            };
            let value = eigen.eigenvalues[column];
            // What is left beside rounding; equal vectors have none.
            if value <= 1e-9 * (n as f64) {
                return vec![0.0; n];
            }
            explained[at] = value / total;
            let vector = eigen.eigenvectors.column(column);
            let largest = vector.amax();
            let first = vector.iter().find(|value| value.abs() > 0.5 * largest);
            let sign = first.map_or(1.0, |value| value.signum());
            vector.iter().map(|v| sign * v / value.sqrt()).collect()
        });
        Pca {
            rows,
            means,
            mean,
            components,
            explained,
        }
    }

    /// Where `vector` is in the plane.
    pub fn project(&self, vector: &[f32]) -> (f64, f64) {
        let products: Vec<f64> = self
            .rows
            .iter()
            .map(|row| f64::from(dot(row, vector)))
            .collect();
        let own = products.iter().sum::<f64>() / products.len() as f64;
        let along = |component: &[f64]| {
            let centred = products.iter().zip(&self.means);
            let centred = centred.map(|(product, mean)| product - mean - own + self.mean);
            centred
                .zip(component)
                .map(|(product, share)| product * share)
                .sum()
        };
        (along(&self.components[0]), along(&self.components[1]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn points_of_a_plane_keep_their_distances() {
        // A rectangle of 4 × 2, in a plane of four dimensions.
        let [a, b] = [[0.5f32, 0.5, 0.5, 0.5], [0.5, -0.5, 0.5, -0.5]];
        let point = |x: f32, y: f32| -> Vec<f32> {
            a.iter().zip(&b).map(|(a, b)| 7.0 + a * x + b * y).collect()
        };
        let corners =
            [(2.0, 1.0), (2.0, -1.0), (-2.0, 1.0), (-2.0, -1.0)].map(|(x, y)| point(x, y));
        let pca = Pca::new(corners.iter().map(Vec::as_slice).collect());
        let found = corners.each_ref().map(|corner| pca.project(corner));
        for (corner, (x, y)) in found.iter().enumerate() {
            assert!(
                (x.abs() - 2.0).abs() < 1e-4 && (y.abs() - 1.0).abs() < 1e-4,
                "{corner}: {found:?}"
            );
        }
        assert!(found[0].0 > 0.0, "the first is to the right");
        assert!((pca.explained[0] - 0.8).abs() < 1e-4 && (pca.explained[1] - 0.2).abs() < 1e-4);
        let (x, y) = pca.project(&point(0.0, 0.0));
        assert!(
            x.abs() < 1e-4 && y.abs() < 1e-4,
            "the mean is in the middle"
        );
    }

    #[test]
    fn equal_vectors_are_one_point() {
        let row = [0.6f32, 0.8];
        let pca = Pca::new(vec![&row, &row, &row]);
        assert_eq!((pca.project(&row), pca.explained), ((0.0, 0.0), [0.0; 2]));
        let single = Pca::new(vec![&row]);
        assert_eq!(single.project(&row), (0.0, 0.0));
    }
}
