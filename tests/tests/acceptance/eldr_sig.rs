//! The official artifact's signature, inside the prefill answer's `kv_transfer_params`, routes and goes no further.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use eldr_tests::{Answer, Gateway, Options, blob};
use serde_json::json;

const BODY: &str = r#"{"model":"m","prompt":"hi"}"#;

fn base64_of(counts: [i16; 3]) -> String {
    let bytes: Vec<u8> = counts
        .iter()
        .flat_map(|count| count.to_le_bytes())
        .collect();
    STANDARD.encode(bytes)
}

/// What a prefill worker of the official fork answers; `eldr_sig` is JSON.
fn answer(eldr_sig: &str, header: Option<&str>) -> Answer {
    let params = format!(
        r#"{{"do_remote_prefill":true, "eldr_sig": {eldr_sig}, "prefill_first_token_id":1.50,"x":[ 18446744073709551617 ]}}"#
    );
    Answer::prefill(&params, header)
}

/// The same params without the signature, every other byte as it was.
const PARAMS: &str =
    r#"{"do_remote_prefill":true, "prefill_first_token_id":1.50,"x":[ 18446744073709551617 ]}"#;

/// The request goes to this worker for this reason, and the signature neither to decode nor to the client.
async fn assert_goes(options: Options, answer: Answer, worker: usize, reason: &str) {
    let gateway = Gateway::start(options).await;
    gateway.prefill.answers(answer);
    let reply = gateway.post("/v1/completions", BODY).await;
    assert_eq!(reply.text(), format!("decode-{worker}"), "{reason}");
    assert!(!format!("{:?}", reply.headers).contains("eldr_sig"));
    let received = gateway.decode[worker].only();
    assert_eq!(
        received.text(),
        format!(r#"{{"kv_transfer_params":{PARAMS},"model":"m","prompt":"hi"}}"#)
    );
    gateway
        .expect_outcomes(&[(&format!("routed({reason})"), 1)])
        .await;
}

#[tokio::test]
async fn it_routes_and_decode_never_sees_it() {
    let signature = format!("\"{}\"", base64_of([0, 0, 7]));
    assert_goes(Options::default(), answer(&signature, None), 2, "in_band").await;
}

#[tokio::test]
async fn the_header_wins_where_both_are_there() {
    let signature = format!("\"{}\"", base64_of([0, 0, 7]));
    let header = blob::signature_of(1, 3);
    let answer = answer(&signature, Some(&header));
    assert_goes(Options::default(), answer, 1, "in_band").await;
}

#[tokio::test]
async fn one_that_is_broken_is_a_reason() {
    let negative = base64_of([0, -1, 7]);
    for text in [negative.as_str(), "AAAHAA==", "!!!!", "AAAHAAAAAA"] {
        let answer = answer(&format!("\"{text}\""), None);
        assert_goes(Options::default(), answer, 0, "malformed_signature").await;
    }
}

#[tokio::test]
async fn none_is_none() {
    assert_goes(Options::default(), answer("null", None), 0, "no_signature").await;
}

#[tokio::test]
async fn without_a_blob_nobody_reads_it_and_decode_still_does_not_see_it() {
    let options = Options::filter(json!({ "models": [{ "model": "*", "policy": "band" }] }));
    let signature = format!("\"{}\"", base64_of([0, 0, 7]));
    assert_goes(options, answer(&signature, None), 0, "no_blob").await;
}
