//! `eldr generate`.

use std::path::PathBuf;

use clap::Args;

use super::simulate::options::Model;
use crate::error::Error;
use crate::generate::{Generator, Kind, Strengths, record};
use crate::trace::Writer;

/// Requests that are generated at a time.
const CHUNK: usize = 64;

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  eldr generate --model qwen3-30b-a3b --workload task -n 1000 -o calibration.jsonl.gz
  eldr generate --model qwen3-30b-a3b --workload task -n 1000 --skip 1000 -o evaluation.jsonl.gz
  eldr simulate evaluation.jsonl.gz --calibrate calibration.jsonl.gz --rate 60

Requests that nobody sent, at the size of models that nobody has to run: expert counts with the
popularity of Qwen3-30B-A3B's experts, and domains as different from each other as the ELDR paper
(arXiv 2607.00466) publishes. The same seed gives the same requests; other ones of the same
traffic come with --skip.")]
pub(super) struct GenerateArgs {
    /// Model whose layers and experts the requests use
    #[arg(long, value_enum)]
    model: Model,
    /// What the requests are about
    #[arg(long, value_enum)]
    workload: Kind,
    /// How many requests
    #[arg(short = 'n', long, default_value_t = 1_000, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    requests: u32,
    /// Requests of the same traffic to leave out before
    #[arg(long, default_value_t = 0, value_name = "N", value_parser = clap::value_parser!(u32).range(0..=1_000_000))]
    skip: u32,
    /// Seed of what domains and requests prefer
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Trace to write; compressed if it ends in .gz
    #[arg(short, long, value_name = "TRACE")]
    output: PathBuf,
}

impl GenerateArgs {
    pub(super) fn run(&self) -> Result<String, Error> {
        let shape = self.model.shape();
        let strengths = Strengths::fitted(&shape, self.workload);
        let generator = Generator::new(shape, self.workload, strengths, self.seed);
        let mut writer = Writer::create(&self.output)?;
        let bar = super::working(self.requests.into()).with_message("generating");
        let (first, end) = (self.skip as usize, (self.skip + self.requests) as usize);
        for start in (first..end).step_by(CHUNK) {
            let numbers = start..end.min(start + CHUNK);
            for (index, gates) in numbers.clone().zip(generator.gates(numbers)) {
                writer.write(&record(&generator, &gates, index))?;
                bar.inc(1);
            }
        }
        bar.finish_and_clear();
        writer.finish()?;
        Ok(format!(
            "trace    {}, {} requests\nmodel    {}, {}, top-{}\nworkload {}, seed {}\n",
            self.output.display(),
            self.requests,
            shape.name,
            shape.geometry,
            shape.top_k,
            self.workload.name(),
            self.seed
        ))
    }
}
