//! The bytes of a client's body survive, but for the fields that the gateway sets.

use std::fmt;

use eldr_tests::{Answer, Gateway, KV_TRANSFER_PARAMS, Options, blob};
use serde::Deserializer as _;
use serde::de::{MapAccess, Visitor};
use serde_json::value::RawValue;

/// Numbers beyond `u64` and `f64`, odd spellings, keys out of order and twice, escapes, white space, a nested member
/// with the name of a field that is set.
const TRICKY: &str = "{ \"zeta\" : 123456789012345678901234567890,\n\t\"alpha\": 1.10E+2 , \"alpha\":-0.0,\
    \"model\":\"m\",\"seed\":18446744073709551616,\"temperature\":1e-400,\"prompt\":\"\\u00e9\\u0000\\/ caf\u{e9}\",\
    \"nested\":{\"b\":[1.0,2.50,{}],\"a\":null,\"max_tokens\":7,\"b\":1},\"us\\u0065r\":\"x\", \"max_tokens\":64 }\r\n";

#[tokio::test]
async fn decode_gets_the_clients_bytes_with_the_hand_over_spliced_in() {
    let gateway = Gateway::start(Options::default()).await;
    let reply = gateway.post("/v1/completions", TRICKY).await;
    assert_eq!(reply.status, 200);
    let expected = format!(
        "{{\"kv_transfer_params\":{KV_TRANSFER_PARAMS},{}",
        &TRICKY[1..]
    );
    assert_eq!(gateway.decode[0].only().text(), expected);
}

#[tokio::test]
async fn prefill_gets_every_member_it_does_not_set_as_the_client_wrote_it() {
    let gateway = Gateway::start(Options::default()).await;
    gateway.post("/v1/completions", TRICKY).await;
    let received = gateway.prefill.only();
    let set = ["max_tokens", "stream", "kv_transfer_params"];
    let kept = |text: &str| {
        let members = members(text).into_iter();
        members
            .filter(|(key, _)| !set.contains(&key.as_str()))
            .collect::<Vec<_>>()
    };
    assert_eq!(kept(received.text()), kept(TRICKY));
}

#[tokio::test]
async fn a_field_that_is_set_replaces_every_duplicate_of_it_however_it_is_spelled() {
    let gateway = Gateway::start(Options::default()).await;
    let body = r#"{"stream":true,"max_tokens":64,"str\u0065am":true,"prompt":"hi","max_tok\u0065ns":9,"n":4,"n":5}"#;
    gateway.post("/v1/completions", body).await;
    let sent = members(gateway.prefill.only().text());
    for (key, value) in [("stream", "false"), ("max_tokens", "1"), ("n", "1")] {
        let values: Vec<_> = sent
            .iter()
            .filter(|(k, _)| k == key)
            .map(|(_, v)| v)
            .collect();
        assert!(
            !values.is_empty() && values.iter().all(|v| *v == value),
            "{key}: {values:?}"
        );
    }
    let decode = gateway.decode[0].only();
    assert!(decode.text().ends_with(&body[1..]), "{}", decode.text());
}

#[tokio::test]
async fn the_hand_over_is_passed_on_byte_for_byte() {
    let gateway = Gateway::start(Options::default()).await;
    let params = r#"{ "do_remote_prefill":true,"remote_block_ids":[[1,2,4]], "future":{"x":1e400,"x":36893488147419103232},"s":"\u00e9" }"#;
    let signature = blob::signature_of(0, 3);
    gateway
        .prefill
        .answers(Answer::prefill(params, Some(&signature)));
    gateway.post("/v1/completions", r#"{"prompt":"hi"}"#).await;
    let expected = format!(r#"{{"kv_transfer_params":{params},"prompt":"hi"}}"#);
    assert_eq!(gateway.decode[0].only().text(), expected);
}

#[tokio::test]
async fn a_long_prompt_passes_whole() {
    let gateway = Gateway::start(Options::default()).await;
    let prompt = "word ".repeat(1 << 20);
    let body = format!(r#"{{"prompt":"{prompt}"}}"#);
    assert_eq!(gateway.post("/v1/completions", body).await.status, 200);
    assert_eq!(gateway.prefill.only().json()["prompt"], prompt);
    assert_eq!(gateway.decode[0].only().json()["prompt"], prompt);
}

#[tokio::test]
async fn a_body_that_comes_in_pieces_is_one_body() {
    let gateway = Gateway::start(Options::default()).await;
    let request = b"POST /v1/completions HTTP/1.1\r\nhost: gateway\r\nconnection: close\r\n\
        transfer-encoding: chunked\r\n\r\n5\r\n{\"pro\r\n8\r\nmpt\":\"hi\r\n2\r\n\"}\r\n0\r\n\r\n";
    let answer = eldr_tests::client::raw(gateway.address, request).await;
    assert!(
        answer.starts_with(b"HTTP/1.1 200"),
        "{}",
        String::from_utf8_lossy(&answer)
    );
    assert_eq!(gateway.prefill.only().json()["prompt"], "hi");
    assert_eq!(gateway.decode[0].only().json()["prompt"], "hi");
}

#[tokio::test]
async fn a_body_with_trailers_is_complete_at_the_trailers() {
    let gateway = Gateway::start(Options::default()).await;
    let request = b"POST /v1/completions HTTP/1.1\r\nhost: gateway\r\nconnection: close\r\n\
        transfer-encoding: chunked\r\ntrailer: x-sum\r\n\r\nf\r\n{\"prompt\":\"hi\"}\r\n0\r\nx-sum: 1\r\n\r\n";
    let answer = eldr_tests::client::raw(gateway.address, request).await;
    assert!(
        answer.starts_with(b"HTTP/1.1 200"),
        "{}",
        String::from_utf8_lossy(&answer)
    );
    assert_eq!(gateway.decode[0].only().json()["prompt"], "hi");
}

/// The object's members in order, duplicates included: unescaped key, raw value.
fn members(text: &str) -> Vec<(String, String)> {
    struct Members;
    impl<'de> Visitor<'de> for Members {
        type Value = Vec<(String, String)>;

        fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
            formatter.write_str("an object")
        }

        fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
            let mut members = Vec::new();
            while let Some((key, value)) = map.next_entry::<String, &RawValue>()? {
                members.push((key, value.get().to_owned()));
            }
            Ok(members)
        }
    }
    serde_json::Deserializer::from_str(text)
        .deserialize_map(Members)
        .expect("a JSON object")
}
