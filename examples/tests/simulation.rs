//! The demo's promise without sockets and clock: on its arrivals, band routing batches requests that share
//! experts, and steps get faster. A loop of its own, against which the simulator is checked.

use std::sync::Arc;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use eldr_calibrator::simulate;
use eldr_core::blob::Blob;
use eldr_core::decide::{Draw, Rule, Worker};
use eldr_core::engine::{DecodeBatch, StepModel};
use eldr_core::route::{Map, Scratch, route};
use eldr_core::{Policy, Reason};
use eldr_examples::demo::{Settings, WORKLOADS, Workload};
use eldr_examples::gateway::decode_cluster;
use eldr_examples::load::percentile;
use eldr_examples::setup::workspace_root;

const WORKERS: usize = 5;

/// A decode worker in simulated time.
struct Decoder {
    batch: DecodeBatch<usize>,
    in_flight: u32,
    /// When the step that it is in ends.
    until: Option<Duration>,
}

struct Outcome {
    mean_experts: f64,
    tpot_p50_ms: f64,
}

/// Runs the demo's arrivals under `policy`; prefill takes no time.
fn replay(settings: &Settings, workload: &Workload, policy: Policy) -> Outcome {
    let clusters: Vec<String> = (0..settings.workers).map(decode_cluster).collect();
    let blob = Blob::from_bytes(&STANDARD.decode(&workload.blob).unwrap()).unwrap();
    let map = Map::bind(blob, &clusters).unwrap();
    let rule = Rule {
        policy,
        ..Rule::default()
    };
    let decoder = || Decoder {
        batch: DecodeBatch::new(StepModel::QWEN3_30B_A3B, workload.catalog.geometry(), 256),
        in_flight: 0,
        until: None,
    };
    let mut decoders: Vec<Decoder> = clusters.iter().map(|_| decoder()).collect();
    let arrivals = settings.arrivals(workload);
    let mut first_tokens = vec![Duration::ZERO; arrivals.len()];
    let (mut tpot, mut experts, mut steps) = (Vec::new(), 0.0, 0.0);
    let mut coming = arrivals.iter().enumerate().peekable();
    let mut scratch = Scratch::default();
    loop {
        let step = (0..decoders.len())
            .filter_map(|index| Some((decoders[index].until?, index)))
            .min();
        match (coming.peek(), step) {
            (None, None) => break,
            (Some((_, arrival)), step) if step.is_none_or(|(end, _)| arrival.at < end) => {
                let (number, arrival) = coming.next().unwrap();
                let request = &workload.requests[arrival.request];
                let entry = workload.catalog.entry(&request.id);
                let header = entry.signature.as_ref().unwrap();
                let workers: Vec<Worker> = decoders
                    .iter()
                    .map(|decoder| Worker {
                        load: decoder.in_flight.into(),
                        available: true,
                    })
                    .collect();
                let draw = Draw {
                    sequence: number as u64,
                    entropy: 0,
                };
                let header = Some(header.as_bytes());
                let decision = route(&rule, Some(&map), header, &workers, draw, &mut scratch);
                let reason = if policy.looks() {
                    Reason::InBand
                } else {
                    Reason::Blind
                };
                assert_eq!(decision.reason, reason);
                let decoder = &mut decoders[decision.target.0];
                decoder.in_flight += 1;
                decoder
                    .batch
                    .join(number, Arc::clone(&entry.ids), 0, request.decode_tokens);
                if decoder.until.is_none() {
                    decoder.until = Some(arrival.at + decoder.batch.step().duration);
                }
            }
            (_, Some((now, index))) => {
                let decoder = &mut decoders[index];
                let report = decoder.batch.last_step();
                experts += report.mean_experts;
                steps += 1.0;
                for decoded in &report.decoded {
                    if decoded.token == 0 {
                        first_tokens[decoded.key] = now;
                    }
                    if decoded.last {
                        decoder.in_flight -= 1;
                        let tokens = now - first_tokens[decoded.key];
                        tpot.push(tokens.as_secs_f64() * 1e3 / f64::from(decoded.token));
                    }
                }
                decoder.until = match decoder.batch.is_idle() {
                    true => None,
                    false => Some(now + decoder.batch.step().duration),
                };
            }
            (Some(_), None) => unreachable!("without a step every arrival is next"),
        }
    }
    assert_eq!(
        tpot.len(),
        arrivals.len(),
        "every request was decoded to its end"
    );
    Outcome {
        mean_experts: experts / steps,
        tpot_p50_ms: percentile(&mut tpot, 0.5).unwrap(),
    }
}

/// The same by `eldr simulate`: mean experts per step and median TPOT.
fn simulator(
    settings: &Settings,
    workload: &Workload,
    records: &simulate::Workload,
    policy: Policy,
) -> (f64, f64) {
    let clusters: Vec<String> = (0..settings.workers).map(decode_cluster).collect();
    let blob = Blob::from_bytes(&STANDARD.decode(&workload.blob).unwrap()).unwrap();
    let known = simulate::Known::new(Map::bind(blob, &clusters).unwrap(), records);
    let cluster = simulate::Cluster {
        prefill_workers: 0,
        transfer_ms: 0.0,
        decode_workers: settings.workers,
        duration: Duration::MAX,
        ..simulate::Cluster::default()
    };
    let arrivals: Vec<simulate::Arrival> = settings
        .arrivals(workload)
        .iter()
        .map(|arrival| simulate::Arrival {
            at: arrival.at,
            request: arrival.request,
            signature: arrival.request,
            prompt_tokens: 1,
            decode_tokens: workload.requests[arrival.request].decode_tokens,
            gateway: 0,
            entropy: 0,
        })
        .collect();
    let spec = policy.name().parse().unwrap();
    let rule = Rule::default();
    let router = simulate::policy::router(&spec, &rule, Some(&known), records, &cluster);
    let outcome = simulate::run(&cluster, records, &arrivals, router.unwrap().as_mut());
    (outcome.experts_per_step, outcome.tpot_ms.p50)
}

#[test]
fn band_touches_fewer_experts_and_is_faster_on_both_workloads_whatever_the_seed() {
    let data = workspace_root().join("examples/data/small-moe");
    for name in WORKLOADS {
        let workload = Workload::load(name, &data, WORKERS, 1).unwrap();
        let evaluation = data.join(format!("{name}_evaluation.jsonl.gz"));
        let records = simulate::Workload::read(&[evaluation], simulate::Replay::Exact, || ());
        let records = records.unwrap();
        for seed in 1..=3 {
            let settings = Settings {
                workers: WORKERS,
                prefill_workers: 0,
                rate_per_s: 42.5,
                warm_up: Duration::ZERO,
                measured: Duration::from_secs(7),
                seed,
            };
            let round_robin = replay(&settings, &workload, Policy::RoundRobin);
            let band = replay(&settings, &workload, Policy::Band);
            for (policy, found) in [(Policy::RoundRobin, &round_robin), (Policy::Band, &band)] {
                let told = simulator(&settings, &workload, &records, policy);
                let expected = (found.mean_experts, found.tpot_p50_ms);
                let close = |a: f64, b: f64| (a - b).abs() < 1e-9 * b;
                assert!(
                    close(told.0, expected.0) && close(told.1, expected.1),
                    "{name}, seed {seed}, {}: the simulator says {told:?}, this loop {expected:?}",
                    policy.name()
                );
            }
            let experts = band.mean_experts / round_robin.mean_experts;
            let tpot = band.tpot_p50_ms / round_robin.tpot_p50_ms;
            println!("{name}, seed {seed}: experts × {experts:.3}, TPOT P50 × {tpot:.3}");
            assert!(
                experts < 0.95,
                "{name}, seed {seed}: experts × {experts:.3}"
            );
            assert!(tpot < 0.99, "{name}, seed {seed}: TPOT P50 × {tpot:.3}");
        }
    }
}
