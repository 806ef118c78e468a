//! Reads the few numbers we need from an engine's `/metrics` (Prometheus text format 0.0.4; OpenMetrics reads alike).
//!
//! Only lines of these names are looked into, and those strictly. vLLM:
//! `vllm:num_requests_running`, `vllm:num_requests_waiting`, `vllm:kv_cache_usage_perc` (older: `gpu_cache_usage_perc`); SGLang:
//! `sglang:num_running_reqs`, `sglang:num_queue_reqs`, `sglang:token_usage`, and the queues of a decode worker in a
//! prefill/decode pair.

use std::collections::BTreeMap;

/// Largest answer that is read, bytes.
pub const MAX_BYTES: usize = 4 << 20;

/// Most series of one name: engines and data-parallel ranks of one worker, times models.
const MAX_SERIES: usize = 4_096;

/// No worker has as many requests.
const MAX_REQUESTS: f64 = 1e6;

/// Labels that tell ranks apart which work on the same requests: each may report all of them.
const SAME_REQUESTS: [&str; 4] = ["tp_rank", "pp_rank", "moe_ep_rank", "pid"];

/// What a worker's engine says of itself.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Gauges {
    /// Requests that run or wait, over all engines and data-parallel ranks of the worker.
    pub requests: u32,
    /// Part of its KV cache that is in use, 0 to 1; of the fullest rank.
    pub kv_usage: Option<f64>,
}

/// Why an answer cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Unreadable {
    /// It is too large.
    #[error("{0} bytes of metrics; at most {MAX_BYTES} are read")]
    TooLarge(usize),
    /// No engine that we know.
    #[error(
        "no gauge of running requests\n\
         hint: vllm:num_requests_running or sglang:num_running_reqs is expected; SGLang wants --enable-metrics"
    )]
    Missing,
    /// A line of a name that we need is broken.
    #[error("line {line}: {what}")]
    Line {
        /// Counted from 1.
        line: usize,
        /// What is wrong.
        what: &'static str,
    },
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    Running,
    Waiting,
    KvUsage,
}

fn kind(name: &[u8]) -> Option<Kind> {
    match name {
        b"vllm:num_requests_running" | b"sglang:num_running_reqs" => Some(Kind::Running),
        b"vllm:num_requests_waiting"
        | b"sglang:num_queue_reqs"
        | b"sglang:num_decode_prealloc_queue_reqs"
        | b"sglang:num_decode_transfer_queue_reqs" => Some(Kind::Waiting),
        b"vllm:kv_cache_usage_perc" | b"vllm:gpu_cache_usage_perc" | b"sglang:token_usage" => {
            Some(Kind::KvUsage)
        }
        _ => None,
    }
}

/// Reads an engine's metrics.
///
/// # Errors
/// It is too large, a line that matters is broken, or no engine that we know wrote it.
pub fn read(text: &[u8]) -> Result<Gauges, Unreadable> {
    if text.len() > MAX_BYTES {
        return Err(Unreadable::TooLarge(text.len()));
    }
    // The most that any of the ranks reports which work on the same requests.
    let mut series: BTreeMap<(Kind, Vec<u8>), f64> = BTreeMap::new();
    for (index, line) in text.split(|&byte| byte == b'\n').enumerate() {
        let line = line.trim_ascii();
        let end = line
            .iter()
            .position(|&byte| byte == b'{' || byte.is_ascii_whitespace());
        let Some((name, rest)) = end.and_then(|end| line.split_at_checked(end)) else {
            continue;
        };
        let Some(kind) = kind(name) else { continue };
        let (labels, value) = sample(name, rest).map_err(|what| Unreadable::Line {
            line: index + 1,
            what,
        })?;
        let most = series.entry((kind, labels)).or_default();
        *most = most.max(value);
        if series.len() > MAX_SERIES {
            return Err(Unreadable::Line {
                line: index + 1,
                what: "too many series",
            });
        }
    }
    let of = |wanted| {
        let values = series.iter().filter(move |((kind, _), _)| *kind == wanted);
        values.map(|(_, &value)| value)
    };
    if of(Kind::Running).next().is_none() {
        return Err(Unreadable::Missing);
    }
    let requests: f64 = of(Kind::Running).chain(of(Kind::Waiting)).sum();
    Ok(Gauges {
        requests: requests.min(MAX_REQUESTS) as u32,
        kv_usage: of(Kind::KvUsage)
            .reduce(f64::max)
            .map(|usage| usage.min(1.0)),
    })
}

/// What follows a name: which series it is, and its value.
fn sample(name: &[u8], rest: &[u8]) -> Result<(Vec<u8>, f64), &'static str> {
    let (mut labels, rest) = match rest.strip_prefix(b"{") {
        Some(rest) => read_labels(rest)?,
        None => (Vec::new(), rest),
    };
    labels.retain(|(label, _)| !SAME_REQUESTS.iter().any(|rank| rank.as_bytes() == *label));
    labels.sort_unstable();
    let mut key = name.to_vec();
    for (label, value) in labels {
        key.extend([b"\n", label, b"=", value].concat());
    }
    // A timestamp or an exemplar may follow.
    let value = rest
        .split(u8::is_ascii_whitespace)
        .find(|word| !word.is_empty());
    let value = value.and_then(|word| std::str::from_utf8(word).ok()?.parse::<f64>().ok());
    let value = value.ok_or("no number where the value should be")?;
    match value.is_finite() && value >= 0.0 {
        true => Ok((key, value)),
        false => Err("the value is negative or not finite"),
    }
}

type Labels<'a> = Vec<(&'a [u8], &'a [u8])>;

/// Labels after the opening brace, values as they are escaped, and what follows the closing one.
fn read_labels(mut rest: &[u8]) -> Result<(Labels<'_>, &[u8]), &'static str> {
    const BROKEN: &str = "broken labels";
    let mut labels = Vec::new();
    loop {
        rest = rest.trim_ascii_start();
        if let Some(rest) = rest.strip_prefix(b"}") {
            return Ok((labels, rest));
        }
        let equals = rest.iter().position(|&byte| byte == b'=').ok_or(BROKEN)?;
        let (label, tail) = rest.split_at_checked(equals).ok_or(BROKEN)?;
        let tail = tail.strip_prefix(b"=").unwrap_or_default();
        let tail = tail.trim_ascii_start().strip_prefix(b"\"").ok_or(BROKEN)?;
        let mut escaped = false;
        let quote = tail.iter().position(|&byte| {
            let ends = byte == b'"' && !escaped;
            escaped = byte == b'\\' && !escaped;
            ends
        });
        let (value, tail) = tail.split_at_checked(quote.ok_or(BROKEN)?).ok_or(BROKEN)?;
        labels.push((label.trim_ascii(), value));
        let tail = tail.strip_prefix(b"\"").unwrap_or_default();
        let tail = tail.trim_ascii_start();
        rest = match tail.strip_prefix(b",") {
            Some(tail) => tail,
            None if tail.starts_with(b"}") => tail,
            None => return Err(BROKEN),
        };
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn vllm_with_two_engines_is_summed_and_the_fuller_cache_counts() {
        let text =
            br#"# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="a \"quoted, }\" name"} 3.0
vllm:num_requests_running{engine="1",model_name="a \"quoted, }\" name"} 4.0
vllm:num_requests_waiting{engine="0"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 2.0
vllm:kv_cache_usage_perc{engine="0"} 0.25
vllm:kv_cache_usage_perc{engine="1"} 0.75
python_gc_objects_collected_total{generation="0"} garbage
"#;
        let expected = Gauges {
            requests: 9,
            kv_usage: Some(0.75),
        };
        assert_eq!(read(text), Ok(expected));
    }

    #[test]
    fn sglang_ranks_that_share_their_requests_count_once_and_dp_ranks_each() {
        let text = br#"
sglang:num_running_reqs{tp_rank="0",dp_rank="0"} 5
sglang:num_running_reqs{dp_rank="0",tp_rank="1"} 4
sglang:num_running_reqs{tp_rank="0",dp_rank="1",} 2 1700000000000
sglang:num_queue_reqs{tp_rank="0"} 1 # {trace_id="x"} 1
sglang:num_decode_transfer_queue_reqs{tp_rank="0"} 1
sglang:token_usage 0.5
"#;
        let expected = Gauges {
            requests: 9,
            kv_usage: Some(0.5),
        };
        assert_eq!(read(text), Ok(expected));
    }

    #[test]
    fn what_cannot_be_read_is_named() {
        for (text, word) in [
            ("", "no gauge of running"),
            ("<html>not found</html>", "no gauge of running"),
            ("vllm:num_requests_waiting 1", "no gauge of running"),
            ("vllm:num_requests_running", "no gauge of running"),
            ("\nvllm:num_requests_running NaN", "line 2: the value"),
            ("vllm:num_requests_running +Inf", "not finite"),
            ("vllm:num_requests_running -1", "negative"),
            ("vllm:num_requests_running x", "no number"),
            ("vllm:num_requests_running{a=\"b} 1", "broken labels"),
            (
                "vllm:num_requests_running{a=\"b\"c=\"d\"} 1",
                "broken labels",
            ),
            ("vllm:num_requests_running{a} 1", "broken labels"),
        ] {
            let error = read(text.as_bytes()).unwrap_err().to_string();
            assert!(error.contains(word), "{text}: {error}");
        }
        let mut many = Vec::new();
        for engine in 0..=MAX_SERIES {
            let line = format!("vllm:num_requests_running{{engine=\"{engine}\"}} 1\n");
            many.extend_from_slice(line.as_bytes());
        }
        assert!(read(&many).unwrap_err().to_string().contains("too many"));
        let large = vec![b'\n'; MAX_BYTES + 1];
        assert_eq!(read(&large), Err(Unreadable::TooLarge(MAX_BYTES + 1)));
    }

    #[test]
    fn more_than_any_worker_has_is_bounded() {
        let text = b"vllm:num_requests_running 1e300\nvllm:kv_cache_usage_perc 7";
        let expected = Gauges {
            requests: 1_000_000,
            kv_usage: Some(1.0),
        };
        assert_eq!(read(text), Ok(expected));
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let mut text = b"vllm:num_requests_running{".to_vec();
            text.extend(&bytes);
            let _ = read(&text);
            let _ = read(&bytes);
        }

        /// Whatever the labels' values are, series that differ in them are summed.
        #[test]
        fn a_sum_over_series_is_what_was_written(
            series in proptest::collection::btree_map("[^\n]{0,12}", (0u32..500, 0u32..500), 1..20),
            noise in "[a-z ]{0,30}",
        ) {
            let mut text = format!("{noise}\n");
            let mut sum = 0;
            for (model, (running, waiting)) in &series {
                let model = model.replace('\\', "\\\\").replace('"', "\\\"");
                text += &format!("vllm:num_requests_running{{engine=\"0\",model_name=\"{model}\"}} {running}.0\r\n");
                text += &format!("vllm:num_requests_waiting{{ model_name = \"{model}\" , engine=\"0\"}}\t{waiting}\n");
                sum += running + waiting;
            }
            prop_assert_eq!(read(text.as_bytes()), Ok(Gauges { requests: sum, kv_usage: None }));
        }
    }
}
