use eldr_core::signature::Encoding;
use tempfile::TempDir;

use super::*;
use crate::testing;

/// Two regions, told apart by layer 1 of two layers with two experts: region 0 is served by `a` and
/// `b`, region 1 by `b`.
fn blob() -> Blob {
    let geometry = Geometry {
        layers: 2,
        experts: 2,
    };
    let centroids = vec![1.0, 0.0, 0.0, 1.0];
    testing::blob(geometry, 1, centroids, &[&["a", "b"], &["b"]])
}

/// A signature of two layers with two experts.
fn signature(counts: [u16; 4]) -> String {
    let geometry = blob().transform.geometry();
    let signature = Signature::dense(geometry, counts.to_vec(), None).unwrap();
    signature.encode(Encoding::U16)
}

fn line(prefill: [u16; 4], more: &str) -> String {
    let prefill = signature(prefill);
    format!("{{\"id\":\"r\",\"prefill\":\"{prefill}\"{more}}}\n")
}

fn decode(counts: [u16; 4], tokens: u64) -> String {
    let decode = signature(counts);
    format!(r#","decode":"{decode}","decode_tokens":{tokens}"#)
}

fn read(content: &str, top_k: Option<u32>) -> Result<Traffic, Error> {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("t");
    std::fs::write(&path, content).unwrap();
    Traffic::read(&[path], &blob(), top_k, || {})
}

#[test]
fn each_cluster_gets_the_usage_of_its_regions() {
    // Two requests of region 0, one of region 1, one that shows no region.
    let trace = line([3, 0, 3, 0], &decode([4, 0, 2, 2], 4))
        + &line([1, 2, 3, 0], &decode([0, 4, 4, 0], 4))
        + &line([0, 3, 0, 3], &decode([2, 0, 1, 1], 2))
        + &line([2, 1, 0, 0], &decode([9, 0, 9, 0], 9));
    let traffic = read(&trace, None).unwrap();
    assert_eq!((traffic.counts, traffic.requests), (Phase::Decode, 3));
    assert_eq!((traffic.counted, traffic.skipped), (3, 1));
    let [a, b] = &traffic.clusters[..] else {
        panic!("{traffic:?}");
    };
    assert_eq!(
        (a.cluster.as_str(), &a.regions[..], a.requests),
        ("a", &[0][..], 2)
    );
    assert_eq!(a.probabilities, [0.5, 0.5, 0.75, 0.25]);
    // Half of region 0, which `a` serves too, and all of region 1.
    assert_eq!(
        (b.cluster.as_str(), &b.regions[..], b.requests),
        ("b", &[0, 1][..], 3)
    );
    let of_b = [4.0, 2.0, 4.0, 2.0].map(|count| count / 6.0);
    for (found, expected) in b.probabilities.iter().zip(of_b) {
        assert!((found - expected).abs() < 1e-12, "{b:?}");
    }
}

#[test]
fn prefill_counts_serve_where_most_requests_have_no_others() {
    let plain = line([3, 0, 3, 0], r#","prompt_tokens":3"#);
    let full = line(
        [0, 3, 0, 3],
        &(decode([1, 0, 1, 0], 1) + r#","prompt_tokens":3"#),
    );
    let traffic = read(&(plain.clone() + &plain + &full), None).unwrap();
    assert_eq!((traffic.counts, traffic.counted), (Phase::Prefill, 3));
    assert_eq!(traffic.clusters[0].probabilities, [1.0, 0.0, 1.0, 0.0]);
    let traffic = read(&(plain + &full), None).unwrap();
    assert_eq!((traffic.counts, traffic.counted), (Phase::Decode, 1));
}

#[test]
fn a_cluster_without_requests_gets_the_usage_of_all() {
    let traffic = read(&line([0, 3, 0, 3], r#","prompt_tokens":3"#), None).unwrap();
    assert_eq!(traffic.clusters[0].requests, 0);
    assert_eq!(traffic.clusters[0].probabilities, [0.0, 1.0, 0.0, 1.0]);
}

#[test]
fn top_k_stands_in_for_the_number_of_tokens() {
    let trace = line([3, 1, 4, 0], "");
    let traffic = read(&trace, Some(1)).unwrap();
    assert_eq!(traffic.clusters[0].probabilities, [0.75, 0.25, 1.0, 0.0]);
    let error = read(&trace, None).unwrap_err();
    assert!(error.hint().contains("--top-k"), "{error}");
}

/// What is wrong with counts that are not used is no matter.
#[test]
fn prompt_tokens_are_not_needed_beside_decode_counts() {
    let traffic = read(&line([3, 0, 3, 0], &decode([1, 0, 1, 0], 1)), None).unwrap();
    assert_eq!(traffic.counts, Phase::Decode);
}
