//! What generated requests are like, in the terms in which real ones were published.

use rand::{RngExt as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;

use super::draw::Gates;
use crate::layers;
use crate::rank::{Scratch, Spearman};

/// Batches that are drawn of each sort.
const BATCHES: usize = 48;
/// Pairs of requests whose distances are compared.
const PAIRS: usize = 4_000;

/// By which part fewer experts a decode step activates when its batch is of one domain, against one of all requests, both of `batch`
/// requests. Domains count by their shares; those with fewer requests than a batch are left out. None where that is all of them.
pub fn fewer_experts_in_domain(requests: &[Gates], batch: usize, seed: u64) -> Option<f64> {
    let domains = requests.iter().map(|gates| gates.domain).max()? + 1;
    let members = |domain: usize| -> Vec<usize> {
        let own = (0..requests.len()).filter(|&index| requests[index].domain == domain);
        own.collect()
    };
    let all: Vec<usize> = (0..requests.len()).collect();
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let (mut same, mut mixed, mut weight) = (0.0, 0.0, 0.0);
    for members in (0..domains).map(members).filter(|own| own.len() >= batch) {
        let share = members.len() as f64;
        weight += share;
        let batches = BATCHES / domains + 1;
        for (from, sum) in [(&members, &mut same), (&all, &mut mixed)] {
            let drawn = (0..batches).map(|_| experts(requests, from, batch, &mut rng));
            *sum += share * drawn.sum::<f64>() / batches as f64;
        }
    }
    (weight > 0.0).then(|| 1.0 - same / mixed)
}

/// Expected distinct experts, over all layers, of a batch of different requests out of `from`.
fn experts(requests: &[Gates], from: &[usize], batch: usize, rng: &mut ChaCha8Rng) -> f64 {
    let mut from = from.to_vec();
    let mut alone = vec![1.0f32; requests[0].decode.len()];
    for place in 0..batch.min(from.len()) {
        let other = rng.random_range(place..from.len());
        from.swap(place, other);
        let decode = &requests[from[place]].decode;
        alone
            .iter_mut()
            .zip(decode)
            .for_each(|(alone, p)| *alone *= 1.0 - p);
    }
    alone.iter().map(|alone| 1.0 - f64::from(*alone)).sum()
}

/// Spearman correlation between the cosine distance of two requests' prefill counts and that of their decode probabilities, over
/// random pairs. None where all pairs are alike.
pub fn phase_correlation(requests: &[Gates], seed: u64) -> Option<f64> {
    let unit = |values: Vec<f32>| -> Vec<f32> {
        let norm = values.iter().map(|x| x * x).sum::<f32>().sqrt().max(1e-9);
        values.into_iter().map(|x| x / norm).collect()
    };
    let prefill: Vec<Vec<f32>> = requests
        .iter()
        .map(|gates| unit(gates.prefill_counts.iter().map(|&n| n.into()).collect()))
        .collect();
    let decode: Vec<Vec<f32>> = requests
        .iter()
        .map(|gates| unit(gates.decode.clone()))
        .collect();
    let mut pairs = layers::pairs(requests.len(), seed);
    pairs.truncate(PAIRS);
    let distances = |vectors: &[Vec<f32>]| -> Vec<f32> {
        pairs
            .iter()
            .map(|&(a, b)| 1.0 - dot(&vectors[a], &vectors[b]))
            .collect()
    };
    let target = Spearman::new(&distances(&decode))?;
    Some(target.rho(&distances(&prefill), &mut Scratch::new()))
}

fn dot(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}
