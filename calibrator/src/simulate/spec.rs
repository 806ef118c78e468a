//! Policies as the user names them.

use std::str::FromStr;

use clap::ValueEnum;
use eldr_core::decide::{MAX_CANDIDATES, Policy, Rule};
use eldr_core::marginal::{MAX_EXPONENT, Objective};

use super::follow::Refit;
use super::hindsight::Goal;
use super::usage::Usage;

/// A policy as the user names it: `band`, or with parameters of its own `band:tau=0.2:cap=none`, `marginal:q=1`.
#[derive(Clone, Debug, PartialEq)]
pub struct PolicySpec {
    /// As given.
    pub name: String,
    /// Which one.
    pub kind: PolicyKind,
    /// Band width in place of the run's.
    pub tau: Option<f32>,
    /// Load cap in place of the run's; `Some(None)` is none.
    pub max_load_factor: Option<Option<f64>>,
    /// What it knows of requests.
    pub usage: Usage,
    /// How its centroids follow the traffic; `None`: not at all.
    pub refit: Option<Refit>,
    /// Exponent of the objective of `marginal` and `hybrid` in place of the run's.
    pub exponent: Option<u32>,
    /// Workers that it draws to choose among; `None`: all.
    pub candidates: Option<u32>,
    /// Where `marginal` and `hybrid` have their step coefficients from.
    pub steps: Steps,
}

/// Where a policy has its step coefficients from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Steps {
    /// Learned from the times of requests that ended; those of the run are where it begins.
    #[default]
    Learned,
    /// Those of the run, or what `--assume` says of them.
    Stated,
}

/// Core's policies, and one that no gateway could use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PolicyKind {
    /// A policy of gateways.
    Rule(Policy),
    /// Workers of its own for each label, as many as its share of the requests, and the least loaded of them: the paper's
    /// baseline `Domain`. Labels of less than a worker's share have workers in common. It knows labels, and the shares of the very
    /// trace that is replayed.
    Label,
    /// The best assignment of the whole run that a search finds which knows all of it, and starts from the best of the other
    /// policies: see [`hindsight`](super::hindsight).
    Hindsight(Goal),
}

impl PolicySpec {
    /// What a list of policies may name.
    pub fn names() -> Vec<&'static str> {
        let policies = Policy::ALL.into_iter().map(Policy::name);
        policies.chain(["label", "hindsight"]).collect()
    }

    /// Whether it decides request by request, and not in hindsight.
    pub fn is_online(&self) -> bool {
        !matches!(self.kind, PolicyKind::Hindsight(_))
    }

    /// The same rule with [`Usage::Decode`]; none where it does not look at requests, or is that already.
    pub fn with_true_usage(&self) -> Option<Self> {
        let looks = matches!(self.kind, PolicyKind::Rule(policy) if policy.looks());
        (looks && self.usage == Usage::Prefill).then(|| PolicySpec {
            name: format!("{}:usage=decode", self.name),
            usage: Usage::Decode,
            ..self.clone()
        })
    }

    /// Whether it balances load and looks at nothing else: the references that a policy has to beat.
    pub fn is_load_balancer(&self) -> bool {
        matches!(self.kind, PolicyKind::Rule(policy) if !policy.looks())
    }

    /// Whether both decide alike, whatever they are called.
    pub(super) fn is_same(&self, other: &PolicySpec) -> bool {
        let name = other.name.clone();
        PolicySpec {
            name,
            ..self.clone()
        } == *other
    }

    /// The rule, with the run's tau and load cap where it has none of its own, but the tau of `hybrid` in place of the run's.
    pub fn rule(&self, run: &Rule) -> Rule {
        let tau = match self.kind {
            PolicyKind::Rule(Policy::Hybrid) => Rule::of(Policy::Hybrid).tau,
            _ => run.tau,
        };
        Rule {
            policy: match self.kind {
                PolicyKind::Rule(policy) => policy,
                PolicyKind::Label | PolicyKind::Hindsight(_) => Policy::Band,
            },
            tau: self.tau.unwrap_or(tau),
            max_load_factor: self.max_load_factor.unwrap_or(run.max_load_factor),
            objective: Objective {
                exponent: self.exponent.unwrap_or(run.objective.exponent),
                ..run.objective
            },
            candidates: self.candidates.or(run.candidates),
            ..*run
        }
    }
}

impl FromStr for PolicySpec {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut parts = text.split(':');
        let name = parts.next().unwrap_or_default();
        let policy = Policy::ALL.into_iter().find(|policy| policy.name() == name);
        let mut kind = match policy {
            Some(policy) => PolicyKind::Rule(policy),
            None if name == "label" => PolicyKind::Label,
            None if name == "hindsight" => PolicyKind::Hindsight(Goal::default()),
            None => {
                let names = PolicySpec::names().join(", ");
                return Err(format!("{name:?} is no policy; there are {names}"));
            }
        };
        let scores = matches!(policy, Some(Policy::Marginal | Policy::Hybrid));
        let (mut tau, mut max_load_factor, mut exponent) = (None, None, None);
        let (mut usage, mut refit, mut candidates) = (Usage::default(), None, None);
        let mut steps = Steps::default();
        for part in parts {
            match part.split_once('=') {
                Some(("tau", value)) => {
                    let value = value.parse().ok().filter(|tau| (0.0..=2.0).contains(tau));
                    tau = Some(value.ok_or("tau: a number from 0 to 2 was expected")?);
                }
                Some(("cap", "none")) => max_load_factor = Some(None),
                Some(("cap", value)) => {
                    let value = value.parse().ok().filter(|cap| (1.0..=100.0).contains(cap));
                    let value =
                        value.ok_or("cap: a number from 1 to 100, or none, was expected")?;
                    max_load_factor = Some(Some(value));
                }
                Some(("usage", value)) => {
                    if !policy.is_some_and(Policy::looks) {
                        return Err(format!("usage: {name} does not look at requests"));
                    }
                    usage = Usage::from_str(value, true)
                        .map_err(|_| "usage: prefill or decode was expected")?;
                }
                Some(("refit", value)) => {
                    if !policy.is_some_and(Policy::compares_regions) {
                        return Err(format!("refit: {name} has no centroids"));
                    }
                    refit = Some(value.parse().map_err(|error| format!("refit: {error}"))?);
                }
                Some(("for", value)) if kind == PolicyKind::Hindsight(Goal::default()) => {
                    let goal = Goal::from_str(value, true);
                    kind =
                        PolicyKind::Hindsight(goal.map_err(|_| "for: mean or p99 was expected")?);
                }
                Some(("q", value)) if scores => {
                    let value = value.parse().ok();
                    let value = value.filter(|q| (1..=MAX_EXPONENT).contains(q));
                    let allowed =
                        || format!("q: a whole number from 1 to {MAX_EXPONENT} was expected");
                    exponent = Some(value.ok_or_else(allowed)?);
                }
                Some(("steps", value)) if scores => {
                    steps = Steps::from_str(value, true)
                        .map_err(|_| "steps: learned or stated was expected")?;
                }
                Some(("candidates", value)) => {
                    if !policy.is_some_and(Policy::draws) {
                        return Err(format!("candidates: {name} draws none"));
                    }
                    let value = value
                        .parse()
                        .ok()
                        .filter(|drawn| (1..=MAX_CANDIDATES).contains(drawn));
                    let allowed = || {
                        format!(
                            "candidates: a whole number from 1 to {MAX_CANDIDATES} was expected"
                        )
                    };
                    candidates = Some(value.ok_or_else(allowed)?);
                }
                Some((parameter @ ("q" | "steps"), _)) => {
                    return Err(format!(
                        "{parameter}: only marginal and hybrid know step times"
                    ));
                }
                _ => {
                    return Err(format!(
                        "{part:?}: tau=…, cap=…, q=…, steps=…, candidates=…, usage=… or refit=… was expected"
                    ));
                }
            }
        }
        Ok(PolicySpec {
            name: text.to_owned(),
            kind,
            tau,
            max_load_factor,
            usage,
            refit,
            exponent,
            candidates,
            steps,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_policy_may_have_parameters_of_its_own() {
        let run = Rule::default();
        let rule = |text: &str| text.parse::<PolicySpec>().unwrap().rule(&run);
        assert_eq!(rule("band"), run);
        let own = rule("top1:tau=0.25:cap=none");
        assert_eq!(
            (own.policy, own.tau, own.max_load_factor),
            (Policy::Top1, 0.25, None)
        );
        assert_eq!(rule("label:cap=2").max_load_factor, Some(2.0));
        assert_eq!(rule("hybrid"), Rule::of(Policy::Hybrid));
        let tail = rule("hybrid:tau=0.3:q=8:cap=1.25");
        assert_eq!((tail.objective.exponent, tail.tau), (8, 0.3));
        assert_eq!(tail.objective.step, run.objective.step);
        assert_eq!(
            (tail.candidates, rule("band:candidates=8").candidates),
            (None, Some(8))
        );
        let steps = |text: &str| text.parse::<PolicySpec>().unwrap().steps;
        assert_eq!(steps("marginal"), Steps::Learned);
        assert_eq!(steps("hybrid:steps=stated"), Steps::Stated);
        for wrong in [
            "bond",
            "band:steps=learned",
            "hybrid:steps=guessed",
            "band:tau=3",
            "band:cap=0.5",
            "band:width=1",
            "band:",
            "band:usage=guess",
            "band:refit=0",
            "marginal:refit=2",
            "band:for=mean",
            "p2c:usage=decode",
            "hindsight:for=p50",
            "marginal:q=0",
            "marginal:q=17",
            "marginal:q=1.5",
            "band:q=1",
            "marginal:candidates=0",
            "p2c:candidates=2",
            "batch_band:candidates=2",
        ] {
            assert!(wrong.parse::<PolicySpec>().is_err(), "{wrong}");
        }
    }
}
