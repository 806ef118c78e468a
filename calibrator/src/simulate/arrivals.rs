//! When which request arrives, and what else is drawn for it: the same for every policy.

use std::time::Duration;

use rand::seq::SliceRandom as _;
use rand::{Rng as _, RngExt as _};
use rand_chacha::ChaCha8Rng;
use rand_distr::{Distribution as _, Gamma};

use super::lengths::Lengths;
use super::mix::{Mix, Turns};
use super::workload::{Request, Workload};
use super::{Stream, rng};
use crate::error::Error;

/// Most requests of one run.
pub const ARRIVALS_MAX: usize = 1_000_000;
/// Most tokens that they decode: about an hour's work.
pub const DECODED_MAX: u64 = 1_000_000_000;

/// One request of a run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Arrival {
    /// When it arrives, since the start.
    pub at: Duration,
    /// Which request of the workload it is: its experts and label.
    pub request: usize,
    /// Which request's signature it carries: its own, but in the placebo.
    pub signature: usize,
    /// Tokens of its prompt.
    pub prompt_tokens: u32,
    /// Tokens that it decodes.
    pub decode_tokens: u32,
    /// Picks the gateway that it reaches.
    pub gateway: u64,
    /// The randomness of its decision.
    pub entropy: u64,
}

/// Where times of arrival come from.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Times {
    /// A rate per second; times between arrivals are gamma distributed with this shape. 1 is Poisson, less is burstier (their
    /// coefficient of variation is 1/√shape).
    Drawn {
        /// Requests per second.
        rate_per_s: f64,
        /// Shape of the gamma distribution, above 0.
        shape: f64,
    },
    /// `ts` of the trace, each request once in order; stretched to a rate if one is given.
    Trace {
        /// Requests per second in the mean.
        rate_per_s: Option<f64>,
    },
    /// The times of the file of lengths; stretched to a rate if one is given.
    Lengths {
        /// Requests per second in the mean.
        rate_per_s: Option<f64>,
    },
}

impl Times {
    /// The same at another rate.
    #[must_use]
    pub fn at_rate(self, rate_per_s: f64) -> Self {
        match self {
            Times::Drawn { shape, .. } => Times::Drawn { rate_per_s, shape },
            Times::Trace { .. } => Times::Trace {
                rate_per_s: Some(rate_per_s),
            },
            Times::Lengths { .. } => Times::Lengths {
                rate_per_s: Some(rate_per_s),
            },
        }
    }
}

/// Arrivals of one run.
#[derive(Clone, Copy, Debug)]
pub struct Plan<'a> {
    /// When requests arrive.
    pub times: Times,
    /// Arrivals at or after this are left out.
    pub duration: Duration,
    /// Lengths in place of the workload's, in their order from a random one on.
    pub lengths: Option<&'a Lengths>,
    /// Tokens that every request decodes, in place of all others.
    pub decode_tokens: Option<u32>,
    /// Placebo: signatures are exchanged between the requests of the workload at random. A policy that gains all the same gains by
    /// something else than by knowing who uses which experts.
    pub permute_signatures: bool,
    /// What kinds of requests come when, in place of all alike. It multiplies a drawn rate; of given times it only says what comes.
    pub mix: Option<&'a Mix>,
}

impl Plan<'_> {
    /// Draws the arrivals; the same seed gives the same ones. Drawn requests come in random order, each once before any comes again.
    ///
    /// # Errors
    /// A record lacks a time or length that is needed; more than [`ARRIVALS_MAX`] arrivals or [`DECODED_MAX`] tokens; none at all, or none of
    /// more than one token.
    pub fn arrivals(&self, workload: &Workload, seed: u64) -> Result<Vec<Arrival>, Error> {
        let mut signatures: Vec<usize> = (0..workload.requests.len()).collect();
        if self.permute_signatures {
            signatures.shuffle(&mut rng(seed, Stream::Placebo));
        }
        let mut rng = rng(seed, Stream::Arrivals);
        let in_order = matches!(self.times, Times::Trace { .. });
        let mut turns = match self.mix {
            Some(_) if in_order => {
                return Err(Error::new(
                    "requests that come in the order of the trace are not mixed",
                    "leave out --mix, or take --arrivals poisson",
                ));
            }
            Some(mix) => Some(mix.turns(workload)?),
            None => None,
        };
        let times = self.times(workload, turns.as_ref(), &mut rng)?;
        let mut order = by_time(workload, in_order);
        let offset = match (self.lengths, self.times) {
            // Times and lengths of one line belong together.
            (_, Times::Lengths { .. }) | (None, _) => 0,
            (Some(lengths), _) => rng.random_range(0..lengths.len()),
        };
        let mut arrivals = Vec::with_capacity(times.len());
        for (number, at) in times.into_iter().enumerate() {
            let request = match &mut turns {
                Some(turns) => turns.next(at.as_secs_f64(), &mut rng),
                None => {
                    let turn = number % order.len();
                    if turn == 0 && !in_order {
                        order.shuffle(&mut rng);
                    }
                    order[turn]
                }
            };
            let own = &workload.requests[request];
            let (prompt_tokens, decode_tokens) = match self.lengths {
                Some(lengths) => lengths.get(offset + number),
                None => {
                    let decode = self.decode_tokens.or(own.decode_tokens);
                    let hint = "record it, or give --decode-tokens or --lengths";
                    let decode = known(own, "decode_tokens", decode, hint)?;
                    let hint = "record it, or give lengths of other traffic with --lengths";
                    (
                        known(own, "prompt_tokens", own.prompt_tokens, hint)?,
                        decode,
                    )
                }
            };
            arrivals.push(Arrival {
                at,
                request,
                signature: signatures[request],
                prompt_tokens,
                decode_tokens: self.decode_tokens.unwrap_or(decode_tokens),
                gateway: rng.next_u64(),
                entropy: rng.next_u64(),
            });
        }
        let tokens = arrivals.iter().map(|of| u64::from(of.decode_tokens));
        let tokens: u64 = tokens.sum();
        if tokens > DECODED_MAX {
            return Err(Error::new(
                format!(
                    "{} requests decode {tokens} tokens, at most {DECODED_MAX} are simulated",
                    arrivals.len()
                ),
                "give fewer --decode-tokens, a lower --rate or a shorter --duration",
            ));
        }
        if arrivals.is_empty() {
            return Err(Error::new(
                format!(
                    "no request arrives within {} s",
                    self.duration.as_secs_f64()
                ),
                "give a longer --duration or a higher --rate",
            ));
        }
        if arrivals.iter().all(|of| of.decode_tokens < 2) {
            return Err(Error::new(
                "no request decodes more than one token, so that none has a time per output token",
                "give --decode-tokens 2 or more, or longer --lengths",
            ));
        }
        Ok(arrivals)
    }

    fn times(
        &self,
        workload: &Workload,
        turns: Option<&Turns>,
        rng: &mut ChaCha8Rng,
    ) -> Result<Vec<Duration>, Error> {
        let recorded = match self.times {
            Times::Drawn { rate_per_s, shape } => {
                return self.drawn(rate_per_s, shape, turns, rng);
            }
            Times::Trace { rate_per_s } => {
                let order = by_time(workload, true);
                let times = order.into_iter().map(|request| {
                    let request = &workload.requests[request];
                    let hint =
                        "--arrivals trace needs the time of every request; take --arrivals poisson";
                    known(request, "ts", request.ts, hint)
                });
                (times.collect::<Result<Vec<_>, _>>()?, rate_per_s)
            }
            Times::Lengths { rate_per_s } => {
                let lengths = self.lengths.into_iter();
                (lengths.flat_map(Lengths::times).collect(), rate_per_s)
            }
        };
        Ok(self.stretched(&recorded.0, recorded.1))
    }

    fn drawn(
        &self,
        rate_per_s: f64,
        shape: f64,
        turns: Option<&Turns>,
        rng: &mut ChaCha8Rng,
    ) -> Result<Vec<Duration>, Error> {
        let failed = |what: String| Error::new(what, "give a lower --rate or a shorter --duration");
        let gaps = Gamma::new(shape, 1.0 / (shape * rate_per_s)).map_err(|error| {
            failed(format!(
                "a rate of {rate_per_s} with burstiness {shape}: {error}"
            ))
        })?;
        let (mut times, mut at) = (Vec::new(), 0.0);
        loop {
            let gap = gaps.sample(rng);
            at = turns.map_or(at + gap, |turns| turns.after(at, gap));
            if at >= self.duration.as_secs_f64() {
                return Ok(times);
            }
            if times.len() == ARRIVALS_MAX {
                return Err(failed(format!("more than {ARRIVALS_MAX} requests arrive")));
            }
            times.push(Duration::from_secs_f64(at));
        }
    }

    /// Ascending times from 0 on, stretched to a mean rate.
    fn stretched(&self, times: &[f64], rate_per_s: Option<f64>) -> Vec<Duration> {
        let (first, last) = (times.first().copied(), times.last().copied());
        let span = last.zip(first).map_or(0.0, |(last, first)| last - first);
        let factor = match rate_per_s {
            Some(rate) if span > 0.0 => times.len() as f64 / span / rate,
            _ => 1.0,
        };
        let from_start = times
            .iter()
            .map(|time| (time - first.unwrap_or_default()) * factor);
        from_start
            .take_while(|&at| at < self.duration.as_secs_f64())
            .filter_map(|at| Duration::try_from_secs_f64(at).ok())
            .take(ARRIVALS_MAX)
            .collect()
    }
}

/// What the trace must say of a request.
fn known<T>(request: &Request, field: &str, value: Option<T>, hint: &str) -> Result<T, Error> {
    value.ok_or_else(|| {
        let record = &request.record;
        Error::new(format!("{record}: field `{field}`: it is missing"), hint)
    })
}

/// Requests in the order of their times, where that is asked for.
fn by_time(workload: &Workload, sort: bool) -> Vec<usize> {
    let mut order: Vec<usize> = (0..workload.requests.len()).collect();
    if sort {
        let ts = |&index: &usize| workload.requests[index].ts.unwrap_or_default();
        order.sort_by(|a, b| ts(a).total_cmp(&ts(b)));
    }
    order
}
