//! The filter inside Envoy decides as the same code does natively.

use eldr_core::blob::Blob;
use eldr_core::decide::{Draw, Policy, Rule, Worker};
use eldr_core::route::{Map, Scratch, route};
use eldr_core::signature::{Encoding, Geometry, Signature};
use eldr_core::transform::Transform;
use eldr_tests::client::{Connection, next_piece, post};
use eldr_tests::upstream::Stream;
use eldr_tests::{Answer, Gateway, Options, blob, eventually};
use hyper::body::Incoming;
use rand::{Rng, RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde_json::{Value, json};

const WORKERS: usize = 5;
const LAYERS: usize = 3;
const EXPERTS: usize = 6;
const STEPS: usize = 300;

/// Deterministic policies with their parameters; each is a model of its own in one configuration.
fn rules() -> Vec<(&'static str, Rule)> {
    let rule = |policy, tau, max_load_factor| Rule {
        policy,
        tau,
        max_load_factor,
        ..Rule::default()
    };
    vec![
        ("band", rule(Policy::Band, 0.1, Some(1.25))),
        ("band-wide", rule(Policy::Band, 0.5, Some(1.25))),
        ("band-no-cap", rule(Policy::Band, 0.3, None)),
        ("band-zero", rule(Policy::Band, 0.0, Some(1.5))),
        ("top1", rule(Policy::Top1, 0.1, Some(2.0))),
        ("least-loaded", rule(Policy::LeastLoaded, 0.1, None)),
    ]
}

fn names() -> Vec<String> {
    (0..WORKERS)
        .map(|index| format!("decode-{index}"))
        .collect()
}

/// Four regions over five workers: one region has two workers, and one worker is in no region.
fn centroids(rng: &mut ChaCha8Rng) -> Blob {
    let geometry = Geometry::new(LAYERS, EXPERTS).unwrap();
    let weights = (0..2 * EXPERTS)
        .map(|_| rng.random_range(0.1..3.0))
        .collect();
    let transform = Transform::new(geometry, vec![0, 2], weights).unwrap();
    let mut centroids = Vec::new();
    for _ in 0..4 {
        let row: Vec<f32> = (0..2 * EXPERTS)
            .map(|_| rng.random_range(0.0..1.0))
            .collect();
        let norm = row.iter().map(|x| x * x).sum::<f32>().sqrt();
        centroids.extend(row.iter().map(|x| x / norm));
    }
    let names = names();
    let regions = [&names[0..1], &names[1..3], &names[3..4], &names[0..1]].map(<[String]>::to_vec);
    blob::new(transform, centroids, &regions)
}

/// Mostly good signatures in every encoding; now and then a missing, malformed or foreign one.
fn signature(rng: &mut ChaCha8Rng) -> Option<String> {
    let counts = |rng: &mut ChaCha8Rng, rows: usize| -> Vec<u16> {
        (0..rows * EXPERTS)
            .map(|_| rng.random_range(0..400))
            .collect()
    };
    let geometry = Geometry::new(LAYERS, EXPERTS).unwrap();
    match rng.random_range(0..12) {
        0 => None,
        1 => Some(":AAAA:;l=3;e=6".into()),
        2 => Some(blob::signature_of(1, 4)),
        3..=5 => {
            let layers = vec![0, 2];
            let counts = counts(rng, 2);
            let partial = Signature::sparse(geometry, layers, counts, None).unwrap();
            Some(partial.encode(Encoding::Varint))
        }
        other => {
            let encoding = if other % 2 == 0 {
                Encoding::U16
            } else {
                Encoding::Varint
            };
            let dense = Signature::dense(geometry, counts(rng, LAYERS), Some(50)).unwrap();
            Some(dense.encode(encoding))
        }
    }
}

struct Held {
    worker: usize,
    connection: Connection,
    body: Incoming,
    stream: Stream,
}

#[tokio::test]
async fn equal_native_ones_under_loads_made_by_held_streams() {
    let mut rng = ChaCha8Rng::seed_from_u64(1);
    let centroids = centroids(&mut rng);
    let inline = blob::inline(&centroids);
    let models: Vec<Value> = rules()
        .iter()
        .map(|(name, rule)| {
            json!({
                "model": name,
                "blob": { "inline": inline },
                "policy": rule.policy.name(),
                "tau": rule.tau,
                "max_load_factor": rule.max_load_factor.map_or(json!("none"), |f| json!(f))
            })
        })
        .collect();
    let options = Options {
        workers: WORKERS,
        ..Options::filter(json!({ "models": models }))
    };
    let mut gateway = Gateway::start(options).await;
    for worker in &gateway.decode {
        worker.by_hand();
    }
    let map = Map::bind(centroids, &names()).unwrap();
    let mut scratch = Scratch::default();
    let mut held: Vec<Held> = Vec::new();

    for step in 0..STEPS {
        let (model, rule) = rules()[rng.random_range(0..rules().len())];
        let signature = signature(&mut rng);
        let loads: Vec<Worker> = (0..WORKERS)
            .map(|worker| Worker {
                load: held.iter().filter(|held| held.worker == worker).count() as f64,
                available: true,
            })
            .collect();
        let header = signature.as_ref().map(String::as_bytes);
        let draw = Draw {
            sequence: 0,
            entropy: rng.next_u64(),
        };
        let expected = route(&rule, Some(&map), header, &loads, draw, &mut scratch);
        let target = expected.target.0;

        gateway
            .prefill
            .answers(Answer::prefill("{}", signature.as_deref()));
        let mut connection = gateway.connect().await;
        let body = format!(r#"{{"model":"{model}","prompt":"hi","stream":true}}"#);
        let (answer, stream) = gateway.decode[target]
            .streams_to(connection.send(post("/v1/completions", body)))
            .await;
        let decision = answer.headers()["x-eldr-decision"]
            .to_str()
            .unwrap()
            .to_owned();
        let context = format!("step {step}, {model}, loads {loads:?}, {signature:?}: {decision}");
        let prefix = format!("decode-{target};reason={}", expected.reason.name());
        assert!(
            decision.starts_with(&prefix),
            "expected {prefix}; {context}"
        );
        if let Some(region) = expected.region {
            assert!(
                decision.contains(&format!(";region={}", region.0)),
                "{expected:?}; {context}"
            );
            assert!(
                decision.contains(&format!(";band={}", expected.band)),
                "{expected:?}; {context}"
            );
        }
        held.push(Held {
            worker: target,
            connection,
            body: answer.into_body(),
            stream,
        });

        // Loads wander between nothing and about a dozen per step, unequal between workers.
        while !held.is_empty() && rng.random_bool(if held.len() > 12 { 0.7 } else { 0.3 }) {
            let mut done = held.swap_remove(rng.random_range(0..held.len()));
            done.stream.finish();
            assert_eq!(next_piece(&mut done.body).await, None);
            drop(done.connection);
        }
        gateway.counts(held.len() as u64).await;
    }
}

#[tokio::test]
async fn round_robin_takes_the_workers_in_turn() {
    let options = Options::filter(json!({ "models": [{ "model": "*", "policy": "round_robin" }] }));
    let gateway = Gateway::start(options).await;
    let mut answers = Vec::new();
    for _ in 0..6 {
        answers.push(
            gateway
                .post("/v1/completions", r#"{"prompt":"hi"}"#)
                .await
                .text(),
        );
    }
    let first: usize = answers[0].strip_prefix("decode-").unwrap().parse().unwrap();
    let turn: Vec<_> = (0..6)
        .map(|step| format!("decode-{}", (first + step) % 3))
        .collect();
    assert_eq!(answers, turn);
}

#[tokio::test]
async fn only_requests_take_turns() {
    let filter = |prefills: &[&str]| {
        let models = json!([{ "model": "*", "policy": "round_robin" }]);
        json!({ "models": models, "prefill_clusters": prefills })
    };
    let gateway = Gateway::start(Options {
        lds: true,
        prefills: 2,
        ..Options::filter(filter(&["prefill"]))
    })
    .await;
    let next = async || {
        let reply = gateway.post("/v1/completions", r#"{"prompt":"hi"}"#);
        reply.await.text()
    };
    assert_eq!(next().await, "decode-1");
    gateway.update(filter(&["prefill", "prefill-1"]), 2);
    // A gauge that the new configuration sets at its ticks, and the old one does not.
    let ticked = async || gateway.filter_stats().await;
    let gauge = "eldr.worker.prefill-1.in_flight";
    eventually("a tick", ticked, |stats| stats.contains_key(gauge)).await;
    assert_eq!([next().await, next().await], ["decode-2", "decode-0"]);
}

#[tokio::test]
async fn random_policies_use_every_worker() {
    for policy in ["random", "p2c"] {
        let options = Options::filter(json!({ "models": [{ "model": "*", "policy": policy }] }));
        let gateway = Gateway::start(options).await;
        let mut connection = gateway.connect().await;
        let all_used = async || {
            connection
                .call(post("/v1/completions", r#"{"prompt":"hi"}"#))
                .await;
            gateway
                .decode
                .iter()
                .filter(|worker| !worker.received().is_empty())
                .count()
        };
        eventually(&format!("{policy} uses every worker"), all_used, |used| {
            *used == 3
        })
        .await;
    }
}
