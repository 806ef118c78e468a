use std::io::Write as _;

use super::*;

fn read(lines: &[&str]) -> Result<Requests, Error> {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(lines.join("\n").as_bytes()).unwrap();
    Requests::read(&[file.path()], || {})
}

// Two layers, one expert, counts 1 and 2; the second form has layer 1 alone.
const BOTH: &str = r#"{"id":"a","prefill":":AQACAA==:;l=2;e=1","decode":":AQACAA==:;l=2;e=1"}"#;
const PREFILL_1: &str = r#"{"id":"b","prefill":":AgA=:;l=2;e=1;layers=\"1\""}"#;
const DECODE_1: &str =
    r#"{"id":"c","prefill":":AQACAA==:;l=2;e=1","decode":":AgA=:;l=2;e=1;layers=\"1\""}"#;
const DECODE_WIDE: &str =
    r#"{"id":"d","prefill":":AQACAA==:;l=2;e=1","decode":":AQACAA==:;l=1;e=2"}"#;
const PREFILL_ONLY: &str = r#"{"id":"e","prefill":":AwAEAA==:;l=2;e=1"}"#;

#[test]
fn decode_counts_keep_to_their_requests() {
    let set = read(&[PREFILL_ONLY, BOTH, r#"{"id":"log line"}"#]).unwrap();
    assert_eq!((set.len(), set.skipped(), set.is_empty()), (2, 1, false));
    assert_eq!(set.prefill().collect::<Vec<_>>(), [[3, 4], [1, 2]]);
    assert_eq!(set.decode().collect::<Vec<_>>(), [(1, &[1, 2][..])]);
    assert!(set.name(1).starts_with("a ("), "{}", set.name(1));
    assert!(set.name(1).ends_with(":2)"), "{}", set.name(1));
}

#[test]
fn decode_may_have_other_layers_than_prefill_if_all_requests_agree() {
    let set = read(&[DECODE_1, DECODE_1]).unwrap();
    assert_eq!(set.layers(), [0, 1]);
    assert_eq!(
        set.decode().map(|(_, counts)| counts).collect::<Vec<_>>(),
        [[2], [2]]
    );
}

#[test]
fn mixed_shapes_are_refused() {
    for (lines, expected) in [
        (
            [BOTH, PREFILL_1],
            "2: field `prefill`: it has layers [1], the requests before it [0, 1]",
        ),
        (
            [BOTH, DECODE_1],
            "2: field `decode`: it has layers [1], the requests before it [0, 1]",
        ),
        (
            [BOTH, DECODE_WIDE],
            "2: field `decode`: it has 1 layers × 2 experts",
        ),
        (
            [DECODE_WIDE, BOTH],
            "1: field `decode`: it has 1 layers × 2 experts",
        ),
    ] {
        let error = read(&lines).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
}
