//! The three tensors of the file, and what is hashed of them.

use safetensors::tensor::{Dtype, SafeTensors};
use sha2::{Digest, Sha256};

use super::{Blob, BlobError, Metadata, to_json};

/// Little-endian bytes, row-major.
pub(super) struct Tensors {
    regions: usize,
    pub(super) centroids: Vec<u8>,
    pub(super) idf: Vec<u8>,
    pub(super) layers: Vec<u8>,
}

pub(super) struct Tensor<'a> {
    pub(super) name: &'static str,
    pub(super) dtype: Dtype,
    pub(super) shape: Vec<usize>,
    pub(super) bytes: &'a [u8],
}

impl Tensors {
    pub(super) fn of(blob: &Blob) -> Self {
        let floats = |values: &[f32]| {
            values
                .iter()
                .flat_map(|value| value.to_le_bytes())
                .collect()
        };
        Self {
            regions: blob.regions.len(),
            centroids: floats(&blob.centroids),
            idf: floats(blob.transform.weights()),
            layers: blob
                .transform
                .layers()
                .iter()
                .flat_map(|layer| layer.to_le_bytes())
                .collect(),
        }
    }

    pub(super) fn read(file: &SafeTensors<'_>, metadata: &Metadata) -> Result<Self, BlobError> {
        let mut names = file.names();
        names.sort_unstable();
        if names != ["centroids", "idf", "layers"] {
            return Err(BlobError::field(
                "tensors",
                names.join(", "),
                "centroids, idf, layers",
            ));
        }
        let read = |name: &str, dtype: Dtype, shape: &[usize]| {
            let view = file
                .tensor(name)
                .map_err(|e| BlobError::Container(e.to_string()))?;
            if view.dtype() != dtype || view.shape() != shape {
                let found = format!("{} {:?}", view.dtype(), view.shape());
                return Err(BlobError::field(name, found, format!("{dtype} {shape:?}")));
            }
            Ok(view.data().to_vec())
        };
        let selected = file
            .tensor("layers")
            .map(|view| view.shape().iter().product())
            .unwrap_or(0);
        let dimension = usize::saturating_mul(selected, metadata.experts);
        let regions = metadata.regions.len();
        Ok(Self {
            regions,
            centroids: read("centroids", Dtype::F32, &[regions, dimension])?,
            idf: read("idf", Dtype::F32, &[dimension])?,
            layers: read("layers", Dtype::U16, &[selected])?,
        })
    }

    /// In the order of the hash.
    pub(super) fn each(&self) -> [Tensor<'_>; 3] {
        let dimension = self.idf.len() / 4;
        let tensor = |name, dtype, shape, bytes| Tensor {
            name,
            dtype,
            shape,
            bytes,
        };
        [
            tensor(
                "centroids",
                Dtype::F32,
                vec![self.regions, dimension],
                &self.centroids[..],
            ),
            tensor("idf", Dtype::F32, vec![dimension], &self.idf[..]),
            tensor(
                "layers",
                Dtype::U16,
                vec![self.layers.len() / 2],
                &self.layers[..],
            ),
        ]
    }

    /// Lower-case hexadecimal; `metadata` without its own hash.
    pub(super) fn sha256(&self, metadata: &Metadata) -> Result<String, BlobError> {
        let mut hash = Sha256::new();
        let mut piece = |bytes: &[u8]| {
            hash.update((bytes.len() as u64).to_le_bytes());
            hash.update(bytes);
        };
        piece(to_json(metadata)?.as_bytes());
        for tensor in self.each() {
            piece(tensor.name.as_bytes());
            piece(tensor.dtype.to_string().as_bytes());
            let shape: Vec<u8> = tensor
                .shape
                .iter()
                .flat_map(|&size| (size as u64).to_le_bytes())
                .collect();
            piece(&shape);
            piece(tensor.bytes);
        }
        Ok(hash
            .finalize()
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect())
    }
}

pub(super) fn f32s(bytes: &[u8]) -> Vec<f32> {
    bytes
        .as_chunks::<4>()
        .0
        .iter()
        .map(|value| f32::from_le_bytes(*value))
        .collect()
}

pub(super) fn u16s(bytes: &[u8]) -> Vec<u16> {
    bytes
        .as_chunks::<2>()
        .0
        .iter()
        .map(|value| u16::from_le_bytes(*value))
        .collect()
}
