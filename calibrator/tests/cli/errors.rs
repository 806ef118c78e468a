//! What a person is told when something is wrong: exit code and stderr, word for word. The texts are
//! in `snapshots/`, to be read there as a person reads them.

use std::io::Write as _;
use std::net::TcpListener;

use flate2::{Compression, write::GzEncoder};
use insta::assert_snapshot;

use crate::bench::{Bench, FIT, line, mask_hashes, trace};

/// Runs the commands, all of which fail, and writes down how.
pub(crate) fn transcript(bench: &Bench, commands: &[&str]) -> String {
    let mut text = String::new();
    for command in commands {
        let ran = bench.eldr(command);
        assert_eq!(ran.stdout, "", "{command}: a failure prints no result");
        text += &format!("$ eldr {command}\n{}[exit {}]\n\n", ran.stderr, ran.code);
    }
    text
}

/// What `fit` says of a trace with this content.
fn fit(content: impl AsRef<[u8]>) -> String {
    let bench = Bench::new();
    let shown = String::from_utf8(content.as_ref().to_vec());
    let shown = shown.map_or(String::new(), |text| {
        format!("$ cat t.jsonl\n{}\n", text.trim_end())
    });
    let text = shown + &transcript(bench.write("t.jsonl", content), &[FIT]);
    let files: Vec<_> = std::fs::read_dir(bench.dir.path()).unwrap().collect();
    assert_eq!(files.len(), 1, "a failed fit leaves no file: {files:?}");
    text
}

#[test]
fn traces_that_cannot_be_read() {
    let mut gzip = GzEncoder::new(Vec::new(), Compression::best());
    gzip.write_all(trace(true).as_bytes()).unwrap();
    let mut cut = gzip.finish().unwrap();
    cut.truncate(cut.len() - 9);

    let bench = Bench::new();
    let missing = transcript(&bench, &[FIT, "fit . -o b.eldr --workers a"]);
    let told = missing + &fit(cut) + &fit(b"{\"id\":\"\xff\"}");
    assert_snapshot!(told);
}

#[test]
fn traces_that_are_none() {
    let lines = [
        "[2026-11-30 02:34:31.497][20299][warning][main] no limit is configured",
        r#"{"prefill":":AQA=:;l=1;e=1"}"#,
        r#"{"id":"a","prompt_tokens":"many"}"#,
        r#"{"id":"a","prefill":["AQA="]}"#,
        r#"{"id":"a","prefill":"AQA="}"#,
        r#"{"id":"a","prefill":":AQA=:;l=1;e=2"}"#,
        r#"{"id":"a","prefill":":AQA=:;l=1;e=1","decode":":AQA=:"}"#,
        r#"{"id":"a","prefill":null}"#,
    ];
    let told = lines.map(fit).concat();
    assert_snapshot!(told);
}

#[test]
fn traces_that_cannot_be_fitted() {
    let other = r#"{"id":"e","prefill":":AQA=:;l=1;e=1"}"#;
    let alike = ["a", "b", "c"].map(|id| line(id, [1, 0, 2, 1], true));
    let told = [
        line("zero", [0; 4], false),
        trace(true) + other,
        alike.concat(),
    ]
    .map(fit)
    .concat();
    assert_snapshot!(told);
}

#[test]
fn fits_that_ask_for_what_the_trace_does_not_have() {
    let bench = Bench::new();
    let other = r#"{"id":"e","prefill":":AQA=:;l=1;e=1"}"#;
    let gate = |sums: &str| {
        let line = line("a", [1, 2, 3, 4], false);
        line.replace("\"prefill\"", &format!("\"gate_prob\":{sums},\"prefill\""))
    };
    bench
        .write("t.jsonl", trace(true))
        .write("other.jsonl", other)
        .write("short.jsonl", gate(r#""AAAAAA==""#))
        .write("broken.jsonl", gate("7"))
        .write("nan.jsonl", gate(r#""AADAfwAAwH8AAMB/AADAfw==""#));
    let told = transcript(
        &bench,
        &[
            &format!("{FIT} --layers 0,2"),
            &format!("{FIT} --regions 5"),
            &format!("{FIT} --held-out other.jsonl"),
            &format!("{FIT} --held-out none.jsonl"),
            &format!("{FIT} --signature gate-prob"),
            "fit short.jsonl -o b.eldr --workers a --signature gate-prob",
            "fit broken.jsonl -o b.eldr --workers a --signature gate-prob",
            "fit nan.jsonl -o b.eldr --workers a --signature gate-prob",
        ],
    );
    assert_snapshot!(told);
    assert!(!bench.path("b.eldr").exists());
}

#[test]
fn fits_that_will_not_do_much() {
    let bench = Bench::new();
    let noted = |name: &str, trace: String, options: &str| {
        let workers = "--workers decode-0,decode-1";
        let command = format!("fit {name} -o {name}.eldr {workers} {options}");
        let ran = bench.write(name, trace).eldr(&command);
        assert_eq!(ran.code, 0, "{}", ran.stderr);
        let stderr = ran.stderr;
        format!("$ eldr {command}\n{stderr}\n")
    };
    let requests = |counts: &dyn Fn(usize) -> [u16; 4]| -> String {
        let line = |at| line(&format!("r{at}"), counts(at), true);
        (0..60).map(line).collect()
    };
    let alike = requests(&|at| [50 + at as u16 % 3, 50, 50 + at as u16 % 7, 50]);
    let told = [
        // Every prompt touches every expert; a request of no count; counts that say nothing; one kind; another mix.
        noted("faded.jsonl", alike, "--weight presence-idf --layers all"),
        noted(
            "zero.jsonl",
            trace(false) + &line("zero", [0; 4], false),
            "--seed 1",
        ),
        noted("noise.jsonl", noise(), "--regions 2"),
        noted("other_mix.jsonl", kinds(&|_| true), "--regions 2"),
        noted(
            "mix.jsonl",
            kinds(&|at| at % 2 == 0),
            "--held-out other_mix.jsonl",
        ),
    ]
    .concat();
    assert_snapshot!(told);
}

/// Requests whose decode counts have nothing to do with those of the prompt.
fn noise() -> String {
    let mut state = 1u32;
    let mut counts = || {
        [0; 4].map(|_: u16| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            50 + (state >> 16) as u16 % 50
        })
    };
    let mut text = String::new();
    for at in 0..200 {
        let decode = line("", counts(), true);
        let (_, decode) = decode.split_once(r#""decode""#).unwrap();
        let prompt = line(&format!("n{at}"), counts(), false);
        text += &format!(
            "{},\"decode\"{decode}",
            prompt.trim_end().trim_end_matches('}')
        );
    }
    text
}

/// Requests of two kinds; which one, `is_first` says.
fn kinds(is_first: &dyn Fn(usize) -> bool) -> String {
    let line = |at: usize| {
        let (much, little) = (90 + at as u16 % 5, at as u16 % 3);
        let counts = if is_first(at) {
            [much, little, much, little]
        } else {
            [little, much, little, much]
        };
        line(&format!("k{at}"), counts, true)
    };
    (0..80).map(line).collect()
}

#[test]
fn blobs_that_cannot_be_remapped() {
    let bench = Bench::new();
    bench.write("t.jsonl", trace(true)).eldr(FIT).succeeded();
    bench
        .eldr(&format!("{FIT} --revision {}", u64::MAX).replace("b.eldr", "last.eldr"))
        .succeeded();
    let told = transcript(
        &bench,
        &[
            "remap none --workers a -o new.eldr",
            "remap t.jsonl --workers a -o new.eldr",
            "remap b.eldr --workers a -o no/new.eldr",
            "remap last.eldr --workers a -o new.eldr",
            "remap b.eldr -o new.eldr",
            "remap b.eldr --workers a,a -o new.eldr",
            "remap b.eldr --workers a,,b -o new.eldr",
        ],
    );
    assert_snapshot!(told);
    assert!(!bench.path("new.eldr").exists());
}

#[test]
fn outputs_that_cannot_be_written() {
    let bench = Bench::new();
    bench.write("t.jsonl", trace(true)).write("r.npz", "");
    let told = transcript(
        &bench,
        &[
            // Told before the trace is read: a long fit would be lost otherwise.
            "fit none.jsonl -o no/b --workers a,b",
            "fit t.jsonl -o . --workers a,b",
            "fit t.jsonl -o /dev/full --workers a,b",
            "convert small-moe r.npz -o no/t.jsonl",
        ],
    );
    assert_snapshot!(told);
}

#[test]
fn a_failure_leaves_the_output_as_it_was() {
    let bench = Bench::new();
    bench.write("t.jsonl", "no trace").write("out", "before");
    bench.eldr("fit t.jsonl -o out --workers a");
    bench.eldr("convert small-moe t.jsonl -o out");
    assert_eq!(bench.blob("out"), b"before");
}

#[test]
fn blobs_that_are_none() {
    let bench = Bench::new();
    bench.write("t.jsonl", trace(true)).eldr(FIT).succeeded();
    let mut damaged = bench.blob("b.eldr");
    *damaged.last_mut().unwrap() ^= 1;
    bench
        .write("damaged", damaged)
        .write("text", "no blob and no trace")
        .write("foreign", b"\x02\0\0\0\0\0\0\0{}")
        .write("huge", "");
    let huge = std::fs::File::options()
        .write(true)
        .open(bench.path("huge"));
    huge.unwrap().set_len((256 << 20) + 1).unwrap();
    let told = transcript(
        &bench,
        &[
            "inspect none",
            "inspect .",
            "inspect text",
            "inspect foreign",
            "inspect damaged",
            "inspect huge",
        ],
    );
    let told = mask_hashes(&told);
    assert_snapshot!(told);
}

#[test]
fn requests_that_cannot_be_explained() {
    let bench = Bench::new();
    bench.write("t.jsonl", trace(true)).eldr(FIT).succeeded();
    assert_snapshot!(transcript(
        &bench,
        &[
            "explain none --signature x",
            "explain b.eldr --trace none --id a",
            "explain b.eldr --trace t.jsonl --id x",
            "explain b.eldr --trace t.jsonl --id a --policy hybrid --running decode-0=b+x",
            "explain b.eldr --signature x --out decode-7",
        ],
    ));
}

#[test]
fn blobs_of_gate_sums_compare_no_counts() {
    let bench = Bench::new();
    let gate = |line: String, sums: &str| {
        let more = format!(r#""prompt_tokens":8,"decode_tokens":8,"gate_prob":"{sums}","#);
        line.replace("\"prefill\"", &format!("{more}\"prefill\""))
    };
    let trace = [
        gate(line("a", [3, 0, 2, 1], true), "AABAQAAAAD8AAABAAACAPw=="),
        gate(line("b", [0, 4, 1, 2], true), "AAAAPwAAgEAAAIA/AAAAQA=="),
    ];
    let fitted = bench
        .write("t.jsonl", trace.concat())
        .eldr(&format!("{FIT} --signature gate-prob --regions 2"));
    assert_eq!(fitted.code, 0, "{}", fitted.stderr);
    assert_snapshot!(transcript(
        &bench,
        &[
            "explain b.eldr --trace t.jsonl --id a",
            "simulate t.jsonl --blob b.eldr --decode-tokens 1",
            "place b.eldr t.jsonl --gpus 2",
            "report b.eldr --trace t.jsonl -o report.html",
            "refit b.eldr t.jsonl",
            "serve --blob b.eldr --online --listen 127.0.0.1:0",
        ],
    ));
}

#[test]
fn placements_that_cannot_be_made() {
    let bench = Bench::new();
    bench.write("t.jsonl", trace(true)).eldr(FIT).succeeded();
    let tokens = |tokens: &str| trace(false).replace("{\"id", &format!("{{{tokens}\"id"));
    let other = r#"{"id":"e","prefill":":AQA=:;l=1;e=1"}"#;
    let decode = r#"{"id":"e","prefill":":AQAAAAEAAAA=:;l=2;e=2;n=1","decode":":AQA=:;l=1;e=1"}"#;
    let rows = r#"{"id":"e","prefill":":AQAAAA==:;l=2;e=2;layers=\"0\";n=1"}"#;
    let sparse = r#"{"id":"e","prefill":":AQAAAAEAAAA=:;l=2;e=2;n=1","decode":":AQAAAA==:;l=2;e=2;layers=\"0\"","decode_tokens":1}"#;
    bench
        .write("few", tokens(r#""prompt_tokens":2,"#))
        .write("none", r#"{"id":"a"}"#)
        .write("other", other)
        .write("decode", decode)
        .write("rows", rows)
        .write(
            "mixed",
            decode
                .replace(":AQA=:;l=1;e=1", ":AQAAAAEAAAA=:;l=2;e=2")
                .replace("\"id", "\"decode_tokens\":1,\"id")
                + "\n"
                + sparse,
        )
        .write("good", tokens(r#""prompt_tokens":9,"#))
        .write("file", "");
    let told = transcript(
        &bench,
        &[
            "place none good --gpus 2",
            "place b.eldr missing --gpus 2",
            "place b.eldr none --gpus 2",
            "place b.eldr other --gpus 2",
            "place b.eldr decode --gpus 2",
            "place b.eldr rows --gpus 2",
            "place b.eldr mixed --gpus 2",
            "place b.eldr t.jsonl --gpus 2",
            "place b.eldr few --gpus 2",
            "place b.eldr good --gpus 2 --top-k 2",
            "place b.eldr good --gpus 3",
            "place b.eldr good --gpus 2 --redundant 4",
            "place b.eldr good --gpus 2 --nodes 3",
            "place b.eldr good --gpus 2 --groups 3",
            "place b.eldr good --gpus 2 --nodes 2 --groups 1",
            "place b.eldr good --gpus 2 -o file",
            "place b.eldr good --gpus 2 -o /proc",
        ],
    );
    assert_snapshot!(told);
}

#[test]
fn reports_that_cannot_be_made() {
    let bench = Bench::new();
    bench.write("t.jsonl", trace(true)).eldr(FIT).succeeded();
    let rows = r#"{"id":"e","prefill":":AQAAAA==:;l=2;e=2;layers=\"0\";n=1"}"#;
    bench
        .write("none", r#"{"id":"a"}"#)
        .write("other", r#"{"id":"e","prefill":":AQA=:;l=1;e=1"}"#)
        .write("rows", rows);
    let told = transcript(
        &bench,
        &[
            // Told before the trace is read.
            "report none --trace none -o no/r.html",
            "report none -o r.html",
            "report t.jsonl -o r.html",
            "report b.eldr --trace missing -o r.html",
            "report b.eldr --trace none -o r.html",
            "report b.eldr --trace other -o r.html",
            "report b.eldr --trace rows -o r.html",
            "report b.eldr --gpus 3 -o r.html",
            "report b.eldr -o /dev/full",
        ],
    );
    assert_snapshot!(told);
    assert!(!bench.path("r.html").exists());
}

#[test]
fn servers_that_cannot_start() {
    let bench = Bench::new();
    bench.write("t.jsonl", trace(true)).eldr(FIT).succeeded();
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let text = transcript(
        &bench,
        &[
            "serve --blob none",
            "serve --blob b.eldr --blob bad=t.jsonl",
            &format!("serve --blob b.eldr --listen {address}"),
        ],
    );
    let told = text.replace(&address, "127.0.0.1:PORT");
    assert_snapshot!(told);
}

#[test]
fn wrong_usage() {
    let told = transcript(
        &Bench::new(),
        &[
            "frobnicate",
            "fit t.jsonl -o b.eldr",
            "fit t.jsonl -o b.eldr --workers a,b,a",
            "fit t.jsonl -o b.eldr --workers a,,b",
            "fit t.jsonl -o b.eldr --workers a --tau 3",
            "fit t.jsonl -o b.eldr --workers a --tau x",
            "fit t.jsonl -o b.eldr --workers a --revision -1",
            "fit t.jsonl -o b.eldr --workers a --regions 0",
            "fit t.jsonl -o b.eldr --workers a --regions many",
            "fit t.jsonl -o b.eldr --workers a --layers 3-1",
            "fit t.jsonl -o b.eldr --workers a --layers 1,1",
            "fit t.jsonl -o b.eldr --workers a --restarts 0",
            "fit t.jsonl -o b.eldr --workers a --signature tfidf",
            "fit t.jsonl -o b.eldr --workers a --weight bm25",
            "fit t.jsonl -o b.eldr --workers a --signature sqrt --weight deviation",
            "inspect",
            "place b t",
            "place b --gpus 2",
            "report b",
            "report b -o r --batch 0",
            "place b t --gpus 0",
            "place b t --gpus 2 --nodes 0",
            "place b t --gpus 2 --batch 0",
            "place b t --gpus 2 --objective speed",
            "place b t --gpus 2 --format sglang",
            "convert small-moe r.npz",
            "convert access-log a.log -o t --map signature=x",
            "convert import-centroids c.json -o b --workers a,a",
            "convert gpt-oss r -o t --prefill-share 1",
            "explain b.eldr",
            "explain b.eldr --id a",
            "explain b.eldr --signature x --loads a=-1",
            "explain b.eldr --signature x --loads a=1,a=2",
            "explain b.eldr --signature x --policy best",
            "explain b.eldr --signature x --running a=b",
            "explain b.eldr --trace t --id a --running decode-0=b++c",
            "explain b.eldr --trace t --id a --running decode-0=b,decode-0=c",
            "explain b.eldr --signature x --step-exponent 17",
            "explain b.eldr --signature x --max-load-factor 0.5",
            "serve",
            "serve --blob a --blob b",
            "serve --blob x=a --blob x=b",
            "serve --blob a --listen localhost:80",
            "serve --blob a --poll-ms 0",
        ],
    );
    assert_snapshot!(told);
}
