use eldr_core::blob::Fit;
use eldr_core::decide::Reason;
use eldr_core::signature::{Encoding, Geometry, Signature};
use eldr_core::transform::Transform;
use serde_json::json;

use super::*;

/// One region per worker; region i wants expert i of a 1×4 model.
pub(crate) fn blob_bytes(revision: u64, workers: &[&str]) -> Vec<u8> {
    deep_blob_bytes(revision, workers, 1)
}

/// The same of so many layers, all of which are compared; region i wants expert i of the first.
pub(crate) fn deep_blob_bytes(revision: u64, workers: &[&str], layers: u16) -> Vec<u8> {
    let dimension = 4 * usize::from(layers);
    let mut centroids = vec![0.0; dimension * workers.len()];
    for (region, row) in centroids.chunks_mut(dimension).enumerate() {
        row[region] = 1.0;
    }
    let geometry = Geometry::new(layers.into(), 4).unwrap();
    let weights = vec![1.0; dimension];
    let blob = Blob {
        revision,
        model: "tiny".into(),
        transform: Transform::new(geometry, (0..layers).collect(), weights).unwrap(),
        centroids,
        tau: 0.2,
        regions: workers
            .iter()
            .map(|name| vec![(*name).to_owned()])
            .collect(),
        fit: Fit {
            quantiles: vec![vec![0.5; 7]; workers.len()],
            requests: 4,
            rho: None,
            seed: 1,
            shares: vec![1.0 / workers.len() as f64; workers.len()],
        },
        source: None,
    };
    blob.to_bytes().unwrap()
}

pub(crate) fn plugin() -> Plugin {
    let config = json!({
        "models": [{"model": "*"}, {"model": "moe"}],
        "decode_clusters": ["decode-0", "decode-1"],
        "prefill_clusters": ["p0", "p1"],
    });
    let mut plugin = Plugin::new(Config::parse(config.to_string().as_bytes()).unwrap());
    let moe = plugin.model(Some("moe")).unwrap();
    plugin
        .update(moe, 1, &blob_bytes(1, &["decode-0", "decode-1"]))
        .unwrap();
    plugin
}

pub(crate) fn signature(counts: [u16; 4]) -> String {
    let geometry = Geometry::new(1, 4).unwrap();
    Signature::dense(geometry, counts.to_vec(), None)
        .unwrap()
        .encode(Encoding::U16)
}

fn workers(
    plugin: &Plugin,
    load: impl Fn(&str) -> u32,
    is_available: impl Fn(&str) -> bool,
) -> Vec<Worker> {
    plugin.workers(|name| Now {
        load: f64::from(load(name)),
        is_available: is_available(name),
        is_full: false,
    })
}

#[test]
fn a_full_worker_is_no_candidate_while_another_has_room() {
    let plugin = plugin();
    let available = |out: &'static str, full: &'static [&str]| {
        let workers = plugin.workers(|name| Now {
            load: 0.0,
            is_available: name != out,
            is_full: full.contains(&name),
        });
        let workers = workers.iter().map(|worker| worker.available);
        workers.collect::<Vec<_>>()
    };
    assert_eq!(available("", &["decode-0"]), [false, true]);
    assert_eq!(available("", &["decode-0", "decode-1"]), [true, true]);
    assert_eq!(available("decode-1", &["decode-0"]), [true, false]);
    assert_eq!(available("decode-0", &["decode-0"]), [false, true]);
}

fn decide(plugin: &Plugin, model: &str, signature: Option<&str>) -> (String, Reason) {
    let draw = Draw {
        sequence: 0,
        entropy: 0,
    };
    let loads = |cluster: &str| u32::from(cluster == "decode-0");
    let decision = plugin.decide(
        plugin.model(Some(model)),
        signature.map(str::as_bytes),
        &workers(plugin, loads, |_| true),
        draw,
        &mut Scratch::default(),
        |_| (),
    );
    (
        plugin.decode_cluster(decision.target).to_owned(),
        decision.reason,
    )
}

#[test]
fn each_model_has_its_own_blob() {
    let plugin = plugin();
    let second = signature([0, 9, 0, 0]);
    assert_eq!(
        decide(&plugin, "moe", Some(&second)),
        ("decode-1".into(), Reason::InBand)
    );
    assert_eq!(
        decide(&plugin, "other", Some(&second)),
        ("decode-1".into(), Reason::NoBlob)
    );
    assert_eq!(
        decide(&plugin, "moe", None),
        ("decode-1".into(), Reason::NoSignature)
    );
}

#[test]
fn a_blob_that_cannot_be_used_changes_nothing() {
    let mut plugin = plugin();
    let moe = plugin.model(Some("moe")).unwrap();
    assert!(plugin.update(moe, 8, b"rubbish").is_err());
    assert!(
        plugin
            .update(moe, 9, &blob_bytes(9, &["decode-7"]))
            .is_err()
    );
    assert_eq!(plugin.revision(moe), Some(1));
    assert_eq!(plugin.known_revision(moe), Some(9), "refused once");
    assert_eq!(
        plugin.update(moe, 2, &blob_bytes(2, &["decode-1", "decode-0"])),
        Ok(2)
    );
    let first = signature([9, 0, 0, 0]);
    assert_eq!(
        decide(&plugin, "moe", Some(&first)),
        ("decode-1".into(), Reason::InBand)
    );
}

#[test]
fn weights_and_drains_shift_requests_and_a_drained_one_is_no_last_resort() {
    let config = json!({
        "models": [{"model": "*", "policy": "least_loaded"}],
        "decode_clusters": [
            {"name": "heavy", "weight": 3},
            "light",
            {"name": "leaving", "drain": true},
        ],
        "prefill_clusters": ["p"],
    });
    let plugin = Plugin::new(Config::parse(config.to_string().as_bytes()).unwrap());
    let choose = |heavy: u32, light: u32, available: bool| {
        let in_flight = |name: &str| match name {
            "heavy" => heavy,
            "light" => light,
            _ => 0,
        };
        let workers = workers(&plugin, in_flight, |_| available);
        let draw = Draw {
            sequence: 0,
            entropy: 0,
        };
        let model = plugin.model(None);
        let decision = plugin.decide(model, None, &workers, draw, &mut Scratch::default(), |_| ());
        (plugin.decode_cluster(decision.target), decision.reason)
    };
    assert_eq!(choose(5, 2, true), ("heavy", Reason::Blind));
    assert_eq!(choose(7, 2, true), ("light", Reason::Blind));
    assert_eq!(choose(7, 2, false), ("light", Reason::AllEjected));
}

#[test]
fn releases_go_to_the_least_loaded_but_not_where_decode_just_failed() {
    let plugin = plugin();
    let loads = |cluster: &str| u32::from(cluster == "decode-0");
    let all = workers(&plugin, loads, |_| true);
    assert_eq!(plugin.release_cluster(None, &all), "decode-1");
    let release = |failed| plugin.release_cluster(failed, &all);
    assert_eq!(release(Some("decode-1")), "decode-0");
    let one = workers(&plugin, loads, |cluster| cluster == "decode-0");
    assert_eq!(plugin.release_cluster(None, &one), "decode-0");
}

#[test]
fn the_artifacts_signature_is_read_with_the_geometry_of_the_blob() {
    let plugin = plugin();
    // 0, 9, 0, 0 as i16.
    let (good, negative) = ("\"AAAJAAAAAAA=\"", "\"AAD//wAAAAA=\"");
    for (model, raw, expected) in [
        ("moe", good, ("decode-1", Reason::InBand)),
        ("moe", negative, ("decode-1", Reason::MalformedSignature)),
        (
            "moe",
            "\"AAAJAA==\"",
            ("decode-1", Reason::MalformedSignature),
        ),
        ("moe", "17", ("decode-1", Reason::MalformedSignature)),
        ("moe", "null", ("decode-1", Reason::NoSignature)),
        ("moe", "\"\"", ("decode-1", Reason::NoSignature)),
        ("other", good, ("decode-1", Reason::NoBlob)),
    ] {
        let header = plugin.header_from_eldr_sig(plugin.model(Some(model)), raw);
        let header = header.map(|header| String::from_utf8(header).unwrap());
        let (cluster, reason) = decide(&plugin, model, header.as_deref());
        assert_eq!((cluster.as_str(), reason), expected, "{model} {raw}");
    }
}
