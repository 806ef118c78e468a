//! `cargo soak`: constant load with random faults, and what must be true at its end.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, ensure};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use clap::Parser;
use eldr_core::signature::Geometry;
use eldr_examples::bench::Usage;
use eldr_examples::envoy::Envoy;
use eldr_examples::gateway::{Gateway, LISTENER, decode_cluster};
use eldr_examples::instant;
use eldr_examples::mock::{Catalog, MockConfig, MockEngine};
use eldr_examples::setup::{envoy_binary, wasm_module};
use eldr_examples::soak::{Fault, Proxy, Visit, visit};
use indicatif::{ProgressBar, ProgressStyle};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde_json::json;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};

const DECODE_WORKERS: usize = 4;
const PREFILL_WORKERS: usize = 2;
/// Envoy's worker threads.
const THREADS: usize = 2;
/// How long counts and blocks may take to come to rest after the last request.
const REST: Duration = Duration::from_secs(60);
const SAMPLE: Duration = Duration::from_secs(2);

/// Sends constant load through a real Envoy while connections to workers are refused and cut at random.
///
/// Clients stream, leave at any moment, send bodies that are refused and requests that are bypassed. At the end nothing may
/// be in flight, no KV blocks may have been stranded, memory must have stayed flat, and each request must have
/// ended in exactly one outcome. Exits with 1 if that is not so.
#[derive(Parser)]
#[command(name = "soak", bin_name = "cargo soak --")]
struct Args {
    /// How long the load lasts.
    #[arg(long, value_name = "N", default_value_t = 5.0)]
    minutes: f64,
    /// Clients at a time.
    #[arg(long, value_name = "N", default_value_t = 24)]
    clients: u64,
    /// Seed of requests and faults.
    #[arg(long, value_name = "S", default_value_t = 1)]
    seed: u64,
    /// Also write the figures to this file.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

fn main() -> ExitCode {
    eldr_examples::exit(run(&Args::parse()).map(|is_good| match is_good {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    }))
}

/// What happened.
#[derive(Default)]
struct Counts {
    visits: BTreeMap<String, u64>,
    faults: BTreeMap<String, u64>,
    /// Resident memory of Envoy, MiB, and memory of the largest VM, bytes.
    samples: Vec<(f64, u64)>,
}

#[tokio::main]
async fn run(args: &Args) -> anyhow::Result<bool> {
    ensure!(
        args.minutes > 0.0 && args.minutes <= 10_000.0,
        "--minutes {}: above 0, at most 10000",
        args.minutes
    );
    ensure!(
        (1..=1_000).contains(&args.clients),
        "--clients {}: 1 to 1000",
        args.clients
    );
    let (module, binary) = (wasm_module()?, envoy_binary()?);
    let geometry = Geometry::new(4, 16)?;
    let config = MockConfig {
        prefill_workers: PREFILL_WORKERS,
        decode_workers: DECODE_WORKERS,
        ..MockConfig::default()
    };
    let engine = MockEngine::start(config, Arc::new(Catalog::new(geometry, 2)?)).await?;
    let mut proxies = Vec::new();
    for worker in engine.prefill().into_iter().chain(engine.decode()) {
        proxies.push(Proxy::start(worker).await?);
    }
    let addresses: Vec<_> = proxies.iter().map(|proxy| proxy.address).collect();
    let blob = instant::blob(geometry, (0..4).collect(), DECODE_WORKERS)?;
    let names: Vec<_> = (0..DECODE_WORKERS).map(decode_cluster).collect();
    let gateway = Gateway {
        listen: ([127, 0, 0, 1], 0).into(),
        module,
        vm_id: "soak".into(),
        filter: json!({
            "models": [{"model": "*", "blob": {"inline": STANDARD.encode(blob.to_bytes()?)}}],
            "decode_clusters": names,
            "prefill_clusters": ["prefill"],
            "release": "eldr",
        }),
        prefill: addresses[..PREFILL_WORKERS].to_vec(),
        decode: addresses[PREFILL_WORKERS..].to_vec(),
        access_log: None,
    };
    let envoy = Envoy::start(&binary, &gateway.bootstrap(), THREADS).await?;
    let counts = load(args, &envoy, &proxies).await?;
    let broken = judge(&envoy, &engine, &counts, args).await?;
    for line in &broken {
        println!("BROKEN: {line}");
    }
    if broken.is_empty() {
        println!("nothing is left behind");
    }
    Ok(broken.is_empty())
}

async fn load(args: &Args, envoy: &Envoy, proxies: &[Proxy]) -> anyhow::Result<Counts> {
    let lasts = Duration::from_secs_f64(args.minutes * 60.0);
    let until = Instant::now() + lasts;
    let address = envoy.listener(LISTENER).await?;
    let stream = |number: u64| {
        let mut rng = ChaCha8Rng::seed_from_u64(args.seed);
        rng.set_stream(number);
        rng
    };
    let mut clients = JoinSet::new();
    for client in 1..=args.clients {
        let mut rng = stream(client);
        clients.spawn(async move {
            let mut visits = BTreeMap::new();
            while Instant::now() < until {
                let name = match visit(address, &mut rng).await {
                    Visit::Answered(status) => format!("answered {status}"),
                    other => format!("{other:?}").to_lowercase(),
                };
                *visits.entry(name).or_insert(0) += 1;
            }
            visits
        });
    }
    let bar = ProgressBar::new(lasts.as_secs());
    bar.set_style(ProgressStyle::with_template(
        "{bar:30} {elapsed} of {len} s",
    )?);
    let mut counts = Counts::default();
    let mut rng = stream(0);
    let mut next_sample = Instant::now() + SAMPLE;
    while Instant::now() < until {
        let worker = rng.random_range(0..proxies.len());
        // An answer that is cut on its way from prefill names blocks that nobody can know of.
        let fault = match (worker < PREFILL_WORKERS, rng.random_range(0..2)) {
            (false, 0) => Fault::Cuts,
            _ => Fault::Refuses,
        };
        let kind = if worker < PREFILL_WORKERS {
            "prefill"
        } else {
            "decode"
        };
        let name = format!("{kind} {fault:?}").to_lowercase();
        *counts.faults.entry(name).or_insert(0) += 1;
        proxies[worker].set(fault);
        sleep(Duration::from_millis(rng.random_range(50..1_500))).await;
        proxies[worker].set(Fault::None);
        sleep(Duration::from_millis(rng.random_range(200..2_000))).await;
        if Instant::now() >= next_sample {
            next_sample += SAMPLE;
            let pid = envoy.pid().context("Envoy has ended")?;
            let stats = envoy.stats(r"eldr\.vm\..*memory_bytes$").await?;
            let vm = stats.values.into_values().max().unwrap_or_default();
            counts.samples.push((Usage::of(pid)?.resident_mib, vm));
        }
        bar.set_position(lasts.as_secs() - (until - Instant::now()).as_secs());
    }
    while let Some(visits) = clients.join_next().await {
        for (name, count) in visits? {
            *counts.visits.entry(name).or_insert(0) += count;
        }
    }
    bar.finish_and_clear();
    Ok(counts)
}

/// Prints what was found and gives what ought not to be.
async fn judge(
    envoy: &Envoy,
    engine: &MockEngine,
    counts: &Counts,
    args: &Args,
) -> anyhow::Result<Vec<String>> {
    let mut broken = Vec::new();
    let mut must = |holds: bool, what: String| {
        if !holds {
            broken.push(what);
        }
    };
    let in_flight = async || -> anyhow::Result<u64> {
        let stats = envoy.stats(r"eldr\.worker\..*in_flight$").await?;
        Ok(stats.values.into_values().sum())
    };
    let end = Instant::now() + REST;
    let (mut flying, mut held) = (in_flight().await?, engine.kv_held());
    while (flying > 0 || held > 0) && Instant::now() < end {
        sleep(Duration::from_millis(100)).await;
        (flying, held) = (in_flight().await?, engine.kv_held());
    }
    must(flying == 0, format!("{flying} requests in flight"));
    must(held == 0, format!("blocks of {held} requests held"));
    let stranded = engine.kv_stranded();
    must(
        stranded == 0,
        format!("blocks of {stranded} requests stranded"),
    );
    let reports = engine.reports();
    let mixed: u64 = reports.iter().map(|worker| worker.mixed_up).sum();
    must(mixed == 0, format!("{mixed} requests got another's blocks"));

    let values = envoy
        .stats("eldr|downstream_rq_total|vm_reload")
        .await?
        .values;
    let outcomes: BTreeMap<_, _> = values
        .iter()
        .filter_map(|(name, count)| Some((name.split_once("eldr.outcome.")?.1, *count)))
        .collect();
    let requests = envoy.stat("http.gateway.downstream_rq_total").await?;
    let sum: u64 = outcomes.values().sum();
    must(
        sum == requests,
        format!("{sum} outcomes of {requests} requests"),
    );
    let internal = outcomes.get("internal").copied().unwrap_or_default();
    must(internal == 0, format!("{internal} outcomes are `internal`"));
    let traps: u64 = values
        .iter()
        .filter(|(name, _)| name.ends_with("vm_reload"))
        .map(|(_, count)| count)
        .sum();
    must(traps == 0, format!("{traps} VMs trapped"));
    for (visit, count) in &counts.visits {
        let expected = ["left", "broken"].contains(&visit.as_str())
            || [200, 400, 502, 503, 504]
                .iter()
                .any(|status| *visit == format!("answered {status}"));
        must(expected, format!("{count} visits: {visit}"));
    }
    let memory = flat(&counts.samples);
    if let Some((early, late)) = memory {
        must(
            late.1 <= early.1,
            format!("VM memory grew from {} to {} bytes", early.1, late.1),
        );
        must(
            late.0 <= 1.1 * early.0,
            format!(
                "Envoy's memory grew from {:.0} to {:.0} MiB",
                early.0, late.0
            ),
        );
    }
    let print = |title: &str, counts: &mut dyn Iterator<Item = (String, u64)>| {
        let all: Vec<_> = counts
            .map(|(name, count)| format!("{name} {count}"))
            .collect();
        println!("{title}: {}", all.join(", "));
    };
    print("visits", &mut counts.visits.clone().into_iter());
    print("faults", &mut counts.faults.clone().into_iter());
    let named = |(name, count): (&&str, &u64)| ((*name).to_owned(), *count);
    print("outcomes", &mut outcomes.iter().map(named));
    let of = |name: &str| {
        values
            .get(&format!("wasmcustom.eldr.{name}"))
            .copied()
            .unwrap_or_default()
    };
    println!(
        "releases: {} sent, {} failed; late prefill answers: {}",
        of("release_sent"),
        of("release_failed"),
        of("late_prefill")
    );
    if let Some((early, late)) = memory {
        println!(
            "memory, after a quarter and at the end: Envoy {:.0} and {:.0} MiB, largest VM {:.1} and {:.1} MiB",
            early.0,
            late.0,
            early.1 as f64 / f64::from(1 << 20),
            late.1 as f64 / f64::from(1 << 20)
        );
    }
    if let Some(path) = &args.json {
        let all = json!({
            "minutes": args.minutes, "seed": args.seed, "requests": requests,
            "visits": counts.visits, "faults": counts.faults, "outcomes": outcomes, "broken": broken,
        });
        fs::write(path, serde_json::to_string_pretty(&all)? + "\n")
            .with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(broken)
}

type Memory = (f64, u64);

/// Memory in the second quarter and in the last: medians, so that a moment does not count.
fn flat(samples: &[Memory]) -> Option<(Memory, Memory)> {
    let quarter = samples.len() / 4;
    let median = |samples: &[Memory]| {
        let mut resident: Vec<f64> = samples.iter().map(|(resident, _)| *resident).collect();
        resident.sort_by(f64::total_cmp);
        let vm = samples.iter().map(|(_, vm)| *vm).max()?;
        Some((*resident.get(resident.len() / 2)?, vm))
    };
    let (early, late) = (
        samples.get(quarter..2 * quarter)?,
        samples.get(3 * quarter..)?,
    );
    Some((median(early)?, median(late)?))
}
