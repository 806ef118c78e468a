use proptest::prelude::*;
use serde_json::{Map, Value};

use super::*;

fn edit(text: &str, edits: &[(&str, Edit)]) -> String {
    Object::parse(text.as_bytes()).unwrap().edit(edits)
}

fn set(value: &str) -> Edit {
    Edit::Set(value.into())
}

#[test]
fn everything_that_is_not_edited_keeps_its_bytes() {
    let text = "\n{ \"seed\" : 12345678901234567890123, \"t\":0.10, \"é\":\"\\u00e9\",\n\t\"x\":[1,{}] }\r\n";
    assert_eq!(edit(text, &[]), text);
    let added = edit(text, &[("k", set("{\"a\":1}"))]);
    assert_eq!(added, text.replace("[1,{}]", "[1,{}],\"k\":{\"a\":1}"));
}

#[test]
fn a_field_that_is_set_replaces_every_duplicate_of_it_however_spelled() {
    let text = r#"{"n":1,"stream":true,"n" : 2,"\u006e":3}"#;
    assert_eq!(
        edit(text, &[("n", set("7"))]),
        r#"{"n":7,"stream":true,"n" : 7,"\u006e":7}"#
    );
    assert_eq!(edit(text, &[("n", Edit::Remove)]), r#"{"stream":true}"#);
    assert_eq!(edit(text, &[("m", Edit::Replace("1".into()))]), text);
}

#[test]
fn members_can_be_removed_anywhere() {
    let remove = |text, keys: &[&str]| {
        let edits: Vec<(&str, Edit)> = keys.iter().map(|key| (*key, Edit::Remove)).collect();
        edit(text, &edits)
    };
    let text = r#"{ "a":1 , "b":2 , "c":3 }"#;
    assert_eq!(remove(text, &["a"]), r#"{ "b":2 , "c":3 }"#);
    assert_eq!(remove(text, &["b"]), r#"{ "a":1 , "c":3 }"#);
    assert_eq!(remove(text, &["c"]), r#"{ "a":1 , "b":2 }"#);
    assert_eq!(remove(text, &["a", "b", "c"]), "{  }");
    assert_eq!(edit("{}", &[("a", set("1"))]), r#"{"a":1}"#);
    assert_eq!(
        edit(" { } ", &[("a", set("1")), ("b", set("2"))]),
        r#" { "a":1,"b":2} "#
    );
    assert_eq!(
        edit(r#"{"a":1}"#, &[("a", Edit::Remove), ("b", set("2"))]),
        r#"{"b":2}"#
    );
}

#[test]
fn braces_and_quotes_inside_strings_are_text() {
    let text = r#"{"p":"}\"{,\"k\":1","q":"\\"}"#;
    assert_eq!(
        edit(text, &[("z", set("0"))]),
        r#"{"p":"}\"{,\"k\":1","q":"\\","z":0}"#
    );
}

#[test]
fn what_is_not_one_object_is_refused() {
    for text in [
        "",
        "[]",
        "1",
        "null",
        "{",
        "{}{}",
        "{\"a\":}",
        "{\"a\":1,}",
        "{} x",
        "\u{feff}{}",
    ] {
        assert!(Object::parse(text.as_bytes()).is_err(), "{text}");
    }
    assert!(Object::parse(b"{\"a\":\"\xff\"}").is_err());
}

#[test]
fn deep_nesting_is_skipped_not_recursed_into() {
    let deep = format!(
        "{{\"a\":{}1{},\"b\":2}}",
        "[".repeat(100_000),
        "]".repeat(100_000)
    );
    assert_eq!(Object::parse(deep.as_bytes()).unwrap().get("b"), Some("2"));
}

#[test]
fn strings_are_unescaped() {
    assert_eq!(string(r#""a\u0062""#).unwrap(), "ab");
    assert_eq!(string(r#""plain""#).unwrap(), "plain");
    assert_eq!(string("1"), None);
}

fn json() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        "[ -~é\"\\\\{}]{0,8}".prop_map(Value::from),
    ];
    leaf.prop_recursive(3, 16, 4, |inner| {
        prop_oneof![
            proptest::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            proptest::collection::btree_map("[a-c\"\\\\]{0,2}", inner, 0..4)
                .prop_map(|map| Value::Object(map.into_iter().collect())),
        ]
    })
}

proptest! {
    /// Parse, change the map, print: the same meaning as the splice.
    #[test]
    fn the_splice_means_what_parsing_and_printing_would(
        members in proptest::collection::btree_map("[a-c\"\\\\]{0,2}", json(), 0..6),
        pretty: bool, value in json(), action in 0..3, key in "[a-c]{1,2}",
    ) {
        let mut map: Map<String, Value> = members.into_iter().collect();
        let text = if pretty {
            serde_json::to_string_pretty(&map).unwrap()
        } else {
            serde_json::to_string(&map).unwrap()
        };
        let new = value.to_string();
        let edit = match action {
            0 => {
                map.insert(key.clone(), value);
                Edit::Set(new)
            }
            1 => {
                map.entry(key.clone()).and_modify(|old| *old = value);
                if !text.contains('{') { return Ok(()); }
                Edit::Replace(new)
            }
            _ => {
                map.remove(&key);
                Edit::Remove
            }
        };
        let edited = Object::parse(text.as_bytes()).unwrap().edit(&[(&key, edit)]);
        prop_assert_eq!(serde_json::from_str::<Value>(&edited).unwrap(), Value::Object(map), "{}", edited);
    }

    #[test]
    fn arbitrary_bytes_never_panic(bytes: Vec<u8>) {
        if let Ok(object) = Object::parse(&bytes) {
            object.edit(&[("a", Edit::Remove), ("b", set("1"))]);
        }
    }

    #[test]
    fn mutated_objects_never_panic_and_stay_objects(at: prop::sample::Index, byte: u8) {
        let mut bytes = br#"{"a":"x\"y","b":[1,{"c":2}],"a":null}"#.to_vec();
        let at = at.index(bytes.len());
        bytes[at] = byte;
        if let Ok(object) = Object::parse(&bytes) {
            let edited = object.edit(&[("a", Edit::Remove), ("z", set("1"))]);
            prop_assert!(Object::parse(edited.as_bytes()).is_ok(), "{}", edited);
        }
    }
}
