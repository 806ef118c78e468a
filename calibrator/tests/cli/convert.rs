//! Other formats: what they become, and what a person is told of files that are none of them.

use std::fs::File;
use std::io::Write as _;
use std::path::{Path, PathBuf};

use eldr_calibrator::npz::Npz;
use eldr_calibrator::trace;
use eldr_core::transform::SignatureKind;
use insta::assert_snapshot;
use npyz::WriterBuilder as _;
use npyz::npz::NpzWriter;
use serde_json::Value;

use crate::bench::{self, Bench, line};
use crate::errors::transcript;

fn data(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/data")
        .join(name)
}

/// Writes a `.npz` with these arrays: name, header, and how many bytes of data. NumPy's own writers would
/// not write such headers.
fn forged(path: &Path, arrays: &[(&str, &str, usize)]) {
    let mut npz = NpzWriter::create(path).unwrap();
    for (name, header, bytes) in arrays {
        let zip = npz.zip_writer();
        zip.start_file(format!("{name}.npy"), Default::default())
            .unwrap();
        zip.write_all(b"\x93NUMPY\x01\0").unwrap();
        zip.write_all(&u16::try_from(header.len()).unwrap().to_le_bytes())
            .unwrap();
        zip.write_all(header.as_bytes()).unwrap();
        zip.write_all(&vec![0; *bytes]).unwrap();
    }
}

#[test]
fn an_official_calibration_becomes_a_trace() {
    let bench = Bench::new();
    let archive = data("parity/h_fit_tiny_calibration.npz");
    let ran = bench.eldr(&format!(
        "convert calibration {} -o t.jsonl.gz",
        archive.display()
    ));
    assert_eq!(ran.succeeded().stdout, "t.jsonl.gz: 40 requests\n");
    let mut npz = Npz::open(&archive).unwrap();
    let ids = npz.array::<String>("request_ids").unwrap();
    let [prefill, decode] =
        ["prefill_counts", "decode_counts"].map(|name| npz.array::<i32>(name).unwrap());
    let tokens = npz.array::<i64>("prompt_tokens").unwrap();
    let records = trace::read(bench.path("t.jsonl.gz")).unwrap();
    for (i, record) in records.map(Result::unwrap).enumerate() {
        assert_eq!(record.id, ids.data[i]);
        assert_eq!(record.prompt_tokens, Some(tokens.data[i] as u64));
        let signature = record.prefill_signature().unwrap().unwrap();
        assert_eq!(signature.prompt_tokens(), record.prompt_tokens);
        let of = |signature: &eldr_core::Signature| -> Vec<i32> {
            signature
                .counts()
                .iter()
                .map(|&count| count.into())
                .collect()
        };
        assert_eq!(of(&signature), prefill.row(i));
        assert_eq!(
            of(&record.decode_signature().unwrap().unwrap()),
            decode.row(i)
        );
    }
    // And it fits.
    bench
        .eldr("fit t.jsonl.gz -o b.eldr --workers a,b,c,d")
        .succeeded();
}

#[test]
fn official_centroids_go_in_and_out() {
    let bench = Bench::new();
    let official = data("parity/h_fit_tiny_idf_km_frozen.json");
    let import = format!("convert import-centroids {} -o b.eldr", official.display());
    let workers = "--workers a,b,c,d --tau 0.2 --revision 3";
    bench.eldr(&format!("{import} {workers}")).succeeded();
    let shown = bench.eldr("inspect b.eldr --json");
    let shown: Value = serde_json::from_str(&shown.succeeded().stdout).unwrap();
    assert_eq!(
        (&shown["model"], &shown["revision"]),
        (&"tiny6".into(), &3.into())
    );
    let ran = bench.eldr("convert export-centroids b.eldr -o c.json");
    assert_eq!(ran.succeeded().stdout, "c.json: 4 regions, 3739 bytes\n");
    assert!(bench.blob("c.json") == std::fs::read(official).unwrap());
}

#[test]
fn a_fitted_blob_goes_out_and_in() {
    let bench = Bench::new();
    bench
        .write("t.jsonl", bench::trace(true))
        .eldr(bench::FIT)
        .succeeded();
    bench
        .eldr("convert export-centroids b.eldr -o c.json")
        .succeeded();
    bench
        .eldr("convert import-centroids c.json -o again")
        .succeeded();
    assert!(bench.blob("again") == bench.blob("b.eldr"));
}

#[test]
fn an_access_log_converts_to_what_fits_alike() {
    let bench = Bench::new();
    let log = data("envoy_access_log.jsonl");
    std::fs::copy(&log, bench.path("access.log")).unwrap();
    let ran = bench.eldr("convert access-log access.log -o t.jsonl");
    let expected =
        "t.jsonl: 41 requests; left out: 5 without a signature, 0 lines that are no JSON objects\n";
    assert_eq!(ran.succeeded().stdout, expected);
    for trace in ["access.log", "t.jsonl"] {
        let fit = format!("fit {trace} -o {trace}.eldr --workers a,b,c,d");
        assert_eq!(bench.eldr(&fit).code, 0);
    }
    assert!(bench.blob("access.log.eldr") == bench.blob("t.jsonl.eldr"));
    let shown = bench.eldr("inspect t.jsonl --json");
    let shown: Value = serde_json::from_str(&shown.succeeded().stdout).unwrap();
    assert_eq!(
        (&shown["records"], &shown["with_prefill"]),
        (&41.into(), &41.into())
    );
    assert!(
        shown["span_s"].as_f64().is_some_and(|span| span > 0.0),
        "{shown}"
    );
}

#[test]
fn a_trace_is_verified_and_shown() {
    let bench = Bench::new();
    let shipped = "../examples/data/small-moe/task_evaluation.jsonl.gz";
    let shipped = Path::new(env!("CARGO_MANIFEST_DIR")).join(shipped);
    std::fs::copy(shipped, bench.path("t.jsonl.gz")).unwrap();
    assert_snapshot!(bench.eldr("inspect t.jsonl.gz").succeeded().stdout);
}

#[test]
fn traces_that_do_not_pass() {
    let bench = Bench::new();
    let mixed = line("a", [1, 2, 3, 4], false) + r#"{"id":"e","prefill":":AQA=:;l=1;e=1"}"#;
    let layers = line("a", [1, 2, 3, 4], false)
        + r#"{"id":"b","prefill":":AQACAA==:;l=2;e=2;layers=\"1\""}"#;
    bench
        .write("mixed", mixed)
        .write("layers", layers)
        .write(
            "topk",
            r#"{"id":"a","prefill":":AQACAA==:;l=1;e=2","decode_tokens":1,"decode_topk":"Bw=="}"#,
        )
        .write("cut", "{\"id\":\"a\",\"pre");
    assert_snapshot!(transcript(
        &bench,
        &[
            "inspect mixed",
            "inspect layers",
            "inspect topk",
            "inspect cut"
        ],
    ));
}

#[test]
fn recordings_that_cannot_be_converted() {
    let bench = Bench::new();
    let other = data("parity/b_idf_full.npz");
    let header = |dtype: &str, shape: &str| {
        format!("{{'descr': '{dtype}', 'fortran_order': False, 'shape': ({shape}), }}\n")
    };
    bench
        .write("text", "no archive")
        .write("other.npz", std::fs::read(other).unwrap());
    let whole = std::fs::read(data("parity/h_fit_tiny_calibration.npz")).unwrap();
    bench.write("cut.npz", &whole[..whole.len() / 2]);
    let ids = header("<U1", "2,");
    let cases = [
        (
            "wrapping.npz",
            header("<u2", "2, 4294967296, 4294967296, 4294967296"),
            0,
        ),
        ("huge.npz", header("<u2", "2, 65537, 1"), 0),
        ("short.npz", header("<u2", "2, 1, 3"), 6),
        ("rows.npz", header("<u2", "3, 1, 3"), 18),
        ("axes.npz", header("<u2", "2, 3"), 12),
        ("wide.npz", header("<U99999999", "2, 1, 3"), 0),
        ("float.npz", header("<f4", "2, 1, 3"), 24),
    ];
    for (name, prefill, bytes) in &cases {
        let counts = header("<u2", "2, 1, 3");
        forged(
            &bench.path(name),
            &[
                ("id", &ids, 8),
                ("prefill_counts", prefill, *bytes),
                ("decode_counts", &counts, 12),
                ("domain", &ids, 8),
                ("in_mix", &header("|b1", "2,"), 2),
                ("n_prompt", &header("<u2", "2,"), 4),
                ("n_decode", &header("<u2", "2,"), 4),
                ("prefix_group", &header("<i2", "2,"), 4),
                ("prefix_len", &header("<u2", "2,"), 4),
            ],
        );
    }
    forged(
        &bench.path("many.npz"),
        &[("id", &header("<U9", "99999999,"), 0)],
    );
    let mut commands: Vec<String> = ["none", "text", "other.npz", "many.npz"]
        .iter()
        .copied()
        .chain(cases.iter().map(|(name, ..)| *name))
        .map(|name| format!("convert small-moe {name} -o t.jsonl"))
        .collect();
    commands.extend(
        ["cut.npz", "other.npz"].map(|name| format!("convert calibration {name} -o t.jsonl")),
    );
    let commands: Vec<&str> = commands.iter().map(String::as_str).collect();
    assert_snapshot!(transcript(&bench, &commands));
    assert!(!bench.path("t.jsonl").exists());
}

/// A calibration archive of one request on one layer of two experts.
fn calibration(path: &Path, metadata: &str, count: i32, tokens: i64) {
    let mut npz: NpzWriter<std::io::BufWriter<File>> = NpzWriter::create(path).unwrap();
    let text = |npz: &mut NpzWriter<_>, name: &str, shape: &[u64], value: &str| {
        let dtype = npyz::DType::Plain("<U99".parse().unwrap());
        let builder = npz
            .array::<str>(name, Default::default())
            .unwrap()
            .dtype(dtype);
        let mut writer = builder.shape(shape).begin_nd().unwrap();
        writer.push(value).unwrap();
        writer.finish().unwrap();
    };
    text(&mut npz, "metadata", &[], metadata);
    text(&mut npz, "request_ids", &[1], "r1");
    for name in ["prefill_counts", "decode_counts"] {
        let builder = npz.array(name, Default::default()).unwrap().default_dtype();
        let mut writer = builder.shape(&[1, 1, 2]).begin_nd().unwrap();
        writer.extend([count, 1]).unwrap();
        writer.finish().unwrap();
    }
    for name in ["prompt_tokens", "decode_tokens"] {
        let builder = npz.array(name, Default::default()).unwrap().default_dtype();
        let mut writer = builder.shape(&[1]).begin_nd().unwrap();
        writer.push(&tokens).unwrap();
        writer.finish().unwrap();
    }
}

#[test]
fn calibrations_that_cannot_be_converted() {
    let bench = Bench::new();
    let format = r#"{"format":"eldr-calibration-v1"}"#;
    calibration(&bench.path("good.npz"), format, 70_000, 9);
    calibration(&bench.path("negative.npz"), format, -3, 9);
    calibration(&bench.path("tokens.npz"), format, 1, -1);
    calibration(
        &bench.path("v2.npz"),
        r#"{"format":"eldr-calibration-v2"}"#,
        1,
        1,
    );
    calibration(&bench.path("bare.npz"), "NaN", 1, 1);
    let commands = ["negative", "tokens", "v2", "bare"]
        .map(|name| format!("convert calibration {name}.npz -o t.jsonl"));
    assert_snapshot!(transcript(&bench, &commands.each_ref().map(String::as_str)));
    bench
        .eldr("convert calibration good.npz -o t.jsonl")
        .succeeded();
    let record = trace::read(bench.path("t.jsonl"))
        .unwrap()
        .next()
        .unwrap()
        .unwrap();
    let counts = record.prefill_signature().unwrap().unwrap();
    assert_eq!(counts.counts(), [u16::MAX, 1], "counts saturate");
}

#[test]
fn an_official_calibration_can_be_fitted_by_its_gate_sums() {
    let bench = Bench::new();
    let archive = data("parity/h_fit_tiny_calibration.npz");
    let convert = format!(
        "convert calibration {} --gate -o t.jsonl",
        archive.display()
    );
    bench.eldr(&convert).succeeded();
    let sums = Npz::open(&archive)
        .unwrap()
        .array::<f32>("gate_probabilities")
        .unwrap();
    let records = trace::read(bench.path("t.jsonl")).unwrap();
    for (i, record) in records.map(Result::unwrap).enumerate() {
        let prefill = record.prefill_signature().unwrap().unwrap();
        let found = record.gate_sums(SignatureKind::GateProb, &prefill);
        assert_eq!(found.unwrap().unwrap(), sums.row(i));
    }
    let fit = "fit t.jsonl -o b.eldr --workers a,b --signature gate-prob";
    let ran = bench.eldr(fit);
    assert_eq!(ran.code, 0);
    assert!(
        ran.stderr.contains("gateways refuse this blob"),
        "{}",
        ran.stderr
    );
}

#[test]
fn centroids_that_cannot_be_converted() {
    let bench = Bench::new();
    let base = r#"{"model":"m","k":1,"L":2,"e":2,"variant":"count_idf","sig_dtype":"<i2","layer_mask":[1],"sig_idf":[1.0,0.5],"centroids":[[1.0,0.0]]}"#;
    let mut commands = Vec::new();
    for (name, from, to) in [
        ("none", base, ""),
        ("list", base, "[1]"),
        ("cut", r#"[[1.0,0.0]]}"#, "[[1.0,"),
        ("nan", "[[1.0,0.0]]", "[[NaN,0.0]]"),
        ("twice", r#""k":1"#, r#""k":1,"k":1"#),
        ("huge", r#""L":2,"e":2"#, r#""L":65536,"e":65536"#),
        ("gate", "count_idf", "gate_prob_all"),
        ("float", r#""k":1"#, r#""k":1.5"#),
        ("short", "[[1.0,0.0]]", "[[1.0]]"),
        ("long", "[[1.0,0.0]]", "[[2.0,0.0]]"),
        ("mask", "[1]", "[2]"),
        ("idf", "[1.0,0.5]", "[1.0,-0.5]"),
        ("mean", r#""k":1"#, r#""k":1,"sig_mean":[0.0]"#),
    ] {
        bench.write(name, base.replace(from, to));
        commands.push(format!("convert import-centroids {name} -o b --workers a"));
    }
    bench.write("good", base);
    commands.push("convert import-centroids good -o b".into());
    commands.push("convert import-centroids good -o b --workers a,b".into());
    commands.push("convert import-centroids good -o no/b --workers a".into());
    commands.push("convert export-centroids good -o c.json".into());
    let commands: Vec<&str> = commands.iter().map(String::as_str).collect();
    assert_snapshot!(transcript(&bench, &commands));
    assert!(!bench.path("b").exists());
}

#[test]
fn logs_and_recordings_of_lines_that_cannot_be_converted() {
    let bench = Bench::new();
    bench
        .write("empty", "")
        .write("text", "[info] starting\n")
        .write("cut", "{\"id\":\"a\",\"pre")
        .write("bare", r#"{"id":"a","sig":":AQA=:;l=1;e=1"}"#)
        .write("anonymous", r#"{"prefill":":AQA=:;l=1;e=1"}"#)
        .write("malformed", r#"{"id":"a","prefill":":AQA=:;l=1;e=2"}"#)
        .write(
            "time",
            r#"{"id":"a","prefill":":AQA=:;l=1;e=1","time":"noon"}"#,
        );
    let mut commands: Vec<String> = [
        "none",
        "empty",
        "text",
        "cut",
        "bare",
        "anonymous",
        "malformed",
        "time",
    ]
    .iter()
    .map(|name| format!("convert access-log {name} -o t.jsonl"))
    .collect();
    commands.push("convert access-log bare -o t.jsonl --map prefill=/a/b".into());
    commands.push("convert gpt-oss none -o t.jsonl".into());
    commands.push("convert gpt-oss text -o t.jsonl".into());
    commands.push("convert gpt-oss text -o t.jsonl --experts 257".into());
    let commands: Vec<&str> = commands.iter().map(String::as_str).collect();
    assert_snapshot!(transcript(&bench, &commands));
}
