//! Recordings and centroids of other formats become ours, and the official artifact's centroids the other
//! way round.
//!
//! | from | to | |
//! |---|---|---|
//! | access logs of Envoy, JSON | trace | [`AccessLog`] |
//! | calibration of the official ELDR artifact, `.npz` | trace | [`Calibration`] |
//! | gate recordings of a small Qwen3-MoE model, `.npz` | trace | [`SmallMoe`] |
//! | decode recordings of GPT-OSS | trace | [`GptOss`] |
//! | centroids of the official ELDR artifact, JSON | blob, and back | [`centroids`] |
//!
//! All but the last stream: memory does not grow with the number of requests, apart from their ids.

mod access_log;
mod calibration;
pub mod centroids;
mod gpt_oss;
mod small_moe;

pub use access_log::{AccessLog, Converted, FIELDS, Mapping};
pub use calibration::Calibration;
pub use gpt_oss::GptOss;
pub use small_moe::SmallMoe;

use eldr_core::signature::{Encoding, Geometry, Signature};

use crate::error::Error;
use crate::npz::Rows;
use crate::trace::encode_gate;

/// Counts `[requests, layers, experts]`, read request by request.
#[derive(Debug)]
struct CountRows<'a, T: npyz::Deserialize> {
    rows: Rows<'a, T>,
    geometry: Geometry,
}

impl<'a, T: npyz::Deserialize + TryInto<u64> + Copy + std::fmt::Display> CountRows<'a, T> {
    fn new(rows: Rows<'a, T>, requests: usize) -> Result<Self, Error> {
        let &[n, layers, experts] = rows.shape() else {
            return Err(rows.invalid("it has not three axes [N, L, E]".into()));
        };
        if n != requests {
            return Err(rows.invalid(format!("it has {n} rows for {requests} ids")));
        }
        let geometry = Geometry::new(layers, experts);
        let geometry = geometry.map_err(|error| rows.invalid(error.to_string()))?;
        Ok(CountRows { rows, geometry })
    }

    /// The counts of the next request as a signature header value.
    fn next(&mut self, tokens: Option<u64>) -> Result<String, Error> {
        let counts = self.rows.take(self.geometry.counts())?;
        let saturated = counts.iter().map(|&count| {
            let whole: Result<u64, _> = count.try_into();
            let whole = whole.map_err(|_| self.rows.invalid(format!("it has a count of {count}")));
            whole.map(|count| u16::try_from(count).unwrap_or(u16::MAX))
        });
        let counts = saturated.collect::<Result<Vec<u16>, Error>>()?;
        Signature::dense(self.geometry, counts, tokens)
            .map(|signature| signature.encode(Encoding::Varint))
            .map_err(|error| self.rows.invalid(error.to_string()))
    }
}

/// Gate values `[requests, layers, experts]`, read request by request.
#[derive(Debug)]
struct GateRows<'a, T: npyz::Deserialize> {
    rows: Rows<'a, T>,
    geometry: Geometry,
}

impl<'a, T: npyz::Deserialize + Into<f32>> GateRows<'a, T> {
    fn new(rows: Rows<'a, T>, requests: usize, geometry: Geometry) -> Result<Self, Error> {
        rows.check(&[requests, geometry.layers, geometry.experts])?;
        Ok(GateRows { rows, geometry })
    }

    /// The next request's values, `times` each, as gate sums of a trace.
    fn next(&mut self, times: f32) -> Result<String, Error> {
        let values = self.rows.take(self.geometry.counts())?;
        let sums: Vec<f32> = values
            .into_iter()
            .map(|value| value.into() * times)
            .collect();
        match sums.iter().find(|sum| !(sum.is_finite() && **sum >= 0.0)) {
            Some(sum) => Err(self.rows.invalid(format!("it has a gate sum of {sum}"))),
            None => Ok(encode_gate(&sums)),
        }
    }
}
