use proptest::prelude::*;

use super::*;

fn small() -> Blob {
    Blob {
        revision: 7,
        model: "tiny".into(),
        transform: Transform::new(
            Geometry::new(3, 2).unwrap(),
            vec![0, 2],
            vec![1.0, 0.0, 0.5, 2.0],
        )
        .unwrap(),
        centroids: vec![1.0, 0.0, 0.0, 0.0, 0.0, 0.6, 0.0, 0.8],
        tau: 0.1,
        regions: vec![
            vec!["decode-0".into()],
            vec!["decode-1".into(), "decode-2".into()],
        ],
        fit: Fit {
            quantiles: vec![vec![0.5; 7], vec![0.75; 7]],
            requests: 12,
            rho: Some(0.83),
            seed: 1,
            shares: vec![0.5, 0.5],
        },
        source: Some(r#"{"algo":"kmbal"}"#.into()),
    }
}

#[test]
fn a_blob_is_read_as_it_was_written_and_has_one_form() {
    let bytes = small().to_bytes().unwrap();
    assert_eq!(Blob::from_bytes(&bytes).unwrap(), small());
    assert_eq!(small().to_bytes().unwrap(), bytes);
}

#[test]
fn every_kind_of_signature_is_kept() {
    for kind in SignatureKind::ALL {
        let mut blob = small();
        blob.transform = blob.transform.with_kind(kind);
        let read = Blob::from_bytes(&blob.to_bytes().unwrap()).unwrap();
        assert_eq!(read.transform.kind(), kind);
    }
}

#[test]
fn metadata_is_canonical_json() {
    let bytes = small().to_bytes().unwrap();
    let (_, header) = SafeTensors::read_metadata(&bytes).unwrap();
    let text = header.metadata().clone().unwrap()["eldr"].clone();
    let sorted: std::collections::BTreeMap<String, serde_json::Value> =
        serde_json::from_str(&text).unwrap();
    let keys: Vec<&String> = sorted.keys().collect();
    let at = |key: &String| text.find(&format!("\"{key}\":")).unwrap();
    assert!(
        keys.is_sorted_by_key(|key| at(key)) && !text.contains(' '),
        "{text}"
    );
}

#[test]
fn every_corrupted_byte_and_every_truncation_is_refused() {
    let bytes = small().to_bytes().unwrap();
    for at in 0..bytes.len() {
        for flip in [0x01, 0x2a, 0x80, 0xff] {
            let mut corrupted = bytes.clone();
            corrupted[at] ^= flip;
            assert!(
                Blob::from_bytes(&corrupted).is_err(),
                "byte {at} ^ {flip:#x}"
            );
        }
        assert!(Blob::from_bytes(&bytes[..at]).is_err(), "cut at {at}");
    }
}

type Change = fn(&mut Blob);

#[test]
fn errors_name_field_value_and_expectation() {
    let cases: [(Change, &str); 8] = [
        (|blob| blob.tau = 3.0, "tau: found 3, expected 0 to 2"),
        (
            |blob| blob.tau = f32::NAN,
            "tau: found NaN, expected 0 to 2",
        ),
        (
            |blob| blob.centroids[0] = 0.9,
            "centroids, row 0: found length 0.9, expected length 1",
        ),
        (
            |blob| blob.centroids.truncate(4),
            "centroids: found 4 values, expected 4 for each of at least 1 region; `regions` has 2",
        ),
        (
            |blob| blob.regions[1].clear(),
            "regions, entry 1: found [], expected at least one decode cluster name",
        ),
        (
            |blob| blob.fit.shares = vec![0.5, 1.5],
            "fit.shares: found [0.5, 1.5], expected 2 numbers from 0 to 1",
        ),
        (
            |blob| blob.fit.quantiles.truncate(1),
            "expected 2 rows of 7 cosine similarities",
        ),
        (
            |blob| blob.fit.rho = Some(1.5),
            "fit.rho: found Some(1.5), expected -1 to 1, or null",
        ),
    ];
    for (change, message) in cases {
        let mut blob = small();
        change(&mut blob);
        let error = blob.to_bytes().unwrap_err().to_string();
        assert!(
            error.contains(message) && error.contains("\nhint: "),
            "{error}"
        );
    }
}

/// Writes a file whose metadata was changed as text.
fn with_metadata(change: impl Fn(&str) -> String) -> Vec<u8> {
    let blob = small();
    let tensors = Tensors::of(&blob);
    let text = change(&to_json(&blob.metadata()).unwrap());
    let views = tensors.each().into_iter().map(|tensor| {
        (
            tensor.name,
            TensorView::new(tensor.dtype, tensor.shape, tensor.bytes).unwrap(),
        )
    });
    safetensors::serialize(views, Some(HashMap::from([("eldr".to_owned(), text)]))).unwrap()
}

#[test]
fn foreign_files_are_refused_with_a_reason() {
    let error = |bytes: &[u8]| Blob::from_bytes(bytes).unwrap_err().to_string();
    assert!(error(b"PK\x03\x04").contains("is not a safetensors file"));
    let empty = safetensors::serialize(Vec::<(&str, TensorView<'_>)>::new(), None).unwrap();
    assert!(error(&empty).contains("metadata `eldr`: is missing"));
    let unhashed = error(&with_metadata(str::to_owned));
    assert!(
        unhashed.contains("sha256: the file says nothing"),
        "{unhashed}"
    );
    let newer = error(&with_metadata(|text| {
        text.replace("\"format_version\":1", "\"format_version\":2")
    }));
    assert!(
        newer.contains("format_version: found 2, expected 1"),
        "{newer}"
    );
    let spaced = error(&with_metadata(|text| text.replace(',', ", ")));
    assert!(spaced.contains("not canonical JSON"), "{spaced}");
    let unknown = error(&with_metadata(|text| text.replace("\"tau\"", "\"taw\"")));
    assert!(unknown.contains("unknown field `taw`"), "{unknown}");
    let shape = error(&with_metadata(|text| {
        text.replace("\"experts\":2", "\"experts\":3")
    }));
    assert!(
        shape.contains("centroids: found F32 [2, 4], expected F32 [2, 6]"),
        "{shape}"
    );
}

proptest! {
    #[test]
    fn arbitrary_bytes_never_panic(bytes: Vec<u8>) {
        prop_assert!(Blob::from_bytes(&bytes).is_err());
    }

    #[test]
    fn a_header_of_any_json_never_panics(text in r#"\{("[a-z_]{0,9}":[0-9"\[\]{}:,a-z]{0,20},?){0,4}\}"#) {
        let mut bytes = (text.len() as u64).to_le_bytes().to_vec();
        bytes.extend(text.bytes());
        prop_assert!(Blob::from_bytes(&bytes).is_err());
    }
}

#[test]
fn a_source_is_optional_and_bounded() {
    let with = |source: Option<String>| Blob { source, ..small() };
    let bytes = with(None).to_bytes().unwrap();
    assert!(!String::from_utf8_lossy(&bytes).contains("source"));
    assert_eq!(Blob::from_bytes(&bytes).unwrap().source, None);
    assert!(with(Some(" ".repeat(SOURCE_BYTES_MAX))).to_bytes().is_ok());
    let error = with(Some(" ".repeat(SOURCE_BYTES_MAX + 1))).to_bytes();
    let expected = "centroid blob, source: found 16385 bytes, expected at most 16384 bytes\n";
    assert!(error.unwrap_err().to_string().starts_with(expected));
}
