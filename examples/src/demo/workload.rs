//! One workload of the shipped traces: a blob from its calibration split, requests from the other.

use std::path::Path;
use std::sync::Arc;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use eldr_calibrator::fit::{Fitted, Options, fit};
use eldr_calibrator::requests::Requests;

use super::MODEL;
use crate::gateway::decode_cluster;
use crate::load::LoadRequest;
use crate::mock::Catalog;
use crate::records::{self, with_hint};

/// The workloads that the repository ships traces of.
pub const WORKLOADS: [&str; 2] = ["task", "language"];

/// Half-width of the band, as a cosine: the value that the paper found best overall.
const TAU: f32 = 0.1;

/// Everything a run needs of a workload.
#[derive(Debug)]
pub struct Workload {
    /// One of [`WORKLOADS`].
    pub name: &'static str,
    /// What the mock engine replays.
    pub catalog: Arc<Catalog>,
    /// What the load generator sends.
    pub requests: Vec<LoadRequest>,
    /// The blob as the filter's configuration takes it: base64.
    pub blob: String,
    /// How the fit went.
    pub fitted: Fitted,
}

impl Workload {
    /// Fits regions for `workers` decode workers and reads the requests to send, from the folder `data`.
    pub fn load(
        name: &'static str,
        data: &Path,
        workers: usize,
        seed: u64,
    ) -> anyhow::Result<Self> {
        let calibration = data.join(format!("{name}_calibration.jsonl.gz"));
        let requests = Requests::read(&[&calibration], || ()).map_err(|error| with_hint(&error))?;
        let options = Options {
            model: MODEL.into(),
            tau: TAU,
            seed,
            ..Options::new((0..workers).map(decode_cluster).collect())
        };
        let fitted = fit(&requests, &options, |_| ()).map_err(|error| with_hint(&error))?;
        let blob = STANDARD.encode(fitted.blob.to_bytes()?);

        let evaluation = data.join(format!("{name}_evaluation.jsonl.gz"));
        let records = records::read(evaluation)?;
        let catalog = Catalog::from_records(&records)?;
        Ok(Workload {
            name,
            catalog: Arc::new(catalog),
            requests: records.iter().map(LoadRequest::from_record).collect(),
            blob,
            fitted,
        })
    }
}
