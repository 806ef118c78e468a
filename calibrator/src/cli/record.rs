//! `eldr record`.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use indicatif::ProgressBar;

use crate::error::Error;
use crate::record::{Done, Engine, Event, Options, Prompts, Routing, record};

/// Rejected prompts that are told one by one.
const REJECTED_SHOWN: u64 = 5;

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  eldr record --prefill http://10.0.0.1:8000 --prompts prompts.jsonl -o trace.jsonl --experts 128
  eldr record --prefill http://10.0.0.1:8000 --prompts prompts.jsonl -o trace.jsonl \\
      --eldr-sig --layers 48 --experts 128

Prompts are JSON Lines, plain or gzip: {\"id\":…,\"prompt\":…,\"label\":…}, where prompt is a text or
a list of token ids, or \"messages\" for the chat API. `text` may stand for prompt and `domain` for
label; the default of id is the number of the line.

The engine must say which experts it used:
  vLLM with --enable-return-routed-experts: say --experts; with --max-tokens 64 the trace has
  decode counts too, by which `eldr fit` chooses layers.
  The official ELDR fork, as a prefill worker: say --eldr-sig, --layers and --experts.
  Any engine with an adapter that answers with the header x-eldr-signature.

Records are written in the order of the prompts. If it is interrupted, run it again: a partly
written last line is dropped, and prompts whose id is in the trace are not sent again. A prompt
that the engine refuses (400, 413, 422) is told and left out; other failures end the recording
after the retries.")]
pub(super) struct RecordArgs {
    /// Engine, a prefill worker where there is one
    #[arg(long, value_name = "URL")]
    prefill: String,
    /// Prompts to send
    #[arg(long, value_name = "FILE")]
    prompts: PathBuf,
    /// Trace to write or to go on with, not compressed
    #[arg(short, long, value_name = "TRACE")]
    output: PathBuf,
    /// Model, as the engine serves it
    #[arg(long, default_value = "default")]
    model: String,
    /// Experts per layer of the model
    #[arg(long)]
    experts: Option<usize>,
    /// MoE layers of the model
    #[arg(long)]
    layers: Option<usize>,
    /// Read `kv_transfer_params.eldr_sig`: ask for KV blocks to be handed over, and release them
    #[arg(long, requires_all = ["experts", "layers"])]
    eldr_sig: bool,
    /// Tokens to generate for each prompt
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    max_tokens: u32,
    /// Requests at a time
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..=1024))]
    concurrency: u16,
    /// Times that a request is sent once more after a failed connection, 408, 429 or 5xx
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(..=10))]
    retries: u32,
    /// Seconds that an answer may take
    #[arg(long, default_value_t = 300, value_name = "S", value_parser = clap::value_parser!(u64).range(1..=86_400))]
    timeout_s: u64,
    /// Header of every request, such as 'authorization: Bearer …'; may be given several times
    #[arg(long = "header", value_name = "NAME: VALUE")]
    headers: Vec<String>,
}

impl RecordArgs {
    /// The engine; the text is for a usage error.
    pub(super) fn check(&self) -> Result<Engine, String> {
        Engine::new(
            &self.prefill,
            &self.headers,
            Duration::from_secs(self.timeout_s),
        )
    }

    pub(super) fn run(&self, engine: Engine) -> Result<String, Error> {
        let options = Options {
            model: self.model.clone(),
            max_tokens: self.max_tokens,
            routing: Routing {
                layers: self.layers,
                experts: self.experts,
            },
            hand_over: self.eldr_sig,
            concurrency: self.concurrency.into(),
            retries: self.retries,
        };
        let prompts = Prompts::open(&self.prompts)?;
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build();
        let runtime = runtime.map_err(|error| {
            Error::new(
                format!("starting threads failed: {error}"),
                "close other programs",
            )
        })?;
        let bar = ProgressBar::new_spinner().with_message("recording");
        bar.set_style(super::style(
            "{spinner} {msg}: {pos} prompts, {per_sec}, {elapsed}",
        ));
        let mut rejected = 0;
        let done = runtime.block_on(record(&engine, prompts, &self.output, &options, |event| {
            bar.inc(1);
            if let Event::Rejected(why) = event {
                rejected += 1;
                if rejected <= REJECTED_SHOWN {
                    bar.suspend(|| eprintln!("note: left out: {why}"));
                }
            }
        }));
        bar.finish_and_clear();
        let Done {
            recorded,
            there,
            rejected,
        } = done?;
        let file = self.output.display();
        if recorded + there + rejected == 0 {
            let what = format!("{}: it has no prompts", self.prompts.display());
            return Err(Error::new(
                what,
                "write one object per line: {\"prompt\":\"…\"}",
            ));
        }
        if recorded + there == 0 {
            let what = format!(
                "{file}: nothing was recorded: {rejected} prompts were refused by the engine"
            );
            return Err(Error::new(
                what,
                "see the notes above, and check --prompts and --model",
            ));
        }
        Ok(format!(
            "{file}: {recorded} recorded, {there} there already, {rejected} left out because the engine refused them\n"
        ))
    }
}
