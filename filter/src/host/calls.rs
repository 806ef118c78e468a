//! Calls that a root dispatches: prefill legs and releases. Each is counted to its cluster while it is under way.
//!
//! Envoy answers every dispatched call, if only with a failure, so what starts here ends here. A root outlives its
//! calls: see [`is_idle`].

use std::time::Duration;

use proxy_wasm::hostcalls;

use super::onward::after_prefill;
use super::stages;
use super::vm::{self, SharedPlugin, Waiting};
use super::{EnvoyShared, now_ms};
use crate::headers::{DESTINATION_ENDPOINT, for_prefill};
use crate::load::{Flight, LoadUnit, Timing};
use crate::metrics;
use crate::release::{MAX_UNDER_WAY, Release, TIMEOUT_MS};
use crate::request::Answer;

/// A call under way.
pub(super) struct Call {
    /// Context id of the root that dispatched it.
    root: u32,
    /// Counts it to its cluster.
    flight: Flight,
    timing: Timing,
    purpose: Purpose,
}

enum Purpose {
    /// The prefill leg of this stream. What it takes to retry or to release outlives the stream in here.
    Prefill(u32, Waiting),
    /// With what it takes to send it once more.
    Release(Release, SharedPlugin),
}

/// What streams want dispatched.
pub(super) enum Errand {
    /// The prefill leg of this stream.
    Prefill(u32),
    /// A release, and the decode cluster that failed.
    Release(Release, SharedPlugin, String),
}

/// Does what streams of this VM have asked for. The effective context is `root`'s, and is afterwards.
pub(super) fn run_errands(root: u32) {
    while let Some(errand) = vm::with(|vm| vm.errands.pop_front()) {
        match errand {
            Errand::Prefill(stream) => {
                // None if the stream is gone before its leg was sent.
                if let Some(waiting) = vm::with(|vm| vm.waiting.get(&stream).cloned()) {
                    send_prefill(root, stream, waiting);
                }
            }
            Errand::Release(release, plugin, failed) => {
                send_release(root, release, &plugin, Some(&failed));
            }
        }
    }
}

/// Takes the answer to a call; false if the call is none of these.
pub(super) fn on_answer(token: u32, answer: &Answer) -> bool {
    let Some(call) = vm::with(|vm| vm.calls.remove(&token)) else {
        return false;
    };
    let cluster = vm::with(|vm| {
        let (now, timing) = (now_ms(), call.timing);
        vm.loads.end(&EnvoyShared, call.flight, now, timing)
    });
    match call.purpose {
        Purpose::Prefill(stream, waiting) => on_prefill(call.root, stream, waiting, answer),
        Purpose::Release(release, plugin) => {
            vm::with(|vm| vm.releases = vm.releases.saturating_sub(1));
            if !matches!(answer.status(), Some(200..=299)) {
                vm::with(|vm| vm.metrics.count(metrics::RELEASE_FAILED));
                if release.tries > 0 {
                    send_release(call.root, release, &plugin, Some(&cluster));
                }
            }
        }
    }
    true
}

/// Whether a root has no calls under way and nobody waits for it, so that it may go.
pub(super) fn is_idle(root: u32) -> bool {
    vm::with(|vm| vm.errands.is_empty() && vm.calls.values().all(|call| call.root != root))
}

/// Sends a stream's prefill leg. One that cannot be sent is treated like one that broke off.
fn send_prefill(root: u32, stream: u32, waiting: Waiting) {
    let plugin = waiting.plugin.clone();
    let plugin = plugin.borrow();
    let (timing, deadline) = (plugin.config().timing, deadline_ms(&waiting));
    let sent = {
        let mut request = waiting.request.borrow_mut();
        let leg = request.leg();
        let cluster = vm::with(|vm| {
            vm.loads.refresh(&EnvoyShared, now_ms(), timing);
            let turn = || {
                vm.turn += 1;
                vm.turn
            };
            plugin.choose_prefill(leg, |cluster| vm.loads.in_flight(cluster), turn)
        });
        let left = deadline.saturating_sub(now_ms()).max(1);
        let (headers, body) = (for_prefill(&leg.headers), leg.body.as_bytes());
        stages::end("choose_prefill");
        dispatch(cluster, headers, body, left).map(|token| (token, cluster.to_owned()))
    };
    stages::end("dispatch_prefill");
    match sent {
        Some((token, cluster)) => {
            let purpose = Purpose::Prefill(stream, waiting);
            start(token, root, &cluster, timing, purpose);
        }
        None => {
            drop(plugin);
            on_prefill(root, stream, waiting, &Answer::none());
        }
    }
}

fn deadline_ms(waiting: &Waiting) -> u64 {
    let timeout = waiting.plugin.borrow().config().prefill_timeout_ms;
    waiting.started_ms.saturating_add(timeout)
}

/// A prefill leg has ended: sends it once more, goes on with its stream, or, where that is gone, cleans up.
fn on_prefill(root: u32, stream: u32, waiting: Waiting, answer: &Answer) {
    let waits = vm::with(|vm| vm.waiting.contains_key(&stream));
    let waits = waits && waiting.request.borrow().prefills();
    if waits {
        let plugin = waiting.plugin.borrow();
        let deadline = deadline_ms(&waiting);
        let request = waiting.request.borrow();
        if request.may_retry(answer, plugin.config(), now_ms(), deadline) {
            drop((plugin, request));
            vm::with(|vm| vm.metrics.count(metrics::PREFILL_RETRY));
            return send_prefill(root, stream, waiting);
        }
    }
    vm::with(|vm| vm.waiting.remove(&stream));
    if waits && hostcalls::set_effective_context(stream).is_ok() {
        after_prefill(&waiting, answer);
        // What comes next is dispatched by the root, and must not be bound to the stream.
        let _ = hostcalls::set_effective_context(root);
        return;
    }
    vm::with(|vm| vm.metrics.count(metrics::LATE_PREFILL));
    let release = {
        let plugin = waiting.plugin.borrow();
        let mut request = waiting.request.borrow_mut();
        request.on_late_prefill(answer, plugin.config())
    };
    if let Some(release) = release {
        send_release(root, release, &waiting.plugin, None);
    }
}

/// Sends a release to the least loaded decode cluster, not to `failed` if there is another.
fn send_release(root: u32, release: Release, shared: &SharedPlugin, failed: Option<&str>) {
    if vm::with(|vm| vm.releases >= MAX_UNDER_WAY) {
        return vm::with(|vm| vm.metrics.count(metrics::RELEASE_DROPPED));
    }
    let plugin = shared.borrow();
    let timing = plugin.config().timing;
    let cluster = vm::with(|vm| {
        let now = now_ms();
        vm.refresh(now, plugin.config());
        plugin.release_cluster(failed, &vm.workers(&plugin, LoadUnit::Requests, now))
    });
    let (envoy_cluster, endpoint) = plugin.config().destination.of(cluster);
    let (mut headers, body) = (for_prefill(&release.headers), release.body.as_bytes());
    headers.extend(endpoint.map(|endpoint| (DESTINATION_ENDPOINT, endpoint)));
    match dispatch(envoy_cluster, headers, body, TIMEOUT_MS) {
        Some(token) => {
            vm::with(|vm| {
                vm.releases += 1;
                vm.metrics.count(metrics::RELEASE_SENT);
            });
            let tries = release.tries.saturating_sub(1);
            let purpose = Purpose::Release(Release { tries, ..release }, shared.clone());
            start(token, root, cluster, timing, purpose);
        }
        None => vm::with(|vm| vm.metrics.count(metrics::RELEASE_FAILED)),
    }
}

/// `None` where Envoy has no such cluster or fails at once; it calls back for every other call.
fn dispatch(
    cluster: &str,
    headers: Vec<(&str, &str)>,
    body: &[u8],
    timeout_ms: u64,
) -> Option<u32> {
    let timeout = Duration::from_millis(timeout_ms);
    hostcalls::dispatch_http_call(cluster, headers, Some(body), vec![], timeout).ok()
}

/// Counts a call. It has no tokens: neither prefill legs nor releases keep KV blocks on a decode worker.
fn start(token: u32, root: u32, cluster: &str, timing: Timing, purpose: Purpose) {
    vm::with(|vm| {
        let flight = vm.loads.start(&EnvoyShared, cluster, 0, now_ms(), timing);
        let call = Call {
            root,
            flight,
            timing,
            purpose,
        };
        vm.calls.insert(token, call);
    });
}
