//! How a request ended. Every request ends in exactly one [`Outcome`].

use crate::decide::Reason;

/// How a request ended, as seen by the gateway. The names are those of metrics, log fields and report columns.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Outcome {
    /// The decode leg went to the worker of a decision; the reason says what the decision rested on.
    Routed(Reason),
    /// Not a request to route: another path or method, no body, an upgrade.
    Bypassed,
    /// Answered 4xx by the gateway itself: the request may not do what it asked for.
    Refused,
    /// The prefill worker answered 4xx, which went back to the client as it was.
    PrefillRejected,
    /// The prefill leg failed: timeout, reset, 5xx or an answer that is not one.
    PrefillFailed,
    /// Relay mode: the request was the prefill leg, which a prefill worker answered.
    Prefilled,
    /// The client went away before the decode leg began.
    ClientGone,
    /// The gateway broke one of its own promises.
    Internal,
}

impl Outcome {
    /// Name without the reason.
    pub fn name(self) -> &'static str {
        match self {
            Self::Routed(_) => "routed",
            Self::Bypassed => "bypassed",
            Self::Refused => "refused",
            Self::PrefillRejected => "prefill_rejected",
            Self::PrefillFailed => "prefill_failed",
            Self::Prefilled => "prefilled",
            Self::ClientGone => "client_gone",
            Self::Internal => "internal",
        }
    }

    /// Every outcome once, [`Routed`](Self::Routed) with each reason.
    pub fn all() -> impl Iterator<Item = Self> {
        let others = [
            Self::Bypassed,
            Self::Refused,
            Self::PrefillRejected,
            Self::PrefillFailed,
            Self::Prefilled,
            Self::ClientGone,
            Self::Internal,
        ];
        Reason::ALL.into_iter().map(Self::Routed).chain(others)
    }
}

impl std::fmt::Display for Outcome {
    /// `routed(in_band)`, `bypassed`.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Routed(reason) => write!(f, "routed({})", reason.name()),
            other => f.write_str(other.name()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn names_are_unique_and_follow_one_pattern() {
        let names: Vec<String> = Outcome::all().map(|outcome| outcome.to_string()).collect();
        assert_eq!(names.iter().collect::<HashSet<_>>().len(), names.len());
        assert!(names.contains(&"routed(in_band)".to_owned()));
        for name in names {
            assert!(
                name.bytes()
                    .all(|byte| byte.is_ascii_lowercase() || b"_()0123456789".contains(&byte)),
                "{name}"
            );
        }
    }
}
