//! What the pages of `eldr report` and `eldr reproduce --html` promise, in a real browser: they can be read in light and in dark.

use eldr_calibrator::place::{Cost, Devices, Objective, Traffic};
use eldr_calibrator::report::Report;
use eldr_calibrator::report::observe::Observed;
use eldr_calibrator::report::reproduction as reproduction_page;
use eldr_calibrator::reproduce::{Options, Size, reproduce};
use eldr_core::signature::Geometry;
use eldr_core::transform::Transform;
use eldr_tests::blob;

use crate::browser::assert_readable;

/// A page with every section: two regions, and a trace of twelve requests with decode counts.
fn page() -> String {
    let folder = tempfile::tempdir().unwrap();
    let trace = folder.path().join("trace.jsonl");
    let experts = 8;
    let geometry = Geometry::new(1, experts).unwrap();
    let lines = (0..12).map(|request| {
        let signature = blob::signature_of(request % experts, experts);
        let label = if request % 2 == 0 { "even" } else { "odd" };
        format!(
            r#"{{"id":"{request}","label":"{label}","prefill":"{signature}","decode":"{signature}","decode_tokens":7}}"#
        ) + "\n"
    });
    std::fs::write(&trace, lines.collect::<String>()).unwrap();
    let half = |first: usize| (0..experts).map(move |e| if e / 4 == first { 0.5 } else { 0.0 });
    let transform = Transform::new(geometry, vec![0], vec![1.0; experts]).unwrap();
    let regions = [vec!["decode-0".into()], vec!["decode-1".into()]];
    let blob = blob::new(transform, half(0).chain(half(1)).collect(), &regions);
    let observed = Observed::read(&[&trace], &blob, 1, || {}).unwrap();
    let traffic = Traffic::read(&[&trace], &blob, None, || {}).unwrap();
    let devices = Devices {
        experts,
        gpus: 4,
        redundant: 0,
        nodes: 1,
        groups: None,
    };
    let cost = Cost {
        objective: Objective::Distinct,
        batch: 8,
    };
    let report = Report {
        blob: &blob,
        sources: &[],
        observed: Some(&observed),
        placement: Some(Ok((&traffic, devices, cost))),
        seed: 1,
    };
    report.html().unwrap()
}

#[tokio::test]
async fn a_report_can_be_read_in_light_and_in_dark() {
    assert_readable(&page(), 5_200, 3_000).await;
}

/// Everything that `eldr reproduce --html` shows, of the least that can be simulated.
#[tokio::test]
async fn a_reproduction_can_be_read_in_light_and_in_dark() {
    let options = Options {
        size: Size {
            calibration: 32,
            requests: 16,
            seconds: 1,
        },
        rates: vec![20, 40],
        ..Options::full(1)
    };
    let reproduction = reproduce(&options, |_| ()).unwrap();
    let page = reproduction_page(&reproduction, "eldr reproduce --html page.html").unwrap();
    assert_readable(&page, 12_000, 9_000).await;
}
