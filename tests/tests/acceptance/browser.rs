//! Pages in a real browser: what a reader sees, and what the browser has to say.
//!
//! The pages' own policy forbids scripts and everything from outside the file, and the browser says on its console what it refuses.

use std::collections::HashMap;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use eldr_calibrator::report::page::Page;
use eldr_examples::setup;

/// A first start on a busy machine takes long.
const PATIENCE: Duration = Duration::from_secs(120);
const WIDTH: usize = 1000;
/// Rows of pixels that are looked at together.
const BAND: usize = 100;

/// A page as it was opened.
struct Opened {
    /// Row by row.
    pixels: Vec<[u8; 3]>,
    /// What the browser wrote to the console: what it refused, what failed.
    console: Vec<String>,
}

/// Opens a page as a reader with this preference does, in a window of so many rows.
async fn open(html: &Path, rows: usize, dark: bool) -> Opened {
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
        .arg("--enable-logging=stderr")
        .arg(format!("--blink-settings=preferredColorScheme={scheme}"))
        .arg(format!("--window-size={WIDTH},{rows}"))
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
    let said = String::from_utf8_lossy(&output.stderr);
    let file = std::fs::File::open(&image).unwrap_or_else(|_| panic!("no screenshot: {said}"));
    let mut reader = png::Decoder::new(std::io::BufReader::new(file))
        .read_info()
        .unwrap();
    let mut bytes = vec![0; reader.output_buffer_size().unwrap()];
    let info = reader.next_frame(&mut bytes).unwrap();
    let pixels = bytes.chunks_exact(info.color_type.samples());
    let console = said.lines().filter(|line| line.contains(":CONSOLE"));
    Opened {
        pixels: pixels.map(|pixel| [pixel[0], pixel[1], pixel[2]]).collect(),
        console: console.map(str::to_owned).collect(),
    }
}

/// Relative luminance, roughly: 0 black to 255 white.
fn light([red, green, blue]: [u8; 3]) -> f64 {
    0.2126 * f64::from(red) + 0.7152 * f64::from(green) + 0.0722 * f64::from(blue)
}

/// Whether a page can be read in light and in dark, is drawn from top to bottom, with more than `least` of `rows` rows, and gives the
/// browser nothing to complain about.
pub(crate) async fn assert_readable(page: &str, rows: usize, least: usize) {
    let folder = tempfile::tempdir().unwrap();
    let html = folder.path().join("page.html");
    std::fs::write(&html, page).unwrap();
    for dark in [false, true] {
        let Opened { pixels, console } = open(&html, rows, dark).await;
        assert!(console.is_empty(), "{console:?}");
        assert_eq!(pixels.len(), WIDTH * rows);
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
            .chunks_exact(WIDTH * BAND)
            .map(ink)
            .collect::<Vec<_>>();
        let end = bands.iter().rposition(|&ink| ink).unwrap();
        assert!(end + 1 < bands.len(), "the page is longer than {rows} rows");
        assert!(end * BAND > least, "the page ends in band {end}");
        assert!(bands[..end].iter().all(|&ink| ink), "{bands:?}");
    }
}

#[tokio::test]
async fn a_page_with_scripts_or_from_outside_is_complained_about() {
    let folder = tempfile::tempdir().unwrap();
    let html = folder.path().join("page.html");
    for foreign in [
        "<script>document.title</script>",
        "<img src='http://outside.test/x.png'>",
        "<link rel='stylesheet' href='https://outside.test/x.css'>",
    ] {
        let page = Page::default().html("A page").replace("</body>", foreign);
        std::fs::write(&html, page).unwrap();
        let Opened { console, .. } = open(&html, BAND, false).await;
        let refused = |line: &String| line.contains("Content Security Policy");
        assert!(console.iter().any(refused), "{foreign}: {console:?}");
    }
}
