//! Refit: the regions of a blob follow the traffic, and every worker keeps its role.
//!
//! Recent requests are clustered from the centroids that are in use, and the new regions are put in the order of the old ones
//! that they are most like, so that a worker goes on with requests like those it had (ELDR's online refit: weights and layers
//! stay). Drift says whether a refit is called for.

mod drift;
mod window;

use eldr_core::blob::Blob;
use eldr_core::similarity::dot;

use crate::assign::assign;
use crate::error::Error;
use crate::fit::shares_and_quantiles;
use crate::kmeans::{self, Clustering, Vectors};

pub use drift::Drift;
pub(crate) use drift::moved;
pub use window::{Limits, Window};

/// A blob that follows recent requests.
#[derive(Clone, Debug, PartialEq)]
pub struct Refitted {
    /// The next revision.
    pub blob: Blob,
    /// How far the requests were from the blob before.
    pub drift: Drift,
    /// Per region, the similarity of its new centroid to the one before.
    pub kept: Vec<f32>,
    /// K-means rounds.
    pub rounds: usize,
    /// Whether K-means came to rest.
    pub converged: bool,
}

/// Fits the regions of `blob` to `vectors`, unit vectors in the space of its transform.
///
/// # Errors
/// There are fewer vectors than regions, or no revision is left.
pub fn refit(blob: &Blob, vectors: Vectors<'_>) -> Result<Refitted, Error> {
    let regions = blob.regions.len();
    if vectors.len() < regions {
        return Err(Error::new(
            format!(
                "too few requests to refit to: {} for {regions} regions",
                vectors.len()
            ),
            "each region needs at least one request, better 30: take a longer window or more traces",
        ));
    }
    let revision = next_revision(blob)?;
    let current = Vectors::centroids_of(blob);
    let mut drift = Drift::default();
    let fitted = kmeans::balanced(vectors, blob.centroids.clone(), |round| {
        // The first round looks at the centroids in use.
        if round.index == 0 {
            drift = Drift::of_distances(blob, round.distances);
        }
    });
    let order = align(
        current,
        Vectors {
            values: &fitted.centroids,
            ..vectors
        },
    );
    let aligned = reorder(fitted, &order, vectors.dimension);
    let centroids = Vectors {
        values: &aligned.centroids,
        ..vectors
    };
    let similarity = |region| dot(current.row(region), centroids.row(region));
    let kept = (0..regions).map(similarity).collect();
    let (shares, quantiles) = shares_and_quantiles(vectors, &aligned, regions);
    let mut next = blob.clone();
    next.revision = revision;
    next.fit.requests = vectors.len() as u64;
    next.fit.shares = shares;
    next.fit.quantiles = quantiles;
    // What a file of another format said of the centroids before is no longer true of these.
    next.source = None;
    next.centroids = aligned.centroids;
    Ok(Refitted {
        blob: next,
        drift,
        kept,
        rounds: aligned.rounds,
        converged: aligned.converged,
    })
}

/// The revision after that of `blob`.
///
/// # Errors
/// It has the highest there is.
pub fn next_revision(blob: &Blob) -> Result<u64, Error> {
    blob.revision.checked_add(1).ok_or_else(|| {
        Error::new(
            format!("revision {} is the highest there is", blob.revision),
            "fit anew under a low revision, and restart the gateways",
        )
    })
}

/// Which of the `fitted` centroids succeeds each of the `current` ones, so that the sum of similarities is greatest.
pub fn align(current: Vectors<'_>, fitted: Vectors<'_>) -> Vec<usize> {
    let costs = current.distances(fitted);
    assign(&costs, 1, &mut vec![0; fitted.len()])
}

/// The clustering with its clusters renumbered: `order[new]` is the old number.
fn reorder(clustering: Clustering, order: &[usize], dimension: usize) -> Clustering {
    let mut new = vec![0; order.len()];
    order
        .iter()
        .enumerate()
        .for_each(|(at, &old)| new[old] = at);
    let centroid = |&old: &usize| &clustering.centroids[old * dimension..][..dimension];
    let centroids: Vec<&[f32]> = order.iter().map(centroid).collect();
    Clustering {
        centroids: centroids.concat(),
        assignment: clustering.assignment.iter().map(|&old| new[old]).collect(),
        ..clustering
    }
}

#[cfg(test)]
mod tests;
