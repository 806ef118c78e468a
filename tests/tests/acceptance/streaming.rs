//! A streamed answer is passed on as it is, when it comes.

use eldr_tests::client::{Connection, next_piece, post};
use eldr_tests::{Answer, Gateway, Options};
use serde_json::json;

const BODY: &str = r#"{"model":"m","prompt":"hi","stream":true}"#;

#[tokio::test]
async fn each_piece_arrives_before_the_next_is_released() {
    let mut gateway = Gateway::start(Options::default()).await;
    gateway.decode[0].by_hand();
    let mut connection = gateway.connect().await;
    let (answer, stream) = gateway.decode[0]
        .streams_to(connection.send(post("/v1/completions", BODY)))
        .await;
    stream.send("data: 0\n\n").await;
    assert_eq!(answer.headers()["content-type"], "text/event-stream");
    let mut body = answer.into_body();
    assert_eq!(next_piece(&mut body).await.unwrap(), "data: 0\n\n");
    for index in 1..50 {
        let piece = format!("data: {index}\n\n");
        stream.send(piece.clone()).await;
        assert_eq!(next_piece(&mut body).await.unwrap(), piece);
    }
    stream.finish();
    assert_eq!(next_piece(&mut body).await, None);
}

#[tokio::test]
async fn the_head_of_a_stream_arrives_before_its_first_piece() {
    let mut gateway = Gateway::start(Options::default()).await;
    gateway.decode[0].by_hand();
    let mut connection = gateway.connect().await;
    let (answer, stream) = gateway.decode[0]
        .streams_to(connection.send(post("/v1/chat/completions", BODY)))
        .await;
    assert_eq!(answer.status(), 200);
    stream.finish();
    assert_eq!(next_piece(&mut answer.into_body()).await, None);
}

#[tokio::test]
async fn an_answer_is_the_same_as_from_a_direct_call() {
    let gateway = Gateway::start(Options::filter(json!({ "debug_headers": false }))).await;
    let events: String = (0..2000)
        .map(|i| format!("data: {{\"i\":{i}}}\n\n"))
        .collect();
    let answers = [
        Answer::event_stream().body(events + "data: [DONE]\n\n"),
        Answer::json("{\"big\":123456789012345678901234567890}").header("x-engine", b"caf\xe9"),
        Answer::status(429)
            .header("retry-after", "2")
            .body("slow down"),
        Answer::status(500).body(vec![0u8, 255, 1]),
    ];
    for answer in answers {
        gateway.decode[0].answers(answer);
        let direct = Connection::open(gateway.decode[0].address)
            .await
            .call(post("/", BODY))
            .await;
        let through = gateway.post("/v1/completions", BODY).await;
        assert_eq!(
            (through.status, &through.body),
            (direct.status, &direct.body)
        );
        let mut headers = through.headers;
        // What any Envoy adds.
        headers.remove("x-envoy-upstream-service-time");
        headers.remove("server");
        let (mut expected, date) = (direct.headers, "date");
        headers.remove(date);
        expected.remove(date);
        assert_eq!(headers, expected);
    }
}

#[tokio::test]
async fn a_decode_worker_that_breaks_off_is_not_hidden() {
    let mut gateway = Gateway::start(Options::default()).await;
    gateway.decode[0].by_hand();
    let mut connection = gateway.connect().await;
    let (answer, stream) = gateway.decode[0]
        .streams_to(connection.send(post("/v1/completions", BODY)))
        .await;
    stream.send("data: 0\n\n").await;
    let mut body = answer.into_body();
    assert_eq!(next_piece(&mut body).await.unwrap(), "data: 0\n\n");
    stream.reset().await;
    let end = http_body_util::BodyExt::collect(body).await;
    assert!(
        end.is_err(),
        "a stream that broke must not look complete: {end:?}"
    );
    gateway.expect_in_flight(0).await;
}
