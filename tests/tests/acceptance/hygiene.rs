//! What a client may never do, and what it never sees.

use eldr_tests::client::{get, post, raw};
use eldr_tests::upstream::Received;
use eldr_tests::{Answer, Gateway, Options, blob};
use hyper::header::HeaderValue;
use serde_json::json;

const BODY: &str = r#"{"model":"m","prompt":"hi"}"#;

/// Headers that would steer, were they believed.
fn steering() -> Vec<(&'static str, String)> {
    vec![
        ("x-eldr-decode-cluster", "decode-2".into()),
        ("x-eldr-signature", blob::signature_of(2, 3)),
        ("x-eldr-decision", "decode-2".into()),
        ("x-eldr-anything", "1".into()),
        ("x-gateway-destination-endpoint", "127.0.0.1:1".into()),
        ("x-data-parallel-rank", "3".into()),
        ("x-prefiller-host-port", "127.0.0.1:1".into()),
    ]
}

/// No upstream sees a steering header, unless the gateway itself set it to another value.
fn assert_clean(received: &Received, chosen: Option<&str>) {
    for (name, _) in steering() {
        let values: Vec<_> = received.headers.get_all(name).iter().collect();
        let own = chosen.filter(|_| name == "x-eldr-decode-cluster");
        let expected: Vec<_> = own
            .iter()
            .map(|v| HeaderValue::from_str(v).unwrap())
            .collect();
        let clean = values.is_empty() || values == expected.iter().collect::<Vec<_>>();
        assert!(clean, "{name} reached an upstream: {values:?}");
    }
}

fn steer<T>(mut request: hyper::Request<T>) -> hyper::Request<T> {
    for (name, value) in steering() {
        request.headers_mut().append(name, value.parse().unwrap());
    }
    request
}

#[tokio::test]
async fn steering_headers_have_no_effect_on_a_routed_request() {
    let gateway = Gateway::start(Options::default()).await;
    let request = steer(post("/v1/completions", BODY));
    let reply = gateway.connect().await.call(request).await;
    assert_eq!(
        reply.text(),
        "decode-0",
        "prefill's signature decides, not the client's"
    );
    assert_clean(&gateway.prefill.only(), None);
    assert_clean(&gateway.decode[0].only(), Some("decode-0"));
}

#[tokio::test]
async fn steering_headers_have_no_effect_on_a_request_that_is_not_routed() {
    let gateway = Gateway::start(Options::default()).await;
    let mut connection = gateway.connect().await;
    for request in [
        get("/v1/models"),
        post("/v1/completions", ""),
        post("/other", BODY),
    ] {
        let reply = connection.call(steer(request)).await;
        assert_eq!(reply.text(), "default");
    }
    let received = gateway.default.received();
    assert_eq!(received.len(), 3);
    received
        .iter()
        .for_each(|received| assert_clean(received, None));
}

#[tokio::test]
async fn steering_headers_have_no_effect_on_a_refused_request() {
    let gateway = Gateway::start(Options::default()).await;
    let body = r#"{"prompt":"hi","kv_transfer_params":{}}"#;
    let reply = gateway
        .connect()
        .await
        .call(steer(post("/v1/completions", body)))
        .await;
    assert_eq!(reply.status, 400);
    assert!(
        gateway
            .decode
            .iter()
            .all(|worker| worker.received().is_empty())
    );
    assert!(gateway.default.received().is_empty());
}

#[tokio::test]
async fn the_clients_own_transfer_params_are_refused_however_they_are_spelled() {
    let gateway = Gateway::start(Options::default()).await;
    let bodies = [
        r#"{"prompt":"hi","kv_transfer_params":{"remote_host":"10.0.0.9"}}"#,
        r#"{"kv_transfer_params":null,"prompt":"hi"}"#,
        r#"{"prompt":"hi","kv\u005ftransfer_params":{}}"#,
        r#"{"prompt":"hi","kv_transfer_params":{},"kv_transfer_params":{}}"#,
        r#"{"prompt":"hi","\u006bv_transfer_param\u0073":{},"kv_transfer_params":{}}"#,
    ];
    for body in bodies {
        for path in ["/v1/completions", "/v1/chat/completions"] {
            let reply = gateway.post(path, body).await;
            assert_eq!(reply.status, 400, "{body}");
            assert!(
                reply.text().contains("kv_transfer_params"),
                "{}",
                reply.text()
            );
        }
    }
    gateway.assert_nothing_sent();
    gateway.expect_outcomes(&[("refused", 10)]).await;
}

#[tokio::test]
async fn a_body_that_only_the_engine_could_read_is_refused() {
    // Python's parser takes each of these, and would find the transfer params.
    let utf16: Vec<u8> =
        r#"{"kv_transfer_params":{}}"#.encode_utf16().flat_map(u16::to_le_bytes).collect();
    let bodies = [
        br#"{"prompt":"hi","temperature":NaN,"kv_transfer_params":{}}"#.to_vec(),
        br#"{"prompt":"hi","\ud800":1,"kv_transfer_params":{}}"#.to_vec(),
        b"\xef\xbb\xbf{\"kv_transfer_params\":{}}".to_vec(),
        utf16,
    ];
    let gateway = Gateway::start(Options::default()).await;
    for body in bodies {
        let reply = gateway.post("/v1/completions", body.clone()).await;
        assert_eq!(reply.status, 400, "{}", String::from_utf8_lossy(&body));
    }
    // An engine that ignores the header would read this one as it is.
    let mut request = post("/v1/completions", r#"{"kv_transfer_params":{}}"#);
    request
        .headers_mut()
        .insert("content-encoding", HeaderValue::from_static("gzip"));
    assert_eq!(gateway.connect().await.call(request).await.status, 415);
    gateway.assert_nothing_sent();
    gateway.expect_outcomes(&[("refused", 5)]).await;
}

#[tokio::test]
async fn another_spelling_of_the_path_does_not_go_around_the_filter() {
    let gateway = Gateway::start(Options::default()).await;
    let paths = [
        "/v1/%63ompletions",
        "/v1//completions",
        "/v1/./completions",
        "/x/../v1/completions",
        "/v1%2Fcompletions",
    ];
    for path in paths {
        let reply = gateway.post(path, r#"{"kv_transfer_params":{}}"#).await;
        assert!(
            gateway.default.received().is_empty(),
            "{path} went to the default upstream"
        );
        // 307: Envoy sends the client to the path without escaped slashes.
        assert!(
            [400, 307].contains(&reply.status.as_u16()),
            "{path}: {}",
            reply.status
        );
    }
}

#[tokio::test]
async fn a_member_of_that_name_further_inside_is_the_clients_own_business() {
    let gateway = Gateway::start(Options::default()).await;
    let body = r#"{"prompt":"kv_transfer_params","metadata":{"kv_transfer_params":{}}}"#;
    assert_eq!(gateway.post("/v1/completions", body).await.status, 200);
}

#[tokio::test]
async fn the_signature_never_reaches_the_client() {
    let gateway = Gateway::start(Options::filter(json!({ "debug_headers": false }))).await;
    let signature = blob::signature_of(0, 3);
    let leaking = |status: u16| Answer::status(status).header("x-eldr-signature", &signature);
    gateway.default.answers(leaking(200));
    for worker in &gateway.decode {
        worker.answers(leaking(200));
    }

    let mut replies = vec![gateway.post("/v1/completions", BODY).await];
    replies.push(gateway.connect().await.call(get("/v1/models")).await);
    gateway.prefill.answers(leaking(422));
    replies.push(gateway.post("/v1/completions", BODY).await);
    gateway.prefill.answers(leaking(500));
    replies.push(gateway.post("/v1/completions", BODY).await);
    replies.push(
        gateway
            .post("/v1/completions", r#"{"kv_transfer_params":1}"#)
            .await,
    );

    let statuses: Vec<u16> = replies.iter().map(|reply| reply.status.as_u16()).collect();
    assert_eq!(statuses, [200, 200, 422, 200, 400]);
    for reply in replies {
        let ours: Vec<_> = reply
            .headers
            .keys()
            .filter(|k| k.as_str().contains("eldr"))
            .collect();
        assert!(ours.is_empty(), "{ours:?}");
    }
}

#[tokio::test]
async fn header_values_that_are_not_utf_8_do_no_harm() {
    let gateway = Gateway::start(Options::default()).await;
    let signature = blob::signature_of(1, 3);
    let answer = Answer::prefill("{}", Some(&signature)).header("x-latin", b"caf\xe9");
    gateway.prefill.answers(answer);
    let mut request = b"POST /v1/completions HTTP/1.1\r\nhost: gateway\r\nconnection: close\r\n\
        x-latin: caf\xe9\r\nx-eldr-\xff: 1\r\ncontent-length: 15\r\n\r\n{\"prompt\":\"hi\"}"
        .to_vec();
    // A header *name* with such a byte is no HTTP: drop it from the request that must pass.
    let bad_name = b"x-eldr-\xff: 1\r\n";
    let at = request
        .windows(bad_name.len())
        .position(|w| w == bad_name)
        .unwrap();
    request.drain(at..at + bad_name.len());
    let answer = raw(gateway.address, &request).await;
    assert!(
        answer.starts_with(b"HTTP/1.1 200"),
        "{}",
        String::from_utf8_lossy(&answer)
    );
    assert!(
        answer.ends_with(b"decode-1"),
        "{}",
        String::from_utf8_lossy(&answer)
    );
    let received = gateway.decode[1].only();
    assert_eq!(received.headers["x-latin"].as_bytes(), b"caf\xe9");

    // A signature of such bytes is malformed, no more.
    gateway
        .prefill
        .answers(Answer::prefill("{}", None).header("x-eldr-signature", b":\xff\xfe:"));
    let reply = gateway.post("/v1/completions", BODY).await;
    assert_eq!(reply.status, 200);
    gateway
        .expect_outcomes(&[("routed(in_band)", 1), ("routed(malformed_signature)", 1)])
        .await;
}

#[tokio::test]
async fn duplicate_headers_of_the_client_reach_decode_in_order() {
    let gateway = Gateway::start(Options::default()).await;
    let request = b"POST /v1/completions HTTP/1.1\r\nhost: gateway\r\nconnection: close\r\n\
        x-twice: a\r\nx-eldr-decode-cluster: decode-1\r\nX-Eldr-Decode-Cluster: decode-2\r\nx-twice: b\r\n\
        content-length: 15\r\n\r\n{\"prompt\":\"hi\"}";
    let answer = raw(gateway.address, request).await;
    assert!(
        answer.ends_with(b"decode-0"),
        "{}",
        String::from_utf8_lossy(&answer)
    );
    let received = gateway.decode[0].only();
    let values: Vec<_> = received.headers.get_all("x-twice").iter().collect();
    assert!(values == ["a", "b"] || values == ["a,b"], "{values:?}");
}
