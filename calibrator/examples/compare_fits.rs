//! Which weight and which number of regions do best on requests that the fit did not see? For every trace given, with 16 workers:
//!
//! ```sh
//! cargo run --release -p eldr-calibrator --example compare_fits -- examples/data/small-moe/*_calibration.jsonl.gz
//! ```

use std::path::Path;

use comfy_table::{Table, presets::UTF8_FULL_CONDENSED};
use eldr_calibrator::Error;
use eldr_calibrator::fit::{Options, Quality, Regions, fit};
use eldr_calibrator::requests::Requests;
use eldr_calibrator::weights::Weight;
use eldr_core::transform::SignatureKind;

/// Splits into fitted and held-out requests that are averaged over.
const SEEDS: u64 = 5;
const WORKERS: usize = 16;

fn main() -> Result<(), Error> {
    let mut table = Table::new();
    table.load_style(UTF8_FULL_CONDENSED);
    table.set_header([
        "trace",
        "signature",
        "weight",
        "regions",
        "rho",
        "rho held out",
        "alike in region",
        "any two",
        "busiest",
    ]);
    for path in std::env::args().skip(1) {
        let name = Path::new(&path)
            .file_name()
            .unwrap_or_default()
            .display()
            .to_string();
        for kind in SignatureKind::ALL
            .into_iter()
            .filter(|kind| kind.is_of_counts())
        {
            let requests = Requests::read_for(kind, &[&path], || ())?;
            let weights = match kind {
                SignatureKind::CountIdf => Weight::ALL.map(Some).to_vec(),
                _ => vec![None],
            };
            for weight in weights {
                let defaults = kind == SignatureKind::CountIdf && weight == Some(Weight::default());
                let some: &[usize] = if defaults { &[16, 12, 8, 4, 2] } else { &[16] };
                for &regions in some {
                    let means = mean(&requests, weight, Regions::Fixed(regions))?;
                    let weight = weight.map_or("none".into(), |weight| format!("{weight:?}"));
                    let mut row = vec![
                        name.clone(),
                        kind.name().into(),
                        weight,
                        regions.to_string(),
                    ];
                    row.extend(means.map(|mean| format!("{mean:.3}")));
                    table.add_row(row);
                }
            }
        }
    }
    println!("{table}");
    Ok(())
}

/// Over the seeds: rho fitted to, rho held out, similarity in a region and of any two, requests of the busiest worker by the mean.
fn mean(requests: &Requests, weight: Option<Weight>, regions: Regions) -> Result<[f64; 5], Error> {
    let mut sums = [0.0; 5];
    for seed in 1..=SEEDS {
        let workers = (0..WORKERS).map(|worker| format!("decode-{worker}"));
        let options = Options {
            seed,
            regions,
            weight: weight.unwrap_or_default(),
            ..Options::new(workers.collect())
        };
        let fitted = fit(requests, &options, |_| ())?;
        let quality = fitted.quality.as_ref();
        let Some(chosen) = quality.and_then(Quality::chosen) else {
            return Err(Error::new(
                "too few requests to hold some out",
                "give more requests",
            ));
        };
        let found = [
            fitted.blob.fit.rho.unwrap_or(f64::NAN),
            quality.and_then(|quality| quality.rho).unwrap_or(f64::NAN),
            chosen.alike.in_region,
            chosen.alike.any,
            chosen.busiest,
        ];
        sums.iter_mut()
            .zip(found)
            .for_each(|(sum, found)| *sum += found / SEEDS as f64);
    }
    Ok(sums)
}
