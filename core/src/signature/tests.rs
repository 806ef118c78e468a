use proptest::prelude::*;

use super::*;

mod oracle;

use oracle::decode as oracle;

fn signature() -> impl Strategy<Value = Signature> {
    (1usize..20, 1usize..20, any::<Option<u32>>(), any::<u64>()).prop_flat_map(|(l, e, n, mask)| {
        let mut layers: Vec<u16> = (0..l as u16)
            .filter(|layer| mask >> layer & 1 == 1)
            .collect();
        if layers.is_empty() {
            layers = (0..l as u16).collect();
        }
        let count = prop_oneof![Just(0u16), 0u16..200, any::<u16>()];
        proptest::collection::vec(count, layers.len() * e).prop_map(move |counts| {
            let geometry = Geometry {
                layers: l,
                experts: e,
            };
            Signature::sparse(geometry, layers.clone(), counts, n.map(u64::from)).unwrap()
        })
    })
}

fn encoding() -> impl Strategy<Value = Encoding> {
    prop_oneof![Just(Encoding::U16), Just(Encoding::Varint)]
}

proptest! {
    #[test]
    fn what_is_written_is_read_back(signature in signature(), encoding in encoding()) {
        let header = signature.encode(encoding);
        prop_assert_eq!(&Signature::decode(header.as_bytes()).unwrap(), &signature);
        prop_assert_eq!(oracle(header.as_bytes()).unwrap(), signature);
    }

    #[test]
    fn selected_rows_equal_those_of_the_full_decode(
        signature in signature(), encoding in encoding(), mask: u64,
    ) {
        let header = signature.encode(encoding);
        let wanted: Vec<u16> =
            (0..20).filter(|layer| mask >> layer & 1 == 1).collect();
        let mut scratch = Scratch::default();
        let encoded = Encoded::parse(header.as_bytes()).unwrap();
        let mut counts: Vec<u16> = vec![7];
        let found = encoded.rows(&wanted, &mut scratch, &mut counts).map(|()| counts);
        let e = signature.geometry().experts;
        let mut expected = Vec::new();
        let mut absent = None;
        for layer in &wanted {
            match signature.layers().iter().position(|row| row == layer) {
                Some(row) => expected.extend_from_slice(&signature.counts()[row * e..(row + 1) * e]),
                None => absent = absent.or(Some(*layer)),
            }
        }
        match absent {
            None => prop_assert_eq!(found.unwrap(), expected),
            Some(layer) => prop_assert_eq!(found.unwrap_err(), SignatureError::NoRow { layer }),
        }
    }

    #[test]
    fn arbitrary_bytes_never_panic(bytes: Vec<u8>) {
        let _ = Signature::decode(&bytes);
    }

    #[test]
    fn mutated_headers_are_read_as_the_oracle_reads_them(
        signature in signature(), encoding in encoding(), at: prop::sample::Index,
        with in r#"[ -~]{0,3}|={1,3}"#, length in 0usize..3,
    ) {
        let mut header = signature.encode(encoding).into_bytes();
        let start = at.index(header.len() + 1);
        let end = (start + length).min(header.len());
        header.splice(start..end, with.bytes());
        prop_assert_eq!(Signature::decode(&header).ok(), oracle(&header), "{}", header.escape_ascii());
    }

    #[test]
    fn items_of_the_grammar_are_read_as_the_oracle_reads_them(
        items in proptest::collection::vec(
            prop::sample::select(vec![
                " ", ":", ":AQAC:", ";", "; ", "l", "e", "n", "enc", "layers", "x", "=", "1", "2", "02", "-1", "1.5",
                "u16", "varint", "\"0\"", "\"0-1\"", "\"1,0\"", "\"\\\"\"", "?1", "?2", "@5", "@1.5", "%\"%c3%a9\"", "%\"%ff\"",
                ":AQACAA==:", ":AQACAAMA:", ";l=:AA==:", ";l=1", ";e=2", ";l=2", "*", "=:AQ=:",
            ]),
            0..12,
        ),
    ) {
        let header = items.concat().into_bytes();
        prop_assert_eq!(Signature::decode(&header).ok(), oracle(&header), "{}", header.escape_ascii());
    }
}

#[test]
fn only_the_last_value_of_a_parameter_counts() {
    let header = b":AAA=:;l=:AA==:;e=9;e=1;l=1;enc=zstd;enc=u16;n=-1;n=7;layers=0;layers=\"0\"";
    let signature = Signature::decode(header).unwrap();
    assert_eq!(signature.prompt_tokens(), Some(7));
    assert_eq!(oracle(header), Some(signature));
}

#[test]
fn errors_name_what_is_wrong() {
    let cases: &[(&str, &str)] = &[
        (
            "",
            "signature header, byte 0: expected `:` and a byte sequence (RFC 9651)",
        ),
        (
            ":AAA",
            "signature header, byte 4: expected `:` that ends the byte sequence (RFC 9651)",
        ),
        (":AAA=:;e=1", "signature header lacks parameter `l`"),
        (
            ":AAA=:;l=0;e=1",
            "signature parameter `l` must be a whole number from 1 to 65536",
        ),
        (
            ":AAA=:;l=1;e=1;enc=zstd",
            "signature parameter `enc` must be `u16` or `varint`",
        ),
        (
            ":AAA=:;l=1;e=2",
            "signature payload has 2 bytes, its parameters say 4",
        ),
        (
            ":A!A=:;l=1;e=1",
            "signature payload is not base64 near character 0",
        ),
        (
            ":AAA=:;l=2;e=1;layers=\"2\"",
            "signature parameter `layers` must be ascending layers below `l`, such as \"0-3,7\"",
        ),
        (
            ":AAA=:;l=60000;e=2",
            "a signature of 60000 layers × 2 experts is out of range: 1 to 65536 counts are allowed",
        ),
        (
            "://8=:;l=1;e=1;enc=varint",
            "signature payload has 2 bytes, its parameters say 3",
        ),
        (
            ":////:;l=1;e=1;enc=varint",
            "signature payload, byte 2: a LEB128 count above 65535",
        ),
    ];
    for (header, message) in cases {
        let error = Signature::decode(header.as_bytes()).unwrap_err();
        assert_eq!(error.to_string(), *message, "{header}");
    }
    let long = vec![b':'; MAX_HEADER_BYTES + 1];
    assert_eq!(
        Signature::decode(&long),
        Err(SignatureError::TooLong {
            bytes: MAX_HEADER_BYTES + 1
        })
    );
}

#[test]
fn the_largest_public_model_fits_its_compact_form_into_common_header_limits() {
    let geometry = Geometry {
        layers: 60,
        experts: 384,
    };
    let kimi = Signature::dense(geometry, vec![9; geometry.counts()], Some(512)).unwrap();
    assert!(kimi.encode(Encoding::U16).len() > 61_000);
    assert!(kimi.encode(Encoding::Varint).len() < 31_000);
    let few = Signature::sparse(geometry, vec![1, 2, 3, 59], vec![9; 4 * 384], Some(512)).unwrap();
    let header = few.encode(Encoding::Varint);
    assert!(header.len() < 2_200 && header.ends_with(";layers=\"1-3,59\""));
}
