//! Figures over many samples.

use std::time::Duration;

use serde::Serialize;

use super::Sample;

/// What a load saw. A figure of which there was nothing to compute it from is absent.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Summary {
    /// Requests sent.
    pub requests: usize,
    /// Requests that failed.
    pub failures: usize,
    /// Time per output token after the first, median over requests, milliseconds.
    pub tpot_p50_ms: Option<f64>,
    /// The same, 99th percentile.
    pub tpot_p99_ms: Option<f64>,
    /// Time to the first token, median over requests, milliseconds.
    pub ttft_p50_ms: Option<f64>,
}

impl Summary {
    /// Summarises `samples`; failed requests count, their times do not.
    pub fn new<'a>(samples: impl IntoIterator<Item = &'a Sample>) -> Self {
        let mut summary = Summary::default();
        let (mut tpot, mut ttft) = (Vec::new(), Vec::new());
        for sample in samples {
            summary.requests += 1;
            if sample.failure.is_some() {
                summary.failures += 1;
                continue;
            }
            tpot.extend(sample.tpot.map(milliseconds));
            ttft.extend(sample.ttft.map(milliseconds));
        }
        summary.tpot_p50_ms = percentile(&mut tpot, 0.50);
        summary.tpot_p99_ms = percentile(&mut tpot, 0.99);
        summary.ttft_p50_ms = percentile(&mut ttft, 0.50);
        summary
    }
}

/// The exact `quantile` (0 to 1) of `values`, interpolated linearly between neighbours as numpy does;
/// sorts them. `None` if there are none.
pub fn percentile(values: &mut [f64], quantile: f64) -> Option<f64> {
    values.sort_unstable_by(f64::total_cmp);
    let position = quantile.clamp(0.0, 1.0) * values.len().checked_sub(1)? as f64;
    let (below, above) = (
        values[position.floor() as usize],
        values[position.ceil() as usize],
    );
    Some(below + (above - below) * position.fract())
}

fn milliseconds(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_those_of_numpy() {
        assert_eq!(percentile(&mut [], 0.5), None);
        assert_eq!(percentile(&mut [7.0], 0.99), Some(7.0));
        let mut values = [4.0, 1.0, 3.0, 2.0];
        for (quantile, expected) in [(0.0, 1.0), (0.5, 2.5), (0.75, 3.25), (1.0, 4.0), (9.0, 4.0)] {
            assert_eq!(percentile(&mut values, quantile), Some(expected));
        }
    }

    #[test]
    fn failed_requests_count_and_their_times_do_not() {
        let sample = |tpot_ms, failure: Option<&str>| Sample {
            id: "t".into(),
            at: Duration::ZERO,
            ttft: Some(Duration::from_millis(20)),
            tpot: Some(Duration::from_millis(tpot_ms)),
            tokens: 2,
            failure: failure.map(str::to_owned),
        };
        let samples = [sample(10, None), sample(12, None), sample(999, Some("cut"))];
        let summary = Summary::new(&samples);
        assert_eq!((summary.requests, summary.failures), (3, 1));
        assert_eq!(
            (summary.tpot_p50_ms, summary.ttft_p50_ms),
            (Some(11.0), Some(20.0))
        );
        assert_eq!(Summary::new([]), Summary::default());
    }
}
