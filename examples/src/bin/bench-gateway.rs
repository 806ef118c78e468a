//! `cargo bench-gateway`: what routing by signature costs, beside other gateways, in one run.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, ensure};
use clap::Parser;
use comfy_table::{CellAlignment, Table, presets};
use eldr_examples::bench::{Contender, Kind, Product, Site, run};
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;

/// Connections of the measurement of throughput and CPU.
const BUSY: u64 = 16;

/// Compares gateways for prefill/decode serving before workers that answer at once.
///
/// Envoy without a filter and with one that does nothing (one leg only), Envoy with eldr in both modes, and vllm-router,
/// smg and sglang-router from their Python wheels, each with one worker thread. Rounds alternate between them, so that a noisy machine is noisy for
/// all; figures are medians over the rounds. What is missing is built or fetched first.
#[derive(Parser)]
#[command(name = "bench-gateway", bin_name = "cargo bench-gateway --")]
struct Args {
    /// Rounds over all gateways.
    #[arg(long, value_name = "N", default_value_t = 5)]
    rounds: usize,
    /// Seconds of each of a round's two measurements.
    #[arg(long, value_name = "S", default_value_t = 2.0)]
    seconds: f64,
    /// Also write the figures to this file.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// Of one gateway in one round, or the medians over all.
#[derive(Debug, Clone, Copy, Serialize)]
struct Figures {
    p50_us_1: f64,
    p99_us_1: f64,
    per_s_16: f64,
    p50_us_16: f64,
    p99_us_16: f64,
    cpu_ms_per_1000: f64,
    memory_mib: f64,
}

fn main() -> ExitCode {
    eldr_examples::exit(measure(&Args::parse()))
}

#[tokio::main]
async fn measure(args: &Args) -> anyhow::Result<()> {
    ensure!(args.rounds > 0, "--rounds 0: at least 1");
    ensure!(
        args.seconds >= 0.1 && args.seconds <= 600.0,
        "--seconds {}: 0.1 to 600",
        args.seconds
    );
    let lasts = Duration::from_secs_f64(args.seconds);
    let site = Site::set_up()?;
    let mut contenders = Vec::new();
    for kind in Kind::ALL {
        let contender = Contender::start(kind, &site).await;
        contenders.push(contender.with_context(|| kind.name())?);
    }
    let bar = ProgressBar::new((args.rounds * contenders.len()) as u64);
    bar.set_style(ProgressStyle::with_template(
        "{bar:30} {pos}/{len} {eta} {msg}",
    )?);
    let mut rounds: Vec<Vec<Figures>> = vec![Vec::new(); contenders.len()];
    for _ in 0..args.rounds {
        for (contender, rounds) in contenders.iter().zip(&mut rounds) {
            let name = contender.kind.name();
            bar.set_message(name.clone());
            rounds.push(figures(contender, lasts).await.context(name)?);
            bar.inc(1);
        }
    }
    bar.finish_and_clear();
    let rows: Vec<(Kind, Figures)> = contenders
        .iter()
        .zip(&rounds)
        .map(|(contender, rounds)| (contender.kind, medians(rounds)))
        .collect();
    println!("{}", table(&rows));
    if let Some(path) = &args.json {
        let all: BTreeMap<_, _> = rows.iter().map(|(kind, row)| (kind.name(), row)).collect();
        fs::write(path, serde_json::to_string_pretty(&all)? + "\n")
            .with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}

async fn figures(contender: &Contender, lasts: Duration) -> anyhow::Result<Figures> {
    let client = contender.kind.client();
    let one = run(contender.address, client, 1, lasts).await?;
    let before = contender.usage()?;
    let many = run(contender.address, client, BUSY, lasts).await?;
    let after = contender.usage()?;
    let us = |duration: Duration| duration.as_secs_f64() * 1e6;
    let cpu = (after.cpu - before.cpu).as_secs_f64();
    Ok(Figures {
        p50_us_1: us(one.percentile(0.5)),
        p99_us_1: us(one.percentile(0.99)),
        per_s_16: many.rate(),
        p50_us_16: us(many.percentile(0.5)),
        p99_us_16: us(many.percentile(0.99)),
        cpu_ms_per_1000: cpu * 1e6 / many.latencies.len() as f64,
        memory_mib: after.resident_mib,
    })
}

fn medians(rounds: &[Figures]) -> Figures {
    let median = |of: fn(&Figures) -> f64| {
        let mut values: Vec<f64> = rounds.iter().map(of).collect();
        values.sort_by(f64::total_cmp);
        let middle = values.len() / 2;
        match values.len() % 2 {
            0 => f64::midpoint(values[middle - 1], values[middle]),
            _ => values[middle],
        }
    };
    Figures {
        p50_us_1: median(|f| f.p50_us_1),
        p99_us_1: median(|f| f.p99_us_1),
        per_s_16: median(|f| f.per_s_16),
        p50_us_16: median(|f| f.p50_us_16),
        p99_us_16: median(|f| f.p99_us_16),
        cpu_ms_per_1000: median(|f| f.cpu_ms_per_1000),
        memory_mib: median(|f| f.memory_mib),
    }
}

fn table(rows: &[(Kind, Figures)]) -> Table {
    let mut table = Table::new();
    table.load_style(presets::UTF8_BORDERS_ONLY);
    table.set_header([
        "1 connection, 16 connections",
        "P50, 1",
        "P99, 1",
        "requests/s, 16",
        "P50, 16",
        "P99, 16",
        "CPU ms per 1000",
        "MiB",
        "P50, 1 ÷ vllm-router",
        "CPU ÷ vllm-router",
    ]);
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    let router = rows
        .iter()
        .find(|(kind, _)| *kind == Kind::Router(Product::VllmRouter));
    for (kind, row) in rows {
        let ratio = |of: fn(&Figures) -> f64| {
            router.map_or(String::new(), |(_, router)| {
                format!("{:.2}", of(row) / of(router))
            })
        };
        table.add_row([
            kind.name(),
            format!("{:.0} µs", row.p50_us_1),
            format!("{:.0} µs", row.p99_us_1),
            format!("{:.0}", row.per_s_16),
            format!("{:.0} µs", row.p50_us_16),
            format!("{:.0} µs", row.p99_us_16),
            format!("{:.0}", row.cpu_ms_per_1000),
            format!("{:.0}", row.memory_mib),
            ratio(|f| f.p50_us_1),
            ratio(|f| f.cpu_ms_per_1000),
        ]);
    }
    table
}
