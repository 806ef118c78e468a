use std::fs::File;
use std::path::PathBuf;

use npyz::npz::NpzWriter;
use npyz::{DType, TypeStr, WriterBuilder as _};
use tempfile::TempDir;

use eldr_core::transform::SignatureKind;

use super::*;
use crate::trace;

struct Recording {
    dir: TempDir,
}

/// Two requests on one layer of three experts, top-2; the second is not of the mix.
impl Recording {
    fn new() -> Self {
        let recording = Recording {
            dir: tempfile::tempdir().unwrap(),
        };
        let mut npz = recording.create("requests.npz");
        strings(&mut npz, "id", &["a", "é"]);
        strings(&mut npz, "domain", &["code", "math"]);
        array(&mut npz, "in_mix", &[2], &[true, false]);
        array(&mut npz, "n_prompt", &[2], &[2u16, 1]);
        array(&mut npz, "n_decode", &[2], &[1u16, 2]);
        array(&mut npz, "prefix_group", &[2], &[-1i16, 7]);
        array(&mut npz, "prefix_len", &[2], &[0u16, 1]);
        array(
            &mut npz,
            "prefill_counts",
            &[2, 1, 3],
            &[2u16, 1, 1, 1, 1, 0],
        );
        array(
            &mut npz,
            "decode_counts",
            &[2, 1, 3],
            &[1u16, 0, 1, 1, 2, 1],
        );
        let gates = [0.5, 0.25, 0.25, 0.5, 0.5, 0.0].map(f16::from_f32);
        array(&mut npz, "gate_prefill", &[2, 1, 3], &gates);
        let mut npz = recording.create("topk.npz");
        strings(&mut npz, "id", &["a", "é"]);
        array(&mut npz, "topk", &[3, 1, 2], &[2u8, 0, 1, 0, 1, 2]);
        array(&mut npz, "off", &[3], &[0u32, 1, 3]);
        recording
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn create(&self, name: &str) -> NpzWriter<std::io::BufWriter<File>> {
        NpzWriter::create(self.path(name)).unwrap()
    }

    fn convert(&self, mix_only: bool) -> Result<Vec<Record>, Error> {
        self.convert_with(mix_only, false)
    }

    fn convert_with(&self, mix_only: bool, gate: bool) -> Result<Vec<Record>, Error> {
        let output = self.path("out.jsonl");
        let mut writer = Writer::create(&output)?;
        let count = SmallMoe {
            requests: &self.path("requests.npz"),
            decode_topk: Some(&self.path("topk.npz")),
            mix_only,
            gate,
        }
        .convert(&mut writer)?;
        writer.finish()?;
        let records: Vec<_> = trace::read(&output)?.collect::<Result<_, _>>()?;
        assert_eq!(records.len(), count);
        Ok(records)
    }
}

type Archive = NpzWriter<std::io::BufWriter<File>>;

fn array<T>(npz: &mut Archive, name: &str, shape: &[u64], data: &[T])
where
    T: npyz::AutoSerialize + Copy,
{
    let builder = npz.array(name, Default::default()).unwrap().default_dtype();
    let mut writer = builder.shape(shape).begin_nd().unwrap();
    writer.extend(data.iter().copied()).unwrap();
    writer.finish().unwrap();
}

fn strings(npz: &mut Archive, name: &str, data: &[&str]) {
    let dtype = DType::Plain("<U9".parse::<TypeStr>().unwrap());
    let builder = npz
        .array::<str>(name, Default::default())
        .unwrap()
        .dtype(dtype);
    let mut writer = builder.shape(&[data.len() as u64]).begin_nd().unwrap();
    for text in data {
        writer.push(*text).unwrap();
    }
    writer.finish().unwrap();
}

#[test]
fn a_recording_becomes_a_trace_with_every_column() {
    let records = Recording::new().convert(false).unwrap();
    let [a, b] = &records[..] else {
        panic!("{records:?}")
    };
    assert_eq!((a.id.as_str(), a.label.as_deref()), ("a", Some("code")));
    assert_eq!(
        (a.prompt_tokens, a.decode_tokens, a.prefix.clone()),
        (Some(2), Some(1), None)
    );
    let prefill = a.prefill_signature().unwrap().unwrap();
    assert_eq!(
        (prefill.counts(), prefill.prompt_tokens()),
        (&[2, 1, 1][..], Some(2))
    );
    assert_eq!(a.decode_signature().unwrap().unwrap().counts(), [1, 0, 1]);
    assert_eq!(a.topk().unwrap().unwrap().step(0), [2, 0]);
    assert_eq!(b.id, "é");
    assert_eq!(
        b.prefix,
        Some(Prefix {
            group: "7".into(),
            tokens: 1
        })
    );
    assert_eq!(b.topk().unwrap().unwrap().step(1), [1, 2]);
}

#[test]
fn gate_means_become_sums_where_they_are_wanted() {
    let recording = Recording::new();
    let without = recording.convert(false).unwrap();
    assert!(without.iter().all(|record| record.gate_prob.is_none()));
    let records = recording.convert_with(false, true).unwrap();
    let sums: Vec<Option<Vec<f32>>> = records
        .iter()
        .map(|record| {
            let prefill = record.prefill_signature().unwrap().unwrap();
            record.gate_sums(SignatureKind::GateProb, &prefill).unwrap()
        })
        .collect();
    let expected = [vec![1.0, 0.5, 0.5], vec![0.5, 0.5, 0.0]];
    assert_eq!(sums, expected.map(Some));
}

#[test]
fn gate_values_that_are_no_sums_are_refused() {
    let recording = Recording::new();
    let convert = |values: [f32; 6], shape: &[u64]| {
        let path = recording.path("gates.npz");
        let mut npz = recording.create("gates.npz");
        array(&mut npz, "gate_prefill", shape, &values.map(f16::from_f32));
        drop(npz);
        let mut archive = Npz::open(&path).unwrap();
        let geometry = Geometry::new(1, 3).unwrap();
        let rows = archive.rows::<f16>("gate_prefill").unwrap();
        let read = GateRows::new(rows, 2, geometry).and_then(|mut rows| {
            rows.next(1.0)?;
            rows.next(1.0)
        });
        read.unwrap_err().to_string()
    };
    let error = convert([0.5, 0.5, 0.0, 0.1, f32::NAN, 0.2], &[2, 1, 3]);
    assert!(error.contains("it has a gate sum of NaN"), "{error}");
    let error = convert([0.5; 6], &[1, 2, 3]);
    assert!(error.contains("[2, 1, 3]"), "{error}");
}

#[test]
fn mix_only_keeps_the_requests_of_the_mix() {
    let records = Recording::new().convert(true).unwrap();
    assert_eq!(
        records
            .iter()
            .map(|record| record.id.as_str())
            .collect::<Vec<_>>(),
        ["a"]
    );
}

#[test]
fn archives_that_do_not_belong_together_are_refused() {
    let recording = Recording::new();
    let mut npz = recording.create("topk.npz");
    strings(&mut npz, "id", &["a", "c"]);
    drop(npz);
    let error = recording.convert(false).unwrap_err();
    assert!(
        error
            .to_string()
            .contains("not the requests of the archive with the counts")
    );
}

#[test]
fn ids_that_contradict_the_counts_are_refused() {
    let recording = Recording::new();
    let mut npz = recording.create("topk.npz");
    strings(&mut npz, "id", &["a", "é"]);
    array(&mut npz, "topk", &[3, 1, 2], &[2u8, 1, 1, 0, 1, 2]);
    array(&mut npz, "off", &[3], &[0u32, 1, 3]);
    drop(npz);
    std::fs::write(recording.path("out.jsonl"), "of before").unwrap();
    let error = recording.convert(false).unwrap_err();
    assert!(
        error
            .to_string()
            .contains("expert 0 of layer 0 occurs 0 times"),
        "{error}"
    );
    let out = std::fs::read(recording.path("out.jsonl")).unwrap();
    assert_eq!(out, b"of before", "half a trace is no trace");
}

#[test]
fn offsets_beyond_the_ids_are_refused() {
    for off in [[0u32, 2, 1], [0, 1, 4], [0, 4, 3]] {
        let recording = Recording::new();
        let mut npz = recording.create("topk.npz");
        strings(&mut npz, "id", &["a", "é"]);
        array(&mut npz, "topk", &[3, 1, 2], &[2u8, 0, 1, 0, 1, 2]);
        array(&mut npz, "off", &[3], &off);
        drop(npz);
        let error = recording.convert(false).unwrap_err();
        assert!(
            error.to_string().contains("does not ascend"),
            "{off:?}: {error}"
        );
    }
}

#[test]
fn a_missing_or_mistyped_array_is_named() {
    let recording = Recording::new();
    let mut npz = recording.create("requests.npz");
    strings(&mut npz, "id", &["a"]);
    drop(npz);
    let error = recording.convert(false).unwrap_err().to_string();
    assert!(
        error.contains("array `prefill_counts`: it is missing"),
        "{error}"
    );

    let mut npz = recording.create("requests.npz");
    array(&mut npz, "id", &[1], &[1u8]);
    drop(npz);
    let error = recording.convert(false).unwrap_err().to_string();
    assert!(error.contains("array `id`: its type is '|u1'"), "{error}");
}

#[test]
fn a_file_that_is_no_archive_is_named() {
    let recording = Recording::new();
    std::fs::write(recording.path("requests.npz"), b"no archive").unwrap();
    let error = recording.convert(false).unwrap_err().to_string();
    assert!(
        error.contains("requests.npz: opening the archive failed"),
        "{error}"
    );
}
