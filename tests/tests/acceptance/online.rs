//! Regions that follow the traffic: the gateway posts samples of its signatures, `eldr serve --online` refits, and the
//! gateway takes the next revision by itself. Whatever becomes of a sample, no request is the worse for it.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use eldr_core::blob::Blob;
use eldr_core::signature::{Encoding, Geometry, Signature};
use eldr_core::transform::Transform;
use eldr_tests::client::{get, post};
use eldr_tests::{
    Answer, Connection, Gateway, KV_TRANSFER_PARAMS, Options, Upstream, blob, eventually, soon,
};
use hyper::Method;
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, ChildStdout, Command};

const BODY: &str = r#"{"model":"m","prompt":"hi"}"#;
const PATH: &str = "/v1/blob";
const POSTS: &str = "/v1/blob/signatures";

/// A running `eldr serve`, killed on drop.
struct Server {
    process: Child,
    address: SocketAddr,
    /// Held, so that nothing it prints fails.
    _stdout: BufReader<ChildStdout>,
}

impl Server {
    /// Refits to at least eight requests of the last two seconds, once a second, when enough of them have moved.
    async fn start(listen: SocketAddr, blob: &Path) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_eldr-for-tests"));
        command.args(["serve", "--json", "--poll-ms", "20", "--online"]);
        command.args(["--window-s", "2", "--refit-every-s", "1"]);
        command.args(["--requests-per-region", "4", "--if-moved", "0.4"]);
        command.args(["--listen", &listen.to_string()]);
        command.arg("--blob").arg(blob);
        command.stdout(Stdio::piped()).stderr(Stdio::null());
        let mut process = command.kill_on_drop(true).spawn().unwrap();
        let mut stdout = BufReader::new(process.stdout.take().unwrap());
        let mut line = String::new();
        let read = soon("the server listens", stdout.read_line(&mut line));
        read.await.unwrap();
        let told: Value = serde_json::from_str(&line).unwrap();
        let url = told["listening"].as_str().unwrap();
        let address = url.strip_prefix("http://").unwrap().parse().unwrap();
        Self {
            process,
            address,
            _stdout: stdout,
        }
    }

    async fn stop(mut self) {
        self.process.kill().await.unwrap();
    }

    /// One of its metrics about the blob.
    async fn metric(&self, name: &str) -> u64 {
        let mut connection = Connection::open(self.address).await;
        let text = connection.call(get("/metrics")).await.text();
        let start = format!("{name}{{path=\"{PATH}\"}} ");
        let mut lines = text.lines();
        let value = lines.find_map(|line| line.strip_prefix(&start));
        value.map_or(0, |value| value.parse().unwrap())
    }
}

/// Two regions of a model with four experts: those who use expert 0 and those who use expert 1.
fn two_of_four() -> Blob {
    let geometry = Geometry::new(1, 4).unwrap();
    let transform = Transform::new(geometry, vec![0], vec![1.0; 4]).unwrap();
    let centroids = vec![1.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0];
    let regions = [vec!["decode-0".to_owned()], vec!["decode-1".to_owned()]];
    blob::new(transform, centroids, &regions)
}

fn signature(counts: [u16; 4]) -> String {
    let geometry = Geometry::new(1, 4).unwrap();
    let signature = Signature::dense(geometry, counts.to_vec(), Some(12)).unwrap();
    signature.encode(Encoding::U16)
}

fn blob_file(dir: &Path) -> PathBuf {
    let file = dir.join("m.eldr");
    std::fs::write(&file, two_of_four().to_bytes().unwrap()).unwrap();
    file
}

fn local() -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], 0))
}

/// A gateway with these models, whose cluster `eldr-serve` is there.
async fn gateway(server: SocketAddr, models: Value, more: Options) -> Gateway {
    let mut filter = more.filter.clone();
    filter["models"] = models;
    let options = Options {
        clusters: vec![("eldr-serve", server)],
        workers: 2,
        filter,
        ..more
    };
    Gateway::start(options).await
}

/// A model whose blob is there from the beginning and looked for at the server, with all or some signatures sampled.
fn model(inline: &Blob, share: f64) -> Value {
    json!({
        "model": "*",
        "blob": {
            "inline": blob::inline(inline),
            "http": { "cluster": "eldr-serve", "path": PATH, "interval_ms": 200 }
        },
        "signature_sample": share
    })
}

/// A server that has no blob; its answer to a post is `answer`.
async fn scripted(answer: Answer) -> Upstream {
    let server = Upstream::start(answer).await;
    server.answers_aside(PATH, Answer::status(304));
    server
}

/// Sends a request whose prefill answer has this signature; what was decided.
async fn send(gateway: &Gateway, signature: &str) -> String {
    let answer = Answer::prefill(KV_TRANSFER_PARAMS, Some(signature));
    gateway.prefill.answers(answer);
    let reply = gateway.post("/v1/completions", BODY).await;
    assert_eq!(reply.status, 200, "{}", reply.text());
    reply.header("x-eldr-decision")
}

/// Signatures sampled, posted, dropped.
async fn counters(gateway: &Gateway) -> [u64; 3] {
    let stats = gateway.filter_stats().await;
    ["sampled", "posted", "dropped"].map(|what| {
        let value = stats.get(&format!("eldr.signatures_{what}"));
        value.copied().unwrap_or_default()
    })
}

async fn expect_counters(gateway: &Gateway, expected: [u64; 3]) {
    let found = async || counters(gateway).await;
    eventually("counters of samples", found, |found| *found == expected).await;
}

/// Header values in the posts to a path.
fn posted(server: &Upstream, path: &str) -> Vec<String> {
    let received = server.received().into_iter();
    let posts = received.filter(|post| post.method == Method::POST && post.path == path);
    let lines = posts.flat_map(|post| {
        let lines: Vec<String> = post.text().lines().map(str::to_owned).collect();
        lines
    });
    lines.collect()
}

#[tokio::test]
async fn regions_follow_the_traffic_and_the_gateway_routes_by_them() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::start(local(), &blob_file(dir.path())).await;
    let http = json!({ "cluster": "eldr-serve", "path": PATH, "interval_ms": 200 });
    let models = json!([{ "model": "*", "blob": { "http": http }, "signature_sample": 0.5 }]);
    let gateway = gateway(server.address, models, Options::default()).await;

    // As it was fitted.
    let (first, second) = (signature([12, 0, 0, 0]), signature([0, 12, 0, 0]));
    let decided = async || send(&gateway, &second).await;
    let expected = "decode-1;reason=in_band";
    eventually(expected, decided, |found| found.starts_with(expected)).await;
    assert!(send(&gateway, &first).await.starts_with("decode-0;"));

    // Then nobody uses expert 1 for much, and there are two new kinds of requests that nobody told apart.
    let (third, fourth) = (signature([5, 0, 7, 0]), signature([5, 1, 0, 7]));
    assert!(send(&gateway, &third).await.starts_with("decode-0;"));
    assert!(send(&gateway, &fourth).await.starts_with("decode-0;"));
    let told_apart = async || (send(&gateway, &third).await, send(&gateway, &fourth).await);
    let found = eventually(
        "the new kinds are told apart",
        told_apart,
        |(third, fourth)| {
            third.starts_with("decode-0;reason=in_band;region=0;band=1;")
                && fourth.starts_with("decode-1;reason=in_band;region=1;band=1;")
        },
    );
    found.await;
    assert!(server.metric("eldr_serve_blob_revision").await >= 2);
    assert!(server.metric("eldr_serve_refits_total").await >= 1);

    // Each sample is accounted for, on both sides.
    let settled = async || {
        let counters = counters(&gateway).await;
        (counters, server.metric("eldr_serve_signatures_total").await)
    };
    let settled = eventually(
        "all samples are posted",
        settled,
        |([all, posted, _], got)| all == posted && got == posted,
    );
    let ([sampled, ..], _) = settled.await;
    assert_eq!(
        server.metric("eldr_serve_signatures_refused_total").await,
        0
    );
    // Before the first blob came there was nothing to sample for.
    let stats = gateway.filter_stats().await;
    let requests = stats["eldr.reason.in_band"];
    assert!(
        sampled.abs_diff(requests / 2) <= 10,
        "{sampled} of {requests}"
    );
    gateway.assert_no_trap();
}

#[tokio::test]
async fn a_server_that_is_away_costs_samples_and_no_request() {
    let dir = tempfile::tempdir().unwrap();
    let file = blob_file(dir.path());
    let server = Server::start(local(), &file).await;
    let address = server.address;
    let models = json!([model(&two_of_four(), 1.0)]);
    let gateway = gateway(address, models, Options::default()).await;
    let first = signature([12, 0, 0, 0]);
    send(&gateway, &first).await;
    expect_counters(&gateway, [1, 1, 0]).await;

    server.stop().await;
    for _ in 0..20 {
        let decision = send(&gateway, &first).await;
        assert!(
            decision.starts_with("decode-0;reason=in_band"),
            "{decision}"
        );
    }
    expect_counters(&gateway, [21, 1, 20]).await;
    send(&gateway, &first).await;
    expect_counters(&gateway, [22, 1, 21]).await;
    let log = gateway.envoy.log_tail(usize::MAX);
    let words = "signatures for eldr-serve/v1/blob/signatures are dropped";
    assert_eq!(log.matches(words).count(), 1, "{log}");

    let server = Server::start(address, &file).await;
    send(&gateway, &first).await;
    expect_counters(&gateway, [23, 2, 21]).await;
    assert_eq!(server.metric("eldr_serve_signatures_total").await, 1);
}

#[tokio::test]
async fn what_is_posted_is_what_prefill_said_if_all_of_it_is_good() {
    let server = scripted(Answer::status(204)).await;
    let mut blind = model(&two_of_four(), 1.0);
    blind["model"] = json!("blind");
    blind["policy"] = json!("round_robin");
    blind["blob"]["http"]["path"] = json!("/v1/blobs/blind");
    server.answers_aside("/v1/blobs/blind", Answer::status(304));
    let models = json!([model(&two_of_four(), 1.0), blind]);
    let gateway = gateway(server.address, models, Options::default()).await;
    let good = [
        signature([12, 0, 0, 0]),
        signature([1, 2, 3, 4]) + ";from=\"elsewhere\"",
    ];
    for bad in [":AAAA:;l=1;e=4", ":AAAAAA==:;l=1;e=2", "none"] {
        send(&gateway, bad).await;
    }
    for good in &good {
        send(&gateway, good).await;
    }
    let third = signature([0, 0, 0, 9]);
    gateway
        .prefill
        .answers(Answer::prefill(KV_TRANSFER_PARAMS, Some(&third)));
    let body = r#"{"model":"blind","prompt":"hi"}"#;
    let reply = gateway.post("/v1/completions", body).await;
    assert!(reply.header("x-eldr-decision").contains("reason=blind"));
    expect_counters(&gateway, [3, 3, 0]).await;
    assert_eq!(posted(&server, POSTS), good);
    assert_eq!(posted(&server, "/v1/blobs/blind/signatures"), [third]);
    assert_eq!(server.received()[0].headers["host"], "eldr-serve");
}

#[tokio::test]
async fn in_relay_mode_a_request_is_one_sample_whichever_leg_has_the_signature() {
    let server = scripted(Answer::status(204)).await;
    let models = json!([model(&two_of_four(), 1.0)]);
    let relay = Options::filter(json!({ "mode": "relay" }));
    let gateway = gateway(server.address, models, relay).await;
    let leg = async |id: &str, params: &str, signature: Option<&str>| {
        let body = format!(r#"{{"model":"m","prompt":"hi","kv_transfer_params":{params}}}"#);
        let mut request = post("/v1/completions", body);
        let headers = request.headers_mut();
        headers.insert("x-request-id", id.parse().unwrap());
        if let Some(signature) = signature {
            headers.insert("x-eldr-signature", signature.parse().unwrap());
        }
        let reply = gateway.connect().await.call(request).await;
        assert_eq!(reply.status, 200, "{}", reply.text());
    };
    let (prefill, decode) = (
        r#"{"do_remote_decode":true}"#,
        r#"{"do_remote_prefill":true}"#,
    );
    let (first, second) = (signature([12, 0, 0, 0]), signature([0, 12, 0, 0]));
    gateway
        .prefill
        .answers(Answer::prefill(KV_TRANSFER_PARAMS, Some(&first)));
    // Both legs pass here, and the coordinator passes the signature on.
    leg("one", prefill, None).await;
    leg("one", decode, Some(&first)).await;
    // Prefill was elsewhere.
    leg("two", decode, Some(&second)).await;
    expect_counters(&gateway, [2, 2, 0]).await;
    assert_eq!(posted(&server, POSTS), [first, second]);
}

#[tokio::test]
async fn one_batch_is_under_way_what_waits_is_bounded_and_new_ones_are_dropped() {
    let mut server = scripted(Answer::status(204)).await;
    server.by_hand();
    // The largest public model's: 17 of its signatures are 1 MiB.
    let geometry = Geometry::new(60, 384).unwrap();
    let transform = Transform::new(geometry, vec![0], vec![1.0; 384]).unwrap();
    let mut centroid = vec![0.0; 384];
    centroid[0] = 1.0;
    let large = blob::new(transform, centroid, &[vec!["decode-0".to_owned()]]);
    let models = json!([model(&large, 1.0)]);
    let gateway = gateway(server.address, models, Options::default()).await;
    let signature = Signature::dense(geometry, vec![9; geometry.counts()], None).unwrap();
    let signature = signature.encode(Encoding::U16);
    send(&gateway, &signature).await;
    let first = server.next().await;
    for _ in 0..20 {
        let decision = send(&gateway, &signature).await;
        assert!(
            decision.starts_with("decode-0;reason=in_band"),
            "{decision}"
        );
    }
    expect_counters(&gateway, [21, 0, 3]).await;
    // The next would be posted by now: the poll for blobs, of every 200 ms, comes at the same ticks.
    let asked = async || {
        let stats = gateway
            .envoy
            .stats(r"^cluster\.eldr-serve\.upstream_rq_total$");
        stats.await.unwrap().values.into_values().sum::<u64>()
    };
    let before = asked().await;
    eventually("polls of two seconds", asked, |count| *count >= before + 10).await;
    assert_eq!(server.received().len(), 1, "one batch is under way");
    first.answer(Answer::status(503));
    expect_counters(&gateway, [21, 0, 4]).await;
    let second = server.next().await;
    let lines = second.request.text().lines();
    assert!(lines.eq(std::iter::repeat_n(signature.as_str(), 17)));
    second.answer(Answer::status(204));
    expect_counters(&gateway, [21, 17, 4]).await;
    gateway.assert_no_trap();
}

#[tokio::test]
async fn an_update_of_the_configuration_drops_what_waits_and_sees_the_end_of_what_is_under_way() {
    let mut server = scripted(Answer::status(204)).await;
    server.by_hand();
    let models = json!([model(&two_of_four(), 1.0)]);
    let options = Options {
        lds: true,
        drain_time_s: 1,
        ..Options::default()
    };
    let gateway = gateway(server.address, models.clone(), options).await;
    let first = signature([12, 0, 0, 0]);
    send(&gateway, &first).await;
    let exchange = server.next().await;
    send(&gateway, &first).await;
    send(&gateway, &first).await;
    gateway.update(json!({ "models": models, "prefill_timeout_ms": 1_000 }), 2);
    expect_counters(&gateway, [3, 0, 2]).await;
    exchange.answer(Answer::status(204));
    expect_counters(&gateway, [3, 1, 2]).await;
    gateway.assert_no_trap();
}

#[tokio::test]
async fn a_cluster_that_envoy_does_not_have_costs_samples_and_no_request() {
    let mut nowhere = model(&two_of_four(), 1.0);
    nowhere["blob"]["http"]["cluster"] = json!("nowhere");
    let gateway = gateway(local(), json!([nowhere]), Options::default()).await;
    for _ in 0..3 {
        send(&gateway, &signature([12, 0, 0, 0])).await;
    }
    expect_counters(&gateway, [3, 0, 3]).await;
    gateway.assert_no_trap();
}

#[tokio::test]
async fn nothing_is_posted_unless_it_is_asked_for() {
    let server = scripted(Answer::status(204)).await;
    let mut quiet = model(&two_of_four(), 1.0);
    quiet.as_object_mut().unwrap().remove("signature_sample");
    let mut sampled = model(&two_of_four(), 1.0);
    sampled["model"] = json!("sampled");
    let gateway = gateway(server.address, json!([quiet, sampled]), Options::default()).await;
    let (first, second) = (signature([12, 0, 0, 0]), signature([0, 12, 0, 0]));
    send(&gateway, &first).await;
    let answer = Answer::prefill(KV_TRANSFER_PARAMS, Some(&second));
    gateway.prefill.answers(answer);
    let body = r#"{"model":"sampled","prompt":"hi"}"#;
    gateway.post("/v1/completions", body).await;
    // It came later and is there.
    expect_counters(&gateway, [1, 1, 0]).await;
    assert_eq!(posted(&server, POSTS), [second]);
}
