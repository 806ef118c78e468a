//! Policies that know nothing of requests.

use super::{Decision, Reason, Worker, WorkerIndex, available, fallback};

/// The `n`th of the workers that are available, from the first again after the last.
pub(super) fn nth(workers: &[Worker], n: u64) -> Decision {
    decision(nth_available(workers, n), workers)
}

/// The less loaded of two that are drawn.
pub(super) fn two_choices(workers: &[Worker], entropy: u64) -> Decision {
    decision(less_loaded_of_two(workers, entropy), workers)
}

fn decision(target: Option<usize>, workers: &[Worker]) -> Decision {
    let fallback = fallback(Reason::Blind, workers);
    Decision {
        target: target.map_or(fallback.target, WorkerIndex),
        ..fallback
    }
}

fn nth_available(workers: &[Worker], n: u64) -> Option<usize> {
    let mut available = available(workers);
    let count = available.clone().count() as u64;
    let turn = n.checked_rem(count)? as usize;
    available.nth(turn).map(|(index, _)| index)
}

fn less_loaded_of_two(workers: &[Worker], entropy: u64) -> Option<usize> {
    let available = available(workers);
    let count = available.clone().count() as u64;
    let (high, low) = (entropy >> 32, entropy & 0xffff_ffff);
    let first = high.checked_rem(count)?;
    let Some(step) = low.checked_rem(count - 1) else {
        return nth_available(workers, 0);
    };
    let second = (first + 1 + step) % count;
    let (a, b) = (
        available.clone().nth(first as usize)?,
        available.clone().nth(second as usize)?,
    );
    Some(if b.1.load < a.1.load { b.0 } else { a.0 })
}
