//! What happens as decode workers and gateways grow: the cost of a decision and what it brings.
//!
//!     cargo run --release -p eldr-calibrator --example scale -- WORKERS,… GATEWAYS,… [task|language] [POLICY…]
//!
//! Simulates so many decode workers with so many gateways whose loads are 1 s old, at 1.25 requests/s and worker, on the shipped
//! traces, with 16 regions. 12 s warm up and 18 are measured; of more than 256 workers 6. Times are of this machine and of the decision alone: mean
//! over all of a run, one thread.

use std::path::Path;
use std::time::{Duration, Instant};

use eldr_calibrator::fit::{Options, Regions, fit};
use eldr_calibrator::requests::Requests;
use eldr_calibrator::simulate::policy::{Ask, Router, router};
use eldr_calibrator::simulate::{Cluster, Known, Plan, Replay, Seat, Times, Workload, run};
use eldr_core::decide::{Decision, Rule};
use eldr_core::engine::StepModel;
use eldr_core::route::Map;

const POLICIES: [&str; 9] = [
    "p2c",
    "least_loaded",
    "band:cap=1.1",
    "band:cap=1.1:candidates=2",
    "hybrid:tau=0.3:q=1:cap=1.1",
    "hybrid:tau=0.3:q=1:cap=1.1:candidates=16",
    "hybrid:tau=0.3:q=1:cap=1.1:candidates=4",
    "marginal:q=1:cap=1.1",
    "marginal:q=1:cap=1.1:candidates=16",
];
const REGIONS: usize = 16;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let mut numbers = || -> Result<Vec<usize>, Box<dyn std::error::Error>> {
        let list = arguments.next().unwrap_or("64".into());
        Ok(list.split(',').map(str::parse).collect::<Result<_, _>>()?)
    };
    let (sizes, gateways) = (numbers()?, numbers()?);
    let name = arguments.next().unwrap_or("task".into());
    let mut policies: Vec<String> = arguments.collect();
    if policies.is_empty() {
        policies = POLICIES.map(str::to_owned).to_vec();
    }
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples/data/small-moe");
    let trace = |part: &str| data.join(format!("{name}_{part}.jsonl.gz"));
    let workload = Workload::read(&[trace("evaluation")], Replay::Expected, || ())?;
    let calibration = Requests::read(&[trace("calibration")], || ())?;
    println!(
        "workers gateways policy                                   µs/decision  mean %   P50 %   P99 %   (TPOT against the first)"
    );
    for &workers in &sizes {
        let names: Vec<String> = (0..workers).map(|n| format!("decode-{n}")).collect();
        let options = Options {
            regions: Regions::Fixed(REGIONS),
            ..Options::new(names.clone())
        };
        let map = Map::bind(fit(&calibration, &options, |_| ())?.blob, &names)?;
        let known = Known::new(map, &workload);
        for &gateways in &gateways {
            row(&workload, &known, workers, gateways, &policies)?;
        }
    }
    Ok(())
}

/// All policies at one size.
fn row(
    workload: &Workload,
    known: &Known,
    workers: usize,
    gateways: usize,
    policies: &[String],
) -> Result<(), Box<dyn std::error::Error>> {
    let one_s = Duration::from_secs(1);
    let cluster = Cluster {
        prefill_workers: 0,
        decode_workers: workers,
        gateways,
        share: Some(if gateways == 1 { Duration::ZERO } else { one_s }),
        step: StepModel {
            b_ms: 2.0 * StepModel::QWEN3_30B_A3B.b_ms,
            ..StepModel::QWEN3_30B_A3B
        },
        warm_up: 12 * one_s,
        duration: if workers > 256 { 18 } else { 30 } * one_s,
        ..Cluster::default()
    };
    let plan = Plan {
        times: Times::Drawn {
            rate_per_s: 1.25 * workers as f64,
            shape: 1.0,
        },
        duration: cluster.duration,
        lengths: None,
        mix: None,
        decode_tokens: Some(512),
        permute_signatures: false,
    };
    let arrivals = plan.arrivals(workload, 1)?;
    let mut rule = Rule::default();
    rule.objective.step = cluster.step;
    let mut reference = None;
    for name in policies {
        let mut timed = Timed {
            inner: router(&name.parse()?, &rule, Some(known), workload, &cluster)?,
            spent: Duration::ZERO,
        };
        let tpot = run(&cluster, workload, &arrivals, &mut timed).tpot_ms;
        let each = timed.spent.as_secs_f64() * 1e6 / arrivals.len() as f64;
        let first = *reference.get_or_insert(tpot);
        let change = |own: f64, other: f64| (own / other - 1.0) * 100.0;
        println!(
            "{workers:7} {gateways:8} {name:40} {each:11.1} {:+7.1} {:+7.1} {:+7.1}",
            change(tpot.mean, first.mean),
            change(tpot.p50, first.p50),
            change(tpot.p99, first.p99),
        );
    }
    Ok(())
}

/// Takes the time of decisions.
struct Timed<'a> {
    inner: Box<dyn Router + 'a>,
    spent: Duration,
}

impl Router for Timed<'_> {
    fn choose(&mut self, ask: Ask<'_>) -> Decision {
        let begin = Instant::now();
        let decision = self.inner.choose(ask);
        self.spent += begin.elapsed();
        decision
    }

    fn entered(&mut self, seat: Seat) {
        self.inner.entered(seat);
    }

    fn left(&mut self, seat: Seat, step_ms: Option<f64>) {
        self.inner.left(seat, step_ms);
    }

    fn shared(&mut self) -> f64 {
        self.inner.shared()
    }
}
