//! Blobs that are valid, then damaged; and files whose hash is right while everything else is anything.

use std::collections::HashMap;

use arbitrary::Arbitrary;
use eldr_core::blob::{Blob, Fit};
use eldr_core::signature::Geometry;
use eldr_core::transform::Transform;
use safetensors::tensor::{Dtype, TensorView};
use serde::Serialize;
use sha2::{Digest, Sha256};

/// What the bytes stand for.
#[derive(Arbitrary, Debug)]
pub struct Input(Case);

#[derive(Arbitrary, Debug)]
enum Case {
    Damaged(Valid, Damage),
    Crafted(Crafted),
}

#[derive(Arbitrary, Debug)]
struct Valid {
    revision: u64,
    model: String,
    layers: u8,
    experts: u8,
    selected: u16,
    weights: Vec<u16>,
    /// Dimension in which each region's centroid is 1.
    regions: Vec<(u8, String)>,
    tau: f32,
    rho: Option<f64>,
    share: f64,
    quantile: f64,
    requests: u64,
    seed: u64,
}

#[derive(Arbitrary, Debug)]
enum Damage {
    Flip(u32, u8),
    Cut(u32),
    Insert(u32, Vec<u8>),
    Swap(u32, u32),
}

/// Fields in sorted order, as in the file.
#[derive(Arbitrary, Debug, Serialize)]
struct Metadata {
    experts: u8,
    fit: FitFields,
    format_version: Version,
    layers_total: u8,
    model: String,
    regions: Vec<Vec<String>>,
    revision: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[arbitrary(value = None)]
    sha256: Option<String>,
    signature: Kind,
    tau: f32,
}

#[derive(Arbitrary, Debug, Serialize)]
struct FitFields {
    quantiles: Vec<[f64; 7]>,
    requests: u64,
    rho: Option<f64>,
    seed: u64,
    shares: Vec<f64>,
}

#[derive(Arbitrary, Debug, Serialize)]
#[serde(untagged)]
enum Version {
    One(#[arbitrary(value = 1)] u32),
    Other(u32),
}

#[derive(Arbitrary, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
enum Kind {
    CountIdf,
    Other,
}

#[derive(Arbitrary, Debug)]
struct Crafted {
    metadata: Metadata,
    /// As many values as the shapes need are taken, round and round.
    values: Vec<f32>,
    layers: Vec<u8>,
    /// Regions and dimension of the tensors where they are not those of the metadata.
    shape: Option<(u8, u8)>,
    unit_rows: bool,
    more_metadata: bool,
}

/// Panics where a promise is broken.
pub fn check(input: Input) {
    match input.0 {
        Case::Damaged(valid, damage) => damaged(valid, damage),
        Case::Crafted(crafted) => self::crafted(crafted),
    }
}

fn damaged(valid: Valid, damage: Damage) {
    let Some(blob) = blob(valid) else {
        return;
    };
    // What the types allow and the file does not, such as NaN, is refused before it is written.
    let Ok(bytes) = blob.to_bytes() else {
        return;
    };
    assert_eq!(Blob::from_bytes(&bytes).expect("ours"), blob);
    let mut other = bytes.clone();
    let at = |at: u32| at as usize % bytes.len();
    match damage {
        Damage::Flip(place, bits) => other[at(place)] ^= bits,
        Damage::Cut(place) => other.truncate(at(place)),
        Damage::Insert(place, more) => drop(other.splice(at(place)..at(place), more)),
        Damage::Swap(a, b) => other.swap(at(a), at(b)),
    }
    assert_eq!(Blob::from_bytes(&other).is_ok(), other == bytes);
}

fn blob(valid: Valid) -> Option<Blob> {
    let geometry = Geometry::new(
        usize::from(valid.layers % 6) + 1,
        usize::from(valid.experts % 9) + 1,
    )
    .ok()?;
    let layers: Vec<u16> = (0..geometry.layers as u16)
        .filter(|layer| valid.selected >> layer & 1 == 1)
        .collect();
    let dimension = layers.len() * geometry.experts;
    let weights = (0..dimension)
        .map(|at| f32::from(*valid.weights.get(at).unwrap_or(&1)) / 256.0)
        .collect();
    let transform = Transform::new(geometry, layers, weights).ok()?;
    let regions = valid.regions.len();
    let mut centroids = vec![0.0; regions * dimension];
    for (row, (hot, _)) in centroids.chunks_mut(dimension).zip(&valid.regions) {
        row[usize::from(*hot) % dimension] = 1.0;
    }
    Some(Blob {
        revision: valid.revision,
        model: valid.model,
        transform,
        centroids,
        tau: valid.tau,
        regions: valid
            .regions
            .into_iter()
            .map(|(_, name)| vec![name])
            .collect(),
        fit: Fit {
            quantiles: vec![vec![valid.quantile; 7]; regions],
            requests: valid.requests,
            rho: valid.rho,
            seed: valid.seed,
            shares: vec![valid.share; regions],
        },
        source: None,
    })
}

fn crafted(crafted: Crafted) {
    let mut metadata = crafted.metadata;
    let layers: Vec<u8> = crafted
        .layers
        .iter()
        .flat_map(|&layer| [layer, 0])
        .collect();
    let (regions, dimension) = match crafted.shape {
        Some((regions, dimension)) => (usize::from(regions), usize::from(dimension)),
        None => (
            metadata.regions.len(),
            crafted.layers.len() * usize::from(metadata.experts),
        ),
    };
    if regions * dimension > 20_000 {
        return;
    }
    let values = |count: usize| -> Vec<f32> {
        let values = crafted.values.iter().copied().cycle();
        values.chain(std::iter::repeat(1.0)).take(count).collect()
    };
    let mut centroids = values(regions * dimension);
    if crafted.unit_rows && dimension > 0 {
        for row in centroids.chunks_mut(dimension) {
            row.fill(0.0);
            row[dimension / 2] = 1.0;
        }
    }
    let bytes =
        |values: &[f32]| -> Vec<u8> { values.iter().flat_map(|x| x.to_le_bytes()).collect() };
    let (centroids, idf) = (bytes(&centroids), bytes(&values(dimension)));
    let tensors = [
        (
            "centroids",
            Dtype::F32,
            vec![regions, dimension],
            &centroids,
        ),
        ("idf", Dtype::F32, vec![dimension], &idf),
        ("layers", Dtype::U16, vec![crafted.layers.len()], &layers),
    ];
    metadata.sha256 = Some(sha256(&metadata, &tensors));
    let text = serde_json::to_string(&metadata).expect("JSON");
    let views: Vec<_> = tensors
        .iter()
        .map(|(name, dtype, shape, bytes)| {
            (
                *name,
                TensorView::new(*dtype, shape.clone(), bytes).expect("its size"),
            )
        })
        .collect();
    let mut info = HashMap::from([("eldr".to_owned(), text)]);
    if crafted.more_metadata {
        info.insert("other".into(), String::new());
    }
    let file = safetensors::serialize(views, Some(info)).expect("a file");
    match Blob::from_bytes(&file) {
        Ok(blob) => assert_eq!(blob.to_bytes().expect("it was read"), file),
        Err(error) => assert!(!error.to_string().contains("sha256"), "{error}"),
    }
}

/// As documented: the JSON without its hash, then each tensor; every piece after its length.
fn sha256(metadata: &Metadata, tensors: &[(&str, Dtype, Vec<usize>, &Vec<u8>)]) -> String {
    let mut pieces = vec![serde_json::to_vec(metadata).expect("JSON")];
    for (name, dtype, shape, bytes) in tensors {
        pieces.push(name.as_bytes().to_vec());
        pieces.push(dtype.to_string().into_bytes());
        pieces.push(
            shape
                .iter()
                .flat_map(|&size| (size as u64).to_le_bytes())
                .collect(),
        );
        pieces.push((*bytes).clone());
    }
    let mut hash = Sha256::new();
    for piece in pieces {
        hash.update((piece.len() as u64).to_le_bytes());
        hash.update(piece);
    }
    hash.finalize()
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect()
}
