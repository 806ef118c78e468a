//! `/metrics` in Prometheus text format, with vLLM's names and labels.

use std::fmt::Write as _;
use std::sync::atomic::Ordering;

use super::worker::Worker;

/// The metrics of one worker.
pub(crate) fn render(worker: &Worker) -> String {
    let gauges = &worker.gauges;
    let report = worker.report();
    let capacity = worker.shared.config.kv_cache_tokens.max(1) as f64;
    let used = gauges.kv_tokens.load(Ordering::Relaxed) as f64 / capacity;
    let mut text = String::new();
    let model = escape(&worker.shared.limits.model);
    let mut metric = |name: &str, kind: &str, help: &str, value: f64| {
        let _ = writeln!(text, "# HELP vllm:{name} {help}\n# TYPE vllm:{name} {kind}");
        let _ = writeln!(
            text,
            "vllm:{name}{{engine=\"0\",model_name=\"{model}\"}} {value:?}"
        );
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
    let decoded = report.tokens as f64;
    metric(
        "generation_tokens_total",
        "counter",
        "Number of generation tokens processed.",
        decoded,
    );
    text
}

/// A label value: backslash, quote and line feed escaped.
fn escape(value: &str) -> String {
    value
        .replace('\\', "\\\\")
        .replace('"', "\\\"")
        .replace('\n', "\\n")
}
