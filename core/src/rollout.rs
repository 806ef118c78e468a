//! Which arm of a rollout a request belongs to, and whether what it measured may be counted.
//!
//! A rollout compares the policy of a model, the *treatment*, with another one, the *control*:
//!
//! * [`Shadow`](Rollout::Shadow): every request goes by the control; the treatment only says what it would have done.
//! * [`Percentage`](Rollout::Percentage): some requests go by the treatment. Both arms share the workers' batches, so each
//!   changes the other's latencies: good for finding faults, not for comparing TTFT and TPOT.
//! * [`Switchback`](Rollout::Switchback): all requests go by one arm, then all by the other, in slices of wall-clock time.
//!   After a switch the batches still hold the other arm's requests, so a wash-out is counted to neither.

use blake2::digest::consts::U8;
use blake2::{Blake2b, Digest};

/// One of the two policies compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Arm {
    /// What was there before.
    Control,
    /// What is tried.
    Treatment,
}

impl Arm {
    /// Name in metrics and logs.
    pub fn name(self) -> &'static str {
        match self {
            Self::Control => "control",
            Self::Treatment => "treatment",
        }
    }
}

/// How requests are divided between the arms.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rollout {
    /// All by the control.
    Shadow,
    /// Some by the treatment, told by their request id.
    Percentage {
        /// So many of a hundred; 100 and above is all.
        percent: u8,
    },
    /// By the wall clock: slices that begin at an even multiple of their length are the control's.
    Switchback {
        /// Length of a slice, milliseconds; 0 stands for 1.
        slice_ms: u64,
        /// The beginning of each slice that is counted to neither arm, milliseconds.
        washout_ms: u64,
    },
}

impl Rollout {
    /// The arm of a request with this id that arrives at `now_ms`, milliseconds since the Unix epoch.
    ///
    /// The same id has the same arm in a percentage, so retries agree and so do all gateways; a request that has a share at
    /// one percentage keeps it at every higher one. In a switchback the time alone decides, so all threads and gateways
    /// switch together, as far as their clocks agree.
    pub fn arm(self, request_id: &[u8], now_ms: u64) -> Arm {
        let treated = match self {
            Self::Shadow => false,
            Self::Percentage { percent } => percentile(request_id) < percent,
            Self::Switchback { slice_ms, .. } => (now_ms / slice_ms.max(1)) % 2 == 1,
        };
        if treated {
            Arm::Treatment
        } else {
            Arm::Control
        }
    }

    /// Whether a measurement that lasted from `begin_ms` to `end_ms` belongs to one arm alone.
    ///
    /// In a switchback: it began after the wash-out and ended in the same slice. Requests that run longer than a slice less its
    /// wash-out are therefore never counted; the slice has to be many times as long as a request, or the slower arm loses
    /// more of its long requests than the faster one. A clock that was set back during the measurement spoils it.
    pub fn counts(self, begin_ms: u64, end_ms: u64) -> bool {
        match self {
            Self::Shadow | Self::Percentage { .. } => begin_ms <= end_ms,
            Self::Switchback {
                slice_ms,
                washout_ms,
            } => {
                let slice_ms = slice_ms.max(1);
                begin_ms <= end_ms
                    && begin_ms / slice_ms == end_ms / slice_ms
                    && begin_ms % slice_ms >= washout_ms
            }
        }
    }
}

/// 0–99, evenly spread over request ids. Prefixed, so that whoever else hashes ids divides them independently.
fn percentile(request_id: &[u8]) -> u8 {
    let digest = Blake2b::<U8>::new()
        .chain_update(b"eldr rollout\0")
        .chain_update(request_id)
        .finalize();
    let hash = u64::from_le_bytes(digest.into());
    ((u128::from(hash) * 100) >> 64) as u8
}

#[cfg(test)]
mod tests;
