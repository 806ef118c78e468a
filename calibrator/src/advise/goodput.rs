//! How many requests per second a P99 allows.

use serde::Serialize;

use super::ground::{Case, Ground, Trial};
use super::judge::Judged;
use super::{Effort, Progress, spec};
use crate::error::Error;
use crate::simulate::{PolicySpec, Times};

/// Rates are told apart to this part of them.
const PRECISION: f64 = 0.01;
/// Doublings or halvings of the plan's rate at most.
const DOUBLINGS: u32 = 6;

/// Requests per second at P99 TPOT ≤ `slo_tpot_ms`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Goodput {
    /// The limit, ms.
    pub slo_tpot_ms: f64,
    /// The load balancer with the best P99, and its rate; none where no rate that was tried keeps the limit.
    pub balancer: (String, Option<f64>),
    /// The recommended policy, and its rate.
    pub policy: (String, Option<f64>),
    /// Whether the limit was asked for; otherwise it is the load balancer's own P99 at the rate that was.
    pub asked: bool,
}

/// Searches rates for the best load balancer and the policy.
pub(super) fn goodput(
    grounds: &[Ground<'_>],
    policy: &(PolicySpec, usize),
    judged: &[Judged],
    effort: Effort,
    progress: &dyn Progress,
) -> Result<Goodput, Error> {
    let balancers = judged.iter().filter(|judged| judged.balances);
    let best = balancers.min_by(|a, b| a.p99_ms.total_cmp(&b.p99_ms));
    let (name, p99) = best.map_or(("least_loaded", 0.0), |best| (&best.policy, best.p99_ms));
    let slo = effort.slo_tpot_ms.unwrap_or(p99);
    let balancer = (spec(name)?, 0);
    progress.begin("goodput", 0);
    let rate = |policy: &(PolicySpec, usize)| -> Result<Option<f64>, Error> {
        let keeps = |rate: f64| -> Result<bool, Error> {
            let mut sum = 0.0;
            for (split, ground) in grounds.iter().enumerate() {
                let trial = Trial {
                    split,
                    fit: policy.1,
                    case: Case::Plain,
                    seed: effort.seed.wrapping_add((split * effort.seeds) as u64),
                    spec: policy.0.clone(),
                };
                sum += ground.run(&trial, Some(rate))?.tpot_ms.p99;
                progress.done();
            }
            Ok(sum / grounds.len() as f64 <= slo)
        };
        let start = grounds
            .first()
            .map_or(1.0, |ground| match ground.plan.times {
                Times::Drawn { rate_per_s, .. } => rate_per_s,
                Times::Trace { rate_per_s } | Times::Lengths { rate_per_s } => {
                    rate_per_s.unwrap_or(20.0)
                }
            });
        highest(start, keeps)
    };
    Ok(Goodput {
        slo_tpot_ms: slo,
        balancer: (name.to_owned(), rate(&balancer)?),
        policy: (policy.0.name.clone(), rate(policy)?),
        asked: effort.slo_tpot_ms.is_some(),
    })
}

/// The highest rate that `keeps` the limit: doubled or halved from `start` until it is between two, then bisected.
fn highest(start: f64, keeps: impl Fn(f64) -> Result<bool, Error>) -> Result<Option<f64>, Error> {
    let (mut good, mut bad) = (None, None);
    let mut rate = start;
    for _ in 0..=DOUBLINGS {
        match keeps(rate) {
            Ok(true) => {
                good = Some(rate);
                rate *= 2.0;
            }
            Ok(false) => {
                bad = Some(rate);
                rate /= 2.0;
            }
            // More than can be simulated: what is found by then stands.
            Err(_) if good.is_some() => break,
            Err(error) => return Err(error),
        }
        if good.is_some() && bad.is_some() {
            break;
        }
    }
    let (Some(mut good), Some(mut bad)) = (good, bad) else {
        return Ok(good);
    };
    while bad / good > 1.0 + PRECISION {
        let middle = (good * bad).sqrt();
        match keeps(middle)? {
            true => good = middle,
            false => bad = middle,
        }
    }
    Ok(Some(good))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_highest_rate_is_found_wherever_it_is() {
        for limit in [1.7, 19.9, 20.0, 333.0] {
            let found = highest(20.0, |rate| Ok(rate <= limit)).unwrap().unwrap();
            assert!(found <= limit && found > limit * 0.989, "{limit}: {found}");
        }
        assert_eq!(highest(20.0, |_| Ok(false)).unwrap(), None);
        assert_eq!(highest(20.0, |_| Ok(true)).unwrap(), Some(1280.0));
        let too_many = |rate| match rate > 50.0 {
            true => Err(Error::new("too many requests", "fewer")),
            false => Ok(true),
        };
        assert_eq!(highest(20.0, too_many).unwrap(), Some(40.0));
        assert!(highest(60.0, too_many).is_err());
    }
}
