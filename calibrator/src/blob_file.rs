//! Blobs as files.

use std::fs::File;
use std::io::Read as _;
use std::path::Path;

use eldr_core::blob::Blob;
use sha2::{Digest as _, Sha256};

use crate::error::Error;

/// Largest blob that is read, in bytes: twenty times 128 regions of a model with 60 layers of 384
/// experts, all compared.
pub const BLOB_BYTES_MAX: usize = 256 << 20;

/// The bytes of the file `path`, not yet verified.
///
/// # Errors
/// The file cannot be read or has more than [`BLOB_BYTES_MAX`] bytes.
pub fn read(path: &Path) -> Result<Vec<u8>, Error> {
    let failed = |what: String| {
        let hint = "give the path of a blob that `eldr fit` wrote";
        Error::new(format!("{}: {what}", path.display()), hint)
    };
    let mut bytes = Vec::new();
    File::open(path)
        .and_then(|file| file.take(BLOB_BYTES_MAX as u64 + 1).read_to_end(&mut bytes))
        .map_err(|error| failed(format!("reading the blob failed: {error}")))?;
    if bytes.len() > BLOB_BYTES_MAX {
        return Err(failed(format!(
            "more than {BLOB_BYTES_MAX} bytes are no blob"
        )));
    }
    Ok(bytes)
}

/// The verified blob in `bytes`, which were read from `path`.
///
/// # Errors
/// They are no blob; the text says where and why.
pub fn verify(path: &Path, bytes: &[u8]) -> Result<Blob, Error> {
    Blob::from_bytes(bytes).map_err(|error| Error::in_file(path, &error))
}

/// What `sha256sum` says of a file with these bytes.
pub fn sha256(bytes: &[u8]) -> String {
    let digest = Sha256::digest(bytes);
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}
