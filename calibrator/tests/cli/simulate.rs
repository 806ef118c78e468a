//! `eldr simulate`: results, and what a person is told when something is wrong.

use insta::assert_snapshot;
use serde_json::Value;

use crate::bench::{Bench, FIT, line, trace};
use crate::errors::transcript;

/// [`trace`] with lengths, labels and times.
fn replayable() -> String {
    let trace = trace(true);
    let lines = trace.lines().enumerate().map(|(n, line)| {
        let label = ["x", "y"][n % 2];
        let keys =
            format!(r#"{{"label":"{label}","ts":{n},"prompt_tokens":40,"decode_tokens":20,"#);
        line.replacen('{', &keys, 1) + "\n"
    });
    lines.collect()
}

fn bench() -> Bench {
    let bench = Bench::new();
    bench.write("t.jsonl", replayable()).eldr(FIT).succeeded();
    bench
}

const QUICK: &str = "simulate t.jsonl --b-ms 1 --duration 5 --seeds 2";

#[test]
fn policies_are_compared_and_the_command_repeats_it() {
    let bench = bench();
    let command = format!("{QUICK} --blob b.eldr --rate 40 --gateways 2 --share-ms 100");
    let first = bench.eldr(&command);
    let shown = first.succeeded().stdout.clone();
    assert_snapshot!(format!("$ eldr {command}\n{shown}"));
    let again = shown
        .lines()
        .find_map(|line| line.strip_prefix("again    eldr "));
    assert_eq!(bench.eldr(again.unwrap()).succeeded().stdout, shown);
}

#[test]
fn json_has_every_run() {
    let bench = bench();
    let ran = bench.eldr(&format!(
        "{QUICK} --blob b.eldr --policies round_robin,band:tau=0:cap=none --json"
    ));
    let shown: Value = serde_json::from_str(&ran.succeeded().stdout).unwrap();
    assert_eq!(shown["seeds"], serde_json::json!([1, 2]));
    assert_eq!(shown["exact"], false);
    let band = &shown["policies"][1];
    assert_eq!(band["policy"], "band:tau=0:cap=none");
    assert_eq!(band["runs"].as_array().unwrap().len(), 2);
    let requests = band["runs"][0]["requests"].as_u64().unwrap();
    assert_eq!(band["runs"][0]["reasons"]["in_band"], requests);
    let against = &band["against_best_balancer"]["tpot_p50_ms"];
    assert_eq!(against["reference"], "round_robin");
    let (own, other) = (&band["runs"], &shown["policies"][0]["runs"]);
    let p50 = |runs: &Value, seed: usize| runs[seed]["tpot_ms"]["p50"].as_f64().unwrap();
    let change = |seed| (p50(own, seed) / p50(other, seed) - 1.0) * 100.0;
    let mean = against["mean"].as_f64().unwrap();
    assert!((mean - (change(0) + change(1)) / 2.0).abs() < 1e-9);
}

#[test]
fn times_and_lengths_may_come_from_published_traces() {
    let bench = bench();
    bench
        .write(
            "azure.csv",
            "TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 18:15:46.6805900,374,44\r\n2023-11-16 18:15:50.9951690,396,1\r\n",
        )
        .write(
            "mooncake.jsonl",
            "{\"timestamp\": 0, \"input_length\": 6758, \"output_length\": 500, \"hash_ids\": [0]}\n{\"timestamp\": 3000, \"input_length\": 7322, \"output_length\": 490, \"hash_ids\": [0]}\n",
        );
    for (file, ttft) in [
        ("azure.csv", 0.035 * 374.0),
        ("mooncake.jsonl", 0.035 * 6758.0),
    ] {
        let ran = bench.eldr(&format!(
            "{QUICK} --policies round_robin --lengths {file} --arrivals lengths --json"
        ));
        let shown: Value = serde_json::from_str(&ran.succeeded().stdout).unwrap();
        let run = &shown["policies"][0]["runs"][0];
        assert_eq!(run["requests"], 2, "{file}");
        assert!(run["ttft_ms"]["p50"].as_f64().unwrap() > ttft, "{file}");
    }
    let ran = bench.eldr(&format!(
        "{QUICK} --policies round_robin --arrivals trace --rate 2 --json"
    ));
    let shown: Value = serde_json::from_str(&ran.succeeded().stdout).unwrap();
    assert_eq!(shown["policies"][0]["runs"][0]["requests"], 4);
}

#[test]
fn simulations_that_cannot_run() {
    let bench = bench();
    let lengths = |text: &str| format!(r#"{{{text}"id":"#);
    let with = |text: &str| line("e", [1, 2, 3, 0], true).replacen("{\"id\":", &lengths(text), 1);
    bench
        .write("none", "{\"id\":\"a\"}\n")
        .write("nolength", with(r#""prompt_tokens":3,"#))
        .write("noprompt", with(r#""decode_tokens":3,"#))
        .write("notokens", line("e", [1, 2, 3, 0], false))
        .write("zero", with(r#""prompt_tokens":3,"decode_tokens":0,"#))
        .write(
            "other",
            "{\"id\":\"e\",\"prompt_tokens\":1,\"decode_tokens\":1,\"prefill\":\":AQA=:;l=1;e=1\"}\n",
        )
        .write("mixed", replayable() + "{\"id\":\"e\",\"prompt_tokens\":1,\"decode_tokens\":1,\"prefill\":\":AQA=:;l=1;e=1\"}\n")
        .write("rows", "{\"id\":\"e\",\"prompt_tokens\":1,\"decode_tokens\":1,\"prefill\":\":AQAAAA==:;l=2;e=2;layers=\\\"0\\\";n=1\"}\n")
        .write("plain", with(r#""prompt_tokens":3,"decode_tokens":2,"#))
        .write("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,2\n")
        .write("b.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,many,2\n")
        .write("c.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n1,2\n")
        .write("d.csv", "time,prompt,answer\n1,2,3\n")
        .write("steps.csv", "batch,experts,step_ms\n1,8,many\n")
        .write("few.csv", "batch,experts,step_ms\n1,8,3\n2,9,4\n")
        .write("empty", "");
    let told = transcript(
        &bench,
        &[
            "simulate missing",
            "simulate none",
            "simulate nolength --b-ms 1",
            "simulate noprompt --b-ms 1",
            "simulate notokens --b-ms 1",
            "simulate zero",
            "simulate mixed --b-ms 1",
            "simulate rows --b-ms 1",
            "simulate t.jsonl --b-ms 1 --replay exact",
            "simulate t.jsonl --b-ms 1 --policies band",
            "simulate plain --b-ms 1 --policies label",
            "simulate plain --b-ms 1 --arrivals trace",
            "simulate other --b-ms 1 --blob b.eldr",
            "simulate t.jsonl --b-ms 1 --blob t.jsonl",
            "simulate t.jsonl --b-ms 1 --blob b.eldr --decode 1",
            "simulate t.jsonl --b-ms 1 --blob b.eldr --change 1:fail:2",
            "simulate t.jsonl --b-ms 1 --rate 0.001 --duration 0.001",
            "simulate t.jsonl --b-ms 1 --rate 1000000 --duration 1000000",
            "simulate t.jsonl --b-ms 1 --decode-tokens 4000000000",
            "simulate t.jsonl --b-ms 1 --decode-tokens 1",
            "simulate t.jsonl --t0-ms 0 --b-ms 0 --c-ms 0",
            "simulate t.jsonl --b-ms 1 --lengths missing",
            "simulate t.jsonl --b-ms 1 --lengths empty",
            "simulate t.jsonl --b-ms 1 --lengths a.csv",
            "simulate t.jsonl --b-ms 1 --lengths b.csv",
            "simulate t.jsonl --b-ms 1 --lengths c.csv",
            "simulate t.jsonl --b-ms 1 --lengths d.csv",
            "simulate t.jsonl --fit-steps missing",
            "simulate t.jsonl --fit-steps d.csv",
            "simulate t.jsonl --fit-steps steps.csv",
            "simulate t.jsonl --fit-steps few.csv",
        ],
    );
    assert_snapshot!(told);
}

#[test]
fn simulations_that_are_asked_for_wrongly() {
    let told = transcript(
        &Bench::new(),
        &[
            "simulate",
            "simulate t --policies best",
            "simulate t --policies band,band",
            "simulate t --policies band:tau=3",
            "simulate t --policies band:cap=0",
            "simulate t --policies band:width=1",
            "simulate t --blob b --calibrate c",
            "simulate t --regions 4",
            "simulate t --decode 0",
            "simulate t --rate 0",
            "simulate t --rate -3",
            "simulate t --b-ms -1",
            "simulate t --share-ms 10",
            "simulate t --gateways 2 --share-ms sometimes",
            "simulate t --change 5:explode:1",
            "simulate t --arrivals lengths",
            "simulate t --arrivals trace --burstiness 0.5",
            "simulate t --warm-up 120",
            "simulate t --model gpt-5",
            "simulate t --policies hindsight:for=p50",
            "simulate t --policies marginal:refit=2",
            "simulate t --assume e=3",
            "simulate t --mix all",
            "simulate t --mix 0:x,20:y,10:x",
            "simulate t --mix 0:x --arrivals trace",
            "simulate t --gateways 2 --share-batches",
            "simulate t --accept 2",
            "simulate t --ep-ranks 2 --placement p.json",
        ],
    );
    assert_snapshot!(told);
}

#[test]
fn the_limit_is_beside_every_policy() {
    let bench = bench();
    let command =
        format!("{QUICK} --blob b.eldr --rate 40 --policies least_loaded,band --limit --json");
    let shown: Value = serde_json::from_str(&bench.eldr(&command).succeeded().stdout).unwrap();
    let policies = shown["policies"].as_array().unwrap();
    let names: Vec<&str> = policies
        .iter()
        .map(|p| p["policy"].as_str().unwrap())
        .collect();
    assert_eq!(
        names,
        [
            "least_loaded",
            "band",
            "band:usage=decode",
            "hindsight",
            "hindsight:for=p99"
        ]
    );
    assert_eq!(
        policies[1]["against_true_usage"]["tpot_p99_ms"]["reference"],
        "band:usage=decode"
    );
    for (metric, limit) in [
        ("tpot_mean_ms", "hindsight"),
        ("tpot_p99_ms", "hindsight:for=p99"),
    ] {
        for policy in &policies[..3] {
            let against = &policy["against_hindsight"][metric];
            assert!(against["mean"].as_f64().unwrap() >= 0.0, "{policy}");
            assert_eq!(against["reference"], limit);
        }
    }
}

#[test]
fn what_comes_may_change_and_each_phase_is_told() {
    let bench = bench();
    let command = format!(
        "{QUICK} --blob b.eldr --rate 40 --policies least_loaded,band,band:refit=0.5/1 --mix 0:x,2~3:y"
    );
    let told = bench.eldr(&format!("{command} --json"));
    let shown: Value = serde_json::from_str(&told.succeeded().stdout).unwrap();
    let phases = shown["policies"][2]["phases"].as_array().unwrap();
    let from: Vec<f64> = phases
        .iter()
        .map(|p| p["from_s"].as_f64().unwrap())
        .collect();
    assert_eq!(from, [0.0, 2.0, 3.0]);
    let first = &phases[0]["against_best_balancer"]["tpot_mean_ms"];
    assert_eq!(first["reference"], "least_loaded");
    let text = bench.eldr(&command).succeeded().stdout.clone();
    assert!(text.contains("from 3 s, change in %"), "{text}");

    let unknown = bench.eldr(&format!("{QUICK} --blob b.eldr --mix 0:z"));
    assert_eq!(unknown.code, 1);
    let hint = "no request has the label z\nhint: the labels are x, y\n";
    assert!(unknown.stderr.ends_with(hint), "{}", unknown.stderr);
}

#[test]
fn workers_may_spread_their_experts_and_verify_several_tokens() {
    let bench = bench();
    // It notes that two requests per cluster say little.
    let placing = bench.eldr("place b.eldr t.jsonl --gpus 2 -o placed");
    assert_eq!(placing.code, 0, "{}", placing.stderr);
    let command = format!(
        "{QUICK} --blob b.eldr --rate 40 --policies round_robin --verify 3 --accept 2 --load-unit kv_tokens"
    );
    let whole = bench.eldr(&command).succeeded().stdout.clone();
    assert!(
        whole.contains("3 tokens verified per step, 2 accepted"),
        "{whole}"
    );
    let contiguous = bench.eldr(&format!("{command} --ep-ranks 2"));
    let text = &contiguous.succeeded().stdout;
    assert!(text.contains("over 2 GPUs, contiguous"), "{text}");
    let placed = bench.eldr(&format!("{command} --placement placed/placement.json"));
    let text = &placed.succeeded().stdout;
    assert!(
        text.contains("over 2 GPUs, placed for each worker"),
        "{text}"
    );
    let many = bench.eldr(&format!("{command} --ep-ranks 3"));
    assert_eq!(many.code, 1);
    let expected =
        "error: 3 ranks where 1 to 2 can share 2 experts\nhint: give --ep-ranks up to 2\n";
    assert_eq!(many.stderr, expected);
}

/// Rows of t = 3 + 0.5·U + 0.25·B, with U such that both can be told apart, or not.
fn steps(experts: impl Fn(u32) -> u32) -> String {
    let rows = (1..9).map(|batch| {
        let experts = experts(batch);
        let ms = 3.0 + 0.5 * f64::from(experts) + 0.25 * f64::from(batch);
        format!("{batch},{experts},{ms}\n")
    });
    "batch,experts,step_ms\n".to_owned() + &rows.collect::<String>()
}

#[test]
fn step_coefficients_are_fitted_to_measured_steps() {
    let bench = bench();
    bench.write("told.csv", steps(|batch| batch * 5 % 8 + 1));
    bench.write("untold.csv", steps(|batch| 2 * batch));
    let rest = "--blob b.eldr --duration 5 --seeds 1 --policies round_robin --json";
    let ran = bench.eldr(&format!("simulate t.jsonl --fit-steps told.csv {rest}"));
    let shown: Value = serde_json::from_str(&ran.stdout).unwrap();
    let coefficient = |name: &str| shown["step_model"][name].as_f64().unwrap();
    assert!((coefficient("t0_ms") - 3.0).abs() < 1e-6);
    assert!((coefficient("b_ms") - 0.5).abs() < 1e-6);
    assert!((coefficient("c_ms") - 0.25).abs() < 1e-6);
    assert!(shown["step_fit"]["r2"].as_f64().unwrap() > 0.999);
    assert!(ran.stderr.contains("R² 1.000") && !ran.stderr.contains("warning"));
    let ran = bench.eldr(&format!("simulate t.jsonl --fit-steps untold.csv {rest}"));
    assert!(serde_json::from_str::<Value>(&ran.stdout).is_ok());
    let told = &ran.stderr;
    assert!(
        told.contains("warning: b and c are not identified"),
        "{told}"
    );
}

#[test]
fn a_generated_trace_is_one_that_other_commands_read() {
    let bench = Bench::new();
    let generate = "generate --model gpt-oss-120b --workload language -n 3";
    let ran = bench.eldr(&format!("{generate} -o a.jsonl"));
    assert_snapshot!(ran.succeeded().stdout);
    bench
        .eldr(&format!("{generate} --skip 1 -o b.jsonl.gz"))
        .succeeded();
    let ran = bench
        .eldr("simulate a.jsonl b.jsonl.gz --model gpt-oss-120b --duration 5 --seeds 1 --json");
    let shown: Value = serde_json::from_str(&ran.succeeded().stdout).unwrap();
    assert_eq!(shown["requests"], 6);
    let told = transcript(
        &bench,
        &[
            "generate --model gpt-oss-120b --workload language -o missing/a.jsonl",
            "generate --model gpt-oss-120b --workload language -n 0 -o a.jsonl",
            "generate --model gpt-5 --workload language -o a.jsonl",
            "reproduce --seed few",
        ],
    );
    assert_snapshot!(told);
}
