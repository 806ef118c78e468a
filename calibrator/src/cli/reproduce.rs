//! `eldr reproduce`.

mod text;

use std::path::PathBuf;

use clap::Args;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use serde::Serialize;

use super::Promised;
use crate::error::Error;
use crate::generate::{CLUSTER, CLUSTERS};
use crate::reproduce::{Options, Reproduction, reproduce, work};

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  eldr reproduce --quick
  eldr reproduce --html reproduction.html

Generates requests of three models and two workloads with the gate statistics that the ELDR
paper (arXiv 2607.00466) publishes, serves them in the simulator at the published rates by every
policy, and prints simulated beside published figures.

What a signature gains on a model is predicted from the two other models. Known of the model
itself are its size and its times under load balancers. Those times hardly tell what an expert
costs from what a request costs. A request costs at least what reading its KV cache does, and how
much more slowly than the memory can that goes is what the other two models are asked for. The
constant guess is the mean of all published changes, which knows what it guesses.

Exit code 0 says that it ran, not that the prediction is good.")]
pub(super) struct ReproduceArgs {
    /// A first look in a minute: fewer requests, two rates, no ablations
    #[arg(long)]
    quick: bool,
    /// How much the clusters inside domains differ, in standard deviations of logits; nothing published fixes it
    #[arg(long, value_name = "STRENGTH", default_value = STRENGTHS[CLUSTER], value_parser = clusters())]
    clusters: usize,
    /// Seed of requests, regions and arrivals
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Write the results as a page with plots, too
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    /// Print one JSON object instead of text
    #[arg(long)]
    json: bool,
}

/// [`CLUSTERS`], as they are named.
const STRENGTHS: [&str; CLUSTERS.len()] = ["1", "1.5", "2"];

/// The strengths there are, as their places.
fn clusters() -> impl TypedValueParser<Value = usize> {
    let place = |text: String| STRENGTHS.iter().position(|name| *name == text);
    PossibleValuesParser::new(STRENGTHS).map(move |text| place(text).unwrap_or(CLUSTER))
}

#[derive(Serialize)]
struct Report<'a> {
    command: &'a str,
    #[serde(flatten)]
    reproduction: &'a Reproduction,
}

impl ReproduceArgs {
    pub(super) fn run(&self) -> Result<String, Error> {
        let options = Options {
            cluster: self.clusters,
            ..match self.quick {
                true => Options::quick(self.seed),
                false => Options::full(self.seed),
            }
        };
        let page = self.html.as_deref();
        let page = page.map(|path| Promised::new(path, "the page"));
        let page = page.transpose()?;
        let bar = super::working(work(&options));
        let done = reproduce(&options, |piece| {
            bar.set_message(piece.to_owned());
            bar.inc(1);
        });
        bar.finish_and_clear();
        let reproduction = &done?;
        let command = &super::simulate::command(std::env::args_os());
        if let Some(page) = page {
            page.write(crate::report::reproduction(reproduction, command)?.as_bytes())?;
        }
        Ok(if self.json {
            super::to_json(&Report {
                command,
                reproduction,
            })
        } else {
            text::text(reproduction, command)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strengths_of_clusters_are_named_by_their_numbers() {
        for (name, strength) in STRENGTHS.into_iter().zip(CLUSTERS) {
            assert_eq!(name, strength.to_string());
        }
    }
}
