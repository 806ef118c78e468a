//! `cargo demo`: does routing by expert signature beat load balancing? Through a real Envoy.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use clap::Parser;
use eldr_core::Policy;
use eldr_examples::demo::{POLICIES, Report, Settings, Stack, Tools, WORKLOADS, Workload, measure};
use eldr_examples::setup::workspace_root;
use indicatif::{ProgressBar, ProgressStyle};

/// Prefill workers: enough that nobody waits for prefill.
const PREFILL_WORKERS: usize = 2;
/// Requests per second and decode worker that make batches of about ten.
const RATE_PER_WORKER: f64 = 8.5;

/// Sends streaming requests through a real Envoy with the compiled filter, under six policies, and
/// compares them.
///
/// Prefill and decode workers are mocks that replay the expert choices of a small real MoE and take as
/// long per step as Qwen3-30B-A3B is assumed to. Whatever is missing is set up first. Takes about five
/// minutes after that. Exits with 1 if any request failed.
#[derive(Parser)]
#[command(name = "demo", bin_name = "cargo demo --")]
struct Args {
    /// Measure for a shorter time: about two minutes in all.
    #[arg(long)]
    quick: bool,
    /// Also write the figures to this file.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Leave gateway and workers running afterwards, for curl.
    #[arg(long)]
    keep: bool,
    /// Decode workers.
    #[arg(long, value_name = "N", default_value_t = 5)]
    workers: usize,
    /// Requests per second [default: 8.5 per decode worker].
    #[arg(long, value_name = "R")]
    rate: Option<f64>,
    /// Seed of arrivals, order of requests and fit.
    #[arg(long, value_name = "S", default_value_t = 1)]
    seed: u64,
}

fn main() -> ExitCode {
    eldr_examples::exit(run(&Args::parse()))
}

fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let settings = Settings {
        workers: args.workers,
        prefill_workers: PREFILL_WORKERS,
        rate_per_s: args.rate.unwrap_or(RATE_PER_WORKER * args.workers as f64),
        warm_up: Duration::from_millis(1_500),
        measured: Duration::from_secs(if args.quick { 5 } else { 18 }),
        seed: args.seed,
    };
    settings.check()?;
    let tools = Tools::set_up()?;
    let data = workspace_root().join("examples/data/small-moe");
    let workloads = WORKLOADS
        .map(|name| {
            let workload = Workload::load(name, &data, settings.workers, settings.seed)?;
            let fit = &workload.fitted.blob.fit;
            eprintln!(
                "calibrated {} regions on {} requests of the {name} workload; rank correlation of prefill with decode: {}",
                settings.workers,
                fit.requests,
                fit.rho.map_or("unknown".into(), |rho| format!("{rho:.2}")),
            );
            anyhow::Ok(workload)
        })
        .into_iter()
        .collect::<anyhow::Result<Vec<_>>>()?;
    let runtime = tokio::runtime::Runtime::new().context("cannot start the async runtime")?;
    runtime.block_on(compare(args, &settings, &tools, &workloads))
}

async fn compare(
    args: &Args,
    settings: &Settings,
    tools: &Tools,
    workloads: &[Workload],
) -> anyhow::Result<ExitCode> {
    let total: usize = workloads
        .iter()
        .map(|workload| settings.arrivals(workload).len())
        .sum::<usize>();
    let bar = ProgressBar::new((total * POLICIES.len()) as u64).with_style(
        ProgressStyle::with_template("{msg:24} [{wide_bar}] {pos}/{len} answers, {eta} left")?
            .progress_chars("=> "),
    );
    let mut report = Report::new(settings);
    for workload in workloads {
        for policy in POLICIES {
            bar.set_message(format!("{}, {}", workload.name, policy.name()));
            let before = bar.position();
            let stack = Stack::start(tools, settings, workload, policy, false).await?;
            let progress = |completed| bar.set_position(before + completed as u64);
            report.push(measure(settings, workload, &stack, progress).await?);
        }
    }
    bar.finish_and_clear();
    show(args, settings, workloads, &report)?;
    if args.keep
        && let Some(workload) = workloads.first()
    {
        keep(tools, settings, workload).await?;
    }
    Ok(if report.failures() == 0 {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

fn show(
    args: &Args,
    settings: &Settings,
    workloads: &[Workload],
    report: &Report,
) -> anyhow::Result<()> {
    for workload in workloads {
        println!(
            "\n{} workload: {} requests/s over {} decode workers, {} s; change against {} in brackets",
            workload.name,
            settings.rate_per_s,
            settings.workers,
            settings.measured.as_secs(),
            POLICIES[0].name(),
        );
        println!("{}", report.table(workload));
    }
    print!("\n{}", report.warnings());
    if let Some(path) = &args.json {
        let mut json = serde_json::to_string_pretty(report)?;
        json.push('\n');
        std::fs::write(path, json).with_context(|| format!("cannot write {}", path.display()))?;
        println!("The same figures are in {}.", path.display());
    }
    println!(
        "The experts are those of a real model; how long a step takes with them is modelled after Qwen3-30B-A3B \
         (core/src/engine/model.rs).\n\
         Next: README.md, section \"Put it into your own Envoy\"; ARCHITECTURE.md, \"Life of a request\".{}",
        if args.keep {
            ""
        } else {
            "\nTry it yourself: `cargo demo -- --quick --keep` leaves it running for curl."
        },
    );
    Ok(())
}

async fn keep(tools: &Tools, settings: &Settings, workload: &Workload) -> anyhow::Result<()> {
    let stack = Stack::start(tools, settings, workload, Policy::Band, true).await?;
    let id = workload.requests.first().map_or("x", |request| &request.id);
    println!(
        "\nRunning until Ctrl-C, policy band. A prompt's last word names the request to replay; the header \
         x-eldr-decision says where it went and why:\n\n    \
         curl -iN {}/v1/completions -d '{{\"prompt\":\"replay {id}\",\"max_tokens\":20,\"stream\":true}}'\n    \
         curl -s {}/stats?filter=eldr",
        stack.url(),
        stack.admin_url(),
    );
    for report in stack.engine().reports() {
        println!("    {}: http://{}", report.name, report.address);
    }
    tokio::signal::ctrl_c()
        .await
        .context("cannot listen for Ctrl-C")
}
