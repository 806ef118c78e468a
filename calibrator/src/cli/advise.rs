//! `eldr advise`.

mod text;

use std::path::PathBuf;

use clap::Args;
use eldr_core::decide::Policy;
use indicatif::ProgressBar;
use serde::Serialize;
use serde_json::Value;

use super::simulate::options::{ArrivalOptions, ClusterOptions, not_negative};
use super::simulate::text::command;
use crate::advise::candidates::{Grid, POLICIES, USUAL};
use crate::advise::{Advice, Effort, Progress, Question, Traffic, advise, deploy, spec};
use crate::envoy;
use crate::error::Error;
use crate::requests::Requests;
use crate::simulate::{Cluster, Lengths, Replay, Workload};

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  eldr advise trace.jsonl --topology gateway.toml --rate 20
  eldr advise examples/data/small-moe/task_evaluation.jsonl.gz --decode 16 --rate 20 \\
      --decode-tokens 512 --b-ms 0.288 --slo-tpot-ms 20
  eldr advise access.log --decode 8 --arrivals trace --quick

Replays the trace on a simulated cluster, as `eldr simulate` does. Half of the requests calibrate: blobs
are fitted to two thirds of them, and every policy's tau, q and load cap, regions and layers are chosen on
the last third, several times. A choice must keep the bound: with permuted signatures, a wrong
calibration, a flash crowd, and 4 and 16 gateways whose loads are 1 s old, mean and P99 of the time per
output token (TPOT) stay within 1 % of least loaded. The other half of the requests evaluates what was
chosen, against the best of the four load balancers. Intervals are 95 %, over calibration splits, each
with arrivals of its own.

In one more run other traffic comes half way (--other, else the other half of the labels) and the blob
stays: policies that keep 80 % of their gain go before others that gain little more.

It says \"do not deploy\" where no policy beats the load balancers beyond chance. The step coefficients are
an assumption (see `eldr simulate --help`): advice is as good as they are.

Exit code 0 says that it ran, not that anything should be deployed.")]
pub(super) struct AdviseArgs {
    /// Traces of the traffic to come: with prompt lengths, and answer lengths or --decode-tokens
    #[arg(required = true, value_name = "TRACE")]
    traces: Vec<PathBuf>,
    /// Topology of `eldr envoy`: its prefill and decode workers are the cluster
    #[arg(long, value_name = "FILE", conflicts_with_all = ["decode", "prefill"])]
    topology: Option<PathBuf>,
    /// P99 TPOT at which goodput is told [default: what the best load balancer has]
    #[arg(long, value_name = "MS", value_parser = not_negative)]
    slo_tpot_ms: Option<f64>,
    /// Traces of other traffic, which the wrong calibration is fitted to, and from and to which traffic
    /// changes [default: one half of the labels, or regions, stands for the other]
    #[arg(long, value_name = "TRACE")]
    other: Vec<PathBuf>,
    /// Policies to choose among, such as band,top1 for gateways that keep no running batches; batch_band
    /// for those with one thread [default: band,top1,hybrid,marginal]
    #[arg(long, value_delimiter = ',', value_parser = policy, value_name = "POLICY,…")]
    policies: Vec<Policy>,
    #[command(flatten)]
    cluster: ClusterOptions,
    #[command(flatten)]
    arrivals: ArrivalOptions,
    /// How distinct experts are found
    #[arg(long, value_enum, default_value_t = Replay::Auto)]
    replay: Replay,
    /// Splits of the calibration requests [default: 5, or 3 with --quick]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(2..=100))]
    splits: Option<u16>,
    /// Runs of each split [default: 4, or 2 with --quick]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1000))]
    seeds: Option<u16>,
    /// Seed of splits, fits and arrivals
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Few candidates, splits and seeds, for a first look
    #[arg(long)]
    quick: bool,
    /// Print one JSON object instead of text
    #[arg(long)]
    json: bool,
}

/// A policy that can be tuned.
fn policy(text: &str) -> Result<Policy, String> {
    let found = POLICIES.into_iter().find(|policy| policy.name() == text);
    found.ok_or_else(|| {
        let names = POLICIES.map(Policy::name).join(", ");
        format!("one of {names} was expected")
    })
}

/// The advice, and how to follow it.
#[derive(Serialize)]
struct Report<'a> {
    command: String,
    deploy: Deploy,
    #[serde(flatten)]
    advice: &'a Advice,
}

/// The blob that is to be fitted.
const BLOB: &str = "advised.eldr";

/// What goes where.
#[derive(Serialize)]
struct Deploy {
    /// Fields of the model's entry in the filter's configuration.
    model: Value,
    /// The command that fits the blob; none where none is needed.
    fit: Option<String>,
    /// The command that has the blob follow the traffic; none where it stays.
    serve: Option<String>,
}

impl AdviseArgs {
    /// What clap cannot check on its own; the text is for a usage error.
    pub(super) fn check(&self) -> Result<(), String> {
        self.cluster.check()?;
        self.arrivals.check()?;
        match self.arrivals.mix() {
            Some(_) => Err("--mix: advice is for traffic as in the trace, and tried on traffic that changes in any case\nhint: leave it out".into()),
            None => Ok(()),
        }
    }

    pub(super) fn run(&self) -> Result<String, Error> {
        let (workers, prefill) = self.workers()?;
        self.cluster.check_changes(workers.len())?;
        let bar = super::reading();
        let workload = Workload::read(&self.traces, self.replay, || bar.inc(1))?;
        let requests = Requests::read(&self.traces, || bar.inc(1))?;
        let other = self.other(&requests, || bar.inc(1))?;
        bar.finish_and_clear();
        let geometry = workload.geometry;
        let mut cluster = self.cluster.cluster(&workers, geometry, &self.arrivals)?;
        cluster.prefill_workers = prefill.unwrap_or(cluster.prefill_workers);
        self.cluster.note_on_experts(workload.geometry.experts);
        let lengths = self.arrivals.lengths.as_deref();
        let lengths = lengths.map(Lengths::read).transpose()?;
        let question = Question {
            requests: &requests,
            workload: &workload,
            cluster: &cluster,
            plan: self.arrivals.plan(lengths.as_ref(), None, false),
            workers: &workers,
            policies: match self.policies.is_empty() {
                true => &USUAL,
                false => &self.policies,
            },
            other: other
                .as_ref()
                .map(|(requests, workload)| Traffic { requests, workload }),
        };
        let bars = Bars(super::working(0));
        let advice = advise(question, self.effort(), &bars);
        bars.0.finish_and_clear();
        let advice = advice?;
        let report = Report {
            command: command(std::env::args_os()),
            deploy: self.deploy(&advice, &workers, &cluster)?,
            advice: &advice,
        };
        Ok(match self.json {
            true => super::to_json(&report),
            false => text::text(&report, &cluster),
        })
    }

    /// Other traffic, which must be of the same model.
    fn other(
        &self,
        requests: &Requests,
        on_record: impl Fn(),
    ) -> Result<Option<(Requests, Workload)>, Error> {
        if self.other.is_empty() {
            return Ok(None);
        }
        let other = Requests::read(&self.other, &on_record)?;
        let (found, expected) = (other.geometry(), requests.geometry());
        if found != expected {
            return Err(Error::new(
                format!("--other: it has {found}, the trace has {expected}"),
                "give a trace of the same model",
            ));
        }
        let workload = Workload::read(&self.other, self.replay, on_record)?;
        Ok(Some((other, workload)))
    }

    fn effort(&self) -> Effort {
        let (splits, seeds, grid) = match self.quick {
            true => (3, 2, Grid::Quick),
            false => (5, 4, Grid::Full),
        };
        Effort {
            splits: self.splits.map_or(splits, usize::from),
            seeds: self.seeds.map_or(seeds, usize::from),
            seed: self.seed,
            grid,
            slo_tpot_ms: self.slo_tpot_ms,
        }
    }

    /// Names of the decode workers, and how many prefill workers the topology has.
    fn workers(&self) -> Result<(Vec<String>, Option<usize>), Error> {
        let Some(path) = &self.topology else {
            let workers = 0..self.cluster.decode_workers();
            return Ok((workers.map(|n| format!("decode-{n}")).collect(), None));
        };
        let topology = envoy::read(path)?;
        let used = topology.decode.iter().filter(|worker| !worker.drain);
        let names: Vec<String> = used.map(|worker| worker.name.clone()).collect();
        if names.is_empty() {
            return Err(Error::new(
                format!("{}: every decode worker drains", path.display()),
                "give a topology whose decode workers serve",
            ));
        }
        Ok((names, Some(topology.prefill.workers.len())))
    }

    fn deploy(
        &self,
        advice: &Advice,
        workers: &[String],
        cluster: &Cluster,
    ) -> Result<Deploy, Error> {
        let step = cluster.assumed.unwrap_or(cluster.step);
        let Some(tuned) = advice.tuned.first().filter(|_| advice.verdict.deploy) else {
            return Ok(Deploy {
                model: deploy::model(&spec(&advice.verdict.policy)?, step),
                fit: None,
                serve: None,
            });
        };
        let fit = tuned.fit.map(|fit| {
            let regions = match fit.regions {
                "workers" => workers.len().to_string(),
                auto => auto.to_owned(),
            };
            let traces = self.traces.iter().map(|trace| trace.as_os_str().to_owned());
            let options = [
                "-o",
                BLOB,
                "--workers",
                &workers.join(","),
                "--regions",
                &regions,
                "--layers",
                fit.layers,
            ];
            let arguments = ["eldr".into(), "fit".into()].into_iter().chain(traces);
            command(arguments.chain(options.map(Into::into)))
        });
        Ok(Deploy {
            model: deploy::model(&tuned.spec, step),
            fit,
            serve: deploy::serve(&tuned.spec, BLOB),
        })
    }
}

/// One bar, which begins anew with each kind of work.
struct Bars(ProgressBar);

impl Progress for Bars {
    fn begin(&self, what: &'static str, total: usize) {
        self.0.set_message(what);
        self.0.set_position(0);
        self.0.set_length(total as u64);
    }

    fn done(&self) {
        self.0.inc(1);
    }
}
