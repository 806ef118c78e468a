use std::io::{BufReader, Cursor, Write as _};

use eldr_core::signature::{Encoding, Geometry, Signature};
use proptest::prelude::*;

use super::*;

fn write(records: &[Record], gzip: bool) -> Vec<u8> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join(if gzip { "t.jsonl.gz" } else { "t.jsonl" });
    let mut writer = Writer::create(&path).unwrap();
    for record in records {
        writer.write(record).unwrap();
    }
    writer.finish().unwrap();
    std::fs::read(path).unwrap()
}

fn reader(bytes: &[u8]) -> Reader {
    // One byte at a time: nothing may depend on what one read happens to return.
    Reader::new(
        "t.jsonl",
        BufReader::with_capacity(1, Cursor::new(bytes.to_vec())),
    )
    .unwrap()
}

fn error(text: &str) -> TraceError {
    reader(text.as_bytes()).next().unwrap().unwrap_err()
}

fn signature(geometry: Geometry, counts: &[u16]) -> String {
    Signature::dense(geometry, counts.to_vec(), None)
        .unwrap()
        .encode(Encoding::Varint)
}

const TINY: Geometry = Geometry {
    layers: 2,
    experts: 4,
};

/// Three decode steps, two layers, top-2 of four experts.
fn replayable() -> Record {
    let topk = TopK::new(TINY, 2, vec![0, 1, 2, 3, 0, 2, 2, 3, 0, 3, 1, 3]).unwrap();
    Record {
        id: "r".into(),
        decode_tokens: Some(3),
        decode: Some(signature(TINY, &[3, 1, 1, 1, 0, 1, 2, 3])),
        decode_topk: Some(topk.encode()),
        ..Record::default()
    }
}

#[test]
fn an_access_log_that_captures_the_header_is_a_trace() {
    let text = r#"{"start":"2026-11-30","id":"a","bytes":[1,{"x":2}],"prefill":":AQA=:;l=1;e=1","label":null}
{"id":"b","prefill":":AQA=:;l=1;e=1","ts":"1796006071.607","prompt_tokens":"3","decode_tokens":"-"}
{"id":"-","prefill":"-","ts":"-","prompt_tokens":"-","label":"-"}
{"id":null,"prefill":null,"status":400}
{}"#;
    let records: Vec<_> = reader(text.as_bytes()).map(Result::unwrap).collect();
    let [a, b, dashes, nulls, empty] = &records[..] else {
        panic!("{records:?}")
    };
    assert_eq!(a.label, None);
    assert_eq!(a.prefill_signature().unwrap().unwrap().counts(), [1]);
    assert_eq!(
        (b.ts, b.prompt_tokens, b.decode_tokens),
        (Some(1796006071.607), Some(3), None),
        "Envoy quotes numbers that come out of headers"
    );
    for absent in [dashes, nulls, empty] {
        let at = absent.at.clone();
        assert_eq!(
            *absent,
            Record {
                at,
                ..Record::default()
            }
        );
    }
}

#[test]
fn blank_lines_and_a_missing_last_newline_are_fine() {
    let text = "\n{\"id\":\"a\"}\r\n\n  \n{\"id\":\"b\"}";
    let found: Vec<_> = reader(text.as_bytes())
        .map(|r| r.map(|r| (r.id, r.at.line)).unwrap())
        .collect();
    assert_eq!(found, [("a".to_owned(), 2), ("b".to_owned(), 5)]);
}

#[test]
fn concatenated_gzip_members_are_one_trace() {
    let one = Record {
        id: "a".into(),
        ..Record::default()
    };
    let two = Record {
        id: "b".into(),
        ..Record::default()
    };
    let bytes = [write(&[one], true), write(&[two], true)].concat();
    let ids: Vec<_> = reader(&bytes).map(|record| record.unwrap().id).collect();
    assert_eq!(ids, ["a", "b"]);
}

#[test]
fn a_truncated_gzip_file_is_an_error_not_a_short_trace() {
    let mut bytes = write(
        &[Record {
            id: "a".into(),
            ..Record::default()
        }],
        true,
    );
    bytes.truncate(bytes.len() - 6);
    assert!(reader(&bytes).any(|record| record.is_err()));
}

#[test]
fn an_error_names_file_line_field_value_and_what_was_allowed() {
    let mut reader =
        reader(b"{\"id\":\"a\"}\n{\"id\":\"b\",\"prompt_tokens\":\"many\"}\n{\"id\":\"c\"}");
    assert!(reader.next().unwrap().is_ok());
    let error = reader.next().unwrap().unwrap_err();
    assert_eq!(
        error.to_string(),
        "t.jsonl:2: field `prompt_tokens`: \"many\" where an integer from 0 to 18446744073709551615 was expected"
    );
    assert_eq!((error.field(), error.at().line), (Some("prompt_tokens"), 2));
    assert_eq!(
        reader.next().unwrap().unwrap().id,
        "c",
        "the line after a bad one is read"
    );
}

#[test]
fn every_field_checks_its_type() {
    for (field, value) in [
        ("id", "1"),
        ("label", "[]"),
        ("ts", "\"now\""),
        ("prompt_tokens", "-1"),
        ("prompt_tokens", "\"-1\""),
        ("prompt_tokens", "\"null\""),
        ("prompt_tokens", "\"\""),
        ("decode_tokens", "1.5"),
        ("prefill", "{}"),
        ("decode", "7"),
        ("decode_topk", "[1]"),
        ("prefix", "{\"group\":\"g\"}"),
    ] {
        let id = if field == "id" { "" } else { "\"id\":\"a\"," };
        let error = error(&format!("{{{id}\"{field}\":{value}}}"));
        assert_eq!(error.field(), Some(field), "{error}");
        assert!(error.to_string().contains(value), "{error}");
    }
}

#[test]
fn a_line_that_is_no_record_says_so() {
    for line in [
        "not json",
        "[1]",
        "{\"prefill\":\":AQA=:;l=1;e=1\"}",
        "{\"id\":\"\",\"decode\":\":AQA=:;l=1;e=1\"}",
        "{\"id\":\"-\",\"decode_topk\":\"AAAA\"}",
        "{\"id\":\"a\"",
        "{\"id\":\"a\"} x",
    ] {
        let error = error(line);
        assert!(error.to_string().starts_with("t.jsonl:1: "), "{error}");
        assert!(!error.hint().is_empty());
    }
    let error = reader(b"{\"id\":\"\xff\"}").next().unwrap().unwrap_err();
    assert!(
        error
            .to_string()
            .contains("byte 8 of the line is not UTF-8"),
        "{error}"
    );
}

#[test]
fn a_line_without_end_stops_the_reading() {
    let endless = std::io::repeat(b' ');
    let mut reader = Reader::new("endless", BufReader::new(endless)).unwrap();
    let error = reader.next().unwrap().unwrap_err();
    assert!(
        error.to_string().contains("longer than 67108864 bytes"),
        "{error}"
    );
    assert!(reader.next().is_none());
}

#[test]
fn a_long_value_is_shortened() {
    let error = error(&format!("{{\"id\":\"a\",\"ts\":\"{}\"}}", "é".repeat(5000)));
    assert!(error.to_string().contains("… (10002 bytes)"), "{error}");
    assert!(error.to_string().len() < 250);
}

#[test]
fn a_bad_signature_names_field_and_place() {
    let record = Record {
        id: "a".into(),
        prefill: Some(":AQA=:;l=1".into()),
        ..Record::default()
    };
    let error = record.prefill_signature().unwrap_err();
    assert_eq!(error.field(), Some("prefill"));
    assert!(error.to_string().contains("`e`"), "{error}");
}

#[test]
fn topk_takes_its_shape_from_signature_and_decode_tokens() {
    let topk = replayable().topk().unwrap().unwrap();
    assert_eq!((topk.tokens(), topk.k(), topk.geometry()), (3, 2, TINY));
    assert_eq!(topk.step(1), [0, 2, 2, 3]);
    assert_eq!(topk.counts(), [3, 1, 1, 1, 0, 1, 2, 3]);
}

#[test]
fn topk_of_more_than_256_experts_is_u16() {
    let wide = Geometry {
        layers: 1,
        experts: 300,
    };
    let topk = TopK::new(wide, 2, vec![299, 0, 256, 255]).unwrap();
    assert_eq!(topk.encode(), "KwEAAAAB/wA=");
    assert_eq!(TopK::decode(&topk.encode(), wide, 2).unwrap(), topk);
}

#[test]
fn topk_that_does_not_fit_is_refused() {
    type Change = fn(&mut Record);
    let cases: [(&str, Change); 6] = [
        ("neither `prefill` nor `decode`", |r| r.decode = None),
        ("`decode_tokens` does not say", |r| r.decode_tokens = None),
        ("12 bytes are no multiple of 5 tokens", |r| {
            r.decode_tokens = Some(5);
        }),
        ("no multiple of 0 tokens", |r| r.decode_tokens = Some(0)),
        ("not base64", |r| r.decode_topk = Some("*".into())),
        (
            "expert 1 of layer 1 occurs 1 times, `decode` counts 2",
            |r| {
                r.decode = Some(signature(TINY, &[3, 1, 1, 1, 0, 2, 2, 3]));
            },
        ),
    ];
    for (expected, change) in cases {
        let mut record = replayable();
        change(&mut record);
        let error = record.topk().unwrap_err();
        assert_eq!(error.field(), Some("decode_topk"));
        assert!(error.to_string().contains(expected), "{error}");
    }
    assert_eq!(
        TopK::decode("BAAAAA==", TINY, 1).unwrap_err(),
        "expert 4 where 0 to 3 exist"
    );
    assert_eq!(
        TopK::decode("", TINY, 1).unwrap_err(),
        "k is 0 where 1 to 4 experts can be chosen"
    );
}

fn text() -> impl Strategy<Value = String> {
    let any = proptest::string::string_regex("[ -~é\u{1F600}\"\\\\\n]{0,20}").unwrap();
    any.prop_filter("a dash alone means absent", |text| text != "-")
}

prop_compose! {
    fn record()(
        id in proptest::string::string_regex("[a-z\"\n]{1,9}").unwrap(),
        label in proptest::option::of(text()),
        ts in proptest::option::of(-1e12f64..1e12),
        prompt_tokens in proptest::option::of(any::<u64>()),
        decode_tokens in proptest::option::of(any::<u64>()),
        prefill in proptest::option::of(text()),
        decode in proptest::option::of(text()),
        decode_topk in proptest::option::of(text()),
        gate in proptest::option::of((text(), text())),
        prefix in proptest::option::of((text(), any::<u64>())),
    ) -> Record {
        let prefix = prefix.map(|(group, tokens)| Prefix { group, tokens });
        let (gate_prob, gate_score) = gate.unzip();
        Record {
            id, label, ts, prompt_tokens, decode_tokens, prefill, decode, decode_topk, gate_prob, gate_score, prefix,
            at: Location::default(),
        }
    }
}

fn parsed(bytes: &[u8]) -> Vec<Record> {
    reader(bytes)
        .map(|record| Record {
            at: Location::default(),
            ..record.unwrap()
        })
        .collect()
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn what_was_written_is_read_again_plain_or_gzip(records in prop::collection::vec(record(), 0..6)) {
        let (plain, gzip) = (write(&records, false), write(&records, true));
        prop_assert_eq!(&parsed(&plain), &records);
        prop_assert_eq!(&write(&records, true), &gzip, "equal records give equal bytes");
        prop_assert_eq!(parsed(&gzip), records);
    }

    #[test]
    fn arbitrary_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..300), gzip: bool) {
        let bytes = if gzip {
            let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
            encoder.write_all(&bytes).unwrap();
            encoder.finish().unwrap()
        } else {
            bytes
        };
        prop_assert!(reader(&bytes).count() <= 301);
    }

    #[test]
    fn arbitrary_values_never_panic(mut record in record(), tokens in 0u64..4, signed: bool) {
        record.decode_tokens = Some(tokens);
        if signed {
            record.prefill = Some(signature(TINY, &[1; 8]));
            record.decode = None;
        }
        let _ = (record.prefill_signature(), record.decode_signature(), record.topk());
    }

    #[test]
    fn topk_round_trips(
        experts in 1usize..600,
        layers in 1usize..4,
        k in 1usize..5,
        seeds in prop::collection::vec(any::<u16>(), 0..8),
    ) {
        let (geometry, k) = (Geometry { layers, experts }, k.min(experts));
        let ids: Vec<u16> = seeds
            .iter()
            .flat_map(|&seed| std::iter::repeat_n(seed % experts as u16, layers * k))
            .collect();
        let topk = TopK::new(geometry, k, ids).unwrap();
        prop_assert_eq!(topk.tokens(), seeds.len());
        if !seeds.is_empty() {
            prop_assert_eq!(TopK::decode(&topk.encode(), geometry, seeds.len() as u64), Ok(topk));
        }
    }
}
