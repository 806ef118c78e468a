//! Centroid blobs over HTTP: fetched by one thread, verified, taken by all, and the old one stays when anything is wrong.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use axum::Router;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode, Uri};
use eldr_tests::client::{next_piece, post};
use eldr_tests::{Answer, Gateway, Options, blob, eventually};
use serde_json::{Value, json};
use tokio::task::JoinHandle;

use crate::health::both_threads;

const BODY: &str = r#"{"model":"m","prompt":"hi"}"#;
const PATH: &str = "/v1/blob";

/// Serves bytes by path, with a strong ETag made of their length and sum, and keeps what it was asked.
pub(crate) struct Server {
    pub(crate) address: SocketAddr,
    shared: Arc<Shared>,
    task: JoinHandle<()>,
}

#[derive(Default)]
struct Shared {
    files: Mutex<BTreeMap<String, Vec<u8>>>,
    /// Path, `if-none-match`, status.
    asked: Mutex<Vec<(String, Option<String>, u16)>>,
}

impl Server {
    pub(crate) async fn start() -> Self {
        let shared = Arc::new(Shared::default());
        let app = Router::new().fallback(serve).with_state(shared.clone());
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let task = tokio::spawn(async move { axum::serve(listener, app).await.unwrap() });
        Self {
            address,
            shared,
            task,
        }
    }

    pub(crate) fn publish(&self, path: &str, bytes: Vec<u8>) {
        self.shared.files.lock().unwrap().insert(path.into(), bytes);
    }

    fn asked(&self) -> Vec<(String, Option<String>, u16)> {
        self.shared.asked.lock().unwrap().clone()
    }

    /// Waits until it was asked `more` times from now on.
    async fn asked_again(&self, more: usize) {
        let before = self.asked().len();
        let count = async || self.asked().len();
        eventually("more polls", count, |count| *count >= before + more).await;
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.task.abort();
    }
}

fn etag(bytes: &[u8]) -> String {
    let sum: u64 = bytes.iter().map(|&byte| u64::from(byte)).sum();
    format!("\"{}-{sum}\"", bytes.len())
}

async fn serve(
    State(shared): State<Arc<Shared>>,
    uri: Uri,
    headers: HeaderMap,
) -> (StatusCode, [(&'static str, String); 1], Vec<u8>) {
    let bytes = shared.files.lock().unwrap().get(uri.path()).cloned();
    let wanted = headers.get("if-none-match");
    let wanted = wanted.map(|value| value.to_str().unwrap().to_owned());
    let (status, tag, body) = match bytes {
        None => (StatusCode::NOT_FOUND, String::new(), vec![]),
        Some(bytes) if wanted.as_ref() == Some(&etag(&bytes)) => {
            (StatusCode::NOT_MODIFIED, etag(&bytes), vec![])
        }
        Some(bytes) => (StatusCode::OK, etag(&bytes), bytes),
    };
    let path = uri.path().to_owned();
    shared
        .asked
        .lock()
        .unwrap()
        .push((path, wanted, status.as_u16()));
    (status, [("etag", tag)], body)
}

/// A blob that sends expert `i` of three to `decode-{workers[i]}`.
fn blob_bytes(revision: u64, workers: [usize; 3]) -> Vec<u8> {
    let regions = workers.map(|worker| vec![format!("decode-{worker}")]);
    let mut blob = blob::one_expert_per_region(&regions);
    blob.revision = revision;
    blob.to_bytes().unwrap()
}

fn model(name: &str, path: &str) -> Value {
    let http = json!({ "cluster": "blobs", "path": path, "interval_ms": 200 });
    json!({ "model": name, "blob": { "http": http } })
}

fn options(server: &Server, models: Value) -> Options {
    Options {
        clusters: vec![("blobs", server.address)],
        ..Options::filter(json!({ "models": models }))
    }
}

/// A gateway on two threads that has fetched revision 5, which sends region `i` to `decode-i`.
async fn with_revision_five(server: &Server) -> Gateway {
    server.publish(PATH, blob_bytes(5, [0, 1, 2]));
    let gateway = Gateway::start(Options {
        threads: 2,
        ..options(server, json!([model("*", PATH)]))
    })
    .await;
    gateway.prefill_says(Some(1));
    decides(&gateway, "decode-1;reason=in_band").await;
    gateway
}

/// Waits until requests are decided like this on both threads.
async fn decides(gateway: &Gateway, expected: &str) {
    for mut connection in both_threads(gateway).await {
        let decision = async || {
            let reply = connection.call(post("/v1/completions", BODY)).await;
            reply.header("x-eldr-decision")
        };
        eventually(expected, decision, |found| found.starts_with(expected)).await;
    }
}

async fn counter(gateway: &Gateway, name: &str) -> u64 {
    let stats = gateway.filter_stats().await;
    stats.get(name).copied().unwrap_or_default()
}

async fn logged(gateway: &Gateway, word: &str) -> String {
    let log = async || gateway.envoy.log_tail(usize::MAX);
    eventually(word, log, |log| log.contains(word)).await
}

#[tokio::test]
async fn the_first_blob_is_fetched_when_the_server_has_one() {
    let server = Server::start().await;
    let gateway = Gateway::start(Options {
        threads: 2,
        ..options(&server, json!([model("*", PATH)]))
    })
    .await;
    gateway.prefill_says(Some(1));
    server.asked_again(1).await;
    let reply = gateway.post("/v1/completions", BODY).await;
    assert_eq!(reply.header("x-eldr-decision"), "decode-0;reason=no_blob");
    logged(&gateway, "the server answered 404").await;
    server.publish(PATH, blob_bytes(1, [0, 1, 2]));
    decides(&gateway, "decode-1;reason=in_band").await;
}

#[tokio::test]
async fn an_update_in_the_middle_of_traffic_reaches_every_thread_and_fails_no_request() {
    let server = Server::start().await;
    let mut gateway = with_revision_five(&server).await;

    // One answer streams through the update.
    gateway.decode[1].by_hand();
    let mut streaming = gateway.connect().await;
    let (answer, stream) = gateway.decode[1]
        .streams_to(streaming.send(post("/v1/completions", BODY)))
        .await;
    gateway.decode[1].answers(Answer::json("decode-1"));

    let traffic = async {
        let mut connections = both_threads(&gateway).await;
        let mut count = 0;
        loop {
            for connection in &mut connections {
                let reply = connection.call(post("/v1/completions", BODY)).await;
                assert_eq!(reply.status, 200, "{}", reply.text());
                count += 1;
            }
            if gateway
                .envoy
                .log_tail(usize::MAX)
                .contains("blob revision 8")
            {
                break count;
            }
        }
    };
    let updates = async {
        for (revision, workers) in [(6, [1, 2, 0]), (7, [2, 0, 1]), (8, [1, 2, 0])] {
            server.publish(PATH, blob_bytes(revision, workers));
            logged(&gateway, &format!("blob revision {revision}")).await;
        }
    };
    let (count, ()) = tokio::join!(traffic, updates);
    assert!(count > 0);
    decides(&gateway, "decode-2;reason=in_band").await;

    let mut body = answer.into_body();
    stream.send("whole").await;
    assert_eq!(next_piece(&mut body).await.as_deref(), Some(&b"whole"[..]));
    stream.finish();
    assert_eq!(next_piece(&mut body).await, None);
    assert_eq!(counter(&gateway, "eldr.blob_refused").await, 0);
    gateway.assert_no_trap();
}

#[tokio::test]
async fn a_bad_blob_is_refused_once_with_its_reason_and_the_old_one_stays() {
    let server = Server::start().await;
    let gateway = with_revision_five(&server).await;
    let mut torn = blob_bytes(6, [1, 2, 0]);
    let last = torn.len() - 1;
    torn[last] ^= 1;
    let mut foreign = blob::one_expert_per_region(&[vec!["decode-9".to_owned()]]);
    foreign.revision = 7;
    let bad = [
        (torn, "sha256"),
        (foreign.to_bytes().unwrap(), "decode cluster \"decode-9\""),
        (b"<html>".to_vec(), "not a safetensors file"),
    ];
    for (refused, (bytes, reason)) in (1..).zip(bad) {
        server.publish(PATH, bytes);
        let log = logged(&gateway, reason).await;
        assert!(log.contains("blob refused, the old one stays"), "{log}");
        server.asked_again(2).await;
        assert_eq!(counter(&gateway, "eldr.blob_refused").await, refused);
        decides(&gateway, "decode-1;reason=in_band").await;
    }
    server.publish(PATH, blob_bytes(6, [1, 2, 0]));
    decides(&gateway, "decode-2;reason=in_band").await;
}

#[tokio::test]
async fn a_lower_revision_is_not_taken_and_the_log_says_so_once() {
    let server = Server::start().await;
    let gateway = with_revision_five(&server).await;
    server.publish(PATH, blob_bytes(4, [1, 2, 0]));
    let words = "revision 4 is not above 5";
    logged(&gateway, words).await;
    server.asked_again(3).await;
    decides(&gateway, "decode-1;reason=in_band").await;
    let log = gateway.envoy.log_tail(usize::MAX);
    assert_eq!(log.matches(words).count(), 1, "{log}");
    server.publish(PATH, blob_bytes(5, [2, 0, 1]));
    logged(&gateway, "revision 5 is not above 5").await;
    decides(&gateway, "decode-1;reason=in_band").await;
    assert_eq!(counter(&gateway, "eldr.blob_refused").await, 0);
}

#[tokio::test]
async fn while_the_server_is_down_the_old_blob_stays() {
    let server = Server::start().await;
    let gateway = with_revision_five(&server).await;
    drop(server);
    let failures = async || counter(&gateway, "eldr.blob_fetch_failed").await;
    eventually("failed fetches", failures, |count| *count >= 3).await;
    decides(&gateway, "decode-1;reason=in_band").await;
    let log = gateway.envoy.log_tail(usize::MAX);
    assert!(log.contains("blob not fetched, the old one stays"), "{log}");
}

#[tokio::test]
async fn a_blob_is_sent_once_and_then_asked_for_by_its_etag() {
    let server = Server::start().await;
    let gateway = with_revision_five(&server).await;
    server.asked_again(3).await;
    let expected = etag(&blob_bytes(5, [0, 1, 2]));
    let asked = server.asked();
    assert_eq!((asked[0].1.as_ref(), asked[0].2), (None, 200));
    for (path, wanted, status) in &asked[1..] {
        assert_eq!(
            (path.as_str(), wanted.as_deref(), *status),
            (PATH, Some(&*expected), 304)
        );
    }
    assert_eq!(counter(&gateway, "eldr.blob_fetch_failed").await, 0);
}

#[tokio::test]
async fn each_model_has_its_blob() {
    let server = Server::start().await;
    server.publish("/v1/blobs/a", blob_bytes(1, [0, 1, 2]));
    server.publish("/v1/blobs/b", blob_bytes(9, [2, 0, 1]));
    let models = json!([
        model("a", "/v1/blobs/a"),
        model("b", "/v1/blobs/b"),
        { "model": "*", "policy": "least_loaded" }
    ]);
    let gateway = Gateway::start(options(&server, models)).await;
    gateway.prefill_says(Some(2));
    for (model, expected) in [
        ("a", "decode-2;reason=in_band"),
        ("b", "decode-1;reason=in_band"),
        ("c", "decode-0;reason=blind"),
    ] {
        let body = format!(r#"{{"model":"{model}","prompt":"hi"}}"#);
        let decision = async || {
            let reply = gateway.post("/v1/completions", body.clone()).await;
            reply.header("x-eldr-decision")
        };
        eventually(expected, decision, |found| found.starts_with(expected)).await;
    }
}

#[tokio::test]
async fn an_inline_blob_serves_until_the_first_fetch_and_a_fetched_one_survives_an_update() {
    let server = Server::start().await;
    let bytes = blob_bytes(2, [0, 1, 2]);
    let inline = blob::inline(&eldr_core::blob::Blob::from_bytes(&bytes).unwrap());
    let mut both = model("*", PATH);
    both["blob"]["inline"] = json!(inline);
    let gateway = Gateway::start(Options {
        lds: true,
        ..options(&server, json!([both]))
    })
    .await;
    gateway.prefill_says(Some(1));
    let reply = gateway.post("/v1/completions", BODY).await;
    assert!(
        reply
            .header("x-eldr-decision")
            .starts_with("decode-1;reason=in_band")
    );
    server.publish(PATH, blob_bytes(3, [1, 2, 0]));
    decides_once(&gateway, "decode-2").await;

    // The inline one is older than what was fetched, so an update of the configuration does not bring it back.
    gateway.update(
        json!({ "models": [both], "prefill_timeout_ms": 1_000, "debug_headers": false }),
        2,
    );
    let header = async || {
        gateway
            .post("/v1/completions", BODY)
            .await
            .header("x-eldr-decision")
    };
    eventually("the update serves", header, String::is_empty).await;
    let reply = gateway.post("/v1/completions", BODY).await;
    assert_eq!(reply.text(), "decode-2");
}

async fn decides_once(gateway: &Gateway, worker: &str) {
    let answer = async || gateway.post("/v1/completions", BODY).await.text();
    eventually(worker, answer, |text| text == worker).await;
}
