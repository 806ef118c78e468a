//! Runs `eldr` in a folder of its own.

use std::path::PathBuf;
use std::process::Command;

use eldr_core::signature::{Encoding, Geometry, Signature};
use tempfile::TempDir;

/// What a command that ended left behind.
pub(crate) struct Ran {
    pub(crate) code: i32,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

/// A folder that commands run in.
pub(crate) struct Bench {
    pub(crate) dir: TempDir,
}

impl Bench {
    pub(crate) fn new() -> Self {
        Bench {
            dir: tempfile::tempdir().unwrap(),
        }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Runs `eldr` in the folder.
    pub(crate) fn eldr(&self, arguments: &str) -> Ran {
        let output = Command::new(env!("CARGO_BIN_EXE_eldr"))
            .args(arguments.split(' '))
            .current_dir(self.dir.path())
            .env_remove("COLUMNS")
            .output()
            .unwrap();
        Ran {
            code: output.status.code().unwrap(),
            stdout: String::from_utf8(output.stdout).unwrap(),
            stderr: String::from_utf8(output.stderr).unwrap(),
        }
    }

    pub(crate) fn write(&self, name: &str, content: impl AsRef<[u8]>) -> &Self {
        std::fs::write(self.path(name), content).unwrap();
        self
    }

    pub(crate) fn blob(&self, name: &str) -> Vec<u8> {
        std::fs::read(self.path(name)).unwrap()
    }
}

impl Ran {
    #[track_caller]
    pub(crate) fn succeeded(&self) -> &Self {
        assert_eq!((self.code, self.stderr.as_str()), (0, ""));
        self
    }
}

pub(crate) fn line(id: &str, counts: [u16; 4], decode: bool) -> String {
    let geometry = Geometry {
        layers: 2,
        experts: 2,
    };
    let header = Signature::dense(geometry, counts.to_vec(), None)
        .unwrap()
        .encode(Encoding::U16);
    let decode = if decode {
        format!(r#","decode":"{header}""#)
    } else {
        String::new()
    };
    format!("{{\"id\":\"{id}\",\"prefill\":\"{header}\"{decode}}}\n")
}

/// Four requests of two kinds.
pub(crate) fn trace(decode: bool) -> String {
    [
        ("a", [3, 0, 2, 1]),
        ("b", [0, 4, 1, 2]),
        ("c", [5, 0, 1, 0]),
        ("d", [0, 3, 0, 2]),
    ]
    .map(|(id, counts)| line(id, counts, decode))
    .concat()
}

/// Fits [`trace`] in `t.jsonl` to `b.eldr`.
pub(crate) const FIT: &str = "fit t.jsonl -o b.eldr --workers decode-0,decode-1";

/// The text without its sha256 sums: the last bit of a logarithm may depend on the platform.
pub(crate) fn mask_hashes(text: &str) -> String {
    let words = text.split_inclusive(|c: char| !c.is_ascii_hexdigit());
    words
        .map(|word| match word.split_at_checked(64) {
            Some((hash, end)) if hash.bytes().all(|b| b.is_ascii_hexdigit()) => {
                format!("{}{end}", "#".repeat(64))
            }
            _ => word.to_owned(),
        })
        .collect()
}
