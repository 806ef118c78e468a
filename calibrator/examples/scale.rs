//! What happens as decode workers and gateways grow: the cost of a decision and what it brings.
//!
//!     cargo run --release -p eldr-calibrator --example scale -- [WORKERS_MAX] [TASK|LANGUAGE]
//!
//! Simulates 16, 64, 256, … decode workers with 1 to 64 gateways whose loads are 1 s old, at 1.25 requests/s and worker, on the
//! shipped traces. Beside policies as they are there is `sampled`: `marginal` on 16 workers that are drawn from those below the load
//! cap. Times are of this machine and of the decision alone: mean over all of a run, one thread.

use std::path::Path;
use std::time::{Duration, Instant};

use eldr_calibrator::fit::{Options, Regions, fit};
use eldr_calibrator::requests::Requests;
use eldr_calibrator::simulate::policy::{Ask, Router, router};
use eldr_calibrator::simulate::{Cluster, Known, Plan, PolicySpec, Replay, Times, Workload, run};
use eldr_core::batch::{Batches, Footprint, Measure, Request};
use eldr_core::decide::{Decision, Reason, Rule, WorkerIndex};
use eldr_core::engine::StepModel;
use eldr_core::route::Map;
use eldr_core::signature::{Encoded, Scratch};

/// Candidates that `sampled` looks at.
const SAMPLE: usize = 16;
const POLICIES: [&str; 6] = [
    "least_loaded",
    "p2c",
    "band:cap=1.1",
    "hybrid:tau=0.3:q=1:cap=1.1",
    "marginal:q=1:cap=1.1",
    "sampled",
];

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let workers_max: usize = arguments.next().map_or(Ok(256), |text| text.parse())?;
    let name = arguments.next().unwrap_or("task".into());
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples/data/small-moe");
    let trace = |part: &str| data.join(format!("{name}_{part}.jsonl.gz"));
    let workload = Workload::read(&[trace("evaluation")], Replay::Expected, || ())?;
    let calibration = Requests::read(&[trace("calibration")], || ())?;
    println!(
        "workers gateways regions policy                          µs/decision  mean %   P50 %   P99 %   (TPOT against p2c)"
    );
    let mut workers = 16;
    while workers <= workers_max {
        let names: Vec<String> = (0..workers).map(|n| format!("decode-{n}")).collect();
        for regions in [16, 64] {
            if regions > workers {
                continue;
            }
            let options = Options {
                regions: Regions::Fixed(regions),
                ..Options::new(names.clone())
            };
            let map = Map::bind(fit(&calibration, &options, |_| ())?.blob, &names)?;
            let known = Known::new(map, &workload);
            for gateways in [1, 4, 16, 64] {
                row(&workload, &known, workers, gateways, regions)?;
            }
        }
        workers *= 4;
    }
    Ok(())
}

/// All policies at one size.
fn row(
    workload: &Workload,
    known: &Known,
    workers: usize,
    gateways: usize,
    regions: usize,
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
        duration: 30 * one_s,
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
    let mut outcomes = Vec::new();
    for name in POLICIES {
        let inner: Box<dyn Router + '_> = if name == "sampled" {
            let spec: PolicySpec = "marginal:q=1:cap=1.1".parse()?;
            Box::new(Sampled::new(spec.rule(&rule), workload, &cluster)?)
        } else {
            router(&name.parse()?, &rule, Some(known), workload, &cluster)?
        };
        let mut timed = Timed {
            inner,
            spent: Duration::ZERO,
        };
        let outcome = run(&cluster, workload, &arrivals, &mut timed);
        let each = timed.spent.as_secs_f64() * 1e6 / arrivals.len() as f64;
        outcomes.push((name, each, outcome.tpot_ms));
    }
    let reference = outcomes[1].2;
    for (name, each, tpot) in outcomes {
        let change = |own: f64, other: f64| (own / other - 1.0) * 100.0;
        println!(
            "{workers:7} {gateways:8} {regions:7} {name:31} {each:11.1} {:+7.1} {:+7.1} {:+7.1}",
            change(tpot.mean, reference.mean),
            change(tpot.p50, reference.p50),
            change(tpot.p99, reference.p99),
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

    fn entered(&mut self, gateway: usize, worker: usize, signature: usize) {
        self.inner.entered(gateway, worker, signature);
    }

    fn left(&mut self, gateway: usize, worker: usize, signature: usize) {
        self.inner.left(gateway, worker, signature);
    }

    fn shared(&mut self) -> f64 {
        self.inner.shared()
    }
}

/// `marginal` on a few workers.
struct Sampled<'a> {
    rule: Rule,
    workload: &'a Workload,
    /// Of each gateway, or one for all.
    batches: Vec<Batches>,
    footprints: Vec<Option<Footprint>>,
    request: Request,
    scratch: Scratch,
    counts: Vec<f32>,
}

impl<'a> Sampled<'a> {
    fn new(
        rule: Rule,
        workload: &'a Workload,
        cluster: &Cluster,
    ) -> Result<Self, Box<dyn std::error::Error>> {
        let layers = (0..workload.geometry.layers as u16).collect();
        let idle = Batches::new(
            Measure::Usage,
            workload.geometry,
            layers,
            cluster.decode_workers,
        )?;
        let views = match cluster.share == Some(Duration::ZERO) {
            true => 1,
            false => cluster.gateways,
        };
        Ok(Sampled {
            rule,
            workload,
            batches: vec![idle; views],
            footprints: vec![None; workload.requests.len()],
            request: Request::default(),
            scratch: Scratch::default(),
            counts: Vec::new(),
        })
    }

    fn see(&mut self, view: usize, signature: usize) -> Option<()> {
        let request = &self.workload.requests[signature];
        let signature = Encoded::parse(request.signature.as_ref()?.as_bytes()).ok()?;
        let batches = &self.batches[view];
        signature
            .rows(batches.layers(), &mut self.scratch, &mut self.counts)
            .ok()?;
        let tokens = request.prompt_tokens?;
        let seen = batches.see(&self.counts, tokens.into(), tokens, &mut self.request);
        seen.then_some(())
    }
}

impl Router for Sampled<'_> {
    fn choose(&mut self, ask: Ask<'_>) -> Decision {
        let view = ask.gateway % self.batches.len();
        let seen = self.see(view, ask.signature).is_some();
        let tokens = self.workload.requests[ask.signature].prompt_tokens;
        self.footprints[ask.signature].get_or_insert_with(|| match seen {
            true => self.request.footprint(),
            false => Footprint::unknown(tokens.unwrap_or_default()),
        });
        let load: f64 = ask.workers.iter().map(|worker| worker.load).sum();
        let limit =
            self.rule.max_load_factor.unwrap_or(f64::INFINITY) * load / ask.workers.len() as f64;
        let mut state = ask.draw.entropy;
        let mut best: Option<(f64, f64, usize)> = None;
        let (mut drawn, mut tries) = (0, 0);
        // Somebody is always at or below the mean; who is drawn often enough is found.
        while drawn < SAMPLE && (tries < 8 * SAMPLE || best.is_none()) {
            tries += 1;
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            let index = ((state >> 32) as usize) % ask.workers.len();
            let worker = ask.workers[index];
            if worker.load > limit {
                continue;
            }
            drawn += 1;
            let batch = &self.batches[view].workers()[index];
            let growth = self.rule.objective.growth(batch, &self.request);
            if best.is_none_or(|(least, load, _)| (growth, worker.load) < (least, load)) {
                best = Some((growth, worker.load, index));
            }
        }
        Decision {
            target: WorkerIndex(best.map_or(0, |(_, _, index)| index)),
            reason: Reason::Marginal,
            region: None,
            similarity: None,
            top: None,
            band: 0,
        }
    }

    fn entered(&mut self, gateway: usize, worker: usize, signature: usize) {
        let view = gateway % self.batches.len();
        if let Some(footprint) = &self.footprints[signature] {
            self.batches[view].join(WorkerIndex(worker), footprint);
        }
    }

    fn left(&mut self, gateway: usize, worker: usize, signature: usize) {
        let view = gateway % self.batches.len();
        if let Some(footprint) = &self.footprints[signature] {
            self.batches[view].leave(WorkerIndex(worker), footprint);
        }
    }
}
