//! The two legs of a routed request, for every kind of completion.

use eldr_tests::{Answer, Gateway, KV_TRANSFER_PARAMS, Options};
use serde_json::{Value, json};

const KINDS: [(&str, &str); 4] = [
    (
        "/v1/completions",
        r#"{"model":"m","prompt":"hi","max_tokens":64}"#,
    ),
    (
        "/v1/completions",
        r#"{"model":"m","prompt":"hi","max_tokens":64,"stream":true}"#,
    ),
    (
        "/v1/chat/completions",
        r#"{"model":"m","messages":[{"role":"user","content":"hi"}]}"#,
    ),
    (
        "/v1/chat/completions",
        r#"{"model":"m","messages":[],"stream":true,"stream_options":{"include_usage":true}}"#,
    ),
];

#[tokio::test]
async fn prefill_is_asked_for_one_token_and_decode_gets_the_hand_over() {
    let gateway = Gateway::start(Options::default()).await;
    gateway.prefill_says(Some(1));
    for (path, body) in KINDS {
        let reply = gateway.post(path, body).await;
        assert_eq!(
            (reply.status.as_u16(), reply.text().as_str()),
            (200, "decode-1"),
            "{body}"
        );
    }

    let client: Vec<Value> = KINDS
        .map(|(_, body)| serde_json::from_str(body).unwrap())
        .into();
    let (prefill, decode) = (gateway.prefill.received(), gateway.decode[1].received());
    assert_eq!((prefill.len(), decode.len()), (4, 4));
    for (index, (path, _)) in KINDS.iter().enumerate() {
        let (prefill, decode) = (&prefill[index], &decode[index]);
        assert_eq!([&prefill.path, &decode.path], [path, path]);

        let asked = prefill.json();
        assert_eq!(asked["max_tokens"], 1, "{asked}");
        assert_eq!(asked["stream"], false, "{asked}");
        assert_eq!(
            asked["kv_transfer_params"]["do_remote_decode"], true,
            "{asked}"
        );
        assert_eq!(
            asked["kv_transfer_params"]["do_remote_prefill"], false,
            "{asked}"
        );
        assert_eq!(asked.get("stream_options"), None, "{asked}");

        let mut expected = client[index].clone();
        expected["kv_transfer_params"] = serde_json::from_str(KV_TRANSFER_PARAMS).unwrap();
        assert_eq!(decode.json(), expected);
    }
    gateway.expect_outcomes(&[("routed(in_band)", 4)]).await;
}

#[tokio::test]
async fn both_legs_carry_the_same_request_id_and_the_true_length() {
    let gateway = Gateway::start(Options::default()).await;
    gateway.post("/v1/completions", r#"{"prompt":"hi"}"#).await;
    let (prefill, decode) = (gateway.prefill.only(), gateway.decode[0].only());
    let id = prefill
        .headers
        .get("x-request-id")
        .expect("prefill has a request id");
    assert_eq!(decode.headers.get("x-request-id"), Some(id));
    for leg in [prefill, decode] {
        if let Some(length) = leg.headers.get("content-length") {
            assert_eq!(length.to_str().unwrap(), leg.body.len().to_string());
        }
    }
}

#[tokio::test]
async fn identity_goes_along_to_prefill_and_what_describes_the_connection_does_not() {
    let gateway = Gateway::start(Options::default()).await;
    let mut request = eldr_tests::client::post("/v1/completions?trace=1", r#"{"prompt":"hi"}"#);
    for (name, value) in [
        ("authorization", "Bearer t"),
        (
            "traceparent",
            "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        ),
        ("accept-encoding", "gzip"),
        ("te", "trailers"),
    ] {
        request.headers_mut().insert(name, value.parse().unwrap());
    }
    gateway.connect().await.call(request).await;
    let prefill = gateway.prefill.only();
    assert_eq!(prefill.path, "/v1/completions?trace=1");
    assert_eq!(prefill.headers["authorization"], "Bearer t");
    assert_eq!(
        prefill.headers["traceparent"],
        "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    );
    assert_eq!(prefill.headers["content-type"], "application/json");
    for gone in ["accept-encoding", "te", "expect"] {
        assert_eq!(prefill.headers.get(gone), None, "{gone}");
    }
    // The decode leg is the client's request: it may choose its encoding.
    assert_eq!(gateway.decode[0].only().headers["accept-encoding"], "gzip");
}

#[tokio::test]
async fn a_prefill_that_kept_no_blocks_lets_decode_prefill_by_itself() {
    let gateway = Gateway::start(Options::default()).await;
    let body = r#"{"model":"m","prompt":"hi"}"#;
    for params in ["null", "{}"] {
        let signature = eldr_tests::blob::signature_of(2, 3);
        gateway
            .prefill
            .answers(Answer::prefill(params, Some(&signature)));
        assert_eq!(
            gateway.post("/v1/completions", body).await.text(),
            "decode-2"
        );
    }
    let received = gateway.decode[2].received();
    assert_eq!(received[0].text(), body, "absent params add nothing");
    assert_eq!(
        received[1].json()["kv_transfer_params"],
        json!({}),
        "params are opaque"
    );
}

#[tokio::test]
async fn the_access_log_names_outcome_and_decision() {
    let gateway = Gateway::start(Options::default()).await;
    gateway.post("/v1/completions", r#"{"prompt":"hi"}"#).await;
    let log = gateway.access_log(1).await;
    assert_eq!(log[0]["outcome"], "routed(in_band)", "{log:?}");
    let decision = log[0]["decision"].as_str().expect("a decision");
    assert!(
        decision.starts_with("decode-0;reason=in_band"),
        "{decision}"
    );
    assert_eq!(log[0]["cluster"], "decode-0");
}
