//! Decode workers that fail, drain and come back.

use std::str::FromStr;
use std::time::Duration;

/// Something that happens to a decode worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Change {
    /// When, since the start.
    pub at: Duration,
    /// Index of the decode worker.
    pub worker: usize,
    /// What.
    pub kind: ChangeKind,
}

/// What happens to a decode worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChangeKind {
    /// It is gone with all it had: its requests are prefilled again, without waiting, and decided again; what they had decoded is
    /// lost. Gateways know at once.
    Fail,
    /// It gets no more requests and finishes those it has.
    Drain,
    /// It is available, be it new or back.
    Join,
}

impl FromStr for Change {
    type Err = String;

    /// `30:fail:3`: seconds, what, and the decode worker's number from 0.
    fn from_str(text: &str) -> Result<Self, String> {
        let expected = "SECONDS:fail|drain|join:WORKER was expected, such as 30:fail:3";
        let parts: Vec<&str> = text.split(':').collect();
        let [at, kind, worker] = parts[..] else {
            return Err(expected.into());
        };
        let at = at
            .parse()
            .ok()
            .and_then(|at| Duration::try_from_secs_f64(at).ok());
        let kind = match kind {
            "fail" => ChangeKind::Fail,
            "drain" => ChangeKind::Drain,
            "join" => ChangeKind::Join,
            _ => return Err(expected.into()),
        };
        match (at, worker.parse()) {
            (Some(at), Ok(worker)) => Ok(Change { at, worker, kind }),
            _ => Err(expected.into()),
        }
    }
}
