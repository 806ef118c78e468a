//! `eldr report`. What it looks like is tested in a browser, in the workspace's own tests.

use std::path::Path;

use crate::bench::{self, Bench, FIT};

const SECTIONS: [&str; 6] = [
    "Regions",
    "Map",
    "Balance and drift",
    "Layer selection",
    "Experts",
    "Placement",
];

fn read(bench: &Bench, name: &str) -> String {
    String::from_utf8(bench.blob(name)).unwrap()
}

#[test]
fn the_same_input_gives_the_same_page_which_needs_nothing_else() {
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples/data/small-moe");
    let data = data.display();
    let bench = Bench::new();
    let workers = "decode-0,decode-1,decode-2,decode-3";
    let fit = format!("fit {data}/task_calibration.jsonl.gz -o b.eldr --workers {workers}");
    bench.eldr(&fit).succeeded();
    let report = |name: &str| {
        let command = format!("report b.eldr --trace {data}/task_evaluation.jsonl.gz -o {name}");
        bench.eldr(&command).succeeded().stdout.clone()
    };
    let told = report("r.html");
    let html = read(&bench, "r.html");
    assert_eq!(
        told,
        format!("r.html: 4 regions, 682 requests, {} bytes\n", html.len())
    );
    report("again.html");
    assert!(read(&bench, "again.html") == html);
    for section in SECTIONS {
        assert!(html.contains(&format!("<h2>{section}</h2>")), "{section}");
    }
    assert_eq!(html.matches("<svg ").count(), 8);
    let namespace = r#"xmlns="http://www.w3.org/2000/svg""#;
    let html = html.replace(namespace, "");
    for outside in [
        "http:", "https:", "//", "<script", "src=", "href=", "url(", "@import",
    ] {
        assert!(!html.contains(outside), "{outside}");
    }
    assert!(html.contains("code 100 %"), "labels of a region");
}

#[test]
fn a_blob_alone_has_a_report() {
    let bench = Bench::new();
    bench
        .write("t.jsonl", bench::trace(true))
        .eldr(FIT)
        .succeeded();
    let told = bench
        .eldr("report b.eldr -o r.html")
        .succeeded()
        .stdout
        .clone();
    assert!(told.starts_with("r.html: 2 regions, "), "{told}");
    let html = read(&bench, "r.html");
    for (section, there) in SECTIONS.iter().zip([true, true, false, false, true, false]) {
        let heading = format!("<h2>{section}</h2>");
        assert_eq!(html.contains(&heading), there, "{section}");
    }
}

#[test]
fn what_a_trace_lacks_is_told_in_its_section() {
    let bench = Bench::new();
    bench
        .write("t.jsonl", bench::trace(true))
        .eldr(FIT)
        .succeeded();
    bench
        .write("plain", bench::trace(false))
        .eldr("report b.eldr --trace plain -o r.html")
        .succeeded();
    let html = read(&bench, "r.html");
    assert!(html.contains("No selection of layers by this trace: requests with decode counts: 0."));
    assert!(html.contains("Not placed: plain:1: field `prefill`: `prompt_tokens` does not say how many tokens it counts"));
    bench
        .eldr("report b.eldr --trace t.jsonl --top-k 1 --gpus 1 -o r.html")
        .succeeded();
}

#[test]
fn names_and_labels_are_shown_as_text() {
    let bench = Bench::new();
    let trace = bench::trace(true).replace("{\"id", "{\"label\":\"<b>&\",\"id");
    bench.write("t.jsonl", trace);
    bench
        .eldr("fit t.jsonl -o b.eldr --workers <i>,\"x\" --model <u>m</u>")
        .succeeded();
    bench
        .eldr("report b.eldr --trace t.jsonl -o r.html")
        .succeeded();
    let html = read(&bench, "r.html");
    for (markup, text) in [
        ("<b>", "&lt;b&gt;&amp; 100 %"),
        ("<i>", "&lt;i&gt;"),
        ("\"x\"", "&quot;x&quot;"),
        ("<u>", "Regions of &lt;u&gt;m&lt;/u&gt;"),
    ] {
        assert!(!html.contains(markup) && html.contains(text), "{markup}");
    }
}
