//! `eldr convert`.

use std::path::PathBuf;

use clap::{Args, Subcommand};

use crate::convert::SmallMoe;
use crate::error::Error;
use crate::trace::Writer;

#[derive(Debug, Subcommand)]
pub(super) enum Convert {
    /// Converts gate recordings of the small Qwen3-MoE model (NumPy .npz)
    SmallMoe(SmallMoeArgs),
}

#[derive(Debug, Args)]
#[command(after_help = "Example:
  eldr convert small-moe task_evaluation.npz --decode-topk decode_topk_task_evaluation.npz \\
      --mix-only -o task_evaluation.jsonl.gz")]
pub(super) struct SmallMoeArgs {
    /// Archive with id, domain, in_mix, n_prompt, n_decode, prefill_counts, decode_counts,
    /// prefix_group and prefix_len
    requests: PathBuf,
    /// Archive with the experts of every decode step of the same requests, for exact replay
    #[arg(long, value_name = "NPZ")]
    decode_topk: Option<PathBuf>,
    /// Keep only the requests of the unequal mix of domains (in_mix)
    #[arg(long)]
    mix_only: bool,
    /// Trace to write; compressed if the name ends in .gz
    #[arg(short, long, value_name = "TRACE")]
    output: PathBuf,
}

impl Convert {
    pub(super) fn run(&self) -> Result<String, Error> {
        let Convert::SmallMoe(args) = self;
        let mut writer = Writer::create(&args.output)?;
        let requests = SmallMoe {
            requests: &args.requests,
            decode_topk: args.decode_topk.as_deref(),
            mix_only: args.mix_only,
        }
        .convert(&mut writer)?;
        writer.finish()?;
        Ok(format!("{}: {requests} requests\n", args.output.display()))
    }
}
