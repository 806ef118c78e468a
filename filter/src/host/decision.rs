//! Choosing a decode cluster, with what all threads know, and counting what was chosen.

use std::cell::RefCell;
use std::fmt::Write as _;

use eldr_core::decide::{Decision, Draw, Policy, Worker};
use eldr_core::engine::StepModel;
use eldr_core::rollout::Rollout;
use eldr_core::route::Prompt;
use proxy_wasm::hostcalls;
use proxy_wasm::types::LogLevel;

use super::question::{Clue, Question};
use super::stages;
use super::vm::{self, Vm};
use super::{EnvoyShared, log, now_ms, now_ns};
use crate::destination::Destination;
use crate::health::{Sent, Verdict};
use crate::load::Flight;
use crate::metrics;
use crate::plugin::{ModelIndex, Plugin};
use crate::tokens::Known;

/// Chooses a cluster as [`choose`] would now, and leaves no trace.
pub(super) fn suggest(
    plugin: &Plugin,
    model: Option<ModelIndex>,
    clue: Clue<'_>,
    request_id: &[u8],
) -> Decision {
    let config = plugin.config();
    vm::with(|vm| {
        let (draw, now) = (vm.preview(), now_ms());
        vm.refresh(now, config);
        let workers = vm.workers(plugin, plugin.load_unit(model), now);
        let course = plugin.course(model, request_id, now);
        let question = Question {
            plugin,
            clue,
            prompt: Prompt {
                header: clue.header(),
                ..Prompt::default()
            },
            held: clue.hold(plugin, model, now, vm),
        };
        question.decide(course, &workers, draw, vm)
    })
}

/// What was chosen.
pub(super) struct Chosen {
    pub(super) decision: Decision,
    /// Counts the request there.
    pub(super) flight: Flight,
    pub(super) sent: Option<Sent>,
    pub(super) policy: Policy,
    /// In shadow mode: what the model's own policy would have chosen.
    pub(super) shadow: Option<Decision>,
    /// Requests of known experts that ran there before, where batches are kept.
    pub(super) known: Option<u32>,
}

/// Chooses a cluster and counts the request there.
pub(super) fn choose(
    plugin: &Plugin,
    model: Option<ModelIndex>,
    clue: Clue<'_>,
    request_id: &[u8],
    tokens: Known,
) -> Chosen {
    let config = plugin.config();
    let (timing, cool_down) = (config.timing, config.cool_down);
    vm::with(|vm| {
        vm.claim(timing);
        let draw = vm.draw();
        let now = now_ms();
        vm.refresh(now, config);
        stages::end("refresh");
        // What reading the clock adds to each stage.
        stages::end("clock");
        let started = now_ns();
        let course = plugin.course(model, request_id, now);
        let counts = config.counts_tokens();
        let question = Question {
            plugin,
            clue,
            prompt: Prompt {
                header: clue.header(),
                tokens: tokens.prompt,
                kv_tokens: match counts {
                    true => vm.expected.expects(plugin.name(model), tokens),
                    false => 0,
                },
            },
            held: clue.hold(plugin, model, now, vm),
        };
        stages::end("hold");
        let decide = |vm: &mut Vm| {
            let workers = vm.workers(plugin, plugin.load_unit(model), now);
            stages::end("workers");
            let decision = question.decide(course, &workers, draw, vm);
            stages::end("decide");
            (decision, workers)
        };
        let (mut decision, mut workers) = decide(vm);
        vm.metrics
            .record(metrics::DECISION_NS, now_ns().saturating_sub(started));
        let mut sent = None;
        // Again only where another thread's trial of that very cluster was first, so at most once per cluster.
        for _ in &config.decode_clusters {
            let cluster = plugin.decode_cluster(decision.target);
            sent = vm.health.send(&EnvoyShared, cluster, now, cool_down);
            if sent.is_some() {
                break;
            }
            (decision, workers) = decide(vm);
        }
        let shadow = (plugin.rollout(model) == Some(Rollout::Shadow))
            .then(|| question.decide(model.into(), &workers, draw, vm));
        let cluster = plugin.decode_cluster(decision.target);
        // After the decision: what others have is judged by those that were sent before.
        let tokens = match counts {
            true => vm.expected.arrives(plugin.name(model), tokens),
            false => 0,
        };
        let mut flight = vm.loads.start(&EnvoyShared, cluster, tokens, now, timing);
        stages::end("in_flight");
        let known = question.known(decision.target, vm);
        flight.sit(question.join(decision.target, now, vm));
        stages::end("join");
        let policy = plugin.policy(course);
        count(vm, &decision, cluster);
        if plugin.rollout(model).is_some() {
            vm.metrics
                .count(&metrics::of_policy(policy, cluster, "sent"));
        }
        if let Some(shadow) = &shadow {
            vm.metrics.count(match shadow.target == decision.target {
                true => metrics::SHADOW_AGREES,
                false => metrics::SHADOW_DIFFERS,
            });
            vm.metrics.count(&metrics::shadow_reason(shadow.reason));
        }
        stages::end("metrics");
        if is_sampled(draw, config.log_decisions_per_mille) {
            let steps = question.steps(vm);
            let line = line(plugin, &decision, known, steps, &workers);
            let shadow = shadow.as_ref();
            let shadow = shadow.map(|shadow| {
                let (cluster, reason) = (plugin.decode_cluster(shadow.target), shadow.reason);
                format!(" shadow={cluster};reason={}", reason.name())
            });
            log(LogLevel::Info, &(line + &shadow.unwrap_or_default()));
        }
        Chosen {
            decision,
            flight,
            sent,
            policy,
            shadow,
            known,
        }
    })
}

fn count(vm: &mut Vm, decision: &Decision, cluster: &str) {
    vm.metrics.count(&metrics::routed(cluster));
    vm.metrics.count(&metrics::reason(decision.reason));
    let per_mille = |similarity: f32| (similarity.max(0.0) * 1_000.0) as u64;
    if let (Some(similarity), Some(top)) = (decision.similarity, decision.top) {
        vm.metrics
            .record(metrics::SIMILARITY, per_mille(similarity));
        vm.metrics.record(metrics::TOP_SIMILARITY, per_mille(top));
        vm.metrics.record(metrics::BAND, decision.band as u64);
    }
}

/// Other bits than those by which a random policy chooses.
fn is_sampled(draw: Draw, per_mille: u64) -> bool {
    per_mille > 0 && (draw.entropy >> 16) % 1_000 < per_mille
}

/// `eldr: decision decode-2;reason=in_band;region=2;band=1;similarity=0.931;top=0.931 loads=decode-0:3,decode-1:out,…`; where batches
/// decide, `known=5` after it, and where step times are learned, what is believed of them: `steps=5.84+0.144U+0.026B`.
fn line(
    plugin: &Plugin,
    decision: &Decision,
    known: Option<u32>,
    steps: Option<StepModel>,
    workers: &[Worker],
) -> String {
    let cluster = plugin.decode_cluster(decision.target);
    let mut line = format!("eldr: decision {cluster};reason={}", decision.reason.name());
    if let Some(region) = decision.region {
        let _ = write!(line, ";region={}", region.0);
    }
    if let (Some(similarity), Some(top)) = (decision.similarity, decision.top) {
        let band = decision.band;
        let _ = write!(line, ";band={band};similarity={similarity:.3};top={top:.3}");
    }
    if let Some(known) = known {
        let _ = write!(line, ";known={known}");
    }
    if let Some(steps) = steps {
        let StepModel {
            t0_ms, b_ms, c_ms, ..
        } = steps;
        let _ = write!(line, " steps={t0_ms:.2}+{b_ms:.3}U+{c_ms:.3}B");
    }
    for (index, (name, worker)) in plugin
        .config()
        .decode_clusters
        .iter()
        .zip(workers)
        .enumerate()
    {
        let before = if index == 0 { " loads=" } else { "," };
        let _ = match worker.available {
            true => write!(line, "{before}{name}:{}", worker.load),
            false => write!(line, "{before}{name}:out"),
        };
    }
    line
}

/// What became of the current stream's request, from what Envoy says while the answer's headers pass.
pub(super) fn verdict() -> Verdict {
    let response = |name| {
        let property = hostcalls::get_property(vec!["response", name]);
        property.ok().flatten().unwrap_or_default()
    };
    let flags = response("flags").try_into().map(u64::from_le_bytes);
    Verdict::of(flags.unwrap_or_default(), &response("code_details"))
}

/// Takes the verdict on a request that was sent to a decode cluster.
pub(super) fn learn(plugin: &Plugin, sent: &Sent, verdict: Verdict) {
    let cool_down = plugin.config().cool_down;
    vm::with(|vm| {
        let ejected = vm
            .health
            .learn(&EnvoyShared, sent, verdict, now_ms(), cool_down);
        if ejected {
            let cluster = sent.cluster();
            vm.metrics.count(&metrics::ejections(cluster));
            let what = format!("eldr: {cluster} does not answer and is left out for a while");
            log(LogLevel::Warn, &what);
        }
    });
}

/// Where Envoy served the current stream from another endpoint than the one chosen, the request counts there, and the one
/// chosen has failed.
pub(super) fn settle_endpoint(
    plugin: &Plugin,
    counted: &RefCell<Option<Flight>>,
    sent: &RefCell<Option<Sent>>,
) {
    let config = plugin.config();
    if config.destination == Destination::Cluster {
        return;
    }
    let mut counted = counted.borrow_mut();
    let Some(chosen) = counted.as_ref().map(Flight::cluster) else {
        return;
    };
    let address = hostcalls::get_property(vec!["upstream", "address"]);
    let address = address.ok().flatten().unwrap_or_default();
    let Some(served) = config.destination.other(chosen, &address) else {
        return;
    };
    *counted = counted.take().map(|mut flight| {
        vm::with(|vm| {
            let (now, timing, tokens) = (now_ms(), config.timing, flight.tokens());
            let seat = flight.rise();
            vm.loads.end(&EnvoyShared, flight, now, timing);
            vm.metrics.count(metrics::ENDPOINT_FALLBACK);
            let mut flight = vm.loads.start(&EnvoyShared, &served, tokens, now, timing);
            flight.sit(seat.and_then(|seat| vm.running.change(seat, &served, now)));
            flight
        })
    });
    if let Some(sent) = sent.borrow_mut().take() {
        learn(plugin, &sent, Verdict::Failed);
    }
}
