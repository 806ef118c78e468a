//! Gate recordings of the small Qwen3-MoE model.

use std::path::Path;

use eldr_core::signature::Geometry;
use half::f16;

use super::{CountRows, GateRows};
use crate::error::Error;
use crate::npz::{Array, Npz, Rows};
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
/// | | `gate_prefill` | `[N, L, E]` f16 | mean over the prompt of the gate's full softmax; where gate sums are wanted |
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
    /// Write gate sums too.
    pub gate: bool,
}

impl SmallMoe<'_> {
    /// Writes the recording to `output`; returns how many requests that were.
    pub fn convert(&self, output: &mut Writer) -> Result<usize, Error> {
        let [mut prefill, mut decode] = [Npz::open(self.requests)?, Npz::open(self.requests)?];
        let mut gates = self.gate.then(|| Npz::open(self.requests)).transpose()?;
        let mut npz = Npz::open(self.requests)?;
        let ids: Array<String> = npz.array("id")?;
        let n = ids.data.len();
        let mut prefill = CountRows::new(prefill.rows::<u16>("prefill_counts")?, n)?;
        let mut decode = CountRows::new(decode.rows::<u16>("decode_counts")?, n)?;
        let geometry = prefill.geometry;
        let Geometry { layers, experts } = geometry;
        decode.rows.check(&[n, layers, experts])?;
        let mut gates = match &mut gates {
            Some(npz) => Some(GateRows::new(
                npz.rows::<f16>("gate_prefill")?,
                n,
                geometry,
            )?),
            None => None,
        };
        let domain: Array<String> = npz.array_of("domain", &[n])?;
        let in_mix: Array<bool> = npz.array_of("in_mix", &[n])?;
        let n_prompt: Array<u16> = npz.array_of("n_prompt", &[n])?;
        let n_decode: Array<u16> = npz.array_of("n_decode", &[n])?;
        let prefix_group: Array<i16> = npz.array_of("prefix_group", &[n])?;
        let prefix_len: Array<u16> = npz.array_of("prefix_len", &[n])?;
        let mut archive = self.decode_topk.map(Npz::open).transpose()?;
        let mut steps = match (&mut archive, self.decode_topk) {
            (Some(npz), Some(path)) => Some(Steps::open(npz, path, &ids.data, geometry)?),
            _ => None,
        };

        let mut written = 0;
        for i in 0..n {
            // Read even where the request is left out: the next one's rows come after these.
            let prompt_tokens = u64::from(n_prompt.data[i]);
            let prefill = prefill.next(Some(prompt_tokens))?;
            let decode = decode.next(None)?;
            let gate_prob = gates
                .as_mut()
                .map(|gates| gates.next(f32::from(n_prompt.data[i])))
                .transpose()?;
            let decode_topk = steps.as_mut().map(|steps| steps.next(i)).transpose()?;
            if self.mix_only && !in_mix.data[i] {
                continue;
            }
            let record = Record {
                id: ids.data[i].clone(),
                label: Some(domain.data[i].clone()),
                prompt_tokens: Some(prompt_tokens),
                decode_tokens: Some(u64::from(n_decode.data[i])),
                prefill: Some(prefill),
                decode: Some(decode),
                decode_topk,
                gate_prob,
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
}

/// The expert ids of all decode steps of one archive, read request by request.
struct Steps<'a> {
    geometry: Geometry,
    k: usize,
    topk: Rows<'a, u8>,
    off: Vec<u32>,
}

impl<'a> Steps<'a> {
    fn open(
        npz: &'a mut Npz,
        path: &Path,
        ids: &[String],
        geometry: Geometry,
    ) -> Result<Self, Error> {
        let own: Array<String> = npz.array("id")?;
        if own.data != ids {
            let file = path.display();
            return Err(Error::new(
                format!("{file}: array `id`: not the requests of the archive with the counts"),
                "give the two archives of the same workload and split",
            ));
        }
        let off: Array<u32> = npz.array_of("off", &[ids.len() + 1])?;
        let topk: Rows<'a, u8> = npz.rows("topk")?;
        let last = off.data.last().map_or(0, |&last| last as usize);
        let fits = match *topk.shape() {
            [steps, layers, k] => {
                (steps, layers) == (last, geometry.layers) && k <= geometry.experts
            }
            _ => false,
        };
        if !fits || !off.data.is_sorted() || off.data.first() != Some(&0) {
            let (shape, layers) = (topk.shape(), geometry.layers);
            let what = format!(
                "shape {shape:?} does not fit [{last}, {layers}, k] or `off` does not ascend from 0"
            );
            return Err(topk.invalid(what));
        }
        Ok(Steps {
            geometry,
            k: topk.shape()[2],
            topk,
            off: off.data,
        })
    }

    fn next(&mut self, request: usize) -> Result<String, Error> {
        let [start, end] = [0, 1].map(|next| self.off[request + next] as usize);
        let ids = self
            .topk
            .take((end - start) * self.geometry.layers * self.k)?;
        let ids = ids.into_iter().map(u16::from).collect();
        TopK::new(self.geometry, self.k, ids)
            .map(|topk| topk.encode())
            .map_err(|what| self.topk.invalid(what))
    }
}

#[cfg(test)]
mod tests;
