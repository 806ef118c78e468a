//! Requests are placed by what runs on each decode worker now.

use eldr_core::batch::{Batches, Measure};
use eldr_core::decide::{Draw, Policy, Rule, Worker, WorkerIndex};
use eldr_core::route::{Fleet, Map, Prompt, Scratch, route_running};
use eldr_core::signature::{Encoding, Geometry, Signature};
use eldr_tests::client::{next_piece, post};
use eldr_tests::upstream::Stream;
use eldr_tests::{Answer, Connection, Gateway, KV_TRANSFER_PARAMS, Options, blob};
use hyper::body::Incoming;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde_json::{Value, json};

use crate::relay::Ask;

const BODY: &str = r#"{"model":"m","prompt":"hi","stream":true}"#;

/// A request whose answer has begun and does not end yet.
pub(crate) struct Held {
    /// As the gateway tells it: worker, reason and so on.
    pub(crate) decision: String,
    pub(crate) connection: Connection,
    body: Incoming,
    stream: Stream,
}

impl Held {
    pub(crate) fn worker(&self) -> usize {
        let name = self.decision.split(';').next().unwrap_or_default();
        name.strip_prefix("decode-").unwrap().parse().unwrap()
    }

    /// The answer comes to its end; the connection may be used again.
    pub(crate) async fn finish(mut self) -> Connection {
        self.stream.finish();
        assert_eq!(next_piece(&mut self.body).await, None);
        self.connection
    }

    /// The client goes away.
    pub(crate) async fn leave(self) {
        drop((self.connection, self.body));
        self.stream.abandoned().await;
    }

    /// Whether both ends still have their stream, which thereby ends.
    pub(crate) async fn goes_on(mut self) -> bool {
        use http_body_util::BodyExt;
        let alive =
            self.stream.offer("whole").await && matches!(self.body.frame().await, Some(Ok(_)));
        if alive {
            self.finish().await;
        }
        alive
    }
}

/// Sends a request on this connection and holds its answer, whichever of three workers gets it.
pub(crate) async fn hold_ask(gateway: &mut Gateway, mut connection: Connection, ask: Ask) -> Held {
    let [a, b, c] = &mut gateway.decode[..] else {
        panic!("three decode workers");
    };
    for worker in [&*a, b, c] {
        worker.by_hand();
    }
    let (answer, stream) = tokio::join!(connection.send(ask), async {
        let exchange = tokio::select! {
            exchange = a.next() => exchange,
            exchange = b.next() => exchange,
            exchange = c.next() => exchange,
        };
        exchange.stream(Answer::event_stream())
    });
    Held {
        decision: answer.headers()["x-eldr-decision"]
            .to_str()
            .unwrap()
            .to_owned(),
        connection,
        body: answer.into_body(),
        stream,
    }
}

/// Holds a request whose tokens all used this one of three experts.
pub(crate) async fn hold(gateway: &mut Gateway, connection: Connection, expert: usize) -> Held {
    gateway.prefill_says(Some(expert));
    hold_ask(gateway, connection, post("/v1/completions", BODY)).await
}

/// A request that is answered at once: what its decision was.
pub(crate) async fn probe(gateway: &Gateway, connection: &mut Connection, expert: usize) -> String {
    gateway.prefill_says(Some(expert));
    for worker in &gateway.decode {
        worker.answers(Answer::json("{}"));
    }
    let reply = connection.call(post("/v1/completions", BODY)).await;
    reply.header("x-eldr-decision")
}

/// Waits until the gauges say that so many requests of known experts are on each worker.
pub(crate) async fn expect_known(gateway: &Gateway, known: [u64; 3]) {
    for (worker, known) in known.into_iter().enumerate() {
        let gauge = format!("eldr.worker.decode-{worker}.known");
        gateway.expect_stat(&gauge, known).await;
    }
}

pub(crate) fn by(policy: &str) -> Value {
    json!([{ "model": "*", "policy": policy }])
}

#[tokio::test]
async fn among_few_candidates_the_lot_decides() {
    // With all three to choose among, like joins like; with one drawn, each worker has its turn.
    for (candidates, tries) in [(3, 12), (1, 60)] {
        let models = json!([{
            "model": "*", "policy": "marginal", "max_load_factor": "none", "candidates": candidates
        }]);
        let mut gateway = Gateway::start(Options::filter(json!({ "models": models }))).await;
        let mut held = Vec::new();
        for expert in 0..3 {
            let connection = gateway.connect().await;
            held.push(hold(&mut gateway, connection, expert).await);
        }
        let mut prober = gateway.connect().await;
        let mut seen = std::collections::BTreeSet::new();
        for _ in 0..tries {
            let decision = probe(&gateway, &mut prober, 0).await;
            assert!(decision.contains("reason=marginal"), "{decision}");
            seen.insert(decision.split(';').next().unwrap().to_owned());
        }
        if candidates == 1 {
            let all = ["decode-0", "decode-1", "decode-2"].map(str::to_owned);
            assert_eq!(seen, all.into());
        } else {
            assert_eq!(seen, [format!("decode-{}", held[0].worker())].into());
        }
        for held in held {
            held.finish().await;
        }
    }
}

#[tokio::test]
async fn requests_of_the_same_experts_are_packed_together_without_centroids() {
    let mut gateway = Gateway::start(Options::filter(json!({ "models": by("marginal") }))).await;
    let mut held = Vec::new();
    let mut counts = [0; 3];
    for expert in [0, 1, 2, 2, 1, 0, 1, 0, 2, 0, 1, 2] {
        let connection = gateway.connect().await;
        let request = hold(&mut gateway, connection, expert).await;
        // The first three find idle workers; each that comes later finds those like itself.
        let expected = format!("decode-{expert};reason=marginal;known={}", counts[expert]);
        assert_eq!(request.decision, expected);
        counts[expert] += 1;
        held.push(request);
    }
    expect_known(&gateway, [4, 4, 4]).await;
    gateway.expect_in_flight(12).await;
    for (index, request) in held.into_iter().enumerate() {
        match index % 2 {
            0 => request.leave().await,
            _ => drop(request.finish().await),
        }
    }
    // Whoever ended in whatever way has left the batches.
    gateway.expect_in_flight(0).await;
    expect_known(&gateway, [0, 0, 0]).await;
    let mut connection = gateway.connect().await;
    let decision = probe(&gateway, &mut connection, 2).await;
    assert_eq!(decision, "decode-0;reason=marginal;known=0");
    gateway.expect_outcomes(&[("routed(marginal)", 13)]).await;
}

#[tokio::test]
async fn what_cannot_be_held_against_batches_goes_to_the_least_loaded_with_a_reason() {
    let mut gateway = Gateway::start(Options::filter(json!({ "models": by("marginal") }))).await;
    let connection = gateway.connect().await;
    let first = hold(&mut gateway, connection, 1).await;
    let no_tokens = blob::signature_of(1, 3).replace(";n=7", "");
    let params = KV_TRANSFER_PARAMS;
    let silent = Answer::json(format!(r#"{{"kv_transfer_params":{params}}}"#));
    let cases = [
        (Answer::prefill(params, None), "no_signature"),
        (
            Answer::prefill(params, Some(":AAAA:;l=3;e=6")),
            "malformed_signature",
        ),
        (
            silent.header("x-eldr-signature", &no_tokens),
            "malformed_signature",
        ),
        // How long the prompt is, its answer's `usage` may say.
        (Answer::prefill(params, Some(&no_tokens)), "marginal"),
    ];
    let mut connection = gateway.connect().await;
    for worker in &gateway.decode {
        worker.answers(Answer::json("{}"));
    }
    for (answer, reason) in cases {
        gateway.prefill.answers(answer);
        let reply = connection.call(post("/v1/completions", BODY)).await;
        let decision = reply.header("x-eldr-decision");
        let expected = format!("decode-1;reason={reason}");
        assert!(
            decision.starts_with(&expected),
            "{decision}, not {expected}"
        );
    }
    drop(first.finish().await);
    gateway.assert_no_trap();
}

#[tokio::test]
async fn hybrid_chooses_by_batch_within_its_band_and_below_the_cap() {
    let workers = ["decode-0", "decode-1", "decode-2"].map(|name| vec![name.to_owned()]);
    let inline = blob::inline(&blob::one_expert_per_region(&workers));
    let models = |cap: Value| {
        json!([{
            "model": "*", "policy": "hybrid", "blob": { "inline": inline }, "max_load_factor": cap
        }])
    };
    let mix = |counts: [u16; 3]| {
        let geometry = Geometry::new(1, 3).unwrap();
        let tokens = counts.iter().map(|&count| u64::from(count)).sum();
        let signature = Signature::dense(geometry, counts.to_vec(), Some(tokens)).unwrap();
        Answer::prefill(KV_TRANSFER_PARAMS, Some(&signature.encode(Encoding::U16)))
    };
    let mut gateway =
        Gateway::start(Options::filter(json!({ "models": models(json!("none")) }))).await;
    let mut held = Vec::new();
    for (counts, expected) in [
        // Only region 0 is within 0.5 of the best: neither idle workers nor batches of few count against that.
        (
            [7, 0, 0],
            "decode-0;reason=marginal;region=0;band=1;similarity=1.000;known=0",
        ),
        (
            [7, 0, 0],
            "decode-0;reason=marginal;region=0;band=1;similarity=1.000;known=1",
        ),
        (
            [0, 7, 0],
            "decode-1;reason=marginal;region=1;band=1;similarity=1.000;known=0",
        ),
        (
            [0, 7, 0],
            "decode-1;reason=marginal;region=1;band=1;similarity=1.000;known=1",
        ),
        // As like to regions 0 and 1: the less similar one has the cheaper batch.
        (
            [4, 3, 0],
            "decode-0;reason=marginal;region=0;band=2;similarity=0.800;known=2",
        ),
        (
            [4, 3, 0],
            "decode-1;reason=marginal;region=1;band=2;similarity=0.600;known=2",
        ),
    ] {
        gateway.prefill.answers(mix(counts));
        let connection = gateway.connect().await;
        let request = hold_ask(&mut gateway, connection, post("/v1/completions", BODY)).await;
        assert_eq!(request.decision, expected, "{counts:?}");
        held.push(request);
    }
    drop(held);
    drop(gateway);

    // With the cap the band widens before a worker gets far more than its share.
    let mut gateway =
        Gateway::start(Options::filter(json!({ "models": models(json!(1.25)) }))).await;
    let mut loads = [0; 3];
    let mut held = Vec::new();
    for _ in 0..12 {
        gateway.prefill.answers(mix([7, 0, 0]));
        let connection = gateway.connect().await;
        let request = hold_ask(&mut gateway, connection, post("/v1/completions", BODY)).await;
        let mean = f64::from(loads.iter().sum::<u32>()) / 3.0;
        let load = &mut loads[request.worker()];
        assert!(
            f64::from(*load) <= 1.25 * mean,
            "{loads:?}, {}",
            request.decision
        );
        *load += 1;
        held.push(request);
    }
    assert!(loads.iter().all(|&load| load >= 3), "{loads:?}");
}

#[tokio::test]
async fn requests_that_another_policy_placed_are_in_the_batches_too() {
    for rollout in [
        json!({ "kind": "shadow", "control": "least_loaded" }),
        json!({ "kind": "percentage", "percent": 0, "control": "least_loaded" }),
    ] {
        let models = json!([{ "model": "*", "policy": "marginal", "rollout": rollout }]);
        let mut gateway = Gateway::start(Options::filter(json!({ "models": models }))).await;
        let mut held = Vec::new();
        for (worker, expert) in [2, 0, 1].into_iter().enumerate() {
            let connection = gateway.connect().await;
            let request = hold(&mut gateway, connection, expert).await;
            let expected = format!("decode-{worker};reason=blind;known=0;policy=least_loaded");
            assert!(
                request.decision.starts_with(&expected),
                "{}",
                request.decision
            );
            held.push(request);
        }
        expect_known(&gateway, [1, 1, 1]).await;
        if rollout["kind"] == "shadow" {
            let mut connection = gateway.connect().await;
            for (worker, expert) in [(2, 1), (0, 2), (1, 0)] {
                let decision = probe(&gateway, &mut connection, expert).await;
                let expected = format!(";shadow=decode-{worker};shadow_reason=marginal");
                assert!(decision.ends_with(&expected), "{decision}, not {expected}");
            }
        }
        for request in held {
            request.leave().await;
        }
        expect_known(&gateway, [0, 0, 0]).await;
    }
}

/// Deterministic policies with their parameters; each is a model of its own in one configuration.
fn rules() -> Vec<(&'static str, bool, Rule)> {
    let rule = |policy, max_load_factor| Rule {
        max_load_factor,
        ..Rule::of(policy)
    };
    vec![
        ("marginal", false, rule(Policy::Marginal, Some(1.25))),
        ("marginal-blob-no-cap", true, rule(Policy::Marginal, None)),
        ("hybrid", true, rule(Policy::Hybrid, Some(1.5))),
        ("batch-band", false, rule(Policy::BatchBand, Some(2.0))),
    ]
}

#[tokio::test]
async fn decisions_equal_native_ones_with_requests_of_other_models_about() {
    const LAYERS: usize = 30;
    const EXPERTS: usize = 6;
    let names = ["decode-0", "decode-1", "decode-2"].map(str::to_owned);
    let mut rng = ChaCha8Rng::seed_from_u64(6);
    let geometry = Geometry::new(LAYERS, EXPERTS).unwrap();
    // Without a blob, twelve layers spread over those that there are.
    let spread: Vec<u16> = (0..12)
        .map(|n| ((2 * n + 1) * LAYERS / 24) as u16)
        .collect();
    // With one, of those that it selects.
    let chosen: Vec<u16> = (3..29).filter(|layer| layer % 5 > 0).collect();
    let dimension = chosen.len() * EXPERTS;
    let weights = (0..dimension).map(|_| rng.random_range(0.1..3.0)).collect();
    let transform = eldr_core::transform::Transform::new(geometry, chosen, weights).unwrap();
    let mut centroids = Vec::new();
    for _ in 0..3 {
        let row: Vec<f32> = (0..dimension).map(|_| rng.random_range(0.0..1.0)).collect();
        let norm = row.iter().map(|x| x * x).sum::<f32>().sqrt();
        centroids.extend(row.iter().map(|x| x / norm));
    }
    let blob = blob::new(transform, centroids, &names.clone().map(|name| vec![name]));
    let inline = blob::inline(&blob);
    let models: Vec<Value> = rules()
        .iter()
        .map(|(name, has_blob, rule)| {
            let mut model = json!({
                "model": name,
                "policy": rule.policy.name(),
                "tau": rule.tau,
                "max_load_factor": rule.max_load_factor.map_or(json!("none"), |f| json!(f))
            });
            if *has_blob {
                model["blob"] = json!({ "inline": inline });
            }
            model
        })
        .collect();
    let mut gateway = Gateway::start(Options::filter(json!({ "models": models }))).await;
    let map = Map::bind(blob, &names).unwrap();
    let mut batches: Vec<Batches> = rules()
        .iter()
        .map(|(_, has_blob, rule)| {
            let measure = rule.policy.measure().unwrap();
            match has_blob {
                true => map.batches(measure, 3),
                false => Batches::new(measure, geometry, spread.clone(), 3).unwrap(),
            }
        })
        .collect();
    let mut scratch = Scratch::default();
    // Which model's, at which worker, with which footprint.
    let mut held = Vec::new();
    for step in 0..150 {
        let index = rng.random_range(0..rules().len());
        let (model, has_blob, rule) = rules().swap_remove(index);
        // Prompts of 40 tokens which lean to one third of the experts.
        let lean = rng.random_range(0..3);
        let counts = (0..LAYERS * EXPERTS)
            .map(|at| match at % EXPERTS / 2 == lean {
                true => rng.random_range(20..=40),
                false => rng.random_range(0..=8),
            })
            .collect();
        let signature = Signature::dense(geometry, counts, Some(40)).unwrap();
        let header = signature.encode(Encoding::Varint);
        let mut loads = [0; 3];
        held.iter()
            .for_each(|(_, worker, _, _)| loads[*worker] += 1);
        let workers = loads.map(|load| Worker {
            load: f64::from(load),
            available: true,
        });
        for (worker, &load) in loads.iter().enumerate() {
            batches[index].set_totals(WorkerIndex(worker), load, 0);
        }
        let prompt = Prompt {
            header: Some(header.as_bytes()),
            ..Prompt::default()
        };
        let fleet = Fleet {
            workers: &workers,
            batches: &batches[index],
        };
        let draw = Draw {
            sequence: 0,
            entropy: 0,
        };
        let map = has_blob.then_some(&map);
        let native = route_running(&rule, map, prompt, fleet, draw, &mut scratch);
        let footprint = scratch.request().unwrap().footprint();

        gateway
            .prefill
            .answers(Answer::prefill("{}", Some(&header)));
        let connection = gateway.connect().await;
        let body = format!(r#"{{"model":"{model}","prompt":"hi","stream":true}}"#);
        let request = hold_ask(&mut gateway, connection, post("/v1/completions", body)).await;
        let decision = &request.decision;
        let worker = native.target.0;
        let prefix = format!("decode-{worker};reason={}", native.reason.name());
        assert!(
            decision.starts_with(&prefix),
            "step {step}: {decision}, not {prefix}"
        );
        let known = batches[index].workers()[worker].known();
        assert!(
            decision.ends_with(&format!(";known={known}")),
            "step {step}: {decision}, not {known}"
        );
        batches[index].join(native.target, &footprint);
        held.push((index, worker, footprint, request));

        while !held.is_empty() && rng.random_bool(if held.len() > 12 { 0.7 } else { 0.3 }) {
            let (index, worker, footprint, request) =
                held.swap_remove(rng.random_range(0..held.len()));
            batches[index].leave(WorkerIndex(worker), &footprint);
            drop(request.finish().await);
        }
        gateway.counts(held.len() as u64).await;
    }
    assert_eq!(batches[3].measure(), Measure::Direction);
}
