use serde_json::json;

use super::*;
use crate::config::Config;
use crate::headers::Header;
use crate::plugin::tests::blob_bytes;
use crate::request::OnHeaders;

fn plugin() -> Plugin {
    let config = json!({
        "models": [{"model": "*"}],
        "decode_clusters": ["decode-0", "decode-1"],
        "prefill_clusters": ["p0", "p1"],
        "prefill_policy": "prefix_hash",
        "mode": "relay",
    });
    let mut plugin = Plugin::new(Config::parse(config.to_string().as_bytes()).unwrap());
    let any = plugin.model(None).unwrap();
    let blob = blob_bytes(1, &["decode-0", "decode-1"]);
    plugin.update(any, 1, &blob).unwrap();
    plugin
}

fn headers(pairs: &[(&str, &str)]) -> Vec<Header> {
    let own = |(name, value): &(&str, &str)| ((*name).to_owned(), value.as_bytes().to_vec());
    pairs.iter().map(own).collect()
}

fn ask_at(path: &str, carried: Option<&str>, body: &str) -> (Request, OnBody) {
    let mut request = Request::default();
    request.carries(carried.map(|value| value.as_bytes().to_vec()));
    let head = [(":method", "POST"), (":path", path), ("x-request-id", "r")];
    assert_eq!(
        request.on_headers(headers(&head), false),
        OnHeaders::ReadBody
    );
    let next = request.on_body(&plugin(), body.as_bytes());
    (request, next)
}

fn ask(carried: Option<&str>, body: &str) -> (Request, OnBody) {
    ask_at("/v1/completions", carried, body)
}

fn decode(signature: Option<&str>, fetches: bool) -> OnBody {
    OnBody::Relay(Relayed::Decode {
        signature: signature.map(|value| value.as_bytes().to_vec()),
        fetches,
        body: None,
    })
}

#[test]
fn a_leg_is_prefill_if_and_only_if_its_blocks_are_for_a_remote_decode() {
    let prefill = OnBody::Relay(Relayed::Prefill);
    for (params, expected) in [
        (r#"{"do_remote_decode":true}"#, prefill),
        (
            r#"{ "do_remote\u005fdecode" : true, "x":1}"#,
            OnBody::Relay(Relayed::Prefill),
        ),
        (r#"{"do_remote_decode":false}"#, decode(None, false)),
        (r#"{"do_remote_decode":"true"}"#, decode(None, false)),
        (
            r#"{"do_remote_decode":true,"do_remote_decode":false}"#,
            decode(None, false),
        ),
        (r#"{"do_remote_prefill":true}"#, decode(None, true)),
        ("null", decode(None, false)),
        ("[true]", decode(None, false)),
    ] {
        let (_, found) = ask(None, &format!(r#"{{"kv_transfer_params":{params}}}"#));
        assert_eq!(found, expected, "{params}");
    }
    assert_eq!(ask(None, r#"{"prompt":"p"}"#).1, decode(None, false));
}

#[test]
fn both_legs_have_an_id_and_prefill_a_prefix() {
    let body = r#"{"prompt":"abc","kv_transfer_params":{"do_remote_decode":true}}"#;
    let (mut request, _) = ask(None, body);
    assert_eq!(request.id(), Some(&b"r"[..]));
    assert_eq!(request.leg().prefix, b"abc");
    assert_eq!(ask(None, "{}").0.id(), Some(&b"r"[..]));
}

#[test]
fn a_decode_leg_may_bring_its_signature_in_the_header_or_in_its_params() {
    let params = r#"{"do_remote_prefill":true, "eldr_sig":"AAAJAAAAAAA=","x":1.50}"#;
    let body = format!(r#"{{"prompt":"p","kv_transfer_params":{params}, "n":2}}"#);
    let left = r#"{"prompt":"p","kv_transfer_params":{"do_remote_prefill":true,"x":1.50}, "n":2}"#;
    for (carried, expected) in [(None, ":AAAJAAAAAAA=:;l=1;e=4"), (Some("s"), "s")] {
        let edited = OnBody::Relay(Relayed::Decode {
            signature: Some(expected.as_bytes().to_vec()),
            fetches: true,
            body: Some(Head {
                replaces: body.len(),
                bytes: left.into(),
            }),
        });
        assert_eq!(ask(carried, &body).1, edited);
    }
    let plain = r#"{"kv_transfer_params":{"do_remote_prefill":true}}"#;
    assert_eq!(ask(Some("s"), plain).1, decode(Some("s"), true));
}

#[test]
fn token_requests_have_their_params_further_inside() {
    let ask = |params: &str| {
        let body = format!(
            r#"{{"token_ids":[1],"sampling_params":{{"extra_args":{{"kv_transfer_params":{params}}}}}}}"#
        );
        ask_at("/inference/v1/generate", None, &body).1
    };
    let prefill = OnBody::Relay(Relayed::Prefill);
    assert_eq!(ask(r#"{"do_remote_decode":true}"#), prefill);
    assert_eq!(ask(r#"{"do_remote_prefill":true}"#), decode(None, true));
    let OnBody::Relay(Relayed::Decode {
        signature: Some(signature),
        body: Some(body),
        ..
    }) = ask(r#"{"a":1.50,"eldr_sig":"AAAJAAAAAAA="}"#)
    else {
        panic!("no signature")
    };
    assert_eq!(signature, b":AAAJAAAAAAA=:;l=1;e=4");
    let left =
        r#"{"token_ids":[1],"sampling_params":{"extra_args":{"kv_transfer_params":{"a":1.50}}}}"#;
    assert_eq!(body.bytes, left);
}

#[test]
fn what_a_coordinator_sends_elsewhere_passes_whatever_it_says() {
    let body = r#"{"sampling_params":{"kv_transfer_params":{}}}"#;
    let (request, next) = ask_at("/v1/embeddings", None, body);
    assert_eq!(
        (next, request.outcome()),
        (OnBody::Bypass, Some(Outcome::Bypassed))
    );
}

#[test]
fn a_prefill_leg_ends_as_its_answer_says() {
    let body = r#"{"kv_transfer_params":{"do_remote_decode":true}}"#;
    assert_eq!(ask(None, body).0.outcome(), Some(Outcome::ClientGone));
    for (status, outcome) in [
        (Some(200), Outcome::Prefilled),
        (Some(422), Outcome::PrefillRejected),
        (Some(302), Outcome::PrefillFailed),
        (Some(503), Outcome::PrefillFailed),
        (None, Outcome::PrefillFailed),
    ] {
        let (mut request, _) = ask(None, body);
        assert_eq!(request.on_relayed_answer(status), status == Some(200));
        request.on_response();
        assert_eq!(request.outcome(), Some(outcome), "{status:?}");
    }
}

#[test]
fn only_short_json_is_held_for_its_signature() {
    let json = ("content-type", "application/json; charset=utf-8");
    for (more, readable) in [
        (vec![json], true),
        (vec![json, ("content-length", "524288")], true),
        (vec![json, ("content-length", "524289")], false),
        (vec![json, ("content-length", "x")], false),
        (vec![json, ("content-encoding", "gzip")], false),
        (vec![("content-type", "text/event-stream")], false),
        (vec![], false),
    ] {
        assert_eq!(is_readable(&headers(&more)), readable, "{more:?}");
    }
}
