//! `mock-engine`: prefill and decode workers on loopback ports, without GPUs.

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use clap::{Parser, ValueEnum};
use comfy_table::Table;
use eldr_core::Geometry;
use eldr_core::engine::StepModel;
use eldr_examples::mock::{
    Catalog, KvLoadFailurePolicy, KvProtocol, MockConfig, MockEngine, SignatureCarriage,
    WorkerReport,
};
use eldr_examples::records;
use serde_json::json;

/// Prefill and decode workers that speak vLLM's protocol and keep a real model's time, without GPUs.
///
/// Requests whose prompt ends in the id of a trace record behave as recorded: prefill answers with
/// the record's expert signature, decode activates its experts. Other requests are served without a
/// signature and with random experts. Runs until interrupted, then reports what each worker did.
#[derive(Parser)]
#[command(version)]
struct Args {
    /// Trace to replay (JSON Lines, plain or gzip); may be given several times.
    #[arg(long = "trace", value_name = "FILE")]
    traces: Vec<PathBuf>,
    /// Prefill workers.
    #[arg(long, value_name = "N", default_value_t = 1)]
    prefill: usize,
    /// Decode workers.
    #[arg(long, value_name = "N", default_value_t = 4)]
    decode: usize,
    /// Port of the first worker, the others follow it, prefill first; 0 takes free ones.
    #[arg(long, value_name = "PORT", default_value_t = 0)]
    base_port: u16,
    /// Name of the served model.
    #[arg(long, value_name = "NAME", default_value = "mock")]
    model: String,
    /// Whose decode steps to keep the time of.
    #[arg(long, value_enum, default_value_t = Timing::Qwen)]
    timing: Timing,
    /// Most requests that a worker decodes at a time.
    #[arg(long, value_name = "N", default_value_t = 256)]
    batch_max: usize,
    /// Time of a prefill whatever its length, milliseconds.
    #[arg(long, value_name = "MS", default_value_t = MockConfig::default().prefill_base_ms)]
    prefill_base_ms: f64,
    /// Time per prompt token, milliseconds.
    #[arg(long, value_name = "MS", default_value_t = MockConfig::default().prefill_ms_per_token)]
    prefill_ms_per_token: f64,
    /// How long prefill holds KV blocks that nobody fetches, milliseconds; not multiplied by --time-scale.
    #[arg(long, value_name = "MS", default_value_t = 30_000,
        value_parser = clap::value_parser!(u64).range(..=86_400_000))]
    kv_lease_ms: u64,
    /// What a decode worker does when that time has run out.
    #[arg(long, value_enum, value_name = "POLICY", default_value_t = KvLoadFailurePolicy::Fail)]
    kv_load_failure_policy: KvLoadFailurePolicy,
    /// How prefill hands KV blocks over.
    #[arg(long, value_enum, value_name = "PROTOCOL", default_value_t = KvProtocol::Nixl)]
    protocol: KvProtocol,
    /// How prefill tells the signature.
    #[arg(long, value_enum, value_name = "WHERE", default_value_t = SignatureCarriage::Header)]
    signature_carriage: SignatureCarriage,
    /// Multiply all times by this.
    #[arg(long, value_name = "FACTOR", default_value_t = 1.0)]
    time_scale: f64,
    /// Answer as fast as the machine can: the same as --time-scale 0.
    #[arg(long, conflicts_with = "time_scale")]
    instant: bool,
    /// Print addresses and reports as JSON, one object per line.
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, ValueEnum)]
enum Timing {
    /// Qwen3-30B-A3B.
    Qwen,
    /// GPT-OSS-120B.
    GptOss,
    /// Gemma-4-26B-A4B.
    Gemma,
}

#[tokio::main]
async fn main() -> ExitCode {
    eldr_examples::exit(run(Args::parse()).await)
}

async fn run(args: Args) -> anyhow::Result<()> {
    let catalog = catalog(&args)?;
    let config = MockConfig {
        model: args.model,
        prefill_workers: args.prefill,
        decode_workers: args.decode,
        base_port: args.base_port,
        step: match args.timing {
            Timing::Qwen => StepModel::QWEN3_30B_A3B,
            Timing::GptOss => StepModel::GPT_OSS_120B,
            Timing::Gemma => StepModel::GEMMA_4_26B_A4B,
        },
        batch_max: args.batch_max,
        prefill_base_ms: args.prefill_base_ms,
        prefill_ms_per_token: args.prefill_ms_per_token,
        time_scale: if args.instant { 0.0 } else { args.time_scale },
        kv_lease: Duration::from_millis(args.kv_lease_ms),
        kv_load_failure_policy: args.kv_load_failure_policy,
        protocol: args.protocol,
        signature_carriage: args.signature_carriage,
        ..MockConfig::default()
    };
    let engine = MockEngine::start(config, Arc::new(catalog)).await?;
    if args.json {
        println!(
            "{}",
            json!({ "prefill": engine.prefill(), "decode": engine.decode() })
        );
    } else {
        for report in engine.reports() {
            println!("{}\thttp://{}", report.name, report.address);
        }
    }
    tokio::signal::ctrl_c()
        .await
        .context("cannot listen for Ctrl-C")?;
    let reports = engine.shutdown().await;
    if args.json {
        println!("{}", json!({ "reports": reports }));
    } else {
        println!("{}", table(&reports));
    }
    Ok(())
}

fn catalog(args: &Args) -> anyhow::Result<Catalog> {
    if args.traces.is_empty() {
        // Qwen3-30B-A3B, whose step times are the default.
        return Catalog::new(Geometry::new(48, 128)?, 8);
    }
    let mut records = Vec::new();
    for path in &args.traces {
        records.append(&mut records::read(path)?);
    }
    Catalog::from_records(&records)
}

fn table(reports: &[WorkerReport]) -> Table {
    let mut table = Table::new();
    table.set_header([
        "worker",
        "requests",
        "tokens",
        "steps",
        "experts",
        "batch",
        "late P50 ms",
        "late P99 ms",
        "disconnects",
        "mixed up",
        "KV held",
        "KV stranded",
        "late",
    ]);
    for report in reports {
        table.add_row([
            report.name.clone(),
            report.requests.to_string(),
            report.tokens.to_string(),
            report.steps.to_string(),
            format!("{:.1}", report.mean_experts),
            format!("{:.1}", report.mean_batch),
            format!("{:.2}", report.lateness_p50_ms),
            format!("{:.2}", report.lateness_p99_ms),
            report.disconnects.to_string(),
            report.mixed_up.to_string(),
            report.kv.held_blocks.to_string(),
            report.kv.stranded_blocks.to_string(),
            report.kv.late_decodes.to_string(),
        ]);
    }
    table
}
