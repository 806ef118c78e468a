//! Peers that speak HTTP in other ways, and answers at the edges of what it allows.

use std::net::SocketAddr;

use eldr_core::signature::{Encoding, Geometry, Signature};
use eldr_core::transform::Transform;
use eldr_tests::client::{post, raw};
use eldr_tests::{Answer, Gateway, KV_TRANSFER_PARAMS, Options, blob, eventually, soon};
use http_body_util::{BodyExt, Empty, Full};
use hyper::body::Bytes;
use hyper::{HeaderMap, Method, Request};
use hyper_util::rt::{TokioExecutor, TokioIo};
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

const BODY: &str = r#"{"model":"m","prompt":"hi"}"#;

/// Reads until what came ends so; false if the other side closed before.
async fn read_until(socket: &mut TcpStream, end: &[u8]) -> bool {
    let mut read = Vec::new();
    while !read.ends_with(end) {
        match socket.read_u8().await {
            Ok(byte) => read.push(byte),
            Err(_) => return false,
        }
    }
    true
}

/// A worker that answers any JSON request with these very bytes and closes.
async fn bare_worker(answer: &'static str) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((mut socket, _)) = listener.accept().await {
            if read_until(&mut socket, b"}").await {
                // Envoy may have seen enough before the end.
                let _ = socket.write_all(answer.as_bytes()).await;
            }
        }
    });
    address
}

#[tokio::test]
async fn prefill_answers_without_any_header() {
    let answers = [
        "HTTP/1.1 200 OK\r\n\r\n{\"kv_transfer_params\":{\"remote_block_ids\":[[7]]}}",
        "HTTP/1.1 200 OK\r\n\r\n",
        "HTTP/1.1 200 OK\r\nx-",
        "\r\n\r\n",
        "",
    ];
    let names = ["bare-0", "bare-1", "bare-2", "bare-3", "bare-4"];
    let mut clusters = Vec::new();
    for (name, answer) in names.into_iter().zip(answers) {
        clusters.push((name, bare_worker(answer).await));
    }
    let filter = json!({ "prefill_clusters": names, "prefill_retry": false });
    let gateway = Gateway::start(Options {
        clusters,
        ..Options::filter(filter)
    })
    .await;
    // Each worker in turn, whichever is the first.
    for _ in answers {
        let reply = gateway.post("/v1/completions", BODY).await;
        assert_eq!(
            (reply.status.as_u16(), reply.text().as_str()),
            (200, "decode-0")
        );
        let decision = reply.header("x-eldr-decision");
        assert_eq!(decision, "decode-0;reason=no_signature");
    }
    let bodies = gateway.decode[0].received().into_iter();
    let handed_over = bodies.filter_map(|leg| leg.json().get("kv_transfer_params").cloned());
    let handed_over: Vec<_> = handed_over.collect();
    assert_eq!(handed_over, [json!({ "remote_block_ids": [[7]] })]);
    let expected = [("prefill_failed", 4), ("routed(no_signature)", 1)];
    gateway.expect_outcomes(&expected).await;
    gateway.expect_in_flight(0).await;
}

#[tokio::test]
async fn a_signature_of_more_than_70_kilobytes_decides() {
    let (layers, experts, regions) = (60, 384, 3);
    let geometry = Geometry::new(layers, experts).unwrap();
    let all = geometry.counts();
    let transform = Transform::new(geometry, (0..60).collect(), vec![1.0; all]).unwrap();
    let norm = (all as f32 / regions as f32).sqrt();
    let of = |region: usize, i: usize| i % regions == region;
    let centroids = (0..regions)
        .flat_map(|region| (0..all).map(move |i| f32::from(u8::from(of(region, i))) / norm));
    let names: Vec<_> = (0..regions).map(|i| vec![format!("decode-{i}")]).collect();
    let inline = blob::inline(&blob::new(transform, centroids.collect(), &names));
    let models = json!([{ "model": "*", "blob": { "inline": inline } }]);
    let gateway = Gateway::start(Options::filter(json!({ "models": models }))).await;
    for region in 0..regions {
        // Of a million tokens: three bytes a count as a varint.
        let counts = (0..all).map(|i| if of(region, i) { 60_000 } else { 17_000 });
        let signature = Signature::dense(geometry, counts.collect(), Some(1 << 20)).unwrap();
        for encoding in [Encoding::U16, Encoding::Varint] {
            let header = signature.encode(encoding);
            let least = match encoding {
                Encoding::U16 => 60_000,
                Encoding::Varint => 70_000,
            };
            assert!(header.len() > least, "{}", header.len());
            let answer = Answer::prefill(KV_TRANSFER_PARAMS, Some(&header));
            gateway.prefill.answers(answer);
            let reply = gateway.post("/v1/completions", BODY).await;
            assert_eq!(reply.text(), format!("decode-{region}"), "{encoding:?}");
            assert!(!reply.headers.contains_key("x-eldr-signature"));
        }
    }
    gateway.expect_outcomes(&[("routed(in_band)", 6)]).await;
}

#[tokio::test]
async fn http_2_with_and_without_trailers() {
    let gateway = Gateway::start(Options::default()).await;
    gateway.prefill_says(Some(1));
    let socket = TcpStream::connect(gateway.address).await.unwrap();
    let io = TokioIo::new(socket);
    let builder = hyper::client::conn::http2::Builder::new(TokioExecutor::new());
    let (mut sender, connection) = builder.handshake(io).await.unwrap();
    tokio::spawn(connection);
    let url = format!("http://{}/v1/completions", gateway.address);
    for with_trailers in [false, true] {
        let trailers = with_trailers.then(|| {
            let mut trailers = HeaderMap::new();
            trailers.insert("x-sum", "1".parse().unwrap());
            Ok(trailers)
        });
        let body = Full::new(Bytes::from(BODY)).with_trailers(async { trailers });
        let request = Request::post(&url).header("content-type", "application/json");
        let answer = sender.send_request(request.body(body.boxed()).unwrap());
        let answer = soon("an answer", answer).await.unwrap();
        assert_eq!(answer.status(), 200, "trailers: {with_trailers}");
        let body = soon("a body", answer.into_body().collect()).await.unwrap();
        assert_eq!(body.to_bytes(), "decode-1");
    }
    let get = Request::get(&url).body(Empty::new().boxed()).unwrap();
    let answer = soon("an answer", sender.send_request(get)).await.unwrap();
    let body = soon("a body", answer.into_body().collect()).await.unwrap();
    assert_eq!(body.to_bytes(), "default");
    for leg in gateway.decode[1].received() {
        assert_eq!(leg.json()["prompt"], "hi");
        assert!(leg.json().get("kv_transfer_params").is_some());
    }
    gateway
        .expect_outcomes(&[("bypassed", 1), ("routed(in_band)", 2)])
        .await;
}

#[tokio::test]
async fn other_methods_and_posts_without_a_body_pass() {
    let gateway = Gateway::start(Options::default()).await;
    let methods = ["GET", "HEAD", "OPTIONS", "PUT", "DELETE", "PATCH"];
    for (index, method) in methods.into_iter().enumerate() {
        let mut request = post("/v1/completions", "");
        *request.method_mut() = Method::from_bytes(method.as_bytes()).unwrap();
        let reply = gateway.connect().await.call(request).await;
        assert_eq!(reply.status, 200, "{method}");
        let body = if method == "HEAD" { "" } else { "default" };
        assert_eq!(reply.text(), body, "{method}");
        assert_eq!(gateway.default.received()[index].method, method);
    }
    let head = "POST /v1/completions HTTP/1.1\r\nhost: g\r\nconnection: close\r\n";
    for rest in ["\r\n", "content-length: 0\r\n\r\n"] {
        let answer = raw(gateway.address, format!("{head}{rest}").as_bytes()).await;
        let answer = String::from_utf8_lossy(&answer).into_owned();
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
        assert!(answer.ends_with("default"), "{answer}");
    }
    gateway.expect_outcomes(&[("bypassed", 8)]).await;
    assert!(gateway.prefill.received().is_empty());
}

#[tokio::test]
async fn an_upgrade_becomes_a_tunnel_that_the_filter_leaves_alone() {
    let gateway = Gateway::start(Options::default()).await;
    gateway.default.close();
    let bind = async || TcpListener::bind(gateway.default.address).await;
    let listener = eventually("the port is free", bind, Result::is_ok).await;
    let listener = listener.unwrap();
    let worker = async {
        let (mut socket, _) = listener.accept().await.unwrap();
        assert!(read_until(&mut socket, b"\r\n\r\n").await);
        let head =
            "HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n";
        socket.write_all(head.as_bytes()).await.unwrap();
        assert!(read_until(&mut socket, b"ping").await);
        socket.write_all(b"pong").await.unwrap();
        assert!(!read_until(&mut socket, b"more").await);
    };
    let client = async {
        let mut socket = TcpStream::connect(gateway.address).await.unwrap();
        let request = "GET /v1/realtime HTTP/1.1\r\nhost: g\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n";
        socket.write_all(request.as_bytes()).await.unwrap();
        assert!(read_until(&mut socket, b"\r\n\r\n").await);
        // Bytes of another protocol, and what would be refused in a JSON body.
        let bytes = b"\x00\xff{\"kv_transfer_params\":{}}ping";
        socket.write_all(bytes).await.unwrap();
        assert!(read_until(&mut socket, b"pong").await);
    };
    soon("both are done", async { tokio::join!(worker, client) }).await;
    gateway.expect_outcomes(&[("bypassed", 1)]).await;
}
