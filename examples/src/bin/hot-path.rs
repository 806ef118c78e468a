//! `cargo hot-path`: where a request's time goes inside Envoy's VM.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, ensure};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use clap::Parser;
use comfy_table::{CellAlignment, Table, presets};
use eldr_core::signature::{Encoding, Geometry};
use eldr_core::{Policy, Reason};
use eldr_examples::envoy::Envoy;
use eldr_examples::gateway::{Gateway, LISTENER, decode_cluster};
use eldr_examples::instant::{self, Instant};
use eldr_examples::setup::{envoy_binary, timed_wasm_module};
use http_body_util::{BodyExt, Full};
use hyper::Request;
use hyper_util::rt::TokioIo;
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::json;
use tokio::net::TcpStream;

/// The model's MoE layers and experts: Qwen3-30B-A3B.
const GEOMETRY: (usize, usize) = (48, 128);
/// Every stage in the order it is passed, and whether it is part of the decision.
const STAGES: [(&str, bool); 24] = [
    ("request_headers", false),
    ("request_body", false),
    ("prefill_body", false),
    ("wake_root", false),
    ("choose_prefill", false),
    ("dispatch_prefill", false),
    ("answer_headers", true),
    ("answer_body", false),
    ("read_answer", false),
    ("refresh", false),
    ("clock", false),
    ("hold", true),
    ("workers", true),
    ("decode", true),
    ("compare", true),
    ("decide", true),
    ("in_flight", false),
    ("join", false),
    ("metrics", false),
    ("note", false),
    ("set_body", false),
    ("set_header", true),
    ("response_headers", false),
    ("end", false),
];
/// Envoy's own work on the request, called from the filter.
const RESUME: &str = "resume";

/// Measures where a request's time goes inside Envoy's VM, stage by stage.
///
/// A build of the filter that times its stages runs in a real Envoy with one worker thread, between one client and
/// workers that answer at once. Figures are microseconds, as the trimean over all requests (a quarter of P25 + 2 P50 +
/// P75), since Envoy's clock ticks once per microsecond; reading it costs about 0.1 per stage. Ratios within a run mean
/// more than figures across runs.
#[derive(Parser)]
#[command(name = "hot-path", bin_name = "cargo hot-path --")]
struct Args {
    /// Requests per column.
    #[arg(long, value_name = "N", default_value_t = 4_000)]
    requests: u64,
    /// Also write the figures, in nanoseconds, to this file.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// One column of the table.
struct Case {
    name: &'static str,
    policy: Policy,
    /// Every how many layers are in the blob.
    selects: usize,
    /// Every how many are in the signature.
    sends: usize,
    encoding: Encoding,
    regions: usize,
}

const CASES: [Case; 9] = [
    case("48 layers, K=16", Policy::Band, 1, 1, Encoding::U16, 16),
    case("varint", Policy::Band, 1, 1, Encoding::Varint, 16),
    case("12 of 48", Policy::Band, 4, 1, Encoding::U16, 16),
    case("12 sent", Policy::Band, 4, 4, Encoding::U16, 16),
    case("48 layers, K=128", Policy::Band, 1, 1, Encoding::U16, 128),
    case("12 sent, K=128", Policy::Band, 4, 4, Encoding::U16, 128),
    case("marginal, 48", Policy::Marginal, 1, 1, Encoding::U16, 16),
    case("hybrid, 48", Policy::Hybrid, 1, 1, Encoding::U16, 16),
    case("hybrid, 12 of 48", Policy::Hybrid, 4, 1, Encoding::U16, 16),
];

const fn case(
    name: &'static str,
    policy: Policy,
    selects: usize,
    sends: usize,
    encoding: Encoding,
    regions: usize,
) -> Case {
    Case {
        name,
        policy,
        selects,
        sends,
        encoding,
        regions,
    }
}

fn main() -> ExitCode {
    eldr_examples::exit(run(&Args::parse()))
}

fn run(args: &Args) -> anyhow::Result<()> {
    ensure!(
        args.requests >= 100,
        "--requests {}: at least 100, or the figures say nothing",
        args.requests
    );
    let (module, binary) = (timed_wasm_module()?, envoy_binary()?);
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let bar = ProgressBar::new(args.requests * CASES.len() as u64);
    bar.set_style(ProgressStyle::with_template(
        "{bar:30} {pos}/{len} {msg} {eta}",
    )?);
    let mut columns = Vec::new();
    for case in &CASES {
        bar.set_message(case.name);
        let measured = measure(case, args.requests, &binary, &module, &bar);
        let stages = runtime.block_on(measured).context(case.name)?;
        columns.push((case.name, stages));
    }
    bar.finish_and_clear();
    println!("{}", table(&columns));
    if let Some(path) = &args.json {
        let all: BTreeMap<_, _> = columns.into_iter().collect();
        fs::write(path, serde_json::to_string_pretty(&all)? + "\n")
            .with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}

type Stages = BTreeMap<String, f64>;

async fn measure(
    case: &Case,
    requests: u64,
    binary: &Path,
    module: &Path,
    bar: &ProgressBar,
) -> anyhow::Result<Stages> {
    let geometry = Geometry::new(GEOMETRY.0, GEOMETRY.1)?;
    let every = |step| (0..geometry.layers as u16).step_by(step).collect();
    let blob = instant::blob(geometry, every(case.selects), case.regions)?;
    let signature = instant::signature(geometry, every(case.sends), case.encoding)?;
    let engine = Instant::start(Some(&signature)).await?;
    let names: Vec<_> = (0..case.regions).map(decode_cluster).collect();
    let inline = STANDARD.encode(blob.to_bytes()?);
    let models = json!([{"model": "*", "policy": case.policy, "blob": {"inline": inline}}]);
    let gateway = Gateway {
        listen: ([127, 0, 0, 1], 0).into(),
        module: module.to_owned(),
        vm_id: "hot-path".into(),
        filter: json!({
            "models": models,
            "decode_clusters": names,
            "prefill_clusters": ["prefill"],
        }),
        prefill: vec![engine.address],
        decode: vec![engine.address; case.regions],
        access_log: None,
    };
    let envoy = Envoy::start(binary, &gateway.bootstrap(), 1).await?;
    let stream = TcpStream::connect(envoy.listener(LISTENER).await?).await?;
    stream.set_nodelay(true)?;
    let (mut sender, connection) =
        hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
    let connection = tokio::spawn(connection);
    let body = json!({"model": "m", "max_tokens": 64, "prompt": "word ".repeat(512)});
    let body = Bytes::from(body.to_string());
    for _ in 0..requests {
        let request = Request::post("/v1/completions")
            .header("host", "gateway")
            .header("content-type", "application/json")
            .body(Full::new(body.clone()))?;
        let response = sender.send_request(request).await?;
        let status = response.status();
        response.into_body().collect().await?;
        ensure!(status.is_success(), "Envoy answered {status}");
        bar.inc(1);
    }
    connection.abort();
    stages(&envoy, case.policy, requests).await
}

/// Trimean of each stage, nanoseconds.
async fn stages(envoy: &Envoy, policy: Policy, requests: u64) -> anyhow::Result<Stages> {
    // A query shows what the one before it merged.
    for _ in 0..2 {
        envoy.stats("eldr").await?;
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    let stats = envoy.stats("eldr.stage_ns").await?;
    let mut stages = Stages::new();
    for (name, percentiles) in stats.histograms {
        let stage = name.rsplit('.').next().unwrap_or_default();
        let median = percentiles
            .iter()
            .find(|(percentile, _)| *percentile == 50.0);
        if let Some((_, value)) = median {
            stages.insert(stage.to_owned(), *value);
        }
    }
    let reason = match policy.measure() {
        Some(_) => Reason::Marginal.name(),
        None => Reason::InBand.name(),
    };
    let counter = format!("wasmcustom.eldr.reason.{reason}");
    let routed = envoy.stat(&counter).await?;
    ensure!(
        routed == requests,
        "{routed} of {requests} requests were routed by their signature"
    );
    Ok(stages)
}

fn table(columns: &[(&str, Stages)]) -> Table {
    let mut table = Table::new();
    table.load_style(presets::UTF8_BORDERS_ONLY);
    let header = ["µs"]
        .into_iter()
        .chain(columns.iter().map(|(name, _)| *name));
    table.set_header(header);
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    let mut row = |name: String, value: &dyn Fn(&Stages) -> f64| {
        let cells = columns
            .iter()
            .map(|(_, stages)| format!("{:.1}", value(stages) / 1_000.0));
        table.add_row([name].into_iter().chain(cells));
    };
    let of = |stages: &Stages, stage: &str| stages.get(stage).copied().unwrap_or_default();
    let sum = |stages: &Stages, counts: &dyn Fn(bool) -> bool| {
        let counted = STAGES.iter().filter(|(_, decides)| counts(*decides));
        counted.map(|(stage, _)| of(stages, stage)).sum()
    };
    for (stage, decides) in STAGES {
        let mark = if decides { " *" } else { "" };
        row(format!("{stage}{mark}"), &|stages| of(stages, stage));
    }
    row("the decision (*)".into(), &|stages| {
        sum(stages, &|decides| decides)
    });
    row("all of the filter".into(), &|stages| sum(stages, &|_| true));
    row("Envoy sends the decode leg".into(), &|stages| {
        of(stages, RESUME)
    });
    table
}
