//! Centroid files of the official ELDR artifact (repository casys-kaist/ELDR): one JSON object, written by
//! Python with an indent of two.
//!
//! | key | meaning |
//! |---|---|
//! | `L`, `e` | layers and experts of the model |
//! | `k`, `m` | regions, decode workers |
//! | `variant` | `count_idf`: counts × weights; `count`: counts alone; others cannot be routed by a signature of counts |
//! | `layer_mask` | compared layers, ascending; all if it is missing |
//! | `sig_idf` | weight per compared (layer, expert), with `count_idf` |
//! | `centroids` | unit rows `[k][compared layers × e]` |
//! | `model`, `n_fit`, `seed`, `fit_peak_rho`, … | how it was fitted |
//!
//! The artifact does not say which worker a region is for, how wide the band is, or how similar a region's
//! requests are to it: [`import`] is told the first two and knows the last of no region. What the file says
//! beside its numbers goes into the blob's `source`, and [`export`] writes the same bytes again.
//! A blob that `eldr fit` made has the key `eldr` in its exported file, which other readers skip, and comes back
//! from there byte for byte as well.

mod members;
mod python;

use std::fs::File;
use std::io::Read as _;
use std::path::Path;

use eldr_core::blob::{Blob, Fit, QUANTILES};
use eldr_core::signature::Geometry;
use eldr_core::transform::Transform;
use serde::{Deserialize, Serialize};

use crate::error::Error;
use members::Members;

/// Largest file that is read, bytes: 128 regions of all layers of a model with 60 × 384 experts.
pub const BYTES_MAX: u64 = 256 << 20;
/// Keys whose values are numbers of the blob; `source` has `[]` in their place, which no file can have.
const NUMBERS: [&str; 3] = ["layer_mask", "centroids", "sig_idf"];
const PLACEHOLDER: &str = "[]";

/// What the artifact's file does not say. `None` is what the file's key `eldr` says, or else the default.
#[derive(Clone, Copy, Debug, Default)]
pub struct Missing<'a> {
    /// Decode cluster names, one region each.
    pub workers: Option<&'a [String]>,
    /// Band width; 0.1 by default.
    pub tau: Option<f32>,
    /// Revision; 1 by default.
    pub revision: Option<u64>,
}

/// A blob made of a centroid file.
#[derive(Clone, Debug)]
pub struct Imported {
    /// The blob.
    pub blob: Blob,
    /// Whether [`export`] gives the very bytes that were read.
    pub exact: bool,
}

/// What a blob says and the artifact's file has no key for.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Ours {
    revision: u64,
    tau: f32,
    regions: Vec<Vec<String>>,
    shares: Vec<f64>,
    quantiles: Vec<Vec<f64>>,
}

/// Reads the centroid file at `path`.
///
/// # Errors
/// Names the key, its value and what is allowed.
pub fn import(path: &Path, missing: Missing<'_>) -> Result<Imported, Error> {
    let text = read(path)?;
    let file = Members::parse(path, &text)?;
    let geometry = Geometry::new(
        file.needed("L", "a number of layers")?,
        file.needed("e", "a number of experts")?,
    );
    let geometry = geometry.map_err(|error| file.told("L, e", error.to_string()))?;
    let variant: String = file.needed("variant", "a name")?;
    let weighted = match variant.as_str() {
        "count_idf" => true,
        "count" => false,
        other => {
            let what = format!("{other:?} where count_idf or count was expected");
            let hint = "gateways route by signatures of counts: fit the centroids with one of these variants";
            return Err(Error::new(
                format!("{}: key `variant`: {what}", file.name),
                hint,
            ));
        }
    };
    file.check_meaning()?;
    let layers: Option<Vec<u16>> = file.optional("layer_mask", "ascending layers")?;
    let layers = layers.unwrap_or_else(|| (0..=u16::MAX).take(geometry.layers).collect());
    let dimension = layers.len().saturating_mul(geometry.experts);
    let weights: Option<Vec<f32>> = file.optional("sig_idf", "a list of numbers")?;
    let weights = match (weighted, weights) {
        (true, Some(weights)) => weights,
        (true, None) => {
            return Err(file.told("sig_idf", "missing with the variant count_idf".into()));
        }
        (false, None) => vec![1.0; dimension],
        (false, Some(_)) => {
            return Err(file.told(
                "sig_idf",
                "there with the variant count, which has no weights".into(),
            ));
        }
    };
    let transform = Transform::new(geometry, layers, weights)
        .map_err(|error| file.told("layer_mask, sig_idf", error.to_string()))?;
    let centroids: Vec<Vec<f32>> = file.needed("centroids", "a list of lists of numbers")?;
    let regions: usize = file.needed("k", "a number of regions")?;
    let fits = centroids.len() == regions && centroids.iter().all(|row| row.len() == dimension);
    if !fits {
        let columns = centroids.first().map_or(0, Vec::len);
        let what = format!(
            "{} rows of {columns} where {regions} rows of {dimension}, compared layers × e, were expected",
            centroids.len()
        );
        return Err(file.told("centroids", what));
    }
    let ours: Option<Ours> = file.optional("eldr", "what `eldr convert export-centroids` wrote")?;
    let source = ours.is_none().then(|| file.source());
    let of_file = ours.as_ref();
    let regions = match (missing.workers, of_file) {
        (Some(workers), _) if workers.len() == regions => {
            workers.iter().map(|worker| vec![worker.clone()]).collect()
        }
        (Some(workers), _) => {
            return Err(Error::new(
                format!(
                    "{}: {regions} regions, but --workers has {}",
                    file.name,
                    workers.len()
                ),
                "name one decode cluster for each region, in their order",
            ));
        }
        (None, Some(ours)) => ours.regions.clone(),
        (None, None) => {
            return Err(Error::new(
                format!(
                    "{}: it does not say which decode cluster each of its {regions} regions is for",
                    file.name
                ),
                "name them in their order: --workers decode-0,decode-1,…",
            ));
        }
    };
    let blob = Blob {
        revision: missing
            .revision
            .or(of_file.map(|ours| ours.revision))
            .unwrap_or(1),
        model: file
            .optional("model", "a name")?
            .unwrap_or_else(|| "*".into()),
        transform,
        centroids: centroids.concat(),
        tau: missing.tau.or(of_file.map(|ours| ours.tau)).unwrap_or(0.1),
        fit: Fit {
            requests: file.optional("n_fit", "a number of requests")?.unwrap_or(0),
            rho: file.optional("fit_peak_rho", "a number from -1 to 1")?,
            seed: file.optional("seed", "a number from 0")?.unwrap_or(0),
            shares: of_file.map_or(vec![0.0; regions.len()], |ours| ours.shares.clone()),
            quantiles: of_file.map_or(vec![vec![0.0; QUANTILES.len()]; regions.len()], |ours| {
                ours.quantiles.clone()
            }),
        },
        regions,
        source,
    };
    blob.to_bytes()
        .map_err(|error| Error::in_file(path, &error))?;
    let exact = export(&blob).is_ok_and(|again| again == text);
    Ok(Imported { blob, exact })
}

/// The blob as the artifact's centroid file: as it was, if it came from one.
///
/// # Errors
/// The blob's `source` is none of a centroid file, or one of other regions.
pub fn export(blob: &Blob) -> Result<String, Error> {
    let Geometry { layers, experts } = blob.transform.geometry();
    let regions = blob.regions.len();
    let own = [
        (
            "layer_mask",
            python::list(blob.transform.layers().iter().map(u16::to_string), 1),
        ),
        (
            "centroids",
            python::list(
                blob.rows().map(|row| python::list(python::floats(row), 2)),
                1,
            ),
        ),
        (
            "sig_idf",
            python::list(python::floats(blob.transform.weights()), 1),
        ),
    ];
    let number = |key: &str| {
        own.iter()
            .find(|(name, _)| *name == key)
            .map(|(_, text)| text.clone())
    };
    if let Some(source) = &blob.source {
        let file = Members::parse(Path::new("the blob's `source`"), source)?;
        let shape = ["k", "L", "e"].map(|key| file.needed::<usize>(key, "a number").ok());
        if shape != [regions, layers, experts].map(Some) {
            return Err(Error::new(
                format!(
                    "the blob has {regions} regions of {layers} × {experts}, its `source` is of others"
                ),
                "fit it again, or import the centroids again",
            ));
        }
        return Ok(python::object(
            file.members.iter().map(|(key, value)| {
                let placeholder = value.get() == PLACEHOLDER;
                let own = number(key).filter(|_| placeholder);
                (key.as_str(), own.unwrap_or_else(|| value.get().to_owned()))
            }),
            0,
        ) + "\n");
    }
    let ours = [
        ("revision", blob.revision.to_string()),
        ("tau", python::float(blob.tau.into())),
        (
            "regions",
            python::list(
                blob.regions
                    .iter()
                    .map(|names| python::list(names.iter().map(|name| python::string(name)), 3)),
                2,
            ),
        ),
        (
            "shares",
            python::list(blob.fit.shares.iter().map(|&share| python::float(share)), 2),
        ),
        (
            "quantiles",
            python::list(
                blob.fit.quantiles.iter().map(|row| {
                    python::list(row.iter().map(|&quantile| python::float(quantile)), 3)
                }),
                2,
            ),
        ),
    ];
    let workers: std::collections::BTreeSet<_> = blob.regions.iter().flatten().collect();
    let selected = if blob.fit.rho.is_some() {
        "forward_greedy"
    } else {
        "all"
    };
    let text = |text: &str| Some(python::string(text));
    let members = [
        ("model", text(&blob.model)),
        ("algo", text("kmbal")),
        ("k", Some(regions.to_string())),
        ("m", Some(workers.len().to_string())),
        ("L", Some(layers.to_string())),
        ("e", Some(experts.to_string())),
        ("n_fit", Some(blob.fit.requests.to_string())),
        ("variant", text("count_idf")),
        ("layer_select", text(selected)),
        ("layer_mask", number("layer_mask")),
        ("fit_peak_rho", blob.fit.rho.map(python::float)),
        ("seed", Some(blob.fit.seed.to_string())),
        ("sig_dtype", text("<i2")),
        ("centroids", number("centroids")),
        ("sig_idf", number("sig_idf")),
        ("eldr", Some(python::object(ours.into_iter(), 1))),
    ];
    let there = members
        .into_iter()
        .filter_map(|(key, value)| Some((key, value?)));
    Ok(python::object(there, 0) + "\n")
}

fn read(path: &Path) -> Result<String, Error> {
    let failed = |what: String| {
        let hint = "give a centroid file that the official artifact wrote";
        Error::new(format!("{}: {what}", path.display()), hint)
    };
    let mut text = String::new();
    let read = File::open(path).and_then(|file| file.take(BYTES_MAX + 1).read_to_string(&mut text));
    read.map_err(|error| failed(format!("reading the centroids failed: {error}")))?;
    if text.len() as u64 > BYTES_MAX {
        return Err(failed(format!(
            "more than {BYTES_MAX} bytes are no centroid file"
        )));
    }
    Ok(text)
}

#[cfg(test)]
mod tests;
