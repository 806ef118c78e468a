//! `eldr serve`: what it answers, and what becomes of a file that changes.

use std::io::{Read as _, Write as _};

use eldr_core::blob::Blob;
use serde_json::Value;
use sha2::{Digest as _, Sha256};

use crate::bench::{Bench, FIT, trace};
use crate::server::{LIMIT, Server};

fn etag(bytes: &[u8]) -> String {
    let digest = Sha256::digest(bytes);
    let hex: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("\"{hex}\"")
}

/// A folder with the blob `b.eldr`, revision 1.
fn bench() -> Bench {
    let bench = Bench::new();
    bench.write("t.jsonl", trace(true)).eldr(FIT).succeeded();
    bench
}

/// The blob of another revision, of the same shape and size.
fn revision(bench: &Bench, revision: u64) -> Vec<u8> {
    let name = format!("revision-{revision}");
    let options = format!("--workers decode-0,decode-1 --revision {revision}");
    bench
        .eldr(&format!("fit t.jsonl -o {name} {options}"))
        .succeeded();
    bench.blob(&name)
}

/// As a person or a script replaces a file: written elsewhere, then renamed.
fn replace(bench: &Bench, bytes: &[u8]) {
    bench.write("new", bytes);
    std::fs::rename(bench.path("new"), bench.path("b.eldr")).unwrap();
}

#[test]
fn a_blob_is_served_with_its_sha256_as_etag() {
    let bench = bench();
    let blob = bench.blob("b.eldr");
    let server = Server::start(&bench, "--blob b.eldr");
    let get = server.get("/v1/blob");
    assert_eq!((get.status, &get.body), (200, &blob));
    assert_eq!(get.header("etag"), etag(&blob));
    assert_eq!(get.header("content-type"), "application/octet-stream");
    assert_eq!(get.header("cache-control"), "no-cache");

    let head = server.request("HEAD", "/v1/blob", "");
    assert_eq!((head.status, head.body.len()), (200, 0));
    assert_eq!(head.header("etag"), etag(&blob));
    assert_eq!(head.header("content-length"), blob.len().to_string());
}

#[test]
fn who_has_the_blob_gets_304() {
    let bench = bench();
    let tag = etag(&bench.blob("b.eldr"));
    let server = Server::start(&bench, "--blob b.eldr");
    for (known, status) in [
        (tag.clone(), 304),
        (format!("\"other\", W/{tag}"), 304),
        ("*".into(), 304),
        ("\"other\"".into(), 200),
    ] {
        for method in ["GET", "HEAD"] {
            let condition = format!("if-none-match: {known}\r\n");
            let answer = server.request(method, "/v1/blob", &condition);
            assert_eq!(answer.status, status, "{method} with {known}");
            assert_eq!(answer.body.is_empty(), status == 304 || method == "HEAD");
            assert_eq!(answer.header("etag"), tag);
            assert_eq!(answer.header("cache-control"), "no-cache");
        }
    }
}

#[test]
fn each_name_has_its_blob() {
    let bench = bench();
    let other = revision(&bench, 2);
    let server = Server::start(&bench, "--blob b.eldr --blob Qwen3-30B_A3B.v2=revision-2");
    assert_eq!(server.get("/v1/blob").body, bench.blob("b.eldr"));
    assert_eq!(server.get("/v1/blobs/Qwen3-30B_A3B.v2").body, other);
    for unknown in ["/v1/blobs/other", "/v1/blobs/", "/v1/blob/", "/"] {
        let answer = server.get(unknown);
        assert_eq!(answer.status, 404, "{unknown}");
        assert_eq!(
            String::from_utf8(answer.body).unwrap(),
            "no such path; blobs are at: /v1/blob /v1/blobs/Qwen3-30B_A3B.v2\n"
        );
    }
    let post = server.request("POST", "/v1/blob", "content-length: 0\r\n");
    assert_eq!((post.status, post.header("allow")), (405, "GET,HEAD"));
}

#[test]
fn a_file_whose_name_has_an_equals_sign_is_a_path() {
    let bench = bench();
    std::fs::rename(bench.path("b.eldr"), bench.path("a=b")).unwrap();
    let server = Server::start(&bench, "--blob ./a=b");
    assert_eq!(server.get("/v1/blob").status, 200);
}

#[test]
fn a_replaced_file_is_served_from_then_on() {
    let bench = bench();
    let (old, new) = (bench.blob("b.eldr"), revision(&bench, 2));
    assert_eq!(old.len(), new.len(), "size alone would not tell them apart");
    let server = Server::start(&bench, "--blob b.eldr");
    bench.eldr(&format!("{FIT} --revision 2")).succeeded();
    let told = server.told();
    let sha256 = etag(&new).replace('"', "");
    assert_eq!(
        told,
        format!(
            "reloaded: /v1/blob: b.eldr, revision 2, model *, 2 regions, {} bytes, sha256 {sha256}",
            new.len()
        )
    );
    let known = format!("if-none-match: {}\r\n", etag(&old));
    let answer = server.request("GET", "/v1/blob", &known);
    assert_eq!((answer.status, &answer.body), (200, &new));
    assert_eq!(answer.header("etag"), etag(&new));
    assert_eq!(
        server.metric("eldr_serve_blob_revision{path=\"/v1/blob\"}"),
        2
    );
}

#[test]
fn a_bad_file_is_refused_and_the_old_one_stays() {
    let bench = bench();
    let (old, new) = (bench.blob("b.eldr"), revision(&bench, 2));
    let mut damaged = new.clone();
    *damaged.last_mut().unwrap() ^= 1;
    let server = Server::start(&bench, "--blob b.eldr");
    let stays = |server: &Server, refused: u64| {
        assert_eq!(server.get("/v1/blob").body, old);
        for (name, value) in [
            ("blob_revision", 1),
            ("reloads_total", 0),
            ("reloads_refused_total", refused),
        ] {
            let found = server.metric(&format!("eldr_serve_{name}{{path=\"/v1/blob\"}}"));
            assert_eq!(found, value, "{name}");
        }
    };
    stays(&server, 0);

    replace(&bench, &damaged);
    let told = server.told();
    let reason = "refused: /v1/blob: b.eldr: centroid blob, sha256: the file says ";
    assert!(told.starts_with(reason), "{told}");
    assert!(told.ends_with("; revision 1 stays"), "{told}");
    let hint =
        "hint: the file was damaged or edited; copy it again, or make a new one with `eldr fit`";
    assert_eq!(server.told(), hint);
    stays(&server, 1);

    std::fs::remove_file(bench.path("b.eldr")).unwrap();
    assert_eq!(
        server.told(),
        "refused: /v1/blob: b.eldr: reading the blob failed: No such file or directory (os error 2); revision 1 stays"
    );
    assert_eq!(
        server.told(),
        "hint: give the path of a blob that `eldr fit` wrote"
    );
    stays(&server, 2);

    replace(&bench, &new);
    assert!(
        server
            .told()
            .starts_with("reloaded: /v1/blob: b.eldr, revision 2, ")
    );
    assert_eq!(server.get("/v1/blob").body, new);
    let (code, unread) = server.end("TERM");
    assert_eq!(
        (code, unread),
        (Some(0), vec![]),
        "each change was told once"
    );
}

#[test]
fn a_revision_that_does_not_grow_is_served_and_said() {
    let bench = bench();
    let (third, second) = (revision(&bench, 3), revision(&bench, 2));
    replace(&bench, &third);
    let server = Server::start(&bench, "--blob b.eldr");
    replace(&bench, &second);
    assert!(
        server
            .told()
            .starts_with("reloaded: /v1/blob: b.eldr, revision 2, ")
    );
    assert_eq!(
        server.told(),
        "note: /v1/blob: revision 2 comes after 3; a gateway takes only a higher one than it has"
    );
    assert_eq!(server.told(), "hint: publish with eldr fit --revision 4");
    assert_eq!(server.get("/v1/blob").body, second);
}

#[test]
fn whoever_reads_while_the_file_is_written_gets_a_whole_blob() {
    let bench = bench();
    let versions = [2, 3, 4].map(|number| revision(&bench, number));
    let server = Server::start(&bench, "--blob b.eldr");
    let read = || {
        let answer = server.get("/v1/blob");
        assert_eq!(answer.header("etag"), etag(&answer.body));
        assert!(Blob::from_bytes(&answer.body).is_ok());
    };
    for bytes in versions.iter().cycle().take(9) {
        // As `cp` does it: in place, and for a while the file is half there.
        let (head, tail) = bytes.split_at(bytes.len() / 2);
        let mut file = std::fs::File::create(bench.path("b.eldr")).unwrap();
        file.write_all(head).unwrap();
        (0..4).for_each(|_| read());
        file.write_all(tail).unwrap();
        (0..4).for_each(|_| read());
        while !server.told().starts_with("reloaded: ") {}
        assert_eq!(server.get("/v1/blob").body, *bytes);
    }
}

#[test]
fn the_server_says_where_it_listens_and_what_it_serves() {
    let bench = bench();
    let blob = bench.blob("b.eldr");
    let (bytes, sha256) = (blob.len(), etag(&blob).replace('"', ""));
    let server = Server::start(&bench, "--blob b.eldr");
    assert_eq!(
        server.first_line,
        format!("listening on http://{}", server.address)
    );
    assert_eq!(
        server.stdout.recv_timeout(LIMIT).unwrap(),
        format!("/v1/blob: b.eldr, revision 1, model *, 2 regions, {bytes} bytes, sha256 {sha256}")
    );

    let server = Server::start(&bench, "--json --blob x=b.eldr");
    let line: Value = serde_json::from_str(&server.first_line).unwrap();
    let expected = serde_json::json!({
        "listening": format!("http://{}", server.address),
        "blobs": [{"path": "/v1/blobs/x", "file": "b.eldr", "revision": 1, "sha256": sha256}],
    });
    assert_eq!(line, expected);
}

#[test]
fn requests_are_counted_by_path_and_status() {
    let bench = bench();
    let server = Server::start(&bench, "--blob b.eldr");
    assert_eq!(server.get("/healthz").status, 200);
    server.get("/v1/blob");
    server.request("GET", "/v1/blob", "if-none-match: *\r\n");
    server.request("HEAD", "/v1/blob", "if-none-match: *\r\n");
    for path in ["/a", "/b"] {
        server.get(path);
    }
    for (labels, count) in [
        ("path=\"/healthz\",status=\"200\"", 1),
        ("path=\"/v1/blob\",status=\"200\"", 1),
        ("path=\"/v1/blob\",status=\"304\"", 2),
        ("path=\"other\",status=\"404\"", 2),
    ] {
        let name = format!("eldr_serve_requests_total{{{labels}}}");
        assert_eq!(server.metric(&name), count, "{name}");
    }
    let metrics = server.get("/metrics");
    assert!(
        metrics
            .header("content-type")
            .starts_with("application/openmetrics-text")
    );
}

#[test]
fn signals_end_the_server_whatever_is_open() {
    let bench = bench();
    for (signal, half_a_request) in [("INT", ""), ("TERM", "GET /v1/blob HTTP/1.1\r\n")] {
        let server = Server::start(&bench, "--blob b.eldr");
        let mut silent = server.connect();
        silent.write_all(half_a_request.as_bytes()).unwrap();
        let mut kept = server.connect();
        kept.write_all(b"HEAD /v1/blob HTTP/1.1\r\nhost: test\r\n\r\n")
            .unwrap();
        assert_eq!(kept.read(&mut [0]).unwrap(), 1, "it answers and stays open");
        assert_eq!(server.end(signal), (Some(0), vec![]), "{signal}");
    }
}
