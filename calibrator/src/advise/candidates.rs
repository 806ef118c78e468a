//! Which policies with which parameters are tried.

use eldr_core::decide::Policy;

use super::spec;
use crate::error::Error;
use crate::simulate::PolicySpec;

/// Policies that look at signatures and can be tuned.
pub const POLICIES: [Policy; 5] = [
    Policy::Band,
    Policy::Top1,
    Policy::Hybrid,
    Policy::Marginal,
    Policy::BatchBand,
];
/// Those that are unless others are named: without `batch_band`, which in a gateway knows the requests of its own thread only, so that it
/// does there what is simulated if there is one thread.
pub const USUAL: [Policy; 4] = [Policy::Band, Policy::Top1, Policy::Hybrid, Policy::Marginal];

/// Seconds between refits, and those of the window that each looks at: a trade of how soon regions follow a change for how well they are fitted.
const REFIT: &str = "1/5";

/// How many values of each parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Grid {
    /// The usual ones.
    Full,
    /// A few of them, for a first look.
    Quick,
}

impl Grid {
    /// Load caps. They reach down to 1, where a policy chooses among workers that have no more than the mean: whatever signatures
    /// say, loads then stay as even as least loaded keeps them. Policies that learn what steps cost find that out by themselves, and
    /// may have more room.
    fn caps(self, policy: Policy) -> &'static [&'static str] {
        match (policy, self) {
            (Policy::Hybrid | Policy::Marginal, _) => &["1", "1.1", "1.25", "1.5"],
            (_, Grid::Full) => &["1", "1.05", "1.075", "1.1", "1.125", "1.15", "1.2"],
            (_, Grid::Quick) => &["1", "1.05", "1.1"],
        }
    }

    fn taus(self, policy: Policy) -> &'static [&'static str] {
        match (policy, self) {
            (Policy::Band | Policy::BatchBand, Grid::Full) => &["0.05", "0.1", "0.2"],
            (Policy::Band | Policy::BatchBand, Grid::Quick) => &["0.1"],
            (Policy::Hybrid, Grid::Full) => &["0.2", "0.3", "0.5"],
            (Policy::Hybrid, Grid::Quick) => &["0.5"],
            _ => &[],
        }
    }

    fn exponents(self, policy: Policy) -> &'static [&'static str] {
        match (policy, self) {
            (Policy::Hybrid | Policy::Marginal, Grid::Full) => &["1", "2", "4"],
            (Policy::Hybrid | Policy::Marginal, Grid::Quick) => &["1", "4"],
            _ => &[],
        }
    }

    /// Every candidate of a policy behind so many gateways.
    ///
    /// # Errors
    /// Never: the values are within their ranges.
    pub fn candidates(self, policy: Policy, gateways: usize) -> Result<Vec<PolicySpec>, Error> {
        let named = vec![policy.name().to_owned()];
        let texts = with("tau", self.taus(policy), named.clone());
        let texts = with("q", self.exponents(policy), texts);
        let mut texts = with("cap", self.caps(policy), texts);
        if gateways > 1 {
            // Who is the least loaded by old counts gets the requests of all gateways at once; of two that are drawn, of few.
            if policy == Policy::Band {
                texts.extend(with("candidates", &["2"], texts.clone()));
            }
            // Regions are what coordinates gateways, so that they are to be right.
            if matches!(policy, Policy::Band | Policy::Hybrid) {
                let narrow = with("tau", &["0.1"], named);
                let narrow = with("q", self.exponents(policy), narrow);
                let narrow = with("cap", self.caps(policy), narrow);
                texts.extend(with("refit", &[REFIT], narrow));
            }
        }
        texts.iter().map(|text| spec(text)).collect()
    }

    /// Band as the paper has it, without a load cap.
    ///
    /// # Errors
    /// Never: the values are within their ranges.
    pub fn unbounded(self) -> Result<Vec<PolicySpec>, Error> {
        let texts = with("tau", self.taus(Policy::Band), vec!["band".to_owned()]);
        let texts = with("cap", &["none", "1.25"], texts);
        texts.iter().map(|text| spec(text)).collect()
    }
}

/// Each text with each value of a parameter; as it is where there are none.
fn with(name: &str, values: &[&str], texts: Vec<String>) -> Vec<String> {
    if values.is_empty() {
        return texts;
    }
    let each = texts.iter();
    each.flat_map(|text| {
        values
            .iter()
            .map(move |value| format!("{text}:{name}={value}"))
    })
    .collect()
}
