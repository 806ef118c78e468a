//! Any bytes as the body of a prefill answer: the hand-over is what parsing it whole finds, and the decode body is the
//! client's with it.

use super::json::{pairs, plugin, value};
use eldr_filter::body::Object;
use eldr_filter::handover;
use eldr_filter::plugin::Plugin;
use eldr_filter::request::{Answer, OnBody, OnPrefill, Request};
use serde_json::Value;

const CLIENT: &str = r#" {"model":"m", "prompt":"hi"} "#;

thread_local! {
    static PLUGIN: Plugin = plugin("error");
}

/// Panics where a promise is broken.
pub fn check(bytes: &[u8]) {
    let found = Object::parse(bytes).map(|answer| handover::read(&answer));
    match (value(bytes), &found) {
        (Ok(Value::Object(map)), Ok(found)) => {
            let expected = map.get("kv_transfer_params").and_then(Value::as_object);
            assert_eq!(found.is_some(), expected.is_some());
            if let (Some(found), Some(expected)) = (found, expected) {
                let mut expected = expected.clone();
                let signature = expected.remove("eldr_sig");
                let read = |raw: &str| serde_json::from_str::<Value>(raw).expect("JSON");
                assert_eq!(read(&found.params), Value::Object(expected));
                assert_eq!(found.eldr_sig.as_deref().map(read), signature);
            }
        }
        (Ok(Value::Object(_)), Err(error)) => panic!("an object was refused: {error}"),
        (Ok(other), Ok(_)) => panic!("{other} was taken for an object"),
        (Err(false), Ok(_)) => panic!("what is not JSON was taken for an object"),
        _ => {}
    }
    let mut request = Request::default();
    let header = |name: &str, value: &str| (name.to_owned(), value.as_bytes().to_vec());
    let headers = vec![
        header(":method", "POST"),
        header(":path", "/v1/completions"),
    ];
    request.on_headers(headers, false);
    let next = PLUGIN.with(|plugin| request.on_body(plugin, CLIENT.as_bytes()));
    assert_eq!(next, OnBody::Prefill);
    let answer = Answer {
        headers: vec![header(":status", "200")],
        body: bytes.to_vec(),
    };
    let next = PLUGIN.with(|plugin| request.on_prefill(&answer, plugin));
    match (next, found) {
        (
            OnPrefill::Route {
                head: Some(head), ..
            },
            Ok(Some(found)),
        ) => {
            let body = head.bytes + &CLIENT[head.replaces..];
            let mut expected = vec![("kv_transfer_params".to_owned(), found.params)];
            expected.extend(pairs(CLIENT).expect("an object"));
            assert_eq!(pairs(&body).expect("an object"), expected);
        }
        (
            OnPrefill::Route {
                head: None,
                signature: None,
            },
            Ok(None),
        ) => {}
        (OnPrefill::Reply(reply), Err(_)) => assert_eq!(reply.status, 502),
        (next, found) => panic!("{next:?} after {found:?}"),
    }
}
