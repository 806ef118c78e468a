//! Deploy or not.

use serde::Serialize;

use super::HARM_MAX;
use super::adapt::{Adaptation, KEPT_MIN};
use super::ceiling::Ceiling;
use super::judge::{Harm, Judged, high, low};

/// A ceiling below this many percent is not worth a deployment.
const CEILING_MIN: f64 = 2.0;
/// Fewer requests per decode step have nothing to share.
const BATCH_MIN: f64 = 2.0;

/// What to do.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Verdict {
    /// Whether the recommended policy is worth it.
    pub deploy: bool,
    /// The policy to have in any case: the recommended one, or the best load balancer.
    pub policy: String,
    /// Why not; empty where it is.
    pub reasons: Vec<String>,
    /// What to mind if it is.
    pub warnings: Vec<String>,
}

/// Of the first policy that was judged. It must beat the best load balancer in mean and P50 beyond the interval, be no worse in P99
/// beyond the interval, keep the bound, and gain by signatures.
pub(super) fn verdict(
    judged: &[Judged],
    never_worse: &[Harm],
    placebo: &Judged,
    ceiling: &Ceiling,
    adaptation: Option<&Adaptation>,
) -> Verdict {
    let mut reasons = Vec::new();
    let Some(own) = judged.first() else {
        return Verdict {
            deploy: false,
            policy: "least_loaded".into(),
            reasons: vec!["no policy was judged".into()],
            warnings: Vec::new(),
        };
    };
    let changes = &own.against_best;
    for (name, change, best) in [
        ("mean", changes.mean, &own.best[0]),
        ("P50", changes.p50, &own.best[1]),
    ] {
        if high(change) >= 0.0 {
            reasons.push(format!(
                "{name} TPOT is not better than {best}'s beyond chance: {:+.1} % (95 %: {:+.1} to {:+.1})",
                change.mean,
                low(change),
                high(change)
            ));
        }
    }
    if low(changes.p99) > 0.0 {
        let (change, best) = (changes.p99.mean, &own.best[2]);
        reasons.push(format!("P99 TPOT is worse than {best}'s: {change:+.1} %"));
    }
    for harm in never_worse.iter().filter(|harm| !harm.holds) {
        reasons.push(format!(
            "with {} it is worse than least_loaded by more than {HARM_MAX} %",
            harm.case.name()
        ));
    }
    // The placebo has the policy's balance without what signatures say.
    if placebo.against_best.mean.mean <= changes.mean.mean / 2.0 && changes.mean.mean < 0.0 {
        reasons.push(format!(
            "exchanged signatures gain {:+.1} % as well: it is not signatures that gain",
            placebo.against_best.mean.mean
        ));
    }
    if !reasons.is_empty() {
        if ceiling.batch < BATCH_MIN {
            reasons.push(format!(
                "load is low: {:.1} requests per decode step have little to share",
                ceiling.batch
            ));
        } else if ceiling.percent < CEILING_MIN {
            reasons.push(format!(
                "there is little to gain: batches of {:.0} use {:.0} of {} experts whoever is in them",
                ceiling.batch, ceiling.now, ceiling.experts
            ));
        }
    }
    let deploy = reasons.is_empty();
    let warnings = adaptation
        .filter(|adaptation| deploy && !adaptation.holds)
        .map(|adaptation| {
            let [mean, p50] = [0, 1].map(|value| adaptation.kept[value].map_or(100.0, |kept| kept.mean));
            format!(
                "after an abrupt change of traffic it keeps {mean:.0} % of its gain in mean and {p50:.0} % in P50, less than {KEPT_MIN} %: have `eldr serve --online` refit the regions"
            )
        });
    Verdict {
        warnings: warnings.into_iter().collect(),
        deploy,
        policy: match deploy {
            true => own.policy.clone(),
            false => own.best[0].clone(),
        },
        reasons,
    }
}
