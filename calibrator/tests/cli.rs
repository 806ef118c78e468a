//! The `eldr` binary: exit codes, what goes to stdout and what to stderr.

use std::path::{Path, PathBuf};
use std::process::Command;

use eldr_core::blob::Blob;
use eldr_core::signature::{Encoding, Geometry, Signature};
use serde_json::Value;
use tempfile::TempDir;

struct Ran {
    code: i32,
    stdout: String,
    stderr: String,
}

struct Bench {
    dir: TempDir,
}

impl Bench {
    fn new() -> Self {
        Bench {
            dir: tempfile::tempdir().unwrap(),
        }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Runs `eldr` in the folder.
    fn eldr(&self, arguments: &str) -> Ran {
        let output = Command::new(env!("CARGO_BIN_EXE_eldr"))
            .args(arguments.split(' '))
            .current_dir(self.dir.path())
            .output()
            .unwrap();
        Ran {
            code: output.status.code().unwrap(),
            stdout: String::from_utf8(output.stdout).unwrap(),
            stderr: String::from_utf8(output.stderr).unwrap(),
        }
    }

    fn write(&self, name: &str, text: &str) -> &Self {
        std::fs::write(self.path(name), text).unwrap();
        self
    }

    fn blob(&self, name: &str) -> Vec<u8> {
        std::fs::read(self.path(name)).unwrap()
    }
}

impl Ran {
    #[track_caller]
    fn failed(&self, stderr: &str) {
        assert_eq!((self.code, self.stderr.as_str()), (1, stderr));
        assert_eq!(self.stdout, "");
    }

    #[track_caller]
    fn succeeded(&self) -> &Self {
        assert_eq!((self.code, self.stderr.as_str()), (0, ""));
        self
    }

    #[track_caller]
    fn misused(&self, stderr: &str) {
        assert_eq!(self.code, 2, "{}", self.stderr);
        assert!(self.stderr.contains(stderr), "{}", self.stderr);
        assert!(self.stderr.contains("try '--help'"), "{}", self.stderr);
        assert_eq!(self.stdout, "");
    }
}

fn line(id: &str, counts: [u16; 4], decode: bool) -> String {
    let geometry = Geometry {
        layers: 2,
        experts: 2,
    };
    let header = Signature::dense(geometry, counts.to_vec(), None)
        .unwrap()
        .encode(Encoding::U16);
    let decode = if decode {
        format!(r#","decode":"{header}""#)
    } else {
        String::new()
    };
    format!("{{\"id\":\"{id}\",\"prefill\":\"{header}\"{decode}}}\n")
}

/// Four requests of two kinds.
fn trace(decode: bool) -> String {
    [
        ("a", [3, 0, 2, 1]),
        ("b", [0, 4, 1, 2]),
        ("c", [5, 0, 1, 0]),
        ("d", [0, 3, 0, 2]),
    ]
    .map(|(id, counts)| line(id, counts, decode))
    .concat()
}

const FIT: &str = "fit t.jsonl -o b.eldr --workers decode-0,decode-1";

#[test]
fn fit_writes_a_blob_that_inspect_verifies() {
    let bench = Bench::new();
    let fit = bench.write("t.jsonl", &trace(true)).eldr(FIT);
    let facts = fit.succeeded().stdout.clone();
    assert!(facts.starts_with("blob     b.eldr, "), "{facts}");

    let inspect = bench.eldr("inspect b.eldr");
    let shown = &inspect.succeeded().stdout;
    assert!(shown.starts_with(&format!(
        "blob     b.eldr, {} bytes, verified\n",
        bench.blob("b.eldr").len()
    )));
    let from_model = |text: &str| text[text.find("model ").unwrap()..].to_owned();
    assert_eq!(
        from_model(shown),
        from_model(&facts),
        "both show the same facts"
    );
    for expected in ["decode-0", "decode-1", "50.0 %", "seed 1", "tau 0.1"] {
        assert!(shown.contains(expected), "{expected} in {shown}");
    }
}

#[test]
fn options_reach_the_blob() {
    let bench = Bench::new();
    let options = "--model Qwen3-30B-A3B --tau 0.25 --seed 9 --revision 12";
    bench
        .write("t.jsonl", &trace(true))
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
        .write("t.jsonl", &trace(true))
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
    let text = trace(true);
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
fn without_decode_counts_the_fit_says_that_all_layers_are_used() {
    let bench = Bench::new();
    let fit = bench.write("t.jsonl", &trace(false)).eldr(FIT);
    assert_eq!(fit.code, 0);
    assert_eq!(
        fit.stderr,
        "note: all 2 layers are used: 0 of 4 requests have `decode` counts, 3 are needed to choose layers\n"
    );
    assert!(
        fit.stdout.contains("layers   2 of 2: 0 1\n"),
        "{}",
        fit.stdout
    );
}

#[test]
fn records_without_a_signature_are_skipped_and_counted() {
    let bench = Bench::new();
    let text = trace(true) + "{\"id\":\"health check\"}\n";
    let fit = bench.write("t.jsonl", &text).eldr(FIT);
    assert_eq!(
        (fit.code, fit.stderr.as_str()),
        (0, "note: records without `prefill`, skipped: 1\n")
    );
}

#[test]
fn failures_name_place_and_next_step() {
    let bench = Bench::new();
    bench.eldr(FIT).failed(
        "error: t.jsonl: opening the trace failed: No such file or directory (os error 2)\n\
         hint: check the path and its permissions\n",
    );
    bench.write("t.jsonl", "{\"id\":\"a\"}\n").eldr(FIT).failed(
        "error: no signatures: records with the field `prefill`: 0 of 1\n\
         hint: record the x-eldr-signature header of prefill responses, one trace line per request\n",
    );
    bench.write("t.jsonl", &line("a", [1, 2, 3, 4], false)).eldr(FIT).failed(
        "error: too few requests to calibrate on: 1 for 2 workers\n\
         hint: each worker needs at least one request, better 30: give more traces or fewer workers\n",
    );
    let other = "{\"id\":\"e\",\"prefill\":\":AQA=:;l=1;e=1\"}\n";
    bench.write("t.jsonl", &(trace(true) + other)).eldr(FIT).failed(
        "error: t.jsonl:5: field `prefill`: it has 1 layers × 1 experts, the requests before it have 2 layers × 2 experts\n\
         hint: fit one model at a time, with the same layers in every signature\n",
    );
    let zero = trace(true) + &line("zero", [0; 4], false);
    bench.write("t.jsonl", &zero).eldr(FIT).failed(
        "error: request zero (t.jsonl:5) is a zero vector: it has no count with a weight on layers [0, 1]\n\
         hint: leave the request out: its prompt touches only experts that all requests touch, or none\n",
    );
    assert!(
        !bench.path("b.eldr").exists(),
        "a failed fit writes no blob"
    );
}

#[test]
fn a_blob_that_cannot_be_written_is_a_failure() {
    let bench = Bench::new();
    bench.write("t.jsonl", &trace(true));
    // Told before the trace is read: a long fit would be lost otherwise.
    bench.eldr("fit none.jsonl -o no/b --workers a,b").failed(
        "error: no/b: creating the blob failed: No such file or directory (os error 2)\n\
         hint: check that the folder exists and may be written to\n",
    );
    #[cfg(target_os = "linux")]
    bench.eldr("fit t.jsonl -o /dev/full --workers a,b").failed(
        "error: /dev/full: writing the blob failed: No space left on device (os error 28)\n\
         hint: check the free space of the disk\n",
    );
}

#[test]
fn a_failure_leaves_the_output_as_it_was() {
    let bench = Bench::new();
    bench.write("t.jsonl", "no trace").write("b.eldr", "before");
    assert_eq!(bench.eldr(FIT).code, 1);
    assert_eq!(bench.blob("b.eldr"), b"before");
    let files = std::fs::read_dir(bench.dir.path()).unwrap();
    assert_eq!(files.count(), 2, "no temporary file is left behind");
}

#[test]
fn a_damaged_blob_names_what_is_wrong() {
    let bench = Bench::new();
    bench.write("t.jsonl", &trace(true)).eldr(FIT).succeeded();
    let mut bytes = bench.blob("b.eldr");
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(bench.path("b.eldr"), bytes).unwrap();
    let inspect = bench.eldr("inspect b.eldr");
    assert_eq!((inspect.code, inspect.stdout.as_str()), (1, ""));
    let stderr = inspect.stderr;
    assert!(
        stderr.starts_with("error: b.eldr: centroid blob, sha256: the file says "),
        "{stderr}"
    );
    assert!(stderr.contains(", its content has "), "{stderr}");
    assert!(stderr.contains("\nhint: "), "{stderr}");

    let inspect = bench.eldr("inspect t.jsonl");
    assert_eq!(inspect.code, 1);
    assert!(
        inspect.stderr.contains("not a safetensors file"),
        "{}",
        inspect.stderr
    );
}

#[test]
fn wrong_usage_is_exit_code_2() {
    let bench = Bench::new();
    bench.eldr("fit t.jsonl -o b.eldr").misused("--workers");
    bench
        .eldr("fit t.jsonl -o b.eldr --workers a,b,a")
        .misused("--workers: a is named twice\nhint: ");
    bench
        .eldr("fit t.jsonl -o b.eldr --workers a,,b")
        .misused("--workers: \"\" is no cluster name");
    bench
        .eldr("fit t.jsonl -o b.eldr --workers a --tau 3")
        .misused("0 to 2 is allowed");
    bench
        .eldr("fit t.jsonl -o b.eldr --workers a --tau x")
        .misused("a number from 0 to 2");
    bench.eldr("frobnicate").misused("unrecognized subcommand");
}

#[test]
fn help_has_an_example_for_every_command() {
    for command in ["fit", "inspect", "convert small-moe"] {
        let help = Bench::new().eldr(&format!("{command} --help"));
        assert!(
            help.succeeded().stdout.contains("Example:\n  eldr "),
            "{}",
            help.stdout
        );
    }
}

#[test]
fn convert_says_what_it_wrote_or_what_is_wrong() {
    let bench = Bench::new();
    bench.write("r.npz", "no archive");
    let convert = bench.eldr("convert small-moe r.npz -o out.jsonl");
    assert_eq!(convert.code, 1);
    let stderr = &convert.stderr;
    assert!(
        stderr.starts_with("error: r.npz: opening the archive failed"),
        "{stderr}"
    );
    assert!(stderr.contains("\nhint: "), "{stderr}");
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
        for region in fit["regions"].as_array().unwrap() {
            assert_eq!(region["share"], 0.25);
        }
    }
}
