//! `eldr place`.

use std::path::Path;

use insta::assert_snapshot;
use serde_json::Value;

use crate::bench::{Bench, line, mask_hashes};

/// The trace of four requests with tokens; `b.eldr` is fitted to it.
fn bench() -> Bench {
    let bench = Bench::new();
    let requests = [
        ("a", [3, 0, 2, 1]),
        ("b", [0, 4, 1, 3]),
        ("c", [5, 0, 5, 0]),
        ("d", [0, 3, 0, 3]),
    ];
    let trace = requests.map(|(id, counts)| {
        let tokens = counts[0] + counts[1];
        let tokens = format!(r#"{{"prompt_tokens":{tokens},"decode_tokens":{tokens},"#);
        line(id, counts, true).replacen('{', &tokens, 1)
    });
    bench.write("t.jsonl", trace.concat());
    let fit = "fit t.jsonl -o b.eldr --workers decode-0,node/1";
    bench.eldr(fit).succeeded();
    bench
}

/// A blob for the shipped traces, and where they are.
fn small_moe() -> (Bench, String) {
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples/data/small-moe");
    let bench = Bench::new();
    let fit = format!(
        "fit {}/task_calibration.jsonl.gz -o b.eldr --workers decode-0,decode-1,decode-2,decode-3",
        data.display()
    );
    bench.eldr(&fit).succeeded();
    let trace = data.join("task_evaluation.jsonl.gz").display().to_string();
    (bench, trace)
}

#[test]
fn placements_are_written_as_engines_read_them() {
    let bench = bench();
    let command = "place b.eldr t.jsonl --gpus 2 -o out/p --format tensorrt-llm,eldr,eplb,sglang --dense-layers 1";
    let ran = bench.eldr(command);
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    let mut text = format!("$ eldr {command}\n{}{}", ran.stderr, ran.stdout);
    let mut names: Vec<_> = std::fs::read_dir(bench.path("out/p"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    for name in names {
        let content = bench.blob(&format!("out/p/{name}"));
        text += &format!(
            "\n$ cat out/p/{name}\n{}",
            String::from_utf8(content).unwrap()
        );
    }
    assert_snapshot!(mask_hashes(&text));
}

#[test]
fn json_has_every_layer_and_the_same_bytes_each_time() {
    let (bench, trace) = small_moe();
    let command = format!("place b.eldr {trace} --gpus 4 --redundant 4 --batch 8 --json");
    let report = bench.eldr(&command).succeeded().stdout.clone();
    assert_eq!(bench.eldr(&command).stdout, report);
    let report: Value = serde_json::from_str(&report).unwrap();
    assert_eq!(
        (&report["counts"], &report["objective"]),
        (&"decode".into(), &"distinct".into())
    );
    for cluster in report["clusters"].as_array().unwrap() {
        let layers = cluster["layers"].as_array().unwrap();
        assert_eq!(layers.len(), 6);
        for layer in layers {
            let of = |placement: &str| layer[placement]["distinct_max"].as_f64().unwrap();
            let bound = layer["bound"].as_f64().unwrap();
            assert!(bound <= of("placed") * (1.0 + 1e-9), "{layer}");
            assert!(
                of("placed") < of("eplb") && of("eplb") < of("contiguous") * 1.01,
                "{layer}"
            );
            assert!(layer["gap"].as_f64().unwrap() < 0.001, "{layer}");
        }
    }
}

#[test]
fn a_placement_for_tokens_balances_them() {
    let (bench, trace) = small_moe();
    for options in ["", " --redundant 8 --nodes 2"] {
        let command = format!("place b.eldr {trace} --gpus 4 --objective tokens --json{options}");
        let report: Value = serde_json::from_str(&bench.eldr(&command).succeeded().stdout).unwrap();
        for cluster in report["clusters"].as_array().unwrap() {
            let of = |placement: &str| {
                cluster["summary"][placement]["token_balance"]
                    .as_f64()
                    .unwrap()
            };
            assert!(
                of("placed") > 0.999 && of("placed") > of("eplb"),
                "{}",
                cluster["summary"]
            );
            assert!(of("eplb") > of("contiguous"));
        }
    }
}
