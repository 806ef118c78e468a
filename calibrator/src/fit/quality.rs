//! How good a fit is, in words.

use serde::Serialize;

use super::Regions;
use crate::held_out::{HeldOut, Trial};

/// Below this, distances between signatures say little about decode. The paper's models have 0.70 to 0.92.
const RHO_MIN: f64 = 0.4;

/// How a fit does on requests that it did not see.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Quality {
    /// Requests that it was measured on.
    pub requests: usize,
    /// Rank correlation of signature and decode distances; none without decode counts.
    pub rho: Option<f64>,
    /// The regions that were tried, the chosen ones last.
    pub trials: Vec<Trial>,
    /// Requests that were clustered, per region.
    pub fitted_per_region: f64,
}

impl Quality {
    /// What `trials`, the chosen one last, say of a fit to `fitted` requests.
    pub(super) fn new(held_out: &HeldOut, trials: Vec<Trial>, fitted: usize) -> Self {
        let regions = trials.last().map_or(1, |trial| trial.regions);
        Quality {
            requests: held_out.len(),
            rho: held_out.rho(),
            fitted_per_region: fitted as f64 / regions as f64,
            trials,
        }
    }

    /// The regions that were chosen.
    pub fn chosen(&self) -> Option<&Trial> {
        self.trials.last()
    }

    /// What a person should know before using the blob, each with a next step.
    pub fn warnings(&self) -> Vec<String> {
        let mut warnings = Vec::new();
        if let Some(rho) = self.rho.filter(|&rho| rho < RHO_MIN) {
            warnings.push(format!(
                "signatures say little about decode: rank correlation {rho:.2} on held-out requests, {RHO_MIN} is little\n\
                 hint: give more requests with decode counts, or try another `--weight` or `--signature`"
            ));
        }
        let Some(chosen) = self.chosen() else {
            return warnings;
        };
        if chosen.regions > 1 && !chosen.alike.has_structure() {
            let alike = &chosen.alike;
            warnings.push(format!(
                "no structure to exploit: held-out requests of one region are no more alike in {} (cosine {:.3}) than if regions were drawn at random ({:.3} ± {:.3})\n\
                 hint: a load balancer will do as well on this traffic: `\"policy\": \"least_loaded\"`",
                alike.of.name(), alike.in_region, alike.placebo, alike.placebo_deviation
            ));
        }
        if !chosen.is_balanced() {
            warnings.push(format!(
                "regions do not hold on other requests: of those held out one worker would get {:.2} × the mean (good is up to {:.2}), the largest region gets {:.1} % of them instead of {:.1} %\n\
                 hint: give more requests ({:.0} per region now) or fewer regions (`--regions`); keep the gateway's load cap (`max_load_factor`)",
                chosen.busiest,
                chosen.busiest_max(),
                100.0 * largest(&chosen.shares),
                100.0 / chosen.regions as f64,
                self.fitted_per_region,
            ));
        }
        warnings
    }

    /// The figures as lines.
    pub fn text(&self) -> String {
        let rho = match self.rho {
            Some(rho) => format!("rho {rho:.3}"),
            None => "rho unknown, too few have decode counts".into(),
        };
        let mut text = format!(
            "held out {} requests that were not fitted to: {rho}\n",
            self.requests
        );
        if let Some(Trial {
            regions,
            busiest,
            shares,
            alike,
            ..
        }) = self.chosen()
        {
            text += &format!(
                "alike    {:.3} in {} within a region, {:.3} between any two, {:.3} if regions are drawn\n\
                 balance  the busiest worker gets {busiest:.2} × the mean, the largest region {:.1} % (fitted to {:.1} %)\n",
                alike.in_region,
                alike.of.name(),
                alike.any,
                alike.placebo,
                100.0 * largest(shares),
                100.0 / *regions as f64,
            );
        }
        text
    }
}

/// Why there are so many regions, in one line for a person.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(transparent)]
pub struct Choice(String);

impl Choice {
    /// The line.
    pub fn text(&self) -> &str {
        &self.0
    }

    /// Nothing was held out to choose by.
    pub(super) fn unmeasured(asked: Regions, regions: usize, workers: usize) -> Self {
        let why = match asked {
            Regions::Fixed(_) => "as asked for",
            Regions::Auto => "too few requests to try other numbers on",
        };
        Choice(format!("{}; {why}", shape(regions, workers)))
    }

    /// `chosen` was chosen by held-out requests over the `others` that were tried.
    pub(super) fn measured(
        asked: Regions,
        chosen: &Trial,
        others: &[Trial],
        workers: usize,
    ) -> Self {
        let shape = shape(chosen.regions, workers);
        let load = |trial: &Trial| format!("{:.2}", trial.busiest);
        if asked != Regions::Auto {
            return Choice(format!("{shape}; as asked for"));
        }
        let also: Vec<String> = others
            .iter()
            .map(|trial| format!("{} with {}", load(trial), trial.regions))
            .collect();
        let balanced = chosen.is_balanced();
        Choice(match (others.is_empty(), balanced) {
            (true, true) => format!(
                "{shape}; held-out requests spread evenly: the busiest worker gets {} × the mean, good is up to {:.2}",
                load(chosen),
                chosen.busiest_max()
            ),
            (true, false) => format!("{shape}; no other number is possible"),
            (false, true) => format!(
                "{shape}; with more, held-out requests spread unevenly: the busiest worker, × the mean, would get {}; now {}, good is up to {:.2}",
                also.join(", "),
                load(chosen),
                chosen.busiest_max()
            ),
            (false, false) => format!(
                "{shape}; the most even of those tried: the busiest worker gets {} × the mean of held-out requests; {}",
                load(chosen),
                also.join(", ")
            ),
        })
    }
}

fn shape(regions: usize, workers: usize) -> String {
    match (regions, workers) {
        (regions, workers) if regions == workers => format!("{regions}, one worker each"),
        (regions, workers) if workers.is_multiple_of(regions) => {
            format!("{regions}, {} workers each", workers / regions)
        }
        (regions, workers) if regions.is_multiple_of(workers) => {
            format!("{regions}, {} per worker", regions / workers)
        }
        (regions, workers) => format!("{regions} for {workers} workers, neighbours share one"),
    }
}

fn largest(shares: &[f64]) -> f64 {
    shares.iter().copied().fold(0.0, f64::max)
}

#[cfg(test)]
mod tests;
