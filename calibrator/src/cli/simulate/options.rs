//! What serves, and what is asked for.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use clap::{Args, ValueEnum};
use eldr_core::engine::{Ranks, Speculation, StepModel};
use eldr_core::signature::Geometry;

use crate::error::Error;
use crate::generate::Shape;
use crate::simulate::mix::Point;
use crate::simulate::{Change, Cluster, Lengths, LoadUnit, Mix, Plan, Times, placement};
use crate::steps::{self, StepFit};

/// Workers of a pool, and gateways.
const WORKERS_MAX: i64 = 4096;

#[derive(Debug, Args)]
#[command(next_help_heading = "Cluster")]
pub(in crate::cli) struct ClusterOptions {
    /// Prefill workers; with 0 prefill takes no time
    #[arg(long, default_value_t = 8, value_name = "N", value_parser = clap::value_parser!(u16).range(0..=WORKERS_MAX))]
    prefill: u16,
    /// Decode workers [default: those of --blob, or 16]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=WORKERS_MAX))]
    pub(in crate::cli) decode: Option<u16>,
    /// Gateways; requests reach them at random
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=WORKERS_MAX))]
    gateways: u16,
    /// How often gateways learn each other's requests in flight: ms, 0 for at once, or never
    #[arg(long, default_value = "0", value_parser = share, value_name = "MS|never")]
    share_ms: Share,
    /// They tell each other what runs on each worker as well, quantised, not only how much
    #[arg(long)]
    share_batches: bool,
    /// What gateways count loads in
    #[arg(long, value_enum, default_value_t = LoadUnit::Requests)]
    load_unit: LoadUnit,
    /// Expert parallelism: each decode worker spreads its experts over so many GPUs, in their order,
    /// and every layer waits for the busiest
    #[arg(long, value_name = "N", conflicts_with = "placement", value_parser = clap::value_parser!(u16).range(1..=1024))]
    ep_ranks: Option<u16>,
    /// The same as placed by `eldr place --output`, each worker its own way
    #[arg(long, value_name = "FILE")]
    placement: Option<PathBuf>,
    /// Speculative decoding: tokens of each request that a step verifies
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=64))]
    verify: u32,
    /// How many of them are accepted
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=64))]
    accept: u32,
    /// Model whose step coefficients are taken
    #[arg(long, value_enum, default_value_t = Model::Qwen3_30bA3b)]
    model: Model,
    /// Fit the step coefficients to a CSV: measured steps (batch,experts,step_ms, and kv_tokens if counted) or times per
    /// token of load balancers (rate_rps,tpot_p50_ms, with model and policy if there are several)
    #[arg(long, value_name = "CSV")]
    fit_steps: Option<PathBuf>,
    /// Cost of a decode step whatever its batch, ms [default: the model's]
    #[arg(long, value_name = "MS", value_parser = not_negative)]
    t0_ms: Option<f64>,
    /// Cost of each distinct expert per layer, ms [default: the model's]
    #[arg(long, value_name = "MS", value_parser = not_negative)]
    b_ms: Option<f64>,
    /// Cost of each request in the batch, ms [default: the model's]
    #[arg(long, value_name = "MS", value_parser = not_negative)]
    c_ms: Option<f64>,
    /// Cost of a thousand tokens in the batch's KV caches, ms [default: 0, as c has it for short requests]
    #[arg(long, value_name = "MS", value_parser = not_negative)]
    kv_ms_per_1k: Option<f64>,
    /// Step coefficients that policies believe in, where they are not the true ones: t0=, b=, c=, kv=
    #[arg(long, value_delimiter = ',', value_name = "NAME=MS,…", value_parser = assumption)]
    assume: Vec<(Coefficient, f64)>,
    /// Most requests that a decode worker runs at a time
    #[arg(long, default_value_t = 256, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=65_536))]
    batch_max: u32,
    /// Tokens that the KV cache of a decode worker holds; who does not fit waits [default: no limit]
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u64).range(1..))]
    kv_tokens: Option<u64>,
    /// Time of a prefill per token of the prompt
    #[arg(long, default_value_t = 0.035, value_name = "MS", value_parser = not_negative)]
    prefill_ms_per_token: f64,
    /// Time from the decision until the decode worker has the KV blocks
    #[arg(long, default_value_t = 2.0, value_name = "MS", value_parser = not_negative)]
    transfer_ms: f64,
    /// A decode worker fails, drains or joins: 30:fail:3, 60:join:3 (seconds, what, number from 0)
    #[arg(
        long = "change",
        value_delimiter = ',',
        value_name = "SECONDS:WHAT:WORKER,…"
    )]
    changes: Vec<Change>,
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Arrivals")]
pub(in crate::cli) struct ArrivalOptions {
    /// Where times of arrival come from
    #[arg(long, value_enum, default_value_t = ArrivalsArg::Poisson)]
    arrivals: ArrivalsArg,
    /// Requests per second [default: 20, or as recorded]
    #[arg(long, value_name = "R", value_parser = positive)]
    rate: Option<f64>,
    /// Shape of the gamma distribution of times between arrivals: 1 is Poisson, less comes in bursts
    #[arg(long, default_value_t = 1.0, value_name = "SHAPE", value_parser = positive)]
    burstiness: f64,
    /// Prompt and answer lengths in place of the trace's: Azure's CSV
    /// (TIMESTAMP,ContextTokens,GeneratedTokens) or Mooncake's JSON Lines
    #[arg(long, value_name = "FILE")]
    pub(in crate::cli) lengths: Option<PathBuf>,
    /// Tokens that every request decodes, in place of other lengths
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub(super) decode_tokens: Option<u32>,
    /// What comes when: labels, all, or traces by number, as multiples of the rate, from a time on or
    /// little by little between two: 0:@1,60:@2 or 0:all,40:all+maths=2,50:all or 0:chat,30~90:code
    #[arg(long, value_delimiter = ',', value_name = "SECONDS:KINDS,…")]
    mix: Vec<Point>,
    /// Seconds in which requests arrive; all are served to their end
    #[arg(long, default_value_t = 120.0, value_name = "SECONDS", value_parser = positive)]
    duration: f64,
    /// Seconds at the beginning whose requests are not measured
    #[arg(long, default_value_t = 0.0, value_name = "SECONDS", value_parser = not_negative)]
    warm_up: f64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum ArrivalsArg {
    /// Drawn at a rate; bursts with --burstiness
    Poisson,
    /// `ts` of the replayed trace
    Trace,
    /// The times of --lengths
    Lengths,
}

/// Models of which shapes and decode times are published (arXiv 2607.00466).
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(in crate::cli) enum Model {
    #[value(name = "qwen3-30b-a3b")]
    Qwen3_30bA3b,
    #[value(name = "gpt-oss-120b")]
    GptOss120b,
    #[value(name = "gemma-4-26b-a4b")]
    Gemma4_26bA4b,
}

impl Model {
    pub(in crate::cli) fn shape(self) -> Shape {
        match self {
            Model::Qwen3_30bA3b => Shape::QWEN3_30B_A3B,
            Model::GptOss120b => Shape::GPT_OSS_120B,
            Model::Gemma4_26bA4b => Shape::GEMMA_4_26B_A4B,
        }
    }

    fn step(self) -> StepModel {
        match self {
            Model::Qwen3_30bA3b => StepModel::QWEN3_30B_A3B,
            Model::GptOss120b => StepModel::GPT_OSS_120B,
            Model::Gemma4_26bA4b => StepModel::GEMMA_4_26B_A4B,
        }
    }
}

/// A time, or never. A type of its own: clap takes an `Option` for an argument that may be left out.
#[derive(Clone, Copy, Debug)]
struct Share(Option<Duration>);

fn share(text: &str) -> Result<Share, String> {
    match (text, not_negative(text)) {
        ("never", _) => Ok(Share(None)),
        (_, Ok(ms)) if ms == 0.0 || (0.01..=1e9).contains(&ms) => {
            Ok(Share(Some(Duration::from_secs_f64(ms / 1e3))))
        }
        _ => Err("0, 0.01 to 1000000000 ms, or never, was expected".into()),
    }
}

/// One of a step model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Coefficient {
    T0,
    B,
    C,
    Kv,
}

fn assumption(text: &str) -> Result<(Coefficient, f64), String> {
    let (name, ms) = text.split_once('=').unwrap_or((text, ""));
    let coefficient = match name {
        "t0" => Coefficient::T0,
        "b" => Coefficient::B,
        "c" => Coefficient::C,
        "kv" => Coefficient::Kv,
        _ => return Err("t0=, b=, c= or kv= was expected, in ms".into()),
    };
    Ok((coefficient, not_negative(ms)?))
}

pub(in crate::cli) fn not_negative(text: &str) -> Result<f64, String> {
    let number = text
        .parse()
        .ok()
        .filter(|number| (0.0..=1e9).contains(number));
    number.ok_or_else(|| "a number from 0 to 1000000000 was expected".into())
}

fn positive(text: &str) -> Result<f64, String> {
    let number = text
        .parse()
        .ok()
        .filter(|number| (1e-3..=1e6).contains(number));
    number.ok_or_else(|| "a number from 0.001 to 1000000 was expected".into())
}

/// How good a fit is, on stderr.
fn note_on_steps(fit: &StepFit, path: &Path) {
    let step = fit.step;
    eprintln!(
        "note: fitted to {} rows of {}: t0 {:.3} ms, b {:.4}, c {:.4}, kv {:.4}; R² {:.3}",
        fit.samples,
        path.display(),
        step.t0_ms,
        step.b_ms,
        step.c_ms,
        step.kv_ms_per_1k,
        fit.r2
    );
    if !fit.is_identified() {
        eprintln!(
            "warning: b and c are not identified: experts and batch size correlate by {:.3} over these rows, so that any share of b fits them\nhint: measure batches of like requests beside mixed ones of the same size, or try several --b-ms",
            fit.correlation
        );
    }
}

impl ClusterOptions {
    /// Decode workers where no blob names them.
    pub(in crate::cli) fn decode_workers(&self) -> usize {
        self.decode.map_or(16, usize::from)
    }

    pub(in crate::cli) fn check(&self) -> Result<(), String> {
        if self.gateways == 1 && self.share_ms.0 != Some(Duration::ZERO) {
            return Err(
                "--share-ms: one gateway has nobody to share with\nhint: give --gateways".into(),
            );
        }
        if self.share_batches && self.share_ms.0.is_none_or(|every| every.is_zero()) {
            return Err("--share-batches: gateways share at no time of their own\nhint: give --share-ms, such as 200; with 0 all know all at once".into());
        }
        if self.accept > self.verify {
            return Err(format!(
                "--accept {0}: a step verifies {1}\nhint: give --verify {0} or more, or accept {1} at most",
                self.accept, self.verify
            ));
        }
        Ok(())
    }

    /// Once it is known how many workers there are.
    pub(in crate::cli) fn check_changes(&self, workers: usize) -> Result<(), Error> {
        match self.changes.iter().find(|change| change.worker >= workers) {
            Some(change) => Err(Error::new(
                format!("--change: there is no decode worker {}", change.worker),
                format!("the decode workers are 0 to {}", workers - 1),
            )),
            None => Ok(()),
        }
    }

    /// The fit to `--fit-steps`, where that is given.
    pub(super) fn step_fit(
        &self,
        workers: usize,
        decode_tokens: Option<u32>,
    ) -> Result<Option<StepFit>, Error> {
        let Some(path) = &self.fit_steps else {
            return Ok(None);
        };
        let shape = self.model.shape();
        let setting = steps::Setting {
            model: shape.name,
            workers,
            decode_tokens: decode_tokens.unwrap_or(512),
            experts: shape.geometry.experts,
            top_k: shape.top_k,
        };
        steps::fit(&steps::read(path, setting)?).map(Some)
    }

    /// A replay of a smaller model under the coefficients of a large one needs a word.
    pub(in crate::cli) fn note_on_experts(&self, experts: usize) {
        let known = self.model.shape().geometry.experts;
        if self.b_ms.is_none() && self.fit_steps.is_none() && experts != known {
            eprintln!(
                "note: step coefficients are for {known} experts per layer, the trace has {experts}; with --b-ms {:.3} the same share of experts costs the same",
                self.model.step().b_ms * known as f64 / experts as f64
            );
        }
    }

    /// Where the experts of each worker are.
    fn ranks(&self, workers: &[String], geometry: Geometry) -> Result<Vec<Arc<Ranks>>, Error> {
        match (&self.placement, self.ep_ranks) {
            (Some(path), _) => placement::read(path, geometry, workers),
            (None, Some(ranks)) => Ok(vec![placement::contiguous(geometry, ranks.into())?]),
            (None, None) => Ok(Vec::new()),
        }
    }

    /// # Errors
    /// The step times cannot be fitted to or are all 0; the placement is none of these workers or of this model.
    pub(in crate::cli) fn cluster(
        &self,
        workers: &[String],
        geometry: Geometry,
        arrivals: &ArrivalOptions,
    ) -> Result<Cluster, Error> {
        let fit = self.step_fit(workers.len(), arrivals.decode_tokens)?;
        if let (Some(fit), Some(path)) = (&fit, &self.fit_steps) {
            note_on_steps(fit, path);
        }
        let model = fit.map_or(self.model.step(), |fit| fit.step);
        let step = StepModel {
            t0_ms: self.t0_ms.unwrap_or(model.t0_ms),
            b_ms: self.b_ms.unwrap_or(model.b_ms),
            c_ms: self.c_ms.unwrap_or(model.c_ms),
            kv_ms_per_1k: self.kv_ms_per_1k.unwrap_or(model.kv_ms_per_1k),
        };
        if step.t0_ms + step.b_ms + step.c_ms + step.kv_ms_per_1k == 0.0 {
            return Err(Error::new(
                "a decode step takes no time, whatever is in its batch",
                "give one of --t0-ms, --b-ms, --c-ms and --kv-ms-per-1k above 0",
            ));
        }
        Ok(Cluster {
            prefill_workers: self.prefill.into(),
            prefill_ms_per_token: self.prefill_ms_per_token,
            transfer_ms: self.transfer_ms,
            decode_workers: workers.len(),
            batch_max: self.batch_max as usize,
            kv_tokens_max: self.kv_tokens,
            step,
            assumed: self.assumed(step),
            ranks: self.ranks(workers, geometry)?,
            speculation: Speculation {
                verify: self.verify,
                accept: self.accept,
            },
            load_unit: self.load_unit,
            gateways: self.gateways.into(),
            share: self.share_ms.0,
            share_batches: self.share_batches,
            changes: self.changes.clone(),
            warm_up: Duration::from_secs_f64(arrivals.warm_up),
            duration: Duration::from_secs_f64(arrivals.duration),
            phases: arrivals.mix().map_or_else(Vec::new, |mix| mix.phases()),
        })
    }

    fn assumed(&self, step: StepModel) -> Option<StepModel> {
        let mut assumed = step;
        for &(coefficient, ms) in &self.assume {
            let changed = match coefficient {
                Coefficient::T0 => &mut assumed.t0_ms,
                Coefficient::B => &mut assumed.b_ms,
                Coefficient::C => &mut assumed.c_ms,
                Coefficient::Kv => &mut assumed.kv_ms_per_1k,
            };
            *changed = ms;
        }
        (!self.assume.is_empty()).then_some(assumed)
    }
}

impl ArrivalOptions {
    pub(in crate::cli) fn check(&self) -> Result<(), String> {
        if self.arrivals == ArrivalsArg::Lengths && self.lengths.is_none() {
            return Err(
                "--arrivals lengths: there are no lengths\nhint: give their file with --lengths"
                    .into(),
            );
        }
        if self.arrivals != ArrivalsArg::Poisson && self.burstiness != 1.0 {
            return Err("--burstiness: recorded times are as bursty as they are\nhint: leave it out, or take --arrivals poisson".into());
        }
        if !self.mix.is_empty() {
            if self.arrivals == ArrivalsArg::Trace {
                return Err("--mix: requests of --arrivals trace come in the order of the trace\nhint: leave one of them out".into());
            }
            Mix::new(self.mix.clone()).map_err(|problem| {
                format!(
                    "--mix: {problem}\nhint: points are in order, the first at 0: 0:chat,60:code"
                )
            })?;
        }
        if self.warm_up >= self.duration {
            return Err(format!(
                "--warm-up {}: nothing is measured of {} s\nhint: give a longer --duration",
                self.warm_up, self.duration
            ));
        }
        Ok(())
    }

    /// What comes when, if that is asked for; [`check`](Self::check) has seen it.
    pub(in crate::cli) fn mix(&self) -> Option<Mix> {
        Mix::new(self.mix.clone()).ok()
    }

    pub(in crate::cli) fn plan<'a>(
        &self,
        lengths: Option<&'a Lengths>,
        mix: Option<&'a Mix>,
        permute_signatures: bool,
    ) -> Plan<'a> {
        let rate_per_s = self.rate;
        Plan {
            times: match self.arrivals {
                ArrivalsArg::Poisson => Times::Drawn {
                    rate_per_s: rate_per_s.unwrap_or(20.0),
                    shape: self.burstiness,
                },
                ArrivalsArg::Trace => Times::Trace { rate_per_s },
                ArrivalsArg::Lengths => Times::Lengths { rate_per_s },
            },
            duration: Duration::from_secs_f64(self.duration),
            lengths,
            decode_tokens: self.decode_tokens,
            permute_signatures,
            mix,
        }
    }
}
