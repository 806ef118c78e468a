//! Calibration archives of the official ELDR artifact.

use std::path::Path;

use serde::Deserialize;

use super::{CountRows, GateRows};
use crate::error::Error;
use crate::npz::{Array, Npz};
use crate::trace::{Record, Writer};

/// What the archive says that it is.
const FORMAT: &str = "eldr-calibration-v1";

/// A calibration archive of the official artifact (repository casys-kaist/ELDR), format
/// `eldr-calibration-v1`: NumPy `.npz` with these arrays, for N requests.
///
/// | array | shape | meaning |
/// |---|---|---|
/// | `metadata` | `[]` str | JSON with `format` |
/// | `request_ids` | `[N]` str | names |
/// | `prefill_counts`, `decode_counts` | `[N, L, E]` i32 | tokens routed to each expert |
/// | `prompt_tokens`, `decode_tokens` | `[N]` i64 | tokens |
/// | `gate_probabilities` | `[N, L, E]` f32 | sums over the prompt of the gate's full softmax; where gate sums are wanted |
#[derive(Clone, Copy, Debug)]
pub struct Calibration<'a> {
    /// The archive.
    pub archive: &'a Path,
    /// Write gate sums too.
    pub gate: bool,
}

#[derive(Deserialize)]
struct Metadata {
    format: Option<String>,
}

impl Calibration<'_> {
    /// Writes the calibration to `output`; returns how many requests that were.
    pub fn convert(&self, output: &mut Writer) -> Result<usize, Error> {
        let [mut prefill, mut decode] = [Npz::open(self.archive)?, Npz::open(self.archive)?];
        let mut gates = self.gate.then(|| Npz::open(self.archive)).transpose()?;
        let mut npz = Npz::open(self.archive)?;
        self.check_format(&npz.array::<String>("metadata")?)?;
        let ids: Array<String> = npz.array("request_ids")?;
        let n = ids.data.len();
        let mut prefill = CountRows::new(prefill.rows::<i32>("prefill_counts")?, n)?;
        let mut decode = CountRows::new(decode.rows::<i32>("decode_counts")?, n)?;
        let geometry = prefill.geometry;
        decode.rows.check(&[n, geometry.layers, geometry.experts])?;
        let mut gates = match &mut gates {
            Some(npz) => Some(GateRows::new(
                npz.rows::<f32>("gate_probabilities")?,
                n,
                geometry,
            )?),
            None => None,
        };
        let prompt_tokens: Array<i64> = npz.array_of("prompt_tokens", &[n])?;
        let decode_tokens: Array<i64> = npz.array_of("decode_tokens", &[n])?;
        let tokens = |array: &str, of: &Array<i64>, request: usize| {
            u64::try_from(of.data[request]).map_err(|_| {
                let (id, found) = (&ids.data[request], of.data[request]);
                self.invalid(&format!("array `{array}`: request {id} has {found} tokens"))
            })
        };
        for (i, id) in ids.data.iter().enumerate() {
            let prompt_tokens = tokens("prompt_tokens", &prompt_tokens, i)?;
            output.write(&Record {
                id: id.clone(),
                prompt_tokens: Some(prompt_tokens),
                decode_tokens: Some(tokens("decode_tokens", &decode_tokens, i)?),
                prefill: Some(prefill.next(Some(prompt_tokens))?),
                decode: Some(decode.next(None)?),
                gate_prob: gates.as_mut().map(|gates| gates.next(1.0)).transpose()?,
                ..Record::default()
            })?;
        }
        Ok(n)
    }

    fn check_format(&self, metadata: &Array<String>) -> Result<(), Error> {
        let text = metadata.data.first().map_or("", String::as_str);
        let found = serde_json::from_str(text).map_or(None, |metadata: Metadata| metadata.format);
        match found.as_deref() {
            Some(FORMAT) => Ok(()),
            Some(other) => Err(self.invalid(&format!("its format is {other:?}, not {FORMAT:?}"))),
            None => {
                let what =
                    format!("array `metadata`: it is no JSON object with `format`: {text:?}");
                Err(self.invalid(&what))
            }
        }
    }

    fn invalid(&self, what: &str) -> Error {
        let file = self.archive.display();
        let hint = "give a calibration archive that the official artifact wrote";
        Error::new(format!("{file}: {what}"), hint)
    }
}
