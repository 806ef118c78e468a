//! Blob files that are replaced by programs: what was there before is kept beside them, for a rollback.
//!
//! Before `task.eldr` of revision 7 is replaced, it is kept as `task.eldr.r7`.

use std::fs;
use std::path::{Path, PathBuf};

use eldr_core::blob::Blob;

use crate::blob_file;
use crate::error::Error;
use crate::output;

/// Replaces the blob file `path` by `next` and keeps what was there, and in all the `keep` latest of those kept.
///
/// # Errors
/// The file is no blob, or the folder cannot be written to; then `path` is as it was.
pub fn replace(path: &Path, next: &Blob, keep: usize) -> Result<(), Error> {
    let bytes = next
        .to_bytes()
        .map_err(|error| Error::in_file(path, &error))?;
    if keep > 0 {
        let before = blob_file::read(path)?;
        let revision = blob_file::verify(path, &before)?.revision;
        write(&beside(path, revision), &before)?;
    }
    write(path, &bytes)?;
    let kept = revisions(path)?;
    for (_, old) in &kept[..kept.len().saturating_sub(keep)] {
        fs::remove_file(old).map_err(|error| failed(old, "removing the old blob", &error))?;
    }
    Ok(())
}

/// The revisions of the blob file `path` that were kept, lowest first.
///
/// # Errors
/// The folder cannot be read.
pub fn revisions(path: &Path) -> Result<Vec<(u64, PathBuf)>, Error> {
    let folder = match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    let entries =
        fs::read_dir(folder).map_err(|error| failed(folder, "reading the folder", &error))?;
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let prefix = format!("{name}.r");
    let mut kept: Vec<(u64, PathBuf)> = entries
        .filter_map(|entry| {
            let entry = entry.ok()?;
            let name = entry.file_name();
            let revision = name.to_str()?.strip_prefix(&prefix)?.parse().ok()?;
            Some((revision, folder.join(name)))
        })
        .collect();
    kept.sort_unstable();
    Ok(kept)
}

fn beside(path: &Path, revision: u64) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(format!(".r{revision}"));
    name.into()
}

fn write(path: &Path, bytes: &[u8]) -> Result<(), Error> {
    output::write(path, bytes).map_err(|error| failed(path, "writing the blob", &error))
}

fn failed(path: &Path, doing: &str, error: &std::io::Error) -> Error {
    let what = format!("{}: {doing} failed: {error}", path.display());
    Error::new(what, "check that the folder may be written to and has room")
}
