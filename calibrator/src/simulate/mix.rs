//! Traffic that changes: which kinds of requests come, how often, and when.
//!
//! Written as points in time, ascending from 0: `0:chat,60:code` changes all at once, `0:chat,30~90:code` little by little from 30
//! to 90 s, `0:all,40:all+maths=2,50:all` is a crowd that comes on top for 10 s.

use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use rand::RngExt as _;
use rand::seq::SliceRandom as _;
use rand_chacha::ChaCha8Rng;

use super::workload::Workload;
use crate::error::Error;

/// Most of a kind, as a multiple of the rate.
const SHARE_MAX: f64 = 1e3;

/// Some of the requests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Kind {
    /// All.
    All,
    /// Those of one label.
    Label(Arc<str>),
    /// Those of one of the traces, counted from 0.
    Trace(usize),
}

/// What comes from some time on.
#[derive(Clone, Debug, PartialEq)]
pub struct Point {
    /// When it begins to be so, seconds.
    pub at: f64,
    /// When it is so; later than `at` if it changes little by little.
    pub until: f64,
    /// How much comes of each kind, as a multiple of the rate.
    pub shares: Vec<(Kind, f64)>,
}

impl FromStr for Point {
    type Err = String;

    /// `60:chat`, `30~90:chat=0.2+code=0.8`, `0:@1`: from when, or while it changes; labels, `all`, or traces by their number from 1;
    /// how much of each.
    fn from_str(text: &str) -> Result<Self, String> {
        let expected = "SECONDS[~SECONDS]:KIND[=SHARE]+… was expected, such as 60:chat or 30~90:chat=0.2+code=0.8";
        let (time, shares) = text.split_once(':').ok_or(expected)?;
        let seconds = |text: &str| {
            let seconds = text.parse().ok();
            seconds.filter(|seconds| (0.0..=1e9).contains(seconds))
        };
        let (at, until) = time.split_once('~').unwrap_or((time, time));
        let (at, until) = seconds(at).zip(seconds(until)).ok_or(expected)?;
        if until < at {
            return Err(format!("{time}: {until} is before {at}"));
        }
        let share = |text: &str| {
            let (kind, share) = text.split_once('=').unwrap_or((text, "1"));
            let share = share.parse().ok().filter(|s| (0.0..=SHARE_MAX).contains(s));
            let share = share.ok_or_else(|| {
                format!("{text}: a share from 0 to {SHARE_MAX} times the rate was expected")
            })?;
            let kind = match (kind, kind.strip_prefix('@')) {
                ("", _) => return Err(expected.to_owned()),
                ("all", _) => Kind::All,
                (_, None) => Kind::Label(kind.into()),
                (_, Some(trace)) => match trace.parse::<usize>() {
                    Ok(trace @ 1..) => Kind::Trace(trace - 1),
                    _ => return Err(format!("{kind}: @1 is the first trace")),
                },
            };
            Ok((kind, share))
        };
        let shares: Vec<(Kind, f64)> = shares.split('+').map(share).collect::<Result<_, _>>()?;
        if shares.iter().all(|(_, share)| *share == 0.0) {
            return Err(format!("{text}: nothing comes"));
        }
        Ok(Point { at, until, shares })
    }
}

/// Points in ascending order, the first at 0.
#[derive(Clone, Debug, PartialEq)]
pub struct Mix {
    points: Vec<Point>,
}

impl Mix {
    /// Checks the order.
    ///
    /// # Errors
    /// The text says which point is not where it must be.
    pub fn new(points: Vec<Point>) -> Result<Self, String> {
        let first = points.first();
        if first.is_none_or(|first| first.until > 0.0) {
            return Err("the first must be at 0, as in 0:all".into());
        }
        // Only what changes little by little may begin where the last change ended.
        let early = |pair: &&[Point]| {
            let (before, next) = (pair[0].until, &pair[1]);
            next.at < before || next.until == before
        };
        match points.windows(2).find(early) {
            Some(pair) => {
                let (before, after) = (pair[0].until, pair[1].at);
                Err(format!("{after} does not come after {before}"))
            }
            None => Ok(Mix { points }),
        }
    }

    /// When what comes begins to change or has changed, from 0 on.
    pub fn phases(&self) -> Vec<Duration> {
        let points = self.points.iter();
        let mut phases: Vec<Duration> = points
            .flat_map(|point| [point.at, point.until])
            .map(Duration::from_secs_f64)
            .collect();
        phases.dedup();
        phases
    }

    /// Finds the requests of every kind.
    ///
    /// # Errors
    /// There are none of a kind.
    pub(super) fn turns(&self, workload: &Workload) -> Result<Turns, Error> {
        let mut kinds: Vec<&Kind> = Vec::new();
        let named = self.points.iter().flat_map(|point| &point.shares);
        for (kind, _) in named {
            if !kinds.contains(&kind) {
                kinds.push(kind);
            }
        }
        let orders = kinds.iter().map(|kind| of_kind(kind, workload));
        let shares = |point: &Point| {
            let share = |kind: &&Kind| {
                let named = point.shares.iter();
                named
                    .filter(|(k, _)| k == *kind)
                    .map(|(_, share)| share)
                    .sum()
            };
            kinds.iter().map(share).collect::<Vec<f64>>()
        };
        let mut pieces: Vec<Piece> = Vec::new();
        for point in &self.points {
            let now = shares(point);
            if let Some(before) = pieces.last().filter(|_| point.until > point.at) {
                let before = before.to.clone();
                pieces.push(Piece::new(point.at, point.until, before, now.clone()));
            }
            pieces.push(Piece::new(point.until, f64::INFINITY, now.clone(), now));
        }
        let next: Vec<f64> = pieces.iter().skip(1).map(|piece| piece.start).collect();
        for (piece, next) in pieces.iter_mut().zip(next) {
            piece.end = next;
        }
        Ok(Turns {
            orders: orders.collect::<Result<_, _>>()?,
            pieces,
        })
    }
}

fn of_kind(kind: &Kind, workload: &Workload) -> Result<Order, Error> {
    let is = |request: &super::workload::Request| match kind {
        Kind::All => true,
        Kind::Label(label) => request.label.as_ref() == Some(label),
        Kind::Trace(trace) => request.trace == *trace,
    };
    let requests = workload.requests.iter().zip(0..);
    let order: Vec<usize> = requests.filter(|(r, _)| is(r)).map(|(_, n)| n).collect();
    if order.is_empty() {
        let (problem, hint) = match kind {
            Kind::Trace(trace) => (
                format!("no request is of trace {}", trace + 1),
                "@1 is the first trace that is replayed".to_owned(),
            ),
            Kind::All => ("no request can be replayed".into(), "give a trace".into()),
            Kind::Label(label) => {
                let labels: Vec<String> = workload.labels().keys().map(|l| l.to_string()).collect();
                let hint = match labels.is_empty() {
                    true => "no request has a label: name traces by @1, @2, …".to_owned(),
                    false => format!("the labels are {}", labels.join(", ")),
                };
                (format!("no request has the label {label}"), hint)
            }
        };
        return Err(Error::new(problem, hint));
    }
    Ok(Order { order, turn: 0 })
}

/// Whose turn it is: requests of a kind come in random order, each once before any comes again.
#[derive(Clone, Debug)]
pub(super) struct Order {
    order: Vec<usize>,
    turn: usize,
}

impl Order {
    fn next(&mut self, rng: &mut ChaCha8Rng) -> usize {
        if self.turn == 0 {
            self.order.shuffle(rng);
        }
        let next = self.order[self.turn];
        self.turn = (self.turn + 1) % self.order.len();
        next
    }
}

/// A time in which shares change evenly.
#[derive(Clone, Debug)]
struct Piece {
    start: f64,
    end: f64,
    from: Vec<f64>,
    to: Vec<f64>,
}

impl Piece {
    fn new(start: f64, end: f64, from: Vec<f64>, to: Vec<f64>) -> Self {
        Piece {
            start,
            end,
            from,
            to,
        }
    }

    /// How far into the change `at` is, 0 to 1.
    fn progress(&self, at: f64) -> f64 {
        match (self.end - self.start).is_finite() {
            true => ((at - self.start) / (self.end - self.start)).clamp(0.0, 1.0),
            false => 0.0,
        }
    }

    fn shares(&self, at: f64) -> impl Iterator<Item = f64> + '_ {
        let progress = self.progress(at);
        let each = self.from.iter().zip(&self.to);
        each.map(move |(from, to)| from + (to - from) * progress)
    }

    fn total(&self, at: f64) -> f64 {
        self.shares(at).sum()
    }
}

/// The requests of a mix in their order.
#[derive(Clone, Debug)]
pub(super) struct Turns {
    orders: Vec<Order>,
    pieces: Vec<Piece>,
}

impl Turns {
    /// When the next one comes after `at`, if it came `seconds` later at the rate itself.
    pub(super) fn after(&self, at: f64, seconds: f64) -> f64 {
        let (mut at, mut left) = (at, seconds);
        loop {
            let piece = self.piece(at);
            let now = piece.total(at);
            if piece.end.is_infinite() {
                return at + left / now;
            }
            let there = piece.end - at;
            let area = (now + piece.total(piece.end)) / 2.0 * there;
            if area >= left && area > 0.0 {
                // now·x + slope/2·x² = left, in a form that needs no slope.
                let slope = (piece.total(piece.end) - now) / there;
                let root = (now * now + 2.0 * slope * left).max(0.0).sqrt();
                return at + 2.0 * left / (now + root);
            }
            left -= area;
            at = piece.end;
        }
    }

    /// Which request comes at `at`.
    pub(super) fn next(&mut self, at: f64, rng: &mut ChaCha8Rng) -> usize {
        let piece = self.piece(at);
        let mut left = rng.random::<f64>() * piece.total(at);
        let mut kind = None;
        for (index, share) in piece.shares(at).enumerate() {
            if share > 0.0 {
                kind = Some(index);
                if left < share {
                    break;
                }
                left -= share;
            }
        }
        self.orders[kind.unwrap_or_default()].next(rng)
    }

    fn piece(&self, at: f64) -> &Piece {
        let after = self.pieces.partition_point(|piece| piece.start <= at);
        &self.pieces[after.saturating_sub(1)]
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rand::SeedableRng as _;

    use super::*;
    use crate::simulate::tests::{request, workload};

    fn mix(text: &str) -> Mix {
        Mix::new(
            text.split(',')
                .map(|point| point.parse().unwrap())
                .collect(),
        )
        .unwrap()
    }

    fn three() -> Workload {
        let mut requests: Vec<_> = ["a", "b", "c"].map(|label| request(label, &[0], 3)).into();
        requests[2].trace = 1;
        workload(requests)
    }

    #[test]
    fn kinds_come_as_they_are_said_to() {
        let mut turns = mix("0:a,10:b=3+c,20~30:@2=0.5").turns(&three()).unwrap();
        let mut rng = ChaCha8Rng::seed_from_u64(1);
        let mut share = |at: f64, request: usize| {
            let came = (0..4000).filter(|_| turns.next(at, &mut rng) == request);
            came.count() as f64 / 4000.0
        };
        assert_eq!(share(9.9, 0), 1.0);
        assert!((share(10.0, 1) - 0.75).abs() < 0.03);
        // Half way: b has 1.5, c 0.5 and @2, which is c as well, 0.25.
        assert!((share(25.0, 1) - 1.5 / 2.25).abs() < 0.03);
        assert_eq!(share(30.0, 2), 1.0);
    }

    #[test]
    fn phases_begin_where_something_changes() {
        let seconds = mix("0:all,30~90:a,100:b").phases();
        let seconds: Vec<f64> = seconds.iter().map(Duration::as_secs_f64).collect();
        assert_eq!(seconds, [0.0, 30.0, 90.0, 100.0]);
    }

    proptest! {
        /// Against adding up small steps of time.
        #[test]
        fn requests_come_as_often_as_the_shares_say(at in 0.0..40.0f64, seconds in 0.01..30.0f64) {
            let turns = mix("0:a=0.5,10:b=3,12:c,20~30:a=2+b,30~36:c=0.2").turns(&three()).unwrap();
            let (mut expected, mut left) = (at, seconds);
            while left > 0.0 {
                left -= turns.piece(expected).total(expected) * 1e-3;
                expected += 1e-3;
            }
            let found = turns.after(at, seconds);
            prop_assert!((found - expected).abs() < 0.02, "{found}, {expected}");
        }
    }

    #[test]
    fn what_is_no_mix_is_refused() {
        for wrong in [
            "", "all", "x:all", "5~3:all", "0:", "0:a=-1", "0:a=0", "0:@0", "0:a=1e9",
        ] {
            assert!(wrong.parse::<Point>().is_err(), "{wrong}");
        }
        for wrong in ["5:all", "0~5:all", "0:a,10:b,10:a", "0:a,10~20:b,15:a"] {
            let points = wrong.split(',').map(|point| point.parse().unwrap());
            assert!(Mix::new(points.collect()).is_err(), "{wrong}");
        }
        let unknown = mix("0:d").turns(&three()).unwrap_err().to_string();
        assert!(unknown.contains("the label d"), "{unknown}");
        assert!(mix("0:@3").turns(&three()).is_err());
    }
}
