//! The centroid blob: what a calibration produces and a gateway loads.
//!
//! A safetensors file, so Python reads it as it is:
//!
//! | tensor | dtype, shape | |
//! |---|---|---|
//! | `centroids` | F32 `[K, D]` | unit rows, one per region |
//! | `idf` | F32 `[D]` | weight per selected (layer, expert) |
//! | `layers` | U16 `[S]` | selected layers, ascending; D = S × experts |
//!
//! Its one metadata string, `eldr`, is canonical JSON: keys sorted, no spaces (fields below).
//!
//! `experts`, `layers_total`: the model's geometry. `fit`: see [`Fit`]. `format_version`: [`FORMAT_VERSION`]. `model`: name. `regions`: K
//! lists of decode cluster names. `revision`: grows with each publication. `sha256`. `signature`: a name of
//! [`SignatureKind`]. `source`: only in a blob that was made of another format, what that file said beside its numbers.
//! `tau`: band width.
//!
//! `sha256` covers that JSON without `sha256` and then, for `centroids`, `idf`, `layers` in this order, the
//! tensor's name, dtype, shape (each dimension as little-endian `u64`) and bytes. Every hashed piece is preceded by its
//! length as a little-endian `u64`, so that no two files hash alike by moving bytes between fields.
//!
//! The same blob has the same bytes. A reader verifies everything.

mod tensors;

use std::collections::HashMap;

use safetensors::tensor::{SafeTensors, TensorView};
use serde::{Deserialize, Serialize};

use crate::signature::Geometry;
use crate::transform::{SignatureKind, Transform, TransformError};
use tensors::{Tensors, f32s, u16s};

/// The version that this code writes and reads.
pub const FORMAT_VERSION: u32 = 1;
/// Quantiles at which a region's similarities are recorded.
pub const QUANTILES: [f64; 7] = [0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0];
/// Longest [`Blob::source`], bytes: a gateway carries it along and has no use for it.
pub const SOURCE_BYTES_MAX: usize = 16 << 10;
/// How far a centroid's length may be from 1.
const NORM_TOLERANCE: f32 = 1e-3;

/// Facts of the fit, for people and for online checks.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Fit {
    /// Per region, cosine similarity of its own calibration requests at [`QUANTILES`].
    pub quantiles: Vec<Vec<f64>>,
    /// Calibration requests.
    pub requests: u64,
    /// Spearman correlation between signature distance and decode distance; `None` without decode counts.
    pub rho: Option<f64>,
    /// Seed of the fit.
    pub seed: u64,
    /// Per region, its share of the calibration requests; sums to 1, or is 0 everywhere where nobody knows.
    pub shares: Vec<f64>,
}

/// The metadata string; fields in sorted order, which makes the JSON canonical.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Metadata {
    experts: usize,
    fit: Fit,
    format_version: u32,
    layers_total: usize,
    model: String,
    regions: Vec<Vec<String>>,
    revision: u64,
    #[serde(skip_serializing_if = "Option::is_none", default)]
    sha256: Option<String>,
    signature: String,
    #[serde(skip_serializing_if = "Option::is_none", default)]
    source: Option<String>,
    tau: f32,
}

/// A verified centroid blob.
#[derive(Debug, Clone, PartialEq)]
pub struct Blob {
    /// Grows with each publication.
    pub revision: u64,
    /// Model the signatures come from.
    pub model: String,
    /// Counts → vector.
    pub transform: Transform,
    /// Unit rows `[regions][dimension]`.
    pub centroids: Vec<f32>,
    /// Band width that the fit proposes.
    pub tau: f32,
    /// Decode cluster names of each region.
    pub regions: Vec<Vec<String>>,
    /// How it was made.
    pub fit: Fit,
    /// Of a blob that was converted from another format, what that file said beside its numbers, so that it can be
    /// written again as it was. At most [`SOURCE_BYTES_MAX`].
    pub source: Option<String>,
}

/// Why bytes are not a blob, or a blob cannot be written.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum BlobError {
    /// Not a safetensors file.
    #[error("centroid blob is not a safetensors file: {0}\nhint: make one with `eldr fit`")]
    Container(String),
    /// The metadata string is missing or is not the JSON that is expected.
    #[error(
        "centroid blob, metadata `eldr`: {0}\nhint: make a new blob with this version of `eldr fit`"
    )]
    Metadata(String),
    /// A field has a value that is not allowed.
    #[error(
        "centroid blob, {field}: found {found}, expected {expected}\nhint: make a new blob with `eldr fit`"
    )]
    Field {
        /// Field or tensor.
        field: String,
        /// What is there.
        found: String,
        /// What is allowed.
        expected: String,
    },
    /// The hash does not match the content.
    #[error(
        "centroid blob, sha256: the file says {found}, its content has {expected}\nhint: the file was damaged or edited; copy it again, or make a new one with `eldr fit`"
    )]
    Hash {
        /// The hash in the file.
        found: String,
        /// The hash of the content.
        expected: String,
    },
}

impl BlobError {
    fn field(field: impl Into<String>, found: impl ToString, expected: impl Into<String>) -> Self {
        Self::Field {
            field: field.into(),
            found: found.to_string(),
            expected: expected.into(),
        }
    }
}

impl From<TransformError> for BlobError {
    fn from(error: TransformError) -> Self {
        let (field, expected) = match error {
            TransformError::Layers { .. } => ("layers", "ascending layers of the model"),
            TransformError::Length { .. } => ("idf", "one weight per selected (layer, expert)"),
            _ => (
                "idf",
                "finite weights that are not negative, one of them above 0",
            ),
        };
        Self::field(field, error, expected)
    }
}

impl Blob {
    /// The bytes of the file; the same blob gives the same bytes.
    ///
    /// # Errors
    /// The blob would not pass [`from_bytes`](Self::from_bytes).
    pub fn to_bytes(&self) -> Result<Vec<u8>, BlobError> {
        self.check()?;
        let tensors = Tensors::of(self);
        let mut metadata = self.metadata();
        metadata.sha256 = Some(tensors.sha256(&metadata)?);
        let text = to_json(&metadata)?;
        let container =
            |error: safetensors::SafeTensorError| BlobError::Container(error.to_string());
        let views: Vec<(&str, TensorView<'_>)> = tensors
            .each()
            .into_iter()
            .map(|t| Ok((t.name, TensorView::new(t.dtype, t.shape, t.bytes)?)))
            .collect::<Result<_, _>>()
            .map_err(container)?;
        let info = HashMap::from([("eldr".to_owned(), text)]);
        safetensors::serialize(views, Some(info)).map_err(container)
    }

    /// Reads and verifies a file.
    ///
    /// # Errors
    /// [`BlobError`] names the field, the value found and what was expected.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, BlobError> {
        let container =
            |error: safetensors::SafeTensorError| BlobError::Container(error.to_string());
        let file = SafeTensors::deserialize(bytes).map_err(container)?;
        let (_, header) = SafeTensors::read_metadata(bytes).map_err(container)?;
        let info = header.metadata().clone().unwrap_or_default();
        let text = match (info.get("eldr"), info.len()) {
            (Some(text), 1) => text,
            (None, _) => return Err(BlobError::Metadata("is missing".into())),
            (Some(_), others) => {
                let expected = "only `eldr`";
                return Err(BlobError::field(
                    "metadata",
                    format!("{others} strings"),
                    expected,
                ));
            }
        };
        let metadata: Metadata =
            serde_json::from_str(text).map_err(|error| BlobError::Metadata(error.to_string()))?;
        if metadata.format_version != FORMAT_VERSION {
            let expected = FORMAT_VERSION.to_string();
            return Err(BlobError::field(
                "format_version",
                metadata.format_version,
                expected,
            ));
        }
        if to_json(&metadata)? != *text {
            return Err(BlobError::Metadata(
                "is not canonical JSON (sorted keys, no spaces)".into(),
            ));
        }
        let tensors = Tensors::read(&file, &metadata)?;
        let found = metadata.sha256.clone().unwrap_or_else(|| "nothing".into());
        let expected = tensors.sha256(&Metadata {
            sha256: None,
            ..metadata.clone()
        })?;
        if found != expected {
            return Err(BlobError::Hash { found, expected });
        }
        let known = SignatureKind::ALL.map(SignatureKind::name);
        let kind = SignatureKind::ALL
            .into_iter()
            .find(|kind| kind.name() == metadata.signature)
            .ok_or_else(|| BlobError::field("signature", metadata.signature, known.join(", ")))?;
        let geometry = Geometry::new(metadata.layers_total, metadata.experts).map_err(|error| {
            BlobError::field("layers_total, experts", error, "1 to 65536 counts")
        })?;
        let blob = Self {
            revision: metadata.revision,
            model: metadata.model,
            transform: Transform::new(geometry, u16s(&tensors.layers), f32s(&tensors.idf))?
                .with_kind(kind),
            centroids: f32s(&tensors.centroids),
            tau: metadata.tau,
            regions: metadata.regions,
            fit: metadata.fit,
            source: metadata.source,
        };
        // Checks the rest, and that nothing is left over: padding, key order, duplicate keys.
        if blob.to_bytes()? != bytes {
            let expected = "the layout that `eldr` writes";
            return Err(BlobError::field(
                "file",
                "another layout of the same content",
                expected,
            ));
        }
        Ok(blob)
    }

    /// Centroid of each region, in order.
    pub fn rows(&self) -> impl ExactSizeIterator<Item = &[f32]> {
        self.centroids.chunks_exact(self.transform.dimension())
    }

    /// Everything that types and tensor shapes do not already say.
    fn check(&self) -> Result<(), BlobError> {
        let regions = self.regions.len();
        let dimension = self.transform.dimension();
        if regions == 0 || self.centroids.len() != regions * dimension {
            let found = format!("{} values", self.centroids.len());
            let expected =
                format!("{dimension} for each of at least 1 region; `regions` has {regions}");
            return Err(BlobError::field("centroids", found, expected));
        }
        for (region, row) in self.rows().enumerate() {
            let norm = crate::similarity::dot(row, row).sqrt();
            let unit = (norm - 1.0).abs() <= NORM_TOLERANCE;
            if !unit {
                let field = format!("centroids, row {region}");
                return Err(BlobError::field(
                    field,
                    format!("length {norm}"),
                    "length 1",
                ));
            }
        }
        if !(0.0..=2.0).contains(&self.tau) {
            return Err(BlobError::field("tau", self.tau, "0 to 2"));
        }
        for (region, workers) in self.regions.iter().enumerate() {
            if workers.is_empty() || workers.iter().any(String::is_empty) {
                let field = format!("regions, entry {region}");
                let found = format!("{workers:?}");
                return Err(BlobError::field(
                    field,
                    found,
                    "at least one decode cluster name",
                ));
            }
        }
        let Fit {
            quantiles,
            requests: _,
            rho,
            seed: _,
            shares,
        } = &self.fit;
        if shares.len() != regions || !shares.iter().all(|share| (0.0..=1.0).contains(share)) {
            let expected = format!("{regions} numbers from 0 to 1");
            return Err(BlobError::field(
                "fit.shares",
                format!("{shares:?}"),
                expected,
            ));
        }
        let cosines = |row: &Vec<f64>| row.iter().all(|q| (-1.01..=1.01).contains(q));
        let complete = |row: &Vec<f64>| row.len() == QUANTILES.len() && cosines(row);
        if quantiles.len() != regions || !quantiles.iter().all(complete) {
            let expected = format!("{regions} rows of {} cosine similarities", QUANTILES.len());
            return Err(BlobError::field(
                "fit.quantiles",
                format!("{quantiles:?}"),
                expected,
            ));
        }
        if let Some(source) = &self.source
            && source.len() > SOURCE_BYTES_MAX
        {
            let expected = format!("at most {SOURCE_BYTES_MAX} bytes");
            let found = format!("{} bytes", source.len());
            return Err(BlobError::field("source", found, expected));
        }
        if rho.is_some_and(|rho| !(-1.0..=1.0).contains(&rho)) {
            return Err(BlobError::field(
                "fit.rho",
                format!("{rho:?}"),
                "-1 to 1, or null",
            ));
        }
        Ok(())
    }

    fn metadata(&self) -> Metadata {
        let Geometry { layers, experts } = self.transform.geometry();
        Metadata {
            experts,
            fit: self.fit.clone(),
            format_version: FORMAT_VERSION,
            layers_total: layers,
            model: self.model.clone(),
            regions: self.regions.clone(),
            revision: self.revision,
            sha256: None,
            signature: self.transform.kind().name().into(),
            source: self.source.clone(),
            tau: self.tau,
        }
    }
}

fn to_json(metadata: &Metadata) -> Result<String, BlobError> {
    serde_json::to_string(metadata).map_err(|error| BlobError::Metadata(error.to_string()))
}

#[cfg(test)]
mod tests;
