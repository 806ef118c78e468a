//! A blob file and what is served of it.

use std::path::{Path, PathBuf};

use axum::body::Bytes;
use eldr_core::blob::Blob;

use crate::blob_file;
use crate::error::Error;

/// A verified blob as it is served.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Served {
    /// The bytes of the file.
    pub bytes: Bytes,
    /// What `sha256sum` says of them; in quotes, the `ETag`.
    pub sha256: String,
    /// Revision of the blob.
    pub revision: u64,
    /// Model that it is for.
    pub model: String,
    /// Regions that it has.
    pub regions: usize,
}

impl Served {
    fn new(bytes: Bytes, blob: Blob) -> Self {
        Served {
            sha256: blob_file::sha256(&bytes),
            bytes,
            revision: blob.revision,
            regions: blob.regions.len(),
            model: blob.model,
        }
    }
}

/// What became of a file that changed.
#[derive(Debug, PartialEq)]
pub enum Change {
    /// It was verified and is served now.
    Reloaded,
    /// It is bad, and what was served before still is.
    Refused(Error),
}

/// A blob file that is watched.
///
/// It is read whole every time: modification times tell too little (two blobs of one shape written
/// in one tick have the same time and size), and file events miss network file systems and the links
/// of Kubernetes volumes. Comparing a few megabytes takes a millisecond.
#[derive(Debug)]
pub struct Source {
    path: PathBuf,
    /// What the file was when last read, good or bad; so each change is judged and told once.
    seen: Result<Bytes, Error>,
    served: Served,
}

impl Source {
    /// Reads and verifies the file `path`.
    ///
    /// # Errors
    /// It cannot be read or is no blob.
    pub fn open(path: PathBuf) -> Result<Self, Error> {
        let bytes = Bytes::from(blob_file::read(&path)?);
        let blob = blob_file::verify(&path, &bytes)?;
        Ok(Source {
            path,
            seen: Ok(bytes.clone()),
            served: Served::new(bytes, blob),
        })
    }

    /// The file that is watched.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The last good content.
    pub fn served(&self) -> &Served {
        &self.served
    }

    /// Reads the file again and takes it over if it changed and is good; `None` if it did not change.
    pub fn poll(&mut self) -> Option<Change> {
        let seen = blob_file::read(&self.path).map(Bytes::from);
        if seen == self.seen {
            return None;
        }
        self.seen = seen.clone();
        let verified = seen.and_then(|bytes| {
            let blob = blob_file::verify(&self.path, &bytes)?;
            Ok(Served::new(bytes, blob))
        });
        Some(match verified {
            Ok(served) => {
                self.served = served;
                Change::Reloaded
            }
            Err(error) => Change::Refused(error),
        })
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use eldr_core::blob::Fit;
    use eldr_core::signature::Geometry;
    use eldr_core::transform::Transform;
    use tempfile::TempDir;

    use super::*;

    fn blob(revision: u64) -> Vec<u8> {
        let geometry = Geometry {
            layers: 1,
            experts: 1,
        };
        let blob = Blob {
            revision,
            model: "m".into(),
            transform: Transform::new(geometry, vec![0], vec![1.0]).unwrap(),
            centroids: vec![1.0],
            tau: 0.1,
            regions: vec![vec!["a".into()]],
            fit: Fit {
                quantiles: vec![vec![1.0; 7]],
                requests: 1,
                rho: None,
                seed: 1,
                shares: vec![1.0],
            },
            source: None,
        };
        blob.to_bytes().unwrap()
    }

    fn source(dir: &TempDir) -> Source {
        let path = dir.path().join("b");
        fs::write(&path, blob(1)).unwrap();
        Source::open(path).unwrap()
    }

    #[test]
    fn a_file_that_stays_is_no_change() {
        let dir = tempfile::tempdir().unwrap();
        let mut source = source(&dir);
        assert_eq!(source.poll(), None);
        fs::write(source.path(), blob(1)).unwrap();
        assert_eq!(source.poll(), None, "written again with the same bytes");
    }

    #[test]
    fn new_bytes_of_the_same_size_are_taken_over() {
        let dir = tempfile::tempdir().unwrap();
        let mut source = source(&dir);
        let before = source.served().clone();
        fs::write(source.path(), blob(2)).unwrap();
        assert_eq!(source.poll(), Some(Change::Reloaded));
        let served = source.served();
        assert_eq!((served.revision, &served.bytes[..]), (2, &blob(2)[..]));
        assert_eq!(served.bytes.len(), before.bytes.len());
        assert_ne!(served.sha256, before.sha256);
        assert_eq!(source.poll(), None);
    }

    #[test]
    fn a_bad_file_is_refused_once_per_change_and_the_old_one_stays() {
        let dir = tempfile::tempdir().unwrap();
        let mut source = source(&dir);
        let half = &blob(2)[..100];
        let bad: [&dyn Fn(&Path); 4] = [
            &|path| fs::write(path, half).unwrap(),
            &|path| fs::write(path, "").unwrap(),
            &|path| fs::remove_file(path).unwrap(),
            &|path| fs::create_dir(path).unwrap(),
        ];
        for change in bad {
            change(source.path());
            assert!(matches!(source.poll(), Some(Change::Refused(_))));
            assert_eq!(source.poll(), None);
            assert_eq!(source.served().bytes, blob(1));
        }
        fs::remove_dir(source.path()).unwrap();
        fs::write(source.path(), blob(1)).unwrap();
        assert_eq!(source.poll(), Some(Change::Reloaded), "good again");
    }

    #[test]
    fn what_is_no_blob_at_the_start_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("b");
        assert!(Source::open(path.clone()).is_err());
        fs::write(&path, "no blob").unwrap();
        assert!(Source::open(path).is_err());
    }
}
