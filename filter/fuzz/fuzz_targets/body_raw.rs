//! Any bytes as a request body: an object exactly when parsing it whole says so, and edits mean what they would there.
#![no_main]

use eldr_filter::body::{Edit, Object, has_key_anywhere, string};
use eldr_filter_fuzz::value;
use libfuzzer_sys::fuzz_target;
use serde_json::Value;

fn has(value: &Value, key: &str) -> bool {
    match value {
        Value::Array(values) => values.iter().any(|value| has(value, key)),
        Value::Object(map) => map.iter().any(|(k, v)| k == key || has(v, key)),
        _ => false,
    }
}

fuzz_target!(|bytes: &[u8]| {
    let whole = value(bytes);
    let anywhere = has_key_anywhere(bytes, "b");
    if let Ok(value) = &whole
        && has(value, "b")
    {
        // Not the other way round: the whole parse forgets duplicates.
        assert!(anywhere.expect("it is JSON"));
    }
    let object = match Object::parse(bytes) {
        Ok(object) => object,
        Err(_) => {
            let refused = !matches!(whole, Ok(Value::Object(_)));
            assert!(refused, "an object was refused");
            return;
        }
    };
    assert_eq!(object.edit(&[]).as_bytes(), bytes);
    let edited = object.edit(&[
        ("a", Edit::Remove),
        ("b", Edit::Set("[1]".into())),
        ("c", Edit::Replace("{}".into())),
    ]);
    let again = Object::parse(edited.as_bytes()).expect("still an object");
    assert!(!again.has("a") && again.get("b") == Some("[1]"));
    assert!(!again.has("c") || again.get("c") == Some("{}"));
    assert_eq!(again.has("c"), object.has("c"));
    match whole {
        Ok(Value::Object(mut map)) => {
            for (key, value) in &map {
                let raw = object.get(key).expect("there");
                assert_eq!(serde_json::from_str::<Value>(raw).expect("JSON"), *value);
                assert_eq!(string(raw).as_deref(), value.as_str());
            }
            map.remove("a");
            map.insert("b".into(), serde_json::json!([1]));
            map.entry("c")
                .and_modify(|value| *value = serde_json::json!({}));
            if !object.has("c") {
                map.remove("c");
            }
            assert_eq!(value(edited.as_bytes()), Ok(Value::Object(map)));
        }
        Ok(other) => panic!("{other} was taken for an object"),
        Err(beyond_values) => assert!(beyond_values, "what is not JSON was taken for an object"),
    }
});
