//! A trace that grows line by line and can go on after an interruption.

use std::collections::HashSet;
use std::fs::File;
use std::io::{BufRead as _, BufReader, Read as _, Seek as _, SeekFrom, Write as _};
use std::path::{Path, PathBuf};

use eldr_core::signature::Geometry;

use crate::error::Error;
use crate::trace::{LINE_BYTES_MAX, Location, Record};

/// A trace that is being appended to. Each record is one write that ends with a newline, so whatever ends a
/// recording leaves at most one line without it: that one is dropped when the trace is opened again, and its
/// prompt is asked once more.
#[derive(Debug)]
pub struct Existing {
    path: PathBuf,
    file: File,
    ids: HashSet<String>,
    geometry: Option<Geometry>,
    /// Whether something was dropped.
    dropped: bool,
}

impl Existing {
    /// Opens the trace at `path`, or begins it.
    ///
    /// # Errors
    /// It cannot be opened, is compressed, or has other lines than records.
    pub fn open(path: &Path) -> Result<Self, Error> {
        let failed =
            |what: String, hint: &str| Error::new(format!("{}: {what}", path.display()), hint);
        if path.extension().is_some_and(|end| end == "gz") {
            let hint = "name a plain file, and compress it with gzip afterwards";
            return Err(failed(
                "a compressed trace cannot go on after an interruption".into(),
                hint,
            ));
        }
        let io = |error: std::io::Error| {
            let hint = "check that the folder exists and the file may be read and written";
            failed(format!("opening the trace failed: {error}"), hint)
        };
        let file = File::options()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(path);
        let mut file = file.map_err(io)?;
        let mut input = BufReader::with_capacity(1 << 18, &file);
        let (mut ids, mut first, mut end) = (HashSet::new(), None, 0u64);
        let mut at = Location {
            file: path.display().to_string().into(),
            line: 0,
        };
        let mut line = Vec::new();
        let dropped = loop {
            line.clear();
            at.line += 1;
            let mut bounded = input.by_ref().take(LINE_BYTES_MAX as u64 + 1);
            bounded.read_until(b'\n', &mut line).map_err(io)?;
            if line.last() != Some(&b'\n') {
                break !line.is_empty();
            }
            if !line.trim_ascii().is_empty() {
                let text = str::from_utf8(&line).unwrap_or("\u{fffd}");
                let record = Record::parse(text.trim(), at.clone())?;
                if first.is_none() {
                    first = record.geometry()?;
                }
                ids.insert(record.id);
            }
            end += line.len() as u64;
        };
        if line.len() > LINE_BYTES_MAX {
            let hint = "it is no trace: name another file";
            return Err(failed(
                format!("line {} is longer than {LINE_BYTES_MAX} bytes", at.line),
                hint,
            ));
        }
        if dropped {
            file.set_len(end).map_err(io)?;
        }
        file.seek(SeekFrom::Start(end)).map_err(io)?;
        Ok(Existing {
            path: path.to_owned(),
            file,
            ids,
            geometry: first,
            dropped,
        })
    }

    /// Whether a partly written line was dropped.
    pub fn dropped(&self) -> bool {
        self.dropped
    }

    /// Whether the trace has no record with this id, and nobody has asked for it before.
    pub fn is_new(&mut self, id: &str) -> bool {
        self.ids.insert(id.to_owned())
    }

    /// Appends a record.
    ///
    /// # Errors
    /// It is of another model than those before it, or cannot be written.
    pub fn append(&mut self, record: &Record) -> Result<(), Error> {
        let file = self.path.display();
        let found = record.geometry()?;
        if let Some((found, before)) = found
            .zip(self.geometry)
            .filter(|(found, before)| found != before)
        {
            return Err(Error::new(
                format!("{file}: the engine answers with {found}, the trace has {before}"),
                "record each model into a trace of its own",
            ));
        }
        self.geometry = self.geometry.or(found);
        let line = serde_json::to_string(record).map_err(std::io::Error::from);
        let written = line.and_then(|line| self.file.write_all((line + "\n").as_bytes()));
        written.map_err(|error| {
            let hint =
                "check the free space of the disk, and run it again: it goes on where it ended";
            Error::new(format!("{file}: writing the trace failed: {error}"), hint)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: &str = "{\"id\":\"a\",\"prefill\":\":AQA=:;l=1;e=1\"}\n";

    fn record(id: &str, experts: usize) -> Record {
        let counts = match experts {
            1 => "AQA=",
            _ => "AQACAA==",
        };
        Record {
            id: id.into(),
            prefill: Some(format!(":{counts}:;l=1;e={experts}")),
            ..Record::default()
        }
    }

    #[test]
    fn a_cut_line_is_dropped_wherever_it_was_cut() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("t.jsonl");
        let two = A.to_owned() + &A.replace("\"a\"", "\"b\"");
        for cut in A.len()..two.len() {
            std::fs::write(&path, &two[..cut]).unwrap();
            let mut trace = Existing::open(&path).unwrap();
            assert_eq!(trace.dropped(), cut > A.len());
            assert!(!trace.is_new("a") && trace.is_new("b") && !trace.is_new("b"));
            trace.append(&record("b", 1)).unwrap();
            assert_eq!(std::fs::read_to_string(&path).unwrap(), two, "cut at {cut}");
        }
        std::fs::write(&path, &two).unwrap();
        assert!(!Existing::open(&path).unwrap().is_new("b"));
    }

    #[test]
    fn another_model_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("t.jsonl");
        std::fs::write(&path, A).unwrap();
        let error = Existing::open(&path)
            .unwrap()
            .append(&record("b", 2))
            .unwrap_err();
        let expected =
            "the engine answers with 1 layers × 2 experts, the trace has 1 layers × 1 experts";
        assert!(error.to_string().ends_with(expected), "{error}");
        assert_eq!(std::fs::read_to_string(&path).unwrap(), A);
    }

    #[test]
    fn what_is_no_trace_stays_as_it_is() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("t.jsonl");
        let text = "my thesis\nchapter one";
        std::fs::write(&path, text).unwrap();
        let error = Existing::open(&path).unwrap_err().to_string();
        assert!(
            error.contains("t.jsonl:1: my thesis is not a trace record"),
            "{error}"
        );
        assert_eq!(std::fs::read_to_string(&path).unwrap(), text);
        let error = Existing::open(&dir.path().join("t.jsonl.gz"))
            .unwrap_err()
            .to_string();
        assert!(error.ends_with("a compressed trace cannot go on after an interruption"));
    }
}
