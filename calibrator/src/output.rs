//! Files that appear whole or not at all.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use tempfile::NamedTempFile;

/// A file that is being written.
///
/// Until [`commit`](Self::commit), its path shows what was there before, or nothing; dropped without
/// it, what was written is gone. A reader, such as `eldr serve`, never meets half a file.
#[derive(Debug)]
pub struct OutputFile {
    path: PathBuf,
    target: Target,
}

#[derive(Debug)]
enum Target {
    /// A hidden file in the same folder, which is renamed at last.
    Sibling(NamedTempFile),
    /// A device or a pipe: nothing may take its place.
    Direct(File),
}

impl OutputFile {
    /// Begins to write the file at `path`. A file that is there already keeps its permissions, and a
    /// link goes on pointing to it.
    pub fn create(path: &Path) -> io::Result<Self> {
        let path = fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
        let existing = fs::metadata(&path).ok();
        let target = match &existing {
            Some(existing) if !existing.is_file() => {
                Target::Direct(File::options().write(true).open(&path)?)
            }
            _ => Target::Sibling(sibling(&path, existing.map(|file| file.permissions()))?),
        };
        Ok(OutputFile { path, target })
    }

    /// Puts the file in its place.
    pub fn commit(self) -> io::Result<()> {
        match self.target {
            Target::Direct(_) => Ok(()),
            Target::Sibling(file) => file.persist(&self.path).map(drop).map_err(|e| e.error),
        }
    }
}

/// Writes the file at `path`, which appears whole or not at all.
pub fn write(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut output = OutputFile::create(path)?;
    output.write_all(bytes)?;
    output.commit()
}

fn sibling(path: &Path, permissions: Option<fs::Permissions>) -> io::Result<NamedTempFile> {
    let mut prefix = OsString::from(".");
    prefix.push(path.file_name().unwrap_or_default());
    prefix.push(".");
    let folder = match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    // Made as any other file: the default of `tempfile` would keep it from a gateway of another user.
    let file = tempfile::Builder::new()
        .prefix(&prefix)
        .suffix(".tmp")
        .make_in(folder, |path| File::create_new(path))?;
    if let Some(permissions) = permissions {
        file.as_file().set_permissions(permissions)?;
    }
    Ok(file)
}

impl Write for OutputFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match &mut self.target {
            Target::Sibling(file) => file.write(bytes),
            Target::Direct(file) => file.write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match &mut self.target {
            Target::Sibling(file) => file.flush(),
            Target::Direct(file) => file.flush(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(folder: &Path) -> Vec<OsString> {
        let entries = fs::read_dir(folder).unwrap();
        entries.map(|entry| entry.unwrap().file_name()).collect()
    }

    #[test]
    fn the_old_content_stays_until_the_new_is_complete() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("f");
        fs::write(&path, "old").unwrap();
        let mut output = OutputFile::create(&path).unwrap();
        output.write_all(b"new").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"old");
        output.commit().unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"new");
        assert_eq!(names(dir.path()), ["f"]);
    }

    #[test]
    fn without_commit_nothing_is_left() {
        let dir = tempfile::tempdir().unwrap();
        let mut output = OutputFile::create(&dir.path().join("f")).unwrap();
        output.write_all(b"half").unwrap();
        assert_eq!(names(dir.path()).len(), 1);
        drop(output);
        assert!(names(dir.path()).is_empty());
    }

    #[cfg(unix)]
    #[test]
    fn links_and_permissions_stay() {
        use std::os::unix::fs::{PermissionsExt as _, symlink};
        let dir = tempfile::tempdir().unwrap();
        let (path, link) = (dir.path().join("f"), dir.path().join("link"));
        let commit = |path: &Path| OutputFile::create(path).unwrap().commit().unwrap();
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;

        fs::write(dir.path().join("plain"), "").unwrap();
        commit(&path);
        assert_eq!(
            mode(&path),
            mode(&dir.path().join("plain")),
            "a new file is as others"
        );

        fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).unwrap();
        symlink(&path, &link).unwrap();
        commit(&link);
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        assert_eq!(mode(&path), 0o640);
    }

    #[cfg(unix)]
    #[test]
    fn a_device_is_written_to_and_stays_one() {
        let null = Path::new("/dev/null");
        let mut output = OutputFile::create(null).unwrap();
        assert!(
            matches!(output.target, Target::Direct(_)),
            "or it would be replaced"
        );
        output.write_all(b"gone").unwrap();
        output.commit().unwrap();
        assert!(!fs::metadata(null).unwrap().is_file());
    }

    #[test]
    fn a_folder_that_is_missing_is_told_without_a_random_name() {
        let dir = tempfile::tempdir().unwrap();
        let error = OutputFile::create(&dir.path().join("no/f")).unwrap_err();
        assert_eq!(error.to_string(), "No such file or directory (os error 2)");
    }
}
