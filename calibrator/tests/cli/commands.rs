//! What the commands do when all is well.

use std::collections::HashMap;
use std::path::Path;

use eldr_calibrator::trace::{self, Record};
use eldr_core::blob::Blob;
use insta::assert_snapshot;
use serde_json::{Value, json};

use crate::bench::{self, Bench, FIT, mask_hashes};

#[test]
fn fit_writes_a_blob_that_inspect_verifies() {
    let bench = Bench::new();
    let fit = bench.write("t.jsonl", bench::trace(true)).eldr(FIT);
    let facts = fit.succeeded().stdout.clone();
    let inspect = bench.eldr("inspect b.eldr");
    let shown = inspect.succeeded().stdout.clone();
    let from_model = |text: &str| text[text.find("model ").unwrap()..].to_owned();
    assert_eq!(
        from_model(&shown),
        from_model(&facts),
        "both show the same facts"
    );
    let text = mask_hashes(&format!(
        "$ eldr {FIT}\n{facts}\n$ eldr inspect b.eldr\n{shown}"
    ));
    assert_snapshot!(text);
}

#[test]
fn options_reach_the_blob() {
    let bench = Bench::new();
    let options = "--model Qwen3-30B-A3B --tau 0.25 --seed 9 --revision 12";
    bench
        .write("t.jsonl", bench::trace(true))
        .eldr(&format!("{FIT} {options}"))
        .succeeded();
    let blob = Blob::from_bytes(&bench.blob("b.eldr")).unwrap();
    assert_eq!((blob.model.as_str(), blob.tau), ("Qwen3-30B-A3B", 0.25));
    assert_eq!((blob.fit.seed, blob.revision), (9, 12));
    assert_eq!(blob.regions, [["decode-0"], ["decode-1"]]);
}

#[test]
fn json_is_one_object_on_stdout() {
    let bench = Bench::new();
    let fit = bench
        .write("t.jsonl", bench::trace(true))
        .eldr(&format!("{FIT} --json"));
    let fit: Value = serde_json::from_str(&fit.succeeded().stdout).unwrap();
    let inspect = bench.eldr("inspect b.eldr --json");
    let inspect: Value = serde_json::from_str(&inspect.succeeded().stdout).unwrap();
    assert_eq!(fit["layer_selection"], "forward_greedy");
    assert_eq!(fit["selection"]["order"].as_array().unwrap().len(), 2);
    assert_eq!(fit["requests"], 4);
    assert_eq!(inspect["regions"][1]["workers"][0], "decode-1");
    for (key, value) in inspect.as_object().unwrap() {
        assert_eq!(&fit[key], value, "fit says the same as inspect about {key}");
    }
}

#[test]
fn the_same_trace_plain_gzip_or_in_parts_gives_the_same_bytes() {
    let bench = Bench::new();
    let text = bench::trace(true);
    let (head, tail) = text.split_at(text.match_indices('\n').nth(1).unwrap().0 + 1);
    bench
        .write("t.jsonl", &text)
        .write("head", head)
        .write("tail", tail);
    let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::best());
    std::io::Write::write_all(&mut gzip, text.as_bytes()).unwrap();
    std::fs::write(bench.path("z"), gzip.finish().unwrap()).unwrap();

    bench.eldr(FIT).succeeded();
    for (input, output) in [("t.jsonl", "again"), ("z", "gzip"), ("head tail", "parts")] {
        bench
            .eldr(&format!(
                "fit {input} -o {output} --workers decode-0,decode-1"
            ))
            .succeeded();
        assert!(bench.blob(output) == bench.blob("b.eldr"), "{output}");
    }
}

#[test]
fn without_decode_counts_all_layers_are_used_and_rho_is_unknown() {
    let bench = Bench::new();
    let note = "note: all 2 layers are used: 0 of 4 requests have `decode` counts, 3 are needed to choose layers\n";
    let fit = bench.write("t.jsonl", bench::trace(false)).eldr(FIT);
    assert_eq!((fit.code, fit.stderr.as_str()), (0, note));
    for shown in [&fit, bench.eldr("inspect b.eldr").succeeded()] {
        for expected in [
            "layers   2 of 2: 0 1\n",
            "rho      unknown: the traces had no decode counts\n",
        ] {
            assert!(shown.stdout.contains(expected), "{}", shown.stdout);
        }
    }
    let fit = bench.eldr(&format!("{FIT} --json"));
    let inspect = bench.eldr("inspect b.eldr --json");
    for shown in [&fit.stdout, &inspect.stdout] {
        let shown: Value = serde_json::from_str(shown).unwrap();
        assert_eq!(shown["rho"], Value::Null);
    }
}

/// The log was written by Envoy 1.40 with the log format of `envoy/envoy.yaml`; the signatures are
/// those of shipped calibration requests, whose ids the log has. Five of its lines have none: model
/// list, health check, a failed prefill, a decision without signature, and bytes that are no HTTP,
/// whose line has no id either. One request is there twice.
#[test]
fn an_access_log_fits_like_the_trace_of_its_requests() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"));
    let log = std::fs::read_to_string(folder.join("tests/data/envoy_access_log.jsonl")).unwrap();
    let shipped = folder.join("../examples/data/small-moe/task_calibration.jsonl.gz");
    let shipped: HashMap<String, Record> = trace::read(shipped)
        .unwrap()
        .map(Result::unwrap)
        .map(|record| (record.id.clone(), record))
        .collect();
    let bench = Bench::new();
    let mut writer = trace::Writer::create(bench.path("trace")).unwrap();
    for line in log.lines() {
        let line: Value = serde_json::from_str(line).unwrap();
        if let Some(record) = line["id"].as_str().and_then(|id| shipped.get(id)) {
            let (id, prefill) = (record.id.clone(), record.prefill.clone());
            let record = Record {
                id,
                prefill,
                ..Record::default()
            };
            writer.write(&record).unwrap();
        }
    }
    writer.finish().unwrap();

    let workers = "--workers a,b,c,d";
    let fit = bench
        .write("access.log", &log)
        .eldr(&format!("fit access.log -o of-log {workers}"));
    assert_eq!(fit.code, 0, "{}", fit.stderr);
    let expected = "trace    41 requests, 0 with decode counts; skipped without `prefill`: 5\n";
    assert!(fit.stdout.contains(expected), "{}", fit.stdout);
    let fit = bench.eldr(&format!("fit trace -o of-trace {workers} --json"));
    let report: Value = serde_json::from_str(&fit.stdout).unwrap();
    assert_eq!(
        (&report["requests"], &report["records_skipped"]),
        (&41.into(), &0.into())
    );
    assert!(bench.blob("of-log") == bench.blob("of-trace"));
}

#[test]
fn a_revision_that_does_not_grow_is_noted() {
    let bench = Bench::new();
    let fit = |options: &str| bench.eldr(&format!("{FIT} {options}"));
    bench.write("t.jsonl", bench::trace(true));
    fit("--revision 7").succeeded();
    fit("--revision 7").succeeded(); // the same bytes
    fit("--revision 8").succeeded();
    let note =
        "note: b.eldr had revision 8; gateways that have it take only a higher one: --revision 9\n";
    for options in ["--revision 8 --tau 0.2", "--revision 3"] {
        let ran = fit(options);
        assert_eq!((ran.code, ran.stderr.as_str()), (0, note));
        fit("--revision 8 --tau 0.2");
    }
}

#[test]
fn help_texts() {
    let bench = Bench::new();
    let help = |command: &str| {
        let text = bench.eldr(command);
        format!("$ eldr {command}\n{}\n", text.succeeded().stdout)
    };
    let commands = [
        "--help",
        "fit --help",
        "inspect --help",
        "remap --help",
        "place --help",
        "explain --help",
        "generate --help",
        "reproduce --help",
        "simulate --help",
        "advise --help",
        "report --help",
        "record --help",
        "serve --help",
        "envoy --help",
        "completions --help",
        "convert --help",
        "convert access-log --help",
        "convert import-centroids --help",
        "convert export-centroids --help",
        "convert calibration --help",
        "convert gpt-oss --help",
        "convert small-moe --help",
    ];
    let text = commands.map(help).concat();
    assert_snapshot!(text);
}

#[test]
fn remap_gives_the_regions_to_other_workers() {
    let bench = Bench::new();
    bench
        .write("t.jsonl", bench::trace(true))
        .eldr(FIT)
        .succeeded();
    let mut told = String::new();
    for command in [
        "remap b.eldr --workers decode-1,decode-0 -o b.eldr",
        "remap b.eldr --workers decode-2,decode-1 -o b.eldr",
        "remap b.eldr --workers decode-1,decode-2,decode-3 -o b.eldr",
        "remap b.eldr --workers decode-3 -o b.eldr",
    ] {
        let ran = bench.eldr(command);
        told += &format!("$ eldr {command}\n{}\n", ran.succeeded().stdout);
    }
    assert_snapshot!(mask_hashes(&told));

    let ran = bench.eldr("remap b.eldr --workers a,b -o c.eldr --revision 3 --json");
    let report: Value = serde_json::from_str(&ran.stdout).unwrap();
    assert_eq!((&report["revision"], ran.code), (&3.into(), 0));
    let note = "note: b.eldr has revision 5; gateways that have it take only a higher one, not 3\n";
    assert_eq!(ran.stderr, note);
    bench.eldr("inspect c.eldr").succeeded();
}

#[test]
fn several_workers_share_a_region_and_one_serves_several() {
    let bench = Bench::new();
    bench.write("t.jsonl", bench::trace(true));
    for (workers, regions, expected) in [
        ("a,b,c,d", 2, json!([["a", "b"], ["c", "d"]])),
        ("a,b", 4, json!([["a"], ["a"], ["b"], ["b"]])),
    ] {
        let command =
            format!("fit t.jsonl -o {regions}.eldr --workers {workers} --regions {regions} --json");
        let report: Value = serde_json::from_str(&bench.eldr(&command).succeeded().stdout).unwrap();
        let served: Vec<&Value> = report["regions"].as_array().unwrap().iter().collect();
        let mut served: Vec<Value> = served
            .iter()
            .map(|region| region["workers"].clone())
            .collect();
        // Which regions are alike, and so share a worker, is up to the centroids.
        served.sort_by_key(Value::to_string);
        assert_eq!(Value::from(served), expected);
    }
}

#[test]
fn held_out_quality_is_always_reported() {
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples/data/small-moe");
    let trace = |name: &str| data.join(format!("{name}.jsonl.gz")).display().to_string();
    let bench = Bench::new();
    let workers = "--workers a,b,c,d";
    let fit = |options: &str| {
        let command = format!(
            "fit {} -o {}.eldr {workers} {options}",
            trace("task_calibration"),
            options.len(),
        );
        bench.eldr(command.trim_end()).succeeded().stdout.clone()
    };
    let text = fit("");
    for line in [
        "held out 145 requests that were not fitted to: rho 0.",
        "alike    0.",
        "balance  the busiest worker gets 1.",
    ] {
        assert!(text.contains(line), "{text}");
    }
    let report: Value = serde_json::from_str(&fit("--json")).unwrap();
    let held_out = &report["held_out"];
    assert_eq!(
        (&held_out["requests"], &report["warnings"]),
        (&145.into(), &json!([]))
    );
    assert!(held_out["rho"].as_f64().unwrap() > 0.75, "{held_out}");
    let chosen = held_out["trials"].as_array().unwrap().last().unwrap();
    assert_eq!(
        chosen["regions"].as_u64().unwrap() as usize,
        report["regions"].as_array().unwrap().len()
    );

    // On requests of another day, all of the calibration is fitted to.
    let other = fit(&format!("--json --held-out {}", trace("task_evaluation")));
    let report: Value = serde_json::from_str(&other).unwrap();
    assert_eq!(
        (&report["held_out"]["requests"], &report["requests"]),
        (&682.into(), &580.into())
    );
    assert!(report["held_out"]["rho"].as_f64().unwrap() > 0.75);
}

#[test]
fn every_signature_of_counts_fits() {
    let bench = Bench::new();
    bench.write("t.jsonl", bench::trace(true));
    let fit = "fit t.jsonl --workers decode-0,decode-1";
    for signature in ["count-idf", "count", "sqrt", "binary"] {
        let ran = bench.eldr(&format!(
            "{fit} -o {signature}.eldr --signature {signature} --json"
        ));
        let report: Value = serde_json::from_str(&ran.succeeded().stdout).unwrap();
        assert_eq!(report["signature"], signature.replace('-', "_"));
    }
    for weight in [
        "deviation",
        "dispersion",
        "share-idf",
        "mean-idf",
        "presence-idf",
    ] {
        let ran = bench.eldr(&format!("{fit} -o {weight}.eldr --weight {weight} --json"));
        let report: Value = serde_json::from_str(&ran.succeeded().stdout).unwrap();
        assert_eq!(report["weight"], weight.replace('-', "_"));
    }
}

#[test]
fn the_shipped_calibration_traces_fit() {
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples/data/small-moe");
    for workload in ["task", "language"] {
        let trace = data.join(format!("{workload}_calibration.jsonl.gz"));
        let bench = Bench::new();
        let workers = "decode-0,decode-1,decode-2,decode-3";
        let arguments = format!(
            "fit {} -o b.eldr --workers {workers} --json",
            trace.display()
        );
        let fit: Value = serde_json::from_str(&bench.eldr(&arguments).succeeded().stdout).unwrap();
        assert!(
            fit["rho"].as_f64().unwrap() > 0.7,
            "{workload}: rho {}",
            fit["rho"]
        );
        assert_eq!(fit["converged"], true);
        let regions = fit["regions"].as_array().unwrap();
        for region in regions {
            let fair = 1.0 / regions.len() as f64;
            assert!(
                (region["share"].as_f64().unwrap() - fair).abs() < 0.01,
                "{region}"
            );
        }
    }
}

#[test]
fn explain_shows_the_decision_and_what_it_rests_on() {
    let bench = Bench::new();
    bench
        .write("t.jsonl", bench::trace(true))
        .eldr(FIT)
        .succeeded();
    let explain = "explain b.eldr --trace t.jsonl --id d --loads decode-0=7,decode-1=2";
    let text = bench.eldr(explain).succeeded().stdout.clone();
    let header = bench::line("d", [0, 3, 0, 2], false);
    let header: Value = serde_json::from_str(&header).unwrap();
    let header = header["prefill"].as_str().unwrap();
    let by_header = format!("explain b.eldr --signature {header} --loads decode-0=7,decode-1=2");
    assert_eq!(bench.eldr(&by_header).succeeded().stdout, text);

    let json = bench.eldr(&format!("{explain} --json"));
    let json: Value = serde_json::from_str(&json.succeeded().stdout).unwrap();
    assert_eq!(
        (&json["worker"], &json["widened"]),
        (&"decode-1".into(), &true.into())
    );
    let spare = bench.eldr("explain b.eldr --trace t.jsonl --id d --policy least_loaded --loads decode-0=1,decode-1=1,x=0");
    let note = "note: x serves no region of the blob; it gets fallback traffic only\n";
    assert_eq!((spare.code, spare.stderr.as_str()), (0, note));
    assert!(
        spare.stdout.starts_with("decision x; reason blind\n"),
        "{}",
        spare.stdout
    );
    let running = "--policy marginal --step-exponent 1 --running decode-0=a+b,decode-1=c";
    let told = bench::trace(true).replace("\"prefill\"", "\"prompt_tokens\":3,\"prefill\"");
    bench.write("told.jsonl", told);
    let by_batches =
        |trace| bench.eldr(&format!("explain b.eldr --trace {trace} --id d {running}"));
    assert_snapshot!(format!(
        "$ eldr {explain}\n{text}\n$ eldr … --policy least_loaded …\n{}\n$ eldr … {running}\n{}\n{}",
        spare.stdout,
        by_batches("told.jsonl").succeeded().stdout,
        by_batches("t.jsonl").succeeded().stdout
    ));
}

#[test]
fn every_shell_gets_completions_of_every_command() {
    let bench = Bench::new();
    let help = bench.eldr("--help");
    let (_, commands) = help.succeeded().stdout.split_once("Commands:\n").unwrap();
    let commands: Vec<&str> = commands
        .lines()
        .map_while(|line| line.strip_prefix("  ")?.split_whitespace().next())
        .collect();
    assert!(
        commands.contains(&"fit") && commands.contains(&"completions"),
        "{commands:?}"
    );
    for shell in ["bash", "elvish", "fish", "powershell", "zsh"] {
        let ran = bench.eldr(&format!("completions {shell}"));
        for command in &commands {
            assert!(
                ran.succeeded().stdout.contains(command),
                "{shell}: {command}"
            );
        }
    }
    let script = bench.eldr("completions bash").stdout;
    bench.write("eldr.bash", script);
    let check = std::process::Command::new("bash")
        .args(["-c", "source eldr.bash && COMP_WORDS=(eldr exp) COMP_CWORD=1 && _eldr eldr exp eldr && echo ${COMPREPLY[@]}"])
        .current_dir(bench.dir.path())
        .output()
        .unwrap();
    assert_eq!(String::from_utf8_lossy(&check.stdout), "explain\n");
}
