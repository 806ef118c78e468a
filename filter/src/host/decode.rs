//! Sends a held request to the decode worker that is chosen for it.

use proxy_wasm::hostcalls;
use proxy_wasm::types::{BufferType, MapType, Status};

use super::attributes::set_property;
use super::decision;
use super::question::Clue;
use super::stages;
use super::vm::{self, Waiting};
use super::{now_ns, set_header};
use crate::headers as names;
use crate::meter::{Course, Meter, Times};
use crate::metrics;
use crate::plugin::Plugin;
use crate::request::{Head, Reply, Request};

/// Chooses the decode cluster, counts the request there and edits it, all while its headers are held.
pub(super) fn route(waiting: &Waiting, clue: Clue<'_>, head: Option<&Head>) -> Result<(), Reply> {
    let plugin = waiting.plugin.borrow();
    let mut request = waiting.request.borrow_mut();
    let model = request.model();
    let (id, tokens) = (&waiting.request_id, request.tokens());
    let chosen = decision::choose(&plugin, model, clue, id, tokens);
    *waiting.sent.borrow_mut() = chosen.sent;
    let cluster = plugin.decode_cluster(chosen.decision.target);
    *waiting.counted.borrow_mut() = Some(chosen.flight);
    request.routed(&chosen.decision, cluster);
    request.met(chosen.known);
    let (policy, rollout) = (chosen.policy, plugin.rollout(model));
    if rollout.is_some() {
        let shadow = chosen.shadow;
        let shadow = shadow.map(|shadow| (plugin.decode_cluster(shadow.target), shadow.reason));
        request.went_by(policy, shadow);
    }
    let is_measured = rollout.is_some() || plugin.config().measure_streams;
    let learns = plugin.learns(model).is_some();
    if is_measured || learns || plugin.config().counts_tokens() {
        let begun_ns = waiting.started_ms.saturating_mul(1_000_000);
        let course = is_measured.then_some(Course { policy, rollout });
        let meter = Meter::new(course, begun_ns);
        *waiting.meter.borrow_mut() = Some(meter);
    }
    set_property("eldr_decision", request.decision());
    stages::end("note");
    let place = plugin.config().destination.of(cluster);
    edit(place, waiting.content_length, head)
        .map_err(|status| request.internal(&format!("the request could not be edited: {status:?}")))
}

/// Adds an answer's length to what is known of its model, and its times to what is of its worker and policy. Returns the milliseconds
/// per decode step, where they are known.
pub(super) fn record(
    meter: &Meter,
    cluster: &str,
    plugin: &Plugin,
    request: &Request,
) -> Option<f64> {
    if plugin.config().counts_tokens()
        && let Some(output) = meter.output()
    {
        let (model, sequences) = (plugin.name(request.model()), request.tokens().sequences);
        vm::with(|vm| vm.expected.ends(model, output, sequences));
    }
    if let Some(Course { policy, .. }) = meter.course() {
        let name = |what| metrics::of_policy(*policy, cluster, what);
        vm::with(|vm| match meter.times(now_ns()) {
            Times::NothingPassed => {}
            Times::Spoiled => vm.metrics.count(&name("not_counted")),
            Times::Taken { ttft_ms, tpot_us } => {
                vm.metrics.record(&name("ttft_ms"), ttft_ms);
                if let Some(tpot_us) = tpot_us {
                    vm.metrics.record(&name("tpot_us"), tpot_us);
                }
            }
        });
    }
    meter.step_ms(request.tokens().sequences)
}

/// Sends a held request to a cluster, to this endpoint of it if one is named, with a new head.
pub(super) fn edit(
    (cluster, endpoint): (&str, Option<&str>),
    content_length: Option<usize>,
    head: Option<&Head>,
) -> Result<(), Status> {
    if let Some(Head { replaces, bytes }) = head {
        hostcalls::set_buffer(BufferType::HttpRequestBody, 0, *replaces, bytes.as_bytes())?;
        if let Some(length) = content_length {
            let length = (length + bytes.len()).saturating_sub(*replaces).to_string();
            set_header(
                MapType::HttpRequestHeaders,
                "content-length",
                length.as_bytes(),
            )?;
        }
    }
    stages::end("set_body");
    if let Some(endpoint) = endpoint {
        let (map, name) = (MapType::HttpRequestHeaders, names::DESTINATION_ENDPOINT);
        set_header(map, name, endpoint.as_bytes())?;
    }
    // Clears the route cache, so that Envoy's `cluster_header` route sees it.
    set_header(
        MapType::HttpRequestHeaders,
        names::DECODE_CLUSTER,
        cluster.as_bytes(),
    )?;
    stages::end("set_header");
    Ok(())
}
