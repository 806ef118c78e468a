//! Decode recordings of GPT-OSS.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read as _};
use std::path::Path;

use eldr_core::signature::{Encoding, Geometry, Signature};
use serde::Deserialize;
use serde_json::Value;

use crate::error::Error;
use crate::trace::{
    Lines, Location, Record, TopK, TraceError, Writer, decompressed, of_line, shorten,
};

/// Recordings of the experts that GPT-OSS used while it generated, as they were published by
/// GPT-OSS-MoE-ExpertFingerprinting and packed: JSON Lines with one request each, and beside them files of
/// bytes, plain or gzip, `[tokens][layers][k]` expert ids, that the requests point into.
///
/// ```json
/// {"id":0,"file":"routing_0.u8.gz","token_offset":0,"n_decode":511,"prompt_tokens":101,"domain":"code"}
/// ```
///
/// Prefill was not recorded. A beginning of each answer can stand for it, see [`prefill_share`](Self::prefill_share).
#[derive(Clone, Copy, Debug)]
pub struct GptOss<'a> {
    /// The requests.
    pub requests: &'a Path,
    /// Layers and experts of the model.
    pub geometry: Geometry,
    /// Experts per token and layer.
    pub k: usize,
    /// So much of each answer becomes the request's `prefill` signature, and is no decode any more. Without it,
    /// requests have `decode` alone.
    pub prefill_share: Option<f64>,
}

#[derive(Deserialize)]
struct Request {
    id: Value,
    file: String,
    token_offset: u64,
    n_decode: u64,
    prompt_tokens: Option<u64>,
    domain: Option<String>,
}

/// Most decode steps of one request.
const STEPS_MAX: u64 = 1 << 20;
const HINT: &str =
    "give the requests.jsonl of a recording, with its routing files in the same folder";

impl GptOss<'_> {
    /// Writes the recording to `output`; returns how many requests that were.
    pub fn convert(&self, output: &mut Writer) -> Result<usize, Error> {
        let mut lines = Lines::open(self.requests, "the requests")?;
        let mut files = HashMap::new();
        let mut written = 0;
        while let Some(line) = lines.next() {
            let (line, at) = line?;
            let request: Request = serde_json::from_str(line).map_err(|error| {
                let problem = format!("{}: {}", shorten(line), of_line(&error));
                TraceError::line(&at, problem, HINT)
            })?;
            output.write(&self.record(request, &at, &mut files)?)?;
            written += 1;
        }
        if written == 0 {
            let file = self.requests.display();
            return Err(Error::new(format!("{file}: it has no requests"), HINT));
        }
        Ok(written)
    }

    fn record(
        &self,
        request: Request,
        at: &Location,
        files: &mut HashMap<String, Routing>,
    ) -> Result<Record, Error> {
        let failed = |what: String| Error::from(TraceError::line(at, what, HINT));
        let n = request.n_decode;
        if n > STEPS_MAX {
            return Err(failed(format!(
                "`n_decode` is {n}, at most {STEPS_MAX} are read"
            )));
        }
        let name = &request.file;
        if !files.contains_key(name) {
            // A name and no path: a recording may not point to files elsewhere.
            if Path::new(name).file_name() != Some(name.as_ref()) {
                return Err(failed(format!(
                    "`file` is {name:?} where the name of a file was expected"
                )));
            }
            let path = self.requests.with_file_name(name);
            let opened = Routing::open(&path);
            let routing = opened.map_err(|error| failed(format!("{}: {error}", path.display())))?;
            files.insert(name.clone(), routing);
        }
        let Some(routing) = files.get_mut(name) else {
            return Err(failed(format!("{name} is not open")));
        };
        let row = (self.geometry.layers * self.k) as u64;
        let ids = routing
            .read(request.token_offset.saturating_mul(row), n * row)
            .map_err(|error| failed(format!("{name}, token {}: {error}", request.token_offset)))?;
        let first = self.prefill_share.map(|share| (share * n as f64) as usize);
        let (prefill, decode) = ids.split_at(first.unwrap_or(0) * row as usize);
        let topk = |ids: &[u8]| {
            let ids = ids.iter().map(|&id| u16::from(id)).collect();
            let topk = TopK::new(self.geometry, self.k, ids);
            topk.map_err(|what| failed(format!("{name}, token {}: {what}", request.token_offset)))
        };
        let header = |topk: &TopK, tokens| {
            let counts = topk.counts().into_iter();
            let counts = counts.map(|count| u16::try_from(count).unwrap_or(u16::MAX));
            let signature = Signature::dense(self.geometry, counts.collect(), tokens);
            let signature = signature.map_err(|error| failed(error.to_string()))?;
            Ok::<_, Error>(signature.encode(Encoding::Varint))
        };
        let (prefill, decode) = (topk(prefill)?, topk(decode)?);
        let [before, after] = [&prefill, &decode].map(|topk| topk.tokens() as u64);
        Ok(Record {
            id: match request.id {
                Value::String(id) => id,
                id => id.to_string(),
            },
            label: request.domain,
            prompt_tokens: request.prompt_tokens.map(|tokens| tokens + before),
            decode_tokens: Some(after),
            prefill: (before > 0)
                .then(|| header(&prefill, Some(before)))
                .transpose()?,
            decode: (after > 0).then(|| header(&decode, None)).transpose()?,
            decode_topk: (after > 0).then(|| decode.encode()),
            ..Record::default()
        })
    }
}

/// A file of expert ids, read from the front to the end.
struct Routing {
    input: Box<dyn BufRead + Send>,
    position: u64,
}

impl Routing {
    fn open(path: &Path) -> io::Result<Self> {
        let input = decompressed(BufReader::new(File::open(path)?))?;
        Ok(Routing { input, position: 0 })
    }

    fn read(&mut self, start: u64, length: u64) -> io::Result<Vec<u8>> {
        let Some(skip) = start.checked_sub(self.position) else {
            return Err(io::Error::other(
                "requests must come in the order of their offsets",
            ));
        };
        let skipped = io::copy(&mut self.input.by_ref().take(skip), &mut io::sink())?;
        let mut bytes = Vec::new();
        self.input.by_ref().take(length).read_to_end(&mut bytes)?;
        if (skipped, bytes.len() as u64) != (skip, length) {
            return Err(io::Error::other("the file ends before the request does"));
        }
        self.position = start + length;
        Ok(bytes)
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use flate2::Compression;
    use flate2::write::GzEncoder;

    use super::*;
    use crate::trace;

    /// One layer of three experts, top-1: five steps, of two requests.
    fn convert(requests: &str, share: Option<f64>) -> Result<Vec<Record>, Error> {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        let mut gzip = GzEncoder::new(Vec::new(), Compression::best());
        gzip.write_all(&[0, 1, 1, 2, 0]).unwrap();
        std::fs::write(path("r.u8.gz"), gzip.finish().unwrap()).unwrap();
        std::fs::write(path("requests.jsonl"), requests).unwrap();
        let mut writer = Writer::create(path("out"))?;
        GptOss {
            requests: &path("requests.jsonl"),
            geometry: Geometry::new(1, 3).unwrap(),
            k: 1,
            prefill_share: share,
        }
        .convert(&mut writer)?;
        writer.finish()?;
        Ok(trace::read(path("out"))?.collect::<Result<_, _>>()?)
    }

    const TWO: &str = r#"{"id":0,"file":"r.u8.gz","token_offset":0,"n_decode":2,"prompt_tokens":9,"domain":"code"}
{"id":"b","file":"r.u8.gz","token_offset":2,"n_decode":3}"#;

    #[test]
    fn steps_become_counts_and_ids() {
        let records = convert(TWO, None).unwrap();
        let [a, b] = &records[..] else {
            panic!("{records:?}")
        };
        assert_eq!((a.id.as_str(), a.label.as_deref()), ("0", Some("code")));
        assert_eq!((a.prompt_tokens, a.decode_tokens), (Some(9), Some(2)));
        assert_eq!((a.prefill.as_deref(), b.id.as_str()), (None, "b"));
        assert_eq!(b.decode_signature().unwrap().unwrap().counts(), [1, 1, 1]);
        assert_eq!(b.topk().unwrap().unwrap().step(1), [2]);
    }

    #[test]
    fn the_beginning_of_an_answer_may_stand_for_prefill() {
        let records = convert(TWO, Some(0.4)).unwrap();
        let b = &records[1];
        let prefill = b.prefill_signature().unwrap().unwrap();
        assert_eq!(
            (prefill.counts(), prefill.prompt_tokens()),
            (&[0, 1, 0][..], Some(1))
        );
        assert_eq!(b.decode_signature().unwrap().unwrap().counts(), [1, 0, 1]);
        assert_eq!(
            (b.decode_tokens, b.topk().unwrap().unwrap().tokens()),
            (Some(2), 2)
        );
        assert_eq!(records[0].prefill, None, "0.4 of two steps is none");
    }

    #[test]
    fn what_does_not_fit_is_told() {
        for (requests, expected) in [
            ("", "it has no requests"),
            ("{}", "requests.jsonl:1: {}: missing field `id` at column 2"),
            (
                r#"{"id":0,"file":"r.u8.gz","token_offset":4,"n_decode":2}"#,
                "r.u8.gz, token 4: the file ends before the request does",
            ),
            (
                r#"{"id":0,"file":"../r.u8.gz","token_offset":4,"n_decode":2}"#,
                "`file` is \"../r.u8.gz\" where the name of a file was expected",
            ),
            (
                r#"{"id":0,"file":"r.u8.gz","token_offset":0,"n_decode":9999999}"#,
                "`n_decode` is 9999999, at most 1048576 are read",
            ),
            (
                &format!("{TWO}\n{TWO}"),
                "requests.jsonl:3: r.u8.gz, token 0: requests must come in the order of their offsets",
            ),
        ] {
            let error = convert(requests, None).unwrap_err().to_string();
            assert!(error.ends_with(expected), "{error}");
        }
    }
}
