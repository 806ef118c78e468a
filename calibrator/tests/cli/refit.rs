//! `eldr refit` and `eldr rollback`, and `eldr serve --online`, which refits by itself.

use std::sync::mpsc::RecvTimeoutError;
use std::time::Duration;

use eldr_core::blob::Blob;
use insta::assert_snapshot;
use serde_json::Value;

use crate::bench::{Bench, FIT, line, mask_hashes, trace};
use crate::errors::transcript;
use crate::server::Server;

/// Revision 1 in `b.eldr`, and later traffic in `new.jsonl`.
fn bench() -> Bench {
    let bench = Bench::new();
    bench.write("t.jsonl", trace(true)).eldr(FIT).succeeded();
    let later = [
        ("e", [2, 1, 2, 1]),
        ("f", [1, 4, 1, 2]),
        ("g", [1, 5, 1, 0]),
        ("h", [1, 3, 0, 2]),
    ];
    bench.write(
        "new.jsonl",
        later.map(|(id, counts)| line(id, counts, false)).concat(),
    );
    bench
}

fn revision(bytes: &[u8]) -> u64 {
    Blob::from_bytes(bytes).unwrap().revision
}

#[test]
fn a_refit_replaces_the_blob_and_a_rollback_brings_it_back() {
    let bench = bench();
    let first = bench.blob("b.eldr");
    let text = bench
        .eldr("refit b.eldr new.jsonl")
        .succeeded()
        .stdout
        .clone();
    assert_snapshot!(mask_hashes(&text));
    assert_eq!(revision(&bench.blob("b.eldr")), 2);
    assert_eq!(bench.blob("b.eldr.r1"), first);

    let text = bench.eldr("rollback b.eldr").succeeded().stdout.clone();
    assert!(
        text.ends_with("revision 1 is back as revision 3\n"),
        "{text}"
    );
    let back = Blob::from_bytes(&bench.blob("b.eldr")).unwrap();
    let first = Blob::from_bytes(&first).unwrap();
    assert_eq!((back.revision, &back.centroids), (3, &first.centroids));

    let report = bench
        .eldr("rollback b.eldr --to 2 --json")
        .succeeded()
        .stdout
        .clone();
    let report: Value = serde_json::from_str(&report).unwrap();
    assert_eq!(
        (&report["revision"], &report["restored"]),
        (&4.into(), &2.into())
    );
}

#[test]
fn the_oldest_revisions_go() {
    let bench = bench();
    for _ in 0..3 {
        bench.eldr("refit b.eldr new.jsonl --keep 2").succeeded();
    }
    let kept: Vec<bool> = (1..5)
        .map(|revision| bench.path(&format!("b.eldr.r{revision}")).exists())
        .collect();
    assert_eq!(kept, [false, true, true, false]);
    bench.eldr("refit b.eldr new.jsonl --keep 0").succeeded();
    assert!(!bench.path("b.eldr.r3").exists());
}

#[test]
fn the_last_requests_are_looked_at() {
    let bench = bench();
    let requests = |arguments: &str| {
        let ran = bench.eldr(&format!(
            "refit b.eldr t.jsonl new.jsonl --json --if-moved 1{arguments}"
        ));
        let report: Value = serde_json::from_str(&ran.succeeded().stdout).unwrap();
        assert_eq!(report["refitted"], false);
        (
            report["drift"]["requests"].clone(),
            report["drift"]["moved"].clone(),
        )
    };
    assert_eq!(requests("").0, 8);
    let (last, moved) = requests(" --last 3");
    assert_eq!(
        (last, moved),
        (3.into(), 0.5.into()),
        "the last three all use the same experts"
    );
    assert_eq!(revision(&bench.blob("b.eldr")), 1, "as it was");
}

#[test]
fn what_is_wrong_is_told_and_the_blob_stays() {
    let bench = bench();
    let before = bench.blob("b.eldr");
    bench
        .write("one.jsonl", line("a", [1, 0, 0, 1], false))
        .write(
            "other.jsonl",
            "{\"id\":\"a\",\"prefill\":\":AQA=:;l=1;e=1\"}\n",
        )
        .write("none.jsonl", "{\"id\":\"a\"}\n");
    let told = transcript(
        &bench,
        &[
            "refit b.eldr one.jsonl",
            "refit b.eldr other.jsonl",
            "refit b.eldr none.jsonl",
            "refit t.jsonl new.jsonl",
            "refit b.eldr new.jsonl --if-moved 2",
            "rollback b.eldr",
            "rollback b.eldr --to 7",
        ],
    );
    assert_snapshot!(told);
    assert_eq!(bench.blob("b.eldr"), before);
}

#[test]
fn regions_follow_the_signatures_that_gateways_post() {
    let bench = bench();
    let online = "--online --window-s 1 --refit-every-s 1 --requests-per-region 2";
    let server = Server::start(&bench, &format!("--blob b.eldr {online}"));
    let header = |counts| {
        let line: Value = serde_json::from_str(&line("a", counts, false)).unwrap();
        line["prefill"].as_str().unwrap().to_owned()
    };
    let batch = [
        header([2, 1, 2, 1]),
        header([1, 4, 1, 2]),
        header([1, 5, 1, 0]),
        header([1, 3, 0, 2]),
        "no signature".into(),
        ":AQA=:;l=1;e=1".into(),
    ]
    .join("\n");
    // Until the window has been full once; each batch is a moment of traffic.
    let path = "/v1/blob/signatures";
    let told = loop {
        assert_eq!(server.post(path, &batch), 204);
        match server.stderr.recv_timeout(Duration::from_millis(100)) {
            Ok(told) => break told,
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => panic!("the server ended"),
        }
    };
    assert!(told.starts_with("refitted: /v1/blob: to "), "{told}");
    let told = server.told();
    assert!(
        told.starts_with("reloaded: /v1/blob: b.eldr, revision 2"),
        "{told}"
    );
    assert_eq!(revision(&server.get("/v1/blob").body), 2);
    assert_eq!(revision(&bench.blob("b.eldr.r1")), 1);
    let metric = |name: &str| server.metric(&format!("eldr_serve_{name}{{path=\"/v1/blob\"}}"));
    assert_eq!(metric("refits_total"), 1);
    let (kept, refused) = (
        metric("signatures_total"),
        metric("signatures_refused_total"),
    );
    assert!(
        kept >= 4 && kept == 2 * refused,
        "{kept} kept, {refused} refused"
    );
    assert_eq!(server.get(path).status, 405, "signatures are posted");
}

#[test]
fn without_online_nothing_takes_signatures() {
    let bench = bench();
    let server = Server::start(&bench, "--blob b.eldr");
    assert_eq!(server.post("/v1/blob/signatures", "x"), 404);
}
