//! `eldr report`.

use std::io::Write as _;
use std::path::PathBuf;

use clap::Args;

use crate::blob_file;
use crate::error::Error;
use crate::output::OutputFile;
use crate::place::{Cost, Devices, Objective, Traffic};
use crate::report::Report;
use crate::report::observe::Observed;

/// GPUs of a decode cluster where none are given: the most up to this that share the experts equally.
const GPUS_DEFAULT_MAX: usize = 8;

#[derive(Debug, Args)]
#[command(after_help = "Example:
  eldr report task.eldr --trace access.log -o report.html

The page shows the regions and what they are told apart by, a map of requests and centroids, and with
a trace how its traffic falls into the regions, how that differs from the fit, which layers a fit to it
would choose, and what placing experts for each region would gain. It is one file that needs neither
scripts nor network, light or dark as the reader prefers. The same input gives the same bytes.")]
pub(super) struct ReportArgs {
    /// Centroid blob to report on
    blob: PathBuf,
    /// Trace to look at with it; may be given several times
    #[arg(long = "trace", value_name = "TRACE")]
    traces: Vec<PathBuf>,
    /// HTML file to write
    #[arg(short, long, value_name = "HTML")]
    output: PathBuf,
    /// GPUs of each decode cluster, for the placement; by default the most up to 8 that share the
    /// experts equally
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    gpus: Option<u16>,
    /// Requests that a decode cluster runs at a time, for the placement
    #[arg(long, default_value_t = 32, value_name = "B", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    batch: u32,
    /// Experts that each token activates, where the trace does not say how many tokens it counts
    #[arg(long, value_name = "K", value_parser = clap::value_parser!(u32).range(1..))]
    top_k: Option<u32>,
    /// Seed of the sample of requests and of the pairs that are compared
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

impl ReportArgs {
    pub(super) fn run(&self) -> Result<String, Error> {
        let name = self.output.display().to_string();
        let failed = |doing: &str, error: std::io::Error| {
            let what = format!("{name}: {doing} the report failed: {error}");
            Error::new(
                what,
                "check that the folder exists, may be written to and has space",
            )
        };
        // First, so that a folder that is missing is told before the work and not after it.
        let mut output =
            OutputFile::create(&self.output).map_err(|error| failed("creating", error))?;
        let bytes = blob_file::read(&self.blob)?;
        let blob = blob_file::verify(&self.blob, &bytes)?;
        let experts = blob.transform.geometry().experts;
        let most = (1..=GPUS_DEFAULT_MAX)
            .rev()
            .find(|&gpus| experts.is_multiple_of(gpus));
        let gpus = self.gpus.map_or(most.unwrap_or(1), usize::from);
        if !experts.is_multiple_of(gpus) {
            return Err(Error::new(
                format!("--gpus {gpus}: {experts} experts do not share them equally"),
                format!(
                    "give a number that divides {experts}; `eldr place` can add redundant slots"
                ),
            ));
        }
        let devices = Devices {
            experts,
            gpus,
            redundant: 0,
            nodes: 1,
            groups: None,
        };
        let cost = Cost {
            objective: Objective::Distinct,
            batch: self.batch,
        };

        let bar = super::reading();
        let (mut observed, mut traffic) = (None, None);
        if !self.traces.is_empty() {
            let read = Observed::read(&self.traces, &blob, self.seed, || bar.inc(1));
            observed = Some(read?);
            // What only keeps experts from being placed is told where the placement would be.
            let read = Traffic::read(&self.traces, &blob, self.top_k, || {});
            traffic = Some(read.map_err(|error| format!("Not placed: {error}; {}.", error.hint())));
        }
        bar.finish_and_clear();

        let mut sources = vec![
            ("blob".to_owned(), self.blob.display().to_string()),
            ("sha256".to_owned(), blob_file::sha256(&bytes)),
        ];
        for trace in &self.traces {
            sources.push(("trace".to_owned(), trace.display().to_string()));
        }
        let report = Report {
            blob: &blob,
            sources: &sources,
            observed: observed.as_ref(),
            placement: traffic.as_ref().map(|traffic| match traffic {
                Ok(traffic) => Ok((traffic, devices, cost)),
                Err(why) => Err(why.clone()),
            }),
            seed: self.seed,
        };
        let html = report.html()?;
        output
            .write_all(html.as_bytes())
            .and_then(|()| output.commit())
            .map_err(|error| failed("writing", error))?;
        let requests = observed.map_or(String::new(), |observed| {
            format!(", {} requests", observed.requests)
        });
        Ok(format!(
            "{name}: {} regions{requests}, {} bytes\n",
            blob.regions.len(),
            html.len()
        ))
    }
}
