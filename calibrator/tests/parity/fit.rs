use eldr_calibrator::fit::{Options, Progress, fit_with};
use eldr_calibrator::requests::Requests;
use eldr_calibrator::weights::Weight;
use eldr_core::signature::Geometry;
use serde::Deserialize;

use super::{assert_close, json, npz, pairs, requests};

#[derive(Deserialize)]
struct IdfCases {
    cases: Vec<IdfCase>,
}

#[derive(Deserialize)]
struct IdfCase {
    counts: Vec<Vec<Vec<u16>>>,
    idf: Vec<Vec<f32>>,
}

fn idf(requests: &Requests) -> Vec<f32> {
    let all: Vec<usize> = (0..requests.len()).collect();
    Weight::PresenceIdf.of(requests, &all)
}

#[test]
fn weights_of_small_cases() {
    for case in json::<IdfCases>("b_idf_tiny.json").cases {
        let layers = case.counts[0].len();
        let geometry = Geometry {
            layers,
            experts: case.counts[0][0].len(),
        };
        let counts = case.counts.concat().concat();
        let found = idf(&requests(geometry, &counts, None));
        assert_close(&found, &case.idf.concat(), 1e-6);
    }
}

#[test]
fn weights_at_full_size() {
    let mut npz = npz("b_idf_full.npz");
    let counts = npz.array::<u8>("counts").unwrap();
    let geometry = Geometry {
        layers: counts.shape[1],
        experts: counts.shape[2],
    };
    let counts: Vec<u16> = counts.data.into_iter().map(u16::from).collect();
    let found = idf(&requests(geometry, &counts, None));
    assert_close(&found, &npz.array::<f32>("idf").unwrap().data, 1e-6);
}

#[derive(Deserialize)]
struct Expected {
    #[serde(rename = "K")]
    regions: usize,
    order: Vec<usize>,
    rho: Vec<f64>,
    peak_step: usize,
    layer_mask: Vec<u16>,
    fit_peak_rho: f64,
    iterations: usize,
    converged: bool,
    total_cosine_distance: Vec<f64>,
    sizes: Vec<Vec<usize>>,
}

/// The whole fit from the official random pairs and starting centroids.
fn check(name: &str) {
    let expected: Expected = json(&format!("h_fit_{name}_expected.json"));
    let mut calibration = npz(&format!("h_fit_{name}_calibration.npz"));
    let mut trace = npz(&format!("h_fit_{name}_trace.npz"));
    let mut counts = |array| calibration.array::<i32>(array).unwrap();
    let (prefill, decode) = (counts("prefill_counts"), counts("decode_counts"));
    let geometry = Geometry {
        layers: prefill.shape[1],
        experts: prefill.shape[2],
    };
    let [prefill, decode] = [prefill, decode].map(|counts| {
        counts
            .data
            .iter()
            .map(|&count| count as u16)
            .collect::<Vec<u16>>()
    });
    let requests = requests(geometry, &prefill, Some(&decode));
    let pairs = pairs(&mut trace, "");
    let start = trace.array::<f32>("initial_centroids").unwrap().data;

    let weights = idf(&requests);
    assert_close(&weights, &trace.array::<f32>("idf").unwrap().data, 1e-6);

    let workers = 0..expected.regions;
    let workers = workers.map(|worker| format!("decode-{worker}")).collect();
    let options = Options::as_published(workers);
    let mut layers_tried = 0;
    let fitted = fit_with(
        &requests,
        &options,
        &pairs,
        |_| start.clone(),
        |progress| {
            layers_tried += usize::from(matches!(progress, Progress::Layers { .. }));
        },
    )
    .unwrap();
    let blob = &fitted.blob;
    assert_eq!(layers_tried, geometry.layers * (geometry.layers + 1) / 2);
    assert_eq!(blob.transform.layers(), expected.layer_mask);
    assert!((blob.fit.rho.unwrap() - expected.fit_peak_rho).abs() < 2e-5);
    assert_eq!(
        (fitted.rounds, fitted.converged),
        (expected.iterations, expected.converged)
    );
    let total = expected.total_cosine_distance.last().unwrap();
    assert!((fitted.total_distance - total).abs() < 5e-8 * requests.len() as f64 + 1e-5);
    let sizes: Vec<usize> = blob
        .fit
        .shares
        .iter()
        .map(|share| (share * requests.len() as f64).round() as usize)
        .collect();
    assert_eq!(&sizes, expected.sizes.last().unwrap());
    assert_close(
        &blob.centroids,
        &trace.array::<f32>("final_centroids").unwrap().data,
        2e-6,
    );

    let selection = fitted.selection.unwrap();
    assert_eq!(selection.kept, expected.peak_step + 1);
    // Choices after the last one that is kept may be too close to call.
    assert_eq!(
        selection.order[..selection.kept],
        expected.order[..selection.kept]
    );
    for (found, expected) in selection.rho.iter().zip(&expected.rho).take(selection.kept) {
        assert!((found - expected).abs() < 2e-5);
    }
}

#[test]
fn a_small_fit() {
    check("tiny");
}

#[test]
fn a_fit_of_48_layers_by_128_experts() {
    check("full");
}
