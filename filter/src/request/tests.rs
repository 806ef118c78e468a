use eldr_core::decide::{Reason, RegionIndex, WorkerIndex};

use super::*;
use crate::config::Config;
use crate::plugin::tests::plugin;
use crate::release::Form;

fn plugin_that(on_prefill_failure: &str) -> Plugin {
    let config = serde_json::json!({
        "models": [{"model": "*"}],
        "decode_clusters": ["d"],
        "prefill_clusters": ["p"],
        "on_prefill_failure": on_prefill_failure,
    });
    Plugin::new(Config::parse(config.to_string().as_bytes()).unwrap())
}

fn headers(pairs: &[(&str, &str)]) -> Vec<Header> {
    pairs
        .iter()
        .map(|(name, value)| ((*name).to_owned(), value.as_bytes().to_vec()))
        .collect()
}

fn post(path: &str) -> Vec<Header> {
    headers(&[(":method", "POST"), (":path", path), ("x-request-id", "r")])
}

fn answer(status: &str, more: &[(&str, &str)], body: &str) -> Answer {
    let mut all = headers(&[(":status", status)]);
    all.extend(headers(more));
    Answer {
        headers: all,
        body: body.as_bytes().to_vec(),
    }
}

/// A request whose prefill leg is under way.
fn prefilling(body: &str) -> Request {
    let mut request = Request::default();
    assert_eq!(
        request.on_headers(post("/v1/completions"), false),
        OnHeaders::ReadBody
    );
    assert_eq!(request.on_body(&plugin(), body.as_bytes()), OnBody::Prefill);
    request
}

#[test]
fn only_generation_requests_with_a_body_are_held() {
    let ask = |headers: Vec<Header>, end| {
        let mut request = Request::default();
        let what = request.on_headers(headers, end);
        (what, request.outcome())
    };
    for path in [
        "/v1/%63ompletions",
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/completions?x=/y",
    ] {
        assert_eq!(ask(post(path), false).0, OnHeaders::ReadBody, "{path}");
    }
    let bypass = (OnHeaders::Bypass, Some(Outcome::Bypassed));
    assert_eq!(ask(post("/v1/completions"), true), bypass);
    let mut upload = post("/v1/audio/transcriptions");
    upload.extend(headers(&[(
        "content-type",
        "multipart/form-data; boundary=x",
    )]));
    assert_eq!(ask(upload, false), bypass);
    assert_eq!(
        ask(
            headers(&[(":method", "GET"), (":path", "/v1/completions")]),
            false
        ),
        bypass
    );
    let upgrade = [
        (":method", "GET"),
        (":path", "/v1/realtime"),
        ("upgrade", "websocket"),
    ];
    assert_eq!(ask(headers(&upgrade), false), bypass);
    for path in ["/v1/completions", "/v1/embeddings"] {
        let mut tunnel = post(path);
        tunnel.extend(headers(&[("upgrade", "websocket")]));
        let (what, outcome) = ask(tunnel, false);
        assert!(matches!(what, OnHeaders::Reply(Reply { status: 400, .. })));
        assert_eq!(outcome, Some(Outcome::Refused));
    }
    assert_eq!(ask(headers(&[(":method", "CONNECT")]), false), bypass);
}

#[test]
fn json_for_other_paths_passes_once_it_was_looked_through() {
    let ask = |body: &str| {
        let mut request = Request::default();
        assert_eq!(
            request.on_headers(post("/v1/embeddings"), false),
            OnHeaders::ReadBody
        );
        let what = request.on_body(&plugin(), body.as_bytes());
        (what, request.outcome())
    };
    for body in [r#"{"input":"a"}"#, r#"["\u00e9",1,null,true]"#] {
        assert_eq!(
            ask(body),
            (OnBody::Bypass, Some(Outcome::Bypassed)),
            "{body}"
        );
    }
    for body in [
        r#"{"sampling_params":{"extra_args":{"kv_transfer_params":{}}}}"#,
        r#"[{"kv\u005ftransfer_params":1}]"#,
        "{\"kv_transfer_params\"",
        "{\0\"\0k\0v\0_\0",
    ] {
        assert_eq!(ask(body).1, Some(Outcome::Refused), "{body}");
    }
}

#[test]
fn an_encoded_body_is_refused_since_an_engine_might_read_it_as_it_is() {
    for encodings in [&["gzip"][..], &["identity", "gzip"], &["identity, br"]] {
        let mut head = post("/v1/completions");
        head.extend(
            encodings
                .iter()
                .map(|e| ("content-encoding".into(), e.as_bytes().to_vec())),
        );
        let mut request = Request::default();
        let OnHeaders::Reply(reply) = request.on_headers(head, false) else {
            panic!("{encodings:?} was not refused")
        };
        assert_eq!(
            (reply.status, request.outcome()),
            (415, Some(Outcome::Refused))
        );
    }
    let mut plain = post("/v1/completions");
    plain.extend(headers(&[("content-encoding", "Identity")]));
    assert_eq!(
        Request::default().on_headers(plain, false),
        OnHeaders::ReadBody
    );
}

#[test]
fn what_is_not_a_json_object_is_refused_since_an_engine_might_take_it() {
    let utf16: Vec<u8> =
        r#"{"kv_transfer_params":{}}"#.encode_utf16().flat_map(u16::to_le_bytes).collect();
    for body in [
        &b""[..],
        b"not json",
        b"[1]",
        br#"{"temperature":NaN,"kv_transfer_params":{}}"#,
        br#"{"\ud800":1,"kv_transfer_params":{}}"#,
        b"\xef\xbb\xbf{\"kv_transfer_params\":{}}",
        &utf16,
    ] {
        let mut request = Request::default();
        request.on_headers(post("/v1/completions"), false);
        let OnBody::Reply(reply) = request.on_body(&plugin(), body) else {
            panic!("{body:?} was not refused")
        };
        assert_eq!(
            (reply.status, request.outcome()),
            (400, Some(Outcome::Refused))
        );
    }
}

#[test]
fn several_prompts_in_one_body_go_to_decode_alone() {
    for body in [r#"{"prompt":["a","b"]}"#, r#"{"prompt":[ [1,2],[3]]}"#] {
        let mut request = Request::default();
        request.on_headers(post("/v1/completions"), false);
        assert_eq!(
            request.on_body(&plugin(), body.as_bytes()),
            OnBody::Route,
            "{body}"
        );
    }
    prefilling(r#"{"prompt":[1,2,3]}"#);
}

#[test]
fn a_client_that_sends_kv_params_is_refused_however_it_spells_them() {
    for body in [
        r#"{"kv_transfer_params":null}"#,
        r#"{"a":1,"kv_transfer_params":{},"b":2}"#,
        r#"{"kv\u005ftransfer_params":{}}"#,
    ] {
        let mut request = Request::default();
        request.on_headers(post("/v1/chat/completions"), false);
        let OnBody::Reply(reply) = request.on_body(&plugin(), body.as_bytes()) else {
            panic!("{body} was not refused")
        };
        assert_eq!(reply.status, 400);
        assert_eq!(request.outcome(), Some(Outcome::Refused));
    }
}

#[test]
fn the_decode_body_is_the_clients_with_a_new_head() {
    let params = r#"{"do_remote_prefill":true,"x":1.50}"#;
    let good = answer(
        "200",
        &[("x-eldr-signature", ":AAA=:;l=1;e=1")],
        &format!(r#"{{"kv_transfer_params":{params}}}"#),
    );
    for (body, expected) in [
        (
            "\n {\"prompt\":\"a\"}",
            "\n {\"kv_transfer_params\":{\"do_remote_prefill\":true,\"x\":1.50},\"prompt\":\"a\"}",
        ),
        (
            "{ }",
            "{\"kv_transfer_params\":{\"do_remote_prefill\":true,\"x\":1.50} }",
        ),
    ] {
        let mut request = prefilling(body);
        let OnPrefill::Route {
            signature,
            head: Some(head),
        } = request.on_prefill(&good, &plugin_that("error"))
        else {
            panic!("not routed")
        };
        assert_eq!(*signature.unwrap(), *b":AAA=:;l=1;e=1");
        assert_eq!(
            format!("{}{}", head.bytes, &body[head.replaces..]),
            expected
        );
    }
}

#[test]
fn without_kv_params_decode_prefills_by_itself_but_the_signature_still_counts() {
    let mut request = prefilling("{}");
    let finished = answer(
        "200",
        &[("x-eldr-signature", "s")],
        r#"{"kv_transfer_params":null}"#,
    );
    let routed = OnPrefill::Route {
        signature: Some(b"s".into()),
        head: None,
    };
    assert_eq!(request.on_prefill(&finished, &plugin_that("error")), routed);
}

#[test]
fn a_rejection_by_prefill_goes_back_as_it_is() {
    let mut request = prefilling("{}");
    let rejection = answer(
        "422",
        &[("content-type", "text/plain"), ("x-eldr-signature", "s")],
        "too long",
    );
    let expected = Reply {
        status: 422,
        headers: headers(&[("content-type", "text/plain")]),
        body: b"too long".to_vec(),
    };
    let found = request.on_prefill(&rejection, &plugin_that("decode_only"));
    assert_eq!(found, OnPrefill::Reply(expected));
    assert_eq!(request.outcome(), Some(Outcome::PrefillRejected));
}

#[test]
fn a_failed_prefill_is_served_by_decode_alone_or_is_an_error() {
    let none = Answer {
        headers: vec![],
        body: vec![],
    };
    let failures = [
        (none, 502),
        (answer("500", &[], "oops"), 502),
        (answer("504", &[], "upstream request timeout"), 504),
        (answer("200", &[], ""), 502),
        (answer("200", &[], r#"{"kv_transfer_par"#), 502),
        (answer("302", &[], ""), 502),
    ];
    for (failure, status) in failures {
        let mut request = prefilling("{}");
        let alone = OnPrefill::Route {
            signature: None,
            head: None,
        };
        assert_eq!(
            request.on_prefill(&failure, &plugin_that("decode_only")),
            alone
        );
        request.routed(&decision(), "decode-0");
        assert_eq!(request.outcome(), Some(Outcome::PrefillFailed));

        let mut request = prefilling("{}");
        let OnPrefill::Reply(reply) = request.on_prefill(&failure, &plugin_that("error")) else {
            panic!("{failure:?} is no error")
        };
        assert_eq!(reply.status, status, "{failure:?}");
        assert_eq!(request.outcome(), Some(Outcome::PrefillFailed));
    }
}

fn decision() -> Decision {
    Decision {
        target: WorkerIndex(0),
        reason: Reason::InBand,
        region: Some(RegionIndex(3)),
        similarity: Some(0.93125),
        top: Some(1.0),
        band: 2,
    }
}

#[test]
fn the_decision_is_readable_and_the_outcome_names_its_reason() {
    let mut request = prefilling("{}");
    request.routed(&decision(), "decode-3");
    assert_eq!(
        request.decision(),
        "decode-3;reason=in_band;region=3;band=2;similarity=0.931"
    );
    assert_eq!(request.outcome(), Some(Outcome::Routed(Reason::InBand)));
    request.on_response();
    assert_eq!(request.outcome(), Some(Outcome::Routed(Reason::InBand)));
}

#[test]
fn a_client_that_leaves_before_decode_is_gone_and_an_answer_of_the_host_is_not_its_fault() {
    let mut request = Request::default();
    assert_eq!(request.outcome(), None);
    request.on_headers(post("/v1/completions"), false);
    assert_eq!(request.outcome(), Some(Outcome::ClientGone));
    request.on_response();
    assert_eq!(request.outcome(), Some(Outcome::Refused));
    let mut request = prefilling("{}");
    assert_eq!(request.outcome(), Some(Outcome::ClientGone));
    request.on_response();
    assert_eq!(request.outcome(), Some(Outcome::PrefillFailed));
}

/// A prefill answer that pins blocks, with the artifact's signature in its params.
fn pinning() -> Answer {
    answer(
        "200",
        &[],
        r#"{"kv_transfer_params":{"a":1.50,"eldr_sig":"AAAJAAAAAAA="}}"#,
    )
}

const RELEASE: &str =
    r#"{"prompt":"p","stream":false,"max_tokens":1,"kv_transfer_params":{"a":1.50}}"#;

#[test]
fn the_artifacts_signature_routes_and_is_not_handed_over() {
    let (mut request, answer) = (prefilling(r#"{"model":"moe"}"#), pinning());
    let OnPrefill::Route {
        signature: Some(signature),
        head: Some(head),
    } = request.on_prefill(&answer, &plugin())
    else {
        panic!("not routed")
    };
    assert_eq!(*signature, *b":AAAJAAAAAAA=:;l=1;e=4");
    assert_eq!(head.bytes, r#"{"kv_transfer_params":{"a":1.50},"#);

    let mut both = pinning();
    both.headers
        .push((headers::SIGNATURE.into(), b"s".to_vec()));
    let mut request = prefilling(r#"{"model":"moe"}"#);
    let OnPrefill::Route { signature, .. } = request.on_prefill(&both, &plugin()) else {
        panic!("not routed")
    };
    assert_eq!(*signature.unwrap(), *b"s", "the header wins");
}

#[test]
fn blocks_that_no_worker_got_are_released_once() {
    let mut request = prefilling(r#"{"prompt":"p"}"#);
    let early = request.take_release(Form::Decode);
    assert_eq!(early, None, "not yet handed over");
    request.on_prefill(&pinning(), &plugin());
    request.routed(&decision(), "decode-0");
    assert!(request.is_handed_over());
    let release = request.take_release(Form::Decode).unwrap();
    assert_eq!(release.body, RELEASE);
    let path = headers::get(&release.headers, ":path");
    assert_eq!(path, Some(&b"/v1/completions"[..]));
    assert_eq!(request.take_release(Form::Decode), None, "once");
}

#[test]
fn blocks_that_a_worker_got_are_its_own_affair_and_the_leg_is_forgotten() {
    let mut request = prefilling(r#"{"prompt":"p"}"#);
    request.on_prefill(&pinning(), &plugin());
    request.on_decode_served();
    assert_eq!(request.take_release(Form::Decode), None);
    assert!(request.leg().body.is_empty() && request.leg().headers.is_empty());
}

#[test]
fn a_leg_is_forgotten_once_it_is_answered_without_blocks() {
    for answer in [
        answer("200", &[], "{}"),
        answer("500", &[], ""),
        answer("404", &[], ""),
    ] {
        let mut request = prefilling(r#"{"prompt":"p"}"#);
        request.on_prefill(&answer, &plugin());
        assert!(!request.is_handed_over());
        assert!(request.leg().body.is_empty() && request.leg().headers.is_empty());
    }
}

#[test]
fn a_late_answer_releases_what_it_pins() {
    let late = |answer: &Answer| {
        let mut request = prefilling(r#"{"prompt":"p"}"#);
        let release = request.on_late_prefill(answer, plugin().config());
        release.map(|release| release.body)
    };
    assert_eq!(late(&pinning()).as_deref(), Some(RELEASE));
    let mut failed = pinning();
    failed.headers[0].1 = b"500".to_vec();
    assert_eq!(late(&failed), None);
    assert_eq!(late(&answer("200", &[], "{}")), None);
    assert_eq!(late(&Answer::none()), None);
}

#[test]
fn only_a_leg_that_did_not_get_through_is_sent_again() {
    let config = serde_json::json!({
        "models": [{"model": "*"}],
        "decode_clusters": ["d"],
        "prefill_clusters": ["p", "q"],
    });
    let config = Config::parse(config.to_string().as_bytes()).unwrap();
    let request = prefilling("{}");
    let may_retry = |answer: &Answer, now| request.may_retry(answer, &config, now, 1_000);
    assert!(may_retry(&Answer::none(), 0));
    assert!(may_retry(&answer("503", &[], "connection refused"), 0));
    assert!(!may_retry(&answer("504", &[], "our own deadline"), 1_000));
    assert!(!may_retry(&pinning(), 0));
}
