//! A client that goes away leaves nothing behind.

use eldr_tests::client::{next_piece, post};
use eldr_tests::{Answer, Gateway, Options, eventually};
use serde_json::json;

const BODY: &str = r#"{"model":"m","prompt":"hi","stream":true}"#;

/// Without releases, which would be decode requests of their own.
fn least_loaded() -> Options {
    let models = json!([{ "model": "*", "policy": "least_loaded" }]);
    Options::filter(json!({ "models": models, "release": "none" }))
}

#[tokio::test]
async fn during_prefill() {
    let mut gateway = Gateway::start(least_loaded()).await;
    gateway.prefill.by_hand();
    let mut connection = gateway.connect().await;
    let exchange = {
        let client = connection.send(post("/v1/completions", BODY));
        tokio::select! {
            _ = client => panic!("answered before prefill was"),
            exchange = gateway.prefill.next() => exchange,
        }
    };
    drop(connection);
    gateway.expect_outcomes(&[("client_gone", 1)]).await;
    // The late answer finds nobody and does no harm.
    exchange.answer(Answer::prefill("{}", None));
    gateway.expect_in_flight(0).await;
    gateway.prefill_says(None);
    let reply = gateway.post("/v1/completions", BODY).await;
    assert_eq!(reply.text(), "decode-0", "as idle as at the start");
    assert!(gateway.decode[1].received().is_empty() && gateway.decode[2].received().is_empty());
    gateway
        .expect_outcomes(&[("client_gone", 1), ("routed(blind)", 1)])
        .await;
}

#[tokio::test]
async fn during_decode() {
    let mut gateway = Gateway::start(least_loaded()).await;
    gateway.decode[0].by_hand();
    let mut connection = gateway.connect().await;
    let (answer, stream) = gateway.decode[0]
        .streams_to(connection.send(post("/v1/completions", BODY)))
        .await;
    stream.send("data: 0\n\n").await;
    let mut body = answer.into_body();
    assert_eq!(next_piece(&mut body).await.unwrap(), "data: 0\n\n");
    gateway.expect_in_flight(1).await;

    drop((connection, body));
    stream.abandoned().await;
    gateway.expect_in_flight(0).await;
    gateway.decode[0].answers(Answer::json("decode-0"));
    assert_eq!(
        gateway.post("/v1/completions", BODY).await.text(),
        "decode-0"
    );
    gateway.expect_outcomes(&[("routed(blind)", 2)]).await;
}

#[tokio::test]
async fn before_the_body_is_complete() {
    let gateway = Gateway::start(least_loaded()).await;
    let mut socket = tokio::net::TcpStream::connect(gateway.address)
        .await
        .unwrap();
    let head =
        b"POST /v1/completions HTTP/1.1\r\nhost: gateway\r\ncontent-length: 100\r\n\r\n{\"pro";
    tokio::io::AsyncWriteExt::write_all(&mut socket, head)
        .await
        .unwrap();
    let started = "http.gateway.downstream_rq_active";
    let active = async || gateway.envoy.stat(started).await.unwrap();
    eventually("the request has begun", active, |n| *n == 1).await;
    drop(socket);
    gateway.expect_outcomes(&[("client_gone", 1)]).await;
    assert!(gateway.prefill.received().is_empty());
    gateway.expect_in_flight(0).await;
}

#[tokio::test]
async fn in_numbers_and_the_counts_still_return_to_zero() {
    let mut gateway = Gateway::start(least_loaded()).await;
    for worker in &gateway.decode {
        worker.by_hand();
    }
    let mut held = Vec::new();
    for index in 0..12 {
        let mut connection = gateway.connect().await;
        let worker = index % 3;
        let (answer, stream) = gateway.decode[worker]
            .streams_to(connection.send(post("/v1/completions", BODY)))
            .await;
        held.push((connection, answer, stream));
    }
    gateway.expect_in_flight(12).await;
    for (index, (connection, answer, stream)) in held.into_iter().enumerate() {
        if index % 2 == 0 {
            drop((connection, answer));
            stream.abandoned().await;
        } else {
            stream.finish();
            assert_eq!(next_piece(&mut answer.into_body()).await, None);
        }
    }
    gateway.expect_in_flight(0).await;
    gateway.expect_outcomes(&[("routed(blind)", 12)]).await;
}
