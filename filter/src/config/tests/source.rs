//! Where blobs come from, and where samples of signatures go.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::json;

use super::{minimal, parse};
use crate::plugin::tests::blob_bytes;

#[test]
fn a_blob_may_come_over_http() {
    let mut config = minimal();
    config["models"][0]["blob"] = json!({"http": {"cluster": "eldr-serve", "path": "/v1/blob"}});
    let source = parse(&config).unwrap().models.remove(0).source.unwrap();
    assert_eq!(
        (source.authority.as_str(), source.interval_ms),
        ("eldr-serve", 5_000)
    );
    config["models"][0]["blob"] =
        json!({"http": {"cluster": "", "path": "v1", "interval_ms": 1, "authority": "a b"}});
    let error = parse(&config).unwrap_err().to_string();
    for part in [
        "4 mistake(s)",
        "models[0].blob.http.cluster: found \"\"",
        "models[0].blob.http.authority: found \"a b\"",
        "models[0].blob.http.path: found \"v1\", allowed: an absolute path",
        "models[0].blob.http.interval_ms: found 1, allowed: 200 to 3600000",
    ] {
        assert!(error.contains(part), "{part}\nnot in\n{error}");
    }
    config["models"][0]["blob"] = json!({});
    let error = parse(&config).unwrap_err().to_string();
    assert!(error.contains("models[0].blob: found {}"), "{error}");
}

#[test]
fn signatures_are_sampled_only_where_there_is_a_server_to_post_them_to() {
    let mut config = minimal();
    assert_eq!(parse(&config).unwrap().models[0].signature_sample, 0.0);
    let http = json!({"http": {"cluster": "eldr-serve", "path": "/v1/blob"}});
    let inline = json!({"inline": STANDARD.encode(blob_bytes(1, &["decode-0"]))});
    for (blob, share, refused) in [
        (&json!(null), json!(0), None),
        (&http, json!(1), None),
        (&http, json!(0.25), None),
        (&inline, json!(0), None),
        (
            &http,
            json!(1.5),
            Some("found 1.5, allowed: a number from 0 to 1"),
        ),
        (
            &http,
            json!(-0.5),
            Some("found -0.5, allowed: a number from 0 to 1"),
        ),
        (
            &json!(null),
            json!(0.5),
            Some("found 0.5, allowed: 0, or a blob that comes over \"http\""),
        ),
        (
            &inline,
            json!(0.5),
            Some("found 0.5, allowed: 0, or a blob"),
        ),
        (&http, json!("all"), Some("found invalid type")),
    ] {
        config["models"][0]["blob"] = blob.clone();
        config["models"][0]["signature_sample"] = share.clone();
        match (parse(&config), refused) {
            (Ok(config), None) => {
                assert_eq!(config.models[0].signature_sample, share.as_f64().unwrap());
            }
            (Err(mistakes), Some(expected)) => {
                let text = mistakes.to_string();
                let expected = format!("models[0].signature_sample: {expected}");
                assert!(
                    text.contains("1 mistake(s)") && text.contains(&expected),
                    "{text}"
                );
            }
            (parsed, _) => panic!("{share} with {blob}: {parsed:?}"),
        }
    }
    config["models"][0]["signature_sample"] = json!(2);
    config["models"][0]["tau"] = json!(3);
    let text = parse(&config).unwrap_err().to_string();
    assert!(text.contains("2 mistake(s)"), "{text}");
}
