//! Recordings of other formats become traces.

use std::path::Path;

use eldr_core::signature::{Encoding, Geometry, Signature};

use crate::error::Error;
use crate::npz::{Array, Npz};
use crate::trace::{Prefix, Record, TopK, Writer};

/// Gate recordings of the small Qwen3-MoE model behind the traces in `examples/data/small-moe`.
///
/// The arrays that are read, for N requests of a model with L layers and E experts:
///
/// | archive | array | shape | meaning |
/// |---|---|---|---|
/// | `requests` | `id`, `domain` | `[N]` str | name, kind of text |
/// | | `in_mix` | `[N]` bool | member of the unequal mix of domains |
/// | | `n_prompt`, `n_decode` | `[N]` u16 | tokens |
/// | | `prefix_group`, `prefix_len` | `[N]` i16, u16 | shared prefix; group −1 means none |
/// | | `prefill_counts`, `decode_counts` | `[N, L, E]` u16 | tokens routed to each expert |
/// | `decode_topk` | `id` | `[N]` str | the same requests in the same order |
/// | | `topk` | `[Σ n_decode, L, k]` u8 | expert ids of every decode step |
/// | | `off` | `[N + 1]` u32 | where each request's steps begin |
///
/// Token ids and names of documents are left behind: a trace holds counts and expert ids only.
#[derive(Clone, Copy, Debug)]
pub struct SmallMoe<'a> {
    /// The archive with counts.
    pub requests: &'a Path,
    /// The archive with the experts of every decode step, where exact replay is wanted.
    pub decode_topk: Option<&'a Path>,
    /// Keep only the requests of the unequal mix.
    pub mix_only: bool,
}

impl SmallMoe<'_> {
    /// Writes the recording to `output`; returns how many requests that were.
    pub fn convert(&self, output: &mut Writer) -> Result<usize, Error> {
        let mut npz = Npz::open(self.requests)?;
        let ids: Array<String> = npz.array("id")?;
        let n = ids.data.len();
        let prefill: Array<u16> = npz.array("prefill_counts")?;
        let &[rows, layers, experts] = &prefill.shape[..] else {
            return Err(self.invalid("prefill_counts", "it has not three axes [N, L, E]"));
        };
        if rows != n {
            return Err(self.invalid("prefill_counts", "it has not one row per id"));
        }
        let geometry = Geometry::new(layers, experts)
            .map_err(|error| self.invalid("prefill_counts", &error.to_string()))?;
        let decode: Array<u16> = npz.array_of("decode_counts", &[n, layers, experts])?;
        let domain: Array<String> = npz.array_of("domain", &[n])?;
        let in_mix: Array<bool> = npz.array_of("in_mix", &[n])?;
        let n_prompt: Array<u16> = npz.array_of("n_prompt", &[n])?;
        let n_decode: Array<u16> = npz.array_of("n_decode", &[n])?;
        let prefix_group: Array<i16> = npz.array_of("prefix_group", &[n])?;
        let prefix_len: Array<u16> = npz.array_of("prefix_len", &[n])?;
        let steps = self
            .decode_topk
            .map(|path| Steps::read(path, &ids.data, geometry));
        let steps = steps.transpose()?;

        let mut written = 0;
        for i in (0..n).filter(|&i| in_mix.data[i] || !self.mix_only) {
            let header = |counts: &[u16], tokens| {
                Signature::dense(geometry, counts.to_vec(), tokens)
                    .map(|signature| signature.encode(Encoding::Varint))
                    .map_err(|error| self.invalid("prefill_counts", &error.to_string()))
            };
            let prompt_tokens = u64::from(n_prompt.data[i]);
            let record = Record {
                id: ids.data[i].clone(),
                label: Some(domain.data[i].clone()),
                prompt_tokens: Some(prompt_tokens),
                decode_tokens: Some(u64::from(n_decode.data[i])),
                prefill: Some(header(prefill.row(i), Some(prompt_tokens))?),
                decode: Some(header(decode.row(i), None)?),
                decode_topk: steps.as_ref().map(|steps| steps.encode(i)).transpose()?,
                prefix: (prefix_group.data[i] >= 0).then(|| Prefix {
                    group: prefix_group.data[i].to_string(),
                    tokens: u64::from(prefix_len.data[i]),
                }),
                ..Record::default()
            };
            // The reader's checks: steps, tokens and counts agree.
            record.topk()?;
            output.write(&record)?;
            written += 1;
        }
        Ok(written)
    }

    fn invalid(&self, array: &str, what: &str) -> Error {
        let file = self.requests.display();
        let hint = "check that the archive is a recording of the small MoE";
        Error::new(format!("{file}: array `{array}`: {what}"), hint)
    }
}

/// The expert ids of all decode steps of one archive.
struct Steps {
    file: String,
    geometry: Geometry,
    topk: Array<u8>,
    off: Vec<u32>,
}

impl Steps {
    fn read(path: &Path, ids: &[String], geometry: Geometry) -> Result<Self, Error> {
        let mut npz = Npz::open(path)?;
        let file = path.display().to_string();
        let own: Array<String> = npz.array("id")?;
        if own.data != ids {
            return Err(Error::new(
                format!("{file}: array `id`: not the requests of the archive with the counts"),
                "give the two archives of the same workload and split",
            ));
        }
        let topk: Array<u8> = npz.array("topk")?;
        let off: Array<u32> = npz.array_of("off", &[ids.len() + 1])?;
        let steps = Steps {
            file,
            geometry,
            topk,
            off: off.data,
        };
        let ascending = steps.off.is_sorted();
        let last = steps.off.last().map_or(0, |&last| last as usize);
        if steps.topk.shape.len() != 3
            || steps.topk.shape[1] != geometry.layers
            || !ascending
            || last != steps.topk.shape[0]
        {
            let shape = &steps.topk.shape;
            return Err(steps.invalid(&format!(
                "shape {shape:?} does not fit [{last}, {}, k] or `off` does not ascend",
                geometry.layers
            )));
        }
        Ok(steps)
    }

    fn encode(&self, request: usize) -> Result<String, Error> {
        let row = self.topk.shape[1] * self.topk.shape[2];
        let [start, end] = [0, 1].map(|next| self.off[request + next] as usize * row);
        let ids = self.topk.data[start..end]
            .iter()
            .map(|&id| u16::from(id))
            .collect();
        TopK::new(self.geometry, self.topk.shape[2], ids)
            .map(|topk| topk.encode())
            .map_err(|what| self.invalid(&what))
    }

    fn invalid(&self, what: &str) -> Error {
        let hint = "check that the archive is a recording of the small MoE";
        Error::new(format!("{}: array `topk`: {what}", self.file), hint)
    }
}

#[cfg(test)]
mod tests;
