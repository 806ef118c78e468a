//! What `eldr report` promises, in a real browser: the page can be read in light and in dark.

use std::collections::HashMap;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use eldr_calibrator::place::{Cost, Devices, Objective, Traffic};
use eldr_calibrator::report::Report;
use eldr_calibrator::report::observe::Observed;
use eldr_core::signature::Geometry;
use eldr_core::transform::Transform;
use eldr_examples::setup;
use eldr_tests::blob;

/// A first start on a busy machine takes long.
const PATIENCE: Duration = Duration::from_secs(120);
const WIDTH: usize = 1000;
const HEIGHT: usize = 5200;

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

/// The pixels of the page, row by row, as a reader with this preference sees it.
async fn screenshot(html: &Path, dark: bool) -> Vec<[u8; 3]> {
    let folder = tempfile::tempdir().unwrap();
    let image = folder.path().join("page.png");
    let chromium = setup::chromium().unwrap_or_else(|error| panic!("{error}"));
    let scheme = if dark { 0 } else { 1 };
    let run = tokio::process::Command::new(chromium)
        .args([
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
        ])
        .args(["--no-first-run", "--disable-background-networking"])
        .arg(format!("--blink-settings=preferredColorScheme={scheme}"))
        .arg(format!("--window-size={WIDTH},{HEIGHT}"))
        .arg(format!(
            "--user-data-dir={}",
            folder.path().join("profile").display()
        ))
        .arg(format!("--screenshot={}", image.display()))
        .arg(format!("file://{}", html.display()))
        .stdin(Stdio::null())
        .kill_on_drop(true)
        .output();
    let output = tokio::time::timeout(PATIENCE, run)
        .await
        .expect("Chromium ends")
        .unwrap();
    let file = std::fs::File::open(&image)
        .unwrap_or_else(|_| panic!("no screenshot: {}", String::from_utf8_lossy(&output.stderr)));
    let mut reader = png::Decoder::new(std::io::BufReader::new(file))
        .read_info()
        .unwrap();
    let mut bytes = vec![0; reader.output_buffer_size().unwrap()];
    let info = reader.next_frame(&mut bytes).unwrap();
    let channels = info.color_type.samples();
    bytes
        .chunks_exact(channels)
        .map(|pixel| [pixel[0], pixel[1], pixel[2]])
        .collect()
}

/// Relative luminance, roughly: 0 black to 255 white.
fn light([red, green, blue]: [u8; 3]) -> f64 {
    0.2126 * f64::from(red) + 0.7152 * f64::from(green) + 0.0722 * f64::from(blue)
}

#[tokio::test]
async fn a_report_can_be_read_in_light_and_in_dark() {
    let folder = tempfile::tempdir().unwrap();
    let html = folder.path().join("report.html");
    std::fs::write(&html, page()).unwrap();
    for dark in [false, true] {
        let pixels = screenshot(&html, dark).await;
        assert_eq!(pixels.len(), WIDTH * HEIGHT);
        let mut colors: HashMap<[u8; 3], usize> = HashMap::new();
        pixels
            .iter()
            .for_each(|&pixel| *colors.entry(pixel).or_default() += 1);
        let (&paper, &most) = colors.iter().max_by_key(|&(_, count)| count).unwrap();
        assert_eq!(light(paper) < 128.0, dark, "the page is {paper:?}");
        assert!(
            most < pixels.len() * 97 / 100,
            "there is something on the page"
        );
        // Text of every section, and plots in colours: far from the paper, each more than a speck.
        let strong = colors
            .iter()
            .filter(|&(&color, &count)| count > 200 && (light(color) - light(paper)).abs() > 60.0);
        let strong: Vec<_> = strong.collect();
        assert!(strong.len() >= 8, "dark {dark}: {strong:?}");
        let stand_in =
            |color: &[u8; 3]| color[1] == 0 && (1..=6).contains(&color[0]) && color[2] < 12;
        let left: Vec<_> = colors.keys().filter(|color| stand_in(color)).collect();
        assert!(
            left.is_empty(),
            "stand-in colours without a real one: {left:?}"
        );
        // The last section is drawn too: something is left of the paper in every band of the page.
        let ink = |rows: &[[u8; 3]]| rows.iter().any(|&pixel| pixel != paper);
        let bands = pixels
            .chunks_exact(WIDTH * 100)
            .map(ink)
            .collect::<Vec<_>>();
        let end = bands.iter().rposition(|&ink| ink).unwrap();
        assert!(end > 30 && bands[..end].iter().all(|&ink| ink), "{bands:?}");
    }
}
