//! `/metrics` in Prometheus text format, with vLLM's names and labels.

use std::fmt::Write as _;
use std::sync::atomic::Ordering;

use super::stats::WorkerReport;
use super::worker::Worker;

/// The metrics of one worker.
pub(crate) fn render(worker: &Worker) -> String {
    let gauges = &worker.gauges;
    let report = worker.report();
    let capacity = worker.shared.config.kv_cache_tokens.max(1) as f64;
    let used = gauges.kv_tokens.load(Ordering::Relaxed) as f64 / capacity;
    let mut text = String::new();
    let model = escape(&worker.shared.limits.model);
    let mut write = |name: &str, kind: &str, help: &str, value: f64| {
        let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} {kind}");
        let _ = writeln!(
            text,
            "{name}{{engine=\"0\",model_name=\"{model}\"}} {value:?}"
        );
    };
    let mut metric = |name: &str, kind: &str, help: &str, value: f64| {
        write(&format!("vllm:{name}"), kind, help, value);
    };
    let running = gauges.running() as f64;
    metric(
        "num_requests_running",
        "gauge",
        "Number of requests in model execution batches.",
        running,
    );
    let waiting = gauges.waiting() as f64;
    metric(
        "num_requests_waiting",
        "gauge",
        "Number of requests waiting to be processed.",
        waiting,
    );
    let help = "KV-cache usage. 1 means 100 percent usage.";
    metric("kv_cache_usage_perc", "gauge", help, used.min(1.0));
    let prefilled = report.prefill_tokens as f64;
    metric(
        "prompt_tokens_total",
        "counter",
        "Number of prefill tokens processed.",
        prefilled,
    );
    metric(
        "prefix_cache_queries_total",
        "counter",
        "Prefix cache queries, in tokens.",
        prefilled,
    );
    let hits = report.kv.cached_tokens as f64;
    metric(
        "prefix_cache_hits_total",
        "counter",
        "Prefix cache hits, in tokens.",
        hits,
    );
    let decoded = report.tokens as f64;
    metric(
        "generation_tokens_total",
        "counter",
        "Number of generation tokens processed.",
        decoded,
    );
    for (name, kind, help, value) in own(&report) {
        write(&format!("mock:{name}"), kind, help, value as f64);
    }
    text
}

/// What no engine counts: how the gateway treated the worker's KV blocks.
fn own(report: &WorkerReport) -> [(&'static str, &'static str, &'static str, u64); 10] {
    let kv = &report.kv;
    let (gauge, counter) = ("gauge", "counter");
    [
        (
            "kv_blocks_held",
            gauge,
            "KV blocks held for decode workers.",
            kv.held_blocks,
        ),
        (
            "kv_requests_held",
            gauge,
            "Requests whose KV blocks are held.",
            kv.held_requests,
        ),
        (
            "kv_blocks_stranded_total",
            counter,
            "KV blocks held until their lease ran out.",
            kv.stranded_blocks,
        ),
        (
            "kv_requests_stranded_total",
            counter,
            "Requests whose KV blocks were held until their lease ran out.",
            kv.stranded_requests,
        ),
        (
            "late_decodes_total",
            counter,
            "Decode requests after the lease of their KV blocks.",
            kv.late_decodes,
        ),
        (
            "kv_releases_total",
            counter,
            "Releases that freed KV blocks.",
            kv.releases,
        ),
        (
            "kv_releases_repeated_total",
            counter,
            "Releases of KV blocks that were free already.",
            kv.repeated_releases,
        ),
        (
            "kv_releases_unknown_total",
            counter,
            "Releases of KV blocks that nobody handed out.",
            kv.unknown_releases,
        ),
        (
            "leaked_signatures_total",
            counter,
            "Requests whose kv_transfer_params still had eldr_sig.",
            kv.leaked_signatures,
        ),
        (
            "mixed_up_total",
            counter,
            "Requests with kv_transfer_params not handed out for them.",
            report.mixed_up,
        ),
    ]
}

/// A label value: backslash, quote and line feed escaped.
fn escape(value: &str) -> String {
    value
        .replace('\\', "\\\\")
        .replace('"', "\\\"")
        .replace('\n', "\\n")
}
