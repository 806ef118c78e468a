//! An object in any spelling is edited as the list of its members would be, and nothing else changes a byte.
#![no_main]

use eldr_filter::body::{Edit, Object, has_key_anywhere};
use eldr_filter_fuzz::{Json, Printer, Text, pairs};
use libfuzzer_sys::arbitrary::{self, Arbitrary};
use libfuzzer_sys::fuzz_target;

#[derive(Arbitrary, Debug)]
struct Input {
    style: Vec<u8>,
    members: Vec<(Text, Json)>,
    edits: Vec<(u8, Action)>,
}

#[derive(Arbitrary, Debug)]
enum Action {
    Set(Json),
    Replace(Json),
    Remove,
}

/// Keys that edits may have: no escapes needed, each at most once.
const KEYS: [&str; 6] = [
    "stream",
    "max_tokens",
    "n",
    "kv_transfer_params",
    "prompt",
    "x",
];

fn edits(input: &Input) -> Vec<(&'static str, Edit)> {
    let mut edits: Vec<(&str, Edit)> = Vec::new();
    for (key, action) in &input.edits {
        let key = KEYS[usize::from(*key) % KEYS.len()];
        if edits.iter().all(|(other, _)| *other != key) {
            let print = |json: &Json| {
                let mut printer = Printer::new(&input.style);
                printer.json(json);
                printer.out
            };
            edits.push((
                key,
                match action {
                    Action::Set(json) => Edit::Set(print(json)),
                    Action::Replace(json) => Edit::Replace(print(json)),
                    Action::Remove => Edit::Remove,
                },
            ));
        }
    }
    edits
}

fuzz_target!(|input: Input| {
    let mut printer = Printer::new(&input.style);
    printer.space();
    let members = printer.object(&input.members);
    printer.space();
    let text = printer.out;
    let object = Object::parse(text.as_bytes()).expect("an object");
    assert_eq!(object.edit(&[]), text);
    assert_eq!(object.is_empty(), members.is_empty());
    for (key, _) in &members {
        let last = members.iter().rev().find(|(other, _)| other == key);
        assert_eq!(object.get(key), last.map(|(_, raw)| raw.as_str()));
    }
    let key = "kv_transfer_params";
    let has = Json::Object(input.members.clone()).has(key);
    if let Ok(found) = has_key_anywhere(text.as_bytes(), key) {
        assert_eq!(found, has);
    } else {
        // Numbers beyond f64 cannot be walked through; such a body is refused.
        assert!(text.contains("1e400") || text.len() > 128);
    }

    let edits = edits(&input);
    let mut expected: Vec<(String, String)> = Vec::new();
    for (key, raw) in &members {
        match edits.iter().find(|(edited, _)| edited == key) {
            Some((_, Edit::Remove)) => {}
            Some((_, Edit::Set(value) | Edit::Replace(value))) => {
                expected.push((key.clone(), value.clone()));
            }
            None => expected.push((key.clone(), raw.clone())),
        }
    }
    for (key, edit) in &edits {
        if let Edit::Set(value) = edit
            && members.iter().all(|(other, _)| other != key)
        {
            expected.push(((*key).to_owned(), value.clone()));
        }
    }
    let edited = object.edit(&edits);
    assert_eq!(pairs(&edited).expect("an object"), expected, "{edited}");
});
