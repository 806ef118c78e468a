//! When which request is sent.

use std::time::Duration;

use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// Which endpoint a request is sent to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Api {
    /// `/v1/completions`.
    Completions,
    /// `/v1/chat/completions`.
    Chat,
}

/// One request of the load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Arrival {
    /// When it is due, since the start.
    pub at: Duration,
    /// Index of the request.
    pub request: usize,
    /// How it is sent.
    pub api: Api,
}

/// Poisson arrivals of `rate_per_s` over `duration`; the same seed gives the same ones.
///
/// The `requests` come in random order, each once before any comes again. None, if there are no
/// requests or the rate is no positive number.
pub fn arrivals(requests: usize, rate_per_s: f64, duration: Duration, seed: u64) -> Vec<Arrival> {
    if requests == 0 || !rate_per_s.is_finite() || rate_per_s <= 0.0 {
        return Vec::new();
    }
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let mut order: Vec<usize> = (0..requests).collect();
    let mut arrivals = Vec::new();
    let mut at = 0.0;
    loop {
        // Uniform in (0, 1], so that its logarithm is finite.
        let uniform = ((rng.next_u64() >> 11) + 1) as f64 / (1_u64 << 53) as f64;
        at -= uniform.ln() / rate_per_s;
        if at >= duration.as_secs_f64() {
            return arrivals;
        }
        let turn = arrivals.len() % requests;
        if turn == 0 {
            order.shuffle(&mut rng);
        }
        let api = if arrivals.len().is_multiple_of(2) {
            Api::Completions
        } else {
            Api::Chat
        };
        arrivals.push(Arrival {
            at: Duration::from_secs_f64(at),
            request: order[turn],
            api,
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_seed_gives_the_same_arrivals_and_another_does_not() {
        let minute = Duration::from_secs(60);
        let one = arrivals(10, 20.0, minute, 1);
        assert_eq!(one, arrivals(10, 20.0, minute, 1));
        assert_ne!(one, arrivals(10, 20.0, minute, 2));
    }

    #[test]
    fn arrivals_are_in_order_at_the_rate_asked_for_and_visit_every_request() {
        let arrivals = arrivals(10, 50.0, Duration::from_secs(200), 7);
        assert!(arrivals.is_sorted_by_key(|arrival| arrival.at));
        // 10,000 expected; a Poisson count lies within four standard deviations.
        assert!(arrivals.len().abs_diff(10_000) < 400, "{}", arrivals.len());
        for round in arrivals.chunks_exact(10) {
            let mut requests: Vec<_> = round.iter().map(|arrival| arrival.request).collect();
            requests.sort_unstable();
            assert_eq!(requests, (0..10).collect::<Vec<_>>());
        }
        let chat = arrivals
            .iter()
            .filter(|arrival| arrival.api == Api::Chat)
            .count();
        assert_eq!(chat, arrivals.len() / 2);
    }

    #[test]
    fn no_requests_or_no_rate_give_no_arrivals() {
        let second = Duration::from_secs(1);
        for (requests, rate) in [
            (0, 1.0),
            (1, 0.0),
            (1, -1.0),
            (1, f64::NAN),
            (1, f64::INFINITY),
        ] {
            assert_eq!(arrivals(requests, rate, second, 1), []);
        }
    }
}
